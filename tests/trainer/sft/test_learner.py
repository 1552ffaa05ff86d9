"""An update on examples equals transformers' own loss with torch's AdamW, however the batch
is cut."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.settings.config import Config
from learning.ranks import Ranks
from tests.support.runs.sft import random_rows
from trainer.policy.policy import Policy
from trainer.sft.learner import Learner
from trainer.sft.rows import TrainingSequence

_NEAR = 3e-5
"""A hundredth of the distance three updates move a weight: AdamW divides a gradient near 0 by its
own rounded size."""


def reference_loss(model: Any, rows: list[TrainingSequence]) -> Tensor:
    """Computes the mean loss over all learned tokens from transformers' loss of each row alone."""
    total: Any = 0.0
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.completion_ids])).long()
        labels = torch.full_like(ids, -100)
        learned = torch.from_numpy(row.learned).bool()
        labels[len(row.prompt_ids) :][learned] = ids[len(row.prompt_ids) :][learned]
        total = total + model(input_ids=ids[None], labels=labels[None]).loss * int(learned.sum())
    loss: Tensor = total / sum(float(row.learned.sum()) for row in rows)
    return loss


@pytest.mark.parametrize(
    "cut", [{}, {"packing": "off"}, {"micro_batch_size": 1}, {"micro_batch_tokens": 40}]
)
def test_three_updates_match_transformers_and_torch(config: Config, cut: dict[str, Any]) -> None:
    config.optimizer.weight_decay = 0.1
    config.optimizer.max_grad_norm = 0.3
    config.optimizer.lr_schedule = "linear"
    config.optimizer.warmup_steps = 1
    for name, value in cut.items():
        setattr(config.trainer, name, value)
    policy = Policy(config, Ranks())
    policy.total_steps = 3
    model = copy.deepcopy(policy.model)
    model.set_attn_implementation("eager")
    adam = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=config.optimizer.adam_betas, weight_decay=0.1
    )
    learner = Learner(policy)
    for step, rate in enumerate((1e-3, 1e-3, 5e-4)):
        rows = random_rows(6, seed=step)
        loss = reference_loss(model, rows)
        assert learner.loss(rows) == pytest.approx(loss.item(), rel=1e-5)
        adam.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        found = learner.learn(rows)
        assert (found.loss, found.grad_norm) == pytest.approx((loss.item(), norm), rel=1e-4)
        assert found.learning_rate == pytest.approx(rate)
        assert (found.updates, policy.step) == (1, step + 1)
        assert found.trained_tokens == sum(int(row.learned.sum()) for row in rows)
    for (name, own), other in zip(policy.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, other, atol=_NEAR, rtol=0, msg=name)


def test_unlearned_tokens_have_no_effect(config: Config) -> None:
    """Unlearned tokens are not targets and do not count in the mean."""
    (row,) = random_rows(1, seed=3)
    learned = np.zeros_like(row.learned)
    learned[:2] = 1
    short = TrainingSequence(row.prompt_ids, row.completion_ids[:2], learned[:2])
    learner = Learner(Policy(config, Ranks()))
    assert learner.loss(
        [TrainingSequence(row.prompt_ids, row.completion_ids, learned)]
    ) == pytest.approx(learner.loss([short]), rel=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing(config: Config, tmp_path: Path) -> None:
    policy = Policy(config, Ranks())
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    next(policy.model.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    found = Learner(policy).learn(random_rows(2, seed=0))
    assert (found.updates, found.skipped, found.grad_norm) == (0, 1, 0.0)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
