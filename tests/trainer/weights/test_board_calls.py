"""What the board answers to agents, and what the publisher and the group do with a version, with
stand-ins for engines and nodes."""

import asyncio
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import ConfigError, Conflict, NotFound
from common.process import logs
from common.process import progress as progress_module
from common.process.progress import total
from common.settings.config import Config
from common.wire.schemas import (
    Bucket,
    EngineLibraries,
    WeightChecksums,
    WeightFile,
    WeightManifest,
    WeightVerdict,
    WorkerReport,
    WorkerState,
)
from learning.weight_group import views
from trainer.policy.scorer import ADAPTER_CONFIG
from trainer.weights import adapters, broadcast, transfer
from trainer.weights import publisher as publisher_module
from trainer.weights.adapters import AdapterPublisher, static_files
from trainer.weights.board import WeightBoard
from trainer.weights.broadcast import Broadcaster
from trainer.weights.host_copy import HostCopy
from trainer.weights.publisher import Publisher
from trainer.weights.transfer import EngineGroup, Rendezvous

LIMIT_S = 60.0


def manifest(version: int, **fields: Any) -> WeightManifest:
    return WeightManifest(version=version, run_id="run", **fields)


def worker(number: int, **fields: Any) -> WorkerReport:
    made: dict[str, Any] = {"url": "", "num_nodes": 1, "state": "ready", "version": None}
    return WorkerReport(name=f"rollout-server-{number}", **(made | fields))


@pytest.fixture
def board(tmp_path: Path) -> WeightBoard:
    return WeightBoard(tmp_path / "weights")


@pytest.mark.parametrize(
    ("run_id", "version", "asleep"),
    [("run", 3, False), ("other", 3, False), ("run", 2, False), ("run", 3, True)],
)
def test_an_agent_waits_only_for_what_it_does_not_have(
    board: WeightBoard, run_id: str, version: int, asleep: bool
) -> None:
    async def ask(wait_s: float) -> WeightManifest:
        return await board.latest_after(run_id, version, wait_s, asleep)

    has_it = (run_id, version, asleep) == ("run", 3, False)

    async def waits() -> None:
        with pytest.raises(NotFound):
            await ask(0.01)
        first = asyncio.create_task(ask(LIMIT_S))
        await asyncio.sleep(0)
        assert len(board._waiting) == 1
        # Another thread announces it.
        announced = manifest(3)
        await asyncio.to_thread(board.announce, announced)
        if has_it:
            assert await ask(0.01) == announced, "after the time"
            assert not first.done()
            await asyncio.to_thread(board.announce, manifest(4))
            assert (await first).version == 4
        else:
            assert await first == announced
            assert await ask(LIMIT_S) == announced, "at once"
        assert board._waiting == {}

    asyncio.run(waits())
    assert board.latest_version() == (4 if has_it else 3)


def test_who_waits_is_answered_at_the_end(board: WeightBoard) -> None:
    async def waits() -> WeightManifest:
        board.announce(manifest(3))
        asking = asyncio.create_task(board.latest_after("run", 3, LIMIT_S))
        await asyncio.sleep(0)
        await asyncio.to_thread(board.close)
        return await asking

    assert asyncio.run(waits()).version == 3
    loop = asyncio.new_event_loop()
    loop.close()
    board._waiting[asyncio.Event()] = loop  # its server has ended
    board.announce(manifest(4))


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_newest_three_versions_stay(board: WeightBoard, is_shared: bool) -> None:
    for version in range(1, 7):
        folder = board.directory / f"v{version:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(1 << 20))
        board.announce(manifest(version, directory=str(folder) if is_shared else ""))
        there = {path.name for path in board.directory.iterdir()}
        kept = {f"v{each:06d}" for each in range(max(1, version - 2), version + 1)}
        # What a slow node may still read is not written over.
        assert there == (kept | {"spare"} if version > 3 and not is_shared else kept)


