"""The checksum by which the weights of two runs are compared."""

import torch

from trainer.weights.sync import WeightsChecksum
from trainer.weights.versions import Weights

ONES = torch.ones(2, 3)


def checksum(weights: Weights) -> str:
    made = WeightsChecksum()
    assert [name for name, _ in made.over(weights)] == [name for name, _ in weights]
    return made.hexdigest()


def test_equal_weights_have_one_checksum_wherever_they_are_in_memory() -> None:
    strided = torch.ones(3, 4)[:, :2].T
    assert checksum([("a", ONES), ("b", strided)]) == checksum([("a", ONES), ("b", ONES.clone())])


def test_every_difference_changes_the_checksum() -> None:
    least = ONES.clone()
    least[1, 2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    different = [
        [("a", ONES), ("b", ONES)],
        [("a", ONES), ("b", least)],
        [("b", ONES), ("a", ONES)],
        [("a", ONES), ("c", ONES)],
        [("a", ONES)],
        [("a", ONES.view(3, 2)), ("b", ONES)],
        [("a", ONES.view(torch.int32)), ("b", ONES)],
        [("a", ONES), ("b", ONES), ("empty", torch.empty(0))],
    ]
    assert len({checksum(weights) for weights in different}) == len(different)
