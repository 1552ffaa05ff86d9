"""What plays episodes in a real run: the user's agent behind a URL, the user's class, and the engines
that answer them with letters. Their rewards follow from the answers, so that the model of the
invariants can check every episode.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, ClassVar

import httpx
import orjson

from common.clients.network import Reply, Sent
from services.environment.template import Template
from tests.simulation.network import Broken, Call, Net, StandIn, Wire
from tests.simulation.stand_ins import Engines, reward_of
from tests.support.models.trap_models import letters, trap_tokenizer

CALL_HEADER = "x-call"
"""Names every try of an agent's call, for the model."""
_TRIES = 3
"""Most tries of a call; some agents give up after the first."""
_ROUNDS = 3
"""Most tool calls of an episode."""
_LETTERS = "abcdefgh"


@lru_cache
def template() -> Template:
    tokenizer = trap_tokenizer()
    return Template(tokenizer, [tokenizer.eos_token_id])


@lru_cache
def tokenizer() -> Any:
    return trap_tokenizer()


def reward_of_texts(texts: list[str]) -> float:
    """Returns what an agent makes of the different answers that it got. Of two equal calls whose first
    tries were lost, both get the same one.
    """
    return reward_of("|".join(sorted(set(texts))))


def reward_of_places(places: list[int]) -> float:
    """Returns what `Game` makes of the places that were looked at."""
    return reward_of(f"{places}")


class Policy(Engines):
    """Engines that answer with letters, and that call the tool of `Game` when there is one."""

    def __init__(self, rng: random.Random, sleep: Callable[[float], Awaitable[None]]) -> None:
        super().__init__(rng, sleep)
        self._prompts: set[str] = set()

    def was_asked(self, messages: list[dict[str, str]]) -> bool:
        """Returns whether an engine was asked with exactly these messages."""
        texts = [
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for message in messages
        ]
        return f"{''.join(texts)}<|im_start|>assistant\n" in self._prompts

    def sample(self, prompt: list[int]) -> list[int]:
        text = "".join(self._rng.choices(_LETTERS, k=self._rng.randint(5, 8)))
        asked = tokenizer().decode(prompt)
        self._prompts.add(asked)
        has_tool = '"look"' in asked and asked.count("<tool_response>") < _ROUNDS
        if has_tool and self._rng.random() < 0.6:
            place = self._rng.randrange(1000)
            content = f'{{"name": "look", "arguments": {{"n": {place}}}}}'
            text = f"{text}\n<tool_call>\n{content}\n</tool_call>"
        return letters(tokenizer(), text)

    def key_of(self, prompt: list[int], ids: list[int]) -> tuple[int, ...]:
        return (*prompt, -1, *ids)

    def count_group(self, headers: dict[bytes, bytes]) -> None:
        """Nothing: a group is a request for episodes."""


class Game:
    """An environment of a user: it has a tool, and a reward for where the tool looked."""

    _trouble: ClassVar[Callable[[], str]]
    """Draws what befalls a call; "" for nothing."""

    def reset(self, **_: Any) -> str:
        """Begins."""
        self._places: list[int] = []
        return " Look."

    def look(self, n: int) -> str:
        """Looks at a place.

        Args:
            n: The place.
        """
        if Game._trouble() == "raises":
            raise ValueError("nothing is there")
        self._places.append(n)
        return f"at {n}."

    def get_reward(self) -> float:
        """Returns what the places are worth."""
        return reward_of_places(self._places)


