"""Who holds a directory, over random starts, ends, kills and pauses of runs on two machines, whose
kernels' locks reach only their own processes or, on some file systems, nobody: on a clock of the
test, by what was written to the lock's file.
"""

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError, ServiceError
from common.process import run_lock
from common.process.run_lock import LOCK, RunLock
from common.process.storage import StorageFailed
from tests.support.errors import raises

BEAT_S = 5.0
STALE_S = 30.0
TRIES_S = 0.5


class Run:
    """A process that wants the directory or has it."""

    def __init__(self, world: "World", machine: str) -> None:
        self.machine = machine
        self.is_paused = False
        self.is_over = False
        self.beats_at = 0.0
        world.acting = self
        # All have one name, which proves nothing.
        self.lock = RunLock(world.folder, "run")

    @property
    def token(self) -> str:
        return str(self.lock._own["token"])


class World:
    """The machines, their kernels' locks, the file and the time."""

    def __init__(self, folder: Path, draw: random.Random, *, has_locks: bool) -> None:
        self.folder = folder
        self.draw = draw
        self.has_locks = has_locks
        self.now = 100.0
        self.acting: Run
        self.runs: list[Run] = []
        self.kernel: dict[int, str] = {}
        """The machine of every file that is locked."""
        self.writes: list[tuple[float, Run, str]] = []
        """When who wrote which token; empty: the file was emptied."""
        self.later: list[Callable[[], None]] = []

    # what the lock uses of Python

    def flock(self, file: int, operation: int) -> None:
        if not self.has_locks:
            raise OSError(errno.ENOTSUP, "no locks")
        assert operation == 6, "exclusive, and without waiting"
        machine = self.acting.machine
        if machine in (self.kernel[other] for other in self.kernel if other != file):
            raise BlockingIOError
        self.kernel[file] = machine

    def close(self, file: int) -> None:
        self.kernel.pop(file, None)
        os.close(file)

    def pwrite(self, file: int, content: bytes, at: int) -> int:
        self.writes.append((self.now, self.acting, json.loads(content)["token"]))
        return os.pwrite(file, content, at)

    def ftruncate(self, file: int, size: int) -> None:
        self.writes.append((self.now, self.acting, ""))
        os.ftruncate(file, size)

    def sleep(self, seconds: float) -> None:
        """Lets the others work."""
        me = self.acting
        self.now += seconds
        for run in self.runs:
            if not run.is_over and not run.is_paused and self.now >= run.beats_at:
                self.beat(run)
        if self.later and self.draw.random() < 0.003:
            self.later.pop()()
        self.acting = me

    # what happens to runs

    def beat(self, run: Run) -> None:
        self.acting = run
        run.beats_at = self.now + BEAT_S
        run.lock._beat()

    def end(self, run: Run) -> None:
        self.acting = run
        run.is_over = True
        run.lock.__exit__()

    def kill(self, run: Run) -> None:
        run.is_over = True
        self.close(run.lock._file)

    def owner(self) -> str:
        """Returns the token in the file."""
        content = (self.folder / LOCK).read_bytes() if (self.folder / LOCK).exists() else b""
        return json.loads(content)["token"] if content.strip() else ""


