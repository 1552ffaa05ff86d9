"""Who may use the GPUs, over random turns of the trainer and of the engines."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from common.settings.sections import OptimizerSection
from learning.optimizer import Optimizer
from learning.ranks import Ranks
from trainer.timing import StageClock
from trainer.weights.gpu_lease import GpuLease


class Gpu:
    """What the trainer keeps on it, and engines that must never be awake beside that."""

    def __init__(self, shared: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.optimizer = Optimizer(self.model, OptimizerSection())
        self.model(torch.randn(8, 4)).square().mean().backward()
        self.optimizer.step(0.1)
        self.is_awake = False
        self.turns = 0
        self.lease = GpuLease(
            Ranks(), lambda: [([self.model], [self.optimizer])], self, shared=shared
        )

    def sleep(self) -> None:
        assert self.is_awake
        assert self.is_parked
        self.is_awake = False
        self.turns += 1

    def wake(self) -> None:
        """Weights that are published, too, wake the engines."""
        assert self.is_parked
        assert all(parameter.grad is None for parameter in self.model.parameters())
        self.is_awake = True

    @property
    def is_parked(self) -> bool:
        tensors = [
            *self.model.parameters(),
            *self.model.buffers(),
            *self.optimizer.state_dict().values(),
        ]
        sizes = {tensor.untyped_storage().nbytes() > 0 for tensor in tensors}
        assert len(sizes) == 1, "some of it is parked"
        return sizes == {False}


def test_engines_are_awake_only_while_everything_is_parked() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        gpu = Gpu(shared=True)
        before = {name: tensor.clone() for name, tensor in gpu.model.state_dict().items()}
        for _ in range(12):
            turn: Callable[[], object] = draw.choice([gpu.lease.acquire, gpu.lease.release])
            what = draw.choice(["training", "held", "turn"])
            was_awake = gpu.is_awake
            was_parked = gpu.is_parked
            turns = gpu.turns
            if what == "turn" and turn == gpu.lease.release and was_parked:
                continue
            if what == "training":
                clock = StageClock()
                with gpu.lease.training(clock):
                    assert (gpu.is_parked, gpu.is_awake) == (False, False)
                assert gpu.is_parked
                assert {"update", "publish"} <= clock.lap().keys()
                gpu.wake()
            elif what == "held":
                with gpu.lease.borrowed():
                    assert (gpu.is_parked, gpu.is_awake) == (False, False)
                assert (gpu.is_parked, gpu.is_awake) == (was_parked, was_awake)
            else:
                turn()
                assert gpu.is_parked == (turn == gpu.lease.release)
                if gpu.is_parked:
                    gpu.wake()
            assert gpu.turns - turns == (was_awake and gpu.turns != turns)
        gpu.lease.acquire()
        after = gpu.model.state_dict()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_trainer_with_gpus_of_its_own_never_parks() -> None:
    gpu = Gpu(shared=False)
    gpu.is_awake = True
    with gpu.lease.borrowed(), gpu.lease.training(StageClock()):
        assert not gpu.is_parked
    gpu.lease.release()
    assert (gpu.is_parked, gpu.is_awake) == (False, True)


@pytest.mark.parametrize("has_engines", [True, False])
def test_no_rank_goes_on_before_all_have_given_way(
    monkeypatch: pytest.MonkeyPatch, has_engines: bool
) -> None:
    """Only rank 0 has the engines; the others keep step with it."""
    done: list[str] = []
    ranks: Any = SimpleNamespace(
        device=torch.device("cpu"), barrier=lambda: done.append("all ranks")
    )
    engines: Any = SimpleNamespace(
        sleep=lambda: done.append("sleep"), wake=lambda: done.append("wake")
    )
    lease = GpuLease(ranks, lambda: [], engines if has_engines else None)
    monkeypatch.setattr(lease._parking, "park", lambda tensors: done.append("park"))
    monkeypatch.setattr(lease._parking, "restore", lambda: done.append("restore"))

    def steps(*names: str) -> list[str]:
        return [name for name in names if has_engines or name not in ("sleep", "wake")]

    with lease.borrowed():
        assert done == []
    assert done == [], "it held them before"
    lease.release()
    assert done == ["park", "all ranks"]
    done.clear()
    with lease.borrowed():
        assert done == steps("sleep", "all ranks", "restore")
        done.clear()
    assert done == steps("park", "all ranks", "wake")
