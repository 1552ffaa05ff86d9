"""Evaluation: greedy accuracy, and pass@k of sampled answers."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from common.clients import RewardClient
from common.config import Config
from common.errors import ConfigError, InvalidInput
from common.rollout_client import GenerationFailed, RolloutClient
from common.schemas import FinishReason, Prompt, RewardResult
from trainer.background import LoopThread
from trainer.rollouts.prompts import Prompter, reward_items, sampling_seed
from trainer.rollouts.services import Services

_T = TypeVar("_T")
SEED_OFFSET = 1 << 20
"""Separates the seeds of evaluation from those of training."""


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
    """The result of one evaluation."""

    step: int
    accuracy: float
    """Share of held-out problems whose greedy answer is correct."""
    standard_error: float
    """Standard error of the accuracy a: sqrt(a(1-a)/n)."""
    num_samples: int
    pass_at_k: float | None
    """Share of problems with at least one correct answer among k sampled ones; None when it was not measured."""
    k: int
    answers: list[Answer]
    mean_reward: float = 0.0
    """Mean reward of the greedy answers."""
    verified: bool = True
    """Whether the rewards say what is correct; else an answer counts as correct with a reward above 0.5."""

    def summary(self) -> dict[str, Any]:
        """Returns all fields but the answers."""
        return {key: value for key, value in asdict(self).items() if key != "answers"}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased pass@k of one problem (Chen et al. 2021, arXiv:2107.03374, eq. 1): 1 − C(n−c, k) / C(n, k).

    Raises ValueError for fewer than k samples.
    """
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} correct among {samples} samples is not defined")
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


