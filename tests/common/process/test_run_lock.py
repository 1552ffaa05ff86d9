"""Only one run at a time can use a directory, whatever happens to the other runs."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, ServiceError
from common.process import run_lock
from common.process.run_lock import LOCK, RunLock
from common.process.storage import StorageFailed
from tests.support.errors import raises
from tests.support.paths import ROOT

HOLDER = """
import sys; from pathlib import Path; from common.process.run_lock import RunLock
with RunLock(Path(sys.argv[1]), "first"): print("held", flush=True); sys.stdin.read()
"""


@contextmanager
def another(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until it is killed."""
    command = [sys.executable, "-c", HOLDER, str(directory)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.integration
@pytest.mark.parametrize("stopped", [False, True])
def test_a_second_run_is_refused_at_once_and_names_the_first(tmp_path: Path, stopped: bool) -> None:
    with another(tmp_path / "run") as process:
        if stopped:  # alive, but unable to answer
            process.send_signal(signal.SIGSTOP)
        with pytest.raises(
            ConfigError, match=rf"run first \(process {process.pid} on .*, since 2.* is using"
        ) as error:
            RunLock(tmp_path / "run", "second").__enter__()
    assert (error.value.field, error.value.value) == ("trainer.run_dir", str(tmp_path / "run"))


@pytest.mark.integration
def test_a_killed_run_releases_the_directory_at_once(tmp_path: Path) -> None:
    with another(tmp_path) as process:
        process.kill()
        process.wait()
        with RunLock(tmp_path, "second"):
            assert json.loads((tmp_path / LOCK).read_bytes())["run"] == "second"
    assert (tmp_path / LOCK).read_bytes() == b""


def test_a_process_cannot_lock_a_directory_twice(tmp_path: Path) -> None:
    with RunLock(tmp_path, "first"), raises(ConfigError, code="run_in_use") as error:
        RunLock(tmp_path, "second", "state_dir").__enter__()
    found = error.value
    assert (found.code, found.field, found.value) == ("run_in_use", "state_dir", str(tmp_path))
    with RunLock(tmp_path, "third") as third:
        assert third.run == "third"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_BEAT_S", 0.05), ("_STALE_S", 1.0)):
        monkeypatch.setattr(run_lock, name, value)


@pytest.fixture(params=["elsewhere", "no flock"])
def unreachable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the kernel's lock useless: the other run is on another machine, or the file system has
    no locks."""
    if request.param == "no flock":

        def refuse(*_: Any) -> None:
            raise OSError(95, "Operation not supported")

    else:
        names = iter(f"machine {i}" for i in range(10))
        monkeypatch.setattr(run_lock, "_machine", lambda: next(names))

        def refuse(*_: Any) -> None:
            pass

    monkeypatch.setattr("fcntl.flock", refuse)


@pytest.mark.usefixtures("quick", "unreachable")
def test_a_run_that_no_lock_reaches_is_detected_by_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_STALE_S", 10.0)  # the first beat ends it
    with RunLock(tmp_path, "first"), raises(ConfigError, code="run_in_use"):
        RunLock(tmp_path, "second").__enter__()
    with RunLock(tmp_path, "third"):  # the first run recorded its end, so nobody waits for it
        pass


@pytest.mark.usefixtures("quick", "unreachable")
def test_a_run_without_a_heartbeat_is_taken_over_and_fails_when_it_wakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_BEAT_S", 1e6)
    with ExitStack() as stack:
        first = stack.enter_context(RunLock(tmp_path, "stopped"))
        first.check()
        stack.enter_context(RunLock(tmp_path, "second")).check()
        # The run wakes up; its next heartbeat is still to come.
        with raises(ServiceError, code="run_taken_over") as error:
            first.check()
        found = error.value
        assert (found.code, found.field) == ("run_taken_over", "trainer.run_dir")
        assert found.value == str(tmp_path)


@pytest.mark.usefixtures("quick", "unreachable")
@pytest.mark.parametrize("noticed", [False, True])
def test_a_run_that_ends_leaves_the_lock_to_the_one_that_took_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    monkeypatch.setattr(run_lock, "_BEAT_S", 1e6)
    first = RunLock(tmp_path, "stopped").__enter__()
    with RunLock(tmp_path, "second"):
        if noticed:
            monkeypatch.setattr(run_lock, "_BEAT_S", 0.0)
            first._beat()
        first.__exit__()
        assert json.loads((tmp_path / LOCK).read_bytes())["run"] == "second"


@pytest.mark.usefixtures("quick", "unreachable")
@pytest.mark.parametrize("read", [1, 2, 3])
def test_a_volume_that_does_not_answer_is_not_a_free_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    monkeypatch.setattr(run_lock, "_BEAT_S", 1e6)
    monkeypatch.setattr(run_lock, "_STALE_S", 1e6)  # the watch goes on until the read fails
    pread = os.pread
    reads = 0

    def fails_once(file: int, size: int, offset: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads == read:
            raise TimeoutError("the volume does not answer")
        return pread(file, size, offset)

    with RunLock(tmp_path, "first") as first:
        monkeypatch.setattr(os, "pread", fails_once)
        with raises(StorageFailed):
            RunLock(tmp_path, "second").__enter__()
        assert json.loads((tmp_path / LOCK).read_bytes())["run"] == "first"
        first.check()


def test_a_damaged_lock_file_blocks_nobody(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(bytes(range(100, 200)))
    with RunLock(tmp_path, "run"):
        pass


def test_somebody_who_looks_at_the_lock_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    path = tmp_path / LOCK
    path.write_text("{}")
    reader = os.open(path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    timer = threading.Timer(0.15, os.close, [reader])
    timer.start()
    with RunLock.of_new_run(tmp_path, "run"):
        timer.join()


def test_a_run_ends_with_its_own_error_when_the_volume_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise TimeoutError("the volume does not answer")

    first = RunLock(tmp_path, "first").__enter__()
    monkeypatch.setattr(os, "ftruncate", fails)
    # What it raised would replace the error with which the run ends.
    first.__exit__()
    with RunLock(tmp_path, "next") as lock:
        lock.check()
