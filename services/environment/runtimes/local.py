"""Programs as processes of this machine."""

import asyncio
import os
from pathlib import Path

from services.environment.outcome import EpisodeFailed
from services.environment.runtimes.runtime import (
    MOST_READ,
    Container,
    Runtime,
    Spec,
    Variables,
)


class Processes(Container):
    """The processes of an episode, which share everything with the server but a folder of their
    own. They run in the server's working directory.
    """

    def __init__(self, home: Path, env: Variables) -> None:
        super().__init__(home, lambda words, more: (words, {**env, **more}))
        self.directory = str(home)

    async def read(self, path: str, after: float = 0.0) -> bytes | None:
        """Returns the first megabyte of a file; None when there is no such file, or it was not
        written after a given time. Raises EpisodeFailed.
        """
        return await asyncio.to_thread(_read, Path(path), after)


class LocalRuntime(Runtime):
    """Runs programs as this server's user, with the files and the network that this user has."""

    async def start(self, spec: Spec, home: Path) -> Container:
        """Returns a container that is only a folder."""
        return Processes(home, spec.env)


def _read(path: Path, after: float) -> bytes | None:
    try:
        with path.open("rb") as file:
            is_later = os.fstat(file.fileno()).st_mtime > after
            return file.read(MOST_READ) if is_later else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EpisodeFailed(f"{path} cannot be read: {error.strerror}") from error
