"""`WeightSync.push` sends the policy's weights to every rollout engine, over any transport."""

import threading
from collections import deque
from concurrent.futures import Future
from typing import Protocol

from learning.staging import Staging
from trainer.observe.timing import PUBLISHING, StageClock
from trainer.policy.policy import Policy
from trainer.weights.publisher import Weights
from trainer.weights.turns import Turns

_UNSHARED = Turns()
_LAST_PUSH_S = 5.0
"""A failing run waits this long for the weights that it is publishing."""


class WeightPublisher(Protocol):
    """Sends weights to every rollout engine, and returns when all generate with them. Called from
    any thread.
    """

    def publish(self, weights: Weights, version: int) -> None: ...


class WeightSync:
    """The weight sync of a rank above 0: it takes part in gathering the weights that rank 0
    publishes.
    """

    def __init__(self, turns: Turns = _UNSHARED) -> None:
        self._turns = turns

    def push(self, policy: Policy) -> "Future[None]":
        """Publishes the weights as version `policy.step`; the future is done when the engines serve
        them.

        A collective call. Raises PublishFailed, directly or through the future, when no engine
        serves them.
        """
        deque(policy.weights(), maxlen=0)
        self._turns.give()
        return _served()

    def wait(self) -> None:
        """Waits until the engines serve the newest version. Raises the error of the push."""

    def close(self) -> None:
        """Waits a few seconds at most for a version in flight; raises nothing."""


class PublishedWeights(WeightSync):
    """Rank 0's weight sync; with `in_background` `push` returns before the engines serve the
    weights.

    A thread then publishes a copy of the weights. At most one version is in flight: the next one
    waits for it, so versions arrive in order and only one copy is held.
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        clock: StageClock,
        in_background: bool,
        turns: Turns = _UNSHARED,
    ) -> None:
        super().__init__(turns)
        self._publisher, self._clock, self._in_background = publisher, clock, in_background
        self._thread: threading.Thread | None = None
        self._served = _served()
        self._staging: Staging | None = None

    def push(self, policy: Policy) -> "Future[None]":
        with self._clock.stage("publish"):
            if not (self._in_background or self._turns.shared):
                self._publisher.publish(policy.weights(), policy.step)
                return self._served
            self._served.result()
            self._staging = self._staging or Staging(policy.ranks.device)
            weights = [(name, self._staging.to_host(tensor)) for name, tensor in policy.weights()]
            self._staging.wait()
            self._turns.give()
            if not self._in_background:
                self._publisher.publish(weights, policy.step)
                return self._served
        self._served = Future()
        arguments = (weights, policy.step, self._served)
        self._thread = threading.Thread(
            target=self._publish, args=arguments, name="publisher", daemon=True
        )
        self._thread.start()
        return self._served

    def _publish(self, weights: Weights, version: int, served: "Future[None]") -> None:
        try:
            with self._clock.stage(PUBLISHING):
                self._publisher.publish(weights, version)
        except BaseException as error:  # raised in the training loop
            served.set_exception(error)
        else:
            served.set_result(None)

    def wait(self) -> None:
        with self._clock.stage("publish"):
            self._served.result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(_LAST_PUSH_S)


def _served() -> "Future[None]":
    served: Future[None] = Future()
    served.set_result(None)
    return served
