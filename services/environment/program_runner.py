"""Plays episodes with the user's programs.

A program is a command that is started for each episode, a URL that each task is posted to, or, if
the command has `{port}`, a server that is started once for all episodes. It calls the model through
the session of its episode.

The program gets the task as JSON, on standard input or as the request body, with the addresses of
its session. The reward is what the program writes to a file or returns, or what it sends to the
session; otherwise the run's reward functions grade its last answer. A Harbor task is graded by its
own tests and by nothing else.
"""

import asyncio
import dataclasses
import json
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson

from common.errors import ConfigError
from common.process.exits import SIGNALLED, how_ended
from common.process.security import trusted
from common.settings.sections import HARBOR_COLUMN, RuntimeSection
from common.wire.schemas import EpisodeLimits, EpisodeTask
from services.environment.environments import FIELD
from services.environment.harbor import HarborTask, grade
from services.environment.kept_server import PORT, KeptServer
from services.environment.messages import Json
from services.environment.outcome import (
    EnvironmentLost,
    EpisodeFailed,
    EpisodeRunner,
    Outcome,
    parse_reward,
)
from services.environment.programs import Folders, RunningProgram, words_of
from services.environment.runtimes import load_runtime
from services.environment.runtimes.runtime import Container, Network, Spec, with_tools
from services.environment.session import Session

GRACE_S = 10.0
"""Time in which a program must end by itself after its reward call."""
_MAX_REWARD_BYTES = 1 << 20
_SHOWN_CHARS = 1000


