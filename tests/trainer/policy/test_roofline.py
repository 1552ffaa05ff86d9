"""The roofline goals: a change that makes an update costlier on a GPU is noticed without one."""

from unittest.mock import patch

import pytest

from benchmarks.roofline import predicted, shapes, variants
from learning import attention


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from Inductor itself
@pytest.mark.parametrize(("model", "variant", "goal"), [("0.5B", 3, 0.40), ("7B", 2, 0.45)])
def test_the_defaults_are_predicted_to_reach_their_goals(
    model: str, variant: int, goal: float
) -> None:
    config, ranks = shapes()[model]
    with patch.object(attention, "_has_kernel", lambda _query: True):
        before, after = (
            predicted(config, ranks, 16_384, variants(ranks > 1)[i]) for i in (0, variant)
        )
    assert before["MFU"] < 0.40
    assert after["MFU"] >= goal
    assert after["head"] < before["head"] / 2
