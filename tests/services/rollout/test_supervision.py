"""Supervision of real child processes: they are kept alive, killed when they hang, and never left
behind."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from common.errors import ConfigError, ServiceError
from common.process.topology import WRONG_SETTING
from services.rollout.supervision import ChildFailed, SupervisedProcess, Timing
from tests.support.processes.processes import alive
from tests.support.processes.waits import comes

pytestmark = pytest.mark.integration

FAST = Timing(probe_s=0.05, hang_s=0.5, stuck_s=20, first_backoff_s=0.01, max_backoff_s=0.02)
SERVE = "import sys, time, pathlib; pathlib.Path(sys.argv[1]).touch(); print('serving', flush=True); time.sleep(600)"
SUPERVISOR = """
import asyncio, pathlib, sys, time
from services.rollout.supervision import SupervisedProcess, Timing
folder = pathlib.Path(sys.argv[1])
async def probe():
    began = time.monotonic()
    (folder / "asking").touch()
    await asyncio.sleep(0.3)
    (folder / "asking").unlink()
    (folder / "answers").open("a").write(".")
    return None if time.monotonic() - began < 3 else "timeout"
async def main():
    async def up(): pass
    async def launch(): return command
    timing = Timing(probe_s=0.05, hang_s=5.2)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    await SupervisedProcess("child", launch, probe, env={}, log_file=folder / "log", timing=timing,
                            on_up=up, on_down=lambda reason: (folder / "down").write_text(reason)).run()
asyncio.run(main())
"""


class Rig:
    """A supervised child that is healthy while the file `flag` exists, which it creates itself."""

    def __init__(self, directory: Path, code: str = SERVE, timing: Timing = FAST) -> None:
        self.flag = directory / "flag"
        self.log_file = directory / "logs" / "child.log"
        self.ups, self.downs = 0, list[str]()
        self.refuse_up = False
        self.code = code
        self.child = SupervisedProcess(
            "child",
            self.launch,
            self.probe,
            env={"GREETING": "hello"},
            log_file=self.log_file,
            timing=timing,
            on_up=self.on_up,
            on_down=self.downs.append,
        )

    async def launch(self) -> list[str]:
        self.flag.unlink(missing_ok=True)
        return [sys.executable, "-c", self.code, str(self.flag)]

    async def probe(self) -> str | None:
        return None if self.flag.exists() else "no flag"

    async def on_up(self) -> None:
        if self.refuse_up:
            raise ServiceError("serves something else")
        self.ups += 1
        self.flag.with_name("up").touch()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[None]"]:
        task = asyncio.create_task(self.child.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_killed_child_is_started_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.running():
        await comes(lambda: rig.child.up, "up")
        first = rig.child.pid
        assert first is not None
        psutil.Process(first).children()[0].kill()
        await comes(lambda: rig.ups == 2, "up again")
        assert len(rig.downs) == 1
        assert rig.downs[0].startswith("the process was killed by SIGKILL (status 137")
        second = rig.child.pid
        assert second is not None
        assert not alive(first)
    assert not alive(second)
    assert rig.log_file.read_text().count("serving") == 2


async def test_child_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.running():
        await comes(lambda: rig.child.up, "up")
        rig.flag.unlink()
        await comes(lambda: rig.ups == 2, "up again")
        assert "killed: no flag" in rig.downs[0]


@pytest.mark.slow
async def test_a_supervisor_that_was_stopped_itself_does_not_blame_the_child(
    tmp_path: Path,
) -> None:
    answers = tmp_path / "answers"
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)]) as supervisor:  # noqa: ASYNC220
        try:
            await comes(lambda: answers.exists() and len(answers.read_text()) > 2, "healthy")
            await comes((tmp_path / "asking").exists, "in the middle of a probe")
            supervisor.send_signal(signal.SIGSTOP)
            seen = len(answers.read_text())
            await asyncio.sleep(6)
            supervisor.send_signal(signal.SIGCONT)
            await comes(
                lambda: len(answers.read_text()) > seen + 3 or (tmp_path / "down").exists(),
                "goes on",
            )
            assert not (tmp_path / "down").exists()
        finally:
            supervisor.kill()


async def test_restart_on_request(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.running():
        await comes(lambda: rig.child.up, "up")
        rig.child.restart("wanted")
        await comes(lambda: rig.ups == 2, "up again")
        assert rig.downs == ["wanted"]


async def test_child_that_never_becomes_healthy_ends_it_with_its_last_words(tmp_path: Path) -> None:
    rig = Rig(
        tmp_path,
        "import os; print(os.environ['GREETING'], 'out of memory', flush=True); raise SystemExit(3)",
    )
    with pytest.raises(ChildFailed, match=r"(?s)status 3.*hello out of memory"):
        await asyncio.wait_for(rig.child.run(), 60)
    assert rig.child.starts == FAST.max_failed_starts
    assert rig.ups == 0


async def test_child_that_crashes_soon_after_every_start_ends_it_with_its_last_words(
    tmp_path: Path,
) -> None:
    """Each time it was healthy: an engine that dies of its first request."""
    crash = (
        "import sys, time, pathlib; flag = pathlib.Path(sys.argv[1]); flag.touch()\n"
        "while not flag.with_name('up').exists(): time.sleep(0.01)\n"
        "flag.with_name('up').unlink(); sys.exit('error: no memory')"
    )
    rig = Rig(tmp_path, crash)
    with pytest.raises(
        ChildFailed, match=r"(?s)child crashed 5 times in a row.*status 1.*error: no memory"
    ):
        await asyncio.wait_for(rig.child.run(), 60)
    assert rig.child.starts == rig.ups == FAST.max_failed_starts


async def test_child_that_is_killed_again_and_again_is_always_started_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.running():
        for count in range(1, FAST.max_failed_starts + 2):
            await comes(lambda: rig.ups == count and rig.child.pid is not None, f"start {count}")  # noqa: B023
            assert rig.child.pid is not None
            psutil.Process(rig.child.pid).children()[0].kill()
        await comes(lambda: rig.ups == FAST.max_failed_starts + 2, "up again")


LOADS = """
import pathlib, sys, time
flag, weights, part = sys.argv[1], sys.argv[2], sys.argv[3]
for second in range(25):
    if part == "reads":
        pathlib.Path(weights).read_bytes()
    elif part == "says":
        print(f"Capturing CUDA graphs: {second}/25", end="\\r", flush=True)
    elif part == "repeats":
        print(f"waited {second} s for the other ranks", flush=True)
    time.sleep(0.4)
