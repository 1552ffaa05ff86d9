"""Runs cases of `tests.support.workers.sharded_policies` and compares them with one process."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common.settings.config import from_mapping
from common.settings.sections import ParallelSection
from learning.ranks import Ranks
from tests.support.batches.groups import save
from tests.support.processes.ranks import run_ranks
from tests.support.workers.sharded_policies import learned
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference

_NEAR = 3e-5
"""A hundredth of a weight's change in three updates: AdamW divides a gradient near 0 by its own
rounded size."""
SETTINGS = {
    "optimizer.learning_rate": "1e-3",
    "optimizer.warmup_steps": "0",
    "optimizer.weight_decay": "0.1",
    "optimizer.max_grad_norm": "0.5",
    "trainer.micro_batch_size": "2",
    "algorithm.kl_coef": "0.1",
    "algorithm.reference_refresh": "2",
}


def arguments(policy_dir: Path, **more: Any) -> list[str]:
    settings = SETTINGS | {"model.name": str(policy_dir)}
    for name, value in more.items():
        section = "parallel" if name in ParallelSection.model_fields else "trainer"
        settings[f"{section}.{name}"] = str(value)
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def run_cases(count: int, directory: Path, cases: dict[str, dict[str, Any]]) -> None:
    run_ranks(count, "sharded_policies", str(directory), json.dumps(cases))


class One:
    """The results of three updates in one process, and the checkpoint after the second."""

    def __init__(self, policy_dir: Path, directory: Path) -> None:
        config = from_mapping({**SETTINGS, "model.name": str(policy_dir)})
        policy = Policy(config, Ranks())
        reference = Reference(policy)
        self.metrics = learned(policy, 2, reference)
        save(policy, directory / "one" / "checkpoints", reference=reference)
        self.metrics += learned(policy, 1, reference)
        self.weights = {name: tensor.clone() for name, tensor in policy.weights()}

    def check(self, directory: Path, name: str, ranks: int) -> None:
        found = json.loads((directory / f"{name}.json").read_text())
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(self.metrics[-len(found) :]), atol=1e-5, rtol=1e-5
        )
        for rank in range(ranks):
            weights = load_file(directory / f"{name}-{rank}.safetensors")
            assert weights.keys() == self.weights.keys()
            for key, expected in self.weights.items():
                torch.testing.assert_close(
                    weights[key], expected, atol=_NEAR, rtol=0, msg=f"{name} {rank} {key}"
                )