@pytest.mark.parametrize(
    ("name", "is_there"),
    [("a", True), ("b", False), (".hidden", False), ("../v000001/a", False), ("x" * 999, False)],
)
def test_only_files_of_a_version_are_given_out(
    board: WeightBoard, name: str, is_there: bool
) -> None:
    folder = board.directory / "v000001"
    folder.mkdir(parents=True)
    for each in ("a", ".hidden"):
        (folder / each).touch()
    if is_there:
        assert board.file(1, name) == folder / name
    else:
        with pytest.raises(NotFound) as refused:
            board.file(1, name)
        assert refused.value.field == "name"
        assert str(refused.value.value).startswith(f"1/{name}"[:100])
    with pytest.raises(NotFound):
        board.file(2, name)


class Source:
    """Holds the tensors of versions; `go_on` lets a write end."""

    def __init__(self, run_id: str = "run") -> None:
        self.run_id = run_id
        self.writes: list[int] = []
        self.go_on = threading.Event()
        self.fails = False

    def write(self, version: int, wrote: Callable[[], None]) -> WeightManifest:
        self.writes.append(version)
        for _ in range(3):
            wrote()
        assert self.go_on.wait(LIMIT_S)
        if self.fails:
            raise NotFound("it was removed", field="version", value=version)
        files = [WeightFile(name="a", size=1, xxh3="0" * 32)]
        return WeightManifest(version=version, run_id=self.run_id, files=files)

    async def verify(self, version: int, sums: WeightChecksums) -> WeightVerdict:
        if sums.worker == "bad":
            raise Conflict("differs", field="checksums")
        return WeightVerdict(compared=str(version))


def test_files_are_written_once_for_all_who_ask_and_again_after_a_failure(
    board: WeightBoard,
) -> None:
    source = Source()
    board.announce(manifest(3))
    assert asyncio.run(board.with_files(manifest(3), 0.0)) == manifest(3), "no source"
    board.source = source
    whole = manifest(2, files=[WeightFile(name="b", size=1, xxh3="0" * 32)])
    assert asyncio.run(board.with_files(whole, 0.0)) is whole
    assert source.writes == []

    async def ask(version: int) -> list[WeightManifest]:
        before = total()
        while total() < before + 3:  # it has written its pieces
            early = await board.with_files(manifest(version), 0.01)
        early = await board.with_files(manifest(version), 0.01)
        source.go_on.set()
        asked = [board.with_files(manifest(version), LIMIT_S) for _ in range(2)]
        return [early, *await asyncio.gather(*asked)]

    early, *written = asyncio.run(ask(3))
    assert (early.files, early.progress) == ([], 3)
    assert [[file.name for file in each.files] for each in written] == [["a"], ["a"]]
    assert source.writes == [3]
    latest = board.latest()
    assert latest is not None
    assert [file.name for file in latest.files] == ["a"]

    source.fails = True
    board.announce(manifest(4))
    for _ in range(2):
        with pytest.raises(NotFound):
            asyncio.run(board.with_files(manifest(4), LIMIT_S))
    source.fails = False
    board.announce(manifest(5))
    assert asyncio.run(board.with_files(manifest(4), LIMIT_S)).files
    assert source.writes == [3, 4, 4, 4]
    latest = board.latest()
    assert latest is not None
    assert (latest.version, latest.files) == (5, []), "those are of an earlier one"


def test_checksums_are_compared_by_who_sent_the_weights(board: WeightBoard) -> None:
    good = WeightChecksums(worker="good", ranks=[{}])
    with pytest.raises(NotFound):
        asyncio.run(board.verify(3, good))
    board.source = Source()
    assert asyncio.run(board.verify(3, good)).compared == "3"
    with pytest.raises(Conflict):
        asyncio.run(board.verify(3, WeightChecksums(worker="bad", ranks=[{}])))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("has_deltas", [True, False])
