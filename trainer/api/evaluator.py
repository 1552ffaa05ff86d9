"""`ModelEvaluator`: accuracy of a model on a data set, with uncertainty."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any, Literal, TypedDict

import httpx
from rich.console import Console

from common.clients.reward import RewardClient
from common.clients.rollout import GenerationFailed
from common.errors import ConfigError
from common.process.loop_thread import LoopThread
from common.prompts.chat_templates import OWN
from common.prompts.prompter import PromptStyle
from common.settings.config import Config, from_mapping
from common.settings.sections import RewardSection
from common.wire.schemas import Prompt, RewardResult
from learning.device import DeviceKind, choose_device
from services.reward.answers.exact import quantity
from services.reward.answers.extract import extract_answer
from services.reward.answers.notation import texts_of, tokens
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
from trainer.evaluation.evaluator import graded_answers
from trainer.evaluation.generation import GenerationSettings, Generator, together
from trainer.evaluation.results import pass_at_k
from trainer.observe.run_dir import progress_bar
from trainer.rollouts.requests import GeneratedAnswer

_READ = ("data.prompt_template", "model.chat_template", "model.trust_remote_code")
"""Settings that an evaluation reads besides those of `sampling`."""


class EvaluationResults(TypedDict):
    """Result of `ModelEvaluator.evaluate`, ready for JSON. Lists are in the order of the data
    set.
    """

    model: str
    accuracy: float | None
    """Share of right answers among the graded greedy ones. None, like all figures that count right
    answers, if a reward
    is not a verdict: no function verified the answer, and the reward is neither 0 nor 1."""
    standard_error: float | None
    """Standard error of the accuracy."""
    confidence_interval: tuple[float, float] | None
    """95 % interval of the accuracy."""
    num_samples: int
    """Number of problems."""
    num_ungraded: int
    """Answers that could not be graded (the grader timed out); excluded from every figure."""
    mean_reward: float
    lengths: dict[str, float] | None
    """Lengths of the greedy answers in tokens (`Lengths`); None when the server does not report
    them."""
    k: int
    pass_at_k: float | None
    """Probability that one of k sampled answers is right; this and the next three are None for k =
    1."""
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
    """Rewards of the greedy answers; None for one that could not be graded."""
    correct: list[bool | None]
    samples: list[list[dict[str, Any]]]
    """The k sampled answers to each problem: `response`, `reward`, `correct`."""


class ModelEvaluator:
    """Evaluates a model: a local directory, a name on the hub, or the URL of a server.

    The embedded engine runs a local model, as in in-process training. A server is called with
    OpenAI chat completions or, with a `tokenizer`, with SGLang's `/generate`, tokens in and out as
    in training.

    Args:
        model: directory, name, or `http://…`.
        system_prompt: system message before every problem.
        max_new_tokens: limit of an answer; the context of a local model may allow less.
        temperature: temperature of the k samples (`evaluate(…, k=8)`); the first answer to every
        problem is greedy.
        seed: seed of the samples.
        concurrency: requests in flight.
        timeout_s: limit of one request in seconds, retries included.
        device: of a local model; `auto` uses a GPU if there is one.
        dtype: precision of a local model on a GPU; a CPU computes in float32.
        tokenizer: tokenizer of the served model, a directory or a name on the hub; selects SGLang's
        native call.
        model_id: name of the model, on a server with several.
        api_key: bearer token for the server.
        progress: show a progress bar on the terminal.
        settings: other settings of the system by their names: `data.prompt_template`,
            `model.chat_template`, `model.trust_remote_code` and those of `sampling`.

    Raises ConfigError for arguments that conflict.
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
        device: DeviceKind = "auto",
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        tokenizer: str | Path | None = None,
        model_id: str | None = None,
        api_key: str | None = None,
        progress: bool = True,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.model = str(model)
        self._served = self.model.startswith(("http://", "https://"))
        for name, value in (
            ("max_new_tokens", max_new_tokens),
            ("concurrency", concurrency),
            ("timeout_s", timeout_s),
        ):
            if value <= 0:
                raise ConfigError("this is not above 0", field=name, value=value, remedy="raise it")
        if temperature <= 0:
            remedy = "set it above 0; the first answer to every problem is greedy anyway"
            raise ConfigError(
                "samples at this temperature are all the same",
                field="temperature",
                value=temperature,
                remedy=remedy,
            )
        for name, setting in (
            ("tokenizer", tokenizer),
            ("model_id", model_id),
            ("api_key", api_key),
        ):
            if setting is not None and not self._served:
                raise ConfigError(
                    f"a local model has no {name}",
                    field=name,
                    remedy="leave it out, or give a URL as the model",
                )
        if tokenizer is not None and model_id:
            raise ConfigError(
                "with a tokenizer, SGLang's native call cannot select a model_id",
                field="tokenizer",
                remedy="leave it out",
            )
        own = {
            "system_prompt": system_prompt,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
        }
        config = _config(own | {"request_timeout_s": timeout_s}, settings)
        if self._served and tokenizer is None:
            _refuse_unsent(config, settings)
        self._style, self._sampling, self._seed = PromptStyle.of(config), config.sampling, seed
        self._section = config.model
        self._concurrency, self._progress = concurrency, progress
        self._device, self._dtype = device, dtype
        self._tokenizer, self._model_id, self._api_key = tokenizer, model_id, api_key

    def evaluate(
        self,
        dataset: Any,
        reward_fn: Any,
        k: int = 1,
        reward_weights: Sequence[float] | None = None,
    ) -> EvaluationResults:
        """Generates a greedy answer to every problem, and k samples when k is above 1, and grades
        them.

        Args:
            dataset: as for `OnlineRLTrainer`.
            reward_fn: grades the answers; as for `OnlineRLTrainer`.
            k: samples per problem for pass@k, avg@k and maj@k.
            reward_weights: weight of each of several reward functions; 1 each when None.

        Raises ConfigError for an empty data set or a model that does not load, Unreachable when a
        server does not respond, and another ServiceError when any answer is missing.
        """
        if k < 1:
            raise ConfigError(
                "this is not above 0",
                field="k",
                value=k,
                remedy="give 1, or as many samples as pass@k needs",
            )
        prompts, rewards = as_prompts(dataset, "dataset"), as_rewards(reward_fn)
        weights = [1.0] * len(rewards) if reward_weights is None else list(reward_weights)
        if len(weights) != len(rewards):
            remedy = "give one weight for each function"
            raise ConfigError(
                f"there are {len(rewards)} reward functions",
                field="reward_weights",
                value=weights,
                remedy=remedy,
            )
        section = RewardSection().model_copy(
            update={"weights": {f.name: w for f, w in zip(rewards, weights, strict=True)}}
        )
        with LoopThread() as loop:  # also inside a running event loop (a notebook)
            return loop.call(self._evaluate(prompts, rewards, k, section))

    async def _evaluate(
        self, prompts: list[Prompt], rewards: list[RewardFunction], k: int, section: RewardSection
    ) -> EvaluationResults:
        sampling, slots = self._sampling, asyncio.Semaphore(self._concurrency)
        limits = (
            sampling.max_new_tokens,
            sampling.temperature,
            self._seed,
            sampling.request_timeout_s,
        )
        settings = GenerationSettings(self._style, *limits, sampling.cuts(), sampling, slots)
        app = create_reward_app(section, functions=rewards)
        bar = progress_bar("evaluating", Console(stderr=True), hidden=not self._progress)
        async with (
            app.router.lifespan_context(app),
            RewardClient(
                "reward functions", "http://in-process", transport=httpx.ASGITransport(app)
            ) as reward,
            self._generator(prompts, settings) as generator,
        ):
            reward.gets_tokens = True
            with bar:
                task = bar.add_task("evaluating", total=len(prompts))
                answered = [
                    graded_answers(generator, reward, prompt, i, k if k > 1 else 0)
                    for i, prompt in enumerate(prompts)
                ]
                found = await together(answered, lambda: bar.advance(task))
        return _results(self.model, prompts, found, k)

    def _generator(
        self, prompts: Sequence[Prompt], settings: GenerationSettings
    ) -> AbstractAsyncContextManager[Generator]:
        if not self._served:
            section = self._section.model_copy(update={"name": self.model})
            return local_generator(
                section, prompts, settings, choose_device(self._device, "device"), self._dtype
            )
        if self._tokenizer is not None:
            section = self._section.model_copy(update={"name": str(self._tokenizer)})
            return sglang_generator(self.model, section, self._api_key, settings)
        return openai_generator(self.model, self._model_id, self._api_key, settings)


