"""A disk that is really full: the error is named, stored data survives, and the service resumes
once there is room."""

import asyncio
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from rich.console import Console

from common.clients.data import DataClient
from common.clients.replay import ReplayClient
from common.errors import ServiceError
from common.process.logs import setup_logging
from common.process.metrics import Metrics
from common.process.storage import StorageFailed
from common.settings.config import Config
from common.settings.sections import ReplaySection
from common.wire.schemas import Completion, Group, Prompt, TakeRequest, WeightManifest
from learning.ranks import Ranks
from learning.saving import Snapshot
from services.data.app import create_data_app
from services.replay.app import create_replay_app
from services.replay.buffer import ReplayBuffer
from services.rollout.weights.store import WeightStore
from services.rollout.weights.trainer_client import TrainerClient
from tests.support.errors import raises
from trainer.backends.server import create_trainer_app
from trainer.observe.run_dir import Recorder, read_lines
from trainer.policy.checkpoint import CheckpointFailed, Checkpoints, RunState, newest
from trainer.weights.board import WeightBoard
from trainer.weights.versions import write_version

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small disk"),
]


class Disk:
    """A 4 MB file system in memory."""

    def __init__(self, path: Path) -> None:
        self.path, self._ballast = path, path / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue

    def free(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("no file system may be mounted here")
    yield Disk(place)
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def group(name: str, tokens: int = 3) -> Group:
    ids, logprobs = np.arange(tokens, dtype=np.int32), np.full(tokens, -1.0, np.float32)
    completion = Completion(
        token_ids=ids,
        logprobs=logprobs,
        text="answer",
        finish_reason="stop",
        weight_versions=[(0, 0, tokens)],
        reward=1.0,
        correct=True,
    )
    return Group(
        id=name,
        prompt_id="p",
        prompt="1 + 1?",
        ground_truth="2",
        prompt_token_ids=np.array([1, 2], np.int32),
        completions=[completion],
    )


async def test_the_replay_buffer(disk: Disk) -> None:
    app = create_replay_app(ReplaySection(), disk.path)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        ReplayClient("replay-buffer", "http://r", transport=transport) as client,
    ):
        await client.add([group("a")])
        disk.fill()
        with pytest.raises(ServiceError, match="HTTP 507") as caught:
            await refused(client)
        for text in ("nothing was changed", "replay.db", "free disk space"):
            assert text in str(caught.value)
        assert (await client.stats())["groups"] == 1
        adding = asyncio.create_task(
            client.add([group("big", 100_000)])
        )  # the client keeps retrying
        await asyncio.sleep(0.3)
        assert not adding.done()
        disk.free()
        await asyncio.wait_for(adding, 60)
        taken = await client.take(TakeRequest(count=2, request_id="r"))
        assert {each.id for each in taken.groups} == {"a", "big"}
    again = create_replay_app(ReplaySection(), disk.path)
    async with again.router.lifespan_context(again):
        assert again.state.worker.buffer.stats()["groups"] == 2


async def test_a_replay_buffer_starts_on_a_full_disk_while_leases_are_out(disk: Disk) -> None:
    path = disk.path / "replay" / "replay.db"
    before = ReplayBuffer(ReplaySection(), path)
    before.add([group("a"), group("b")])
    before.take(TakeRequest(count=1, request_id="r"))
    before.close()
    disk.fill()
    app = create_replay_app(ReplaySection(), disk.path)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        ReplayClient("replay-buffer", "http://r", transport=transport) as client,
    ):
        stats = await client.stats()
        assert (stats["fresh"], stats["leased"]) == (1, 1)
        assert (await client.group("a")).id == "a"
        with pytest.raises(ServiceError, match=r"HTTP 507.*nothing was changed.*free disk space"):
            await refused(client)
        disk.free()
        assert (await client.stats())["leased"] == 1
        await client.add([group("c")])
        taken = await client.take(TakeRequest(count=2, request_id="other"))
        assert {each.id for each in taken.groups} == {"b", "c"}


async def refused(client: ReplayClient) -> None:
    deadline_s, client.deadline_s = client.deadline_s, 1
    try:
        await client.add([group("big", 100_000)])
    finally:
        client.deadline_s = deadline_s


