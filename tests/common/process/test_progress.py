"""Waits that last as long as a number grows, and what counts as work of a process."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.process import progress
from common.process.progress import Progress, Stuck, bounded
from common.process.work_meter import STEP_BYTES, News, WorkMeter
from tests.support.errors import raises
from tests.support.processes.clocks import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("common.process.progress.time", clock)
    return clock


def looks(waits: Progress, clock: Clock, numbers: list[float]) -> list[bool]:
    """Looks once a second; returns whether the wait was stuck at each look."""
    found = []
    for number in numbers:
        clock.now += 1.0
        waits.saw(number)
        found.append(waits.is_stuck)
    return found


def test_a_wait_may_last_many_times_its_limit_while_its_number_grows(clock: Clock) -> None:
    waits = Progress("weights 3", 4.0)
    assert not any(looks(waits, clock, [second // 3 for second in range(60)]))
    assert waits.waited_s == 60.0


def test_a_wait_without_growth_is_stuck_after_its_limit(clock: Clock) -> None:
    waits = Progress("weights 3", 4.0, unit="bytes", field="a.setting", remedy="look there")
    assert looks(waits, clock, [7, 7, 7, 7, 7, 7]) == [False, False, False, False, True, True]
    with pytest.raises(Stuck) as raised:
        waits.check()
    assert str(raised.value) == (
        "no progress for 5 s of waiting for weights 3 after 6 s: 7 bytes, unchanged for 5 s · "
        "field: a.setting · value: 4.0 · remedy: look there"
    )


def test_what_is_done_again_is_no_progress(clock: Clock) -> None:
    """A download that breaks at the same byte again and again."""
    waits = Progress("weights 3", 4.0)
    assert looks(waits, clock, [1, 2, 3, 0, 1, 2, 3])[-1]


def test_a_process_that_was_stopped_itself_judges_nobody(clock: Clock) -> None:
    waits = Progress("weights 3", 4.0)
    waits.saw(1)
    clock.now += 3600.0
    waits.saw(1)
    assert not waits.is_stuck
    assert looks(waits, clock, [1, 1, 1])[-1]


def test_growth_counts_for_those_who_wait_for_this_process(clock: Clock) -> None:
    before = progress.total()
    looks(Progress("weights", 4.0), clock, [1, 1, 2])
    assert progress.total() == before + 2
    looks(Progress("all ranks", 4.0, counts=False), clock, [1, 2, 3])
    assert progress.total() == before + 2


async def test_bounded_returns_raises_and_cancels() -> None:
    async def answer() -> str:
        await asyncio.sleep(0.01)
        return "done"

    async def fail() -> None:
        raise ValueError("refused")

    assert await bounded(answer(), Progress("an answer", 60.0), lambda: 0) == "done"
    with pytest.raises(ValueError, match="refused"):
        await bounded(fail(), Progress("an answer", 60.0), lambda: 0)

    ended = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with raises(Stuck, code="stuck", value="0.05"):
        await bounded(hang(), Progress("an answer", 0.05), lambda: 7)
    await ended.wait()


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ("Loading weights\n" * 3, 1),
        ("[21:00:01] waited 60 s so far\n[21:01:01] waited 120 s so far\n", 1),
        ("shards:  5%|#   | 1/19\rshards: 10%|##  | 2/19\rshards: 10%|##  | 2/19\r", 2),
        ("Capturing batches (bs=256): 3/52\nCapturing batches (bs=248): 4/52\n", 2),
        ("retry 3/5\nretry 1/5\nretry 3/5\n", 1),
        ("an unfinished li", 0),
        ("\n\n  \n-----\n", 0),
    ],
)
def test_only_what_is_new_counts(said: str, count: int) -> None:
    """A process that says for ever that it still waits makes no progress."""
    whole = News()
    whole.feed(said)
    in_pieces = News()
    for letter in said:
        in_pieces.feed(letter)
    assert (whole.count, in_pieces.count) == (count, count)


WORKS = """
import subprocess, sys, time
what, path = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
if what == "reads":
    open(path, "rb").read()
elif what == "maps":
    import mmap
    file = open(path, "rb")
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sum(mapped[::4096])
elif what == "child":
    subprocess.run([sys.executable, "-c", f"open({path!r}, 'rb').read()"])
elif what == "spins":
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.integration
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(
    ("what", "is_work"), [("reads", True), ("maps", True), ("child", True), ("spins", False)]
)
def test_loading_is_work_and_spinning_is_not(what: str, is_work: bool, tmp_path: Path) -> None:
    """A process that waits for another GPU spins."""
    file = tmp_path / "weights"
    file.write_bytes(b"\1" * (3 * STEP_BYTES))
    words = [sys.executable, "-c", WORKS, what, str(file)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        meter = WorkMeter(process.pid)
        before = meter.read()
        process.stdin.write(b"go\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"done\n"
        grown = meter.read() - before
        process.stdin.write(b"end\n")
    assert (grown >= 2) == is_work


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_what_this_process_loads_counts_while_it_works(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"\1" * (2 * STEP_BYTES))
    with progress.working():
        begun = progress.total()
        while progress.total() == begun:
            file.read_bytes()
            time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_looking_is_no_work() -> None:
    """The meter of this process reads files of every process, again and again."""
    meter = WorkMeter(os.getpid())
    meter.read()
    before = meter._total
    while meter._own < 1 << 20:  # a quiet machine has few processes to read
        meter.read()
    assert meter._total - before < meter._own / 4
