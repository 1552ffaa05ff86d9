"""AdamW with moments in bfloat16: what rounding changes, and by how much."""

import copy
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from common.settings.sections import OptimizerSection
from learning.optimizer import Optimizer
from learning.rounded_adamw import rounded

RATE = 1e-3
BETAS = (0.9, 0.999)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 4))


def adamw(trained: nn.Module, moments: Literal["float32", "bfloat16"]) -> Optimizer:
    return Optimizer(
        trained, OptimizerSection(moments=moments, adam_betas=BETAS, weight_decay=0.01)
    )


def trained(moments: Literal["float32", "bfloat16"], steps: int) -> tuple[Tensor, list[float]]:
    """Returns the weights after `steps` updates on noisy data, and the losses."""
    learner = model()
    optimizer = adamw(learner, moments)
    teacher = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    losses = []
    for number in range(steps):
        inputs = torch.randn(64, 24, generator=torch.Generator().manual_seed(number))
        loss = (learner(inputs) - inputs @ teacher / 5).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(RATE)
        losses.append(loss.item())
    return torch.cat([weight.detach().flatten() for weight in learner.parameters()]), losses


def test_a_number_is_rounded_to_a_neighbour_and_right_in_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    for value in (1 + 2**-10, -3.14159, 1.7e-20):
        found = rounded(torch.full((40_000,), value), generator).double()
        neighbours = found.unique()
        spacing = abs(float(neighbours[-1] - neighbours[0]))
        assert len(neighbours) == 2
        assert spacing <= 2**-7 * abs(value)
        # Four standard errors of a mean of 40,000.
        assert float(found.mean()) == pytest.approx(value, abs=4 * spacing / 2 / 200)
    exact = torch.tensor([0.0, 0.5, -2.0, float(torch.tensor(0.1).bfloat16())])
    assert torch.equal(rounded(exact, generator).float(), exact)


def test_the_first_update_is_that_of_torch() -> None:
    """The moments are rounded when they are stored, not when they are used."""
    expected, _ = trained("float32", 1)
    found, _ = trained("bfloat16", 1)
    assert torch.allclose(found, expected, rtol=0, atol=1e-7)


def test_what_rounding_changes_in_three_hundred_updates() -> None:
    start = torch.cat([weight.detach().flatten() for weight in model().parameters()])
    expected, losses = trained("float32", 300)
    found, rounded_losses = trained("bfloat16", 300)
    way = (expected - start).norm()
    assert 1e-5 < float((found - expected).norm() / way) < 0.02
    assert sum(rounded_losses[-50:]) == pytest.approx(sum(losses[-50:]), rel=0.01)
    assert sum(losses[-50:]) < 0.2 * sum(losses[:50])


def test_a_second_moment_falls_when_the_gradients_vanish() -> None:
    """Its factor of 0.999 is less than half the spacing of bfloat16: rounded to the nearest, it
    would stay where it is."""
    learner = model()
    optimizer = adamw(learner, "bfloat16")
    means = []
    for number in range(1500):
        for weight in learner.parameters():
            weight.grad = torch.full_like(weight, 1.0 if number == 0 else 0.0)
        optimizer.step(1e-9)
        moments = [value for name, value in optimizer.state_dict().items() if "_sq" in name]
        means.append(float(torch.cat([value.flatten() for value in moments]).double().mean()))
    assert all(value.dtype == torch.bfloat16 for value in moments)
    assert means[-1] / means[0] == pytest.approx(0.999**1499, rel=0.03)
    assert (
        float((torch.tensor(1e-3).bfloat16() * 0.999).bfloat16() / torch.tensor(1e-3).bfloat16())
        == 1
    )


def test_a_state_that_is_loaded_goes_on_as_before() -> None:
    first = model()
    optimizer = adamw(first, "bfloat16")

    def update(target: nn.Module, by: Optimizer, number: int) -> None:
        torch.manual_seed(number)
        for weight in target.parameters():
            weight.grad = torch.randn_like(weight)
        by.step(RATE)

    for number in range(3):
        update(first, optimizer, number)
    second = copy.deepcopy(first)
    resumed = adamw(second, "bfloat16")
    saved = optimizer.state_dict()
    tensors = resumed.empty_state(saved.keys())
    for name, tensor in tensors.items():
        assert tensor.dtype == saved[name].dtype
        tensor.copy_(saved[name])
    resumed.load_state_dict(tensors)
    for number in range(3, 6):
        update(first, optimizer, number)
        update(second, resumed, number)
    for weight, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(weight, other)
