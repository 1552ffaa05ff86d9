"""The user's HTTP server: at a URL, or a command that is started once for all episodes, and started
again when it ends.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator

import httpx

from common.errors import ServiceLost
from common.process.exits import how_ended
from common.process.topology import WRONG_SETTING
from services.environment.environments import FIELD
from services.environment.outcome import EnvironmentLost, EpisodeFailed
from services.environment.programs import Folders, RunningProgram, words_of
from services.http.app import free_port

PORT = "{port}"
"""The port to listen on, in a word of the command."""
_URL = re.compile(r"https?://(\w|\[[\w:])")
_RETRY_S = 0.1
"""Pause before the server is asked again whether it is ready."""
_MAX_FAILED_STARTS = 5
"""Failed starts in a row after which another one would not help."""
_START_DEADLINES = 10
"""A server that has not answered after this many deadlines of an episode is started again."""
_HUNG_S = 5.0
"""Time in which a live server answers."""
_STOP_S = 10.0
"""Time that the server has to end by itself, so that it can remove what it started elsewhere."""


def is_url(target: str) -> bool:
    """Returns whether the target of an environment is a URL, and not a command."""
    return _URL.match(target) is not None


class UserServer:
    """A server of the user. A command serves HTTP on a port and is started before the first episode
    and after its end; it answers `GET /health` with 200 when it is ready.

    Args:
        name: name of the environment.
        target: the URL, or the command line, in which `{port}` is the port to listen on.
        path: the path of the command's server to which episodes go.

    Raises:
        ConfigError: the command does not exist here.
    """

    def __init__(self, name: str, target: str, path: str = "") -> None:
        self._name = name
        self._fixed_url = target if is_url(target) else ""
        self._path = path
        self._words = [] if self._fixed_url else words_of(target)
        self._folders = Folders()
        self._program: RunningProgram | None = None
        self._port = 0
        self._is_ready = False
        self._started_at = 0.0
        self._starting = asyncio.Lock()
        self._failed_starts = 0

    @contextlib.asynccontextmanager
    async def ready(self, deadline_s: float) -> AsyncIterator[str]:
        """Holds the URL for one episode; starts the command unless it is running.

        If the episode ends by its deadline or dies and the command no longer answers, since it
        hangs or is shutting down, it is killed, and the next episode starts it again.

        Raises EnvironmentLost when it is not ready in time, EpisodeFailed when it ends instead, and
        ServiceLost when it did so several times in a row or says that its settings are wrong.
        """
        if self._fixed_url:
            yield self._fixed_url
            return

        try:
            async with asyncio.timeout(deadline_s), self._starting:
                program = await self._start()
        except TimeoutError:
            waited_s = time.monotonic() - self._started_at
            if self._program is not None and waited_s > _START_DEADLINES * deadline_s:
                await self._program.close()  # it hangs
            raise EnvironmentLost(
                f"{self._words[0]} was not ready within {deadline_s:g} s"
            ) from None

        try:
            yield f"http://127.0.0.1:{self._port}{self._path}"
        except (TimeoutError, EnvironmentLost):
            # Another episode may have started the next one meanwhile.
            is_newest = program is self._program and not program.ended
            if is_newest and not await self._answers():
                await program.close()
            raise

    async def close(self) -> None:
        """Ends the command and removes its folder."""
        if self._program is not None:
            await self._program.end(grace_s=_STOP_S)
        await asyncio.to_thread(self._folders.close)

    async def _start(self) -> RunningProgram:
        """Returns the running command once it answers, started if it has ended."""
        if self._program is None or self._program.ended:
            self._port = free_port()
            self._is_ready = False
            self._started_at = time.monotonic()
            home = await asyncio.to_thread(self._folders.make)
            port = str(self._port)
            words = [word.replace(PORT, port) for word in self._words]
            self._program = await RunningProgram.launch(words, {"PORT": port}, home=home)

        while not self._is_ready:
            if self._program.ended:
                raise await self._failed_start(self._program)
            self._is_ready = await self._answers()
            if not self._is_ready:
                await asyncio.sleep(_RETRY_S)
        self._failed_starts = 0
        return self._program

    async def _failed_start(self, program: RunningProgram) -> Exception:
        """Counts a server that ended before it answered, and returns the error."""
        status, output = await program.finish()
        reason = f"{self._words[0]} {how_ended(status)} before it answered: {output}"
        self._failed_starts += 1
        if status != WRONG_SETTING and self._failed_starts < _MAX_FAILED_STARTS:
            return EpisodeFailed(reason)
        return ServiceLost(
            f"failed starts: {self._failed_starts}; {reason}",
            field=FIELD,
            value=self._name,
            remedy="try the command by itself",
        )

    async def _answers(self) -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=_HUNG_S) as http:
                answer = await http.get(f"http://127.0.0.1:{self._port}/health")
        except httpx.HTTPError:
            return False
        return answer.status_code == 200
