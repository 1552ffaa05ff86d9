"""Deltas between weight versions save bytes; if a delta is wrong in any way, the node fetches the
whole file."""

import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.process.metrics import Metrics
from common.weights.checksums import checksum
from common.weights.deltas import BadDelta, apply_delta, write_delta
from common.wire.schemas import WeightManifest
from services.rollout.weights.store import WeightStore
from services.rollout.weights.trainer_client import TrainerClient
from trainer.backends.server import create_trainer_app
from trainer.weights.board import WeightBoard
from trainer.weights.tensor_file import write_tensors
from trainer.weights.versions import write_version

pytestmark = pytest.mark.integration

FILE, DELTA = "model.safetensors", "model.safetensors.delta"


class Trainer:
    """Publishes a model whose weights change a little with every version, and records the nodes'
    requests."""

    def __init__(self, directory: Path) -> None:
        self.board, self.paths, self.bytes = WeightBoard(directory / "weights"), list[str](), 0
        torch.manual_seed(0)
        self.weights = {name: torch.randn(400, 500).bfloat16() for name in ("a", "b")}
        self.shared = False

    def publish(self, version: int, changed: float) -> WeightManifest:
        """Publishes a version in which a share of the weights differs."""
        for name, tensor in self.weights.items():
            moved = torch.rand(tensor.shape) < changed
            self.weights[name] = (
                torch.where(moved, tensor * 1.01, tensor)
                if changed < 1
                else torch.randn(tensor.shape).bfloat16()
            )
        manifest = write_version(
            self.weights.items(),
            [],
            self.board.directory,
            "run",
            version,
            previous=self.board.latest(),
        )
        if self.shared:
            manifest.directory = str(self.board.directory / f"v{version:06d}")
        self.board.announce(manifest)
        return manifest

    def file(self, version: int, name: str = FILE) -> Path:
        return self.board.directory / f"v{version:06d}" / name

    async def send(self, request: httpx.Request) -> httpx.Response:
        response = await httpx.ASGITransport(
            create_trainer_app(self.board, Metrics("x"))
        ).handle_async_request(request)
        self.paths.append(request.url.path.rpartition("/")[2])
        self.bytes += int(response.headers["content-length"])
        return response


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


@pytest.fixture
async def client(trainer: Trainer) -> AsyncIterator[TrainerClient]:
    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return await trainer.send(request)

    async with TrainerClient("trainer", "http://trainer", transport=Transport()) as made:
        yield made


@pytest.fixture
def store(tmp_path: Path, client: TrainerClient) -> WeightStore:
    return WeightStore(tmp_path / "node", client)


async def test_a_node_that_holds_the_version_before_fetches_a_tenth_of_the_bytes(
    trainer: Trainer, client: TrainerClient, store: WeightStore
) -> None:
    await store.fetch(trainer.publish(1, 1.0))
    for version in range(2, 5):
        trainer.paths, trainer.bytes = [], 0
        path = await store.fetch(trainer.publish(version, 0.02))
        assert trainer.paths == [DELTA]
        assert trainer.bytes < 0.1 * trainer.file(version).stat().st_size
        assert (path / FILE).read_bytes() == trainer.file(version).read_bytes()
        assert not (path / DELTA).exists()


async def test_a_node_that_is_behind_and_one_that_has_just_come_fetch_the_whole(
    trainer: Trainer, client: TrainerClient, store: WeightStore, tmp_path: Path
) -> None:
    await store.fetch(trainer.publish(1, 1.0))
    trainer.publish(2, 0.02)
    manifest = trainer.publish(3, 0.02)
    for node in (store, WeightStore(tmp_path / "new", client)):
        trainer.paths = []
        path = await node.fetch(manifest)
        assert trainer.paths == [FILE]
        assert checksum(path / FILE) == checksum(trainer.file(3))


@pytest.mark.parametrize("rows", [50, 400])
async def test_weights_that_all_change_have_no_delta(trainer: Trainer, rows: int) -> None:
    trainer.weights = {name: tensor[:rows].clone() for name, tensor in trainer.weights.items()}
    trainer.publish(1, 1.0)
    [file] = trainer.publish(2, 1.0).files
    assert file.delta is None
    assert not trainer.file(2, DELTA).exists()


