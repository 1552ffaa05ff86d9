"""A child process in a group of its own, whose output is read line by line, and which leaves
nothing behind: neither when it ends, nor when it is ended, nor when this process dies.

    child = await Child.start(["program"], ChildOutput(log_file, show), env=os.environ)
    await child.wait()   # or not: `end` is for a program that runs and for one that has ended
    status = await child.end(grace_s=10)
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, Self

from common.process import launcher
from common.process.exits import shell_status
from common.process.security import SecretRedactor

# Output read at once, and the longest line that is passed on whole.
_READ_BYTES = 1 << 16
_TAIL_LINES = 30
_POLL_S = 0.02
_MAX_POLL_S = 0.2
_KILL_S = 10.0
_DRAIN_S = 2.0


def command(words: Sequence[str], stdin: int | None = None, grace_s: float = 0.0) -> list[str]:
    """Returns the command line that runs `words` so that nothing of them is left behind
    (`common.process.launcher`), with the inherited file descriptor `stdin` as input, or no input.
    """
    return [
        sys.executable,
        "-I",
        "-S",
        launcher.__file__,
        str(grace_s),
        "-" if stdin is None else str(stdin),
        *words,
    ]


class OutputReader(Protocol):
    """What happens to the output of a child."""

    async def copy(self, stream: asyncio.StreamReader) -> None:
        """Takes everything from `stream`, until its end."""


class ChildOutput(OutputReader):
    """The output of a child: appended to a log file and passed on in whole lines.

    Args:
        log_file: file to append to; its directory is created if needed.
        on_lines: gets the lines as they come, without their ends.
        on_data: gets the bytes as they come, before `on_lines`: progress bars have no lines.
        on_loss: gets the reason, once, when the log file cannot be written, as on a full disk. The
            output is still read, or the child would block on it.
        redacted: whether the values of secret variables are replaced in the log and the lines.
    """

    def __init__(
        self,
        log_file: Path,
        on_lines: Callable[[list[bytes]], None],
        *,
        on_data: Callable[[bytes], None] = lambda _: None,
        on_loss: Callable[[str], None],
        redacted: bool = False,
    ) -> None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self.log_file = log_file
        self.last_lines = deque[bytes](maxlen=_TAIL_LINES)
        self._on_lines = on_lines
        self._on_data = on_data
        self._on_loss = on_loss
        self._redactor = SecretRedactor() if redacted else None
        self._file = log_file.open("ab", buffering=0)
        self._has_lost = False

    async def copy(self, stream: asyncio.StreamReader) -> None:
        """Copies everything from `stream`, and closes the log file."""
        partial = b""
        with self._file:
            while data := await stream.read(_READ_BYTES):
                self._on_data(data)
                *lines, partial = (partial + data).split(b"\n")
                if lines:
                    self._pass_on(lines, end=b"\n")
                if len(partial) > _READ_BYTES:  # a line without end is passed on in pieces
                    self._pass_on([partial], end=b"")
                    partial = b""
            if partial:
                self._pass_on([partial], end=b"")

    def _pass_on(self, lines: list[bytes], end: bytes) -> None:
        if self._redactor is not None:
            lines = [self._redactor.redact_bytes(line) for line in lines]
        self._append(b"\n".join(lines) + end)
        self.last_lines.extend(lines)
        self._on_lines(lines)

    def _append(self, data: bytes) -> None:
        try:
            while data:  # a write to a nearly full disk may take only a part
                data = data[self._file.write(data) :]
        except OSError as error:
            if not self._has_lost:
                self._has_lost = True
                self._on_loss(f"lines are missing in {self.log_file}: {error}")


class Child:
    """A running process group, made by `start`; a task copies its output."""

    def __init__(self, process: asyncio.subprocess.Process, output: OutputReader) -> None:
        stream = process.stdout or process.stderr
        assert stream is not None
        self.pid = process.pid
        """Id of the launcher, which is also that of the group."""
        self.output = output
        self._process = process
        self._copying = asyncio.create_task(output.copy(stream))

    @classmethod
    async def start(
        cls,
        words: Sequence[str],
        output: OutputReader,
        *,
        env: Mapping[str, str],
        workdir: Path | None = None,
        grace_s: float = 0.0,
        stdin: int | None = None,
        stdout: IO[bytes] | None = None,
    ) -> Self:
        """Starts `words`, with `env` as its whole environment. What it leaves behind when it ends
        by itself gets SIGTERM, and SIGKILL after `grace_s` seconds.

        `stdin` is a file descriptor of its input; None: no input. With a file `stdout` for its
        standard output, `output` gets only its standard error.
        """
        process = await asyncio.create_subprocess_exec(
            *command(words, stdin, grace_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=stdout or asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE if stdout else asyncio.subprocess.STDOUT,
            cwd=workdir,
            env=env,
            pass_fds=() if stdin is None else (stdin,),
            start_new_session=True,
        )
        return cls(process, output)

    @property
    def ended(self) -> bool:
        """Whether the command and what it left behind have ended."""
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Waits until the command and what it left behind have ended. Returns the exit status of
        the command, 128 + n when signal n ended it.

        It polls, because asyncio's own `wait` may block until the last grandchild has closed the
        output: ever more seldom, since a waking process takes a core from those that compute.
        """
        pause_s = _POLL_S
        while self._process.returncode is None:
            await asyncio.sleep(pause_s)
            pause_s = min(1.1 * pause_s, _MAX_POLL_S)
        return shell_status(self._process.returncode)

    def kill(self) -> None:
        """Has everything killed at once, without waiting for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # the launcher then kills the command and what it started

    async def end(self, grace_s: float = 0.0) -> int:
        """Sends SIGTERM to the command, and SIGKILL after `grace_s` seconds to everything that is
        left. Returns the exit status as `wait` does, when the output has been read as well.
        """
        if grace_s > 0:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), grace_s)
        self.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), _KILL_S)
        # The launcher itself may have been killed or stopped. Elsewhere than on Linux, it does not
        # find what the command left. macOS raises PermissionError when only zombies are left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        status = await self.wait()
        # A process that left the group of a killed launcher may still hold the pipe.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._copying, _DRAIN_S)
        return status
