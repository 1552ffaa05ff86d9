"""The roofline: a change that makes an update costlier on a GPU is noticed without one, and published
runs are reproduced."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.roofline import (
    BEYOND,
    MODELS,
    Variant,
    anchors,
    exchange_bytes,
    groups,
    mfu,
    predicted,
    variants,
)
from common.settings.sections import TrainerSection
from learning import attention

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from Inductor itself
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
_TOKENS = 16_384


@pytest.mark.parametrize(("model", "goal"), [("0.5B", 0.32), ("1.5B", 0.38), ("7B", 0.38)])
def test_the_defaults_are_predicted_to_reach_their_goals(model: str, goal: float) -> None:
    config, ranks = MODELS[model]
    first, *_, last = variants(model, _TOKENS)
    with patch.object(attention, "_has_kernel", lambda _query: True):
        before, after = (
            predicted(config, ranks, groups(_TOKENS), variant) for variant in (first, last)
        )
    assert mfu(before) < 0.85 * mfu(after)
    assert mfu(after) >= goal
    assert after["head"] < before["head"] / 2


def test_a_mixture_waits_for_its_weights_in_small_passes() -> None:
    """Passes of 2,048 tokens are what fits with moments in float32."""
    config, ranks = MODELS["30B-A3B"]
    small, large, *_ = variants("30B-A3B", _TOKENS)
    with patch.object(attention, "_has_kernel", lambda _query: True):
        waiting, hidden = (
            predicted(config, ranks, groups(int(variant.tokens or 0), size=2), variant)
            for variant in (small, large)
        )
    assert waiting["transfers"] > waiting["layers"]
    assert hidden["transfers"] == 0
    assert mfu(hidden) > 4 * mfu(waiting)
    assert mfu(hidden) >= 0.22


def test_a_token_travels_once_to_every_rank_that_has_one_of_its_experts() -> None:
    """The table of decision 66: 4.7 of 8 ranks, there and back, and again in the backward pass."""
    config, ranks = MODELS["30B-A3B"]
    kept = TrainerSection(activation_checkpointing=False)
    variant = Variant("", kept, sharded=True, expert_ranks=ranks)
    sent = exchange_bytes(config, 1, variant) / (2 * 2 * 2 * config.hidden_size)
    assert sent == pytest.approx(4.6, abs=0.05)
    assert exchange_bytes(config, 1, Variant("", kept, sharded=True)) == 0


def test_a_grouped_product_counts_every_row_once() -> None:
    rows = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(4, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        found = torch._grouped_mm(rows, weights, offs=ends)
        found.backward(torch.ones_like(found))
    assert counter.get_total_flops() == 3 * 2 * 32 * 16 * 8


def test_published_runs_take_what_is_predicted() -> None:
    """The constant is the median of all; the error is that of runs on one GPU or one node."""
    ratios = []
    with patch.object(attention, "_has_kernel", lambda _query: True):
        for anchor in anchors():
            ratio = anchor.seconds / anchor.kernels()["total"]
            ratios.append(ratio)
            assert ratio > 1, f"{anchor.name} ran faster than its kernels"
            if anchor.ranks <= 16:
                assert BEYOND / ratio == pytest.approx(1, abs=0.31), anchor.name
    assert np.median(ratios) == pytest.approx(BEYOND, abs=0.03)
