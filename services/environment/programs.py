"""Programs that this server starts, without its secrets and each in a process group that ends with
the server.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import shlex
import shutil
import signal
import socket
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.errors import ConfigError
from common.process import child
from common.process.exits import SIGNALLED
from common.process.security import SecretRedactor, tls
from services.environment.environments import FIELD
from services.environment.outcome import EnvironmentLost, EpisodeFailed

_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""The server's environment variables that programs get; the others may be secrets."""
_AUTHORITY = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
"""Where OpenSSL, requests and Node look for the authority of the run's certificates."""
_OUT_OF_RESOURCES = frozenset(
    (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT)
)
_OUTPUT_BYTES = 4000
"""Bytes of a program's output that are kept, from its end."""
_END_S = 10.0
"""Seconds in which a program's starter (`common.process.child`) kills what the program started."""
_FOLDERS = "rlhf-episodes-"
_LIMITED = 'ulimit -f 8388608; exec "$@"'
"""Limits the files that a program writes to 4 GiB; `ulimit` counts in blocks of 512 bytes."""
_STARTED_S = 60.0
"""An empty folder that is younger may belong to a server that is starting."""


def words_of(command: str, *, is_here: bool = True) -> list[str]:
    """Returns the words of a command line. Raises ConfigError when it cannot be run, as far as that
    is known: here, not in a container.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"this is not a command: {error}",
            field=FIELD,
            value=command,
            remedy="close every quote",
        ) from None
    if not words or (is_here and not shutil.which(words[0])):
        raise ConfigError(
            f"there is no program {words[0]}" if words else "there is no command",
            field=FIELD,
            value=command,
            remedy="name a program on the PATH of the environment-server, or its path from the "
            "working directory",
        )
    return words


def free_port() -> int:
    """Returns a port of this machine that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Folders:
    """Folders of this server's episodes, in one folder that is locked while the server lives.

    Those that a killed server left are removed at the start of the next one.
    """

    def __init__(self) -> None:
        self._root: Path | None = None
        self._lock = -1
        for left in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
            with contextlib.suppress(OSError):  # another user's, or just removed
                _remove_if_left(left)

    def make(self) -> Path:
        """Returns a new folder. Raises EnvironmentLost when none can be made, as on a full disk."""
        try:
            if self._root is None:
                self._root = Path(tempfile.mkdtemp(prefix=_FOLDERS))
                self._lock = os.open(self._root, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            return Path(tempfile.mkdtemp(prefix="episode-", dir=self._root))
        except OSError as error:
            raise EnvironmentLost(
                f"no folder for an episode can be made: {error.strerror} in {tempfile.gettempdir()}"
            ) from error

    def close(self) -> None:
        """Removes all folders."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._lock)
            self._root = None


def _remove_if_left(root: Path) -> None:
    """Removes the folders of a server that has ended. Raises OSError while it lives."""
    lock = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A server that is starting may have made it and not locked it yet.
        age_s = time.time() - root.stat().st_mtime
        if any(root.iterdir()) or age_s > _STARTED_S:
            shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(lock)


class RunningProgram:
    """A process group, made by `start`.

    Args:
        process: its starter (`common.process.child`), which kills all that the program started.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.output = b""
        """The end of what it has written so far."""
        self._ending: asyncio.Task[str] | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        home: Path,
        stdin: bytes | Path | int = b"",
        output: Path | None = None,
    ) -> "RunningProgram":
        """Starts a program in the server's working directory, with `home` for its own files.

        Args:
            words: its command line.
            env: its environment variables, besides the inherited ones.
            home: its folder.
            stdin: its input: the bytes, a file that holds them, or an open file descriptor.
            output: a file for its standard output, of at most 4 GiB.

        Raises EpisodeFailed when it cannot be run, EnvironmentLost when this machine lacks the
        resources.
        """
        variables = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        authority = tls().authority
        if authority:
            variables |= dict.fromkeys(_AUTHORITY, authority)
        variables |= {"HOME": str(home), "TMPDIR": str(home), "PYTHONUNBUFFERED": "1", **env}

        try:
            with contextlib.ExitStack() as files:
                if isinstance(stdin, bytes):
                    # A file without a name: a pipe could fill up.
                    input_file = files.enter_context(tempfile.TemporaryFile(dir=home))
                    input_file.write(stdin)
                    input_file.seek(0)
                    stdin = input_file.fileno()
                elif isinstance(stdin, Path):
                    stdin = files.enter_context(stdin.open("rb")).fileno()
                if output is not None:
                    words = ["sh", "-c", _LIMITED, "sh", *words]
                process = await asyncio.create_subprocess_exec(
                    *child.command(words, stdin),
                    stdin=PIPE,
                    stdout=files.enter_context(output.open("wb")) if output else PIPE,
                    stderr=PIPE if output else asyncio.subprocess.STDOUT,
                    env=variables,
                    pass_fds=(stdin,),
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:  # ValueError: a null character
            # Another program may start later, if only the machine's resources were used up.
            is_full = getattr(error, "errno", None) in _OUT_OF_RESOURCES
            kind = EnvironmentLost if is_full else EpisodeFailed
            raise kind(f"{words[0]} could not be started: {error}") from error
        return cls(process)

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Waits for the program and returns its exit status, 128 + n when signal n ended it.

        It polls, because asyncio's own `wait` may block until the last grandchild has closed the
        output.
        """
        while (status := self._process.returncode) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return status if status >= 0 else SIGNALLED - status

    async def finish(self) -> tuple[int, str]:
        """Waits for the program and kills what it left running; returns its exit status and the end
        of the output.
        """
        try:
            status = await self.wait()
        finally:
            output = await self.kill()
        return status, output

    def terminate(self) -> None:
        """Asks the program to end by itself."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def kill(self) -> str:
        """Kills all of its processes, including those that left the group; returns the end of the
        output.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        # Whoever waits may be cancelled, the killing goes on.
        return await asyncio.shield(self._ending)

    async def _end(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.close()  # its starter then kills all of its descendants
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), _END_S)
        # A program may have killed its starter.
        # PermissionError: macOS, only zombies left
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.wait()
        # A process that cannot be found may still hold the pipe.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._reading, 2)
        return SecretRedactor().redact(self.output.decode("utf-8", "replace")).strip()

    async def _read(self) -> None:
        output = self._process.stdout or self._process.stderr
        assert output is not None
        while data := await output.read(65536):
            self.output = (self.output + data)[-_OUTPUT_BYTES:]
