"""What every runtime offers: a container for an episode, and a clean one for its grader."""

import asyncio
import contextlib
import math
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Literal

from common.process.security import tls
from common.settings.sections import RuntimeSection
from services.environment.outcome import EnvironmentLost, EpisodeFailed
from services.environment.programs import RunningProgram

FIELD = "runtime.kind"
MOST_READ = 1 << 20
"""Bytes of a file that are read from a container."""
Variables = Mapping[str, str]
"""Environment variables."""
_NONE: Variables = MappingProxyType({})
Command = tuple[Sequence[str], Variables]
"""A command line, and the environment variables of its program."""
Network = Literal["gateway", "none", "open"]
"""What a container reaches: this server's gateway, nothing, or whatever its host does."""
EPISODE = "/episode"
"""The folder of the episode in a container, where its program writes the reward."""

WORKDIR = "."
"""The working directory of a container, as a path in it."""
_PUT = 'mkdir -p "$1" && cd "$1" && tar -xof -'
"""With `-o`, the files belong to the user of the container."""
_PUT_INSTEAD = 'mkdir -p "$1" && cd "$1" && rm -rf -- ..?* .[!.]* * && tar -xof -'
_GET = """\
[ -e "$1" ] || exit 66
[ "$1" = . ] && exec tar -cf - .
exec tar -cf - -C "${1%/*}/" "${1##*/}"
"""
_READ = f'[ "$(stat -c %Y "$1")" -ge "$2" ] && head -c {MOST_READ} "$1"'
_MISSING = 66


@dataclass(frozen=True)
class Spec:
    """What a container is made from."""

    lifetime_s: float
    """Seconds after which it may be removed, whatever happens."""
    network: Network = "gateway"
    image: str = ""
    """The image; empty: that of the settings, or the one that `build` makes."""
    build: Path | None = None
    """A folder with a Dockerfile."""
    workdir: str = ""
    """Working directory of its programs; empty: the image's."""
    env: Variables = field(default_factory=dict)
    cpus: float | None = None
    memory_mb: int | None = None
    """Limits; None: those of the settings."""


class Container:
    """A running container, made by `Runtime.start`.

    Args:
        home: a folder of this machine for its files, removed by the caller.
        command: returns the command that runs some words in it, with further variables.
    """

    directory = EPISODE
    """The folder of the episode, as its programs see it."""

    def __init__(self, home: Path, command: Callable[[Sequence[str], Variables], Command]) -> None:
        self.home = home
        self._command = command

    async def exec(
        self,
        words: Sequence[str],
        env: Variables = _NONE,
        *,
        stdin: bytes | Path = b"",
        output: Path | None = None,
    ) -> RunningProgram:
        """Starts a program in it; `output` gets its standard output."""
        command, variables = self._command(words, env)
        return await RunningProgram.launch(
            command, variables, home=self.home, stdin=stdin, output=output
        )

    async def kill(self) -> None:
        """Ends everything that runs in it, and removes it.

        Does nothing for a container that is only a folder: its programs are killed one by one, and
        the caller removes the folder.
        """

    async def run(
        self,
        words: Sequence[str],
        env: Variables = _NONE,
        *,
        stdin: bytes | Path = b"",
        output: Path | None = None,
    ) -> tuple[int, str]:
        """Runs a program to its end; returns its exit status and the end of its output."""
        program = await self.exec(words, env, stdin=stdin, output=output)
        return await program.finish()

    async def put(self, archive: Path, folder: str, *, instead: bool = False) -> None:
        """Unpacks a tar archive into a folder of the container, `instead` of what is in it.

        Raises EnvironmentLost.
        """
        script = _PUT_INSTEAD if instead else _PUT
        status, shown = await self.run(["sh", "-c", script, "sh", folder], stdin=archive)
        if status:
            raise EnvironmentLost(f"{folder} could not be unpacked in the container: {shown}")

    async def get(self, path: str, archive: Path) -> bool:
        """Packs a file or folder, or what is in the working directory, into a tar archive; returns
        whether there is one. Raises EpisodeFailed when that fails, or when the archive could write
        outside its folder.
        """
        status, shown = await self.run(["sh", "-c", _GET, "sh", path], output=archive)
        if status == _MISSING:
            return False
        if status:
            raise EpisodeFailed(f"{path} could not be taken from the container: {shown}")
        await asyncio.to_thread(_check_archive, archive)
        return True

    async def read(self, path: str, after: float = 0.0) -> bytes | None:
        """Returns the first megabyte of a file; None when there is no such file, or it was not
        written after a given time (in whole seconds).
        """
        output = self.home / "read"
        words = ["sh", "-c", _READ, "sh", path, str(math.ceil(after))]
        status, _ = await self.run(words, output=output)
        return None if status else await asyncio.to_thread(output.read_bytes)


class Runtime(ABC):
    """Starts containers. All of them end with this server.

    Args:
        gateway: the URL at which containers reach this server.
    """

    def __init__(self, gateway: str) -> None:
        self.gateway = gateway

    @abstractmethod
    async def start(self, spec: Spec, home: Path) -> Container:
        """Starts a container. Raises EnvironmentLost or EpisodeFailed."""

    async def close(self) -> None:  # noqa: B027
        """Ends what the containers of a runtime share; most share nothing."""


def tools_of(section: RuntimeSection) -> list[str]:
    """Returns the folders and files of this machine that containers have too."""
    authority = tls().authority
    named = [*section.tools, *([authority] if authority else [])]
    return [str(Path(each).absolute()) for each in named]


def with_tools(words: Sequence[str], section: RuntimeSection) -> list[str]:
    """Returns a command line as it is in containers: their working directory is another, so paths
    into the tools are absolute.
    """
    tools = tools_of(section)
    absolute = []
    for word in words:
        path = Path(word).absolute()
        is_tool = any(path.is_relative_to(tool) for tool in tools)
        absolute.append(str(path) if is_tool and path.exists() else word)
    return absolute


def pack(folder: Path, archive: Path, *, without: Sequence[str] = ()) -> None:
    """Packs a folder of this machine, without some names at its top."""
    with tarfile.open(archive, "w") as tar:
        for entry in sorted(folder.iterdir() if folder.is_dir() else [folder]):
            if entry.name not in without:
                tar.add(entry, entry.name)


def _check_archive(archive: Path) -> None:
    """Raises EpisodeFailed for an archive whose members leave the folder that it is unpacked in."""
    links = set[PurePosixPath]()
    with contextlib.closing(tarfile.open(archive)) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            is_below_link = not links.isdisjoint(path.parents)
            is_special = not (member.isfile() or member.isdir() or member.issym() or member.islnk())
            if path.is_absolute() or ".." in path.parts or is_below_link or is_special:
                raise EpisodeFailed(
                    "the agent left a file that cannot be copied to the container of the tests: "
                    f"{member.name!r}"
                )
            if member.issym():
                links.add(path)
