"""The reward-server's client."""

from itertools import chain, islice

from common import Json
from common.clients.base import Client
from common.wire.schemas import (
    BatchRewardRequest,
    BatchRewardResult,
    GroundTruthProblems,
    RewardItem,
    RewardResult,
)


class RewardClient(Client):
    """reward-server."""

    gets_tokens = False
    """Whether reward functions also get the completions' tokens; functions passed to the Python API
    do."""

    async def batch_reward(self, items: list[RewardItem]) -> BatchRewardResult:
        body = BatchRewardRequest(items=items).model_dump_json()
        return await self.json("POST", "/batch_reward", BatchRewardResult, content=body)

    async def gives_verdicts(self) -> bool:
        """Returns whether the reward functions say which answers are right."""
        stats = await self.json("GET", "/stats", Json)
        return bool(stats["gives_verdicts"])

    async def check_ground_truths(self, items: list[RewardItem]) -> GroundTruthProblems:
        """Returns the ground truths that no answer can match; the items' responses do not count."""
        body = BatchRewardRequest(items=items).model_dump_json()
        return await self.json("POST", "/check_ground_truths", GroundTruthProblems, content=body)

    async def grade_all(self, batches: list[list[RewardItem]]) -> list[list[RewardResult]]:
        """Grades several batches with one request."""
        answer = await self.batch_reward(list(chain.from_iterable(batches)))
        rewards = iter(answer.rewards)
        return [list(islice(rewards, len(batch))) for batch in batches]
