"""The figures of an evaluation, and the comparison of two."""

from collections.abc import Sequence
from statistics import mean
from typing import TypedDict

import numpy as np

from common import Json
from common.clients.rollout import GenerationFailed
from common.errors import ConfigError
from common.wire.schemas import Prompt, RewardResult
from services.reward.answers.exact import quantity
from services.reward.answers.extract import extract_answer
from services.reward.answers.notation import texts_of, tokens
from trainer.evaluation.evaluation import pass_at_k
from trainer.evaluation.uncertainty import (
    PairedDifference,
    maj_at_k,
    paired_difference,
    standard_error,
    wilson_interval,
)
from trainer.rollouts.requests import GeneratedAnswer

GradedAnswer = tuple[GeneratedAnswer, RewardResult]


class EvaluationResults(TypedDict):
    """Result of `ModelEvaluator.evaluate`, ready for JSON. Lists are in the order of the data
    set.
    """

    model: str
    accuracy: float | None
    """Share of right answers among the graded greedy ones. None, like all figures that count right
    answers, if no reward function gives verdicts."""
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
    """Lengths of the greedy answers in tokens: mean, median, p95, longest, and the share truncated
    at the limit; None when the server does not report them."""
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
    trained_on: list[bool] | None
    """Whether the model was trained on the problem; None for a model behind a URL."""
    prompts: list[str]
    prompt_ids: list[str]
    ground_truths: list[str]
    responses: list[str]
    """Greedy answers."""
    extracted_answers: list[str | None]
    rewards: list[float | None]
    """Rewards of the greedy answers; None for one that could not be graded."""
    correct: list[bool | None]
    samples: list[list[Json]]
    """The k sampled answers to each problem: `response`, `reward`, `correct`."""


def results_of(
    model: str,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[GradedAnswer]],
    *,
    k: int,
    gives_verdicts: bool,
) -> EvaluationResults:
    """Returns the figures of an evaluation.

    Args:
        model: name of the model, for the results.
        prompts: [problems]
        answers: [problems][1 or 1 + k] the greedy answer to each problem, then its k samples.
        k: samples of each problem; 1 when only the greedy answers were generated.
        gives_verdicts: whether the reward functions say which answers are right.

    Raises GenerationFailed when no greedy answer could be graded.
    """
    greedy = [of_problem[0] for of_problem in answers]
    everything = [each for of_problem in answers for each in of_problem]
    graded = [result for _, result in greedy if result.reward is not None]
    if not graded:
        first = greedy[0][1]
        raise GenerationFailed(
            f"no answer could be graded; the first: {first.reason or first.status}",
            field="prompt_id",
            value=prompts[0].id,
            remedy="check the reward functions; the log above may say more",
            code="not_graded",
        )

    verdicts = [result.correct for result in graded if result.verified]
    has_accuracy = gives_verdicts and bool(verdicts)
    right = sum(verdicts)
    accuracy = right / max(1, len(verdicts))
    results = EvaluationResults(
        model=model,
        accuracy=accuracy if has_accuracy else None,
        standard_error=standard_error(accuracy, len(verdicts)) if has_accuracy else None,
        confidence_interval=wilson_interval(right, len(verdicts)) if has_accuracy else None,
        num_samples=len(prompts),
        num_ungraded=sum(result.reward is None for _, result in everything),
        mean_reward=mean(result.reward for result in graded if result.reward is not None),
        lengths=_lengths([answer for answer, _ in greedy]),
        k=k,
        pass_at_k=None,
        avg_at_k=None,
        maj_at_k=None,
        pass_at=None,
        trained_on=None,
        prompts=[prompt.prompt for prompt in prompts],
        prompt_ids=[prompt.id for prompt in prompts],
        ground_truths=[prompt.ground_truth for prompt in prompts],
        responses=[answer.text for answer, _ in greedy],
        extracted_answers=[result.extracted_answer for _, result in greedy],
        rewards=[result.reward for _, result in greedy],
        correct=[_verdict(result) for _, result in greedy],
        samples=[
            [
                {
                    "response": answer.text,
                    "reward": result.reward,
                    "correct": _verdict(result),
                }
                for answer, result in of_problem[1:]
            ]
            for of_problem in answers
        ],
    )
    if gives_verdicts:
        _add_figures_at_k(results)
    return results


def _add_figures_at_k(results: EvaluationResults) -> None:
    """Sets the figures of the samples, from the problems of which every sample was graded."""
    k = results["k"]
    shares: list[float] = []
    majorities: list[float] = []
    right: list[int] = []
    for of_problem in results["samples"]:
        verdicts = [sample["correct"] for sample in of_problem]
        # pass@k of fewer than k verdicts is not defined: such a problem does not count.
        if not verdicts or None in verdicts:
            continue
        votes = [normalised_answer(sample["response"]) for sample in of_problem]
        right.append(sum(verdicts))
        shares.append(mean(verdicts))
        majorities.append(maj_at_k(votes, verdicts))
    if not right:
        return

    powers_of_two = {1 << power for power in range(k.bit_length())}
    pass_at = {
        tries: mean(pass_at_k(k, count, tries) for count in right)
        for tries in sorted({k, *powers_of_two})
    }
    results["pass_at"] = pass_at
    results["pass_at_k"] = pass_at[k]
    results["avg_at_k"] = mean(shares)
    results["maj_at_k"] = mean(majorities)


def _lengths(greedy: Sequence[GeneratedAnswer]) -> dict[str, float] | None:
    known = [answer.tokens for answer in greedy if answer.tokens is not None]
    if len(known) < len(greedy):  # a server that does not report its usage
        return None
    median, p95 = np.quantile(known, [0.5, 0.95])
    return {
        "mean": mean(known),
        "median": float(median),
        "p95": float(p95),
        "longest": max(known),
        "truncated": mean(answer.finish_reason == "length" for answer in greedy),
    }


def _verdict(result: RewardResult) -> bool | None:
    return result.correct if result.verified and result.reward is not None else None


def normalised_answer(text: str) -> str | None:
    """Returns a response's normalised answer for a majority vote: 1,080 equals $1080, and x+1
    equals x + 1. None without an answer.
    """
    answer = extract_answer(text)
    if answer is None:
        return None
    number = quantity(answer)
    return str(number[0]) if number else " ".join(texts_of(tokens(answer)))


def leak(trained_on: list[bool] | None) -> str:
    """Returns how many problems the model was trained on, in words; empty for none."""
    if not trained_on or not any(trained_on):
        return ""
    return f"{sum(trained_on)} of {len(trained_on)} problems were trained on"


def compare_evaluations(first: EvaluationResults, second: EvaluationResults) -> PairedDifference:
    """Compares the accuracy of `first` with that of `second`, problem by problem.

    Raises ConfigError when they are not about the same problems, or one has no accuracy.
    """
    for name, results in (("first", first), ("second", second)):
        if results["accuracy"] is None:
            raise ConfigError(
                "the rewards of this evaluation do not tell whether an answer is right",
                field=name,
                value=results["model"],
                remedy="evaluate with a reward that verifies answers",
            )
    if first["prompts"] != second["prompts"]:
        raise ConfigError(
            "the two evaluations have different problems",
            field="second",
            remedy="use the same data set for both",
        )
    return paired_difference(first["correct"], second["correct"])