def test_a_version_is_written_announced_awaited_and_counted(
    board: WeightBoard,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
    has_deltas: bool,
) -> None:
    static = tmp_path / "config.json"
    static.write_text("{}")
    fenced: list[WorkerReport] = []
    published: list[tuple[int, float]] = []
    awaited: list[tuple[WeightManifest, float]] = []
    late = worker(1)

    def wait_confirmed(wanted: WeightManifest, limit_s: float, say: Any) -> list[WorkerReport]:
        assert board.latest() == wanted, "announced before"
        awaited.append((wanted, limit_s))
        return [late]

    monkeypatch.setattr(board, "wait_confirmed", wait_confirmed)
    publisher = Publisher(
        board,
        [static],
        "run",
        7.0,
        fenced.append,
        print,
        published=lambda size, seconds: published.append((size, seconds)),
        shared=shared,
        has_deltas=has_deltas,
    )
    for version in (1, 2):
        weights = torch.zeros(9000)
        weights[version] = 1
        publisher.publish([("a", weights)], version)
        found = board.latest()
        assert found is not None
        folder = board.directory / f"v{version:06d}"
        sizes = [path.stat().st_size for path in folder.iterdir() if path.suffix != ".delta"]
        size, seconds = published[-1]
        assert size == sum(sizes)
        assert 0 <= seconds < LIMIT_S
        assert found.directory == (str(folder.absolute()) if shared else "")
        deltas = [file.name for file in found.files if file.delta]
        is_second = has_deltas and version == 2
        assert deltas == (["model.safetensors"] if is_second else [])
    assert fenced == [late, late]
    assert [(each.version, limit_s) for each, limit_s in awaited] == [(1, 7.0), (2, 7.0)]

    board._change_latest(asleep=True)
    publisher.wake()
    assert (awaited[-1][0].version, awaited[-1][0].asleep) == (2, False)
    assert len(fenced) == 3
    asked: list[float] = []
    monkeypatch.setattr(board, "sleep", asked.append)
    publisher.sleep()
    assert asked == [7.0]