class ProgramRunner(EpisodeRunner):
    """Plays episodes with a command or URL.

    Args:
        name: name of the environment.
        target: the command line, or the URL.
        slots: maximum concurrent programs; others wait, and their deadline starts later.
        gateway: URL at which programs reach this server.
        section: where commands run.
        has_reward: whether every episode gives a reward; None: known once an episode gave one.
        plays_tasks: whether the rows name Harbor tasks, which grade their episodes.

    Raises:
        ConfigError: the command does not exist here, the URL is invalid, or containers do not work
            here.
    """

    def __init__(
        self,
        name: str,
        target: str,
        *,
        slots: int,
        gateway: str,
        section: RuntimeSection,
        has_reward: bool | None = None,
        plays_tasks: bool = False,
    ) -> None:
        self.name = name
        self.tools = {}
        self.has_reward = has_reward
        self._folders = Folders()
        self._gateway = gateway
        self._slots = asyncio.Semaphore(slots)
        self._section = section
        self._plays_tasks = plays_tasks

        self._url = target if target.startswith(("http://", "https://")) else ""
        try:
            has_host = bool(urlsplit(self._url).hostname)
        except ValueError:  # a bracket that is not closed
            has_host = False
        if self._url and not has_host:
            raise ConfigError(
                "this is not a URL",
                field=FIELD,
                value=target,
                remedy="write agent:http://host:port/path",
            )
        is_here = self._section.kind == "local"
        keeps_server = PORT in target and not self._url
        self._server = KeptServer(name, target) if keeps_server and is_here else None
        self._words = [] if self._url else words_of(target, is_here=is_here)
        if not is_here:
            self._words = with_tools(self._words, self._section)
        if keeps_server and not is_here:
            raise ConfigError(
                f"a command with {PORT} starts one server for all episodes, but a container holds "
                "only one episode",
                field="runtime.kind",
                value=self._section.kind,
                remedy=f"set it to local, or name a command without {PORT} that plays one episode",
            )
        starts_programs = bool(self._words) and not keeps_server
        self._runtime = load_runtime(
            self._section if starts_programs else RuntimeSection(), gateway
        )

    async def close(self) -> None:
        """Ends the server if this process started one, and removes the episodes' folders and
        containers.
        """
        if self._server is not None:
            await self._server.close()
        await self._runtime.close()
        await asyncio.to_thread(self._folders.close)

    async def _play(
        self, task: EpisodeTask, session: Session, limits: EpisodeLimits, *, outcome: Outcome
    ) -> None:
        async with self._slots, self._address(limits.deadline_s) as url:
            try:
                # The deadline starts when the program does.
                async with asyncio.timeout(limits.deadline_s):
                    reward = await self._reward(url, task, session, limits=limits)
            finally:
                answers = [node.answer for node in session.tree.nodes]
                outcome.answer = answers[-1].content if answers else ""
                outcome.tool_calls = sum(len(answer.tool_calls) for answer in answers)

        if reward is not None:
            outcome.reward, outcome.components = parse_reward(reward, "the program's reward is")
        outcome.stop_reason = session.stop_reason or "done"

    @asynccontextmanager
    async def _address(self, deadline_s: float) -> AsyncIterator[str]:
        """Holds the URL to which tasks are posted; empty for a command that plays one episode."""
        if self._server is None:
            yield self._url
        else:
            async with self._server.ready(deadline_s) as url:
                yield f"{url}/run"

    async def _reward(
        self, url: str, task: EpisodeTask, session: Session, *, limits: EpisodeLimits
    ) -> Any:
        """Lets the program play; returns the reward that it gave, or None."""
        if url:
            content = self._task(task, session, self._gateway)
            reward = await self._post_task(url, content, session)
            session.close()  # no more sampling once it is graded
            _check_answered(session)
        else:
            content = self._task(task, session, self._runtime.gateway)
            reward = await self._run_command(content, session, limits)
        # What an agent posts is no reward of a Harbor task.
        is_graded = session.graded.is_set() and not self._plays_tasks
        return session.reward if is_graded else reward

    async def _run_command(self, content: Json, session: Session, limits: EpisodeLimits) -> Any:
        """Runs the command in a container; returns the reward, or None."""
        home = await asyncio.to_thread(self._folders.make)
        spec = Spec(lifetime_s=limits.deadline_s, image=self._section.image)
        try:
            if self._plays_tasks:
                return await self._work_on_task(content, session, home, spec)
            container = await self._runtime.start(spec, home)
            try:
                return await self._reward_of(container, content, session)
            finally:
                await asyncio.shield(container.kill())
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, home, ignore_errors=True))

    async def _work_on_task(self, content: Json, session: Session, home: Path, spec: Spec) -> Any:
        """Runs the command in the container of a Harbor task; returns the reward that its tests
        gave.
        """
        folder = content["columns"].get(HARBOR_COLUMN)
        if not isinstance(folder, str):
            raise EpisodeFailed(
                f"the row has no column {HARBOR_COLUMN}: set data.source to a folder of Harbor "
                "tasks"
            )
        task = await asyncio.to_thread(HarborTask.read, Path(folder))
        for_agent = task.spec(spec)
        network: Network = "open" if self._section.grader_network else "none"
        clean = dataclasses.replace(for_agent, network=network)

        container = await self._runtime.start(for_agent, home)
        try:
            async with asyncio.timeout(task.timeout_s):
                await self._reward_of(container, content, session)
            return await grade(task, container, self._runtime, clean=clean, home=home)
        finally:
            await asyncio.shield(container.kill())

    async def _reward_of(self, container: Container, content: Json, session: Session) -> Any:
        """Runs the command; returns the reward that it wrote, or None. The session is closed then,
        before anything is graded.
        """
        reward_file = f"{container.directory}/reward.json"
        env = _variables(content["session"]) | {
            "EPISODE_DIR": container.directory,
            "EPISODE_REWARD_FILE": reward_file,
        }
        words = [word.replace("{prompt}", content["prompt"]) for word in self._words]
        program = await container.exec(words, env, stdin=orjson.dumps(content))
        try:
            status = await _wait_for_end(program, session)
        finally:
            output = await program.kill()

        has_reward = session.graded.is_set()
        if status > SIGNALLED:
            # A program may be killed when its work is done, so that a whole reward counts. One from
            # before its last call does not: it may be a default.
            written = await container.read(reward_file, after=session.asked_at)
            with suppress(EpisodeFailed):
                parse_reward(_parse_reward(written), "the program's reward is")
                has_reward = True
        if status and not has_reward and not session.stop_reason:
            _check_answered(session)
            shown = f"; the end of its output: {output[-_SHOWN_CHARS:]}" if output else ""
            kind = EnvironmentLost if status > SIGNALLED else EpisodeFailed
            raise kind(f"{words[0]} {how_ended(status)}{shown}")
        session.close()
        _check_answered(session)
        return None if self._plays_tasks else _parse_reward(await container.read(reward_file))

    async def _post_task(self, url: str, content: Json, session: Session) -> Any:
        """Posts the task; returns the reward in the response, or None."""
        post = asyncio.create_task(_post(url, orjson.dumps(content)))
        try:
            await _until_graded(post, session)
            if not post.done():
                return None
            status, body = post.result()
        except (httpx.HTTPError, OSError) as error:
            raise EnvironmentLost(
                f"{url} did not answer: {type(error).__name__} {error}"
            ) from error
        finally:
            post.cancel()

        text = body.decode("utf-8", "replace").strip()
        if status >= 300:
            _check_answered(session)
        if status >= 300 and session.stop_reason:
            return None
        if status >= 500:
            raise EnvironmentLost(f"{url} answered {status}: {text[:_SHOWN_CHARS]}")
        if status >= 300:
            raise EpisodeFailed(f"{url} answered {status}: {text[:_SHOWN_CHARS]}")
        return _parse_json(text, f"the answer of {url}") if text else None

    def _task(self, task: EpisodeTask, session: Session, gateway: str) -> Json:
        """Returns the task as sent to the program, which reaches this server at `gateway`."""
        prompt = task.prompt
        if not prompt:
            users = [each.get("content") for each in task.messages if each.get("role") == "user"]
            texts = [content for content in users if isinstance(content, str)]
            prompt = texts[-1] if texts else ""

        base = f"{gateway}/sessions/{session.id}"
        return {
            "prompt": prompt,
            "messages": task.messages or [{"role": "user", "content": prompt}],
            "ground_truth": task.ground_truth,
            "columns": task.columns,
            "seed": task.seed,
            "session": {
                "url": base,
                "openai_base_url": f"{base}/v1",
                "anthropic_base_url": base,
                "api_key": session.id,
            },
        }


