"""Scores answers with the functions named by the configuration or the caller, independent of
HTTP.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import chain
from typing import Self, get_args

from common import Json
from common.errors import InvalidInput, ServiceLost
from common.process.metrics import Metrics
from common.settings.sections import RewardSection
from common.wire.schemas import (
    BatchRewardResult,
    GroundTruthProblem,
    GroundTruthProblems,
    RewardItem,
    RewardResult,
    RewardStatus,
)
from services.reward.answers.extract import gold_answer
from services.reward.answers.golds import EATEN_BACKSLASH, repaired
from services.reward.configured import configured_hosts
from services.reward.functions.base import RewardFunction, Score
from services.reward.functions.composite import check_names, combine
from services.reward.hosts import QUEUE_LIMIT, Host, ProcessHost, ThreadHost

_DIFFERS = "it does not match itself"
_SELF_REASONS = {"unparsable": "it cannot be read", "unevaluated": "it is not worked out"}


class RewardService:
    """Scores items with the reward functions of their tasks. An async context manager: it owns the
    worker processes.

    Args:
        config: the functions of each task, and their settings.
        metrics: Prometheus metrics; a new set when None.
        functions: the caller's own objects, which score every item in threads of this process
            instead of the functions named by `config`.

    Raises:
        ConfigError: a function does not exist or cannot work here.
    """

    def __init__(
        self,
        config: RewardSection,
        metrics: Metrics | None = None,
        functions: Sequence[RewardFunction] | None = None,
    ) -> None:
        self.config = config
        metrics = metrics or Metrics("reward-server")
        self._graded = metrics.counter(
            "reward_answers_total", "Answers that were graded, by status", ["status"]
        )
        self._seconds = metrics.histogram(
            "reward_batch_duration_seconds", "Duration of one batch, from request to verdicts"
        )
        self._restarts = metrics.counter(
            "reward_worker_restarts_total", "Grader processes that were replaced"
        )
        metrics.gauge(
            "reward_unfinished_answers", "Answers that wait or are scored now"
        ).set_function(self._unfinished)
        metrics.gauge(
            "reward_unfinished_answers_limit", "Answers that may wait for one function"
        ).set(QUEUE_LIMIT)
        self._counts: Counter[RewardStatus] = Counter()
        self._hosts: list[Host]
        self._tasks: dict[str, list[Host]] = {}
        # The weight of each host, by its name.
        self._weights: dict[str, float] = {}
        if functions is None:
            self._hosts = configured_hosts(config, self._restarts.inc)
            for entry, host in zip(config.functions, self._hosts, strict=True):
                self._weights[host.name] = entry.weight
                for task in entry.tasks:
                    self._tasks.setdefault(task, []).append(host)
        else:
            self._hosts = [
                ThreadHost(function, config.function_timeout_s, calls=config.workers)
                for function in functions
            ]
            # They score the items of all tasks.
            self._weights = config.weights
            self._tasks[""] = self._hosts
        check_names([host.name for host in self._hosts])
        # Several functions may share one.
        self._pools = {host.pool for host in self._hosts if isinstance(host, ProcessHost)}
        self._exits = AsyncExitStack()

    def _unfinished(self) -> int:
        return sum(host.unfinished for host in self._hosts)

    async def __aenter__(self) -> Self:
        for pool in self._pools:
            await self._exits.enter_async_context(pool)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._exits.aclose()

    def not_ready(self) -> str | ServiceLost | None:
        """Returns why answers cannot be scored now, or None; ServiceLost when the workers cannot be
        started.
        """
        return next((pool.problem for pool in self._pools if pool.problem), None)

    async def ready(self) -> None:
        """Waits until every worker has started. `score` may be called earlier; it waits for the
        workers it needs.
        """
        for pool in self._pools:
            await pool.ready()

    def stats(self) -> Json:
        """Returns the answers scored so far by status, the functions, and the state of the
        workers.
        """
        return {
            "graded": {status: self._counts[status] for status in get_args(RewardStatus)},
            "functions": [host.name for host in self._hosts],
            "gives_verdicts": self.gives_verdicts,
            "workers": self.config.workers,
            "unfinished": self._unfinished(),
        }

    @property
    def gives_verdicts(self) -> bool:
        """Whether the functions of every task say which answers are right."""
        return all(any(host.gives_verdicts for host in hosts) for hosts in self._tasks.values())

    def check(self, item: RewardItem, where: str = "") -> None:
        """Raises InvalidInput for an item that cannot be scored, naming the field under the prefix
        `where`.
        """
        for host in self._hosts_of(item, where):
            host.check(item, where)

    async def check_ground_truths(self, items: Sequence[RewardItem]) -> GroundTruthProblems:
        """Finds the items that no response could solve, or only one that repeats the ground truth;
        of the others, counts the ground truths that were repaired.

        A function that verifies final answers grades every ground truth against itself; others
        only check the columns that they need.
        """
        reasons: dict[int, str] = {}
        verified: dict[Host, list[int]] = {}
        for i, item in enumerate(items):
            try:
                self.check(item)
            except InvalidInput as error:
                reasons[i] = f"{error.field}: {error.message}"
                continue
            for host in self._hosts_of(item, ""):
                if host.verifies_answers:
                    verified.setdefault(host, []).append(i)

        for host, indices in verified.items():
            answered: list[RewardItem] = []
            for i in indices:
                # Its braces keep a response from being the same text as the ground truth, which is
                # right without being read.
                stated = rf"\boxed{{{{{gold_answer(items[i].ground_truth)}}}}}"
                answered.append(items[i].model_copy(update={"response": stated}))
            for i, score in zip(indices, await host.score(answered), strict=True):
                reason = _why_unreadable(items[i].ground_truth) or score.reason
                if reason or not score.correct:
                    reasons[i] = reason or _SELF_REASONS.get(score.status, _DIFFERS)
        checked = set(chain.from_iterable(verified.values()))
        golds = [items[i].ground_truth for i in checked.difference(reasons)]
        return GroundTruthProblems(
            problems=[GroundTruthProblem(index=i, reason=reasons[i]) for i in sorted(reasons)],
            repaired=sum(repaired(gold) != gold.strip() for gold in golds),
        )

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Returns the results of a batch, in order. Cancelling the call frees the workers.

        Raises:
            InvalidInput: an item cannot be scored.
            Overloaded: too many answers wait already.
        """
        started = time.perf_counter()
        wanted: dict[Host, list[int]] = {}  # the indices of the items that each host scores
        for i, item in enumerate(items):
            where = f"items[{i}]."
            for host in self._hosts_of(item, where):
                host.check(item, where)
                wanted.setdefault(host, []).append(i)

        found = await asyncio.gather(
            *(host.score([items[i] for i in indices]) for host, indices in wanted.items())
        )
        parts: list[dict[str, Score]] = [{} for _ in items]
        for (host, indices), scores in zip(wanted.items(), found, strict=True):
            for i, score in zip(indices, scores, strict=True):
                parts[i][host.name] = score

        results = list(map(self._result, items, parts))
        for result in results:
            self._counts[result.status] += 1
            self._graded.labels(result.status).inc()
        self._seconds.observe(time.perf_counter() - started)
        return results

    async def score_batch(self, items: Sequence[RewardItem]) -> BatchRewardResult:
        """Returns the results of `score`, with the means over the items that have a reward (0.0
        when none has).
        """
        results = await self.score(items)
        rewards = [result.reward for result in results if result.reward is not None]
        graded = max(1, len(rewards))
        return BatchRewardResult(
            rewards=results,
            mean_reward=sum(rewards) / graded,
            accuracy=sum(result.correct for result in results) / graded,
        )

    def _hosts_of(self, item: RewardItem, where: str) -> list[Host]:
        """Returns the hosts of the functions of an item's task."""
        task = item.task or ""
        if list(self._tasks) == [""]:
            task = ""  # no function is for some tasks only
        if task not in self._tasks:
            named = [name for name in self._tasks if name]
            raise InvalidInput(
                "there are no reward functions for this task",
                field=f"{where}task",
                value=task,
                remedy=f"use one of {', '.join(named)}, "
                "or add it to the `tasks` of a function in reward.functions",
            )
        return self._tasks[task]

    def _result(self, item: RewardItem, parts: dict[str, Score]) -> RewardResult:
        whole = combine(parts, self._weights)
        reward = whole.value
        correct = whole.correct
        is_truncated = item.finish_reason == "length" and self.config.require_stop
        if is_truncated and reward is not None:
            reward = 0.0
            correct = False

        return RewardResult(
            reward=reward,
            extracted_answer=whole.answer,
            ground_truth=item.ground_truth,
            correct=bool(correct) and reward is not None,
            status=whole.status,
            components=whole.components,
            verified=correct is not None,
            reason=whole.reason,
        )


def _why_unreadable(ground_truth: str) -> str:
    """Returns why no other text than a ground truth itself could match it; "" if others could."""
    gold = gold_answer(ground_truth) or ""
    if gold.count("{") != gold.count("}"):
        return "its braces are not balanced"
    if EATEN_BACKSLASH.search(ground_truth):
        return "a backslash and a letter of it became a control character"
    return ""
