"""Nodes that restart, leave a broadcast or sleep get every version whole, in whichever way it goes.

The nodes are threads here, with the requests of an agent: they wait for a version, take it out of
the broadcast or as files, compare checksums, and report.
"""

import asyncio
import gc
import itertools
import os
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from common.errors import ConfigError, NotFound
from common.process.storage import StorageFailed
from common.weights import recycled_files
from common.weights.checksums import checksum
from common.weights.deltas import apply_delta
from common.wire.schemas import (
    Broadcast,
    EngineLibraries,
    WeightChecksums,
    WeightManifest,
    WorkerReport,
    WorkerState,
)
from learning.weight_group import digest, join, size_of, views
from trainer.weights import broadcast, transfer
from trainer.weights.board import WeightBoard
from trainer.weights.broadcast import Broadcaster
from trainer.weights.publisher import Publisher
from trainer.weights.transfer import EngineGroup, Rendezvous
from trainer.weights.versions import write_version

RUN = "run"
LIMIT_S = 60.0
ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
BUCKET_BYTES = 64
Tensors = dict[str, Tensor]


class Node:
    """A rollout node, whose engine has `size` ranks that hold the same weights."""

    def __init__(self, board: WeightBoard, index: int, folder: Path, size: int) -> None:
        self.name = f"rollout-server-{index}"
        self.way = ""
        """How it took the newest version."""
        self.weights: Tensors = {}
        self.leaves_broadcast = False
        self._board = board
        self._folder = folder / self.name
        self._folder.mkdir(parents=True)
        self._size = size
        self._starts = itertools.count()
        self._groups: dict[str, list[dist.ProcessGroupGloo]] = {}
        self._ended = threading.Event()
        self._progress = 0
        self.restart("starting")
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def restart(self, state: WorkerState) -> None:
        """Its engine starts anew, without the weights."""
        self.version: int | None = None
        self.incarnation = f"start {next(self._starts)}"
        self.report(state)

    def report(self, state: WorkerState, detail: str = "") -> None:
        self.state = state
        self._progress += 1
        self._board.report(
            WorkerReport(
                name=self.name,
                url="",
                num_nodes=1,
                state=state,
                version=self.version,
                run_id=RUN,
                tensor_parallel_size=self._size,
                incarnation=self.incarnation,
                progress=self._progress,
                detail=detail,
            )
        )

    def end(self) -> None:
        self._ended.set()
        self._board.close()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _follow(self) -> None:
        try:
            asyncio.run(self._versions())
        except BaseException as error:
            self.version = None
            self.report("failed", repr(error))

    async def _versions(self) -> None:
        while not self._ended.is_set():
            known = -1 if self.version is None else self.version
            try:
                latest = await self._board.latest_after(RUN, known, 30.0, self.state == "asleep")
            except NotFound:
                continue
            if latest.asleep:
                self.report("asleep")
            elif latest.version != known:
                await self._take(latest)
                self.version = latest.version
                self.report("ready")
            elif self.state == "asleep":
                self.report("ready")

    async def _take(self, latest: WeightManifest) -> None:
        broadcast = latest.broadcast
        self.report("updating")
        if broadcast and broadcast.incarnations.get(self.name) == self.incarnation:
            if not self.leaves_broadcast and self._received(broadcast):
                sums = {name: digest(tensor) for name, tensor in self.weights.items()}
                verdict = WeightChecksums(worker=self.name, ranks=[sums] * self._size)
                await self._board.verify(latest.version, verdict)
                self.way = "broadcast"
                return
            self.leaves_broadcast = False
            self.incarnation = f"start {next(self._starts)}"
        while not latest.files or latest.progress:
            self.report("updating")
            latest = await self._board.with_files(latest, 0.01)
        self._load(latest)

    def _received(self, broadcast: Broadcast) -> bool:
        """Returns whether every rank of the engine has got the same weights from the broadcast."""
        first = broadcast.ranks[self.name]
        ranks = range(first, first + self._size)
        with ThreadPoolExecutor(self._size) as pool:
            try:
                if broadcast.group not in self._groups:
                    self._groups[broadcast.group] = list(
                        pool.map(lambda rank: joined(self._board, broadcast, rank), ranks)
                    )
                groups = self._groups[broadcast.group]
                first_weights, *others = pool.map(lambda group: received(group, broadcast), groups)
            except RuntimeError:
                return False
        assert all(same(first_weights, other) for other in others)
        self.weights = first_weights
        return True

    def _load(self, manifest: WeightManifest) -> None:
        """Takes the files, or their deltas from those that it has."""
        folder = self._folder / str(manifest.version)
        if manifest.directory:
            self.way = "shared"
            folder = Path(manifest.directory)
        else:
            self.way = "download"
            folder.mkdir()
            for file in manifest.files:
                base = self._folder / str(manifest.version - 1) / file.name
                delta = file.delta
                if delta and base.exists() and checksum(base) == delta.base:
                    self.way = "delta"
                    path = self._board.file(manifest.version, delta.name)
                    assert (path.stat().st_size, checksum(path)) == (delta.size, delta.xxh3)
                    apply_delta(base, path, folder / file.name)
                else:
                    body = self._board.file(manifest.version, file.name).read_bytes()
                    (folder / file.name).write_bytes(body)
        assert {file.name for file in manifest.files} == {"config.json", "model.safetensors"}
        for file in manifest.files:
            path = folder / file.name
            assert (path.stat().st_size, checksum(path)) == (file.size, file.xxh3)
        self.weights = load_file(folder / "model.safetensors")