@pytest.mark.parametrize("has_locks", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_no_run_takes_a_directory_from_one_that_lives(
    seed: int, has_locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    world = World(tmp_path / "run", draw, has_locks=has_locks)

    class Once:
        """Lets a heartbeat come once for every call of `_beat`."""

        def __init__(self) -> None:
            self.is_set = False
            self.came = True

        def set(self) -> None:
            self.is_set = True

        def wait(self, seconds: float) -> bool:
            assert seconds == BEAT_S
            self.came = not self.came
            return self.came or self.is_set

    def thread(**options: Any) -> Any:
        return SimpleNamespace(start=lambda: None, join=lambda: None)

    class Os:
        close = staticmethod(world.close)
        pwrite = staticmethod(world.pwrite)
        ftruncate = staticmethod(world.ftruncate)

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    time = SimpleNamespace(
        monotonic=lambda: world.now, sleep=world.sleep, strftime=lambda text: "now"
    )
    fcntl = SimpleNamespace(flock=world.flock, LOCK_EX=2, LOCK_NB=4, LOCK_SH=1)
    monkeypatch.setattr(run_lock, "os", Os())
    monkeypatch.setattr(run_lock, "time", time)
    monkeypatch.setattr(run_lock, "fcntl", fcntl)
    monkeypatch.setattr(run_lock, "threading", SimpleNamespace(Event=Once, Thread=thread))
    monkeypatch.setattr(run_lock, "_machine", lambda: world.acting.machine)

    def pause() -> None:
        for run in world.runs:
            run.is_paused = draw.random() < 0.5

    def end_one(how: Callable[[Run], None]) -> Callable[[], None]:
        def ends() -> None:
            alive = [run for run in world.runs if not run.is_over]
            if alive:
                how(draw.choice(alive))

        return ends

    for _ in range(12):
        deeds = [pause, end_one(world.end), end_one(world.kill)]
        draw.choices(deeds, weights=[6, 1, 1])[0]()
        world.later = draw.choices([pause, end_one(world.end), end_one(world.kill)], k=2)
        run = Run.__new__(Run)
        world.acting = run
        run.machine = draw.choice("AB")
        run.__init__(world, run.machine)  # type: ignore[misc]
        before = world.owner()
        holders = {each.token: each for each in world.runs}
        began = world.now
        first = len(world.writes)
        try:
            run.lock.__enter__()
            refusal = None
        except ConfigError as error:
            refusal = error
        entered = refusal is None
        took = world.now - began
        seen = [each for each in world.writes[first:] if each[1] is not run]

        holder = holders.get(before)
        is_covered = has_locks and holder is not None and holder.machine == run.machine
        locked_out = has_locks and not entered and run.lock._file not in world.kernel
        if took == 0:
            assert entered
            assert before == "" or is_covered, "another machine's run is watched"
        elif not entered:
            # A kernel's lock of this machine, or a sign of life.
            assert locked_out or seen[-1][2]
        elif not is_covered and took > TRIES_S + 1:
            emptied = bool(seen) and seen[-1][2] == ""
            assert emptied or (not seen and took == pytest.approx(STALE_S, abs=TRIES_S + 0.3))
        if refusal is not None:
            assert (refusal.code, refusal.field) == ("run_in_use", "trainer.run_dir")
            assert refusal.value == str(world.folder)
            assert run.token != world.owner()
        else:
            assert world.owner() == run.token
            world.runs.append(run)
            run.beats_at = world.now + BEAT_S

        for each in world.runs:
            if each.is_over:
                continue
            world.acting = each
            stolen = any(
                token not in (each.token, "") for _, _, token in world.writes[_place(world, each) :]
            )
            assert (world.owner() == each.token) is not stolen
            if stolen:
                with raises(ServiceError, code="run_taken_over", value=str(world.folder)):
                    each.lock.check()
            else:
                each.lock.check()
        for _ in range(draw.randint(0, 80)):
            world.sleep(0.2)

    for each in world.runs:
        written = [at for at, who, _ in world.writes if who is each]
        assert written, "it had the directory"
    for each in world.runs:
        if not each.is_over:
            is_owner = world.owner() == each.token
            world.end(each)
            assert world.owner() == "" if is_owner else world.owner() != each.token


def _place(world: World, run: Run) -> int:
    """Returns the place of the first write of a run."""
    return next(n for n, (_, who, token) in enumerate(world.writes) if token == run.token)


@pytest.mark.parametrize("has_seen", [True, False])
def test_a_run_that_was_taken_over_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_seen: bool
) -> None:
    """The other run may have ended: what it wrote meanwhile is there nevertheless."""
    monkeypatch.setattr(run_lock, "_BEAT_S", 1e6)
    with RunLock(tmp_path, "first") as first:
        other = dict(first._own) | {"token": "another"}
        if has_seen:
            (tmp_path / LOCK).write_text(json.dumps(other))
            with raises(ServiceError, code="run_taken_over"):
                first.check()
        os.truncate(tmp_path / LOCK, 0)
        with raises(ServiceError, code="run_taken_over"):
            first.check()
        (tmp_path / LOCK).write_text("of the next run")
    assert (tmp_path / LOCK).read_text() == "of the next run"


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"null", b"\xff", b'{"run": "x"', b"{}"])
def test_what_is_no_entry_holds_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with RunLock(tmp_path, "run") as lock:
        size = (tmp_path / LOCK).stat().st_size
        assert size == 512, "to write over it needs no space"
        lock.check()
    assert (tmp_path / LOCK).read_bytes() == b""


@pytest.mark.parametrize("seed", range(20))
def test_a_directory_of_others_is_not_emptied(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    folder = tmp_path / "one/run"
    (folder / "logs/empty").mkdir(parents=True)
    has_lock = draw.random() < 0.5
    if has_lock:
        (folder / LOCK).touch()
    files = draw.choice(
        [[], ["file"], [f"logs/{LOCK}"], ["logs/empty/deep"], [f"logs/{LOCK}", "x"]]
    )
    for name in files:
        (folder / name).touch()
    here = draw.choice([tmp_path, tmp_path / "one", folder, folder / "logs"])
    monkeypatch.chdir(here)
    is_inside = here in (folder, folder / "logs")
    is_foreign = not has_lock and any(Path(name).name != LOCK for name in files)
    if is_inside or is_foreign:
        with raises(ConfigError, field="--clear", value=str(folder)):
            run_lock.refuse_foreign(folder, "--clear")
    else:
        run_lock.refuse_foreign(folder, "--clear")


def test_a_lock_whose_entry_could_not_be_written_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's lock is enough; its file has been empty from the beginning."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    with RunLock(tmp_path, "run") as lock:
        lock.check()
        with raises(ConfigError, code="run_in_use"):
            RunLock(tmp_path, "another").__enter__()


def test_a_volume_that_does_not_answer_says_nothing_about_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: Any) -> None:
        raise TimeoutError("no answer")

    with RunLock(tmp_path, "run") as lock:
        for call in ("pread", "fstat"):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, silent)
                lock.check()
    monkeypatch.setattr(os, "open", silent)
    with raises(StorageFailed, field="trainer.run_dir", value=str(tmp_path / LOCK)) as error:
        RunLock(tmp_path, "run").__enter__()
    assert error.value.message.startswith(".lock cannot be written")


def test_every_new_run_has_a_name_of_its_own(tmp_path: Path) -> None:
    names = {RunLock.of_new_run(tmp_path, "demo").run for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("demo-20") for name in names)


def test_a_lock_that_fails_is_not_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr("fcntl.flock", fails)
    with raises(StorageFailed, field="trainer.run_dir", value=str(tmp_path / LOCK)):
        RunLock(tmp_path, "run").__enter__()
