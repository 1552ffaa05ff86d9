"""`ModelEvaluator`: accuracy of a model on a data set, with uncertainty."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any, TypedDict, TypeVar

import httpx
from rich.console import Console

from common.clients import RewardClient
from common.errors import ConfigError
from common.rollout_client import GenerationFailed
from common.schemas import Prompt, RewardResult
from common.sections import RewardSection
from services.reward.answers.exact import quantity
from services.reward.answers.extract import extract_answer
from services.reward.app import create_reward_app
from services.reward.functions import RewardFunction
from trainer.api.datasets import as_prompts, as_rewards
from trainer.api.generators import local_generator, openai_generator, sglang_generator
from trainer.api.uncertainty import (
    Lengths,
    PairedDifference,
    avg_at_k,
    maj_at_k,
    paired_difference,
    standard_error,
    wilson_interval,
)
from trainer.observe.run_dir import progress_bar
from trainer.rollouts.evaluation import GeneratedAnswer, GenerationSettings, Generator, graded_answers, pass_at_k, together

_T = TypeVar("_T")


class EvaluationResults(TypedDict):
    """Result of `ModelEvaluator.evaluate`, ready for JSON. Lists are in the order of the data set."""

    model: str
    accuracy: float
    """Share of right answers among the graded greedy ones."""
    standard_error: float
    """Standard error of the accuracy."""
    confidence_interval: tuple[float, float]
    """95 % interval of the accuracy."""
    num_samples: int
    """Number of problems."""
    num_ungraded: int
    """Answers that could not be graded (the grader timed out); excluded from every figure."""
    mean_reward: float
    lengths: dict[str, float] | None
    """Lengths of the greedy answers in tokens (`Lengths`); None when the server does not report them."""
    k: int
    pass_at_k: float | None
    """Probability that one of k sampled answers is right; this and the next three are None for k = 1."""
    avg_at_k: float | None
    """Mean accuracy of the k sampled answers."""
    maj_at_k: float | None
    """Accuracy of the majority vote over k samples."""
    pass_at: dict[int, float] | None
    """pass@1, pass@2, pass@4, … up to k."""
    prompts: list[str]
    prompt_ids: list[str]
    ground_truths: list[str]
    responses: list[str]
    """Greedy answers."""
    extracted_answers: list[str | None]
    rewards: list[float | None]
    """Rewards of the greedy answers; None where one could not be graded."""
    correct: list[bool | None]
    samples: list[list[dict[str, Any]]]
    """The k sampled answers to every problem: `response`, `reward`, `correct`."""


class ModelEvaluator:
    """Evaluates a model: a local directory, a name on the hub, or the URL of a server.

    The embedded engine runs a local model, as in in-process training. A server gets OpenAI chat completions; with a
    `tokenizer` it gets SGLang's `/generate`, tokens in and out as in training.

    Args:
        model: directory, name, or `http://…`.
        system_prompt: put before every problem.
        max_new_tokens: limit of an answer; the context of a local model may allow less.
        temperature: temperature of the k samples (`evaluate(…, k=8)`); the first answer to every problem is greedy.
        seed: seed of the samples.
        concurrency: requests in flight.
        timeout_s: limit of one request in seconds, retries included.
        tokenizer: tokenizer of the served model, a directory or a name on the hub; selects SGLang's native call.
        model_id: name of the model on a server that has several.
        api_key: bearer token for the server.
        progress: show a progress bar on the terminal.

    Raises ConfigError for arguments that do not fit each other.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        system_prompt: str = "",
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        seed: int = 0,
        concurrency: int = 64,
        timeout_s: float = 600.0,
        tokenizer: str | Path | None = None,
        model_id: str | None = None,
        api_key: str | None = None,
        progress: bool = True,
    ) -> None:
        self.model = str(model)
        self._served = self.model.startswith(("http://", "https://"))
        for name, value in (("max_new_tokens", max_new_tokens), ("concurrency", concurrency), ("timeout_s", timeout_s)):
            if value <= 0:
                raise ConfigError("it is not above 0", field=name, value=value, remedy="raise it")
        if temperature <= 0:
            remedy = "set it above 0; the first answer to every problem is greedy anyway"
            raise ConfigError(
                "samples at this temperature are all the same", field="temperature", value=temperature, remedy=remedy
            )
        for name, setting in (("tokenizer", tokenizer), ("model_id", model_id), ("api_key", api_key)):
            if setting is not None and not self._served:
                raise ConfigError(f"a local model has no {name}", field=name, remedy="leave it out, or give a URL as the model")
        if tokenizer is not None and model_id:
            raise ConfigError("SGLang's native call knows no model_id", field="tokenizer", remedy="leave it out")
        self._generation = (system_prompt, max_new_tokens, temperature, seed, timeout_s)
        self._concurrency, self._progress = concurrency, progress
        self._tokenizer, self._model_id, self._api_key = tokenizer, model_id, api_key

    def evaluate(
        self, dataset: Iterable[Any], reward_fn: RewardFunction | Sequence[RewardFunction], k: int = 1
    ) -> EvaluationResults:
        """Generates a greedy answer to every problem, and k samples when k is above 1, and grades them.

        Args:
            dataset: as for `OnlineRLTrainer`.
            reward_fn: grades the answers.
            k: samples per problem for pass@k, avg@k and maj@k.

        Raises ConfigError for an empty data set or a model that does not load, Unreachable when a server does not respond,
        and another ServiceError when any answer is missing.
        """
        if k < 1:
            raise ConfigError("it is not above 0", field="k", value=k, remedy="1, or as many as pass@k needs")
        prompts, rewards = as_prompts(dataset, "dataset"), as_rewards(reward_fn)
        return _run(lambda: self._evaluate(prompts, rewards, k))

    async def _evaluate(self, prompts: list[Prompt], rewards: list[RewardFunction], k: int) -> EvaluationResults:
        settings = GenerationSettings(*self._generation, asyncio.Semaphore(self._concurrency))
        app = create_reward_app(RewardSection(), functions=rewards)
        bar = progress_bar("evaluating", Console(stderr=True), hidden=not self._progress)
        async with (
            app.router.lifespan_context(app),
            RewardClient("reward functions", "http://in-process", transport=httpx.ASGITransport(app)) as reward,
            self._generator(prompts, settings) as generator,
        ):
            with bar:
                task = bar.add_task("evaluating", total=len(prompts))
                answered = [graded_answers(generator, reward, prompt, i, k if k > 1 else 0) for i, prompt in enumerate(prompts)]
                found = await together(answered, lambda: bar.advance(task))
        return _results(self.model, prompts, found, k)

    def _generator(self, prompts: Sequence[Prompt], settings: GenerationSettings) -> AbstractAsyncContextManager[Generator]:
        if not self._served:
            return local_generator(self.model, prompts, settings)
        if self._tokenizer is not None:
            return sglang_generator(self.model, str(self._tokenizer), self._api_key, settings)
        return openai_generator(self.model, self._model_id, self._api_key, settings)


