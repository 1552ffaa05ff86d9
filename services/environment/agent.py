"""Episodes played by programs: each starts a command or posts to a URL; the program reaches the
model via its session.

The program gets the task as JSON, on standard input or as the request body, with the addresses of
its session. The reward is what the program writes to a file or returns, or what it sends to the
session; otherwise the run's reward functions grade its last answer.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import orjson

from common.errors import ConfigError
from common.process.security import trusted
from common.wire.schemas import EpisodeLimits, EpisodeTask
from services.environment.outcome import (
    EnvironmentLost,
    EpisodeFailed,
    Outcome,
    parse_reward,
    settle,
)
from services.environment.programs import RunningProgram, words_of
from services.environment.session import Session
from services.environment.threads import Threads

FIELD = "environment.name"
GRACE_S = 10.0
"""Time in which a program must end by itself after its reward call."""
_MAX_REWARD_BYTES = 1 << 20
_SIGNAL = 128
_SHOWN_CHARS = 1000


class AgentRunner:
    """A command or URL that plays episodes.

    Args:
        name: name of the environment.
        target: the command line, or the URL.
        slots: maximum concurrent programs; others wait, and their deadline starts later.
        gateway: URL at which programs reach this server.
        has_reward: whether every episode gives a reward; None: known once an episode gave one.

    Raises:
        ConfigError: the command does not exist here, or the URL is invalid.
    """

    def __init__(
        self, name: str, target: str, slots: int, gateway: str, has_reward: bool | None = None
    ) -> None:
        self.name, self._gateway = name, gateway
        self.tools: dict[str, Any] = {}
        self.has_steps = False
        self.has_reward = has_reward
        self.threads: Threads | None = None
        self._url = target if target.startswith(("http://", "https://")) else ""
        self._words = [] if self._url else words_of(target, FIELD)
        if self._url and not _is_url(self._url):
            raise ConfigError(
                "this is not a URL",
                field=FIELD,
                value=target,
                remedy="write agent:http://host:port/path",
            )
        self._slots = asyncio.Semaphore(slots)

    async def run(self, task: EpisodeTask, session: Session, limits: EpisodeLimits) -> Outcome:
        """Plays an episode and returns its outcome; never raises, except when cancelled."""
        outcome = Outcome()
        async with self._slots:
            await settle(outcome, session, limits, self._play(task, session, outcome))
        answers = [node.answer for node in session.tree.nodes]
        outcome.answer = answers[-1].content if answers else ""
        outcome.tool_calls = sum(len(answer.calls) for answer in answers)
        if outcome.status == "ok":
            outcome.stop_reason = session.stop_reason or "done"
        return outcome

    async def close(self) -> None:
        """Nothing runs between episodes."""

    async def _play(self, task: EpisodeTask, session: Session, outcome: Outcome) -> None:
        given = await (self._asked if self._url else self._started)(task, session)
        session.close()  # no more sampling once it is graded
        if session.graded.is_set():
            given = session.reward
        if given is not None:
            outcome.reward, outcome.components = parse_reward(given, "the program's reward is")

    async def _started(self, task: EpisodeTask, session: Session) -> Any:
        """Runs the command; returns the reward that it wrote, or None."""
        home = Path(tempfile.mkdtemp(prefix="episode-"))
        try:
            reward_file, content = home / "reward.json", self._task(task, session)
            env = _variables(content["session"]) | {
                "EPISODE_DIR": str(home),
                "EPISODE_REWARD_FILE": str(reward_file),
            }
            words = [word.replace("{prompt}", content["prompt"]) for word in self._words]
            program = await RunningProgram.start(
                words, env, session.id, home, orjson.dumps(content)
            )
            status = None
            try:
                status = await _end_of(program, session)
            finally:
                output = await program.kill()
            if status and not session.graded.is_set() and not session.stop_reason:
                raise _failed(words[0], status, output, session)
            return await asyncio.to_thread(_read_reward, reward_file)
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, home, ignore_errors=True))

    async def _asked(self, task: EpisodeTask, session: Session) -> Any:
        """Posts the task to the URL; returns the reward in the response, or None."""
        asking = asyncio.create_task(_post(self._url, orjson.dumps(self._task(task, session))))
        graded = asyncio.create_task(session.graded.wait())
        try:
            await asyncio.wait((asking, graded), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return None
            status, content = asking.result()
        except (httpx.HTTPError, OSError) as error:
            raise EnvironmentLost(
                f"{self._url} did not answer: {type(error).__name__} {error}"
            ) from error
        finally:
            asking.cancel()
            graded.cancel()
        text = content.decode("utf-8", "replace").strip()
        if status >= 300 and session.stop_reason:
            return None
        if status >= 500:
            raise EnvironmentLost(f"{self._url} answered {status}: {text[:_SHOWN_CHARS]}")
        if status >= 300:
            raise EpisodeFailed(f"{self._url} answered {status}: {text[:_SHOWN_CHARS]}")
        return _json(text, f"the answer of {self._url}")

    def _task(self, task: EpisodeTask, session: Session) -> dict[str, Any]:
        """Returns the task as sent to the program."""
        base = f"{self._gateway}/sessions/{session.id}"
        users = [
            message.get("content") for message in task.messages if message.get("role") == "user"
        ]
        prompt = task.prompt or next(
            (content for content in reversed(users) if isinstance(content, str)), ""
        )
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


async def _end_of(program: RunningProgram, session: Session) -> int:
    """Returns a program's exit status; 0 for a program that is still running some time after its
    reward call.
    """
    ended = asyncio.create_task(program.wait())
    graded = asyncio.create_task(session.graded.wait())
    try:
        await asyncio.wait((ended, graded), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await asyncio.wait((ended,), timeout=GRACE_S)
        return ended.result() if ended.done() else 0
    finally:
        ended.cancel()
        graded.cancel()


def _failed(program: str, status: int, output: str, session: Session) -> Exception:
    """Returns the error for a program that ended with `status`."""
    said = f"; the end of its output: {output[-_SHOWN_CHARS:]}" if output else ""
    if status > _SIGNAL:
        return EnvironmentLost(f"{program} was ended by signal {status - _SIGNAL}{said}")
    if session.failure is not None:
        return EnvironmentLost(
            f"the engines did not answer {program}, which ended with status {status}: {session.failure}"
        )
    return EpisodeFailed(f"{program} ended with status {status}{said}")


def _read_reward(path: Path) -> Any:
    """Returns the content of a reward file; None when there is none. Raises EpisodeFailed."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_REWARD_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EpisodeFailed(f"the reward file cannot be read: {error.strerror}") from error
    return _json(content.decode("utf-8", "replace").strip(), "the reward file", empty=False)


def _json(text: str, what: str, empty: bool = True) -> Any:
    """Parses a reward as JSON; returns None for an empty text if `empty`. Raises EpisodeFailed."""
    if not text and empty:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise EpisodeFailed(
            f"{what} is not JSON: {text[:_SHOWN_CHARS]!r}; write a number or a mapping of numbers"
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
                    f"{url} answered with more than {_MAX_REWARD_BYTES} bytes: answer with a number or a mapping of numbers"
                )
        return response.status_code, body


def _is_url(text: str) -> bool:
    try:
        return bool(httpx.URL(text).host)
    except httpx.InvalidURL:
        return False
