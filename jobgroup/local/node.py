"""One node of a task on this machine: its process, its log file and its last lines."""

import asyncio
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from jobgroup.local import launcher
from jobgroup.local.output import TAIL_LINES, Screen

_CHUNK = 1 << 16


class Node:
    """A command that runs under the launcher, with its output relayed to its log file and the
    screen.
    """

    def __init__(
        self,
        name: str,
        script: str,
        *,
        env: Mapping[str, str],
        workdir: Path,
        log: Path,
        screen: Screen,
        grace_s: float,
    ) -> None:
        self.name = name
        self.log = log
        self.screen = screen
        self.followed = name == screen.follow
        self.tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._file = log.open("ab", buffering=0)
        self._lacks_lines = False
        self._partial = b""
        self._output, output_of_process = os.pipe()
        os.set_blocking(self._output, False)
        command = [sys.executable, "-P", launcher.__file__, str(grace_s), script]
        self.process = subprocess.Popen(
            command,
            cwd=workdir,
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=output_of_process,
            stderr=output_of_process,
            start_new_session=True,
        )
        os.close(output_of_process)
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()
        loop.add_reader(self._output, self._relay)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def poll(self) -> None:
        """Called when a child process ended: if it is this one, relays its remaining output and
        sets the exit status.
        """
        if self.ended.done():
            return
        code = self.process.poll()
        if code is None:
            return
        while self._relay():
            pass
        self._close()
        self.ended.set_result(launcher.exit_status(code))

    def _close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._output)
        os.close(self._output)
        self._lines(b"\n" if self._partial else b"")
        self._file.close()
        self.stop()

    def _relay(self) -> bool:
        """Relays the available output, at most one chunk; False when there is none."""
        try:
            data = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._output)
            return False
        self._save(data)
        if self.followed:
            self.screen.raw(data)
        self._lines(data)
        return True

    def _save(self, data: bytes) -> None:
        """Appends to the log file. On a full disk it leaves lines out, says so once, and lets the
        node run on.
        """
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            if not self._lacks_lines:
                self._lacks_lines = True
                self.screen.say(f"lines are missing in {self.log}: {error}", loud=True)

    def _lines(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _CHUNK:  # a line without end is shown in pieces
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            self.tail.append(line)
            self.screen.line(self.name, line)
