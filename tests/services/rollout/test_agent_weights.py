"""Weight versions are pulled over HTTP from the trainer's own app, verified and kept on disk."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from common.clients.base import Unreachable
from common.process import progress
from common.process.metrics import Metrics
from common.process.storage import StorageFailed
from common.process.topology import Topology
from common.settings.config import Config
from common.weights.checksums import Hasher
from common.wire.schemas import Broadcast, EngineStart, EngineWeights, WeightFile, WeightManifest
from services.rollout.first_node import FirstNodeAgent
from services.rollout.further_node import FurtherNodeAgent
from services.rollout.weights.store import WeightStore
from services.rollout.weights.trainer_client import (
    CorruptWeights,
    Download,
    TrainerClient,
    WeightId,
    WeightsGone,
)
from tests.support.errors import raises
from trainer.backends.server import create_trainer_app
from trainer.weights.board import WeightBoard


def publish(
    board: WeightBoard, version: int, contents: dict[str, bytes], run_id: str = "a"
) -> WeightManifest:
    directory = board.directory / f"v{version:06d}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    files = []
    for name, content in contents.items():
        (directory / name).write_bytes(content)
        files.append(WeightFile(name=name, size=len(content), xxh3=Hasher(content).hexdigest()))
    manifest = WeightManifest(version=version, run_id=run_id, files=files)
    board.announce(manifest)
    return manifest


def board_file(board: WeightBoard, version: int, name: str) -> Path:
    return board.directory / f"v{version:06d}" / name


class Recorder(httpx.ASGITransport):
    """Records the requested paths."""

    def __init__(self, board: WeightBoard) -> None:
        super().__init__(create_trainer_app(board, Metrics("trainer")))
        self.paths: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        return await super().handle_async_request(request)


@pytest.fixture
def board(tmp_path: Path) -> WeightBoard:
    return WeightBoard(tmp_path / "trainer")


@pytest.fixture
def transport(board: WeightBoard) -> Recorder:
    return Recorder(board)


@pytest.fixture
async def client(transport: Recorder) -> AsyncIterator[TrainerClient]:
    async with TrainerClient("trainer", "http://trainer", transport=transport) as trainer:
        yield trainer


@pytest.fixture
def store(tmp_path: Path, client: TrainerClient) -> WeightStore:
    return WeightStore(tmp_path / "node", client)


async def test_latest_is_none_before_the_first_version(
    client: TrainerClient, board: WeightBoard
) -> None:
    assert await client.latest(None, wait_s=0, deadline_s=5) is None
    manifest = publish(board, 1, {"f": b"x"})
    assert await client.latest(None, wait_s=0, deadline_s=5) == manifest
    assert await client.latest(WeightId("a", 1), wait_s=0, deadline_s=5) == manifest


async def test_missing_trainer_is_unreachable() -> None:
    async with TrainerClient("trainer", "http://127.0.0.1:9") as client:
        with pytest.raises(Unreachable):
            await client.latest(None, wait_s=0, deadline_s=0.2)


async def test_version_is_downloaded_verified_and_complete(
    client: TrainerClient, board: WeightBoard, store: WeightStore
) -> None:
    contents = {"config.json": b"{}", "model.safetensors": b"w" * 3_000_000, "empty": b""}
    path = await store.fetch(publish(board, 12, contents))
    assert path.name == "v000012"
    assert {name: (path / name).read_bytes() for name in contents} == contents
    assert not list(store.directory.glob("*.partial"))


async def test_unchanged_files_are_linked_and_not_downloaded_again(
    client: TrainerClient, board: WeightBoard, store: WeightStore, transport: Recorder
) -> None:
    first = await store.fetch(publish(board, 1, {"config.json": b"{}", "w": b"one"}))
    transport.paths.clear()
    second = await store.fetch(publish(board, 2, {"config.json": b"{}", "w": b"two"}))
    assert transport.paths == ["/weights/2/files/w"]
    assert (first / "config.json").samefile(second / "config.json")
    assert (first / "w").read_bytes() == b"one"


async def test_corrupted_file_is_refused_and_leaves_nothing(
    client: TrainerClient, board: WeightBoard, store: WeightStore
) -> None:
    good = await store.fetch(publish(board, 1, {"w": b"one"}))
    manifest = publish(board, 2, {"w": b"two"})
    for content, value in ((b"TWO", Hasher(b"TWO").hexdigest()), (b"twotwo", "6"), (b"t", "1")):
        board_file(board, 2, "w").write_bytes(content)
        with raises(CorruptWeights, field="w", value=value):
            await store.fetch(manifest)
        assert sorted(store.directory.iterdir()) == [good]
    board_file(board, 2, "w").write_bytes(b"two")
    assert ((await store.fetch(manifest)) / "w").read_bytes() == b"two"


async def test_pruned_version_is_told_apart_from_a_bad_one(
    client: TrainerClient, board: WeightBoard, store: WeightStore
) -> None:
    manifest = publish(board, 1, {"w": b"one"})
    board_file(board, 1, "w").unlink()
    with pytest.raises(WeightsGone):
        await store.fetch(manifest)


async def test_two_newest_versions_are_kept(
    client: TrainerClient, board: WeightBoard, store: WeightStore
) -> None:
    for version in range(1, 6):
        await store.fetch(publish(board, version, {"w": b"%d" % version}))
    assert sorted(path.name for path in store.directory.iterdir()) == ["v000004", "v000005"]


async def test_same_version_of_another_run_replaces_the_weights(
    client: TrainerClient, board: WeightBoard, store: WeightStore
) -> None:
    await store.fetch(publish(board, 3, {"w": b"old", "same": b"s"}))
    path = await store.fetch(publish(board, 3, {"w": b"new", "same": b"s"}, run_id="b"))
    assert (path / "w").read_bytes() == b"new"
    assert (path / "same").read_bytes() == b"s"
    assert [entry.name for entry in store.directory.iterdir()] == ["v000003"]


async def test_weights_that_an_engine_starts_from_are_verified_again(
    client: TrainerClient, board: WeightBoard, store: WeightStore
) -> None:
    manifest = publish(board, 1, {"w": b"one"})
    path = await store.fetch(manifest)
    assert store.hold(path)
    assert await store.verify(manifest, path)
    (path / "w").write_bytes(b"onE")
    assert not await store.verify(manifest, path)
    assert not store.hold(path)
    assert (await store.fetch(manifest) / "w").read_bytes() == b"one"


async def test_weights_that_were_stored_before_are_verified_before_they_are_used_again(
    client: TrainerClient, board: WeightBoard, store: WeightStore
) -> None:
    manifest = publish(board, 1, {"w": b"one"})
    path = await store.fetch(manifest)
    (path / "w").write_bytes(b"onE")
    assert (await store.fetch(manifest) / "w").read_bytes() == b"one"


@pytest.mark.parametrize("deleted", ["", "v000001", "v000001/w"])
@pytest.mark.parametrize("version", [1, 2])
async def test_deleted_directories_of_a_node_are_made_again(
    client: TrainerClient, board: WeightBoard, store: WeightStore, deleted: str, version: int
) -> None:
    contents = {"config.json": b"{}", "w": b"one"}
    manifest = publish(board, 1, contents)
    await store.fetch(manifest)
    path = store.directory / deleted
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if version == 2:
        contents["w"] = b"two"
        manifest = publish(board, 2, contents)
    fetched = await store.fetch(manifest)
    assert {name: (fetched / name).read_bytes() for name in contents} == contents


async def test_weights_whose_broadcast_is_withdrawn_stay_where_an_engine_reads_them(
    client: TrainerClient, board: WeightBoard, store: WeightStore
) -> None:
    manifest = publish(board, 1, {"w": b"one"})
    plan = {
        "group": "g",
        "master_address": "a",
        "master_port": 1,
        "world_size": 2,
        "backend": "gloo",
    }
    sent = Broadcast.model_validate(plan | {"ranks": {}, "incarnations": {}, "buckets": []})
    path = await store.fetch(manifest.model_copy(update={"broadcast": sent}))
    assert store.hold(path)
    inode = path.stat().st_ino
    assert await store.fetch(manifest) == path
    assert path.stat().st_ino == inode


async def test_what_an_earlier_process_left_is_removed(
    client: TrainerClient, board: WeightBoard, store: WeightStore, transport: Recorder
) -> None:
    """A kill or a bad disk may leave a file of the right size with wrong content."""
    manifest = publish(board, 1, {"w": b"one"})
    path = await store.fetch(manifest)
    (path / "w").write_bytes(b"onE")
    half = store.directory / "v000002.partial"
    half.mkdir()
    transport.paths.clear()
    again = WeightStore(store.directory, client)
    assert not half.exists()
    assert await again.fetch(manifest) == path
    assert (path / "w").read_bytes() == b"one"


@pytest.mark.parametrize(
    "name", ["../evil", "a/b", "/etc/passwd", ".manifest.json", "..", "", "a\n"]
)
def test_names_cannot_leave_the_directory(name: str) -> None:
    with pytest.raises(ValidationError):
        WeightFile(name=name, size=0, xxh3="0" * 32)


async def test_name_given_twice_never_writes_into_an_older_version(
    client: TrainerClient, board: WeightBoard, store: WeightStore
) -> None:
    first = await store.fetch(publish(board, 1, {"w": b"one"}))
    manifest = publish(board, 2, {"w": b"two"})
    one = WeightFile(name="w", size=3, xxh3=Hasher(b"one").hexdigest())
    with raises(StorageFailed, field="state_dir"):
        await store.fetch(manifest.model_copy(update={"files": [one, *manifest.files]}))
    assert (first / "w").read_bytes() == b"one"


def test_what_is_fetched_or_compared_again_is_no_progress() -> None:
    download = Download(60)
    before = progress.total()
    for _ in range(3):
        download.done = 0
        for size in (10, 20, 30):
            download.at(size)
            download.read(size)
    assert progress.total() == before + 6
    download.done = 30
    download.at(1)
    assert progress.total() == before + 7


def node_settings(folder: Path, nodes_per_engine: int) -> Config:
    python = folder / "python"
    python.touch()
    rollout = {
        "engine_python": str(python),
        "nodes_per_engine": nodes_per_engine,
        "tensor_parallel_size": nodes_per_engine,
    }
    return Config.model_validate({"rollout": rollout, "state_dir": str(folder / "state")})


async def test_an_engine_starts_from_weights_that_are_intact(
    tmp_path: Path, board: WeightBoard, store: WeightStore
) -> None:
    manifest = publish(board, 1, {"w": b"one"})
    path = await store.fetch(manifest)
    agent = FirstNodeAgent(node_settings(tmp_path, 1), Topology(), Metrics("rollout"))
    follower: Any = SimpleNamespace(newest=None, refused=None)
    agent._store = store
    agent._follower = follower
    assert await agent._stored_weights() is None
    follower.newest = (manifest, path)
    assert await agent._stored_weights() == (manifest, path)
    follower.refused = WeightId("a", 1)
    assert await agent._stored_weights() is None
    follower.refused = None
    (path / "w").write_bytes(b"onE")
    assert await agent._stored_weights() is None


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_further_node_is_prepared_with_weights_that_are_intact(
    tmp_path: Path, board: WeightBoard, store: WeightStore, transport: Recorder, damaged: bool
) -> None:
    manifest = publish(board, 1, {"w": b"one"})
    path = await store.fetch(manifest)
    if damaged:
        (path / "w").write_bytes(b"onE")
    transport.paths.clear()
    topology = Topology(node_rank=1, num_nodes=2, node_ips=("127.0.0.1",) * 2)
    agent = FurtherNodeAgent(node_settings(tmp_path, 2), topology, Metrics("rollout"))
    agent._store = store
    start = EngineStart(
        id="s",
        dist_init_addr="head:1",
        model_path=str(path),
        weight_version="1",
        weights=EngineWeights(manifest=manifest),
    )
    await agent._prepare(start)
    assert agent.report().prepared == "s"
    assert (path / "w").read_bytes() == b"one"
    assert bool(transport.paths) == damaged