pathlib.Path(flag).touch()
time.sleep(600)
"""
SLOW = Timing(probe_s=0.05, stuck_s=2.0, first_backoff_s=0.01, max_failed_starts=1)


class Loading(Rig):
    """A child that takes five times `stuck_s` to become healthy, as a server with a large model."""

    def __init__(self, directory: Path, part: str) -> None:
        super().__init__(directory, LOADS, SLOW)
        self.part = part
        self.weights = directory / "weights"
        self.weights.write_bytes(b"\1" * (17 << 20))

    async def launch(self) -> list[str]:
        return [*await super().launch(), str(self.weights), self.part]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["reads", "says"])
async def test_child_that_loads_slowly_is_waited_for(tmp_path: Path, part: str) -> None:
    rig = Loading(tmp_path, part)
    async with rig.running() as run:
        await comes(lambda: rig.child.up or run.done(), "up")
        assert (rig.child.up, rig.child.starts) == (True, 1)


@pytest.mark.parametrize("part", ["sleeps", pytest.param("repeats", marks=pytest.mark.slow)])
async def test_child_that_makes_no_progress_is_killed(tmp_path: Path, part: str) -> None:
    """Also if it says for ever that it waits."""
    rig = Loading(tmp_path, part)
    with pytest.raises(
        ChildFailed, match=r"no progress for 2[.\d]* s of waiting for the start of child.*no flag"
    ):
        await asyncio.wait_for(rig.child.run(), 60)


async def test_child_that_comes_up_wrong_counts_as_failed(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.refuse_up = True
    with pytest.raises(ChildFailed, match="serves something else"):
        await asyncio.wait_for(rig.child.run(), 60)
    assert not rig.child.up


async def test_child_whose_setting_is_wrong_is_not_started_again(tmp_path: Path) -> None:
    rig = Rig(
        tmp_path,
        f"print('loading'); print('error: there is no GPU'); raise SystemExit({WRONG_SETTING})",
    )
    with pytest.raises(ConfigError, match="child rejects its settings: there is no GPU"):
        await rig.child.run()
    assert rig.child.starts == 1
