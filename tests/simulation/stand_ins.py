"""What computes in a real run: engines and grader processes. Here their answers follow from their
inputs, so that the model of the invariants can check every group.
"""

import asyncio
import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import orjson
from starlette.requests import ClientDisconnect

from common.process.futures import forgettable
from services.reward import configured
from services.reward.functions.handler import prepare
from services.reward.pool import CallFailed, WorkerPool, WorkerSpec
from tests.simulation.models import expect
from tests.simulation.virtual_time import VirtualLoop

_T = TypeVar("_T")
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Spans = list[tuple[int, int, int]]
"""Which version sampled which tokens: (version, start, end)."""
PER_TOKEN_S = 0.05
GRADER_LIMIT_S = 2.0
"""How long a call of a reward function may take."""


async def body_of(receive: Receive) -> Any:
    content = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        content += message.get("body", b"")
        if not message.get("more_body"):
            return orjson.loads(content or b"{}")


async def reply_to(send: Send, content: Any, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps(content)})


class Loop:
    """The trainer's event loop thread: the trainer itself drives the virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.tasks: set[asyncio.Task[Any]] = set()

    def wait(self, task: "asyncio.Task[_T]") -> _T:
        """Lets the virtual time pass until a task is done."""
        return self.loop.run_until_complete(task)

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> Callable[[], _T]:
        task = forgettable(self.loop.create_task(coroutine))
        self.tasks.add(task)
        return lambda: self.wait(task)

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return self.begin(coroutine)()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)
        return task

    def cancel(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self.call(asyncio.wait({task}))

    def sleep(self, seconds: float) -> None:
        self.call(asyncio.sleep(seconds))


@lru_cache(1000)
def _byte_of(text: str, place: int) -> float:
    return hashlib.sha256(text.encode()).digest()[place] / 256


def first(completions: list[str], **_: Any) -> list[float]:
    """A reward function of a user."""
    return [_byte_of(text, 0) for text in completions]


def second(completions: list[str], **_: Any) -> list[float]:
    """Another one: a reward is the sum of both."""
    return [_byte_of(text, 1) for text in completions]


FUNCTIONS = f"{__name__}:first,{__name__}:second"


def reward_of(text: str) -> float:
    """Returns the reward of an answer, which its text decides."""
    return _byte_of(text, 0) + _byte_of(text, 1)


class Engines:
    """The router and the engines behind it: tokens are the version, and random numbers."""

    def __init__(self, rng: random.Random, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._rng = rng
        self._sleep = sleep
        self.version = 0
        self.groups: set[str] = set()
        """Groups of the run that runs, for which completions were requested."""
        self.allowed: Callable[[], int] = lambda: 0
        """How many such groups there may be by now."""
        self.run = ""
        self.failing = 0.0
        """Share of requests that fail."""
        self.equal = 0.0
        """Share of requests whose completions are all equal."""
        self.generated: dict[tuple[int, ...], Spans] = {}
        """The versions that sampled each answer, by `key_of` its tokens."""

    def app(self, _: Path) -> Any:
        async def app(scope: Any, receive: Receive, send: Send) -> None:
            body = await body_of(receive)
            if scope["path"] != "/generate":
                await reply_to(send, {"status": "healthy"})
                return
            self.count_group(dict(scope["headers"]))
            version = self.version
            if self._rng.random() < self.failing:
                await reply_to(send, {"error": {"message": "out of memory"}}, 500)
                return
            prompt = body["input_ids"]
            n = body["sampling_params"]["n"]
            sampled = [self.sample(prompt) for _ in range(n)]
            if self.equal and self._rng.random() < self.equal:
                sampled = sampled[:1] * n
            await self._sleep(max(map(len, sampled)) * PER_TOKEN_S)
            answers = [self._answer(prompt, ids, version) for ids in sampled]
            await reply_to(send, answers if len(answers) > 1 else answers[0])

        return app

    def sample(self, prompt: list[int]) -> list[int]:
        """Returns the tokens of an answer."""
        length = self._rng.randint(2, 8)
        return [self._rng.randrange(3, 300) for _ in range(length)]

    def key_of(self, prompt: list[int], ids: list[int]) -> tuple[int, ...]:
        """Returns the key of an answer in `generated`."""
        return tuple(ids)

    def _answer(self, prompt: list[int], ids: list[int], began: int) -> dict[str, Any]:
        """Returns an answer that began with a version. Its second half is of the version that has
        come meanwhile.
        """
        middle = len(ids) // 2
        spans = [(began, 0, middle), (self.version, middle, len(ids))]
        if began == self.version:
            spans = [(began, 0, len(ids))]
        self.generated[self.key_of(prompt, ids)] = spans
        keys = ("version", "start", "end")
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_version": str(began),
            "weight_versions": [dict(zip(keys, span, strict=True)) for span in spans],
        }
        return {"text": " ".join(map(str, ids)), "output_ids": ids, "meta_info": meta}

    def count_group(self, headers: dict[bytes, bytes]) -> None:
        """Raises Broken for a group that has begun although every slot was taken."""
        if headers[b"x-run-id"].decode() != self.run:
            return
        self.begin(headers[b"x-request-id"].decode())

    def begin(self, group: str) -> None:
        """Counts a group. Raises Broken when every slot was taken."""
        self.groups.add(group)
        allowed = self.allowed()
        expect(
            len(self.groups) <= allowed,
            f"{len(self.groups)} groups have begun, and there were slots for {allowed}",
        )


def _handler_of(spec: WorkerSpec) -> Callable[[str], str]:
    """Returns what a grader calls. All graders share it: the functions above keep nothing."""
    return _handler(json.dumps(spec.arguments))


@cache
def _handler(arguments: str) -> Callable[[str], str]:
    return prepare(json.loads(arguments))()


class Graders:
    """Makes the grader processes of the reward-server: they die, hang and fail."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.failing = 0.0
        """Share of calls with a fault."""

    async def spawn(self, pool: WorkerPool) -> Any:
        """Starts a grader, in the place of `WorkerPool._spawn`."""
        await asyncio.sleep(self._rng.uniform(0.01, 0.2))
        if self._rng.random() < self.failing:
            raise CallFailed("died", "it did not start")
        return Grader(self, _handler_of(pool.spec))

    def fault(self) -> str:
        """Draws what happens to a call; "" if nothing does."""
        if self._rng.random() >= self.failing:
            return ""
        return self._rng.choice(("died before", "died", "hangs", "error"))

    def seconds(self) -> float:
        return self._rng.uniform(0.001, 0.05)


