"""What computes in a real run: engines and graders. Here their answers follow from their inputs, so
that the model of the invariants can check every group.
"""

import hashlib
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
PER_TOKEN_S = 0.05


async def _body(receive: Receive) -> Any:
    content = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        content += message.get("body", b"")
        if not message.get("more_body"):
            return json.loads(content or b"{}")


async def _reply(send: Send, content: Any, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


def reward_of(text: str) -> float:
    """Returns the reward of an answer, which its text decides."""
    return hashlib.sha256(text.encode()).digest()[0] / 255


class Engines:
    """The router and the engines behind it: tokens are the version, and random numbers."""

    def __init__(self, rng: random.Random, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._rng = rng
        self._sleep = sleep
        self.version = 0
        self.failing = 0.0
        """Share of requests that fail."""
        self.generated: dict[tuple[int, ...], int] = {}
        """The version that sampled each answer, by its tokens."""

    def app(self, _: Path) -> Any:
        async def app(scope: Any, receive: Receive, send: Send) -> None:
            body = await _body(receive)
            if scope["path"] != "/generate":
                await _reply(send, {"status": "healthy"})
                return
            version = self.version
            if self._rng.random() < self.failing:
                await _reply(send, {"error": {"message": "out of memory"}}, 500)
                return
            answers = []
            longest = 0
            for _ in range(body["sampling_params"]["n"]):
                length = self._rng.randint(2, 8)
                longest = max(longest, length)
                ids = [self._rng.randrange(3, 300) for _ in range(length)]
                self.generated[tuple(ids)] = version
                pairs = [[-0.5, token, None] for token in ids]
                meta = {
                    "finish_reason": {"type": "stop"},
                    "output_token_logprobs": pairs,
                    "weight_version": str(version),
                }
                text = " ".join(map(str, ids))
                answers.append({"text": text, "output_ids": ids, "meta_info": meta})
            await self._sleep(longest * PER_TOKEN_S)
            await _reply(send, answers if len(answers) > 1 else answers[0])

        return app


class Graders:
    """The reward-server: sometimes it cannot grade an answer, and says so."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.failing = 0.0
        """Share of answers that cannot be graded."""

    def app(self, _: Path) -> Any:
        async def app(scope: Any, receive: Receive, send: Send) -> None:
            body = await _body(receive)
            if scope["path"] == "/batch_reward":
                rewards = [self._grade(item) for item in body["items"]]
                await _reply(send, {"rewards": rewards, "mean_reward": 0.0, "accuracy": 0.0})
            else:
                await _reply(send, {"problems": [], "repaired": 0})

        return app

    def _grade(self, item: dict[str, Any]) -> dict[str, Any]:
        failed = self._rng.random() < self.failing
        reward = None if failed else reward_of(item["response"])
        return {
            "reward": reward,
            "extracted_answer": None,
            "ground_truth": item["ground_truth"],
            "correct": bool(reward and reward > 0.5),
            "status": "error" if failed else "ok",
            "components": {},
            "reason": "",
        }
