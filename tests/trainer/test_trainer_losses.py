"""Policy loss and KL estimators against hand-computed numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.losses import clipped_surrogate, kl_divergence


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 1.0, -1.0, 0.0),
        (1.5, 1.0, -1.28, 1.0),  # capped at 1 + 0.28: nothing to gain beyond
        (1.5, -1.0, 1.5, 0.0),  # too likely and bad: the full penalty
        (0.5, -1.0, 0.8, 1.0),  # unlikely and bad: no more gain below 1 − 0.2
        (0.5, 1.0, -0.5, 0.0),
        (0.5, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate_hand_computed(ratio: float, advantage: float, loss: float, clipped: float) -> None:
    behaviour = torch.tensor([-2.0])
    result = clipped_surrogate(behaviour + math.log(ratio), behaviour, torch.tensor([advantage]), 0.2, 0.28)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert result.ratio.item() == pytest.approx(ratio, abs=1e-6)
    assert result.clipped.item() == clipped


def test_gradient_stops_where_the_ratio_is_clipped() -> None:
    logprobs = torch.tensor([math.log(1.5), 0.0], requires_grad=True)
    clipped_surrogate(logprobs, torch.zeros(2), torch.ones(2), 0.2, 0.2).loss.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -1.0]))


def test_a_huge_log_ratio_stays_finite() -> None:
    result = clipped_surrogate(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]), torch.tensor([-1.0, 1.0]), 0.2, 0.2)
    assert torch.isfinite(result.loss).all()


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.1), ("k2", 0.005), ("k3", 0.00483741803596)])
def test_kl_hand_computed(estimator: str, expected: float) -> None:
    value = kl_divergence(torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.1], dtype=torch.float64), estimator)  # type: ignore[arg-type]
    assert value.item() == pytest.approx(expected, abs=1e-9)


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k3_is_never_negative(logprob: float, reference: float) -> None:
    assert kl_divergence(torch.tensor([logprob]), torch.tensor([reference]), "k3").item() >= -1e-6


def test_k1_and_k3_estimate_the_true_divergence() -> None:
    """Mean over samples of a known categorical distribution = its exact KL divergence to another."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = (p * (p / q).log()).sum().item()
    draws = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    for estimator in ("k1", "k3"):
        mean = kl_divergence(p.log()[draws], q.log()[draws], estimator).mean().item()
        assert mean == pytest.approx(exact, abs=0.01)
