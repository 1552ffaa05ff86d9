"""Advantages against hand-computed numbers, and their properties."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from common.settings.algorithm import AlgorithmSection
from trainer.algorithms.advantages import (
    ADVANTAGES,
    gae,
    group_centred,
    group_normalised,
    leave_one_out,
    length_weighted,
    overlong_penalty,
    whiten,
)

finite = st.floats(-100, 100, width=32)
SETTINGS = AlgorithmSection()
COMPARING = [name for name in ADVANTAGES if name != "none"]
"""The advantages that compare the completions of one group."""


def test_hand_computed() -> None:
    # Mean 0.5, unbiased std sqrt(4 · 0.25 / 3) = 0.5773503; 0.5 / 0.5773503 = 0.8660254.
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    # Second group: mean 0.5, deviations 1.5 and −0.5, std sqrt((2.25 + 3 · 0.25) / 3) = 1.
    expected = torch.tensor(
        [[0.8660254, -0.8660254, -0.8660254, 0.8660254], [1.5, -0.5, -0.5, -0.5]],
        dtype=torch.float64,
    )
    torch.testing.assert_close(group_normalised(rewards, eps=1e-12), expected, atol=1e-7, rtol=0)


def test_eps_is_added_to_the_standard_deviation() -> None:
    rewards = torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(
        group_normalised(rewards, eps=1.0), torch.tensor([[0.75, -0.25, -0.25, -0.25]])
    )


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7])
def test_equal_rewards_give_exactly_zero(value: float) -> None:
    assert (group_normalised(torch.full((3, 7), value)) == 0).all()


@given(arrays.arrays("float64", (3, 5), elements=finite), st.floats(-50, 50))
def test_shift_invariance(rewards: object, shift: float) -> None:
    values = torch.tensor(rewards)
    spread = values.std(dim=1)
    values = values[(spread > 1e-3) | (spread == 0)]
    assume(len(values) > 0)
    torch.testing.assert_close(
        group_normalised(values + shift), group_normalised(values), atol=1e-6, rtol=1e-6
    )


def test_trap_group_size_compares_completions_of_one_prompt() -> None:
    """One easy and one hard prompt: each completion is compared only with others of its prompt, not
    with the batch."""
    advantages = group_normalised(torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]))
    assert advantages[0, 3] < -1.4
    assert advantages[1, 3] > 1.4
    assert torch.allclose(advantages.sum(dim=1), torch.zeros(2), atol=1e-6)


REWARDS = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])


def test_group_centred_hand_computed() -> None:
    torch.testing.assert_close(
        group_centred(REWARDS), torch.tensor([[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]])
    )


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others() -> None:
    expected = torch.tensor(
        [[row[i] - (sum(row) - row[i]) / 3 for i in range(4)] for row in REWARDS.tolist()],
    )
    torch.testing.assert_close(leave_one_out(REWARDS), expected)
    torch.testing.assert_close(
        leave_one_out(REWARDS)[0], torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3])
    )


def test_length_weighted_hand_computed() -> None:
    lengths = torch.tensor([[10, 10, 20, 40], [5, 5, 5, 5]])
    # Baselines: 10 / 80 = 0.125 and 10 / 20 = 0.5.
    expected = torch.tensor([[0.875, -0.125, -0.125, -0.125], [0.5, 0.5, -0.5, -0.5]])
    torch.testing.assert_close(length_weighted(REWARDS, lengths), expected)


@pytest.mark.parametrize("name", COMPARING)
def test_every_advantage_is_zero_on_equal_groups(name: str) -> None:
    lengths = torch.tensor([[3, 9, 4], [1, 2, 3]])
    assert (ADVANTAGES[name](torch.full((2, 3), 0.1), lengths, SETTINGS) == 0).all()


@pytest.mark.parametrize("name", COMPARING)
def test_every_advantage_orders_completions_by_reward(name: str) -> None:
    rewards, lengths = torch.tensor([[0.0, 0.5, 1.0]]), torch.tensor([[4, 4, 4]])
    advantages = ADVANTAGES[name](rewards, lengths, SETTINGS)[0]
    assert advantages[0] < advantages[1] < advantages[2]
    shifted = ADVANTAGES[name](rewards + 5, lengths, SETTINGS)[0] * (
        11 if name == "mean_normalised" else 1
    )  # means 0.5 and 5.5
    torch.testing.assert_close(shifted, advantages, atol=1e-5, rtol=0)


def test_overlong_penalty_hand_computed() -> None:
    """DAPO with L_max 100 and a buffer of 20: no penalty up to 80, half of it at 90, all of it from
    100 on."""
    lengths = torch.tensor([10, 80, 90, 100, 130])
    expected = torch.tensor([0.0, 0.0, -0.5, -1.0, -1.0])
    torch.testing.assert_close(overlong_penalty(lengths, 100, 20), expected, check_dtype=False)


def test_gae_hand_computed() -> None:
    # γ 0.9, λ 0.5, so γλ = 0.45; V after the end is 0.
    # δ_2 = 1 − 0.5 = 0.5; δ_1 = 0.9·0.5 − 0.2 = 0.25; δ_0 = 0.9·0.2 − 0.1 = 0.08
    # A_2 = 0.5; A_1 = 0.25 + 0.45·0.5 = 0.475; A_0 = 0.08 + 0.45·0.475 = 0.29375
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.1, 0.2, 0.5]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.9, gae_lambda=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.29375, 0.475, 0.5]]))
    torch.testing.assert_close(returns, torch.tensor([[0.39375, 0.675, 1.0]]))


def test_gae_steps_over_masked_tokens() -> None:
    """The hand-computed row with two masked tokens inside and one at the end: unmasked tokens keep
    the same numbers."""
    rewards, values = (
        torch.tensor([[0.0, 7.0, 0.0, 7.0, 1.0, 7.0]]),
        torch.tensor([[0.1, 9.0, 0.2, 9.0, 0.5, 9.0]]),
    )
    mask = torch.tensor([[1, 0, 1, 0, 1, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.29375, 0, 0.475, 0, 0.5, 0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.39375, 0, 0.675, 0, 1.0, 0]]))


token_rows = arrays.arrays("float64", (2, 6), elements=st.floats(-10, 10, width=32))


@given(token_rows, token_rows, st.floats(0.1, 1.0))
def test_gae_with_lambda_zero_is_the_one_step_error(
    rewards: object, values: object, gamma: float
) -> None:
    r, v = torch.tensor(rewards), torch.tensor(values)
    advantages, _ = gae(r, v, torch.ones_like(r), gamma, 0.0)
    after = torch.cat([v[:, 1:], torch.zeros(2, 1, dtype=v.dtype)], dim=1)
    torch.testing.assert_close(advantages, r + gamma * after - v)


@given(token_rows, token_rows, st.floats(0.1, 1.0))
def test_gae_with_lambda_one_is_the_discounted_return_minus_the_value(
    rewards: object, values: object, gamma: float
) -> None:
    r, v = torch.tensor(rewards), torch.tensor(values)
    advantages, returns = gae(r, v, torch.ones_like(r), gamma, 1.0)
    expected = torch.stack(
        [sum((gamma**k * r[:, t + k] for k in range(6 - t)), torch.zeros(2)) for t in range(6)],
        dim=1,
    )
    torch.testing.assert_close(returns, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(advantages, expected - v, atol=1e-6, rtol=1e-6)


def test_whiten_hand_computed() -> None:
    # Values 1, 2, 3 and 6 (the 9s are masked): mean 3, unbiased variance (4 + 1 + 0 + 9) / 3 =
    # 14/3.
    values, mask = (
        torch.tensor([[1.0, 2.0, 9.0], [3.0, 6.0, 9.0]]),
        torch.tensor([[1, 1, 0], [1, 1, 0]]),
    )
    expected = torch.tensor([[-2.0, -1.0, 0.0], [0.0, 3.0, 0.0]]) / (14 / 3) ** 0.5
    torch.testing.assert_close(whiten(values, mask), expected)


def test_whiten_of_equal_values_is_zero() -> None:
    torch.testing.assert_close(
        whiten(torch.full((2, 3), 0.7), torch.ones(2, 3)), torch.zeros(2, 3), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(
        whiten(torch.tensor([[0.7, 5.0]]), torch.tensor([[1, 0]])), torch.zeros(1, 2)
    )
