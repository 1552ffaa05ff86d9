"""`common/models/memory.py` against the memory that torch really holds and keeps, on a CPU."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.models.memory import ModelShape, trainer_memory
from common.settings.config import Config, load
from learning.ranks import Ranks
from tests.support.batches.groups import VOCABULARY, make_group, off_policy_groups, whole
from tests.support.processes.ranks import run_ranks
from tests.support.workers.policy_memory import held
from trainer.policy.policy import Policy


def shape_of(config: Config) -> ModelShape:
    return ModelShape.of(json.loads((Path(config.model.name) / "config.json").read_text()))


def test_one_process_holds_what_is_estimated(config: Config) -> None:
    policy = Policy(config, Ranks())
    policy.update(whole(off_policy_groups(), config))
    estimate = trainer_memory(shape_of(config), config, 1, width=4)
    assert held(policy) == {
        name: getattr(estimate, name) for name in ("weights", "gradients", "optimizer")
    }


@pytest.mark.integration
def test_two_sharded_processes_together_hold_what_is_estimated(
    config: Config, tmp_path: Path
) -> None:
    run_ranks(2, "policy_memory", str(tmp_path), config.model.name)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    estimate = trainer_memory(
        shape_of(config), load(["--model.name", config.model.name], {}), 2, width=4
    )
    for name in ("weights", "gradients", "optimizer"):
        assert sum(each[name] for each in found) == 2 * getattr(estimate, name)
        assert [each[name] for each in found] == pytest.approx(
            [getattr(estimate, name)] * 2, rel=0.02
        )


def test_autograd_keeps_about_what_is_estimated(config: Config) -> None:
    """For the backward pass, without activation checkpointing."""
    rng = np.random.default_rng(0)
    groups = [make_group(rng, [1.0, 0.0], position=i) for i in range(4)]
    for group in groups:
        for completion in group.completions:
            completion.token_ids = rng.integers(3, VOCABULARY, 100).astype(np.int32)
            completion.logprobs = np.full(100, -5.7, np.float32)
    policy = Policy(config, Ranks())
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # keeps addresses from being reused

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.update(whole(groups, config))
    tokens = sum(
        len(group.prompt_token_ids) + sum(len(c.token_ids) - 1 for c in group.completions)
        for group in groups
    )
    config.trainer.micro_batch_tokens = tokens
    shape = shape_of(config)
    estimate = trainer_memory(shape, config, 1, width=4).activations
    # Those of the completion tokens, which a small model keeps.
    probabilities = 4 * shape.vocabulary * 4 * 2 * 100
    assert 0.75 < (sum(kept.values()) - probabilities) / estimate < 1.1
