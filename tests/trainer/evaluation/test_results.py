"""The figures of an evaluation: each against its definition, over random verdicts and rewards."""

from itertools import combinations
from statistics import mean, median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.clients.rollout import GenerationFailed
from common.errors import ConfigError
from common.wire.schemas import Prompt, RewardResult
from trainer.evaluation.results import (
    EvaluationResults,
    compare_evaluations,
    leak,
    normalised_answer,
    results_of,
)
from trainer.rollouts.requests import GeneratedAnswer

Graded = tuple[GeneratedAnswer, RewardResult]
SAID = ("", "7", "7.0", "8", "9")


def graded(
    said: str = "7", reward: float | None = 1.0, verified: bool = True, tokens: int | None = 3
) -> Graded:
    """An answer whose verdict follows from its text: 7 is right."""
    text = f"The answer is {said}." if said else "I do not know"
    answer = GeneratedAnswer(text, "length" if said == "9" else "stop", tokens)
    result = RewardResult(
        reward=reward,
        extracted_answer=said or None,
        ground_truth="7",
        correct=verified and said.startswith("7"),
        status="ok" if reward is not None else "error",
        verified=verified,
        reason="" if reward is not None else "it failed",
    )
    return answer, result


ANSWERS = st.builds(
    graded,
    st.sampled_from(SAID),
    # Few are without a grade or a verdict, so that most problems have figures of their samples.
    st.integers(0, 24).map(lambda number: None if number == 24 else number / 12 - 1),
    st.integers(0, 24).map(lambda number: number < 24),
    st.integers(1, 99),
)


def figures(answers: list[list[Graded]], k: int, gives_verdicts: bool = True) -> EvaluationResults:
    prompts = [
        Prompt(id=f"p{i}", prompt=f"question {i}", ground_truth="7") for i in range(len(answers))
    ]
    return results_of("model", prompts, answers, k=k, gives_verdicts=gives_verdicts)


def vote(said: list[str]) -> float:
    """The expected result of a vote in which equal numbers are equal, ties broken at random."""
    votes = ["7" if each == "7.0" else each for each in said if each]
    most = max(map(votes.count, votes), default=0)
    winners = {each for each in votes if votes.count(each) == most}
    return ("7" in winners) / len(winners) if winners else 0.0


@settings(max_examples=50)
@given(
    st.integers(1, 7).flatmap(
        lambda k: st.lists(
            st.lists(ANSWERS, min_size=1 + k * (k > 1), max_size=1 + k * (k > 1)),
            min_size=1,
            max_size=4,
        )
    ),
    st.booleans(),
)
def test_every_figure_is_as_defined(answers: list[list[Graded]], gives_verdicts: bool) -> None:
    k = max(1, len(answers[0]) - 1)
    greedy = [row[0] for row in answers]
    known = [result for _, result in greedy if result.reward is not None]
    if not known:
        with pytest.raises(GenerationFailed) as failed:
            figures(answers, k, gives_verdicts)
        assert (failed.value.code, failed.value.value) == ("not_graded", "p0")
        return

    found = figures(answers, k, gives_verdicts)
    verdicts = [result.correct for result in known if result.verified]
    expected = mean(verdicts) if verdicts and gives_verdicts else None
    assert found["accuracy"] == (None if expected is None else pytest.approx(expected))
    assert (found["standard_error"] is None) == (found["confidence_interval"] is None)
    if expected is not None:
        assert found["confidence_interval"] is not None
        low, high = found["confidence_interval"]
        assert 0 <= low <= expected <= high <= 1
        assert low < high
        error = (expected * (1 - expected) / len(verdicts)) ** 0.5
        assert found["standard_error"] == pytest.approx(error)
    rewards = [result.reward for result in known if result.reward is not None]
    assert found["mean_reward"] == pytest.approx(mean(rewards))
    assert found["num_samples"] == len(answers)
    assert found["num_ungraded"] == sum(
        result.reward is None for row in answers for _, result in row
    )
    lengths = [answer.tokens or 0 for answer, _ in greedy]
    assert found["lengths"] is not None
    assert found["lengths"]["mean"] == pytest.approx(mean(lengths))
    assert found["lengths"]["median"] == pytest.approx(median(lengths))
    assert found["lengths"]["longest"] == max(lengths)
    assert median(lengths) <= found["lengths"]["p95"] <= max(lengths)
    assert found["lengths"]["truncated"] == mean("9" in answer.text for answer, _ in greedy)
    assert found["rewards"] == [result.reward for _, result in greedy]
    assert found["responses"] == [answer.text for answer, _ in greedy]
    assert found["extracted_answers"] == [result.extracted_answer for _, result in greedy]
    judged = [
        [
            result.correct if result.verified and result.reward is not None else None
            for _, result in row
        ]
        for row in answers
    ]
    assert found["correct"] == [row[0] for row in judged]
    assert found["samples"] == [
        [
            {"response": answer.text, "reward": result.reward, "correct": verdict}
            for (answer, result), verdict in zip(row[1:], verdicts_of_row[1:], strict=True)
        ]
        for row, verdicts_of_row in zip(answers, judged, strict=True)
    ]

    # Only problems of which every sample was graded count for the figures of samples.
    counted = [
        (row[1:], judged[i][1:])
        for i, row in enumerate(answers)
        if len(row) > 1 and None not in judged[i][1:]
    ]
    if not counted or not gives_verdicts:
        names = ("pass_at", "pass_at_k", "avg_at_k", "maj_at_k")
        assert {found[name] for name in names} == {None}  # type: ignore[literal-required]
        return
    tries = [n for n in range(1, k + 1) if n == k or n & (n - 1) == 0]
    passed = {n: mean(mean(map(any, combinations(row, n))) for _, row in counted) for n in tries}
    assert found["pass_at"] == pytest.approx(passed)
    assert list(found["pass_at"] or ()) == tries
    assert found["pass_at_k"] == pytest.approx(passed[k])
    assert found["avg_at_k"] == pytest.approx(
        mean(row.count(True) / len(row) for _, row in counted)
    )
    said = [[result.extracted_answer or "" for _, result in row] for row, _ in counted]
    assert found["maj_at_k"] == pytest.approx(mean(map(vote, said)))


