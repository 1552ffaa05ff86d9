"""`WeightSync.push` sends the policy's weights to every rollout engine, over any transport."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from common.process.daemon_threads import in_daemon_thread
from learning.staging import Staging
from trainer.policy.policy import Policy
from trainer.timing import PUBLISHING, StageClock
from trainer.weights.checksum import WeightsChecksum
from trainer.weights.gpu_lease import EngineMemory, GpuLease
from trainer.weights.versions import Weights

_UNSHARED = GpuLease()
_LAST_PUSH_S = 5.0
"""A failing run waits this long for the weights that it is publishing."""


class WeightPublisher(EngineMemory, Protocol):
    """Sends weights to every rollout engine. Called from any thread."""

    def publish(self, weights: Weights, version: int) -> None:
        """Returns when all engines generate with these weights."""


class WeightSync:
    """The weight sync of a rank above 0: it takes part in gathering the weights that rank 0
    publishes.
    """

    checksum: str | None = None
    """The checksum of the newest pushed weights (`WeightsChecksum`); None where not computed."""

    def __init__(self, lease: GpuLease = _UNSHARED) -> None:
        self._lease = lease

    def push(self, policy: Policy) -> "Future[None]":
        """Publishes the weights as version `policy.step`; the future is done when the engines serve
        them.

        A collective call. Raises PublishFailed, directly or through the future, when no engine
        serves them.
        """
        deque(policy.weights(), maxlen=0)  # gathers every tensor and keeps none
        self._lease.release()
        return _done()

    def wait(self) -> None:
        """Waits until the engines serve the newest version. Raises the error of the push."""

    def close(self) -> None:
        """Waits a few seconds at most for a version in flight; raises nothing."""


class LeaderWeightSync(WeightSync):
    """Rank 0's weight sync; with `in_background` `push` returns before the engines serve the
    weights.

    A thread then publishes a copy of the weights. At most one version is in flight: the next one
    waits for it, so versions arrive in order and only one copy is held. The thread
    calls `may_load` first, which returns when the engines may load new weights.
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        clock: StageClock,
        in_background: bool,
        lease: GpuLease = _UNSHARED,
        *,
        may_load: Callable[[], None] = lambda: None,
        has_checksums: bool = False,
    ) -> None:
        super().__init__(lease)
        self._may_load = may_load
        self._has_checksums = has_checksums
        self._publisher = publisher
        self._clock = clock
        self._in_background = in_background
        self._served = _done()
        self._staging: Staging | None = None

    def push(self, policy: Policy) -> "Future[None]":
        with self._clock.stage("publish"):
            needs_copy = self._in_background or self._lease.shared
            if not needs_copy:
                with self._weights(policy) as gathered:
                    self._publisher.publish(gathered, policy.step)
                return self._served

            self._served.result()
            weights = self._copy(policy)
            self._lease.release()
            if not self._in_background:
                self._publisher.publish(weights, policy.step)
                return self._served

        publish = partial(self._publish, weights, policy.step)
        self._served = in_daemon_thread(publish, "publisher")
        return self._served

    def _copy(self, policy: Policy) -> Weights:
        """Returns a copy of the weights in host memory."""
        if self._staging is None:
            self._staging = Staging(policy.ranks.device)
        with self._weights(policy) as gathered:
            weights = [(name, self._staging.to_host(tensor)) for name, tensor in gathered]
        self._staging.wait()
        return weights

    @contextmanager
    def _weights(self, policy: Policy) -> Iterator[Weights]:
        """Yields the policy's weights, which are read inside the block; sets their checksum after
        it.
        """
        if not self._has_checksums:
            yield policy.weights()
            return
        checksum = WeightsChecksum()
        yield checksum.over(policy.weights())
        self.checksum = checksum.hexdigest()

    def _publish(self, weights: Weights, version: int) -> None:
        self._may_load()
        with self._clock.stage(PUBLISHING):
            self._publisher.publish(weights, version)

    def wait(self) -> None:
        with self._clock.stage("publish"):
            self._served.result()

    def close(self) -> None:
        wait([self._served], _LAST_PUSH_S)


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future
