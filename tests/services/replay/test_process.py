"""The real process: killed at any moment, stopped, and started on a damaged file."""

import asyncio
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.clients.base import wait_healthy
from common.clients.replay import ReplayClient
from common.errors import ConfigError
from common.settings.sections import ReplaySection
from common.wire.schemas import TakeRequest
from services.replay.buffer import ReplayBuffer
from tests.support.batches.replay_groups import MakeGroup
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.processes.load import held
from tests.support.processes.ports import free_port

pytestmark = pytest.mark.integration

Start = Callable[[], subprocess.Popen[bytes]]


def command(port: int, state_dir: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "services.replay",
        "--state_dir",
        str(state_dir),
        "--replay.port",
        str(port),
    ]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(port: int, tmp_path: Path) -> Iterator[Start]:
    """Starts the service; ends every process it started."""
    started: list[subprocess.Popen[bytes]] = []
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SKYPILOT_", "RLHF_", "JOBGROUP_"))
    }

    def begin() -> subprocess.Popen[bytes]:
        with (tmp_path / "output.log").open("ab") as log:
            started.append(
                subprocess.Popen(
                    command(port, tmp_path), cwd=ROOT, env=environment, stdout=log, stderr=log
                )
            )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def client_of(port: int) -> ReplayClient:
    return ReplayClient("replay-buffer", f"http://127.0.0.1:{port}", deadline_s=400)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_kill_9_loses_nothing_acknowledged(
    start: Start, port: int, make_group: MakeGroup, seed: int
) -> None:
    chance, acknowledged, done = random.Random(seed), [], False

    async def adder(name: str, client: ReplayClient) -> None:
        number = 0
        while not done:
            ids = [f"{name}-{number}-{i}" for i in range(3)]
            await client.add(
                [make_group(each, tokens=200) for each in ids]
            )  # the client retries through the restart
            acknowledged.extend(ids)
            number += 1

    process = start()
    async with client_of(port) as client:
        await wait_healthy([client], 400)
        adders = [asyncio.create_task(adder(name, client)) for name in "abcd"]
        taken = []
        for round_number in range(3):
            await asyncio.sleep(chance.uniform(0.05, 0.6))
            request = TakeRequest(count=2, request_id=f"take {round_number}", wait_s=30)
            before = [group.id for group in (await client.take(request)).groups]
            process.kill()
            process.wait()
            process = start()
            assert [group.id for group in (await client.take(request)).groups] == before, (
                "the lease survives"
            )
            taken += before
        async with asyncio.timeout(400):
            while len(acknowledged) <= 20:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        done = True
        await asyncio.gather(*adders)
        fresh = (await client.stats())["fresh"]
        everything = taken + [
            group.id
            for group in (await client.take(TakeRequest(count=fresh, request_id="all"))).groups
        ]
        assert len(everything) == len(set(everything)), "every group is handed out once"
        assert set(everything) == set(acknowledged)
        assert len(acknowledged) > 20


async def test_counters_priorities_and_consumed_groups_survive(
    start: Start, port: int, make_group: MakeGroup
) -> None:
    process = start()
    async with client_of(port) as client:
        await client.add([make_group("old", 0), make_group("a", 3), make_group("a", 3)])
        assert (await client.take(TakeRequest(count=1, request_id="r", min_version=1))).evicted == 1
        await client.set_priorities({"a": 7.0})
        await client.ack(["a"])
        before = await client.stats()
        assert (before["evicted"], before["duplicates"], before["max_priority"]) == (1, 1, 7.0)
        process.kill()
        process.wait()
        start()
        assert await client.stats() == before
        listed = (await client.request("GET", "/groups")).json()["groups"]
        assert [(item["id"], item["state"], item["priority"]) for item in listed] == [
            ("a", "consumed", 7.0)
        ]


async def test_a_client_that_disconnects_takes_no_groups_with_it(
    start: Start, port: int, make_group: MakeGroup
) -> None:
    start()
    async with client_of(port) as client:
        await wait_healthy([client], 400)
        body = TakeRequest(count=1, request_id="gone", wait_s=60).model_dump()
        gone = asyncio.create_task(client.http.post("/groups/take", json=body, timeout=400))
        await held(client, "requests_in_progress", 1)
        gone.cancel()
        await held(client, "requests_in_progress", 0)
        await client.add([make_group("a")])
        taken = (await client.take(TakeRequest(count=1, request_id="here", wait_s=30))).groups
        assert [group.id for group in taken] == ["a"]


