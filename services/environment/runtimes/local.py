"""Programs as processes of this machine."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.environment.outcome import EpisodeFailed
from services.environment.programs import RunningProgram
from services.environment.runtimes.runtime import MOST_READ, Container, Spec


class Processes(Container):
    """The processes of an episode, with its folder as their only own place."""

    def __init__(self, home: Path, mark: str, env: Mapping[str, str]) -> None:
        super().__init__(home, mark)
        self.directory = str(home)
        self._env = env

    async def exec(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdin: bytes | Path = b"",
        output: Path | None = None,
    ) -> RunningProgram:
        """Starts a program in the server's working directory."""
        return await RunningProgram.start(
            words,
            {**self._env, **(env or {})},
            mark=self.mark,
            home=self.home,
            stdin=stdin,
            output=output,
        )

    async def read(self, path: str, after: float = 0.0) -> bytes | None:
        """Returns the first megabyte of a file; None when there is none, or none that was written
        after a time. Raises EpisodeFailed.
        """
        return await asyncio.to_thread(_read, Path(path), after)

    async def kill(self) -> None:
        """Every program was killed when it ended."""


class LocalRuntime:
    """Runs programs as this server's user, with the files and the network that this user has.

    Args:
        gateway: URL of this server.
    """

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway

    def gateway(self) -> str:
        """Returns the URL of this server."""
        return self._gateway

    async def start(self, spec: Spec, home: Path) -> Container:
        """Returns the place of an episode's processes."""
        return Processes(home, spec.mark, spec.env)

    async def close(self) -> None:
        """Nothing is shared."""


def _read(path: Path, after: float) -> bytes | None:
    try:
        with path.open("rb") as file:
            is_later = os.fstat(file.fileno()).st_mtime > after
            return file.read(MOST_READ) if is_later else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EpisodeFailed(f"{path} cannot be read: {error.strerror}") from error