@pytest.mark.parametrize("damage", ["delta", "base", "manifest", "other base"])
async def test_a_wrong_delta_is_never_loaded(
    trainer: Trainer,
    client: TrainerClient,
    store: WeightStore,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    base = await store.fetch(trainer.publish(1, 1.0))
    manifest = trainer.publish(2, 0.02)
    [file] = manifest.files
    assert file.delta
    if damage == "base":  # another process damages the node's disk
        content = bytearray((base / FILE).read_bytes())
        content[-1] ^= 1
        (base / FILE).write_bytes(content)
    elif damage == "other base":  # a valid delta of other files
        write = trainer.file(2, DELTA)
        write.unlink()
        size = write_delta(trainer.file(2), trainer.file(1), write)
        assert size
        file.delta = file.delta.model_copy(update={"size": size, "xxh3": checksum(write)})
    else:
        content = bytearray(trainer.file(2, DELTA).read_bytes())
        content[len(content) // 2] ^= 1
        trainer.file(2, DELTA).write_bytes(content)
        if damage == "manifest":
            file.delta = file.delta.model_copy(update={"xxh3": checksum(trainer.file(2, DELTA))})
    with caplog.at_level(logging.ERROR):
        path = await store.fetch(manifest)
    assert checksum(path / FILE) == file.xxh3
    assert "is unusable, the whole file replaces it" in caplog.text
    assert trainer.paths[-1] == FILE


async def test_a_shared_directory_is_read_in_place_until_there_are_deltas(
    trainer: Trainer, client: TrainerClient, store: WeightStore
) -> None:
    trainer.shared = True
    assert await store.fetch(trainer.publish(1, 1.0)) == trainer.file(1).parent
    for version in (2, 3):
        path = await store.fetch(trainer.publish(version, 0.02))
        assert path.parent == store.directory
        assert checksum(path / FILE) == checksum(trainer.file(version))
        shutil.rmtree(trainer.file(version - 1).parent)
    trainer.file(3).unlink()  # the third version came from the second and a delta
    assert trainer.paths == []


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    size=st.integers(0, 5000),
    changes=st.integers(0, 400),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_file_comes_back_from_its_delta(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    size: int,
    changes: int,
    seed: int,
) -> None:
    directory, rng = tmp_path_factory.mktemp("delta"), np.random.default_rng(seed)
    old, new, delta, made = (directory / name for name in ("old", "new", "delta", "made"))
    content = rng.integers(0, 256, size, np.uint8)
    old.write_bytes(content.tobytes())
    if size:
        content[rng.integers(0, size, changes)] = rng.integers(0, 256, changes)
    new.write_bytes(content.tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "common.weights.deltas._WORDS",
            data.draw(st.sampled_from([1, 7, 300, 2000]), "words of a block"),
        )
        patch.setattr("common.weights.deltas._LARGEST", 0)
        assert write_delta(old, new, delta) == delta.stat().st_size
        assert apply_delta(old, delta, made) == checksum(new)
        assert made.read_bytes() == new.read_bytes()
        if delta.stat().st_size:
            made.unlink()
            delta.write_bytes(
                delta.read_bytes()[: data.draw(st.integers(0, delta.stat().st_size - 1), "cut at")]
            )
            with suppress(BadDelta):  # or the checksum shows it
                if apply_delta(old, delta, made) == checksum(new):
                    assert made.read_bytes() == new.read_bytes()


async def test_large_files_are_written_over_those_of_the_version_that_was_removed(
    trainer: Trainer, client: TrainerClient, store: WeightStore
) -> None:
    """On both sides, for whole files and deltas of any size; a file still in use is never
    overwritten."""
    trainer.weights["c"] = torch.randn(2000, 500).bfloat16()
    inodes, linked, held = [set[int](), set[int]()], store.directory / "kept", None
    for version, changed in enumerate([1.0, 1.0, 1.0, 1.0, 0.02, 0.02, 1.0, 1.0, 0.02], 1):
        if version == 7:
            trainer.weights["c"] = trainer.weights["c"][:900].clone()
        path = await store.fetch(trainer.publish(version, changed))
        assert checksum(path / FILE) == checksum(trainer.file(version))
        inodes[0].add(trainer.file(version).stat().st_ino)
        inodes[1].add((path / FILE).stat().st_ino)
        if version == 2:
            assert store.hold(path)
            held, sum_held = path, checksum(path / FILE)
        if version == 3:
            linked.hardlink_to(path / FILE)
            sum_linked = checksum(linked)
    assert held is not None
    assert (checksum(held / FILE), checksum(linked)) == (sum_held, sum_linked)
    assert len(inodes[0]) == 4  # three versions and the spare
    assert (
        len(inodes[1]) == 5
    )  # two versions, the spare, the held version and the one with another name
    assert {name for name, _ in safetensors.torch.load_file(trainer.file(9)).items()} == {
        "a",
        "b",
        "c",
    }


async def test_the_spare_of_a_shared_directory_is_never_written_over(trainer: Trainer) -> None:
    """An engine that reads version 1 there gets version 1, however late it reads."""
    trainer.shared = True
    trainer.publish(1, 1.0)
    with trainer.file(1).open("rb") as reader:
        before = trainer.file(1).read_bytes()
        for version in range(2, 8):
            trainer.publish(version, 1.0)
        assert not trainer.file(1).exists()
        assert reader.read() == before


_DTYPES = [
    getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=6
    )
)
def test_the_files_are_what_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]]
) -> None:
    tensors = {
        f'"{i}"é': (100 * torch.rand(shape)).to(dtype) for i, (dtype, shape) in enumerate(kinds)
    }
    path = tmp_path_factory.mktemp("files") / FILE
    with path.open("xb") as stream:
        written = write_tensors(tensors, stream)
    assert written == checksum(path)
    found = safetensors.torch.load_file(path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )
