"""Parked tensors take no memory and come back bit for bit under every name they have."""

import copy

import torch
from torch import nn

from common.settings.sections import OptimizerSection
from learning.optimizer import Optimizer
from learning.parking import Parking, storages

CPU = torch.device("cpu")


def test_tensors_come_back() -> None:
    torch.manual_seed(1)
    tensors = [
        torch.randn(5, 3),
        torch.randn(1).bfloat16(),
        torch.arange(64),
        torch.zeros(0),
        torch.randn(4, 4).t(),
    ]
    kept, place = copy.deepcopy(tensors), Parking(CPU)
    for _ in range(2):  # the second round reuses the host memory
        place.park(tensors)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        place.restore()
        assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, kept, strict=True))


def test_views_and_tied_tensors_share_one_place() -> None:
    whole = torch.randn(6, 4)
    view, tied = whole[2:], nn.Parameter(whole)
    assert len(storages([whole, view, tied], CPU)) == 1
    expected, place = whole.clone(), Parking(CPU)
    place.park([view, whole, tied])
    place.restore()
    assert torch.equal(view, expected[2:])
    whole[3, 1] = 5.0
    assert view[1, 1] == tied[3, 1] == 5.0


def test_tensors_elsewhere_or_of_fixed_size_are_left_alone() -> None:
    fixed = torch.frombuffer(bytearray(16), dtype=torch.float32)
    elsewhere = torch.empty(3, device="meta")
    place = Parking(CPU)
    place.park([fixed, elsewhere])
    assert fixed.sum() == 0


def test_training_that_parks_between_its_steps_is_the_same() -> None:
    """Also with optimiser states that appear later and need new space in host memory."""

    def train(parked: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer, place = Optimizer(model, OptimizerSection(weight_decay=0.01)), Parking(CPU)
        for step in range(4):
            model(torch.full((2, 8), float(step))).square().mean().backward()
            optimizer.step(1e-2)
            optimizer.zero_grad()
            if parked:
                place.park([*model.parameters(), *optimizer.state_dict().values()])
                assert all(
                    parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters()
                )
                place.restore()
        return [*model.parameters(), *optimizer.state_dict().values()]

    assert all(
        torch.equal(one, other) for one, other in zip(train(True), train(False), strict=True)
    )