def compare_evaluations(first: EvaluationResults, second: EvaluationResults) -> PairedDifference:
    """Compares the accuracy of `first` with that of `second`, problem by problem.

    Raises ConfigError when they are not about the same problems.
    """
    if first["prompts"] != second["prompts"]:
        raise ConfigError("the two evaluations are not about the same problems", field="second", remedy="use one data set")
    return paired_difference(first["correct"], second["correct"])


_Graded = list[tuple[GeneratedAnswer, RewardResult]]


def _results(model: str, prompts: list[Prompt], found: list[_Graded], k: int) -> EvaluationResults:
    greedy, sampled = [answers[0] for answers in found], [answers[1:] for answers in found]
    graded = [result for _, result in greedy if result.reward is not None]
    if not graded:
        raise GenerationFailed(f"no answer could be graded: {greedy[0][1].reason or greedy[0][1].status}", code="not_graded")
    right, count = sum(result.correct for result in graded), len(graded)
    tokens = [written.tokens for written, _ in greedy if written.tokens is not None]
    cut = [written.finish_reason == "length" for written, _ in greedy]
    complete = [answers for answers in sampled if answers and all(result.reward is not None for _, result in answers)]
    verdicts = [[result.correct for _, result in answers] for answers in complete]
    votes = [[_vote(written.text) for written, _ in answers] for answers in complete]
    ks = sorted({k, *(1 << i for i in range(k.bit_length()))}) if verdicts else []
    return EvaluationResults(
        model=model,
        accuracy=right / count,
        standard_error=standard_error(right / count, count),
        confidence_interval=wilson_interval(right, count),
        num_samples=len(prompts),
        num_ungraded=sum(result.reward is None for answers in found for _, result in answers),
        mean_reward=mean(result.reward for result in graded if result.reward is not None),
        lengths=asdict(Lengths.of(tokens, cut)) if len(tokens) == len(greedy) else None,
        k=k,
        pass_at_k=mean(pass_at_k(k, sum(row), k) for row in verdicts) if verdicts else None,
        avg_at_k=mean(map(avg_at_k, verdicts)) if verdicts else None,
        maj_at_k=mean(maj_at_k(*pair) for pair in zip(votes, verdicts, strict=True)) if verdicts else None,
        pass_at={j: mean(pass_at_k(k, sum(row), j) for row in verdicts) for j in ks} or None,
        prompts=[prompt.prompt for prompt in prompts],
        prompt_ids=[prompt.id for prompt in prompts],
        ground_truths=[prompt.ground_truth for prompt in prompts],
        responses=[written.text for written, _ in greedy],
        extracted_answers=[result.extracted_answer for _, result in greedy],
        rewards=[result.reward for _, result in greedy],
        correct=[_verdict(result) for _, result in greedy],
        samples=[
            [{"response": w.text, "reward": result.reward, "correct": _verdict(result)} for w, result in answers]
            for answers in sampled
        ],
    )


def _verdict(result: RewardResult) -> bool | None:
    return None if result.reward is None else result.correct


def _run(start: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Runs a coroutine to its end, also inside a running event loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(start())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(start())).result()


def _vote(text: str) -> str | None:
    """Returns the answer of a response for a majority vote: 1,080 and $1080 are one answer."""
    answer = extract_answer(text)
    number = quantity(answer) if answer is not None else None
    return answer if number is None else str(number[0])
