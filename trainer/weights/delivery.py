"""Weights on their way to the engines while the trainer is at its next step (`trainer.max_staleness` above 0)."""

import threading
from typing import Protocol

from trainer.policy.policy import Learner
from trainer.rollouts.collector import Collector
from trainer.timing import PUBLISHING, StageClock
from trainer.weights.publisher import Weights

_LEFT_ALONE_S = 5.0
"""A run that fails does not wait longer than this for the weights that it is publishing."""


class Publishes(Protocol):
    """Brings weights to every rollout engine; returns when they generate with them. Called from any thread."""

    def publish(self, weights: Weights, version: int) -> None: ...


class Delivery:
    """Publishes a copy of the learner's weights in a thread of its own, and frees the slots of the groups that made them.

    At most one version is on its way: the next one waits for it, so versions arrive in order and a copy is held once. A slot
    becomes free only when its version is confirmed, so what is generated in it is never older than planned. When publishing
    fails, the collector has the reason, and the next step raises it.
    """

    def __init__(self, publisher: Publishes, learner: Learner, collector: Collector, clock: StageClock) -> None:
        self._publisher, self._learner, self._collector, self._clock = publisher, learner, collector, clock
        self._thread: threading.Thread | None = None

    def start(self, groups: int) -> None:
        """Begins to publish the weights as they are now; `groups` groups made them. The other ranks share theirs meanwhile."""
        with self._clock.stage("publish"):
            self.settle()
            weights = [(name, tensor.to("cpu", copy=True)) for name, tensor in self._learner.weights()]
        arguments = (weights, self._learner.step, groups)
        self._thread = threading.Thread(target=self._publish, args=arguments, name="publisher", daemon=True)
        self._thread.start()

    def _publish(self, weights: Weights, version: int, groups: int) -> None:
        try:
            with self._clock.stage(PUBLISHING):
                self._publisher.publish(weights, version)
            self._collector.release(groups)
        except BaseException as error:
            self._collector.fail(error)

    def settle(self) -> None:
        """Returns when the engines serve what was published last. Raises why they do not, or why collecting stopped."""
        if self._thread is not None:
            self._thread.join()
        self._collector.check()

    def leave(self) -> None:
        """Lets a version that is on its way arrive, if that takes no longer than a few seconds; raises nothing."""
        if self._thread is not None:
            self._thread.join(_LEFT_ALONE_S)
