"""Group-normalised advantages against hand-computed numbers and their properties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainer.advantages import group_normalised

finite = st.floats(-100, 100, width=32)


def test_hand_computed() -> None:
    # mean 0.5, unbiased std sqrt(4 · 0.25 / 3) = 0.5773503; 0.5 / 0.5773503 = 0.8660254
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    # second group: mean 0.5, deviations 1.5 and −0.5, std sqrt((2.25 + 3 · 0.25) / 3) = 1
    expected = torch.tensor([[0.8660254, -0.8660254, -0.8660254, 0.8660254], [1.5, -0.5, -0.5, -0.5]], dtype=torch.float64)
    torch.testing.assert_close(group_normalised(rewards, eps=1e-12), expected, atol=1e-7, rtol=0)


def test_eps_is_added_to_the_standard_deviation() -> None:
    rewards = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(group_normalised(rewards, eps=1.0), torch.tensor([[0.75, -0.25, -0.25, -0.25]]))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7])
def test_equal_rewards_give_exactly_zero(value: float) -> None:
    assert (group_normalised(torch.full((3, 7), value)) == 0).all()


@pytest.mark.parametrize("shape", [(4, 1), (4,)])
def test_a_group_of_one_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 2 completions"):
        group_normalised(torch.zeros(shape))


@given(arrays.arrays("float64", (3, 5), elements=finite), st.floats(-50, 50))
def test_shift_invariance(rewards: object, shift: float) -> None:
    values = torch.tensor(rewards)
    spread = values.std(dim=1)
    values = values[(spread > 1e-3) | (spread == 0)]
    torch.testing.assert_close(group_normalised(values + shift), group_normalised(values), atol=1e-6, rtol=1e-6)


def test_trap_group_size_compares_completions_of_one_prompt() -> None:
    """An easy and a hard prompt: each completion is compared with those of its own prompt, not with the batch."""
    advantages = group_normalised(torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]))
    assert advantages[0, 3] < -1.4
    assert advantages[1, 3] > 1.4
    assert torch.allclose(advantages.sum(dim=1), torch.zeros(2), atol=1e-6)
