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
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from common.errors import ConfigError
from common.process.child import Child, OutputReader
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


class Folders:
    """Folders of this server's episodes, in one folder that is locked while the server lives.

    Those that a killed server left are removed at the start of the next one.
    """

    _lock: int
    """The open descriptor of that folder, once it is made."""

    def __init__(self) -> None:
        self._root: Path | None = None
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


class _Tail(OutputReader):
    """Keeps the end of the output."""

    def __init__(self) -> None:
        self.text = b""

    async def copy(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(65536):
            self.text = (self.text + data)[-_OUTPUT_BYTES:]


class RunningProgram(Child):
    """A process group, made by `launch`."""

    output: _Tail
    _ending: asyncio.Task[int] | None = None

    @classmethod
    async def launch(
        cls,
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        home: Path,
        stdin: bytes | Path | int = b"",
        output: Path | None = None,
    ) -> Self:
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
                stdout = files.enter_context(output.open("wb")) if output else None
                if output is not None:
                    words = ["sh", "-c", _LIMITED, "sh", *words]
                return await cls.start(words, _Tail(), env=variables, stdin=stdin, stdout=stdout)
        except (OSError, ValueError) as error:  # ValueError: a null character
            # Another program may start later, if only the machine's resources were used up.
            is_full = getattr(error, "errno", None) in _OUT_OF_RESOURCES
            kind = EnvironmentLost if is_full else EpisodeFailed
            raise kind(f"{words[0]} could not be started: {error}") from error

    async def finish(self) -> tuple[int, str]:
        """Waits for the program and kills what it left running; returns its exit status and the end
        of the output.
        """
        try:
            status = await self.wait()
        finally:
            output = await self.close()
        return status, output

    async def close(self) -> str:
        """Kills all of its processes, including those that left the group; returns the end of the
        output.
        """
        # Whoever waits may be cancelled, the killing goes on.
        self._ending = self._ending or asyncio.create_task(self.end())
        await asyncio.shield(self._ending)
        return SecretRedactor().redact(self.output.text.decode("utf-8", "replace")).strip()