def _variables(session: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables through which client libraries find the session."""
    return {
        "OPENAI_BASE_URL": session["openai_base_url"],
        "OPENAI_API_BASE": session["openai_base_url"],
        "OPENAI_API_KEY": session["api_key"],
        "ANTHROPIC_BASE_URL": session["anthropic_base_url"],
        "ANTHROPIC_API_KEY": session["api_key"],
        "EPISODE_URL": session["url"],
    }


async def _wait_for_end(program: RunningProgram, session: Session) -> int:
    """Returns a program's exit status; 0 for a program that is still running some time after its
    reward call.
    """
    ended = asyncio.create_task(program.wait())
    try:
        await _until_graded(ended, session)
        await asyncio.wait((ended,), timeout=GRACE_S)
        return ended.result() if ended.done() else 0
    finally:
        ended.cancel()


async def _until_graded(task: asyncio.Task[Any], session: Session) -> None:
    """Waits until a task is done, or the program has sent its reward."""
    graded = asyncio.create_task(session.graded.wait())
    try:
        await asyncio.wait((task, graded), return_when=asyncio.FIRST_COMPLETED)
    finally:
        graded.cancel()


def _check_answered(session: Session) -> None:
    """Raises EnvironmentLost when a call has no answer, since the program may have graded that as a
    failure of the model.
    """
    for call in session.unanswered():
        if call.error is not None:
            raise EnvironmentLost(f"the engines did not answer a call: {call.error}")
        raise EnvironmentLost(
            "a call had no answer when the program ended or stopped waiting: the engines may be "
            "slow; give its client a longer time-out, and let it read every answer to its end"
        )


def _parse_reward(content: bytes | None) -> Any:
    """Returns the content of a reward file; None when there is none. Raises EpisodeFailed."""
    if content is None:
        return None
    return _parse_json(content.decode("utf-8", "replace").strip(), "the reward file")


def _parse_json(text: str, source: str) -> Any:
    """Parses a reward. Raises EpisodeFailed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise EpisodeFailed(
            f"{source} is not JSON: {text[:_SHOWN_CHARS]!r}; write a number or a mapping of numbers"
        ) from None


async def _post(url: str, content: bytes) -> tuple[int, bytes]:
    """Posts `content` as JSON; returns status and body. Raises httpx.HTTPError, or EpisodeFailed
    for a large body.
    """
    headers = {"content-type": "application/json"}
    async with (
        httpx.AsyncClient(timeout=None, trust_env=False, verify=trusted()) as client,  # noqa: S113
        client.stream("POST", url, content=content, headers=headers) as response,
    ):
        body = b""
        async for part in response.aiter_bytes():
            body += part
            if len(body) > _MAX_REWARD_BYTES:
                raise EpisodeFailed(
                    f"{url} answered with more than {_MAX_REWARD_BYTES} bytes: answer with a number"
                    " or a mapping of numbers"
                )
        return response.status_code, body
