"""Scores answers with the functions that the configuration or the caller names. Knows nothing of HTTP."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Self, get_args

from common.errors import InvalidInput, TooLarge
from common.observe import Metrics
from common.schemas import MAX_BATCH_ITEMS, BatchRewardResult, RewardItem, RewardResult, RewardStatus
from common.sections import RewardSection
from services.reward.build import build_hosts
from services.reward.functions.base import RewardFunction, Score
from services.reward.functions.composite import check_names, combine
from services.reward.hosts import QUEUE_LIMIT, Host, ThreadHost
from services.reward.pool import WorkerPool


class Scorer:
    """Scores items with the reward functions of their tasks.

    An async context manager: it owns the worker processes.

    Args:
        config: names the functions of each task, and has their settings.
        metrics: Prometheus metrics; a new set when None.
        functions: the caller's own objects, which score every item in threads of this process instead of the functions that
            `config` names.

    Raises:
        ConfigError: a function does not exist or cannot work here.
    """

    def __init__(
        self, config: RewardSection, metrics: Metrics | None = None, functions: Sequence[RewardFunction] | None = None
    ) -> None:
        self.config = config
        metrics = metrics or Metrics("reward-server")
        self._graded = metrics.counter("reward_answers_total", "Answers that were graded, by status", ["status"])
        self._seconds = metrics.histogram("reward_batch_duration_seconds", "From request to verdicts, of one batch")
        self._restarts = metrics.counter("reward_worker_restarts_total", "Grader processes that were replaced")
        metrics.gauge("reward_unfinished_answers", "Answers that wait or are scored now").set_function(self._unfinished)
        metrics.gauge("reward_unfinished_answers_limit", "Answers that may wait for one function").set(QUEUE_LIMIT)
        self._counts: Counter[RewardStatus] = Counter()
        self._restarted = 0
        self._hosts: dict[str, Host]
        self._pools: list[WorkerPool] = []
        if functions is None:
            self._hosts, self._pools = build_hosts(config, self._on_restart)
        else:
            check_names([function.name for function in functions])
            timeout_s, calls = config.function_timeout_s, config.workers
            self._hosts = {function.name: ThreadHost(function, timeout_s, calls) for function in functions}
        self._tasks = config.tasks if functions is None else {}
        self._default = list(self._hosts) if functions is not None else config.functions
        self._weights = {host.name: config.weights.get(key, 1.0) for key, host in self._hosts.items()}
        self._exits = AsyncExitStack()

    def _unfinished(self) -> int:
        return sum(host.unfinished for host in self._hosts.values())

    async def __aenter__(self) -> Self:
        for pool in self._pools:
            await self._exits.enter_async_context(pool)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._exits.aclose()

    def not_ready(self) -> str | None:
        """Why answers cannot be scored now, or None."""
        return next((host.problem for host in self._hosts.values() if host.problem), None)

    async def ready(self) -> None:
        """Returns when every worker has started. `score` may be called before: it waits for them where it needs them."""
        for pool in self._pools:
            await pool.ready()

    def stats(self) -> dict[str, Any]:
        """Returns the answers scored so far by status, the functions, and the state of the workers."""
        return {
            "graded": {status: self._counts[status] for status in get_args(RewardStatus)},
            "functions": [host.name for host in self._hosts.values()],
            "workers": self.config.workers,
            "worker_restarts": self._restarted,
            "unfinished": self._unfinished(),
            "unfinished_limit": QUEUE_LIMIT * len(self._hosts),
        }

    def check(self, item: RewardItem, where: str = "") -> None:
        """Raises InvalidInput for an item that cannot be scored, naming the field under the prefix `where`."""
        for host in self._of(item, where):
            host.check(item, where)

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Returns the results of a batch, in order. Cancelling the call frees the workers.

        Raises:
            TooLarge: there are more than `MAX_BATCH_ITEMS` items.
            InvalidInput: an item cannot be scored.
            Overloaded: too many answers wait already.
        """
        if len(items) > MAX_BATCH_ITEMS:
            message = f"a batch has at most {MAX_BATCH_ITEMS} items"
            raise TooLarge(message, field="items", value=len(items), remedy="send smaller batches")
        started = time.perf_counter()
        wanted: dict[str, list[int]] = {}
        for i, item in enumerate(items):
            where = f"items[{i}]."
            for host in self._of(item, where):
                host.check(item, where)
                wanted.setdefault(host.name, []).append(i)
        hosts = {host.name: host for host in self._hosts.values()}
        found = await asyncio.gather(*(hosts[name].score([items[i] for i in of]) for name, of in wanted.items()))
        parts: list[dict[str, Score]] = [{} for _ in items]
        for (name, of), scores in zip(wanted.items(), found, strict=True):
            for i, score in zip(of, scores, strict=True):
                parts[i][name] = score
        results = [self._result(item, part) for item, part in zip(items, parts, strict=True)]
        for result in results:
            self._counts[result.status] += 1
            self._graded.labels(result.status).inc()
        self._seconds.observe(time.perf_counter() - started)
        return results

    async def score_batch(self, items: Sequence[RewardItem]) -> BatchRewardResult:
        """Returns the results of `score`, with the means over the items that have a reward (0.0 when none has)."""
        results = await self.score(items)
        rewards = [result.reward for result in results]
        graded = [result for result in results if result.reward is not None]
        count = max(1, len(graded))
        return BatchRewardResult(
            rewards=rewards,
            mean_reward=sum(reward for reward in rewards if reward is not None) / count,
            accuracy=sum(result.correct for result in graded) / count,
            results=results,
        )

    def _of(self, item: RewardItem, where: str) -> list[Host]:
        """Returns the functions of an item's task."""
        if not item.task or not self._tasks:
            return [self._hosts[name] for name in self._default]
        if item.task not in self._tasks:
            raise InvalidInput(
                "there are no reward functions for this task",
                field=f"{where}task",
                value=item.task,
                remedy=f"one of {', '.join(self._tasks)}, or name its functions in reward.tasks",
            )
        return [self._hosts[name] for name in self._tasks[item.task]]

    def _result(self, item: RewardItem, parts: dict[str, Score]) -> RewardResult:
        whole = combine(parts, self._weights)
        reward, correct = whole.value, whole.correct
        if item.finish_reason == "length" and self.config.require_stop and reward is not None:
            reward, correct = 0.0, False
        if correct is None:
            correct = reward is not None and reward > 0.5
        return RewardResult(
            reward=reward,
            extracted_answer=whole.answer,
            ground_truth=item.ground_truth,
            correct=correct and reward is not None,
            status=whole.status,
            components=whole.components,
        )

    def _on_restart(self) -> None:
        self._restarted += 1
        self._restarts.inc()