def joined(board: WeightBoard, broadcast: Broadcast, rank: int) -> dist.ProcessGroupGloo:
    """Returns a rank of the group; torch keeps one rank of a group in each process by name. Raises
    RuntimeError once the broadcast is withdrawn.
    """
    store = None
    while store is None:
        refuse_withdrawn(board, broadcast)
        with suppress(RuntimeError):
            store = dist.TCPStore(
                broadcast.master_address,
                broadcast.master_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=1),
            )
    store.set_timeout(timedelta(seconds=LIMIT_S))
    prefixed: dist.Store = store
    for prefix in (broadcast.group, f"{broadcast.group}/", "cpu/"):
        prefixed = dist.PrefixStore(prefix, prefixed)
    limit = timedelta(seconds=LIMIT_S)
    return dist.ProcessGroupGloo(prefixed, rank, broadcast.world_size, limit)


def refuse_withdrawn(board: WeightBoard, broadcast: Broadcast) -> None:
    latest = board.latest()
    if latest is None or latest.broadcast is None or latest.broadcast.group != broadcast.group:
        raise RuntimeError("the broadcast is withdrawn")


def received(group: dist.ProcessGroupGloo, broadcast: Broadcast) -> Tensors:
    found: Tensors = {}
    for bucket in broadcast.buckets:
        flat = torch.empty(size_of(bucket), dtype=torch.uint8)
        group.broadcast(flat, 0).wait()
        found |= views(flat, bucket)
    return found


def same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


class Run:
    """A publisher and its nodes."""

    def __init__(self, folder: Path, way: str, draw: random.Random) -> None:
        of_another_run = folder / "published" / "v000000"
        of_another_run.mkdir(parents=True)
        self.board = WeightBoard(folder / "published")
        self.sizes: list[int] = []
        static = folder / "config.json"
        static.write_text("{}")
        self.rendezvous = Rendezvous("127.0.0.1")
        self.sender = None
        if way == "broadcast":
            arguments = (self.board, [static], RUN, LIMIT_S, self.rendezvous)
            self.sender = Broadcaster(*arguments, bucket_bytes=BUCKET_BYTES)
        self.fenced: list[str] = []
        self.publisher = Publisher(
            self.board,
            [static],
            RUN,
            LIMIT_S,
            lambda worker: self.fenced.append(worker.name),
            print,
            published=lambda size, seconds: self.sizes.append(size),
            shared=way == "shared",
            broadcaster=self.sender,
        )
        count = draw.randint(1, 3)
        self.nodes = [
            Node(self.board, index, folder / "nodes", draw.randint(1, 2)) for index in range(count)
        ]


@contextmanager
def running(folder: Path, way: str, draw: random.Random) -> Iterator[Run]:
    run = Run(folder, way, draw)
    try:
        yield run
    finally:
        for node in run.nodes:
            node.end()
        if run.sender:
            run.sender.close()


