"""Ranks that own the experts of every layer together make the update of one rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.settings.config import load
from learning.ranks import Ranks
from tests.support.groups import VOCABULARY
from tests.support.sharding import run_cases
from tests.support.tiny_models import write
from tests.support.workers.sharded_policies import learned
from trainer.policy.policy import Policy

_NEAR = 1e-6
_SETTINGS = {
    "trainer.warmup_steps": "0",
    "trainer.micro_batch_size": "3",
    "algorithm.kl_coef": "0.1",
}


def words(model: Path, settings: dict[str, Any]) -> list[str]:
    every = _SETTINGS | {"model.name": str(model)} | settings
    return [word for name, value in every.items() for word in (f"--{name}", str(value))]


def check_cases(
    count: int, model: Path, directory: Path, cases: dict[str, dict[str, Any]], **common: Any
) -> None:
    """Compares losses and gradient norms of two updates on `count` ranks with those of one."""
    policy = Policy(load(words(model, common), {}), Ranks())
    expected = torch.tensor(learned(policy, 2))
    run_cases(
        count,
        directory,
        {
            name: {"settings": words(model, common | settings), "updates": 2}
            for name, settings in cases.items()
        },
    )
    for name in cases:
        found = torch.tensor(json.loads((directory / f"{name}.json").read_text()))
        print(name, ((found - expected).abs() / expected.abs()).max())
        torch.testing.assert_close(found, expected, atol=_NEAR, rtol=5 * _NEAR, msg=name)


@pytest.mark.integration
def test_two_ranks(tmp_path: Path) -> None:
    model = write("Qwen3-MoE", tmp_path / "model", vocab_size=VOCABULARY, num_experts=4)
    check_cases(2, model, tmp_path, {"two": {"trainer.expert_parallel_size": 2}})
