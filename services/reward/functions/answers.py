"""Verifies final answers: extraction and exact comparison here, the rest in worker processes that
can be killed.
"""

import asyncio
import json
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

from common.errors import ConfigError, InvalidInput
from common.process.loop_thread import LoopThread
from common.prompts.stated_answers import MAX_ANSWER_CHARS
from common.settings.rewards import MathReward
from common.settings.sections import RewardSection
from common.wire.schemas import RewardItem, RewardStatus
from services.reward.answers.exact import same_answer
from services.reward.answers.extract import extract_answer, gold_answer
from services.reward.functions.base import (
    Completions,
    DetailedRewardFunction,
    Score,
    Scores,
    column,
    text_of,
)
from services.reward.hosts import ProcessHost
from services.reward.pool import CallFailed, WorkerPool, WorkerSpec

_YIELD_CHARS = 200_000  # text read before other requests get their turn: a few milliseconds
_NO_VALUE = "it cannot be read as a value: only the same text matches it"
# Address space of one worker.
MEMORY_MB = 1024


class MathHost(ProcessHost):
    """Grades responses to problems with one final answer: 1.0 when it is right, 0.0 when it is
    wrong or missing.

    The owner enters and exits `pool`. Raises ConfigError when math-verify is not installed.
    """

    verifies_answers = True

    def __init__(
        self, config: RewardSection, on_restart: Callable[[], None] = lambda: None
    ) -> None:
        if find_spec("math_verify") is None:
            raise ConfigError(
                "math-verify is not installed",
                field="reward.functions",
                value="math",
                remedy="pip install 'rlhf-math[services]'",
            )
        entry = config.function(MathReward) or MathReward()
        arguments = {"memory_mb": MEMORY_MB, "alarm_s": math.ceil(entry.timeout_s) + 1}
        spec = WorkerSpec(
            "services.reward.answers.equivalence", arguments, MEMORY_MB, spares=config.workers
        )
        pool = WorkerPool(spec, config.workers, timeout_s=entry.timeout_s, on_restart=on_restart)
        super().__init__("math", pool, gives_verdicts=True)
        self._require_stop = config.require_stop

    def check(self, item: RewardItem, where: str) -> None:
        """Raises InvalidInput, also for a ground truth that states no answer."""
        super().check(item, where)
        _gold(item, where)

    async def _score(self, items: Sequence[RewardItem]) -> Scores:
        golds = [_gold(item, f"items[{i}].") for i, item in enumerate(items)]
        scores: Scores = []
        hard: list[int] = []  # answers that the workers must compare
        read = 0
        extract = cache(extract_answer)  # a policy that has learned says the same again
        for i, (item, gold) in enumerate(zip(items, golds, strict=True)):
            answer = extract(item.response)
            # With `require_stop`, a cut answer earns nothing, so no worker need compare it.
            is_cut = item.finish_reason == "length" and self._require_stop
            right = False if answer is None or is_cut else same_answer(gold, answer)
            if right is None:
                hard.append(i)
            status: RewardStatus = "unparsable" if answer is None else "ok"
            is_right = bool(right)
            scores.append(Score(float(is_right), status, correct=is_right, answer=answer))

            read += len(item.response) + 100
            if read > _YIELD_CHARS:
                read = 0
                await asyncio.sleep(0)

        self._check_room(self.pool.unfinished, len(hard))
        batch = object()
        found = await asyncio.gather(
            *(self._compare(golds[i], str(scores[i].answer), batch) for i in hard)
        )
        for i, score in zip(hard, found, strict=True):
            scores[i] = score
        return scores

    async def _compare(self, gold: str, answer: str, batch: object) -> Score:
        try:
            found = (await self.pool.call(json.dumps([gold, answer]).encode(), batch)).decode()
        except CallFailed as error:
            return Score(None, error.status, correct=False, answer=answer, reason=str(error))

        if found.startswith("error"):
            return Score(None, "error", correct=False, answer=answer, reason=found)
        is_right = found in ("right", "identical")
        status = found if found in ("unparsable", "unevaluated") else "ok"
        return Score(
            float(is_right),
            cast(RewardStatus, status),
            correct=is_right,
            answer=answer,
            reason=_NO_VALUE if found == "identical" else "",
        )


def _gold(item: RewardItem, where: str) -> str:
    """Returns the answer stated by a ground truth. Raises InvalidInput."""
    gold = gold_answer(item.ground_truth)
    if gold is None:
        raise InvalidInput(
            "the ground truth states no answer",
            field=f"{where}ground_truth",
            value=item.ground_truth,
            remedy=f"send an answer of 1 to {MAX_ANSWER_CHARS} characters, "
            "or text with a \\boxed{} or #### answer",
        )
    return gold


class MathRewardFunction(DetailedRewardFunction):
    r"""1.0 for a completion whose final answer equals that of `ground_truth`, else 0.0.

    The final answer is the last one that is stated: in a box, on a `####` line, in `<answer>` tags
    or after "the answer is"; else the last value. Thoughts do not count. Numbers are compared
    exactly, everything else in worker processes, which start when first needed and are killed at
    their deadline. An answer that cannot be graded is NaN (`scores` has the reason), never 0. If
    `ground_truth` is a number, an unevaluated expression (5 + 18 for 23) is 0.0, with the status
    `unevaluated`.

    Args:
        workers: number of worker processes.
        timeout_s: seconds that one answer may take in a worker.

    Raises:
        ConfigError: math-verify is not installed, or an argument is out of bounds.
    """

    name = "math"
    bounds_itself = True
    gives_verdicts = True
    verifies_answers = True

    def __init__(self, workers: int = 2, timeout_s: float = 1.0) -> None:
        try:
            self._config = RewardSection(
                workers=workers, functions=[MathReward(timeout_s=timeout_s)]
            )
        except ValueError as error:
            raise ConfigError(
                str(error), field="workers, timeout_s", remedy="see RewardSection, MathReward"
            ) from None
        MathHost(self._config)  # raises now what is missing
        self._host: MathHost | None = None
        self._lock = threading.Lock()

    def scores(self, completions: Completions, **kwargs: Any) -> Scores:
        """Returns verdicts with their extracted answers. Raises InvalidInput for a `ground_truth`
        that states no answer.
        """
        golds = column(kwargs, "ground_truth", len(completions), self.name)
        for gold in golds:
            if isinstance(gold, list | tuple) and len(gold) != 1:
                raise InvalidInput(
                    "the ground truth is a list, but not a list of exactly one answer",
                    field="ground_truth",
                    value=gold,
                    remedy="give one text, such as '1, 2' for two values",
                )
        items = [
            RewardItem.model_construct(response=text_of(completion), ground_truth=str(gold))
            for completion, gold in zip(completions, golds, strict=True)
        ]
        with self._lock:
            if self._host is None:
                self._host = MathHost(self._config)
                self._loop = LoopThread("math-graders")
                self._loop.open()
                # The workers live as long as the loop.
                self._loop.start(_keep(self._host.pool))
                self._end = weakref.finalize(self, self._loop.close)
            # Taken inside the lock: `close` in another thread may drop them at any time.
            host = self._host
            loop = self._loop
        return loop.call(host.score(items))

    def close(self) -> None:
        """Ends the worker processes; the next call starts new ones.

        They also end with this object, and with this process.
        """
        with self._lock:
            if self._host is not None:
                self._end()
                self._host = None


async def _keep(pool: WorkerPool) -> None:
    async with pool:
        await asyncio.Event().wait()
