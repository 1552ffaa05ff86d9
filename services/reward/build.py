"""From the names in the configuration to reward functions that run."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.errors import ConfigError
from common.schemas import RewardItem
from common.sections import RewardSection
from services.reward.functions.base import RewardFunction
from services.reward.functions.composite import check_names
from services.reward.functions.judge import DEFAULT_RUBRIC, JudgeRewardFunction
from services.reward.functions.programs import CodeRewardFunction
from services.reward.functions.text import FormatRewardFunction, LengthPenaltyFunction, RepetitionPenaltyFunction
from services.reward.grade import MathGrader
from services.reward.hosts import Host, ProcessHost, ThreadHost
from services.reward.limits import FUNCTION_BATCH
from services.reward.pool import Job, WorkerPool
from services.reward.sandbox.cases import parse_cases

_CHECK_S = 300.0
_CALLS_AT_ONCE = 64  # threads that wait for slots of the sandbox, or for an endpoint
_MODEL_START_S = 1800.0  # a large model is downloaded first
_MODEL_CALL_S = 120.0
_HOME = "services.reward.functions"
_CALLS = "services.reward.calls"


@dataclass
class Built:
    """What the server runs."""

    hosts: dict[str, Host] = field(default_factory=dict)
    """By the function's name in the configuration."""
    pools: list[WorkerPool] = field(default_factory=list)
    """Worker processes that hosts share; whoever built them enters and leaves them."""


def built(config: RewardSection, queue: int, on_restart: Callable[[], None]) -> Built:
    """A host for every function that any task uses.

    Args:
        config: names the functions.
        queue: items that may wait for one function.
        on_restart: called whenever a worker was replaced.

    Raises ConfigError for a function that does not exist or cannot work here.
    """
    result = Built()
    plain: dict[str, dict[str, Any]] = {}
    for name in config.function_names():
        if name == "math":
            grader = MathGrader(config, on_restart)
            result.pools.append(grader.pool)
            result.hosts[name] = grader
        elif name == "code":
            result.hosts[name] = _code(config, queue)
        elif name == "judge":
            result.hosts[name] = ThreadHost(_judge(config), None, FUNCTION_BATCH, queue, _CALLS_AT_ONCE)
        elif name == "reward_model":
            pool = _model_pool(config, on_restart)
            result.pools.append(pool)
            result.hosts[name] = ProcessHost(name, pool, 0, FUNCTION_BATCH, queue)
        elif name in _PLAIN:
            made, arguments = _PLAIN[name], _ARGUMENTS[name](config)
            made(**arguments)  # refuses wrong arguments here, before a worker does
            plain[name] = {"name": name, "target": f"{_HOME}:{made.__name__}", "arguments": arguments}
        else:
            plain[name] = _custom(name)
    if plain:
        job = Job(_CALLS, {"functions": list(plain.values())})
        pool = WorkerPool(job, config.workers, config.function_timeout_s, on_restart)
        result.pools.append(pool)
        for index, (name, spec) in enumerate(plain.items()):
            result.hosts[name] = ProcessHost(spec["name"], pool, index, FUNCTION_BATCH, queue)
    check_names([host.name for host in result.hosts.values()])
    return result


_PLAIN: dict[str, Callable[..., RewardFunction]] = {
    "format": FormatRewardFunction,
    "length": LengthPenaltyFunction,
    "repetition": RepetitionPenaltyFunction,
}
_ARGUMENTS: dict[str, Callable[[RewardSection], dict[str, Any]]] = {
    "format": lambda c: {"required_patterns": c.format_required, "forbidden_patterns": c.format_forbidden},
    "length": lambda c: {"soft_chars": c.length_soft_chars, "hard_chars": c.length_hard_chars},
    "repetition": lambda c: {},
}


def _code(config: RewardSection, queue: int) -> Host:
    function = CodeRewardFunction(
        config.code_timeout_s,
        config.code_partial_credit,
        slots=config.code_slots,
        memory_mb=config.code_memory_mb,
        python=config.code_python,
        sandbox=config.code_sandbox,
    )

    def check(item: RewardItem, where: str) -> None:
        parse_cases(item.columns.get("test_cases"), f"{where}columns.test_cases")

    return ThreadHost(function, None, FUNCTION_BATCH, queue, _CALLS_AT_ONCE, check)


def _judge(config: RewardSection) -> JudgeRewardFunction:
    return JudgeRewardFunction(
        config.judge_url,
        config.judge_model,
        config.judge_rubric or DEFAULT_RUBRIC,
        timeout_s=config.judge_timeout_s,
        concurrency=config.judge_concurrency,
        max_tokens=config.judge_max_tokens,
    )


def _model_pool(config: RewardSection, on_restart: Callable[[], None]) -> WorkerPool:
    """One process that holds the reward model: the server itself never loads torch."""
    arguments = {"model": config.reward_model_name, "max_tokens": config.reward_model_max_tokens}
    spec = {"target": "services.reward.neural:RewardModelFunction", "arguments": arguments}
    job = Job(_CALLS, {"functions": [spec]}, answers=None)
    return WorkerPool(job, 1, _MODEL_CALL_S, on_restart, _MODEL_START_S)


def _custom(path: str) -> dict[str, Any]:
    """The spec of somebody's function, made once in a process of its own to see that it works and what it is called."""
    spec: dict[str, Any] = {"target": path, "arguments": {}}
    command = Job(_CALLS, {"functions": [spec]}).command(check=True)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=_CHECK_S)
        said = done.stdout.strip().rpartition("\n")[2]  # the function may have printed something before
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the reward function was not made within {_CHECK_S:.0f} s", field="reward.functions", value=path
        ) from None
    if done.returncode != 0:
        raise ConfigError(
            said or "the process that tried the reward function died",
            field="reward.functions",
            value=path,
            remedy="package.module:Class of a RewardFunction that needs no arguments",
        )
    return spec | {"name": json.loads(said)[0]}
