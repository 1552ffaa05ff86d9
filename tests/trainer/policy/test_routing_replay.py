"""The policy computes with the engine's experts, before and after an update; a reference chooses."""

from pathlib import Path

import numpy as np
import pytest

from common.settings.config import Config, load
from common.wire.schemas import Float32
from learning.ranks import Ranks
from tests.support.batches.groups import (
    VOCABULARY,
    batch_of,
    known,
    off_policy_groups,
    with_experts,
)
from tests.support.models.tiny_models import write
from trainer.algorithms.batch import Batch
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference

_MOE = {"num_experts": 8, "num_experts_per_tok": 3}


def settings(model: Path, *more: str) -> Config:
    words = [
        *("--model.name", str(model), "--rollout.engine", "embedded"),
        *("--algorithm.kl_coef", "0.1", "--algorithm.kl_in", "reward", *more),
    ]
    return load(words, {})


def flat(column: list[Float32] | None) -> Float32:
    return np.concatenate(known(column))


@pytest.mark.parametrize("adapter", [(), ("--lora.rank", "2")], ids=["full", "adapter"])
def test_only_the_policy_replays(adapter: tuple[str, ...], tmp_path: Path) -> None:
    """An adapter's reference is the policy's own model, with the adapter switched off. Nothing has
    been learned yet, so that their log-probabilities differ by the experts alone."""
    model = write("Qwen3-MoE", tmp_path / "model", vocab_size=VOCABULARY, **_MOE)
    chooses = Policy(settings(model, *adapter), Ranks())
    replays = Policy(settings(model, *adapter, "--trainer.routing_replay", "true"), Ranks())
    groups = with_experts(off_policy_groups(), known(replays.scorer.routers))

    def batch(policy: Policy) -> Batch:
        return batch_of(groups, policy.config)

    own = flat(chooses.logprobs(batch(chooses)))
    replayed = flat(replays.logprobs(batch(replays)))
    reference = flat(Reference(replays).logprobs(batch(replays)))
    again = flat(replays.logprobs(batch(replays)))
    np.testing.assert_allclose(reference, own, atol=1e-5)
    np.testing.assert_array_equal(again, replayed)
    assert np.abs(replayed - own).max() > 0.1