class Grader:
    """The reward-server's connection to a grader process. What a call answers comes later, also
    when nobody waits for it any more.
    """

    pid = 0
    """No process has it: all time counts."""

    def __init__(self, graders: Graders, handle: Callable[[str], str]) -> None:
        self._graders = graders
        self._handle = handle
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.answered = 0
        self.began = False

    async def exchange(self, message: bytes) -> bytes:
        self.began = False
        fault = self._graders.fault()
        await asyncio.sleep(self._graders.seconds())
        if fault == "died before":
            raise EOFError
        self.began = True
        answer = self._handle(message.decode()).encode()
        if fault == "error":
            answer = json.dumps({"error": "out of memory", "always": False}).encode()
        seconds = GRADER_LIMIT_S * 1.5 if fault == "hangs" else self._graders.seconds()
        asyncio.get_running_loop().call_later(seconds, self._answers.put_nowait, answer)
        if fault == "died":
            raise EOFError
        line = await self._answers.get()
        self.answered += 1
        return line

    def kill(self) -> None:
        """Nothing is left to end."""


def _tried(spec: WorkerSpec, *_: str) -> str:
    """What a process prints that makes the reward functions of `spec`."""
    return _handler_of(spec)('{"functions": true}')


@contextmanager
def graded_by(graders: Graders) -> Iterator[None]:
    """Inside the block, these are the grader processes of every reward-server."""
    with (
        patch.object(WorkerPool, "_spawn", lambda pool: graders.spawn(pool)),
        patch.object(configured, "_tried", _tried),
    ):
        yield
