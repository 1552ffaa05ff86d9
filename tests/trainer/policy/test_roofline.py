"""The roofline: a change that makes an update costlier on a GPU is noticed without one, and published
runs are reproduced."""

from unittest.mock import patch

import numpy as np
import pytest

from benchmarks.roofline import BEYOND, MODELS, anchors, groups, mfu, predicted, variants
from learning import attention

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from Inductor itself
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
