"""One session of the gateway: the calls that one program makes to the model in one episode."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from common.errors import Conflict, InvalidInput, ServiceError
from common.wire.schemas import (
    Completion,
    EpisodeLimits,
    EpisodeSequence,
    FinishReason,
    Int32,
    StopReason,
)
from services.environment.messages import History, Message
from services.environment.template import Template
from services.environment.tree import SessionTree, TurnNode

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
    limit: StopReason


def session_closed(identifier: str) -> SessionClosed:
    """Returns the error for a call that comes too late."""
    return SessionClosed(
        "the session has ended",
        field="session",
        value=identifier,
        remedy="stop: its episode is complete",
    )


Sample = Callable[[Int32, int, int, Sequence[str]], Awaitable[Completion]]
"""(tokens, max_new_tokens, seed, stop texts) -> completion"""


WasTaken = Callable[[], bool | None]
"""Returns whether a client took an answer; None when it may still be reading."""


class CallOptions(NamedTuple):
    """When the answer to a call ends, besides the model's own end and the run's limits."""

    stop: tuple[str, ...] = ()
    max_tokens: int | None = None


class CallAnswer(NamedTuple):
    """The answer to a call."""

    call: str
    """The name of the call in its session."""
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    sampled_tokens: int
    problem: str
    """Why a tool call in it cannot be read; empty when all can."""
    stop_text: str = ""
    """The stop text that ended it; empty if none did."""


_NO_OPTIONS = CallOptions()


@dataclass(frozen=True)
class SessionSettings:
    """The settings of every call of a session, whatever the call requests."""

    max_new_tokens: int
    limits: EpisodeLimits
    seed: int = 0


class Session:
    """The calls of one episode, recorded with their exact tokens.

    A call that is sent again gets the answer of the first one, even while that is still being
    sampled. An identical call that was answered is sampled anew, as a sibling of the first. So a
    *key* says what is asked, and a *name* which call asked it: the first call with a key is named
    after it, a sibling by key and number.
    """

    def __init__(
        self, identifier: str, template: Template, sample: Sample, settings: SessionSettings
    ) -> None:
        self.id = identifier
        self.tree = SessionTree()
        self.history = History()
        self.closed = False
        self.stop_reason: StopReason = ""
        """What cut the latest call short; a complete answer clears it."""
        self._unanswered: dict[str, ServiceError | None] = {}
        """By name, calls whose answer has not reached the client, with the engines' error; None for
        one that is being sampled, or whose client has left."""
        self._on_the_way: dict[str, WasTaken] = {}
        """By name, calls whose answer the client may still be reading."""
        # The service counts them, since a refused call never reaches `call`.
        self.refused_calls = 0
        self.refusal = ""
        """Why the first of them was refused."""
        self.asked_at = 0.0
        """When the last call came, in seconds since 1970."""
        self.turns = 0
        """Answers of the model, including those being sampled."""
        self.sampled_tokens = 0
        self.reward: Any = None
        """The reward from the program's reward call."""
        self.graded = asyncio.Event()
        """Set by the program's reward call."""
        self._template = template
        self._sample = sample
        self._settings = settings
        self._calls: dict[str, asyncio.Task[CallAnswer]] = {}
        """By name, calls that are being sampled or were answered; one that failed is forgotten."""
        self._clients: Counter[str] = Counter()
        """By name, how many clients wait for the call."""
        self._names: dict[str, list[str]] = {}
        """By key, the names of its calls, the first one first."""
        self._reserved_tokens = 0
        """Tokens that the answers being sampled may still need."""

    async def call(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        key: str,
        *,
        is_retry: bool | None = None,
        options: CallOptions = _NO_OPTIONS,
    ) -> CallAnswer:
        """Answers a call; `key` is the same for the same request.

        `is_retry` says whether the client sends a call again; None when it does not say.

        Raises SessionClosed after the end, LimitReached, InvalidInput for messages that cannot be
        answered, and the errors of the engines. A failed call may be repeated.
        """
        self._check(messages)
        self.asked_at = time.time()
        self._look_at_clients()
        name = self._name(key, is_retry)
        task = self._calls.get(name)
        if task is None:
            task = asyncio.create_task(self._answer(messages, tools, name, options=options))
            task.add_done_callback(lambda done: self._forget_failed(name, done))
            self._calls[name] = task

        self._clients[name] += 1
        try:
            answer = await asyncio.shield(task)  # a disconnected client may retry for the answer
        except asyncio.CancelledError:
            if self.closed and task.cancelled():
                raise session_closed(self.id) from None
            raise
        finally:
            self._clients[name] -= 1
        self._unanswered.pop(name, None)
        return answer

    def sends(self, call: str, was_taken: WasTaken) -> None:
        """Records that the answer to a call is sent to its client now."""
        self._on_the_way[call] = was_taken

    def lose(self, call: str) -> None:
        """Records that the client of a call left before it got the answer."""
        self._unanswered[call] = None

    def unanswered(self) -> dict[str, ServiceError | None]:
        """Returns, by name, the calls whose answer has not reached the client, each with the
        engines' error or, for one that its client left, None.
        """
        self._look_at_clients()
        return self._unanswered

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int:
        """Returns the number of tokens that a call with these messages would send to the engine.

        Raises SessionClosed, and the errors of `call` for these messages.
        """
        self._check(messages)
        parent, _, added = self._continued(messages, tools)
        return len(added) + (len(parent.tokens) if parent else 0)

    def grade(self, reward: Any) -> None:
        """Takes the program's reward and ends the session. Raises Conflict for a second, different
        reward.
        """
        if self.graded.is_set() and reward != self.reward:
            raise Conflict(
                "the episode already has a reward",
                field="reward",
                value=reward,
                remedy="give one reward, at the end",
            )
        self.reward = reward
        self.graded.set()
        self.close()

    def close(self) -> None:
        """Ends the session: calls in flight are cancelled, later calls fail."""
        self.closed = True
        for task in self._calls.values():
            task.cancel()

    def sequences(self, turn_rewards: Sequence[float] = ()) -> list[EpisodeSequence]:
        """Returns the sequences to train on; the session must be closed. `turn_rewards` has one
        reward for each turn, or none.
        """
        sequences = self.tree.sequences(turn_rewards)
        for sequence in sequences:
            sequence.text = self._template.text(sequence.token_ids.tolist())
            # A limit cut the episode, so that none of its sequences counts as complete.
            if self.stop_reason:
                sequence.finish_reason = "length"
        return sequences

    def _look_at_clients(self) -> None:
        """Finds out which answers on the way were taken, and which are lost."""
        for call, was_taken in list(self._on_the_way.items()):
            taken = was_taken()
            if taken is None:
                continue
            del self._on_the_way[call]
            if not taken:
                self.lose(call)

    def _check(self, messages: Sequence[Message]) -> None:
        """Raises SessionClosed after the end, InvalidInput for messages that ask for nothing."""
        if self.closed:
            raise session_closed(self.id)
        if messages[-1].role == "assistant":
            raise InvalidInput(
                "the last message is already an answer",
                field=f"messages[{len(messages) - 1}].role",
                value="assistant",
                remedy="end with a message of the user or of a tool",
            )

    def _name(self, key: str, is_retry: bool | None) -> str:
        """Returns the name of a call: of the earlier one that is sent again, or a new one."""
        names = self._names.setdefault(key, [])
        open_names = [name for name in names if self._is_open(name)]
        if is_retry is None:
            is_retry = bool(open_names)
        if names and is_retry:
            # Several clients may send the same call: a retry is for one that nobody waits for.
            abandoned = [name for name in open_names if not self._clients[name]]
            if abandoned:
                return abandoned[0]
            return open_names[0] if open_names else names[-1]

        name = f"{key} {len(names)}" if names else key
        names.append(name)
        return name

    def _is_open(self, name: str) -> bool:
        """Returns whether a call is being sampled, or its client may lack the answer."""
        task = self._calls.get(name)
        return name in self._unanswered or (task is not None and not task.done())

    def _forget_failed(self, name: str, task: "asyncio.Task[CallAnswer]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._calls.pop(name, None)

    async def _answer(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        name: str,
        *,
        options: CallOptions,
    ) -> CallAnswer:
        """Samples the answer to a call and records the turn."""
        limits = self._settings.limits
        try:
            if self.turns >= limits.turns:
                raise _limit_reached("turns", limits.turns)
            parent, new_messages, added = self._continued(messages, tools)
            prompt = np.array(added, np.int32)
            if parent is not None:
                prompt = np.concatenate([parent.tokens, prompt])
            tightest, max_new_tokens = self._tightest_limit(len(prompt), options.max_tokens)
        except LimitReached as error:
            self.stop_reason = error.limit
            raise

        # Calls may run at once: what this one may use is taken before it is sampled.
        self.turns += 1
        self._reserved_tokens += max_new_tokens
        self._unanswered[name] = None
        try:
            completion = await self._sample(prompt, max_new_tokens, self._seed(name), options.stop)
        except BaseException as error:
            self.turns -= 1  # the call may be repeated
            if isinstance(error, ServiceError):
                self._unanswered[name] = error
            raise
        finally:
            self._reserved_tokens -= max_new_tokens

        self.sampled_tokens += len(completion.token_ids)
        self.stop_reason = tightest if completion.finish_reason == "length" else ""
        # All sampled tokens are recorded; the program does not see the stop text.
        text, stop_text = _cut(self._template.decode(completion.token_ids.tolist()), options.stop)
        message, problem = self._template.parse(text, tools, id_prefix=str(len(self.tree.nodes)))
        self.tree.add(parent, [*new_messages, message], tools, added=added, sampled=completion)
        return CallAnswer(
            call=name,
            message=message,
            finish_reason=completion.finish_reason,
            prompt_tokens=len(prompt),
            sampled_tokens=len(completion.token_ids),
            problem=problem,
            stop_text=stop_text,
        )

    def _tightest_limit(self, prompt_tokens: int, asked: int | None) -> tuple[StopReason, int]:
        """Returns which limit an answer meets first, and after how many tokens. Raises LimitReached
        when none are left.
        """
        limits = self._settings.limits
        max_new_tokens = self._settings.max_new_tokens
        tokens_left: dict[StopReason, int] = {
            "length": min(max_new_tokens, asked) if asked else max_new_tokens,
            "sampled_tokens": limits.sampled_tokens - self.sampled_tokens - self._reserved_tokens,
            "context": limits.context - prompt_tokens,
        }
        tightest = min(tokens_left, key=lambda limit: tokens_left[limit])
        if tokens_left[tightest] <= 0:
            value = limits.context if tightest == "context" else limits.sampled_tokens
            raise _limit_reached(tightest, value)
        return tightest, tokens_left[tightest]

    def _continued(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[TurnNode | None, Sequence[Message], list[int]]:
        """Returns the turn that a call continues, its new messages, and their tokens; for a call
        that continues none, None, all messages, and the tokens of the whole prompt.
        """
        if tools and self._template.no_tools:
            raise InvalidInput(
                f"the model's chat template does not support tools: {self._template.no_tools}",
                field="tools",
                value=self._template.name,
                remedy="use a model that was trained with tools, or describe them in the messages",
            )

        context = self._settings.limits.context
        parent, new_messages = self.tree.find(messages, tools)
        if sum(message.chars for message in new_messages) > MAX_CHARS_PER_TOKEN * context:
            raise _limit_reached("context", context)

        if parent is not None:
            added = self._template.continuation(
                parent.answer, new_messages, tools, sampled=parent.sampled.token_ids
            )
            if added is not None:
                return parent, new_messages, added
        return None, messages, self._template.prompt(messages, tools)

    def _seed(self, name: str) -> int:
        """Returns the call's own seed: its siblings have others, a repeated run the same."""
        digest = hashlib.blake2b(f"{self._settings.seed} {name}".encode(), digest_size=4).digest()
        return int.from_bytes(digest) & 0x7FFFFFFF  # not negative as an int32


def _limit_reached(limit: StopReason, value: int) -> LimitReached:
    # The limits on tokens and tool calls follow from that on turns.
    setting = "context" if limit == "context" else "turns"
    error = LimitReached(
        f"the episode has reached its limit of {limit}",
        field=limit,
        value=value,
        remedy=f"the episode is over; raise environment.{setting} for longer ones",
    )
    error.limit = limit
    return error


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Returns a text up to its first stop text, and that stop text."""
    places = {stop: text.find(stop) for stop in stops}
    found = [(place, stop) for stop, place in places.items() if place >= 0]
    if not found:
        return text, ""
    place, stop = min(found)
    return text[:place], stop