def test_without_a_length_of_every_answer_there_are_no_lengths() -> None:
    assert figures([[graded()], [graded(tokens=None)]], 1)["lengths"] is None
    assert figures([[graded()], [graded()]], 1)["lengths"] is not None


def test_evaluations_are_compared_on_the_same_problems_by_their_verdicts() -> None:
    better = figures([[graded("7")], [graded("7")], [graded("8", 0.0)]], 1)
    worse = figures([[graded("8", 0.0)], [graded("7")], [graded("8", 0.0)]], 1)
    found = compare_evaluations(better, worse)
    assert (found.gained, found.lost) == ([0], [])

    unrated = figures([[graded(verified=False)]] * 3, 1)
    shorter = figures([[graded()]], 1)
    cases: list[tuple[Any, Any, str]] = [
        (unrated, worse, "first"),
        (better, unrated, "second"),
        (better, shorter, "second"),
    ]
    for first, second, field in cases:
        with pytest.raises(ConfigError) as refused:
            compare_evaluations(first, second)
        assert refused.value.field == field


def test_figures_of_samples_hand_computed() -> None:
    """Two of three are right and win; none is; one is not graded, which leaves its problem out."""
    answers = [
        [graded(), graded("7"), graded("7.0"), graded("8")],
        [graded(), graded("8"), graded("8"), graded("9")],
        [graded(), graded("7"), graded("7"), graded("7", reward=None)],
    ]
    found = figures(answers, 3)
    assert found["pass_at"] == pytest.approx({1: 1 / 3, 2: 1 / 2, 3: 1 / 2})
    assert found["pass_at_k"] == pytest.approx(1 / 2)
    assert found["avg_at_k"] == pytest.approx(1 / 3)
    assert found["maj_at_k"] == pytest.approx(1 / 2)
    assert (found["model"], found["k"], found["trained_on"]) == ("model", 3, None)
    assert found["prompt_ids"] == ["p0", "p1", "p2"]
    assert found["prompts"] == ["question 0", "question 1", "question 2"]
    assert found["ground_truths"] == ["7"] * 3
    assert figures(answers, 3, gives_verdicts=False)["pass_at"] is None


def test_equal_answers_have_one_vote_however_they_are_written() -> None:
    def vote_of(answer: str) -> str | None:
        return normalised_answer(f"The answer is {answer}.")

    equal = [["1,080", "$1080", "1080.0"], ["x+1", "x + 1"], ["8 cm"], ["7 cm"], ["x - 1"]]
    votes = [{vote_of(each) for each in group} for group in equal]
    assert all(len(group) == 1 for group in votes)
    assert len(set.union(*votes)) == len(equal)
    assert None not in set.union(*votes)
    assert normalised_answer("I do not know") is None


def test_problems_that_were_trained_on_are_named_by_their_number() -> None:
    assert leak(None) == leak([]) == leak([False]) == ""
    assert leak([True, False, True]) == "2 of 3 problems were trained on"
