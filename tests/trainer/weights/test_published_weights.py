"""When pushed weights are served: at once with `max_staleness` 0, else in the background, one
version at a time."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from common.settings.config import Config
from learning.ranks import Ranks
from trainer.policy.policy import Policy
from trainer.timing import StageClock
from trainer.weights import sync
from trainer.weights.board import PublishFailed
from trainer.weights.sync import WeightSync
from trainer.weights.versions import Weights

LIMIT_S = 400


class Engines:
    """Serves a version once `gate` is open and refuses version `bad`. Fails on two versions at a
    time."""

    def __init__(self, bad: int | None = None) -> None:
        self.gate, self.started, self.bad = threading.Event(), threading.Event(), bad
        self.served: list[int] = []
        self.weights: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self._busy = threading.Lock()

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def publish(self, weights: Weights, version: int) -> None:
        assert self._busy.acquire(blocking=False), "two versions are on their way"
        try:
            self.thread = threading.current_thread()
            self.started.set()
            assert self.gate.wait(LIMIT_S)
            self.weights = {name: tensor.clone() for name, tensor in weights}
            if version == self.bad:
                raise PublishFailed(f"no rollout node serves weights {version}")
            self.served.append(version)
        finally:
            self._busy.release()


@pytest.fixture
def policy(config: Config) -> Policy:
    return Policy(config, Ranks())


def push(weights: WeightSync, policy: Policy) -> "Future[None]":
    return weights.publish(weights.gather(policy), policy.step)


def opened(bad: int | None = None) -> Engines:
    engines = Engines(bad)
    engines.gate.set()
    return engines


def test_with_staleness_0_push_returns_when_the_engines_serve_the_weights(policy: Policy) -> None:
    weights = WeightSync(engines := opened(bad=2), StageClock(), in_background=False)
    for policy.step in (0, 1):
        assert push(weights, policy).done()
        assert engines.served[-1] == policy.step
        assert engines.thread is threading.current_thread()
    assert engines.weights.keys() == dict(policy.weights()).keys()
    policy.step = 2
    with pytest.raises(PublishFailed, match="serves weights 2"):
        push(weights, policy)


def test_a_push_in_the_background_returns_early_and_takes_a_copy(policy: Policy) -> None:
    weights = WeightSync(engines := Engines(), StageClock(), in_background=True)
    expected = {name: tensor.clone() for name, tensor in policy.weights()}
    served = push(weights, policy)
    assert not served.done()
    with torch.no_grad():  # the next update
        for parameter in policy.model.parameters():
            parameter.add_(1.0)
    engines.gate.set()
    weights.wait()
    assert (served.done(), engines.served) == (True, [0])
    assert engines.weights.keys() == expected.keys()
    assert all(torch.equal(engines.weights[name], tensor) for name, tensor in expected.items())


def test_versions_are_served_in_order_one_at_a_time(policy: Policy) -> None:
    weights = WeightSync(engines := Engines(), StageClock(), in_background=True)
    first = push(weights, policy)
    assert engines.started.wait(LIMIT_S)

    def push_the_rest() -> None:
        for policy.step in range(1, 6):
            push(weights, policy)
            assert engines.served[: policy.step] == list(range(policy.step)), (
                "it waits until those before are served"
            )

    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(push_the_rest)
        assert not first.done()
        assert engines.served == []
        engines.gate.set()
        rest.result(LIMIT_S)
    weights.wait()
    assert engines.served == list(range(6))


def test_a_failure_reaches_the_future_the_next_push_and_the_wait(policy: Policy) -> None:
    weights = WeightSync(engines := opened(bad=0), StageClock(), in_background=True)
    served = push(weights, policy)
    assert isinstance(served.exception(LIMIT_S), PublishFailed)
    policy.step = 1
    with pytest.raises(PublishFailed, match="serves weights 0"):
        push(weights, policy)
    with pytest.raises(PublishFailed, match="serves weights 0"):
        weights.wait()
    weights.close()
    assert engines.served == []


def test_close_waits_for_a_pending_version_but_not_for_long(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = WeightSync(engines := Engines(), StageClock(), in_background=True)
    weights.close()
    push(weights, policy)
    monkeypatch.setattr(sync, "_LAST_PUBLISHING_S", 0.01)
    weights.close()
    assert engines.served == []
    engines.gate.set()
    monkeypatch.setattr(sync, "_LAST_PUBLISHING_S", LIMIT_S)
    weights.close()
    assert engines.served == [0]


def test_a_rank_above_0_takes_part_in_gathering_every_tensor(config: Config) -> None:
    gathered: list[str] = []

    class Watched(Policy):
        def weights(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in super().weights():
                gathered.append(name)
                yield name, tensor

    policy = Watched(config, Ranks())
    assert push(WeightSync(None, StageClock(), in_background=False), policy).done()
    assert gathered == [name for name, _ in Policy.weights(policy)]
