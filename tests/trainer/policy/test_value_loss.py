"""The value loss compared with numbers computed by hand."""

import pytest
import torch

from trainer.policy.critic import value_loss

VALUES = torch.tensor([1.0, 0.5, 0.5, -0.4, 2.0])
OLD = torch.tensor([1.1, 0.0, 0.0, 0.0, 2.0])
RETURNS = torch.tensor([3.0, 1.0, 0.0, -1.0, 2.0])


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    loss, clipped = value_loss(VALUES, OLD, RETURNS, None)
    assert loss.tolist() == pytest.approx([2.0, 0.125, 0.125, 0.18, 0.0])
    assert clipped.tolist() == [False] * 5


def test_with_a_clip_hand_computed() -> None:
    """The error counts inside the range, and beyond it away from the return; towards the return,
    the bounded error."""
    loss, clipped = value_loss(VALUES, OLD, RETURNS, 0.2)
    # v: 1.0 (moved 0.1) | 0.5 → 0.2: (0.2 − 1)² > (0.5 − 1)² | 0.5 → 0.2: 0.04 < 0.25 | −0.4 →
    # −0.2: 0.64 > 0.36 | unmoved
    assert loss.tolist() == pytest.approx([2.0, 0.32, 0.125, 0.32, 0.0])
    assert clipped.tolist() == [False, True, False, True, False]


def test_clipped_tokens_have_no_gradient_and_the_others_that_of_the_error() -> None:
    values = VALUES.clone().requires_grad_()
    value_loss(values, OLD, RETURNS, 0.2)[0].sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-2.0, 0.0, 0.5, 0.0, 0.0])
