"""Verifies final answers: extraction and exact comparison here, the rest in worker processes that can be killed."""

import asyncio
import json
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import Any, TypeVar

from common.errors import ConfigError, InvalidInput
from common.schemas import RewardItem
from common.sections import RewardSection
from services.reward.answers.exact import same_answer
from services.reward.answers.extract import MAX_ANSWER_CHARS, extract_answer, gold_answer
from services.reward.functions.base import DetailedRewardFunction, Message, Score, column, text_of
from services.reward.hosts import ProcessHost
from services.reward.pool import CallFailed, WorkerPool, WorkerSpec

_T = TypeVar("_T")
_YIELD_CHARS = 200_000  # text read before other requests get their turn: a few milliseconds
MEMORY_MB = 1024
"""Address space of one worker."""


class MathHost(ProcessHost):
    """Grades responses to problems with one final answer: 1.0 when it is right, 0.0 when it is wrong or missing.

    The owner enters and exits `pool`. Raises ConfigError when math-verify is not installed.
    """

    def __init__(self, config: RewardSection, on_restart: Callable[[], None] = lambda: None) -> None:
        if find_spec("math_verify") is None:
            remedy = "pip install 'rlhf-math[services]'"
            raise ConfigError("math-verify is not installed", field="reward.functions", value="math", remedy=remedy)
        arguments = {"memory_mb": MEMORY_MB, "alarm_s": math.ceil(config.math_timeout_s) + 1}
        spec = WorkerSpec("services.reward.answers.equivalence", arguments, MEMORY_MB, spares=config.workers)
        pool = WorkerPool(spec, config.workers, config.math_timeout_s, on_restart)
        super().__init__("math", pool, check=lambda item, where: _gold(item.ground_truth, f"{where}ground_truth"))
        self._require_stop = config.require_stop

    async def _score(self, items: Sequence[RewardItem]) -> list[Score]:
        golds = [_gold(item.ground_truth, f"items[{i}].ground_truth") for i, item in enumerate(items)]
        scores: list[Score] = []
        hard: list[int] = []  # answers that the workers must compare
        read = 0
        for i, (item, gold) in enumerate(zip(items, golds, strict=True)):
            answer = extract_answer(item.response)
            if answer is None:
                scores.append(Score(0.0, "unparsable", correct=False))
            else:
                cut = item.finish_reason == "length" and self._require_stop
                right = False if cut else same_answer(gold, answer)
                if right is None:
                    hard.append(i)
                scores.append(_verdict(answer, bool(right)))
            if (read := read + len(item.response) + 100) > _YIELD_CHARS:
                read = 0
                await asyncio.sleep(0)
        self._check_room(self.pool.unfinished, len(hard))
        batch = object()
        found = await asyncio.gather(*(self._compare(golds[i], str(scores[i].answer), batch) for i in hard))
        for i, score in zip(hard, found, strict=True):
            scores[i] = score
        return scores

    async def _compare(self, gold: str, answer: str, batch: object) -> Score:
        try:
            found = await self.pool.call(json.dumps([gold, answer]).encode(), batch)
        except CallFailed as error:
            return Score(None, error.status, correct=False, answer=answer, reason=str(error))
        if found == b"unparsable":
            return Score(0.0, "unparsable", correct=False, answer=answer)
        if found == b"unevaluated":
            return Score(0.0, "unevaluated", correct=False, answer=answer)
        return _verdict(answer, found == b"right")


def _verdict(answer: str, right: bool) -> Score:
    return Score(float(right), correct=right, answer=answer)


def _gold(ground_truth: str, field: str) -> str:
    """Returns the answer stated by a ground truth. Raises InvalidInput naming `field`."""
    gold = gold_answer(ground_truth)
    if gold is None:
        raise InvalidInput(
            "the ground truth states no answer",
            field=field,
            value=ground_truth,
            remedy=f"send an answer of 1 to {MAX_ANSWER_CHARS} characters, or text with a \\boxed{{}} or #### answer",
        )
    return gold


class MathRewardFunction(DetailedRewardFunction):
    r"""1.0 for a completion whose final answer equals that of `ground_truth`, else 0.0.

    The final answer is the last balanced `\boxed{}` or `####` line, else X of "the answer is X", else the last number;
    `<think>` does not count. Numbers are compared exactly, everything else in worker processes, which start when first
    needed and are killed at their deadline. An answer that cannot be graded is NaN (`scores` has the reason), never 0.
    If `ground_truth` is a number, an unevaluated expression (5 + 18 for 23) is 0.0, with the status `unevaluated`.

    Args:
        workers: number of worker processes.
        timeout_s: seconds that one answer may take in a worker.

    Raises:
        ConfigError: math-verify is not installed, or an argument is out of bounds.
    """

    name = "math"
    bounds_itself = True

    def __init__(self, workers: int = 2, timeout_s: float = 1.0) -> None:
        try:
            self._config = RewardSection(workers=workers, math_timeout_s=timeout_s)
        except ValueError as error:
            raise ConfigError(str(error), field="workers, timeout_s", remedy="see RewardSection") from None
        self._host = MathHost(self._config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def scores(self, completions: list[list[Message]], **kwargs: Any) -> list[Score]:
        """Returns verdicts with their extracted answers. Raises InvalidInput for a `ground_truth` that states no answer."""
        golds = column(kwargs, "ground_truth", len(completions), self.name)
        items = [
            RewardItem.model_construct(response=text_of(completion), ground_truth=str(gold))
            for completion, gold in zip(completions, golds, strict=True)
        ]
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name="math-graders", daemon=True).start()
                _run(self._loop, self._host.pool.__aenter__())
            loop = self._loop
        return _run(loop, self._host.score(items))

    def close(self) -> None:
        """Ends the worker processes; the next call starts new ones. They also end with this process."""
        with self._lock:
            if self._loop is not None:
                _run(self._loop, self._host.pool.__aexit__())
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop, self._host = None, MathHost(self._config)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    with closing(loop):
        loop.run_forever()


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of a coroutine in the loop of another thread."""
    return asyncio.run_coroutine_threadsafe(work, loop).result()
