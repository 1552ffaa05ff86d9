"""Plays episodes of environment classes in this process: the model's answers, the tools, the
reward.

    reset ─► ask the model ─► tool calls? ── yes ─► call the tools ─► ask again
                    ▲              │ no
                    └── messages ─ step ─► None: get_turn_rewards, get_reward, close
"""

import asyncio
import inspect
import json
import time
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common import Json
from common.errors import InvalidInput, error_text, shorten
from common.process.main_thread import in_main_thread, needs_main_thread
from common.wire.schemas import EpisodeLimits, EpisodeTask
from services.environment.environments import Environment
from services.environment.messages import (
    Message,
    encodable,
    parse_messages,
    tool_message,
    user_message,
)
from services.environment.outcome import (
    EnvironmentLost,
    EpisodeFailed,
    EpisodeRunner,
    Outcome,
    ToolFailed,
    parse_reward,
)
from services.environment.session import LimitReached, Session
from services.environment.threads import Threads


@dataclass
class EpisodeRun:
    """One episode of an environment."""

    environment: Environment
    task: EpisodeTask
    session: Session
    limits: EpisodeLimits
    outcome: Outcome
    threads: Threads
    _instance: Any = None
    """The object that the environment's class made, with the state of this episode."""
    _chat: list[Message] = field(default_factory=list)
    _prompt_messages: int = 0
    """Number of messages of the chat before the first answer."""

    async def play(self) -> None:
        """Plays the episode and closes the environment. Raises what `EpisodeRunner.run` records."""
        try:
            async with self.session.clock.limit(self.limits.deadline_s):
                await self._play_and_grade()
        except TimeoutError:
            raise  # without `close`, since a method may still be running in the object
        except Exception:
            await self._close()
            raise
        await self._close()

    async def _close(self) -> None:
        if not hasattr(self._instance, "close"):
            return
        try:
            async with asyncio.timeout(self.limits.deadline_s):
                await self._call("close", partial(self._instance.close))
        except (TimeoutError, EnvironmentLost, EpisodeFailed) as error:
            self.outcome.detail = f"close failed: {error}"

    async def _play_and_grade(self) -> None:
        await self._play()
        self.session.close()  # no more sampling once it is graded
        self.outcome.turn_rewards = await self._turn_rewards()
        environment = self.environment
        if environment.grade is not None:
            sequences = self.session.sequences()
            reward, components = await environment.grade(
                self._instance,
                self.task,
                messages=[message.fields for message in self._chat[self._prompt_messages :]],
                token_ids=sequences[-1].token_ids if sequences else [],
            )
        elif not environment.has_reward:
            return
        else:
            returned = await self._call("get_reward", partial(self._instance.get_reward))
            reward, components = parse_reward(returned, "get_reward returned")
        reward += sum(self.outcome.turn_rewards)
        if environment.gives_verdicts and reward not in (0.0, 1.0):
            raise EpisodeFailed(
                f"the reward is {reward:g}, but the environment declares gives_verdicts: return 1 "
                "for right and 0 for wrong from get_reward, and have no get_turn_rewards"
            )
        self.outcome.reward = reward
        self.outcome.components = components

    async def _play(self) -> None:
        """Plays turns until the environment, the model or a limit ends the episode."""
        outcome = self.outcome
        self._chat = await self._begin()
        self._prompt_messages = len(self._chat)
        tools = list(self.environment.tools.values())
        while True:
            # No call is made twice here, so that the number of the turn says which it is.
            key = str(self.session.turns)
            try:
                answer = await self.session.call(self._chat, tools, key)
            except LimitReached:
                return

            self._chat.append(answer.message)
            outcome.answer = answer.message.content
            # An answer that was cut ends the episode: its tool calls may not be whole.
            if answer.finish_reason == "length":
                return

            tool_calls = answer.message.tool_calls
            if answer.problem:
                # The model may write the call again. No id says which call this answers, so the
                # message is the user's.
                outcome.tool_errors += 1
                self._chat.append(
                    user_message(f"The tool call could not be read. {answer.problem}")
                )
            elif tool_calls:
                # All calls of an answer or none, since the template needs a result for each.
                if outcome.tool_calls + len(tool_calls) > self.limits.tool_calls:
                    self.session.stop_reason = "tool_calls"
                    return
                for tool_call in tool_calls:
                    self._chat.append(await self._tool_result(tool_call))
            else:
                new_messages: list[Message] = []
                if self.environment.has_steps:
                    chat = [message.fields for message in self._chat]
                    returned = await self._call("step", partial(self._instance.step, chat))
                    new_messages = self._parsed(returned, "step")
                if not new_messages:  # the environment ends the episode
                    return
                self._chat += new_messages

    async def _turn_rewards(self) -> list[float]:
        """Returns the environment's rewards for single turns; empty when it gives none."""
        if not hasattr(self._instance, "get_turn_rewards"):
            return []
        rewards = await self._call("get_turn_rewards", partial(self._instance.get_turn_rewards))
        turns = len(self.session.tree.nodes)
        if not isinstance(rewards, list | tuple) or len(rewards) != turns:
            raise EpisodeFailed(
                f"get_turn_rewards returned {shorten(rewards)}, but must return a number for each "
                f"of the {turns} answers"
            )
        return [parse_reward(reward, "get_turn_rewards returned")[0] for reward in rewards]

    async def _begin(self) -> list[Message]:
        """Creates the environment; returns the initial conversation."""
        task = self.task
        messages = task.messages or [{"role": "user", "content": task.prompt}]
        chat = parse_messages(messages, "task.messages")
        self._instance = await self._call("the constructor", partial(self.environment.make))

        row = {"prompt": task.messages or task.prompt, "ground_truth": task.ground_truth}
        # Copies: the other episodes of the group have the same task.
        columns = deepcopy(self.environment.columns_of(row | task.columns))
        returned = await self._call("reset", partial(self._instance.reset, **columns))
        places = [i for i, message in enumerate(chat) if message.role == "user"]
        if isinstance(returned, str) and places:
            # Text continues the user's last message, as in TRL.
            content = encodable(chat[places[-1]].content + returned)
            chat[places[-1]] = Message(chat[places[-1]].fields | {"content": content})
            return chat
        return [*chat, *self._parsed(returned, "reset")]

    def _parsed(self, returned: Any, method: str) -> list[Message]:
        """Returns the messages that a method returned, which may be a text or None. Raises
        EpisodeFailed.
        """
        if returned is None or returned == "":
            return []
        if isinstance(returned, str):
            return [user_message(returned)]
        try:
            messages = parse_messages(returned, method)
        except InvalidInput as error:
            raise EpisodeFailed(
                f"{method} returned {shorten(returned)}, but must return text, messages or None: "
                f"{error}"
            ) from None
        if any(message.role == "assistant" for message in messages):
            raise EpisodeFailed(
                f"{method} returned a message of the assistant, but only the model answers"
            )
        return messages

    async def _tool_result(self, tool_call: Json) -> Message:
        """Calls a tool and returns its result, or an error message for the model."""
        name = tool_call["function"]["name"]
        self.outcome.tool_calls += 1
        started = time.monotonic()
        try:
            function = self._bound_tool(name, tool_call["function"]["arguments"])
            timeout_s = self.limits.tool_timeout_s
            result = await self._run(function, timeout_s)
            if not isinstance(result, str):
                result = await self._run(partial(_as_text, result), timeout_s)
            text: str = result
        except EnvironmentLost:
            raise
        except Exception as error:  # the model may correct its call
            self.outcome.tool_errors += 1
            text = f"error: {error if isinstance(error, ToolFailed) else error_text(error)}"
        finally:
            self.outcome.tool_seconds += time.monotonic() - started
        return tool_message(text, tool_call)

    def _bound_tool(self, name: str, arguments: Json) -> "partial[Any]":
        """Returns a tool with its arguments. Raises ToolFailed when they do not fit."""
        if name not in self.environment.tools:
            known = ", ".join(self.environment.tools) or "none"
            raise ToolFailed(f"there is no tool {name}; the tools are: {known}")
        function = self.environment.tool(self._instance, name)
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise ToolFailed(f"{name}: {error}") from None
        return partial(function, **arguments)

    async def _call(self, name: str, method: "partial[Any]") -> Any:
        """Calls a method of the environment. Raises EpisodeFailed when it raises."""
        try:
            return await self._run(method)
        except EnvironmentLost:
            raise
        except Exception as error:
            raise EpisodeFailed(
                f"{self.environment.name}: {name} raised {error_text(error)}"
            ) from error

    async def _run(self, function: "partial[Any]", timeout_s: float | None = None) -> Any:
        """Returns what the user's function returns, and awaits it if it is a coroutine.

        The user's code never runs in the server's event loop. Raises ToolFailed after `timeout_s`
        seconds.
        """
        is_coroutine = inspect.iscoroutinefunction(function.func)
        name = f"{self.environment.name}: {getattr(function.func, '__name__', 'a method')}"
        if is_coroutine:
            return await self.threads.run_coroutine(function, name, timeout_s)
        try:
            result = await self.threads.run(function, name, timeout_s, self.session.clock)
        except ValueError as error:
            # Some libraries limit their time with an alarm, which only the main thread can set.
            if not needs_main_thread(error):
                raise
            result = await asyncio.wrap_future(in_main_thread(function))
        # Such as a partial or an object around a coroutine, which does not look like one.
        if inspect.isawaitable(result):
            return await self.threads.run_coroutine(lambda: result, name, timeout_s)
        return result


class ClassRunner(EpisodeRunner):
    """Runs the episodes of an environment, with at most `threads` concurrent calls."""

    def __init__(self, environment: Environment, threads: int) -> None:
        self.name = environment.name
        self.tools = environment.tools
        self.has_steps = environment.has_steps
        self.has_reward = environment.has_reward
        self.gives_verdicts = environment.gives_verdicts
        self._environment = environment
        # The built-in tool tests its sandbox before the first episode.
        prepare = getattr(environment.make, "_prepare", None)
        if prepare is not None:
            prepare()
        self.threads: Threads = Threads(threads)

    async def _play(
        self, task: EpisodeTask, session: Session, limits: EpisodeLimits, *, outcome: Outcome
    ) -> None:
        await EpisodeRun(
            self._environment,
            task,
            session,
            limits=limits,
            outcome=outcome,
            threads=self.threads,
        ).play()

    async def close(self) -> None:
        """Ends the threads that do not hang."""
        self.threads.close()


def _as_text(result: Any) -> str:
    """Returns a result as JSON, or as Python shows it. It never raises, because the call has
    already had its effect.
    """
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except Exception:
        try:
            return str(result)
        except Exception as error:
            return f"a {type(result).__name__} that cannot be shown: {error_text(error)}"
