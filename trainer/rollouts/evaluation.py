"""Evaluation on the held-out split, over the same services as training."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from common.config import Config
from common.errors import InvalidInput
from common.rollout_client import GenerationFailed
from common.schemas import Completion, Prompt, RewardResult
from trainer.background import LoopThread
from trainer.rollouts.prompts import Prompter, reward_items, sampling_seed
from trainer.rollouts.services import Services

SEED_OFFSET = 1 << 20
"""Keeps the seeds of evaluation apart from those of training."""


@dataclass(frozen=True)
class Answer:
    """One greedy answer to a held-out problem."""

    prompt_id: str
    prompt: str
    ground_truth: str
    response: str
    correct: bool


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation measured."""

    step: int
    accuracy: float
    """Share of held-out problems whose greedy answer is correct."""
    standard_error: float
    """Of the accuracy: sqrt(a(1-a)/n)."""
    num_samples: int
    pass_at_k: float | None
    """Share of problems with at least one correct answer among k sampled ones; None when it was not measured."""
    k: int
    answers: list[Answer]

    def summary(self) -> dict[str, Any]:
        """Everything but the answers."""
        return {key: value for key, value in asdict(self).items() if key != "answers"}


class Evaluator:
    """The evaluation of a rank above 0: rank 0 evaluates."""

    last: Evaluation | None = None

    def prepare(self) -> None:
        """Gets the held-out problems."""

    def evaluate(self, step: int, pass_samples: int) -> Evaluation | None:
        """Evaluates the weights that the engines serve, those after `step` steps.

        pass@k is measured on the first `pass_samples` problems. None on ranks above 0 and without held-out problems.
        """
        return None


class ServedEvaluator(Evaluator):
    """Rank 0's evaluation, over the services of training.

    Args:
        config: of the run.
        services: clients, used in `loop`.
        prompter: tokenises prompts.
        loop: event loop in a thread of its own.
    """

    def __init__(self, config: Config, services: Services, prompter: Prompter, loop: LoopThread) -> None:
        self._config, self._services, self._prompter, self._loop = config, services, prompter, loop
        self._held_out: list[Prompt] = []

    def prepare(self) -> None:
        if count := self._config.trainer.eval_samples:
            self._held_out = self._loop.call(self._services.data.eval_prompts(count))

    def evaluate(self, step: int, pass_samples: int) -> Evaluation | None:
        """See `Evaluator`. Raises ServiceError when an answer or a grade cannot be had."""
        if not self._held_out:
            return None
        arguments = (self._config, self._services, self._prompter, self._held_out, step, pass_samples)
        self.last = self._loop.call(evaluate(*arguments))
        return self.last


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased pass@k of one problem (Chen et al. 2021, arXiv:2107.03374, eq. 1): 1 − C(n−c, k) / C(n, k).

    Raises ValueError when fewer than k samples were drawn.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} correct among {samples} samples is not defined")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


async def evaluate(
    config: Config, services: Services, prompter: Prompter, prompts: Sequence[Prompt], step: int, pass_samples: int
) -> Evaluation:
    """Greedy accuracy over `prompts`, and pass@k over the first `pass_samples` of them.

    Raises ServiceError when a completion or a grade cannot be had: an evaluation is complete or it is not one.
    """
    if not prompts:
        raise InvalidInput(
            "there is nothing to evaluate on", field="trainer.eval_samples", remedy="give the data set a held-out split"
        )
    k = config.trainer.eval_k
    greedy, sampled = await asyncio.gather(
        asyncio.gather(*(_answer(config, services, prompter, prompt, i, 1, 0.0) for i, prompt in enumerate(prompts))),
        asyncio.gather(
            *(
                _answer(config, services, prompter, prompt, i, k, config.sampling.temperature)
                for i, prompt in enumerate(prompts[:pass_samples])
            )
        ),
    )
    answers = [
        Answer(prompt.id, prompt.prompt, prompt.ground_truth, completions[0].text, results[0].correct)
        for prompt, (completions, results) in zip(prompts, greedy, strict=True)
    ]
    accuracy = sum(answer.correct for answer in answers) / len(answers)
    passed = [pass_at_k(k, sum(result.correct for result in results), k) for _, results in sampled]
    return Evaluation(
        step=step,
        accuracy=accuracy,
        standard_error=math.sqrt(accuracy * (1 - accuracy) / len(answers)),
        num_samples=len(answers),
        pass_at_k=sum(passed) / len(passed) if passed else None,
        k=k,
        answers=answers,
    )


async def _answer(
    config: Config, services: Services, prompter: Prompter, prompt: Prompt, index: int, n: int, temperature: float
) -> tuple[list[Completion], list[RewardResult]]:
    completions = await services.rollout.generate(
        prompter.token_ids(prompt),
        n=n,
        max_new_tokens=config.sampling.max_new_tokens,
        temperature=temperature,
        stop_token_ids=prompter.stop_token_ids,
        sampling_seed=sampling_seed(config.seed, SEED_OFFSET + index),
        deadline_s=config.sampling.request_timeout_s,
    )
    graded = await services.reward.batch_reward(reward_items(prompt, completions))
    for result in graded.results:
        if result.reward is None:
            raise GenerationFailed(f"an answer to {prompt.id} could not be graded: {result.status}", code="not_graded")
    return completions, graded.results