class Agent(StandIn):
    """An agent behind a URL. It asks the model some times and grades its answers; some agents let
    others do that. A call that gets no answer is a failure of the model to it, or of itself.
    """

    def __init__(
        self,
        net: Net,
        policy: Policy,
        *,
        grading: str,
        says_retries: bool,
        has_arrived: Callable[[str], bool],
        rewrites: Callable[[], bool],
    ) -> None:
        self._net = net
        self._rng: random.Random = net.chance.rng
        self._grading = grading
        """Where its rewards go: "returned", "posted" or "none"."""
        self._says_retries = says_retries
        """Whether its client says which calls it sends again."""
        self._has_arrived = has_arrived
        self._rewrites = rewrites
        """Draws whether it goes on with another answer than it got."""
        self._policy = policy
        self.failing = 0.0

    async def answer(self, call: Call) -> Reply:
        task = call.json()
        asked = _Calls(
            self,
            task["session"],
            limit_s=self._rng.choice((2.0, 20.0, 60.0)),
            tries=self._rng.choice((1, _TRIES)),
        )
        content = f"I am {task['session']['api_key']}."
        messages = [*task["messages"], {"role": "user", "content": content}]
        texts: list[str] = []
        for turn in range(self._rng.randint(1, _ROUNDS)):
            await asyncio.sleep(self._rng.uniform(0.0, 1.0))
            if self._net.chance.on and self._rng.random() < self.failing:
                return await self._fail(turn)
            # Some ask for several answers to the same, which only such a client can.
            count = 2 if self._says_retries and self._rng.random() < 0.2 else 1
            answers = await asyncio.gather(*(asked.ask(messages) for _ in range(count)))
            got = [text for text in answers if text is not None]
            if len(got) < count:
                # Whoever has not reached the model knows that it is no failure of the model.
                counts = asked.has_arrived and self._rng.random() < 0.5
                self._net.story.say(f"{task['session']['api_key']} has no answer, zero: {counts}")
                if not counts:
                    return Reply(500, {})
                if self._grading != "posted":
                    return Reply(200, {}, b"0.0")
                return Reply(200 if await asked.grade(0.0) else 500, {})
            if not asked.has_retried and len(set(got)) < count:
                raise Broken("two equal calls got one answer")
            if not self._policy.was_asked(messages):
                raise Broken("no engine was asked with the messages that the agent sent")
            texts += got
            content = got[-1][1:] if self._rewrites() else got[-1]
            messages.append({"role": "assistant", "content": content})
            messages.append({"role": "user", "content": f"And {turn}?"})

        reward = reward_of_texts(texts)
        if self._grading == "posted":
            is_told = await asked.grade(reward)
            if is_told and self._rng.random() < 0.3:
                await asked.grade(reward + 1.0)  # is refused, and changes nothing
            return Reply(200, {}) if is_told else Reply(500, {})
        return Reply(200, {}, orjson.dumps(reward) if self._grading == "returned" else b"")

    async def _fail(self, turn: int) -> Reply:
        """Fails, hangs, or gives a reward to nothing."""
        kind = self._rng.choice(("fails", "hangs", "grades"))
        if kind == "grades" and not turn:
            return Reply(200, {}, b"1.0")
        if kind == "hangs":
            await asyncio.sleep(1e5)
        return Reply(self._rng.choice((400, 500)), {}, b"no idea")

    async def send(self, url: str, key: str, content: Any, **headers: str) -> Reply:
        """Sends a request to a session."""
        wire = Wire(self._net)
        sent = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
        return await wire.exchange(
            Sent(
                "POST",
                url,
                sent,
                orjson.dumps(content),
                connect_s=5.0,
                moved=lambda _: None,
                receive=None,
            )
        )

    def retries(self, attempt: int) -> dict[str, str]:
        return {"x-stainless-retry-count": str(attempt)} if self._says_retries else {}

    def arrived(self, name: str) -> bool:
        return self._has_arrived(name)


class _Calls:
    """The calls of one episode, as a client library makes them."""

    _count = 0

    def __init__(
        self, agent: "Agent", session: dict[str, str], *, limit_s: float, tries: int
    ) -> None:
        self.has_retried = False
        self._agent = agent
        self._session = session
        self._limit_s = limit_s
        self._tries = tries
        """How often it sends a call before it gives up."""
        self.has_arrived = False
        """Whether a call without an answer has reached the gateway."""

    async def ask(self, messages: list[dict[str, str]]) -> str | None:
        """Returns the answer to a call; None when it got none."""
        url = f"{self._session['openai_base_url']}/chat/completions"
        body = {"model": "policy", "messages": messages}
        self._count += 1
        name = f"{self._session['api_key']} {self._count}"
        for attempt in range(self._tries):
            self.has_retried |= attempt > 0
            headers = {CALL_HEADER: name, **self._agent.retries(attempt)}
            reply = await self._try(url, body, headers)
            if reply is not None and reply.is_success:
                text: str = reply.json()["choices"][0]["message"]["content"]
                return text
            if reply is not None and reply.status_code < 500:
                break
        self.has_arrived |= self._agent.arrived(name)
        return None

    async def grade(self, reward: float) -> bool:
        """Returns whether the reward was taken, by this try or an earlier one."""
        for _ in range(_TRIES):
            reply = await self._try(f"{self._session['url']}/reward", reward, {})
            if reply is not None and reply.status_code < 500:
                return reply.is_success or reply.status_code == 410
        return False

    async def _try(self, url: str, content: Any, headers: dict[str, str]) -> Reply | None:
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._agent.send(url, self._session["api_key"], content, **headers)
        except (TimeoutError, httpx.TransportError):
            await asyncio.sleep(0.5)
            return None
