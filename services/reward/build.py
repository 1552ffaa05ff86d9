"""Builds the hosts of the reward functions that the configuration names."""

import json
import subprocess
from collections.abc import Callable
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
from services.reward.pool import WorkerPool, WorkerSpec
from services.reward.sandbox.cases import parse_cases

_CHECK_S = 300.0
_CONCURRENT_CALLS = 64  # threads that wait for slots of the sandbox, or for an endpoint
_MODEL_START_S = 1800.0  # a large model is downloaded first
_MODEL_CALL_S = 120.0
_CALLS = "services.reward.calls"


def build_hosts(config: RewardSection, on_restart: Callable[[], None]) -> tuple[dict[str, Host], list[WorkerPool]]:
    """Builds a host for every function that any task uses.

    Args:
        config: names the functions.
        on_restart: called whenever a worker was replaced.

    Returns:
        The hosts by the function's name in the configuration, and the pools they share, which the caller enters and exits.

    Raises:
        ConfigError: a function does not exist or cannot work here.
    """
    hosts: dict[str, Host] = {}
    pools: list[WorkerPool] = []
    plain: dict[str, dict[str, Any]] = {}
    for name in config.function_names():
        if name == "math":
            grader = MathGrader(config, on_restart)
            pools.append(grader.pool)
            hosts[name] = grader
        elif name == "code":
            hosts[name] = _code(config)
        elif name == "judge":
            hosts[name] = _judge(config)
        elif name == "reward_model":
            pools.append(_model_pool(config, on_restart))
            hosts[name] = ProcessHost(name, pools[-1], 0)
        else:
            plain[name] = _plain(name, config) or _custom(name)
    if plain:
        spec = WorkerSpec(_CALLS, {"functions": list(plain.values())})
        pools.append(WorkerPool(spec, config.workers, config.function_timeout_s, on_restart))
        for index, (name, function) in enumerate(plain.items()):
            hosts[name] = ProcessHost(function["name"], pools[-1], index)
    check_names([host.name for host in hosts.values()])
    return hosts, pools


def _plain(name: str, config: RewardSection) -> dict[str, Any] | None:
    """Returns the specification of a built-in function over the text; None for another name."""
    known: dict[str, tuple[Callable[..., RewardFunction], dict[str, Any]]] = {
        "format": (
            FormatRewardFunction,
            {"required_patterns": config.format_required, "forbidden_patterns": config.format_forbidden},
        ),
        "length": (LengthPenaltyFunction, {"soft_chars": config.length_soft_chars, "hard_chars": config.length_hard_chars}),
        "repetition": (RepetitionPenaltyFunction, {}),
    }
    if name not in known:
        return None
    function, arguments = known[name]
    function(**arguments)  # refuses wrong arguments here, before a worker does
    return {"name": name, "target": f"services.reward.functions:{function.__name__}", "arguments": arguments}


def _code(config: RewardSection) -> Host:
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

    return ThreadHost(function, None, _CONCURRENT_CALLS, check)


def _judge(config: RewardSection) -> Host:
    function = JudgeRewardFunction(
        config.judge_url,
        config.judge_model,
        config.judge_rubric or DEFAULT_RUBRIC,
        timeout_s=config.judge_timeout_s,
        concurrency=config.judge_concurrency,
        max_tokens=config.judge_max_tokens,
    )
    return ThreadHost(function, None, _CONCURRENT_CALLS)


def _model_pool(config: RewardSection, on_restart: Callable[[], None]) -> WorkerPool:
    """Returns a pool of one process that holds the reward model: the server itself never loads torch."""
    arguments = {"model": config.reward_model_name, "max_tokens": config.reward_model_max_tokens}
    function = {"target": "services.reward.neural:RewardModelFunction", "arguments": arguments}
    spec = WorkerSpec(_CALLS, {"functions": [function]}, answers=None)
    return WorkerPool(spec, 1, _MODEL_CALL_S, on_restart, _MODEL_START_S)


def _custom(path: str) -> dict[str, Any]:
    """Returns the specification of a user's function, which a separate process has made once to check it and get its name."""
    spec: dict[str, Any] = {"target": path, "arguments": {}}
    command = WorkerSpec(_CALLS, {"functions": [spec]}).command(check=True)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=_CHECK_S)
        output = done.stdout.strip().rpartition("\n")[2]  # the function may have printed something before
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the reward function was not made within {_CHECK_S:.0f} s", field="reward.functions", value=path
        ) from None
    if done.returncode != 0:
        raise ConfigError(
            output or "the process that tried the reward function died",
            field="reward.functions",
            value=path,
            remedy="package.module:Class of a RewardFunction that needs no arguments",
        )
    return spec | {"name": json.loads(output)[0]}
