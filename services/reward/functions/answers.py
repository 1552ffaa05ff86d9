"""Verifies final answers."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from common.errors import ConfigError
from common.schemas import RewardItem
from common.sections import RewardSection
from services.reward.functions.base import DetailedRewardFunction, Message, Score, column, text_of
from services.reward.grade import MathGrader

_T = TypeVar("_T")


class MathRewardFunction(DetailedRewardFunction):
    r"""1.0 for a completion whose final answer is that of `ground_truth`, else 0.0.

    The final answer is the last balanced `\boxed{}` or `####` line, else the last number; `<think>` does not count. Numbers
    and fractions are compared exactly, everything else by math-verify in worker processes, which start when they are first
    needed and are killed at their deadline. An answer that cannot be graded is NaN (`scores` has the reason), never 0.

    Args:
        workers: processes.
        timeout_s: seconds that one answer may take in a worker.

    Raises:
        ConfigError: math-verify is not installed, or an argument is out of bounds.
    """

    name = "math"
    bounds_itself = True

    def __init__(self, workers: int = 2, timeout_s: float = 1.0) -> None:
        try:
            config = RewardSection(workers=workers, math_timeout_s=timeout_s)
        except ValueError as error:
            raise ConfigError(str(error), field="workers, timeout_s", remedy="see RewardSection") from None
        self._grader = MathGrader(config)
        self._loop: _Loop | None = None
        self._starting = threading.Lock()

    def scores(self, completions: list[list[Message]], **kwargs: Any) -> list[Score]:
        """Returns verdicts with their extracted answers. Raises InvalidInput for a `ground_truth` that states no answer."""
        golds = column(kwargs, "ground_truth", len(completions), self.name)
        items = [
            RewardItem.model_construct(response=text_of(completion), ground_truth=str(gold))
            for completion, gold in zip(completions, golds, strict=True)
        ]
        return self._running().run(self._grader.score(items))

    def close(self) -> None:
        """Ends the worker processes; the next call starts new ones. They also end with this process."""
        with self._starting:
            if self._loop is not None:
                self._loop.run(self._grader.pool.__aexit__())
                self._loop.close()
                self._loop, self._grader = None, MathGrader(self._grader.config)

    def _running(self) -> "_Loop":
        with self._starting:
            if self._loop is None:
                self._loop = _Loop()
                self._loop.run(self._grader.pool.__aenter__())
            return self._loop


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="math-graders", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