def test_a_broadcast_version_is_checked_after_the_nodes_have_it(
    board: WeightBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sent = manifest(3)

    def publish(weights: Any, version: int) -> tuple[WeightManifest, int]:
        done.append(f"publish {version}")
        return sent, 40

    def wait_confirmed(*_: Any) -> list[WorkerReport]:
        done.append("confirmed")
        return []

    broadcaster: Any = SimpleNamespace(
        publish=publish,
        refuse_other_nccl=lambda: done.append("libraries"),
        close_if_broken=lambda: done.append("group"),
    )
    monkeypatch.setattr(board, "wait_confirmed", wait_confirmed)
    sizes: list[int] = []
    publisher = Publisher(
        board,
        [],
        "run",
        7.0,
        print,
        print,
        published=lambda size, _: sizes.append(size),
        broadcaster=broadcaster,
    )
    publisher.publish([], 3)
    assert done == ["publish 3", "confirmed", "libraries", "group"]
    assert sizes == [40]


@pytest.mark.parametrize("way", ["broadcast", "shared", "http"])
def test_the_log_says_how_a_version_went_under_the_id_of_its_requests(
    board: WeightBoard,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
) -> None:
    sent = manifest(3, directory="/shared" if way == "shared" else "")
    if way == "broadcast":
        member = worker(0, incarnation="first")
        group = EngineGroup([member], Rendezvous("127.0.0.1"), LIMIT_S)
        sent.broadcast = group.announcement([])
        group.close()
    ids: list[tuple[str, str]] = []

    def wait_confirmed(*_: Any) -> list[WorkerReport]:
        ids.append((logs.request_id(), logs.run_id()))
        return []

    times = iter([100.0, 104.0])
    monkeypatch.setattr(publisher_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(board, "wait_confirmed", wait_confirmed)
    broadcaster: Any = SimpleNamespace(
        publish=lambda weights, version: (sent, 8_000_000),
        refuse_other_nccl=lambda: None,
        close_if_broken=lambda: None,
    )
    published: list[tuple[int, float]] = []
    publisher = Publisher(
        board,
        [],
        "run",
        7.0,
        print,
        print,
        published=lambda *how: published.append(how),
        broadcaster=broadcaster,
    )
    with caplog.at_level("INFO", logger="trainer.weights.publisher"):
        publisher.publish([], 3)
    assert ids == [("run-v3", "run")]
    assert published == [(8_000_000, 4.0)]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert line == f"weights 3: 8.0 MB in 4.00 s (2 MB/s) by {way}"


class Clock:
    """Time that passes while the sender waits; what happens then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.events: list[tuple[float, Callable[[], object]]] = []
        time = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        patch.setattr(broadcast, "time", time)
        patch.setattr(progress_module, "time", time)
        patch.setattr(broadcast, "wait", self.wait)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 1000.0, "it never ends"
        for event in [each for each in self.events if each[0] <= self.now]:
            self.events.remove(event)
            event[1]()

    def wait(self, futures: Any, seconds: float) -> Any:
        if not futures[0].done():
            self.sleep(seconds)
        return SimpleNamespace(done=[each for each in futures if each.done()])


@pytest.mark.parametrize(
    "case", ["sent", "slow", "stuck", "lost", "failed", "blamed", "blamed later", "restarted"]
)
def test_why_a_broadcast_failed_is_told_with_the_engine_at_fault(
    board: WeightBoard, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    clock = Clock(monkeypatch)
    sender = Broadcaster(board, [], "run", 5.0, Rendezvous("127.0.0.1"))
    member = worker(0, incarnation="first")
    group: Any = SimpleNamespace(members=[member])
    done: Future[None] = Future()
    transfer_: Any = SimpleNamespace(done=done, sent=0)
    bad = member.model_copy(update={"state": "failed", "detail": "out of memory"})
    board.report(member.model_copy(update={"state": "updating"}))

    def at(seconds: float, event: Callable[[], object]) -> None:
        clock.events.append((100.0 + seconds, event))

    def fail() -> None:
        done.set_exception(RuntimeError("reset"))

    def move() -> None:
        transfer_.sent += 1

    match case:
        case "sent":
            at(1.0, lambda: done.set_result(None))
        case "slow":
            for second in range(1, 30):
                at(second * 1.0, move)
            at(30.0, lambda: done.set_result(None))
        case "stuck":
            at(2.0, move)
        case "lost":
            at(1.0, lambda: board.report(bad))
        case "failed":
            at(1.0, fail)
        case "blamed":
            at(1.0, lambda: board.report(bad))
            at(1.0, fail)
        case "blamed later":
            at(1.0, fail)
            at(3.5, lambda: board.report(bad))
        case "restarted":
            at(1.0, lambda: board.report(member.model_copy(update={"incarnation": "second"})))
    found = sender._problem(group, transfer_)

    took_s = clock.now - 100.0
    if case in ("sent", "slow"):
        assert found is None
        assert took_s == pytest.approx({"sent": 1.0, "slow": 30.0}[case], abs=0.2)
        return
    assert found is not None
    assert "rollout-server-0 is " in found
    assert ("failed: out of memory" in found) == (case in ("lost", "blamed", "blamed later"))
    assert ("RuntimeError: reset" in found) == (case in ("failed", "blamed", "blamed later"))
    assert ("no progress" in found) == (case == "stuck")
    expected = {"stuck": 7.0, "failed": 4.0, "blamed later": 3.5}.get(case, 1.0)
    assert took_s == pytest.approx(expected, abs=0.3)


@pytest.mark.parametrize("is_done", [True, False])
def test_a_broadcast_that_fails_is_withdrawn_and_its_group_closed(
    board: WeightBoard, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    sender = Broadcaster(board, [], "run", 5.0, Rendezvous("127.0.0.1"))
    put: list[Any] = []
    closes: list[bool] = []

    class Sending:
        def __init__(self, group: Any, flats: Any) -> None:
            self.done: Future[None] = Future()
            if is_done:
                self.done.set_exception(RuntimeError("reset"))
            put.append(len(flats))

        def put(self, index: int) -> None:
            put.append(index)

        def finish(self) -> None:
            put.append("end")

    asked: list[list[str]] = []
    member = worker(0, incarnation="first")
    real = EngineGroup([member], Rendezvous("127.0.0.1"), LIMIT_S)
    real.close()
    group: Any = SimpleNamespace(
        announcement=real.announcement, close=lambda stuck: closes.append(stuck)
    )

    def group_of(members: Any) -> Any:
        asked.append([each.name for each in members])
        return group

    monkeypatch.setattr(broadcast, "Transfer", Sending)
    monkeypatch.setattr(sender, "_group_of", group_of)
    monkeypatch.setattr(sender, "_problem", lambda *_: "it broke")
    board.report(member)
    board.report(worker(1, state="starting"))
    weights = {"a": torch.ones(3), "b": torch.ones(2).bfloat16()}
    for version in (1, 2):
        found, size = sender.publish(weights.items(), version)
        assert (found.version, found.broadcast, size) == (version, None, 16)
        assert board.latest() == found
        assert put == [2, 0, 1, "end"]
        put.clear()
    assert asked == [["rollout-server-0"]] * 2, "only engines that are ready"
    assert closes == [not is_done] * 2


def test_a_group_is_joined_once_and_gets_every_bucket_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joins: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    sent: list[tuple[Any, int, str]] = []
    made: list[Any] = []

    class Staging:
        def __init__(self, device: Any) -> None:
            made.append(device)

        def to_device(self, flat: Tensor) -> str:
            return f"copy of {flat.numel()}"

        def on_stream(self, work: Callable[[], object]) -> None:
            work()

        def synchronize(self) -> None:
            made.append("waited")

    def join(*words: Any, **options: Any) -> str:
        joins.append((words, options))
        return "the group"

    def send(flat: Any, *, src: int, group: str) -> None:
        sent.append((flat, src, group))

    members = [worker(0, tensor_parallel_size=2), worker(1)]
    group = EngineGroup(members, Rendezvous("127.0.0.1"), LIMIT_S)
    monkeypatch.setattr(transfer, "Staging", Staging)
    monkeypatch.setattr(transfer, "join", join)
    monkeypatch.setattr(transfer, "group_device", lambda backend: f"device of {backend}")
    monkeypatch.setattr(dist, "broadcast", send)
    group.wait()
    for count in (3, 5):
        group.send(torch.zeros(count, dtype=torch.uint8))
    group.wait()
    options = {
        "rank": 0,
        "world_size": 4,
        "name": group.name,
        "backend": "gloo",
        "timeout_s": LIMIT_S,
    }
    assert joins == [(("127.0.0.1", group.port), options)]
    assert sent == [("copy of 3", 0, "the group"), ("copy of 5", 0, "the group")]
    assert made == ["device of gloo", "waited"]
    group._process_group = None
    group.close()


@pytest.mark.parametrize("own", ["", "2.29.7"])
def test_only_known_versions_of_nccl_are_compared(board: WeightBoard, own: str) -> None:
    sender = Broadcaster(board, [], "run", 5.0, Rendezvous("127.0.0.1", nccl=own))
    board.report(worker(0))
    sender.refuse_other_nccl()
    board.report(worker(1, libraries=EngineLibraries(torch="2.9", nccl="2.27.3")))
    if own:
        with pytest.raises(ConfigError) as refused:
            sender.refuse_other_nccl()
        assert refused.value.value == "distributed"
    else:
        sender.refuse_other_nccl()


@pytest.mark.parametrize("fails", [True, False])
def test_requests_name_an_adapter_once_the_engines_have_it(fails: bool) -> None:
    done: list[str] = []
    client: Any = SimpleNamespace(adapter=("before", 2))

    def publish(weights: Any, version: int) -> None:
        assert (list(weights), client.adapter) == ([1], ("before", 2))
        done.append(f"publish {version}")
        if fails:
            raise NotFound("nobody has it")

    inner: Any = SimpleNamespace(
        publish=publish, sleep=lambda: done.append("sleep"), wake=lambda: done.append("wake")
    )
    publisher = AdapterPublisher(inner, client, "run")
    publisher.sleep()
    with suppress(NotFound):
        publisher.publish([1], 3)  # type: ignore[list-item]
    publisher.wake()
    assert done == ["sleep", "publish 3", "wake"]
    name, version = client.adapter
    assert version == (2 if fails else 3)
    assert (name == "before") == fails


@pytest.mark.parametrize("is_adapter", [True, False])
@pytest.mark.parametrize("has_generation", [True, False])
def test_a_version_is_completed_by_the_files_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_adapter: bool, has_generation: bool
) -> None:
    def saves(name: str) -> Any:
        return SimpleNamespace(save_pretrained=lambda directory: make(directory / name))

    def make(path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.name)

    config = Config()
    config.lora.rank = 4 if is_adapter else 0
    config.lora.publish = "adapter"
    kept = SimpleNamespace(
        texts={"preprocessor.json": "{}"}, saved_config=lambda config: saves(f"{config}.json")
    )
    model = SimpleNamespace(
        kept=kept,
        config="config",
        generation_config=saves("generation.json") if has_generation else None,
    )
    monkeypatch.setattr(adapters, "adapter_config", lambda model: "of peft")
    directory = tmp_path / "static"
    make(directory / "of an earlier attempt")
    found = static_files(config, model, saves("tokenizer.json"), directory)
    if is_adapter:
        assert found == [directory / ADAPTER_CONFIG]
        assert found[0].read_text() == "of peft"
        return
    names = ["config.json", "preprocessor.json", "tokenizer.json"]
    names += ["generation.json"] * has_generation
    assert found == [directory / name for name in sorted(names)]
    assert (directory / "preprocessor.json").read_text() == "{}"


@pytest.mark.parametrize("seed", range(6))
def test_a_group_has_a_rank_for_every_process_of_its_engines(seed: int) -> None:
    draw = random.Random(seed)
    numbers = draw.sample(range(20), draw.randint(1, 4))
    members = [
        worker(number, tensor_parallel_size=draw.randint(1, 4), incarnation=f"i{number}")
        for number in numbers
    ]
    group = EngineGroup(members, Rendezvous("127.0.0.1"), 5.0)
    buckets = [Bucket(names=["a"], dtypes=["float32"], shapes=[[3]])]
    told = group.announcement(buckets)
    ordered = sorted(members, key=lambda each: each.name)
    ranks = [
        range(told.ranks[each.name], told.ranks[each.name] + each.tensor_parallel_size)
        for each in ordered
    ]
    assert [rank for part in ranks for rank in part] == list(range(1, told.world_size))
    assert told.incarnations == {each.name: each.incarnation for each in members}
    assert (told.group, told.master_address) == (group.name, "127.0.0.1")
    assert (told.master_port, told.backend, told.buckets) == (group.port, "gloo", buckets)

    assert group.fits(members[::-1])
    restarted = members[0].model_copy(update={"incarnation": "new"})
    assert not group.fits([restarted, *members[1:]])
    assert not group.fits(members[1:])
    assert not group.fits([*members, worker(99)])
    group.close()
    assert not group.fits(members)
    assert EngineGroup(members, Rendezvous("127.0.0.1"), 5.0).name != group.name


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("stuck", [True, False])
def test_a_stuck_broadcast_is_aborted_where_it_does_not_end_by_itself(
    monkeypatch: pytest.MonkeyPatch, backend: Any, stuck: bool
) -> None:
    done: list[str] = []
    stores: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def store(*words: Any, **options: Any) -> Any:
        stores.append((words, options))
        return SimpleNamespace(port=1)

    inner: Any = SimpleNamespace(abort=lambda: done.append("abort"))
    monkeypatch.setattr(
        transfer,
        "dist",
        SimpleNamespace(
            TCPStore=store,
            destroy_process_group=lambda group: done.append("destroy"),
        ),
    )
    group = EngineGroup([worker(0)], Rendezvous("127.0.0.1", backend=backend), 5.0)
    limits = {"timeout": timedelta(seconds=5.0), "wait_for_workers": False, "is_master": True}
    assert stores == [(("127.0.0.1", 0), limits)]
    group.close(stuck=stuck)
    assert done == [], "nobody has joined"
    group._process_group = inner
    group.close(stuck=stuck)
    if not stuck:
        assert done == ["destroy"]
    else:
        assert done == (["abort"] if backend == "nccl" else [])
    group.close()
    assert done.count("destroy") == 1
    assert group.closed


@pytest.mark.parametrize("before", [None, "1"])
def test_nccl_ends_no_process_while_a_group_is_joined(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setattr(transfer, "_OF_OTHER_GROUPS", before)
    monkeypatch.setenv(name, before or "")
    with suppress(ZeroDivisionError), transfer._no_watchdog():
        assert os.environ[name] == "0"
        raise ZeroDivisionError
    assert os.environ.get(name) == before


STATES: list[WorkerState] = ["ready", "updating", "starting", "failed", "stale"]


@pytest.mark.parametrize("seed", range(10))
def test_who_has_fallen_out_of_a_group_is_named(board: WeightBoard, seed: int) -> None:
    draw = random.Random(seed)
    sender = Broadcaster(board, [], "run", 5.0, Rendezvous("127.0.0.1"))
    members = [worker(number, incarnation="first") for number in range(4)]
    group: Any = SimpleNamespace(members=members, closed=False, name="g")
    lost = set()
    for member in members:
        if draw.random() < 0.2:
            lost.add(member.name)  # it says nothing any more
            continue
        update = {
            "state": draw.choice([*STATES, "ready", "updating"]),
            "incarnation": draw.choice(["first", "first", "first", "second"]),
            "detail": draw.choice(["", "out of memory"]),
        }
        board.report(member.model_copy(update=update))
        if update["incarnation"] == "second" or update["state"] in ("failed", "starting"):
            lost.add(member.name)
    board.report(worker(9, state="failed"))  # no member
    said = sender._lost(group)
    assert (said is None) == (not lost)
    for member in members:
        assert (member.name in (said or "")) == (member.name in lost)
    assert "rollout-server-9" not in (said or "") + sender._states(group)

    closes: list[str] = []
    group.close = lambda: closes.append("close")
    sender._group = group
    sender.close_if_broken()
    assert len(closes) == bool(lost)
    sender.close()
    assert len(closes) == bool(lost) + 1
    group.closed = True
    sender.close_if_broken()
    sender.close()
    assert len(closes) == bool(lost) + 1


@pytest.mark.parametrize("seed", range(10))
def test_buckets_are_as_large_as_they_may_be_and_ready_in_order(seed: int) -> None:
    draw = random.Random(seed)
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.uint8)

    def tensors(like: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        if like:
            return {name: torch.randn(each.shape).to(each.dtype) for name, each in like.items()}
        return {
            f"t{number}": torch.randn(draw.randint(0, 40)).to(draw.choice(dtypes))
            for number in range(draw.randint(1, 12))
        }

    limit = draw.choice([1, 100, 1 << 20])
    copy = HostCopy(limit)
    weights = tensors()
    for version in (1, 2):
        ready: list[int] = []
        weights = tensors(weights)
        copy.fill(weights.items(), version, ready.append)
        assert ready == list(range(len(copy.buckets)))
        with copy.reading(version) as found:
            assert all(torch.equal(found[name], each) for name, each in weights.items())
        assert copy.size == sum(each.nbytes for each in weights.values())
    names = [name for bucket in copy.buckets for name in bucket.names]
    assert names == list(weights)
    for bucket, flat in zip(copy.buckets, copy.flats, strict=True):
        assert len(set(bucket.dtypes)) == 1
        assert flat.numel() <= limit or len([n for n in bucket.names if weights[n].nbytes]) <= 1
        assert [name for name, _ in views(flat, bucket)] == bucket.names
    for before, after in zip(copy.buckets, copy.buckets[1:], strict=False):
        size = sum(weights[name].nbytes for name in [*before.names, after.names[0]])
        assert size > limit or before.dtypes[0] != after.dtypes[0], "they would fit into one"


def test_the_files_of_another_run_are_not_taken_for_those_of_this_one(board: WeightBoard) -> None:
    """Each run counts its versions from 1."""
    for run_id in ("first", "second"):
        source = Source(run_id)
        source.go_on.set()
        board.source = source
        latest = WeightManifest(version=2, run_id=run_id)
        board.announce(latest)
        assert asyncio.run(board.with_files(latest, LIMIT_S)).run_id == run_id
        assert source.writes == [2]
        announced = board.latest()
        assert announced is not None
        assert (announced.run_id, len(announced.files)) == (run_id, 1)
