"""Policy loss and KL estimators against hand-computed numbers."""

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.settings.algorithm import AlgorithmSection
from trainer.algorithms.losses import (
    Aggregation,
    PolicyLoss,
    TokenTerms,
    adapted_kl_coef,
    cispo,
    clipped_surrogate,
    importance_correction,
    kl_divergence,
    off_policy_mask,
    ratio_of,
    row_ratio,
    token_coefficients,
)

ROWS = torch.tensor([0, 0, 1, 1, 1])


def terms(
    logprobs: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    old: torch.Tensor | None = None,
) -> TokenTerms:
    """Returns the tokens of two completions, of 2 and 3 tokens, by default with a ratio of 1."""
    return TokenTerms(
        logprobs=logprobs,
        old_logprobs=logprobs if old is None else old,
        rollout_logprobs=rollout,
        advantages=advantages,
        row_of_token=ROWS[: len(logprobs)],
        row_count=2,
    )


def surrogate(ratio: torch.Tensor, advantages: list[float], **settings: float) -> PolicyLoss:
    tokens = terms(ratio, ratio, torch.tensor(advantages))
    return clipped_surrogate(ratio, tokens, AlgorithmSection(**settings))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 1.0, -1.0, 0.0),
        (1.5, 1.0, -1.28, 1.0),  # capped at 1 + 0.28: no further gain
        (1.5, -1.0, 1.5, 0.0),  # too likely and bad: the full penalty
        (0.5, -1.0, 0.8, 1.0),  # unlikely and bad: no further gain below 1 − 0.2
        (0.5, 1.0, -0.5, 0.0),
        (0.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate_hand_computed(
    ratio: float, advantage: float, loss: float, clipped: float
) -> None:
    behaviour = torch.tensor([-2.0])
    found = ratio_of(behaviour + math.log(ratio), behaviour)
    result = surrogate(found, [advantage], clip_high=0.28)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert result.ratio.item() == pytest.approx(ratio, abs=1e-6)
    assert result.clipped.item() == clipped


def test_gradient_stops_where_the_ratio_is_clipped() -> None:
    logprobs = torch.tensor([math.log(1.5), 0.0], requires_grad=True)
    ratio = ratio_of(logprobs, torch.zeros(2))
    surrogate(ratio, [1.0, 1.0]).loss.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -1.0]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [(5.0, -1.0, 3.0, 1.0), (2.0, -1.0, 2.0, 0.0), (5.0, 1.0, -1.2, 1.0), (5.0, -2.0, 6.0, 1.0)],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens(
    ratio: float, advantage: float, loss: float, clipped: float
) -> None:
    result = surrogate(torch.tensor([ratio]), [advantage], dual_clip=3.0)
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.item() == clipped


def test_a_huge_log_ratio_stays_finite() -> None:
    ratio = ratio_of(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]))
    assert torch.isfinite(surrogate(ratio, [-1.0, 1.0]).loss).all()


def test_row_ratio_hand_computed() -> None:
    """GSPO: exp of the mean log ratio. Row 0: (0.2 + 0.4) / 2 = 0.3; row 1: (0.3 − 0.3 + 0.6) / 3 =
    0.2."""
    logprobs = torch.tensor([-0.8, -0.6, -0.7, -1.3, -0.4], requires_grad=True)
    ratio = row_ratio(terms(logprobs, logprobs, torch.ones(5), torch.full((5,), -1.0)))
    expected = torch.tensor([math.exp(0.3)] * 2 + [math.exp(0.2)] * 3)
    torch.testing.assert_close(ratio.detach(), expected)
    ratio.sum().backward()
    # The gradient of each token is the ratio, through its own log-probability.
    torch.testing.assert_close(logprobs.grad, expected)


def test_gspo_gradient_is_that_of_the_sequence_objective() -> None:
    """The computed Σ over tokens of s/L equals the derivative of s = exp(mean log ratio) itself."""
    old = torch.tensor([-1.0, -1.2, -0.5])
    one = torch.tensor([-0.8, -0.9, -0.7], requires_grad=True)
    tokens = replace(terms(one, old, torch.ones(3), old), row_of_token=torch.zeros(3).long())
    (row_ratio(tokens) / 3).sum().backward()
    two = one.detach().clone().requires_grad_(True)
    torch.exp((two - old).mean()).backward()
    torch.testing.assert_close(one.grad, two.grad)