async def test_the_cursor_of_the_prompts(disk: Disk) -> None:
    train = [Prompt(id=f"t/{i}", prompt=f"{i}", ground_truth=f"{i}") for i in range(3000)]
    app = create_data_app(Config(state_dir=disk.path), train, [])
    async with DataClient(
        "data-server", "http://d", transport=httpx.ASGITransport(app), deadline_s=60
    ) as client:
        served = [prompt.id for prompt in (await client.prompts(2, "first")).prompts]
        disk.fill()
        number = 0
        while True:  # the log still has some free space
            params = {"batch_size": "1", "request_id": f"{number}-{'x' * 100}"}
            response = await client.http.get("/prompts", params=params)
            if not response.is_success:
                break
            served += [prompt["id"] for prompt in response.json()["prompts"]]
            number += 1
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (507, "disk_full")
        assert (error["field"], "stream.db" in error["value"]) == ("state_dir", True)
        assert "nothing was changed" in error["message"]
        disk.free()
        served += [prompt.id for prompt in (await client.prompts(5, "last")).prompts]
    assert len(served) == len(set(served))
    again = create_data_app(Config(state_dir=disk.path), train, [])
    async with DataClient(
        "data-server", "http://d", transport=httpx.ASGITransport(again)
    ) as client:
        assert (await client.prompts(1, "more")).position == len(served)


def test_weights_of_the_trainer(disk: Disk) -> None:
    weights = {"w": torch.zeros(1000, 500)}  # 2 MB
    written = write_version(weights.items(), [], disk.path, "run", 1)
    with raises(StorageFailed, code="disk_full") as caught:
        write_version({"w": torch.zeros(3000, 500)}.items(), [], disk.path, "run", 2)
    assert (caught.value.code, caught.value.field) == ("disk_full", "trainer.run_dir")
    assert [path.name for path in disk.path.iterdir()] == [
        "v000001"
    ]  # no partial file of version 2 fills the disk
    assert (disk.path / "v000001" / written.files[0].name).stat().st_size == written.files[0].size
    write_version({"w": torch.zeros(100, 500)}.items(), [], disk.path, "run", 2)


async def test_weights_of_a_rollout_node(disk: Disk, tmp_path: Path) -> None:
    board = WeightBoard(tmp_path / "published")
    transport = httpx.ASGITransport(create_trainer_app(board, Metrics("trainer")))

    def publish(version: int, rows: int) -> WeightManifest:
        weights = {"w": torch.full((rows, 500), float(version))}
        made = write_version(weights.items(), [], board.directory, "run", version)
        board.announce(made)
        return made

    async with TrainerClient("trainer", "http://t", transport=transport) as client:
        store = WeightStore(disk.path / "node", client)
        first = await store.fetch(publish(1, 1000))
        with raises(StorageFailed, code="disk_full") as caught:
            await store.fetch(publish(2, 3000))
        assert (caught.value.code, caught.value.value) == ("disk_full", str(store.directory))
        assert list(store.directory.iterdir()) == [first]
        third = await store.fetch(publish(3, 200))
        assert sorted(path.name for path in store.directory.iterdir()) == [first.name, third.name]


def test_a_checkpoint(disk: Disk) -> None:
    def save(step: int, rows: int) -> Path:
        tensors = {name: torch.full((rows, 500), float(step)) for name in ("weight", "moment")}
        snapshot = Snapshot(
            {"config.json": "{}"},
            {"model.safetensors": {"w": tensors["weight"]}},
            {"m": tensors["moment"]},
        )
        return checkpoints.save(RunState(step, step, "run", 0.0), {".": snapshot})

    with Checkpoints(disk.path, Ranks(), 3) as checkpoints:
        first = save(1, 400)
        save(2, 900)
        with raises(CheckpointFailed, code="checkpoint_failed", field="trainer.run_dir") as caught:
            checkpoints.wait()
        assert (caught.value.field, caught.value.value) == ("trainer.run_dir", str(disk.path))
        assert list(disk.path.iterdir()) == [first]  # no partial file of step 2 fills the disk
        assert newest(disk.path) == first
        third = save(3, 100)
        checkpoints.wait()
        assert newest(disk.path) == third


def test_the_run_directory(disk: Disk) -> None:
    run = disk.path / "run"
    recorder = Recorder(run, Config(), Console(quiet=True))
    recorder.measured({"step": 1}, "")
    disk.fill()
    expected = {"field": "trainer.run_dir", "value": str(run / "metrics.jsonl")}
    with raises(StorageFailed, **expected) as caught:
        recorder.measured({"step": 2, "text": "x" * 10_000}, "")
    assert "newest checkpoint" in (caught.value.remedy or "")
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1]
    disk.free()
    again = Recorder(run, Config(), Console(quiet=True), step=1)
    again.measured({"step": 2}, "")
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1, 2]


def test_logging_continues_without_its_file_and_warns_once(
    disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        log = setup_logging("service", disk.path)
        log.warning("there is room")
        disk.fill()
        for number in range(3):
            log.warning("line %d %s", number, "x" * 10_000)
        disk.free()
        log.warning("there is room again")
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:], root.level = before, level
    said = capsys.readouterr().err
    assert said.count("lines are missing in") == 1
    assert "Traceback" not in said
    assert "line 2" in said
    assert (disk.path / "service.log").read_text().rstrip().endswith("there is room again")
