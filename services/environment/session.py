"""One session of the gateway: the calls that one program makes to the model in one episode."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.errors import Conflict, InvalidInput, ServiceError
from common.wire.schemas import Completion, EpisodeLimits, EpisodeSequence, FinishReason, StopReason
from services.environment.messages import Message, tools_key
from services.environment.parsing import parse_answer
from services.environment.template import Template
from services.environment.tree import CallNode, SessionTree

MAX_CHARS_PER_TOKEN = 64
"""New messages with more characters than this per token of the context cannot fit and are not
tokenised."""


class SessionClosed(ServiceError):
    """The session has ended: its episode is graded and gets no more samples (410)."""

    status = 410
    code = "session_closed"


class LimitReached(ServiceError):
    """The episode has reached one of its limits (400, which client libraries do not retry)."""

    status = 400
    code = "limit_reached"


def session_closed(identifier: str) -> SessionClosed:
    """Returns the error for a call that comes too late."""
    remedy = "stop: its episode is complete"
    return SessionClosed("the session has ended", field="session", value=identifier, remedy=remedy)


Sample = Callable[[Sequence[int], int, int], Awaitable[Completion]]
"""(tokens, max_new_tokens, seed) -> completion"""


class CallAnswer(NamedTuple):
    """The answer to a call."""

    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    sampled_tokens: int
    problem: str
    """Why a tool call in it cannot be read; empty when all can."""


@dataclass(frozen=True)
class SessionSettings:
    """The settings of every call of a session, whatever the call requests."""

    max_new_tokens: int
    limits: EpisodeLimits
    seed: int = 0


class Session:
    """The calls of one episode, recorded with their exact tokens.

    A call identical to an earlier one counts as a retry and gets the same answer, even while that
    is still being sampled.
    """

    def __init__(
        self, identifier: str, template: Template, sample: Sample, settings: SessionSettings
    ) -> None:
        self.id, self.tree = identifier, SessionTree()
        self.closed = False
        self.stop_reason: StopReason = ""
        """The limit that was reached, if any."""
        self.failure: ServiceError | None = None
        """Why the engines did not answer the newest call, if they did not."""
        self.turns = self.sampled_tokens = 0
        self.reward: Any = None
        """The reward from the program's reward call."""
        self.graded = asyncio.Event()
        """Whether there was a reward call."""
        self._template, self._sample, self._settings = template, sample, settings
        self._calls: dict[str, asyncio.Task[CallAnswer]] = {}
        self._reserved = 0

    async def call(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], key: str
    ) -> CallAnswer:
        """Answers a call; `key` is the same for the same request.

        Raises SessionClosed after the end, LimitReached, InvalidInput for messages that cannot be
        answered, and the errors of the engines. A failed call may be repeated.
        """
        if self.closed:
            raise session_closed(self.id)
        if messages[-1].role == "assistant":
            reason, remedy = (
                "the last message is already an answer",
                "end with a message of the user or of a tool",
            )
            raise InvalidInput(
                reason,
                field=f"messages[{len(messages) - 1}].role",
                value="assistant",
                remedy=remedy,
            )
        if key not in self._calls:
            self._calls[key] = task = asyncio.create_task(self._answer(messages, tools, key))
            task.add_done_callback(lambda done: self._forget_failed(key, done))
        task = self._calls[key]
        try:
            return await asyncio.shield(task)  # a disconnected client may retry for the answer
        except asyncio.CancelledError:
            if self.closed and task.cancelled():
                raise session_closed(self.id) from None
            raise

    def grade(self, reward: Any) -> None:
        """Takes the program's reward and ends the session. Raises Conflict for a second, different
        reward.
        """
        if self.graded.is_set() and reward != self.reward:
            remedy = "give one reward, at the end"
            raise Conflict(
                "the episode already has a reward", field="reward", value=reward, remedy=remedy
            )
        self.reward = reward
        self.graded.set()
        self.close()

    def close(self) -> None:
        """Ends the session: calls in flight are cancelled, later calls fail."""
        self.closed = True
        for task in self._calls.values():
            task.cancel()

    def sequences(self, rewards: Sequence[float] = ()) -> list[EpisodeSequence]:
        """Returns the sequences to train on; the session must be closed. `rewards` are the rewards
        of its calls.
        """
        found = self.tree.sequences(rewards)
        for sequence in found:
            sequence.text = self._template.text(sequence.token_ids.tolist())
            if self.stop_reason:
                sequence.finish_reason = "length"
        return found

    def _forget_failed(self, key: str, task: "asyncio.Task[CallAnswer]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._calls.pop(key, None)

    async def _answer(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], key: str
    ) -> CallAnswer:
        limits = self._settings.limits
        if self.turns >= limits.turns:
            raise self._reached("turns", limits.turns)
        parent, new, added = self._continued(messages, tools)
        before = parent.tokens + added if parent else added
        room: dict[StopReason, int] = {
            "length": self._settings.max_new_tokens,
            "sampled_tokens": limits.sampled_tokens - self.sampled_tokens - self._reserved,
            "context": limits.context - len(before),
        }
        tightest = min(room, key=lambda name: room[name])
        most = room[tightest]
        if most <= 0:
            raise self._reached(
                tightest, limits.context if tightest == "context" else limits.sampled_tokens
            )
        self.turns += 1
        self._reserved += most
        try:
            completion = await self._sample(before, most, self._seed(key))
        except BaseException as error:
            self.turns -= 1
            self.failure = error if isinstance(error, ServiceError) else self.failure
            raise
        finally:
            self._reserved -= most
        self.failure = None
        self.sampled_tokens += len(completion.token_ids)
        self.stop_reason = tightest if completion.finish_reason == "length" else ""
        text = self._template.decode(completion.token_ids.tolist())
        message, problem = parse_answer(text, bool(tools), str(len(self.tree.nodes)))
        self.tree.add(parent, [*new, message], tools, added, completion)
        return CallAnswer(
            message, completion.finish_reason, len(before), len(completion.token_ids), problem
        )

    def _continued(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[CallNode | None, Sequence[Message], list[int]]:
        """Returns the node that a call continues, its new messages, and their tokens."""
        if tools and not self._template.takes_tools:
            raise InvalidInput(
                "the model's chat template does not support tools",
                field="tools",
                value=self._template.name,
                remedy="use a model that was trained with tools, or describe them in the messages",
            )
        parent, new = self.tree.find(messages, tools)
        if (
            sum(message.chars for message in new)
            > MAX_CHARS_PER_TOKEN * self._settings.limits.context
        ):
            raise self._reached("context", self._settings.limits.context)
        if parent is not None:
            ended = parent.sampled.finish_reason == "stop"
            added = self._template.continuation(parent.answer, new, tools, ended)
            if added is not None:
                return parent, new, added
        return None, messages, self._template.prompt(messages, tools)

    def _reached(self, limit: StopReason, value: int) -> LimitReached:
        self.stop_reason = limit
        remedy = f"the episode is over; raise environment.{limit} for longer ones"
        return LimitReached(
            f"the episode has reached its limit of {limit}", field=limit, value=value, remedy=remedy
        )

    def _seed(self, key: str) -> int:
        digest = hashlib.blake2b(f"{self._settings.seed} {key}".encode(), digest_size=4).digest()
        return int.from_bytes(digest) & 0x7FFFFFFF


def request_key(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
    """Returns the key of a call made by a runner itself."""
    keys = "\n".join(message.key for message in messages).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(tools_key(tools) + b"\n" + keys, digest_size=16).hexdigest()