def changed(weights: Tensors, draw: random.Random) -> Tensors:
    """Returns the next version: a number differs, or every one."""
    found = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in found.values() if draw.random() < 0.3 else [found["a"]]:
        tensor.view(-1)[0 if draw.random() < 0.5 else slice(None)] += 1
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", ["download", "shared", "broadcast"])
def test_every_node_gets_every_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, seed: int
) -> None:
    of_others = "3" if seed % 2 else None

    def watched(*args: Any, **named: Any) -> dist.ProcessGroup:
        assert os.environ[ERRORS] == "0"
        return join(*args, **named)

    # Noted by pytest, which restores what the environment has now.
    monkeypatch.setenv(ERRORS, "1")
    monkeypatch.delenv(ERRORS)
    monkeypatch.setattr(transfer, "_OF_OTHER_GROUPS", of_others)
    monkeypatch.setattr(transfer, "join", watched)
    monkeypatch.setattr(recycled_files, "_MIN_REUSED_BYTES", 1)
    draw = random.Random(f"{way} {seed}")
    torch.manual_seed(seed)
    # A bucket of 64 bytes is full with a and b; c has its own, and so has d, of another dtype.
    weights = {
        "a": torch.randn(4, 3),
        "b": torch.randn(4),
        "c": torch.randn(1000),
        "d": torch.randn(3).bfloat16(),
    }
    written: list[int] = []
    events = ["nothing", "restart", "sleep", "lost files", *(["leave"] if seed == 0 else [])]
    with running(tmp_path, way, draw) as run:
        for version in range(1, 7):
            weights = changed(weights, draw)
            has = {node.name: node.version for node in run.nodes}
            one = draw.choice(run.nodes)
            event = draw.choice(events)
            if event == "restart":
                one.restart(draw.choice(["starting", "ready"]))
            if event == "leave":
                # Of a group that is formed anew: in an old one the others would wait for it.
                for node in run.nodes:
                    node.restart("ready")
                one.leaves_broadcast = True
            if event == "lost files":
                shutil.rmtree(run.board.directory / f"v{version - 1:06d}", ignore_errors=True)
            if event == "sleep" and version > 1:
                run.publisher.sleep()
                assert {node.state for node in run.nodes} == {"asleep"}
                run.publisher.wake()
                assert {node.state for node in run.nodes} == {"ready"}
            was_ready = {node.name for node in run.nodes if node.state == "ready"}

            run.publisher.publish(weights.items(), version)
            for node in run.nodes:
                assert (node.version, node.state) == (version, "ready")
                assert same(node.weights, weights)
            is_sent = event != "leave"
            for node in run.nodes:
                if way == "broadcast":
                    expected = {"broadcast" if node.name in was_ready and is_sent else "download"}
                elif way == "download" and has[node.name] == version - 1 and event != "lost files":
                    expected = {"delta", "download"}
                else:
                    expected = {way}
                assert node.way in expected
            kept = sorted(path.name for path in run.board.directory.glob("v*"))
            if way == "broadcast":
                assert len(kept) <= 3
                assert run.sizes[-1] == sum(tensor.nbytes for tensor in weights.values())
                latest = run.board.latest()
                assert latest
                if latest.broadcast:
                    names = [bucket.names for bucket in latest.broadcast.buckets]
                    assert names == [["a", "b"], ["c"], ["d"]]
            else:
                written = [
                    number
                    for number in [*written, version]
                    if event != "lost files" or number != version - 1
                ]
                assert kept == [f"v{number:06d}" for number in written[-3:]]
                files = (run.board.directory / kept[-1]).iterdir()
                whole = [file for file in files if file.suffix != ".delta"]
                assert run.sizes[-1] == sum(file.stat().st_size for file in whole)
                if way == "shared" and version == 1:
                    # A slow engine may still read it, long after it was removed.
                    held = (run.board.directory / kept[-1] / "model.safetensors").open("rb")
                    content = held.read()
        if way == "shared":
            held.seek(0)
            assert held.read() == content
            held.close()
        assert run.fenced == []
    assert not run.board._waiting
    for thread in threading.enumerate():
        if thread.name == "broadcast":  # of a group that was left
            thread.join(LIMIT_S)
    assert os.environ.get(ERRORS) == (of_others if way == "broadcast" else None)


def test_engines_that_cannot_take_part_are_told_and_end_their_group(tmp_path: Path) -> None:
    draw = random.Random(0)
    with running(tmp_path, "broadcast", draw) as run:
        assert run.sender
        weights = {"a": torch.ones(3)}
        run.publisher.publish(weights.items(), 1)
        run.publisher.publish(weights.items(), 2)
        latest = run.board.latest()
        assert latest
        assert latest.broadcast
        address = latest.broadcast.master_address, latest.broadcast.master_port
        run.sender.close_if_broken()
        dist.TCPStore(*address, is_master=False, wait_for_workers=False)
        for state in ("failed", "ready"):
            run.nodes[0].incarnation = f"after {state}"
            run.nodes[0].report(state)
            run.sender.close_if_broken()
            with pytest.raises(RuntimeError):
                dist.TCPStore(
                    *address,
                    is_master=False,
                    timeout=timedelta(seconds=0.1),
                    wait_for_workers=False,
                )
            run.publisher.publish(weights.items(), latest.version + 1)
            latest = run.board.latest()
            assert latest


