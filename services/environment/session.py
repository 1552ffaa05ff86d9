"""One session of the gateway: the calls that one program makes to the model in one episode."""

import asyncio
import hashlib
import time
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
from services.environment.clock import EpisodeClock
from services.environment.messages import Chat, Message, Tools
from services.environment.program_requests import FollowedRequests
from services.environment.template import Template, cut
from services.environment.tree import SessionTree, TurnNode

MAX_CHARS_PER_TOKEN = 64
"""Most characters of a token. New messages with more characters than this for each token of the
context are refused without being tokenised: they cannot fit."""


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
    """Returns the error for a call after the end."""
    return SessionClosed(
        "the session has ended",
        field="session",
        value=identifier,
        remedy="stop: its episode is complete",
    )


Sample = Callable[[Int32, int, int, Sequence[str]], Awaitable[Completion]]
"""(tokens, max_new_tokens, seed, stop texts) -> completion"""


HasAnswer = Callable[[], bool | None]
"""Returns whether a client has the answer to a call; None when it may still be reading, or nothing
was sampled for the call.
"""


class CallOptions(NamedTuple):
    """When the answer to a call ends, besides the model's own end and the run's limits."""

    stop: tuple[str, ...] = ()
    max_tokens: int | None = None


@dataclass(eq=False)
class CallRecord:
    """What a session knows about one call: how far it is, and whether its client has the answer.

    A client whose connection breaks, and which sends the call again:

        event                        task      clients   has_answer()
        the call arrives             running   1         None: nothing was sampled for it yet
        the engines begin            running   1         False
        the client leaves            running   0         False
        the answer is sampled        done      0         False: nobody has read it
        the client sends it again    done      1         False
        it gets the same answer      done      0         True when the client has read it
    """

    name: str
    task: "asyncio.Task[CallAnswer] | None" = None
    """Samples the answer. None before it starts, and after it failed: the call may be repeated."""
    clients: int = 0
    """How many clients wait for the answer."""
    has_answer: HasAnswer = lambda: None
    """Says whether the client that was last sent the answer has read it; False from the time the
    engines begin until the answer is sent."""

    def lacks_answer(self) -> bool:
        """Returns whether no client has got the answer that the engines were asked for."""
        return self.has_answer() is False

    def is_open(self) -> bool:
        """Returns whether it is being sampled, or its client may lack the answer."""
        return self.lacks_answer() or (self.task is not None and not self.task.done())

    def forget_failed(self, task: "asyncio.Task[CallAnswer]") -> None:
        """Lets a call whose sampling failed be sampled anew."""
        if task.cancelled() or task.exception() is not None:
            self.task = None


class CallAnswer(NamedTuple):
    """The answer to a call."""

    call: CallRecord
    message: Message
    finish_reason: FinishReason
    prompt_tokens: int
    sampled_tokens: int
    problem: str
    """Why a tool call in it cannot be read; empty when all can."""
    stop_text: str = ""
    """The stop text that ended it; empty if none did."""


_NO_OPTIONS = CallOptions()