@dataclass(frozen=True)
class GeneratedAnswer:
    """One answer of a model."""

    text: str
    finish_reason: FinishReason
    tokens: int | None
    """Length with the end-of-sequence token; None where the server does not report it."""


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of every request of an evaluation."""

    system_prompt: str
    max_new_tokens: int
    temperature: float
    """Temperature of the k samples; the first answer to every problem is greedy."""
    seed: int
    timeout_s: float
    """Limit of one request, retries included."""
    slots: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)
    """Bounds the requests in flight: a semaphore."""


class Generator(Protocol):
    """Answers problems."""

    async def generate(self, prompt: Prompt, index: int, n: int, greedy: bool) -> list[GeneratedAnswer]:
        """Returns n answers to the problem at `index` of the data set. Raises ServiceError when one is missing."""


class TokenGenerator:
    """Generates over SGLang's `/generate`, tokens in and tokens out, exactly as in training.

    `context` limits the tokens of a prompt and its answer together; None leaves that to the server.
    """

    def __init__(self, client: RolloutClient, prompter: Prompter, settings: GenerationSettings, context: int | None) -> None:
        self._client, self._prompter, self._settings, self._context = client, prompter, settings, context

    async def generate(self, prompt: Prompt, index: int, n: int, greedy: bool) -> list[GeneratedAnswer]:
        settings, ids = self._settings, self._prompter.token_ids(prompt)
        async with settings.slots:
            answers = await self._client.answers(
                ids,
                n=n,
                max_new_tokens=min(settings.max_new_tokens, self._room(prompt, len(ids))),
                temperature=0.0 if greedy else settings.temperature,
                stop_token_ids=self._prompter.stop_token_ids,
                sampling_seed=sampling_seed(settings.seed, SEED_OFFSET + index),
                deadline_s=settings.timeout_s,
                logprobs=False,
            )
        found = []
        for answer in answers:
            try:
                text, meta = answer["text"], answer["meta_info"]
                finish, tokens = meta["finish_reason"]["type"], int(meta["completion_tokens"])
            except (KeyError, TypeError, ValueError) as error:
                raise GenerationFailed(f"this is no answer of /generate: {error!r}", value=answer) from None
            found.append(finished(prompt, text, finish, tokens))
        return found

    def _room(self, prompt: Prompt, length: int) -> int:
        if self._context is None:
            return self._settings.max_new_tokens
        if (room := self._context - length) < 1:
            raise ConfigError(
                f"the problem {prompt.id} has {length} tokens, and the model's context is {self._context}",
                field="dataset",
                value=prompt.prompt,
                remedy="leave it out, or take a model with a longer context",
            )
        return room


def finished(prompt: Prompt, text: Any, finish: Any, tokens: int | None) -> GeneratedAnswer:
    """Returns a complete answer. Raises GenerationFailed for one that was aborted or filtered: it is not an empty one."""
    if finish not in ("stop", "length") or not isinstance(text, str):
        raise GenerationFailed(f"the answer to {prompt.id} ended with {finish}", value=text)
    return GeneratedAnswer(text, finish, tokens)


async def together(work: Sequence[Coroutine[Any, Any, _T]], done: Callable[[], None] = lambda: None) -> list[_T]:
    """Runs coroutines together; returns their results in order, and calls `done` after each. Raises the first failure."""

    async def one(coroutine: Coroutine[Any, Any, _T]) -> _T:
        result = await coroutine
        done()
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(coroutine)) for coroutine in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def graded_answers(
    generator: Generator, reward: RewardClient, prompt: Prompt, index: int, samples: int
) -> list[tuple[GeneratedAnswer, RewardResult]]:
    """Returns the greedy answer to a problem, and `samples` sampled ones, with their grades."""
    greedy = generator.generate(prompt, index, 1, greedy=True)
    sampled = [generator.generate(prompt, index, samples, greedy=False)] if samples else []
    written = [answer for part in await together([greedy, *sampled]) for answer in part]
    graded = await reward.batch_reward(reward_items(prompt, written))
    return list(zip(written, graded.rewards, strict=True))


async def evaluate(
    config: Config, services: Services, prompter: Prompter, prompts: Sequence[Prompt], step: int, pass_samples: int
) -> Evaluation:
    """Measures greedy accuracy on `prompts`, and pass@k on the first `pass_samples` of them.

    Raises ServiceError when an answer or a grade is missing: an evaluation is complete or it fails.
    """
    if not prompts:
        raise InvalidInput(
            "there is nothing to evaluate on", field="trainer.eval_samples", remedy="give the data set a held-out split"
        )
    sampling, k = config.sampling, config.trainer.eval_k
    settings = GenerationSettings("", sampling.max_new_tokens, sampling.temperature, config.seed, sampling.request_timeout_s)
    generator = TokenGenerator(services.rollout, prompter, settings, None)
    samples = [k if i < pass_samples else 0 for i in range(len(prompts))]
    work = [graded_answers(generator, services.reward, prompt, i, samples[i]) for i, prompt in enumerate(prompts)]
    found, answers = await together(work), []
    for prompt, graded in zip(prompts, found, strict=True):
        for _, result in graded:
            if result.reward is None:
                raise GenerationFailed(
                    f"an answer to {prompt.id} could not be graded: {result.reason or result.status}", code="not_graded"
                )
        answers.append(Answer(prompt.id, prompt.prompt, prompt.ground_truth, graded[0][0].text, graded[0][1].correct))
    accuracy = sum(answer.correct for answer in answers) / len(answers)
    passed = [pass_at_k(k, sum(result.correct for _, result in graded[1:]), k) for graded in found[:pass_samples]]
    return Evaluation(
        step=step,
        accuracy=accuracy,
        standard_error=math.sqrt(accuracy * (1 - accuracy) / len(answers)),
        num_samples=len(answers),
        pass_at_k=sum(passed) / len(passed) if passed else None,
        k=k,
        answers=answers,
        mean_reward=sum(graded[0][1].reward or 0.0 for graded in found) / len(found),
        verified=all(result.verified for graded in found for _, result in graded),
    )


class Evaluator:
    """The evaluation of a rank above 0: rank 0 evaluates."""

    last: Evaluation | None = None

    def prepare(self) -> None:
        """Fetches the held-out problems."""

    def evaluate(self, step: int, pass_samples: int) -> Evaluation | None:
        """Evaluates the weights that the engines serve, those after `step` steps.

        pass@k is measured on the first `pass_samples` problems. None on ranks above 0 and without held-out problems.
        """
        return None


class ServedEvaluator(Evaluator):
    """Rank 0's evaluation, over the services of training."""

    def __init__(self, config: Config, services: Services, prompter: Prompter, loop: LoopThread) -> None:
        self._config, self._services, self._prompter, self._loop = config, services, prompter, loop
        self._held_out: list[Prompt] = []

    def prepare(self) -> None:
        if count := self._config.trainer.eval_samples:
            self._held_out = self._loop.call(self._services.data.eval_prompts(count))

    def evaluate(self, step: int, pass_samples: int) -> Evaluation | None:
        """See `Evaluator`. Raises ServiceError when an answer or a grade is missing."""
        if not self._held_out:
            return None
        work = evaluate(self._config, self._services, self._prompter, self._held_out, step, pass_samples)
        self.last = self._loop.call(work)
        return self.last
