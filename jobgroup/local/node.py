"""One node of a task on this machine: its process, its log file and its last lines."""

import asyncio
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from common.process import launcher
from common.process.child import Child, ChildOutput
from common.process.exits import SIGNALLED
from common.process.logs import SERVED, code_of
from jobgroup.local.output import Screen
from jobgroup.spec import Env


class Node:
    """A command with its output in a log file and on the screen. `ended` is the task that runs it:
    its result is the exit status.
    """

    def __init__(
        self,
        name: str,
        script: str,
        *,
        env: Env,
        workdir: Path,
        log: Path,
        screen: Screen,
        grace_s: float,
    ) -> None:
        self.name = name
        self.log = log
        # The newest lines that may say why it ended: without requests that were served.
        self.last_lines = deque[bytes](maxlen=30)
        self._screen = screen
        self._grace_s = grace_s
        self._child: Child | None = None
        self._stopping = asyncio.Event()
        self._output = ChildOutput(
            log,
            self._show,
            on_data=screen.raw if name == screen.follow else lambda _: None,
            on_loss=partial(screen.say, loud=True),
        )
        self.ended = asyncio.create_task(self._run(script, env, workdir))

    def stop(self) -> None:
        """Ends the node: SIGTERM to its command, and SIGKILL to what is left after the grace."""
        self._stopping.set()

    def kill(self) -> None:
        """Ends the node now, or as soon as its command has been started."""
        self._grace_s = 0.0
        self.stop()
        if self._child is not None:
            self._child.kill()

    async def _run(self, script: str, env: Env, workdir: Path) -> int:
        self._child = await Child.start(
            ["bash", "-c", script],
            self._output,
            env=env,
            workdir=workdir,
            grace_s=self._grace_s,
        )
        ways_to_end = [
            asyncio.create_task(self._child.wait()),
            asyncio.create_task(self._stopping.wait()),
        ]
        await asyncio.wait(ways_to_end, return_when=asyncio.FIRST_COMPLETED)
        for way in ways_to_end:
            way.cancel()
        status = await self._child.end(self._grace_s)
        if status > SIGNALLED:
            _kill_orphans()
        return status

    def _show(self, lines: list[bytes]) -> None:
        self.last_lines.extend(line for line in lines if code_of(line) != SERVED)
        for line in lines:
            self._screen.line(self.name, line)


def _kill_orphans() -> None:
    """Kills what a launcher left behind that was itself killed: all other children of this process
    are launchers.
    """
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if launcher.__file__ not in child.cmdline():
                for process in (*child.children(recursive=True), child):
                    process.kill()
                child.wait()
