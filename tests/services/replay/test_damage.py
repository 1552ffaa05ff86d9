"""Bits that change in the file of a replay buffer: what is served is what was stored, or an error
that names the file.
"""

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.clients.replay import ReplayClient
from common.errors import ConfigError, ServiceError
from common.process.storage import StorageFailed
from common.settings.sections import ReplaySection
from common.wire.schemas import PriorityUpdate, SampleRequest, TakeRequest
from services.replay.app import create_replay_app
from services.replay.buffer import Experience, ReplayBuffer
from tests.support.batches.replay_groups import MakeGroup
from tests.support.errors import raises
from tests.support.services.damage import check_flipped_bits

GROUPS = 12
SAMPLED = SampleRequest(count=4, request_id="sampled", step=1, seed=7)


@pytest.fixture
def stored(tmp_path: Path, make_group: MakeGroup) -> Path:
    """Returns the file of a store with fresh, leased and consumed groups, draws and experiences."""
    path = tmp_path / "stored" / "replay.db"
    buffer = ReplayBuffer(ReplaySection(capacity=1000), path)
    for i in range(GROUPS):
        buffer.add([make_group(f"group-{i}", i // 4, i, rewards=(0.25, 1.0), tokens=40)])
    buffer.take(TakeRequest(count=6, request_id="run-take-1"))
    buffer.store.ack([f"group-{i}" for i in range(6)])
    ids = [f"group-{i}" for i in range(6)]
    buffer.set_priorities(PriorityUpdate(ids=ids, priorities=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    buffer.sample(SAMPLED)
    buffer.take(TakeRequest(count=2, request_id="run-take-2"))
    buffer.add([make_group("too old", 0, 90)])
    buffer.take(TakeRequest(count=50, request_id="run-take-3", min_version=1))
    buffer.add_experiences([Experience(prompt="1 + 1?", response="2", reward=1.0)])
    buffer.close()
    return path


def served(path: Path, make_group: MakeGroup) -> dict[str, Any]:
    """Returns what a store answers to every call by which its content reaches a run or a reader."""
    buffer = ReplayBuffer(ReplaySection(capacity=1000), path)
    try:
        return {
            "leased": buffer.take(TakeRequest(count=2, request_id="run-take-2")),
            "evicted": buffer.take(TakeRequest(count=50, request_id="run-take-3")),
            "fresh": buffer.take(TakeRequest(count=4, request_id="run-take-4")),
            "drawn again": _drawn(buffer, SAMPLED),
            "drawn": _drawn(buffer, SampleRequest(count=5, seed=3)),
            "groups": [buffer.store.blob(f"group-{i}") for i in range(GROUPS)],
            "listing": buffer.store.listing(100, 0),
            "experiences": buffer.sample_experiences(100, prioritized=True, seed=5),
            "stats": buffer.stats(),
            "removed": buffer.add([make_group("too old", 0, 90)]),
            "acknowledged": buffer.store.ack([f"group-{i}" for i in range(GROUPS)]),
        }
    finally:
        buffer.close()


def _drawn(buffer: ReplayBuffer, request: SampleRequest) -> tuple[list[bytes], list[float]]:
    drawn = buffer.sample(request)
    return drawn.blobs, drawn.weights.tolist()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("seed", "flips"), [(0, 150), pytest.param(1, 500, marks=pytest.mark.slow)]
)
def test_a_flipped_bit_anywhere_changes_nothing_that_is_served_or_is_named(
    stored: Path, make_group: MakeGroup, seed: int, flips: int
) -> None:
    def served_from(directory: Path) -> dict[str, Any]:
        return served(directory / "replay.db", make_group)

    check_flipped_bits(stored.parent, "replay.db", served_from, flips=flips, seed=seed)


CHANGES = [
    "UPDATE groups SET id = 'group-00' WHERE id = 'group-0'",
    "UPDATE groups SET version = version - 1 WHERE id = 'group-9'",
    "UPDATE groups SET position = 90 WHERE id = 'group-9'",
    "UPDATE groups SET rewards = zeroblob(8) WHERE id = 'group-0'",
    "UPDATE groups SET reward_sum = -reward_sum WHERE id = 'group-0'",
    "UPDATE groups SET state = 'fresh' WHERE id = 'group-0'",
    "UPDATE groups SET request_id = 'run-take-9' WHERE id = 'group-6'",
    "UPDATE groups SET lease_until = 1e12 WHERE id = 'group-6'",
    "UPDATE groups SET priority = 1e9 WHERE id = 'group-0'",
    "UPDATE groups SET priority = NULL WHERE id = 'group-0'",
    "UPDATE groups SET times_sampled = 0 WHERE times_sampled",
    "UPDATE blobs SET data = (SELECT data FROM blobs WHERE key = 2) WHERE key = 1",
    "UPDATE blobs SET data = 17 WHERE key = 1",
    "DELETE FROM blobs WHERE key = 1",
    "UPDATE experiences SET reward = -1",
    "UPDATE answers SET answer = replace(answer, '1.', '9.') WHERE call = 'sample'",
    "UPDATE counters SET value = 100 WHERE name = 'max_priority'",
    "UPDATE life SET changes = 100",
    "UPDATE totals SET groups = 3 WHERE state = 'fresh'",
    "DROP TRIGGER group_in",
]
"""Changes of what is stored that SQLite accepts."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_field_is_named_when_it_is_read(
    change: str, stored: Path, make_group: MakeGroup
) -> None:
    db = sqlite3.connect(stored)
    assert db.execute(change).rowcount or "DROP" in change
    db.commit()
    db.close()
    with pytest.raises((ConfigError, StorageFailed)) as error:
        served(stored, make_group)
    assert error.value.value == str(stored)
    assert error.value.remedy is not None
    assert "restore the file from a copy" in error.value.remedy


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/groups/take", {"count": 3, "request_id": "r"}),
        ("POST", "/groups/sample", {"count": 6}),
        ("GET", "/groups/group-3", None),
        ("GET", "/groups/group-9", None),
        ("POST", "/sample", {"batch_size": 100}),
    ],
)
async def test_a_reward_that_changes_under_the_running_service_ends_the_call(
    stored: Path, method: str, path: str, body: dict[str, Any] | None
) -> None:
    state = stored.parent.parent
    shutil.move(stored.parent, state / "replay")
    stored = state / "replay" / "replay.db"
    app = create_replay_app(ReplaySection(), state)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        ReplayClient(
            "replay-buffer", "http://replay", transport=transport, deadline_s=30
        ) as client,
    ):
        app.state.worker.buffer.store.db.execute("PRAGMA shrink_memory")  # reads the file again
        content = stored.read_bytes()
        one = b"\xa6reward\xcb" + bytes.fromhex("3ff0000000000000")
        assert content.count(one) == GROUPS
        stored.write_bytes(content.replace(one, one[:-8] + bytes.fromhex("bff0000000000000")))
        with raises(ServiceError, status=500, code="damaged", value=str(stored)) as error:
            await client.request(method, path, json=body)
    assert "restore the file from a copy" in str(error.value.remedy)
