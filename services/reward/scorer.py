"""Scores answers with the functions named by the configuration or the caller, independent of
HTTP.
"""

import asyncio
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self, get_args

from common.errors import ConfigError, InvalidInput, ServiceLost, TooLarge
from common.models.hub import check_model
from common.process.metrics import Metrics
from common.process.topology import assigned_gpus
from common.settings.rewards import (
    CodeReward,
    FormatReward,
    JudgeReward,
    LengthReward,
    MathReward,
    ModelReward,
    RepetitionReward,
    Reward,
)
from common.settings.sections import RewardSection
from common.wire.schemas import (
    MAX_BATCH_ITEMS,
    BatchRewardResult,
    GroundTruthProblem,
    GroundTruthProblems,
    RewardItem,
    RewardResult,
    RewardStatus,
)
from services.reward.answers.extract import gold_answer
from services.reward.answers.golds import has_eaten_backslash, repaired
from services.reward.functions.answers import MathHost
from services.reward.functions.base import RewardFunction, Score
from services.reward.functions.composite import check_names, combine
from services.reward.functions.judge import DEFAULT_RUBRIC, JudgeRewardFunction
from services.reward.functions.programs import CodeRewardFunction
from services.reward.functions.text import (
    FormatRewardFunction,
    LengthPenaltyFunction,
    RepetitionPenaltyFunction,
)
from services.reward.hosts import QUEUE_LIMIT, Host, ProcessHost, ThreadHost
from services.reward.pool import WorkerPool, WorkerSpec

_CHECK_S = 300.0
_MODEL_START_S = 600.0  # without progress: a large model is downloaded first
_MODEL_CALL_S = 120.0
_HANDLER = "services.reward.functions.handler"
_DIFFERS = "it does not match itself"
_SELF_REASONS = {"unparsable": "it cannot be read", "unevaluated": "it is not worked out"}


