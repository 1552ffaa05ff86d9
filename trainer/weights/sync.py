"""`WeightSync` sends the policy's weights to every rollout engine, over any transport.

What it calls is `trainer.weights.publisher` for a job group, whose other end is
`services.rollout.weights`, and `trainer.backends.engines` for engines of this process.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from common.process.daemon_threads import in_daemon_thread
from common.weights.checksums import Hasher
from learning.staging import Staging
from trainer.policy.policy import Policy
from trainer.timing import PUBLISHING, StageClock
from trainer.weights.gpu_lease import EngineMemory
from trainer.weights.versions import Weights

_LAST_PUBLISHING_S = 5.0
"""A failing run waits this long for the weights that it is publishing."""


class WeightPublisher(EngineMemory, Protocol):
    """Sends weights to every rollout engine. Called from any thread."""

    def publish(self, weights: Weights, version: int) -> None:
        """Returns when all engines generate with these weights."""


class WeightSync:
    """Publishes the weights of a run. Ranks above 0 have no publisher, and take part in gathering
    what rank 0 publishes.

    With `in_background` a thread publishes while the run goes on. At most one version is in flight:
    the next one waits for it, so versions arrive in order and only one copy is held. The thread
    calls `may_load` first, which returns when the engines may load new weights. With `copies`, the
    weights are copied even if the run waits for them: the engines need the GPU.
    """

    checksum: str | None = None
    """The checksum of the newest published weights (`WeightsChecksum`); None where not computed."""

    def __init__(
        self,
        publisher: WeightPublisher | None,
        clock: StageClock,
        in_background: bool,
        *,
        copies: bool = False,
        may_load: Callable[[], None] = lambda: None,
        has_checksums: bool = False,
    ) -> None:
        self._publisher = publisher
        self._clock = clock
        self._in_background = in_background
        self._copies = copies or in_background
        self._may_load = may_load
        self._has_checksums = has_checksums
        self._served: Future[None] = Future()
        self._served.set_result(None)  # nothing is in flight
        self._staging: Staging | None = None

    def gather(self, policy: Policy) -> Weights:
        """Returns the weights to publish: a copy in host memory, or tensors that are gathered while
        they are published. Call `publish` next. A collective call.

        Raises the error of the version in flight, for which a copy waits.
        """
        if self._publisher is None:
            deque(policy.weights(), maxlen=0)  # gathers every tensor and keeps none
            return []
        if not self._copies:
            return self._weights(policy)
        with self._clock.stage("publish"):
            self._served.result()
            if self._staging is None:
                self._staging = Staging(policy.ranks.device)
            copies = [
                (name, self._staging.to_host(tensor)) for name, tensor in self._weights(policy)
            ]
            self._staging.wait()
        return copies

    def publish(self, weights: Weights, version: int) -> "Future[None]":
        """Publishes gathered weights; the future is done when the engines serve them.

        A collective call. Raises PublishFailed, directly or through the future, when no engine
        serves them.
        """
        if self._publisher is None:
            return self._served
        if self._in_background:
            publish = partial(self._publish, self._publisher, weights, version)
            self._served = in_daemon_thread(publish, "publisher")
        else:
            with self._clock.stage("publish"):
                self._publisher.publish(weights, version)
        return self._served

    def _weights(self, policy: Policy) -> Iterator[tuple[str, Tensor]]:
        """Yields the policy's weights, and sets their checksum at the end."""
        if not self._has_checksums:
            yield from policy.weights()
            return
        checksum = WeightsChecksum()
        yield from checksum.over(policy.weights())
        self.checksum = checksum.hexdigest()

    def _publish(self, publisher: WeightPublisher, weights: Weights, version: int) -> None:
        self._may_load()
        with self._clock.stage(PUBLISHING):
            publisher.publish(weights, version)

    def wait(self) -> None:
        """Waits until the engines serve the newest version. Raises the error of the publishing."""
        with self._clock.stage("publish"):
            self._served.result()

    def close(self) -> None:
        """Waits a few seconds at most for a version in flight; raises nothing."""
        wait([self._served], _LAST_PUBLISHING_S)


class WeightsChecksum:
    """The checksum of the weights that have passed through `over`, by which two runs are compared:
    their names, dtypes, shapes and values, in order.
    """

    def __init__(self) -> None:
        self._digest = Hasher()

    def over(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights unchanged and adds them to the checksum."""
        for name, tensor in weights:
            self._digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            on_host = tensor.detach().contiguous().cpu()
            if on_host.numel():
                self._digest.update(memoryview(on_host.reshape(-1).view(torch.uint8).numpy()))
            yield name, tensor

    def hexdigest(self) -> str:
        """Returns 32 hex digits."""
        return self._digest.hexdigest()