def test_cispo_hand_computed_and_its_clipped_tokens_keep_their_gradient() -> None:
    logprobs = torch.tensor([math.log(6.0), math.log(0.5)], requires_grad=True)
    ratio = ratio_of(logprobs, torch.zeros(2))
    tokens = terms(logprobs, torch.zeros(2), torch.tensor([1.0, -2.0]))
    result = cispo(ratio, tokens, AlgorithmSection(name="cispo"))
    expected = torch.tensor([-5.0 * math.log(6.0), 0.5 * 2.0 * math.log(0.5)])
    torch.testing.assert_close(result.loss.detach(), expected)
    assert result.clipped.tolist() == [1.0, 0.0]
    result.loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-5.0, 1.0]))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Losses 1, 2 | 3, 4, 5: two completions of lengths 2 and 3, with at most 10 new tokens.
        ("token_mean", 15 / 5),
        ("sequence_mean_token_mean", (1.5 + 4) / 2),
        ("sequence_mean_token_sum", (3 + 12) / 2),
        ("constant", 15 / (2 * 10)),
    ],
)
def test_aggregation_hand_computed(aggregation: Aggregation, expected: float) -> None:
    losses = torch.tensor([1.0, 2, 3, 4, 5])
    lengths = torch.tensor([2, 2, 3, 3, 3])
    coefficients = token_coefficients(
        aggregation, lengths, total_tokens=5, total_rows=2, max_new_tokens=10
    )
    assert (losses * coefficients).sum().item() == pytest.approx(expected)


def test_importance_correction_hand_computed() -> None:
    proximal = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    behaviour = proximal - torch.log(torch.tensor([3.0, 0.5, 1.5, 1.0, 0.25]))

    def weights(mode: Literal["truncate", "mask"]) -> list[float]:
        tokens = terms(proximal, behaviour, torch.ones(5))
        settings = AlgorithmSection(rollout_correction=mode)
        found: list[float] = importance_correction(tokens, settings).tolist()
        return found

    assert weights("truncate") == pytest.approx([2.0, 0.5, 1.5, 1.0, 0.25])
    assert weights("mask") == pytest.approx([0.0, 0.5, 1.5, 1.0, 0.0])


def test_off_policy_mask_drops_bad_completions_that_moved_away() -> None:
    behaviour = torch.zeros(5)
    logprobs = torch.tensor([-0.4, -0.6, -0.4, -0.6, -0.5])  # both rows moved by 0.5 on average
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])
    tokens = terms(logprobs, behaviour, advantages)
    assert off_policy_mask(tokens, 0.4).tolist() == [1, 1, 0, 0, 0]
    assert off_policy_mask(tokens, 0.6).tolist() == [1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.1), ("k2", 0.005), ("k3", 0.00483741803596)]
)
def test_kl_hand_computed(estimator: str, expected: float) -> None:
    value = kl_divergence(
        torch.tensor([-1.0], dtype=torch.float64),
        torch.tensor([-1.1], dtype=torch.float64),
        estimator,  # type: ignore[arg-type]
    )
    assert value.item() == pytest.approx(expected, abs=1e-9)


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k3_is_never_negative(logprob: float, reference: float) -> None:
    assert kl_divergence(torch.tensor([logprob]), torch.tensor([reference]), "k3").item() >= -1e-6


def test_k1_and_k3_estimate_the_true_divergence() -> None:
    """The mean over samples of a known categorical distribution equals its exact KL divergence from
    another one."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (p * (p / q).log()).sum().item()
    draws = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    for estimator in ("k1", "k3"):
        mean = kl_divergence(p.log()[draws], q.log()[draws], estimator).mean().item()
        assert mean == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.01, 0.1),  # on target: unchanged
        (0.011, 0.1 * (1 + 0.1 * 256 / 10_000)),
        (5.0, 0.1 * (1 + 0.2 * 256 / 10_000)),  # the error is clipped to ±0.2
        (0.0, 0.1 * (1 - 0.2 * 256 / 10_000)),
    ],
)
def test_adapted_kl_coef_hand_computed(kl: float, expected: float) -> None:
    assert adapted_kl_coef(0.1, kl, target=0.01, rows=256) == pytest.approx(expected)
