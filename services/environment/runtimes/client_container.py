"""Containers that are started by a command-line client, and exit when this server closes their
standard input, which also happens when it is killed.
"""

import asyncio
import contextlib
import os
import secrets
import subprocess
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from common.errors import ConfigError
from services.environment.outcome import EnvironmentLost
from services.environment.programs import RunningProgram
from services.environment.runtimes.runtime import (
    EPISODE,
    FIELD,
    WORKDIR,
    Command,
    Container,
    Spec,
    Variables,
    pack,
)

LABEL = "rlhf-episodes"
READY = b"the container is ready"
FIRST_PROGRAM = f"read -r go && mkdir -p {EPISODE} && echo {READY.decode()} && exec cat"
"""The first program of a container. It waits for a line of its input, so that the client which
writes the line also sees what it prints, and ends when its input is closed."""


def output_of(words: Sequence[str], value: str, *, remedy: str) -> str:
    """Returns the output of a command that runs while the server starts. Raises ConfigError."""
    try:
        done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"{' '.join(words[:3])} failed: {getattr(error, 'stderr', '') or error}",
            field=FIELD,
            value=value,
            remedy=remedy,
        ) from None
    return done.stdout.strip()


class ClientContainer(Container, ABC):
    """A container that ends with the client that holds its standard input open.

    Args:
        home: a folder of this machine for its files.
    """

    client_name: str
    """The client of its runtime, `docker` or `kubectl`."""
    remove: tuple[str, ...]
    """Arguments of the client that remove a container at once, before its name."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, self._in_container)
        self.name = f"{LABEL}-{secrets.token_hex(8)}"
        self._holder: RunningProgram | None = None
        self._held_open = -1

    @contextlib.asynccontextmanager
    async def killed_on_failure(self) -> AsyncIterator[None]:
        """Removes the container if its start fails or is cancelled."""
        try:
            yield
        except BaseException:
            await self.kill()
            raise

    async def hold(self, words: Sequence[str]) -> None:
        """Runs the client that starts the container, or attaches to it, and holds it, until the
        container is ready.

        Raises EnvironmentLost.
        """
        reader, self._held_open = os.pipe()
        os.write(self._held_open, b"go\n")
        try:
            self._holder = await self.start_client(words, stdin=reader)
        finally:
            os.close(reader)
        while READY not in self._holder.output.text:
            if self._holder.ended:
                shown = await self._holder.close()
                raise EnvironmentLost(f"the container could not be started: {shown}")
            await asyncio.sleep(0.02)

    async def fill(self, spec: Spec) -> None:
        """Puts a task's files into the working directory, when no Dockerfile says where they go."""
        if spec.build is None or not await asyncio.to_thread(_has_only_files, spec.build):
            return
        archive = self.home / "task.tar"
        await asyncio.to_thread(pack, spec.build, archive)
        await self.put(archive, WORKDIR)

    async def start_client(self, words: Sequence[str], stdin: bytes | int = b"") -> RunningProgram:
        """Starts the client with the server's own environment, in which it finds its daemon."""
        command = [self.client_name, *words]
        return await RunningProgram.launch(command, os.environ, home=self.home, stdin=stdin)

    async def run_client(self, words: Sequence[str], stdin: str = "") -> None:
        """Runs the client. Raises EnvironmentLost when it fails."""
        running = await self.start_client(words, stdin=stdin.encode())
        status, shown = await running.finish()
        if status:
            command = f"{self.client_name} {' '.join(words)}"
            raise EnvironmentLost(f"{command} failed: {shown}")

    def _in_container(self, words: Sequence[str], env: Variables) -> Command:
        return [self.client_name, *self._exec_words(words, env)], os.environ

    @abstractmethod
    def _exec_words(self, words: Sequence[str], env: Variables) -> list[str]:
        """Returns the client's arguments that run `words` in the container."""

    async def kill(self) -> None:
        """Removes the container. If that fails, it ends with its holder."""
        with contextlib.suppress(EnvironmentLost):
            removing = await self.start_client([*self.remove, self.name])
            await removing.finish()
        if self._held_open >= 0:
            os.close(self._held_open)
            self._held_open = -1
        if self._holder is not None:
            await self._holder.close()


def _has_only_files(folder: Path) -> bool:
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return bool(names) and "Dockerfile" not in names
