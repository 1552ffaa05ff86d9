"""The checksum by which the weights of two runs are compared."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.timing import PUBLISHING, StageClock
from trainer.weights.sync import WeightsChecksum, WeightSync
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


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("has_checksums", [True, False])
def test_weights_are_copied_and_hashed_as_set(
    in_background: bool, copies: bool, has_checksums: bool
) -> None:
    clock = StageClock()
    own_thread = threading.current_thread()
    tensors = {"a": ONES.clone(), "b": torch.zeros(3)}
    policy: Any = SimpleNamespace(
        weights=lambda: iter(tensors.items()), ranks=SimpleNamespace(device=torch.device("cpu"))
    )
    done: list[str] = []

    def publish(weights: Weights, version: int) -> None:
        stage = PUBLISHING if in_background else "publish"
        assert clock.is_active(stage)
        assert (threading.current_thread() is own_thread) != in_background
        done.append(f"publish {version} {float(dict(weights)['a'].sum()):g}")

    publisher: Any = SimpleNamespace(publish=publish)
    sync = WeightSync(
        publisher,
        clock,
        in_background,
        copies=copies,
        may_load=lambda: done.append("may load"),
        has_checksums=has_checksums,
    )
    assert sync.checksum is None
    expected = checksum(list(tensors.items()))
    gathered = sync.gather(policy)
    is_copied = copies or in_background
    if is_copied:
        tensors["a"].zero_()  # the next update
    sync.publish(gathered, 7).result()
    assert done == ["may load"] * in_background + ["publish 7 6"]
    assert sync.checksum == (expected if has_checksums else None)
    assert isinstance(gathered, list) == is_copied
