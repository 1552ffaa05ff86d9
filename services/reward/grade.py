"""Grades answers: extraction and the exact path here, everything else in killable workers. Knows nothing of HTTP."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Self

from common.errors import ConfigError, InvalidInput, NotReady, TooLarge
from common.observe import Metrics
from common.schemas import BatchRewardResult, RewardItem, RewardResult, RewardStatus
from common.sections import RewardSection
from services.reward.exact import same_answer
from services.reward.extract import MAX_ANSWER_CHARS, extract_answer, gold_answer
from services.reward.pool import GraderPool

_YIELD_CHARS = 200_000  # text read before other requests get their turn: a few milliseconds
_BATCHES_QUEUED = 4


class MathGrader:
    """Grades responses to problems that have one final answer: 1.0 when it is right, 0.0 when it is wrong or missing.

    An async context manager: it owns the worker processes. Raises ConfigError when math-verify is not installed.
    """

    def __init__(self, config: RewardSection, metrics: Metrics | None = None) -> None:
        if find_spec("math_verify") is None:
            raise ConfigError("math-verify is not installed", remedy="pip install 'rlhf-math[services]'")
        self.config = config
        metrics = metrics or Metrics("reward_server")
        self._graded = metrics.counter("graded_total", "Answers by status", ["status"])
        self._seconds = metrics.histogram("grade_seconds", "Seconds from request to verdicts, of one batch")
        self._restarts = metrics.counter("worker_restarts_total", "Grader processes that were replaced")
        self._counts: Counter[RewardStatus] = Counter()
        self._restarted = 0
        self._pool = GraderPool(config.workers, config.timeout_s, config.memory_mb, self._on_restart)

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._pool.__aexit__(*error)

    def not_ready(self) -> str | None:
        """Why answers cannot be graded now, or None."""
        return self._pool.problem

    async def ready(self) -> None:
        """Returns when the workers have started. `grade` may be called before: it waits for them where it needs them."""
        await self._pool.ready()

    def stats(self) -> dict[str, Any]:
        """Answers graded so far by status, and the state of the workers."""
        statuses: tuple[RewardStatus, ...] = ("ok", "unparsable", "timeout", "died")
        return {
            "graded": {status: self._counts[status] for status in statuses},
            "workers": self.config.workers,
            "worker_restarts": self._restarted,
            "unfinished": self._pool.unfinished,
        }

    async def grade(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Grades a batch, in order. Cancelling the call frees the workers.

        Raises TooLarge for more items than `max_batch_items`, InvalidInput for a ground truth that states no answer,
        NotReady when too many answers wait already.
        """
        self._check_size(len(items))
        started = time.perf_counter()
        golds = [self.gold(item.ground_truth, f"items[{i}].ground_truth") for i, item in enumerate(items)]
        results: list[RewardResult | None] = []
        hard: dict[int, str] = {}  # index -> answer that the workers must compare
        read = 0
        for i, (item, gold) in enumerate(zip(items, golds, strict=True)):
            answer = extract_answer(item.response)
            result = self._grade_here(item, gold, answer)
            if result is None and answer is not None:
                hard[i] = answer
            results.append(result)
            if (read := read + len(item.response) + 100) > _YIELD_CHARS:
                read = 0
                await asyncio.sleep(0)
        self._check_room(len(hard))
        verdicts = await asyncio.gather(*(self._grade_there(items[i], golds[i], answer) for i, answer in hard.items()))
        for i, verdict in zip(hard, verdicts, strict=True):
            results[i] = verdict
        graded = [result for result in results if result is not None]
        for result in graded:
            self._counts[result.status] += 1
            self._graded.labels(result.status).inc()
        self._seconds.observe(time.perf_counter() - started)
        return graded

    async def grade_batch(self, items: Sequence[RewardItem]) -> BatchRewardResult:
        """`grade`, with the means over the items that were graded (0.0 when none was)."""
        results = await self.grade(items)
        rewards = [result.reward for result in results]
        graded = [result for result in results if result.reward is not None]
        count = max(1, len(graded))
        return BatchRewardResult(
            rewards=rewards,
            mean_reward=sum(reward for reward in rewards if reward is not None) / count,
            accuracy=sum(result.correct for result in graded) / count,
            results=results,
        )

    @staticmethod
    def gold(ground_truth: str, field: str) -> str:
        """The answer that a ground truth states. Raises InvalidInput naming `field`."""
        gold = gold_answer(ground_truth)
        if gold is None:
            raise InvalidInput(
                "the ground truth states no answer",
                field=field,
                value=ground_truth,
                remedy=f"send an answer of 1 to {MAX_ANSWER_CHARS} characters, or a text with a \\boxed{{}} or #### answer",
            )
        return gold

    def _grade_here(self, item: RewardItem, gold: str, answer: str | None) -> RewardResult | None:
        """The result where no worker is needed to find it, else None."""
        if answer is None:
            return _result(item, None, False, "unparsable")
        if item.finish_reason == "length" and self.config.require_stop:
            return _result(item, answer, False, "ok")
        correct = same_answer(gold, answer)
        return None if correct is None else _result(item, answer, correct, "ok")

    async def _grade_there(self, item: RewardItem, gold: str, answer: str) -> RewardResult:
        verdict = await self._pool.grade(gold, answer)
        if verdict in ("timeout", "died"):
            return RewardResult(
                reward=None, extracted_answer=answer, ground_truth=item.ground_truth, correct=False, status=verdict
            )
        return _result(item, answer, verdict == "right", "ok")

    def _check_size(self, count: int) -> None:
        limit = self.config.max_batch_items
        if count > limit:
            raise TooLarge(
                f"a batch has at most {limit} items",
                field="items",
                value=count,
                remedy="send smaller batches, or raise reward.max_batch_items",
            )

    def _check_room(self, count: int) -> None:
        waiting, limit = self._pool.unfinished, _BATCHES_QUEUED * self.config.max_batch_items
        if count and waiting + count > limit:
            raise NotReady(
                f"{waiting} answers wait for a grader already",
                field="items",
                value=count,
                remedy="try again later, or raise reward.workers",
                code="overloaded",
            )

    def _on_restart(self) -> None:
        self._restarted += 1
        self._restarts.inc()


def _result(item: RewardItem, answer: str | None, correct: bool, status: RewardStatus) -> RewardResult:
    return RewardResult(
        reward=1.0 if correct else 0.0,
        extracted_answer=answer,
        ground_truth=item.ground_truth,
        correct=correct,
        status=status,
    )
