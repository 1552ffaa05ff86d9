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
from contextlib import nullcontext, suppress
from typing import Any

import httpx
import orjson

from common import Json
from common.errors import ConfigError
from common.process.exits import SIGNALLED, how_ended
from common.process.futures import forgettable
from common.process.security import trusted
from common.settings.sections import RuntimeSection
from common.wire.schemas import EpisodeLimits, EpisodeTask
from services.environment.harbor import HarborTask, grade
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
from services.environment.user_server import PORT, UserServer, is_url
from services.http.app import until_read

GRACE_S = 10.0
"""Time in which a program must end by itself after its reward call."""
_SHOWN_CHARS = 1000
_START_S = 900.0  # for a container
_ENGINES_S = 86_400.0
"""Most seconds that an episode is taken to wait for its model: containers that are older were left
behind."""


class ProgramRunner(EpisodeRunner):
    """Plays episodes with a command or URL.

    Args:
        name: name of the environment.
        target: the command line, or the URL.
        slots: maximum concurrent programs; others wait, and their deadline starts later.
        gateway: URL at which programs reach this server.
        section: where commands run.
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
        plays_tasks: bool = False,
    ) -> None:
        self.name = name
        self.tools = {}
        # Otherwise it is known once an episode gave one.
        self.has_reward = True if plays_tasks else None
        self._folders = Folders()
        self._slots = asyncio.Semaphore(slots)
        self._section = section
        self._plays_tasks = plays_tasks
        self._server: UserServer | None = None
        """Plays all episodes; None for a command that plays one."""
        self._words: list[str] = []
        if is_url(target) or PORT in target:
            if not is_url(target) and section.kind != "local":
                raise ConfigError(
                    f"a command with {PORT} starts one server for all episodes, but a container "
                    "holds only one episode",
                    field="runtime.kind",
                    value=section.kind,
                    remedy=f"set it to local, or name a command without {PORT} that plays one "
                    "episode",
                )
            self._server = UserServer(name, target, "/run")
            section = RuntimeSection()  # nothing is started in containers
        else:
            words = words_of(target, is_here=section.kind == "local")
            self._words = with_tools(words, section)
        self._runtime = load_runtime(section, gateway)

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
        content = self._task(task, session)
        address = self._server.ready(limits.deadline_s) if self._server else nullcontext()
        async with self._slots, address as url:
            try:
                # The deadline starts when the program does.
                async with session.clock.limit(limits.deadline_s):
                    if url:
                        reward = await self._post_task(url, content, session)
                    else:
                        reward = await self._run_command(content, session, limits)
            finally:
                answers = [node.answer for node in session.tree.nodes]
                outcome.answer = answers[-1].content if answers else ""
                outcome.tool_calls = sum(len(answer.tool_calls) for answer in answers)

        # What an agent posts is no reward of a Harbor task.
        if session.graded.is_set() and not self._plays_tasks:
            reward = session.reward
        if reward is not None:
            outcome.reward, outcome.components = parse_reward(reward, "the program's reward is")

    async def _run_command(self, content: Json, session: Session, limits: EpisodeLimits) -> Any:
        """Runs the command in a container; returns its reward, that of a Harbor task's tests, or
        None.
        """
        home = await asyncio.to_thread(self._folders.make)
        # The engines' time is not part of the deadline.
        spec = Spec(lifetime_s=limits.deadline_s + _ENGINES_S, image=self._section.image)
        task: HarborTask | None = None
        try:
            if self._plays_tasks:
                task = await asyncio.to_thread(HarborTask.read, content["columns"])
                spec = task.spec(spec)
            # Its own time: a pod waits for room in its cluster.
            try:
                with session.clock.stopped():
                    container = await asyncio.wait_for(self._runtime.start(spec, home), _START_S)
            except TimeoutError:
                raise EnvironmentLost(f"no container started within {_START_S:g} s") from None
            try:
                agent_s = task.settings.agent.timeout_sec if task else None
                async with session.clock.limit(agent_s):
                    reward = await self._reward_of(container, content, session)
                if task is None:
                    return reward
                network: Network = "open" if self._section.grader_network else "none"
                clean = dataclasses.replace(spec, network=network)
                return await grade(task, container, self._runtime, clean=clean, home=home)
            finally:
                await asyncio.shield(container.kill())
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, home, ignore_errors=True))

    async def _reward_of(self, container: Container, content: Json, session: Session) -> Any:
        """Runs the command; returns the reward that it wrote, or None. The session is closed then,
        before anything is graded.
        """
        reward_file = f"{container.directory}/reward.json"
        addresses = content["session"]
        env = {
            # Where client libraries find the session.
            "OPENAI_BASE_URL": addresses["openai_base_url"],
            "OPENAI_API_BASE": addresses["openai_base_url"],
            "OPENAI_API_KEY": addresses["api_key"],
            "ANTHROPIC_BASE_URL": addresses["anthropic_base_url"],
            "ANTHROPIC_API_KEY": addresses["api_key"],
            "EPISODE_URL": addresses["url"],
            "EPISODE_DIR": container.directory,
            "EPISODE_REWARD_FILE": reward_file,
        }
        words = [word.replace("{prompt}", content["prompt"]) for word in self._words]
        program = await container.exec(words, env, stdin=orjson.dumps(content))
        try:
            status = await _wait_for_end(program, session)
        finally:
            output = await program.close()

        has_reward = session.graded.is_set()
        if status > SIGNALLED:
            # A program may be killed when its work is done, so that a whole reward counts. One from
            # before its last call does not: it may be a default.
            written = await container.read(reward_file, after=session.asked_at)
            with suppress(EpisodeFailed):
                parse_reward(_parsed(written, "the reward file"), "the program's reward is")
                has_reward = True
        _end(session)
        # A program that gave its reward, or that a limit left without an answer, may end as it
        # likes.
        if status and not has_reward and not session.stop_reason:
            shown = f"; the end of its output: {output[-_SHOWN_CHARS:]}" if output else ""
            kind = EnvironmentLost if status > SIGNALLED else EpisodeFailed
            raise kind(f"{words[0]} {how_ended(status)}{shown}")
        if self._plays_tasks:
            return None
        return _parsed(await container.read(reward_file), "the reward file")

    async def _post_task(self, url: str, content: Json, session: Session) -> Any:
        """Posts the task; returns the reward in the response, or None. The session is closed
        then.
        """
        post = forgettable(asyncio.create_task(_post(url, content)))
        try:
            if not await _until_graded(post, session):
                _end(session)
                return None
            answer = post.result()
        except (httpx.HTTPError, OSError) as error:
            raise EnvironmentLost(
                f"{url} did not answer: {type(error).__name__} {error}"
            ) from error
        finally:
            post.cancel()

        _end(session)
        has_failed = answer.status_code >= 300
        # As for a command: a limit may have left the program without an answer.
        if has_failed and not session.stop_reason:
            kind = EnvironmentLost if answer.status_code >= 500 else EpisodeFailed
            raise kind(f"{url} answered {answer.status_code}: {answer.text[:_SHOWN_CHARS]}")
        if has_failed or not answer.content.strip():
            return None
        return _parsed(answer.content, f"the answer of {url}")

    def _task(self, task: EpisodeTask, session: Session) -> Json:
        """Returns the task as sent to the program."""
        prompt = task.prompt
        if not prompt:
            users = [each.get("content") for each in task.messages if each.get("role") == "user"]
            texts = [content for content in users if isinstance(content, str)]
            prompt = texts[-1] if texts else ""

        base = f"{self._runtime.gateway}/sessions/{session.id}"
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


async def _until_graded(task: asyncio.Task[Any], session: Session) -> bool:
    """Waits until a task is done, or the program has sent its reward; then until what it sent
    before that is read. Returns whether the task was done.
    """
    graded = asyncio.create_task(session.graded.wait())
    try:
        await asyncio.wait((task, graded), return_when=asyncio.FIRST_COMPLETED)
    finally:
        graded.cancel()
    is_done = task.done()
    await until_read()
    return is_done


def _end(session: Session) -> None:
    """Closes a session, before anything is graded. Raises EnvironmentLost when a call has no
    answer: the program may have failed for that reason, or graded it as a failure of the model.
    """
    session.close()
    fault = session.requests.fault(is_graded=session.graded.is_set())
    if fault:
        raise EnvironmentLost(fault)


def _parsed(content: bytes | None, source: str) -> Any:
    """Returns a reward that was written as JSON; None when none was. Raises EpisodeFailed."""
    if content is None:
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        text = content[:_SHOWN_CHARS].decode("utf-8", "replace")
        raise EpisodeFailed(
            f"{source} is not JSON: {text!r}; write a number or a mapping of numbers"
        ) from None


async def _post(url: str, content: Json) -> httpx.Response:
    async with httpx.AsyncClient(
        timeout=None,  # noqa: S113 - the episode has a deadline
        trust_env=False,
        verify=trusted(),
    ) as client:
        return await client.post(url, json=content)
