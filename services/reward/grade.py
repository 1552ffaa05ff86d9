"""Grades answers: extraction and the exact path here, everything else in killable workers. Knows nothing of HTTP."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from common.errors import ConfigError, InvalidInput
from common.schemas import RewardItem
from common.sections import RewardSection
from services.reward.exact import same_answer
from services.reward.extract import MAX_ANSWER_CHARS, extract_answer, gold_answer
from services.reward.functions.base import Score
from services.reward.hosts import Host
from services.reward.pool import WorkerPool, WorkerSpec

_YIELD_CHARS = 200_000  # text read before other requests get their turn: a few milliseconds
MEMORY_MB = 1024
"""Address space of one worker."""


class MathGrader(Host):
    """Grades responses to problems that have one final answer: 1.0 when it is right, 0.0 when it is wrong or missing.

    Its owner enters and exits `pool`. Raises ConfigError when math-verify is not installed.
    """

    def __init__(self, config: RewardSection, on_restart: Callable[[], None] = lambda: None) -> None:
        if find_spec("math_verify") is None:
            raise ConfigError("math-verify is not installed", remedy="pip install 'rlhf-math[services]'")
        super().__init__("math", lambda item, where: _gold(item.ground_truth, f"{where}ground_truth"))
        self.config = config
        arguments = {"memory_mb": MEMORY_MB, "alarm_s": math.ceil(config.math_timeout_s) + 1}
        spec = WorkerSpec("services.reward.equivalence", arguments, MEMORY_MB)
        self.pool = WorkerPool(spec, config.workers, config.math_timeout_s, on_restart)

    @property
    def problem(self) -> str | None:
        """Why answers cannot be graded now, or None."""
        return self.pool.problem

    async def _score(self, items: Sequence[RewardItem]) -> list[Score]:
        golds = [_gold(item.ground_truth, f"items[{i}].ground_truth") for i, item in enumerate(items)]
        scores: list[Score | None] = []
        hard: dict[int, str] = {}  # index -> answer that the workers must compare
        read = 0
        for i, (item, gold) in enumerate(zip(items, golds, strict=True)):
            answer = extract_answer(item.response)
            score = self._grade_here(item, gold, answer)
            if score is None and answer is not None:
                hard[i] = answer
            scores.append(score)
            if (read := read + len(item.response) + 100) > _YIELD_CHARS:
                read = 0
                await asyncio.sleep(0)
        self._check_room(self.pool.unfinished, len(hard))
        verdicts = await asyncio.gather(*(self._grade_there(golds[i], answer) for i, answer in hard.items()))
        for i, verdict in zip(hard, verdicts, strict=True):
            scores[i] = verdict
        return [score for score in scores if score is not None]

    def _grade_here(self, item: RewardItem, gold: str, answer: str | None) -> Score | None:
        """Returns the score where no worker is needed, else None."""
        if answer is None:
            return Score(0.0, "unparsable", correct=False)
        if item.finish_reason == "length" and self.config.require_stop:
            return _graded(answer, False)
        correct = same_answer(gold, answer)
        return None if correct is None else _graded(answer, correct)

    async def _grade_there(self, gold: str, answer: str) -> Score:
        verdict = await self.pool.call(json.dumps([gold, answer]).encode())
        if isinstance(verdict, str):
            return Score(None, verdict, correct=False, answer=answer)
        return _graded(answer, verdict == b"right")


def _gold(ground_truth: str, field: str) -> str:
    """Returns the answer that a ground truth states. Raises InvalidInput naming `field`."""
    gold = gold_answer(ground_truth)
    if gold is None:
        raise InvalidInput(
            "the ground truth states no answer",
            field=field,
            value=ground_truth,
            remedy=f"send an answer of 1 to {MAX_ANSWER_CHARS} characters, or a text with a \\boxed{{}} or #### answer",
        )
    return gold


def _graded(answer: str, correct: bool) -> Score:
    return Score(float(correct), correct=correct, answer=answer)