class RewardScorer:
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
        self._restarted = 0
        self._hosts: dict[str, Host] = {}
        self._pools: list[WorkerPool] = []
        self._tasks: dict[str, list[Host]] = {}
        if functions is None:
            self._host_configured()
            for entry in config.functions:
                for task in entry.tasks:
                    self._tasks.setdefault(task, []).append(self._hosts[entry.name])
        else:
            self._host_own(functions)
            self._tasks[""] = list(self._hosts.values())

        self._weights: dict[str, float] = {}
        for key, host in self._hosts.items():
            self._weights[host.name] = config.weights.get(key, 1.0)
        self._exits = AsyncExitStack()

    def _host_own(self, functions: Sequence[RewardFunction]) -> None:
        """Creates a host for each of the caller's functions, by its name."""
        check_names([function.name for function in functions])
        for function in functions:
            self._hosts[function.name] = ThreadHost(
                function, self.config.function_timeout_s, calls=self.config.workers
            )

    def _host_configured(self) -> None:
        """Creates a host for every function, by its configured name, and the pools of their
        workers.
        """
        shared: dict[str, dict[str, Any]] = {}  # functions that share a pool, by configured name
        for entry in self.config.functions:
            if isinstance(entry, MathReward):
                host = MathHost(self.config, self._on_restart)
                self._pools.append(host.pool)
                self._hosts[entry.name] = host
            elif isinstance(entry, CodeReward):
                self._hosts[entry.name] = _code_host(entry)
            elif isinstance(entry, JudgeReward):
                self._hosts[entry.name] = _judge_host(entry)
            elif isinstance(entry, ModelReward):
                self._hosts[entry.name] = self._model_host(entry)
            else:
                shared[entry.name] = _shared(entry)

        if shared:
            pool = WorkerPool(
                WorkerSpec(_HANDLER, {"functions": list(shared.values())}),
                self.config.workers,
                timeout_s=self.config.function_timeout_s,
                on_restart=self._on_restart,
            )
            self._pools.append(pool)
            for index, (name, function) in enumerate(shared.items()):
                shared_host = ProcessHost(function["name"], pool, index)
                shared_host.gives_verdicts = function.get("gives_verdicts", False)
                self._hosts[name] = shared_host
        check_names([host.name for host in self._hosts.values()])

    def _model_host(self, entry: ModelReward) -> Host:
        """Returns the host of the reward model, which has a process of its own, because the server
        never imports torch.
        """
        check_model(entry.model, "reward.functions.reward_model.model")
        _check_gpu()
        function = {
            "target": "services.reward.neural:RewardModelFunction",
            "arguments": {"model": entry.model, "max_tokens": entry.max_tokens},
        }
        pool = WorkerPool(
            WorkerSpec(_HANDLER, {"functions": [function]}, answers=None),
            workers=1,
            timeout_s=_MODEL_CALL_S,
            on_restart=self._on_restart,
            start_s=_MODEL_START_S,
        )
        self._pools.append(pool)
        return ProcessHost(entry.name, pool)

    def _unfinished(self) -> int:
        return sum(host.unfinished for host in self._hosts.values())

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

    def stats(self) -> dict[str, Any]:
        """Returns the answers scored so far by status, the functions, and the state of the
        workers.
        """
        return {
            "graded": {status: self._counts[status] for status in get_args(RewardStatus)},
            "functions": [host.name for host in self._hosts.values()],
            "gives_verdicts": self.gives_verdicts,
            "workers": self.config.workers,
            "worker_restarts": self._restarted,
            "unfinished": self._unfinished(),
            "unfinished_limit": QUEUE_LIMIT * len(self._hosts),
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
        """Returns the items that no response could solve, or only the same text, and how many
        ground truths of the others were repaired.

        A function that verifies final answers grades every ground truth against itself; others
        only check the columns that they need.
        """
        reasons: dict[int, str] = {}
        verified: dict[Host, list[int]] = {}
        for i, item in enumerate(items):
            try:
                for host in self._hosts_of(item, ""):
                    host.check(item, "")
                    if not host.verifies_answers:
                        continue
                    verified.setdefault(host, []).append(i)
                    problem = _readable_by_nobody(item.ground_truth)
                    if problem:
                        reasons[i] = problem
            except InvalidInput as error:
                reasons[i] = f"{error.field}: {error.message}"

        for host, indices in verified.items():
            gradable = [i for i in indices if i not in reasons]
            answered = [
                items[i].model_copy(update={"response": _boxed(items[i].ground_truth)})
                for i in gradable
            ]
            scores = await host.score(answered)
            for i, score in zip(gradable, scores, strict=True):
                if not score.correct or score.reason:
                    reasons[i] = score.reason or _SELF_REASONS.get(score.status, _DIFFERS)
        checked = {i for indices in verified.values() for i in indices}
        golds = [items[i].ground_truth for i in checked.difference(reasons)]
        return GroundTruthProblems(
            problems=[GroundTruthProblem(index=i, reason=reasons[i]) for i in sorted(reasons)],
            repaired=sum(repaired(gold) != gold.strip() for gold in golds),
        )

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
        wanted: dict[Host, list[int]] = {}  # the indices of the items that each host scores
        for i, item in enumerate(items):
            where = f"items[{i}]."
            for host in self._hosts_of(item, where):
                host.check(item, where)
                wanted.setdefault(host, []).append(i)

        calls = [host.score([items[i] for i in indices]) for host, indices in wanted.items()]
        found = await asyncio.gather(*calls)
        parts: list[dict[str, Score]] = [{} for _ in items]
        for (host, indices), scores in zip(wanted.items(), found, strict=True):
            for i, score in zip(indices, scores, strict=True):
                parts[i][host.name] = score

        results: list[RewardResult] = []
        for item, part in zip(items, parts, strict=True):
            result = self._result(item, part)
            results.append(result)
            self._counts[result.status] += 1
            self._graded.labels(result.status).inc()
        self._seconds.observe(time.perf_counter() - started)
        return results

    async def score_batch(self, items: Sequence[RewardItem]) -> BatchRewardResult:
        """Returns the results of `score`, with the means over the items that have a reward (0.0
        when none has).
        """
        results = await self.score(items)
        rewards: list[float] = []
        correct = 0
        for result in results:
            if result.reward is not None:
                rewards.append(result.reward)
                correct += result.correct
        graded = max(1, len(rewards))
        return BatchRewardResult(
            rewards=results, mean_reward=sum(rewards) / graded, accuracy=correct / graded
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
        truncated = item.finish_reason == "length" and self.config.require_stop
        if truncated and reward is not None:
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

    def _on_restart(self) -> None:
        self._restarted += 1
        self._restarts.inc()


def _code_host(entry: CodeReward) -> Host:
    function = CodeRewardFunction(
        entry.timeout_s,
        entry.partial_credit,
        slots=entry.slots,
        memory_mb=entry.memory_mb,
        output_kb=entry.output_kb,
        python=entry.python,
        sandbox=entry.sandbox,
    )

    def check(item: RewardItem, where: str) -> None:
        function.cases(item.columns.get("test_cases"), f"{where}columns.test_cases")

    return ThreadHost(function, timeout_s=None, calls=function.slots, check=check, call_items=1)


def _judge_host(entry: JudgeReward) -> Host:
    function = JudgeRewardFunction(
        entry.url,
        entry.model,
        entry.rubric or DEFAULT_RUBRIC,
        timeout_s=entry.timeout_s,
        concurrency=entry.concurrency,
        max_tokens=entry.max_tokens,
    )
    return ThreadHost(function, timeout_s=None, calls=entry.concurrency, call_items=1)


def _shared(entry: Reward) -> dict[str, Any]:
    """Returns the specification of a function that runs in the shared workers."""
    function: Callable[..., RewardFunction]
    arguments: dict[str, Any] = {}
    if isinstance(entry, FormatReward):
        function = FormatRewardFunction
        arguments["required_patterns"] = entry.required
        arguments["forbidden_patterns"] = entry.forbidden
    elif isinstance(entry, LengthReward):
        function = LengthPenaltyFunction
        arguments["soft_chars"] = entry.soft_chars
        arguments["hard_chars"] = entry.hard_chars
    elif isinstance(entry, RepetitionReward):
        function = RepetitionPenaltyFunction
    else:
        return _custom(entry.name)

    try:
        function(**arguments)  # refuses wrong arguments here instead of in a worker
    except ConfigError as error:
        argument = str(error.field).removesuffix("_patterns")
        raise ConfigError(
            error.message,
            field=f"reward.functions.{entry.name}.{argument}",
            value=error.value,
            remedy=error.remedy,
        ) from None
    return {
        "name": entry.name,
        "target": f"services.reward.functions:{function.__name__}",
        "arguments": arguments,
    }


def _readable_by_nobody(ground_truth: str) -> str:
    """Returns why only an identical text would match a ground truth; empty when others may."""
    gold = gold_answer(ground_truth) or ""
    if gold.count("{") != gold.count("}"):
        return "its braces are not balanced"
    if has_eaten_backslash(ground_truth):
        return "a backslash and a letter of it became a control character"
    return ""


def _boxed(ground_truth: str) -> str:
    """Returns the response that states a ground truth and nothing else. Its braces keep it from
    being the same text, which is right without being read.
    """
    return rf"\boxed{{{{{gold_answer(ground_truth)}}}}}"


def _custom(path: str) -> dict[str, Any]:
    """Returns the specification of a user's function, after a separate process created it once to
    check it.
    """
    spec: dict[str, Any] = {"target": path, "arguments": {}}
    remedy = "name package.module:Class, a RewardFunction that needs no arguments"
    made = json.loads(_tried(WorkerSpec(_HANDLER, {"functions": [spec]}), path, remedy))
    name, gives_verdicts = made[0]
    return spec | {"name": name, "gives_verdicts": gives_verdicts}


def _check_gpu() -> None:
    """Raises ConfigError when this node has GPUs that torch, which this process never imports,
    cannot use.
    """
    if assigned_gpus() is not None:
        _tried(
            WorkerSpec("services.reward.device", {}),
            "reward_model",
            "on a node without GPUs it scores on the CPU",
        )


def _tried(spec: WorkerSpec, function: str, remedy: str) -> str:
    """Returns the last line printed by a process that creates the handler of `spec` once.

    Raises ConfigError if it fails.
    """
    try:
        done = subprocess.run(
            spec.command(check=True),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_CHECK_S,
        )
        # The function may have printed something before.
        output = done.stdout.strip().rpartition("\n")[2]
        if done.returncode == 0:
            return output
        problem = output or "the process that tried the reward function died"
    except subprocess.TimeoutExpired:
        problem = f"the reward function could not be created within {_CHECK_S:.0f} s"
    raise ConfigError(problem, field="reward.functions", value=function, remedy=remedy)