def test_a_broadcast_that_breaks_though_every_engine_is_there_goes_as_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(EngineGroup):
        def send(self, flat: Tensor) -> None:
            raise RuntimeError("connection reset")

    monkeypatch.setattr(broadcast, "_BLAME_S", 0.2)
    monkeypatch.setattr(broadcast, "EngineGroup", Broken)
    board = WeightBoard(tmp_path)
    board.report(
        WorkerReport(name="rollout-server-0", url="", num_nodes=1, state="ready", version=None)
    )
    sender = Broadcaster(board, [], RUN, LIMIT_S, Rendezvous("127.0.0.1"))
    for version in (1, 2):
        manifest, _ = sender.publish([("a", torch.ones(1))], version)
        assert (manifest.version, manifest.broadcast) == (version, None)
    # A disk that was full for a while is no reason to have no files ever after.
    static = tmp_path / "missing"
    sender._static_files.append(static)
    with pytest.raises(StorageFailed):
        asyncio.run(board.with_files(manifest, LIMIT_S))
    gc.collect()
    assert "never retrieved" not in caplog.text
    static.write_text("{}")
    written = asyncio.run(board.with_files(manifest, LIMIT_S))
    assert [file.name for file in written.files] == ["missing", "model.safetensors"]


def test_a_transfer_counts_its_buckets_and_closes_a_group_that_was_given_up() -> None:
    class Slow(EngineGroup):
        closes = 0

        def send(self, flat: Tensor) -> None:
            assert may_go_on.wait(LIMIT_S)

        def close(self, stuck: bool = False) -> None:
            self.closes += 1
            super().close(stuck)

    worker = WorkerReport(name="rollout-server-0", url="", num_nodes=1, state="ready", version=None)
    for is_given_up in (False, True):
        may_go_on = threading.Event()
        group = Slow([worker], Rendezvous("127.0.0.1"), LIMIT_S)
        sending = transfer.Transfer(group, [torch.zeros(1, dtype=torch.uint8)] * 2)
        for index in range(2):
            sending.put(index)
        sending.finish()
        if is_given_up:
            group.close(stuck=True)
        may_go_on.set()
        sending.done.result(LIMIT_S)
        assert (sending.sent, group.closes) == (2, 2 * is_given_up)


def test_an_engine_with_another_nccl_is_refused(tmp_path: Path) -> None:
    board = WeightBoard(tmp_path)
    sender = Broadcaster(board, [], RUN, LIMIT_S, Rendezvous("127.0.0.1", nccl="2.29.7"))
    for number, nccl in enumerate(["2.29.7", "2.27.3"]):
        libraries = EngineLibraries(torch="2.9", nccl=nccl)
        board.report(
            WorkerReport(
                name=f"rollout-server-{number}",
                url="",
                num_nodes=2,
                state="starting",
                version=None,
                libraries=libraries,
            )
        )
        if number == 0:
            sender.publish([("a", torch.ones(1))], 1)
    with pytest.raises(ConfigError) as caught:
        sender.publish([("a", torch.ones(1))], 2)
    assert caught.value.field == "trainer.weight_sync"
    assert "rollout-server-1" in caught.value.message
    assert "rollout-server-0" not in caught.value.message


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_a_version_is_whole_or_not_there(tmp_path: Path, kind: str) -> None:
    static = tmp_path / ("config.json" if kind == "model" else "adapter_config.json")
    static.write_text("{}")
    weights = [("a", torch.ones(3))]

    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(StorageFailed):
        write_version(weights, [static], in_the_way, RUN, 1)

    def breaks() -> Iterator[tuple[str, Tensor]]:
        yield from weights
        raise RuntimeError("a rank has ended")

    directory = tmp_path / "weights"
    with pytest.raises(RuntimeError):
        write_version(breaks(), [static], directory, RUN, 1)
    assert not list(directory.iterdir())
    pieces: list[int] = []
    large = [("a", torch.ones(1 << 20))]
    write_version(large, [static], directory, RUN, 1, wrote=lambda: pieces.append(1))
    assert len(pieces) >= 4
    found = write_version(weights, [static], directory, RUN, 1)
    assert (found.kind, found.version, found.run_id) == (kind, 1, RUN)
    name = "model" if kind == "model" else "adapter_model"
    assert {file.name for file in found.files} == {static.name, f"{name}.safetensors"}
    assert same(load_file(directory / "v000001" / f"{name}.safetensors"), dict(weights))
