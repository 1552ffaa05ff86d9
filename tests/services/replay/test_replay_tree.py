"""Draws from many groups, which go through the sum tree: joint draws, and draws after the groups
have changed."""

from collections.abc import Callable

import numpy as np
import pytest

from services.replay.reuse import ReuseIndex
from services.replay.sampling import draw_by_reward

GROUPS = 256


def equal_groups() -> ReuseIndex:
    """Returns an index of `GROUPS` groups of equal priority, one on every leaf of its tree."""
    index = ReuseIndex([(order, order, 1.0, 0) for order in range(GROUPS - 1)])
    index.append([(GROUPS - 1, GROUPS - 1, 1.0, 0)])
    return index


def test_two_groups_are_drawn_together_whatever_their_distance() -> None:
    """With two equally spaced points each half of the tree gets one, and in its half any group is
    as likely as any other.

    Draws are counted in 8 · 8 blocks of 16 groups. χ² has 63 degrees of freedom: a mean of 63 and a
    standard deviation of √126. The bound is five of these above the mean. Without random branches
    all draws are on the diagonal, which gives 7 · 1,000.
    """
    index = equal_groups()
    rounds = 1_000
    seen = np.zeros((8, 8))
    for seed in range(rounds):
        orders, _ = index.draw(2, seed, min_version=0, max_times=None, exponent=1.0, correction=0.4)
        first, second = sorted(orders)
        assert first < GROUPS // 2 <= second
        seen[first // 16, second // 16 - 8] += 1

    expected = rounds / seen.size
    chi_squared = ((seen - expected) ** 2 / expected).sum()

    assert chi_squared < 63 + 5 * 126**0.5


def _draw_all_but_two(index: ReuseIndex) -> None:
    index.drawn(list(range(GROUPS - 2)))


def _exclude_all_but_two(index: ReuseIndex) -> None:
    index.set_priorities([(order, 0.0) for order in range(GROUPS - 2)])


def _remove_all_but_two(index: ReuseIndex) -> None:
    index.drop_until(GROUPS - 3)


@pytest.mark.parametrize(
    ("change", "min_version"),
    [
        (_draw_all_but_two, 0),
        (_exclude_all_but_two, 0),
        (_remove_all_but_two, 0),
        (lambda _: None, GROUPS - 2),
    ],
    ids=["drawn", "priority 0", "removed", "too old"],
)
def test_of_many_groups_only_the_two_that_are_left_are_drawn(
    change: Callable[[ReuseIndex], None], min_version: int
) -> None:
    index = equal_groups()
    orders, _ = index.draw(3, 0, min_version=0, max_times=1, exponent=1.0, correction=0.4)
    assert len(orders) == 3, "nothing is excluded yet"

    change(index)
    orders, weights = index.draw(
        3, 1, min_version=min_version, max_times=1, exponent=1.0, correction=0.4
    )

    assert sorted(orders) == [GROUPS - 2, GROUPS - 1]
    assert weights.tolist() == [1.0, 1.0]


def test_each_of_many_groups_is_drawn_once_and_then_none_is() -> None:
    index = equal_groups()
    drawn: list[int] = []
    for seed in range(GROUPS // 3 + 1):
        orders, _ = index.draw(3, seed, min_version=0, max_times=1, exponent=0.6, correction=0.4)
        index.drawn(orders)
        drawn += orders

    assert sorted(drawn) == list(range(GROUPS))
    assert index.draw(3, 0, min_version=0, max_times=1, exponent=0.6, correction=0.4)[0] == []


@pytest.mark.parametrize("count", [2, 20], ids=["from the tree", "from a scan"])
def test_a_new_exponent_counts_from_the_next_draw_on(count: int) -> None:
    """With β = 1 the weight of group i is 1 / (N · P(i)), where P(i) is its power over the sum of
    all powers."""
    priorities = np.random.default_rng(0).uniform(0.5, 1.5, GROUPS)
    index = ReuseIndex(
        [(order, 0, float(priority), 0) for order, priority in enumerate(priorities)]
    )
    for exponent in (0.0, 1.0, 0.3, 0.0):
        powers = priorities**exponent
        expected = powers.mean() / powers

        orders, weights = index.draw(
            count, 0, min_version=0, max_times=None, exponent=exponent, correction=1.0
        )

        assert len(orders) == count
        np.testing.assert_allclose(weights, expected[orders], rtol=1e-6)


def test_a_few_of_many_completions_are_drawn_in_proportion_to_their_weights() -> None:
    """Weights rise from 0.1 at the lowest reward to 1.1 at the highest: 0.6 in the middle.

    One completion has the lowest reward, the others alternate. Of 30,000 draws a share of 1.1 / 1.7
    should have the highest reward; its standard error is 0.0028, and the bound is 4.5 of these. If
    weights above 1 counted as 1, the share would be 1 / 1.6, eight standard errors less.
    """
    rewards = np.where(np.arange(20_000) % 2, 1.0, 0.5).astype(np.float32)
    rewards[0] = 0.0
    rng = np.random.default_rng(0)
    rounds = 300
    count = 100
    highest = 0
    for _ in range(rounds):
        slots = draw_by_reward(rewards, count, prioritized=True, rng=rng)
        assert len(set(slots.tolist())) == count
        highest += int((rewards[slots] == 1.0).sum())

    share = 1.1 / 1.7
    draws = rounds * count
    standard_error = (share * (1 - share) / draws) ** 0.5
    assert highest / draws == pytest.approx(share, abs=4.5 * standard_error)
