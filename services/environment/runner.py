"""Runs one episode of an environment in this process: the model's answers, the tools, the
reward.
"""

import asyncio
import inspect
import json
import time
from collections.abc import Callable
from typing import Any

from common.errors import InvalidInput, shorten
from common.wire.schemas import EpisodeLimits, EpisodeTask
from services.environment.environments import Environment
from services.environment.messages import Message, parse_messages
from services.environment.outcome import (
    EnvironmentLost,
    EpisodeFailed,
    Outcome,
    parse_reward,
    settle,
)
from services.environment.session import LimitReached, Session, request_key
from services.environment.threads import Threads


class EpisodeRun:
    """One episode. `threads` run the environment's methods that are not coroutines; None: no method
    can hang.
    """

    def __init__(
        self,
        environment: Environment,
        task: EpisodeTask,
        session: Session,
        limits: EpisodeLimits,
        threads: Threads | None = None,
    ) -> None:
        self._environment, self._task, self._session = environment, task, session
        self._limits, self._threads = limits, threads
        self._tools = list(environment.tools.values())
        self._made: Any = None
        self._chat: list[Message] = []
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Plays the episode and returns its outcome; never raises, except when cancelled."""
        outcome = self.outcome
        await settle(outcome, self._session, self._limits, self._graded())
        if outcome.status == "timeout" or self._made is None or not hasattr(self._made, "close"):
            return outcome
        try:  # after a timeout a method may still be running
            async with asyncio.timeout(self._limits.deadline_s):
                await self._method("close")
        except (TimeoutError, EnvironmentLost, EpisodeFailed) as error:
            outcome.detail = outcome.detail or f"close failed: {error}"
        return outcome

    async def _graded(self) -> None:
        await self._play()
        self._session.close()  # no more sampling once it is graded
        self.outcome.turn_rewards = await self._turn_rewards()
        if self._environment.has_reward is False:
            return
        found = await self._method("get_reward")
        if found is not None or self._environment.has_reward:
            reward, self.outcome.components = parse_reward(found, "get_reward returned")
            self.outcome.reward = reward + sum(self.outcome.turn_rewards)

    async def _play(self) -> None:
        """Plays turns until the environment, the model or a limit ends the episode."""
        outcome = self.outcome
        self._chat = await self._begin()
        while True:
            try:
                key = f"{self._session.turns} {request_key(self._chat, self._tools)}"
                answer = await self._session.call(self._chat, self._tools, key)
            except LimitReached:
                outcome.stop_reason = self._session.stop_reason
                return
            self._chat.append(answer.message)
            outcome.answer = answer.message.content
            if answer.finish_reason == "length":
                outcome.stop_reason = self._session.stop_reason
                return
            if answer.problem:
                outcome.tool_errors += 1
                self._chat.append(_user(f"The tool call could not be read. {answer.problem}"))
            elif answer.message.calls:
                if outcome.tool_calls + len(answer.message.calls) > self._limits.tool_calls:
                    outcome.stop_reason = self._session.stop_reason = "tool_calls"
                    return
                for call in answer.message.calls:
                    self._chat.append(await self._tool(call))
                    if self._environment.is_done(self._made):
                        return
            elif self._environment.has_steps and (news := await self._step()):
                self._chat += news
            else:
                return

    async def _turn_rewards(self) -> list[float]:
        """Returns the environment's rewards for single answers; empty when it gives none."""
        if not hasattr(self._made, "get_turn_rewards"):
            return []
        found, turns = await self._method("get_turn_rewards"), len(self._session.tree.nodes)
        if not isinstance(found, list | tuple) or len(found) != turns:
            raise EpisodeFailed(
                f"get_turn_rewards returned {shorten(found)}, but must return a number for each of the {turns} answers"
            )
        return [parse_reward(each, "get_turn_rewards returned")[0] for each in found]

    async def _begin(self) -> list[Message]:
        """Creates the environment; returns the initial conversation."""
        task = self._task
        chat = parse_messages(
            task.messages or [{"role": "user", "content": task.prompt}], "task.messages"
        )
        self._made = await self._call(self._environment.make, "the constructor")
        row = {
            "prompt": task.messages or task.prompt,
            "ground_truth": task.ground_truth,
            **task.columns,
        }
        shown = await self._method("reset", **self._environment.columns_of(row))
        if shown is None or shown == "":
            return chat
        if isinstance(shown, list):
            return [*chat, *self._parsed(shown, "reset")]
        if not isinstance(shown, str):
            raise EpisodeFailed(
                f"reset returned {shorten(shown)}, but must return text, messages or None"
            )
        place = max((i for i, message in enumerate(chat) if message.role == "user"), default=None)
        if place is None:
            return [*chat, _user(shown)]
        chat[place] = Message(chat[place].fields | {"content": chat[place].content + shown})
        return chat

    async def _step(self) -> list[Message]:
        """Returns the messages that follow an answer; none when the environment ends the
        episode.
        """
        found = await self._method("step", [message.fields for message in self._chat])
        if found is None or found == "":
            return []
        if isinstance(found, str):
            return [_user(found)]
        return self._parsed(found, "step")

    def _parsed(self, messages: Any, method: str) -> list[Message]:
        try:
            found = parse_messages(messages, method)
        except InvalidInput as error:
            raise EpisodeFailed(f"{method} did not return messages: {error}") from None
        if any(message.role == "assistant" for message in found):
            raise EpisodeFailed(
                f"{method} returned a message of the assistant, but only the model answers"
            )
        return found

    async def _tool(self, call: dict[str, Any]) -> Message:
        """Calls a tool and returns its result, or an error message for the model."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        self.outcome.tool_calls += 1
        started = time.monotonic()
        try:
            if name not in self._environment.tools:
                known = ", ".join(self._environment.tools) or "none"
                raise _ToolRefused(f"there is no tool {name}; the tools are: {known}")
            method = self._environment.tool(self._made, name)
            try:
                inspect.signature(method).bind(**arguments)
            except TypeError as error:
                raise _ToolRefused(f"{name}: {error}") from None
            text = _shown(await self._in_thread(method, **arguments))
        except (EnvironmentLost, asyncio.CancelledError):
            raise
        except Exception as error:  # raised by the tool: the model may correct its call
            self.outcome.tool_errors += 1
            text = (
                f"error: {error}"
                if isinstance(error, _ToolRefused)
                else f"error: {type(error).__name__}: {error}"
            )
        finally:
            self.outcome.tool_seconds += time.monotonic() - started
        return Message({"role": "tool", "content": text, "tool_call_id": call["id"], "name": name})

    async def _method(self, name: str, *arguments: Any, **columns: Any) -> Any:
        return await self._call(getattr(self._made, name), name, *arguments, **columns)

    async def _call(
        self, method: Callable[..., Any], name: str, *arguments: Any, **columns: Any
    ) -> Any:
        """Calls a method of the environment. Raises EpisodeFailed when it raises."""
        try:
            return await self._in_thread(method, *arguments, **columns)
        except (EnvironmentLost, asyncio.CancelledError):
            raise
        except Exception as error:
            raise EpisodeFailed(
                f"{self._environment.name}: {name} raised {type(error).__name__}: {error}"
            ) from error

    async def _in_thread(self, method: Callable[..., Any], *arguments: Any, **columns: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            try:
                return await method(*arguments, **columns)
            except (
                SystemExit,
                KeyboardInterrupt,
            ) as ending:  # it would end the event loop of all episodes
                raise RuntimeError(f"{type(ending).__name__}: {ending}") from ending
        if self._threads is None:
            return await asyncio.to_thread(method, *arguments, **columns)
        name = f"{self._environment.name}: {getattr(method, '__name__', 'a method')}"
        return await self._threads.run(lambda: method(*arguments, **columns), name)


class ClassEpisodes:
    """Runs the episodes of an environment, with at most `threads` concurrent calls."""

    def __init__(self, environment: Environment, threads: int) -> None:
        self.name, self.tools = environment.name, environment.tools
        self.has_steps, self.has_reward = environment.has_steps, environment.has_reward
        self._environment = environment
        if (prepare := getattr(environment.make, "_prepare", None)) is not None:
            prepare()
        self.threads = Threads(threads)

    async def run(self, task: EpisodeTask, session: Session, limits: EpisodeLimits) -> Outcome:
        """Plays an episode and returns its outcome; never raises, except when cancelled."""
        return await EpisodeRun(self._environment, task, session, limits, self.threads).run()

    async def close(self) -> None:
        """Ends the threads that do not hang."""
        self.threads.close()


class _ToolRefused(Exception):
    """A call that cannot be made."""


def _user(text: str) -> Message:
    return Message({"role": "user", "content": text})


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