async def test_sigterm_ends_a_waiting_take_and_the_process(
    start: Start, port: int, make_group: MakeGroup, tmp_path: Path
) -> None:
    process = start()
    async with client_of(port) as client:
        await wait_healthy([client], 400)
        await client.add([make_group("a")])
        body = TakeRequest(count=2, request_id="r", wait_s=60).model_dump()
        waiting = asyncio.create_task(client.http.post("/groups/take", json=body, timeout=400))
        await held(client, "requests_in_progress", 1)
        process.send_signal(signal.SIGTERM)
        assert (await asyncio.wait_for(waiting, 400)).status_code == 503
        assert await asyncio.to_thread(process.wait, 400) in (0, -signal.SIGTERM)
    assert not (tmp_path / "replay" / "replay.db-wal").exists(), "everything is in the one file"


def stored(path: Path, make_group: MakeGroup) -> None:
    buffer = ReplayBuffer(ReplaySection(), path)
    buffer.add([make_group(f"g{i}", tokens=500) for i in range(20)])
    buffer.close()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)


def scribble(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(random.Random(0).randbytes(8192))


def lose(path: Path) -> None:
    path.with_name("replay.db-wal").write_bytes(b"x")
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, empty, overwrite, scribble, lose])
def test_a_damaged_store_is_named_at_start(
    damage: Callable[[Path], None], tmp_path: Path, make_group: MakeGroup
) -> None:
    path = tmp_path / "replay" / "replay.db"
    stored(path, make_group)
    damage(path)
    with pytest.raises(ConfigError) as error:
        ReplayBuffer(ReplaySection(), path)
    assert (error.value.code, error.value.field) == ("damaged", "state_dir")
    assert error.value.value == str(path)
    assert error.value.message.isprintable(), "one line"


def test_a_store_of_another_layout_is_refused(tmp_path: Path, make_group: MakeGroup) -> None:
    path = tmp_path / "replay" / "replay.db"
    stored(path, make_group)
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 2")
    db.close()
    with raises(ConfigError, code="damaged", field="state_dir", value=str(path)):
        ReplayBuffer(ReplaySection(), path)


def test_a_crash_while_the_file_is_made_leaves_no_damaged_store(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    path = tmp_path / "replay" / "replay.db"
    path.parent.mkdir()
    path.with_name("replay.db.new").write_bytes(b"half")
    stored(path, make_group)
    assert not path.with_name("replay.db.new").exists()
    buffer = ReplayBuffer(ReplaySection(), path)
    assert buffer.stats()["groups"] == 20
    buffer.close()


def test_a_store_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "replay" / "replay.db"
    first = ReplayBuffer(ReplaySection(), path)
    with raises(ConfigError, field="state_dir", value=str(path)) as error:
        ReplayBuffer(ReplaySection(), path)
    assert "end the other process" in str(error.value.remedy)
    first.close()


def test_process_exits_with_2_on_a_damaged_store(
    port: int, tmp_path: Path, make_group: MakeGroup
) -> None:
    path = tmp_path / "replay" / "replay.db"
    stored(path, make_group)
    copy = shutil.copy(path, tmp_path / "copy.db")
    truncate(path)
    ended = subprocess.run(
        command(port, tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 2
    assert str(path) in ended.stderr
    assert "remedy" in ended.stderr
    shutil.copy(copy, path)
    buffer = ReplayBuffer(ReplaySection(), path)
    assert buffer.stats()["fresh"] == 20
    buffer.close()


def killed(place: Path, make_group: MakeGroup) -> Path:
    """Leaves a store as a kill does: 160 groups were acknowledged, most of them only in the log."""
    buffer = ReplayBuffer(ReplaySection(), place / "living" / "replay.db")
    for i in range(160):
        buffer.add([make_group(f"g{i}", tokens=50)])
    shutil.copytree(place / "living", place / "dead")
    buffer.close()
    return place / "dead" / "replay.db"


def flip_a_byte(log: Path) -> None:
    with log.open("r+b") as file:
        file.seek(log.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("damage", [flip_a_byte, truncate, empty, Path.unlink])
def test_changes_lost_with_a_damaged_log_are_counted_and_stop_the_start(
    damage: Callable[[Path], None], tmp_path: Path, make_group: MakeGroup
) -> None:
    path = killed(tmp_path, make_group)
    damage(path.with_name("replay.db-wal"))
    for _ in range(2):  # a second start reports it again
        with raises(ConfigError, code="damaged", field="state_dir", value=str(path)) as error:
            ReplayBuffer(ReplaySection(), path)
    path.with_name("replay.db.count").unlink()  # the remedy in the error
    buffer = ReplayBuffer(ReplaySection(), path)
    assert f"with {160 - buffer.stats()['fresh']} of 160 groups" in str(error.value)
    buffer.add([make_group("new")])
    buffer.close()
    ReplayBuffer(ReplaySection(), path).close()


def test_kill_loses_no_count_and_a_removed_store_is_not_missed(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    path = killed(tmp_path, make_group)
    buffer = ReplayBuffer(ReplaySection(), path)
    assert buffer.stats()["fresh"] == 160
    buffer.close()
    path.unlink()
    buffer = ReplayBuffer(ReplaySection(), path)
    assert buffer.stats()["added"] == 0
    buffer.close()
