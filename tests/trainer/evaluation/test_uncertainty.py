"""Statistics of evaluations: computed by hand, and properties over random verdicts."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.evaluation.evaluation import pass_at_k
from trainer.evaluation.uncertainty import (
    Z95,
    accuracy_text,
    maj_at_k,
    mean_difference,
    paired_difference,
    standard_error,
    wilson_interval,
)


def test_standard_error_hand_computed() -> None:
    assert standard_error(0.5, 100) == pytest.approx(0.05)
    assert standard_error(0.2, 64) == pytest.approx(0.05)
    assert standard_error(1.0, 10) == 0


def test_wilson_interval_hand_computed() -> None:
    """With z² = 3.8415: 0 of 10 ends at z²/(10 + z²); 5 of 10 gives 0.5 ± z/(10 + z²)·sqrt(2.5 +
    z²/4)."""
    assert wilson_interval(0, 10) == pytest.approx((0, 0.27753), abs=1e-5)
    assert wilson_interval(10, 10) == pytest.approx((0.72247, 1), abs=1e-5)
    assert wilson_interval(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["4", "5", "4", None], [True, False, True, False], 1),
        (["4", "5", "5", None], [True, False, False, False], 0),
        (
            ["4", "5", "6", "5", "4"],
            [True, False, False, False, True],
            0.5,
        ),  # a tie of a right and a wrong answer
        (["4", None, None, None], [True, False, False, False], 1),  # a missing answer has no vote
        ([None, None], [False, False], 0),
    ],
)
def test_maj_at_k_hand_computed(
    answers: list[str | None], correct: list[bool], expected: float
) -> None:
    assert maj_at_k(answers, correct) == expected


def test_paired_difference_hand_computed() -> None:
    """10 problems, 4 gained and 1 lost. Interval: 3/12 ± z·sqrt(6 − 9/12)/12. p: 2 · (1 + 5)/2⁵."""
    first = [True] * 4 + [False] + [True] * 3 + [False] * 2
    second = [False] * 4 + [True] + [True] * 3 + [False] * 2
    found = paired_difference(first, second)
    assert found.difference == pytest.approx(0.3)
    assert (found.low, found.high) == pytest.approx((-0.124236, 0.624236), abs=1e-5)
    assert found.p_value == pytest.approx(0.375)
    assert (found.gained, found.lost, found.num_samples) == ([0, 1, 2, 3], [4], 10)
    back = paired_difference(second, first)
    assert (back.difference, back.low, back.high) == pytest.approx(
        (-found.difference, -found.high, -found.low)
    )
    assert (back.gained, back.lost, back.p_value) == (found.lost, found.gained, found.p_value)


def test_models_that_agree_everywhere_differ_by_nothing() -> None:
    found = paired_difference([True, False], [True, False])
    assert found.difference == 0
    assert found.p_value == 1
    assert found.low == -found.high < 0  # two problems do not prove that the models are the same


def test_ungraded_answers_are_left_out_of_a_comparison() -> None:
    found = paired_difference([None, True, True], [True, None, False])
    assert (found.difference, found.gained, found.num_samples) == (1, [2], 1)
    with pytest.raises(ValueError, match="no problem was graded for both"):
        paired_difference([None], [True])


def test_a_mean_difference_hand_computed() -> None:
    """Differences of 1, 0, 1, 2: a mean of 1 with a standard error of √(2/3) / 2."""
    found = mean_difference([2.0, 2.0, 4.0, 6.0], [1.0, 2.0, 3.0, 4.0])
    assert (found.difference, found.gained, found.lost, found.num_samples) == (
        1.0,
        [0, 2, 3],
        [],
        4,
    )
    assert (found.low, found.high) == pytest.approx((0.2, 1.8), abs=1e-3)
    assert found.p_value == pytest.approx(0.0143, abs=1e-4)
    same = mean_difference([1.0, 2.0], [1.0, 2.0])
    assert (same.low, same.high, same.p_value) == (0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="two problems"):
        mean_difference([1.0], [0.0])


def test_answers_that_are_all_alike_have_an_interval_and_not_an_error_of_0() -> None:
    assert accuracy_text(0.5, 0.05, 100) == "0.500 ± 0.050"
    assert accuracy_text(0.0, 0.0, 50) == "0.000 (95 % interval 0.000 to 0.071)"
    assert accuracy_text(1.0, 0.0, 50) == "1.000 (95 % interval 0.929 to 1.000)"


_VERDICTS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=8)


@given(count=st.integers(1, 400), data=st.data())
def test_the_ends_of_wilsons_interval_are_the_shares_that_lie_at_the_limit(
    count: int, data: st.DataObject
) -> None:
    """p is an end when (p̂ − p)² = z²·p(1 − p)/n, or where a share ends."""
    successes = data.draw(st.integers(0, count))
    low, high = wilson_interval(successes, count)
    share = successes / count
    assert 0 <= low <= share + 1e-15
    assert share - 1e-15 <= high <= 1
    for end in (low, high):
        gap = (share - end) ** 2 - Z95**2 * end * (1 - end) / count
        assert gap == pytest.approx(0, abs=1e-12)


@given(
    answers=st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=7),
    right=st.sampled_from(["1", "2", "3"]),
)
def test_a_vote_is_won_by_the_most_frequent_answer(answers: list[str | None], right: str) -> None:
    votes = [answers.count(answer) for answer in ("1", "2", "3")]
    winners = [answer for answer, n in zip("123", votes, strict=True) if n == max(votes) > 0]
    expected = winners.count(right) / max(1, len(winners))
    assert maj_at_k(answers, [answer == right for answer in answers]) == pytest.approx(expected)


@given(pairs=_VERDICTS, ungraded=st.integers(0, 3))
def test_two_models_are_compared_by_the_problems_on_which_they_differ(
    pairs: list[tuple[bool, bool]], ungraded: int
) -> None:
    first = [pair[0] for pair in pairs] + [None] * ungraded
    second = [pair[1] for pair in pairs] + [True] * ungraded
    found = paired_difference(first, second)
    gained = [i for i, pair in enumerate(pairs) if pair == (True, False)]
    lost = [i for i, pair in enumerate(pairs) if pair == (False, True)]
    assert (found.gained, found.lost, found.num_samples) == (gained, lost, len(pairs))
    assert found.difference == pytest.approx((len(gained) - len(lost)) / len(pairs))
    # Of all ways in which the problems that differ could have fallen, those at least as uneven.
    differing = len(gained) + len(lost)
    falls = [abs(2 * sum(ways) - differing) for ways in product((0, 1), repeat=differing)]
    uneven = sum(fall >= abs(len(gained) - len(lost)) for fall in falls)
    assert found.p_value == pytest.approx(uneven / len(falls))
    back = paired_difference(second, first)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low))


@given(samples=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(
    samples: int, data: st.DataObject
) -> None:
    correct = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    draws = list(combinations(range(samples), k))
    passed = sum(min(draw) < correct for draw in draws)
    assert pass_at_k(samples, correct, k) == pytest.approx(passed / len(draws))


@pytest.mark.parametrize(("samples", "correct", "k"), [(3, -1, 1), (3, 4, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_of_what_was_not_drawn_is_not_defined(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(samples, correct, k)


def test_rewards_that_always_differ_by_the_same_are_no_chance() -> None:
    found = mean_difference([2.0, 3.0], [1.0, 2.0])
    assert (found.low, found.high, found.p_value) == (1.0, 1.0, 0.0)


def test_an_interval_ends_where_differences_end() -> None:
    assert paired_difference([False], [True]).low == -1.0
    assert paired_difference([True], [False]).high == 1.0