def is_read(setting: str) -> bool:
    """Returns whether an evaluation reads a setting of the system."""
    return setting in _READ or (
        setting.startswith("sampling.") and setting != "sampling.group_size"
    )


def _config(own: Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    """Returns the settings of an evaluation. Raises ConfigError for a setting that is wrong or not
    read.
    """
    mapped = {f"sampling.{name}": value for name, value in own.items()}
    for name, value in settings.items():
        if name in mapped:
            remedy = f"give the argument {name.partition('.')[2]} instead"
            raise ConfigError(
                "this setting has its own argument",
                field="settings",
                value={name: value},
                remedy=remedy,
            )
        if not is_read(name):
            remedy = f"give {', '.join(_READ)} or settings of sampling"
            raise ConfigError(
                "an evaluation does not read this setting",
                field="settings",
                value={name: value},
                remedy=remedy,
            )
    room = {
        "rollout.engine": "embedded",
        "rollout.max_context_tokens": own["max_new_tokens"] + 1,
    }  # the model decides later
    return from_mapping({**mapped, **room, **settings})


def _refuse_unsent(config: Config, settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings that cannot be sent to a server that makes the prompts
    itself.
    """
    for name in settings:
        needs = name in ("sampling.completion_timeout_s", "sampling.max_thinking_tokens")
        needs |= name == "model.chat_template" and config.model.chat_template != OWN
        if needs or (name == "sampling.prefill" and PromptStyle.of(config).chat is not False):
            message, remedy = (
                "this setting cannot be sent to a server that tokenises the problems itself",
                "give the tokenizer of its model; the evaluator then sends tokens",
            )
            raise ConfigError(
                message, field="settings", value={name: settings[name]}, remedy=remedy
            )


def compare_evaluations(first: EvaluationResults, second: EvaluationResults) -> PairedDifference:
    """Compares the accuracy of `first` with that of `second`, problem by problem.

    Raises ConfigError when they are not about the same problems, or one has no accuracy.
    """
    for name, results in (("first", first), ("second", second)):
        if results["accuracy"] is None:
            remedy = "evaluate with a reward that verifies answers"
            raise ConfigError(
                "its rewards do not tell whether an answer is right",
                field=name,
                value=results["model"],
                remedy=remedy,
            )
    if first["prompts"] != second["prompts"]:
        raise ConfigError(
            "the two evaluations have different problems",
            field="second",
            remedy="use the same data set for both",
        )
    return paired_difference(first["correct"], second["correct"])


_Graded = list[tuple[GeneratedAnswer, RewardResult]]


def _results(model: str, prompts: list[Prompt], found: list[_Graded], k: int) -> EvaluationResults:
    greedy, sampled = [answers[0] for answers in found], [answers[1:] for answers in found]
    graded = [result for _, result in greedy if result.reward is not None]
    if not graded:
        raise GenerationFailed(
            f"no answer could be graded; the first: {greedy[0][1].reason or greedy[0][1].status}",
            field="prompt_id",
            value=prompts[0].id,
            remedy="check the reward functions; the log above may say more",
            code="not_graded",
        )
    verified = all(
        result.verified for answers in found for _, result in answers if result.reward is not None
    )
    right, count = sum(result.correct for result in graded), len(graded)
    tokens = [written.tokens for written, _ in greedy if written.tokens is not None]
    cut = [written.finish_reason == "length" for written, _ in greedy]
    complete = [
        a for a in sampled if verified and a and all(result.reward is not None for _, result in a)
    ]
    verdicts = [[result.correct for _, result in answers] for answers in complete]
    votes = [[_vote(written.text) for written, _ in answers] for answers in complete]
    ks = sorted({k, *(1 << i for i in range(k.bit_length()))}) if verdicts else []
    return EvaluationResults(
        model=model,
        accuracy=right / count if verified else None,
        standard_error=standard_error(right / count, count) if verified else None,
        confidence_interval=wilson_interval(right, count) if verified else None,
        num_samples=len(prompts),
        num_ungraded=sum(result.reward is None for answers in found for _, result in answers),
        mean_reward=mean(result.reward for result in graded if result.reward is not None),
        lengths=asdict(Lengths.of(tokens, cut)) if len(tokens) == len(greedy) else None,
        k=k,
        pass_at_k=mean(pass_at_k(k, sum(row), k) for row in verdicts) if verdicts else None,
        avg_at_k=mean(map(avg_at_k, verdicts)) if verdicts else None,
        maj_at_k=mean(maj_at_k(*pair) for pair in zip(votes, verdicts, strict=True))
        if verdicts
        else None,
        pass_at={j: mean(pass_at_k(k, sum(row), j) for row in verdicts) for j in ks} or None,
        prompts=[prompt.prompt for prompt in prompts],
        prompt_ids=[prompt.id for prompt in prompts],
        ground_truths=[prompt.ground_truth for prompt in prompts],
        responses=[written.text for written, _ in greedy],
        extracted_answers=[result.extracted_answer for _, result in greedy],
        rewards=[result.reward for _, result in greedy],
        correct=[_verdict(result) for _, result in greedy],
        samples=[
            [
                {"response": w.text, "reward": result.reward, "correct": _verdict(result)}
                for w, result in answers
            ]
            for answers in sampled
        ],
    )


def _verdict(result: RewardResult) -> bool | None:
    return result.correct if result.verified and result.reward is not None else None


def _vote(text: str) -> str | None:
    """Returns a response's normalised answer for a majority vote: 1,080 equals $1080, and x+1
    equals x + 1.
    """
    answer = extract_answer(text)
    if answer is None:
        return None
    number = quantity(answer)
    return str(number[0]) if number else " ".join(texts_of(tokens(answer)))