class Session:
    """The calls of one episode, recorded with their exact tokens.

    A conversation with a tool, as its program calls the model, and the sequence to train on:

        call 1   user "1+2?"                                   answer 1   add(1, 2)
        call 2   user "1+2?", answer 1, tool "3"               answer 2   it is 3

        prompt   <user> 1+2? <assistant>
        tokens   add(1, 2) <end> │ <tool> 3 <assistant> │ it is 3 <end>
        mask     1               │ 0                    │ 1

    Call 2 continues the tokens of call 1: its engine gets the prompt, what was sampled for answer 1
    and then the new messages as the chat template writes them, whatever the program made of the
    answer's text. A call whose history has other answers begins a new sequence.

    A call that is sent again gets the answer of the first one, even while that is still being
    sampled. An identical call that was answered is sampled anew, as a sibling of the first. So a
    *key* says what is asked, and a *name* which call asked it: the first call with a key is named
    after it, a sibling by key and number:

        chat = parse_messages([{"role": "user", "content": "1+1"}])
        first = await session.call(chat, [], "a")                  # call "a" is sampled
        await session.call(chat, [], "a", is_retry=True)           # the same answer
        await session.call(chat, [], "a", is_retry=False)          # call "a 1" is sampled
        await session.call([*chat, first.message, more], [], "b")  # continues the tokens of "a"
        session.close()
        session.sequences()                                        # two: "a" with "b", and "a 1"
    """

    def __init__(
        self,
        identifier: str,
        template: Template,
        sample: Sample,
        *,
        limits: EpisodeLimits,
        max_new_tokens: int,
        seed: int = 0,
    ) -> None:
        self.id = identifier
        self.tree = SessionTree()
        self.chat = Chat()
        """The conversation of the latest call through the gateway."""
        self.clock = EpisodeClock()
        """Measures the episode's own time, without that of the engines."""
        self.closed = False
        self.stop_reason: StopReason = ""
        """What cut the latest call short; a complete answer clears it."""
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
        self.requests = FollowedRequests()
        self._template = template
        self._sample = sample
        self._limits = limits
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._calls: dict[str, list[CallRecord]] = {}
        """By key, the calls with it, the first one first."""
        self._reserved_tokens = 0
        """Tokens that the answers being sampled may still need."""

    async def call(
        self,
        messages: Sequence[Message],
        tools: Tools,
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
        call = self._find_or_add_call(key, is_retry)
        if call.task is None:
            call.task = asyncio.create_task(self._answer(messages, tools, call, options=options))
            call.task.add_done_callback(call.forget_failed)

        task = call.task
        call.clients += 1
        try:
            answer = await asyncio.shield(task)  # a disconnected client may retry for the answer
        except asyncio.CancelledError:
            if self.closed and task.cancelled():
                raise session_closed(self.id) from None
            raise
        finally:
            call.clients -= 1
        # A caller in this process has it. The gateway asks the client's connection instead.
        call.has_answer = lambda: True
        return answer

    def count_tokens(self, messages: Sequence[Message], tools: Tools) -> int:
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
        self.requests.close()
        for calls in self._calls.values():
            for call in calls:
                if call.task is not None:
                    call.task.cancel()

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

    def _check(self, messages: Sequence[Message]) -> None:
        """Raises SessionClosed after the end, InvalidInput when the last message is an answer."""
        if self.closed:
            raise session_closed(self.id)
        if messages[-1].role == "assistant":
            raise InvalidInput(
                "the last message is already an answer",
                field=f"messages[{len(messages) - 1}].role",
                value="assistant",
                remedy="end with a message of the user or of a tool",
            )

    def _find_or_add_call(self, key: str, is_retry: bool | None) -> CallRecord:
        """Returns the record of the earlier call that is sent again, or a new one."""
        calls = self._calls.setdefault(key, [])
        open_calls = [call for call in calls if call.is_open()]
        # A client that does not say is taken to repeat a call whose answer it may lack.
        if is_retry is None:
            is_retry = bool(open_calls)
        if calls and is_retry:
            # Several clients may send the same call: a retry is for one that nobody waits for.
            abandoned = [call for call in open_calls if not call.clients]
            return (abandoned or open_calls or calls[-1:])[0]

        call = CallRecord(f"{key} {len(calls)}" if calls else key)
        calls.append(call)
        return call

    async def _answer(
        self,
        messages: Sequence[Message],
        tools: Tools,
        call: CallRecord,
        *,
        options: CallOptions,
    ) -> CallAnswer:
        """Samples the answer to a call and records the turn."""
        try:
            if self.turns >= self._limits.turns:
                raise _limit_reached("turns", self._limits.turns)
            parent, new_messages, added = self._continued(messages, tools)
            prompt = np.array(added, np.int32)
            if parent is not None:
                prompt = np.concatenate([parent.tokens, prompt])
            tightest, max_new_tokens = self._tightest_limit(len(prompt), options.max_tokens)
        except LimitReached as error:
            self.stop_reason = error.limit
            raise

        # Calls may run at once: each reserves its turn and its tokens before it is sampled.
        self.turns += 1
        self._reserved_tokens += max_new_tokens
        call.has_answer = lambda: False
        # Siblings have different names, so different seeds; a repeated run has the same seeds.
        named = f"{self._seed} {call.name}".encode()
        seed = int.from_bytes(hashlib.blake2b(named, digest_size=4).digest())
        seed &= 0x7FFFFFFF  # not negative as an int32
        try:
            with self.clock.stopped():
                completion = await self._sample(prompt, max_new_tokens, seed, options.stop)
        except BaseException:
            self.turns -= 1  # the call may be repeated
            raise
        finally:
            self._reserved_tokens -= max_new_tokens

        self.sampled_tokens += len(completion.token_ids)
        self.stop_reason = tightest if completion.finish_reason == "length" else ""
        # All sampled tokens are recorded; the program does not see the stop text.
        text = self._template.decode(completion.token_ids.tolist())
        text, stop_text, _ = cut(text, options.stop)
        message, problem = self._template.parse(text, tools, answer=len(self.tree.nodes))
        turn = [*new_messages, message]
        self.tree.add(parent, turn, tools, added=added, sampled=completion, sent=messages)
        return CallAnswer(
            call=call,
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
        limits = self._limits
        max_new_tokens = self._max_new_tokens
        tokens_left: dict[StopReason, int] = {
            "length": min(max_new_tokens, asked) if asked else max_new_tokens,
            "sampled_tokens": limits.sampled_tokens - self.sampled_tokens - self._reserved_tokens,
            "context": limits.context - prompt_tokens,
        }
        tightest = min(tokens_left, key=tokens_left.__getitem__)
        if tokens_left[tightest] <= 0:
            value = limits.context if tightest == "context" else limits.sampled_tokens
            raise _limit_reached(tightest, value)
        return tightest, tokens_left[tightest]

    def _continued(
        self, messages: Sequence[Message], tools: Tools
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

        context = self._limits.context
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
