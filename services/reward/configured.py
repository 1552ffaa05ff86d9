"""Makes the hosts of the reward functions that a configuration names."""

import json
import subprocess
from collections.abc import Callable

from common import Json
from common.errors import ConfigError
from common.models.hub import check_model
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
from common.wire.schemas import RewardItem
from services.reward.functions.answers import MathHost
from services.reward.functions.judge import JudgeRewardFunction
from services.reward.functions.programs import CodeRewardFunction
from services.reward.functions.text import FormatRewardFunction
from services.reward.hosts import Host, ProcessHost, ThreadHost
from services.reward.pool import WorkerPool, WorkerSpec

_CHECK_S = 300.0
_MODEL_START_S = 600.0  # without progress: a large model is downloaded first
_MODEL_CALL_S = 120.0
_HANDLER = "services.reward.functions.handler"
# Entries whose functions do not run in the shared workers.
_ELSEWHERE = (MathReward, CodeReward, JudgeReward, ModelReward)
_TEXT_FUNCTIONS = {
    FormatReward: "FormatRewardFunction",
    LengthReward: "LengthPenaltyFunction",
    RepetitionReward: "RepetitionPenaltyFunction",
}


def configured_hosts(config: RewardSection, on_restart: Callable[[], None]) -> list[Host]:
    """Returns a host for every entry of `config.functions`, in their order.

    Raises ConfigError for a function that does not exist or cannot work here.
    """
    hosts: list[Host] = []
    made = [_in_worker(entry) for entry in config.functions if not isinstance(entry, _ELSEWHERE)]
    pool = WorkerPool(
        WorkerSpec(_HANDLER, {"functions": [function for _, _, function in made]}),
        config.workers,
        timeout_s=config.function_timeout_s,
        on_restart=on_restart,
    )
    in_workers = (
        ProcessHost(name, pool, index, gives_verdicts=gives_verdicts)
        for index, (name, gives_verdicts, _) in enumerate(made)
    )
    for entry in config.functions:
        match entry:
            case MathReward():
                hosts.append(MathHost(config, on_restart))
            case CodeReward():
                hosts.append(_CodeHost(CodeRewardFunction(**_arguments(entry))))
            case JudgeReward():
                judge = JudgeRewardFunction(**_arguments(entry))
                hosts.append(ThreadHost(judge, None, calls=entry.concurrency, call_items=1))
            case ModelReward():
                hosts.append(_model_host(entry, on_restart))
            case _:
                hosts.append(next(in_workers))
    return hosts


def _arguments(entry: Reward) -> Json:
    """Returns the arguments of an entry's function."""
    return {name: value for name, value in entry if name not in Reward.model_fields}


class _CodeHost(ThreadHost):
    """Runs programs. It refuses test cases that no program can pass."""

    def __init__(self, function: CodeRewardFunction) -> None:
        super().__init__(function, None, calls=function.slots, call_items=1)
        self._code = function

    def check(self, item: RewardItem, where: str) -> None:
        """Raises InvalidInput, also for test cases that decide nothing."""
        super().check(item, where)
        self._code.cases(item.columns.get("test_cases"), f"{where}columns.test_cases")


def _model_host(entry: ModelReward, on_restart: Callable[[], None]) -> Host:
    """Returns the host of the reward model, which has a process of its own, because the server
    never imports torch.
    """
    check_model(entry.model, "reward.functions.reward_model.model")
    if assigned_gpus() is not None:
        _tried(
            WorkerSpec("services.reward.device", {}),
            entry.name,
            "on a node without GPUs it scores on the CPU",
        )
    function = {
        "target": "services.reward.functions:RewardModelFunction",
        "arguments": _arguments(entry),
    }
    pool = WorkerPool(
        WorkerSpec(_HANDLER, {"functions": [function]}, answers=None),
        workers=1,
        timeout_s=_MODEL_CALL_S,
        on_restart=on_restart,
        start_s=_MODEL_START_S,
    )
    return ProcessHost(entry.name, pool)


def _in_worker(entry: Reward) -> tuple[str, bool, Json]:
    """Returns the name of a function that runs in the shared workers, whether it gives verdicts,
    and the specification from which a worker makes it. Before that, a separate process makes a
    user's function once, to check it.
    """
    name = _TEXT_FUNCTIONS.get(type(entry))
    if name is not None:
        arguments = _arguments(entry)
        if isinstance(entry, FormatReward):
            FormatRewardFunction(**arguments)  # refuses a bad pattern here, not in a worker
        return (
            entry.name,
            False,
            {"target": f"services.reward.functions:{name}", "arguments": arguments},
        )

    function = {"target": entry.name, "arguments": {}}
    made = _tried(
        WorkerSpec(_HANDLER, {"functions": [function]}),
        entry.name,
        "name package.module:Class, a RewardFunction that needs no arguments",
    )
    [[name, gives_verdicts]] = json.loads(made)
    return name, gives_verdicts, function


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
