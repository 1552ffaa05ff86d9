"""The mathematics of prioritised reuse (Schaul et al. 2016), as pure functions over arrays.

A sample of k groups holds k different groups. PER as published draws with replacement, so that E[draws of i] = k·P(i);
here every group is drawn at most once and its chance to be in the sample is π(i) = k·P(i), which is the same expectation.
Where k·P(i) would be over 1 the group comes for certain and the rest of k is shared by the others in proportion to their
P (fixed-size sampling with unequal probabilities, systematic design). The importance weights use the chance a group
really had, P(i) = π(i)/k, so they stay right in that case too: a sample that takes all that is there has weights of 1.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


def probabilities(priorities: Float64, exponent: float) -> Float64:
    """[N] P(i) ∝ priority^exponent, summing to 1; exponent 0 is uniform.

    With another exponent a priority of 0 means never; all zeros when no priority is positive.
    """
    largest = priorities.max(initial=0.0)
    # Scaled first: a large priority to a large power must not overflow.
    powers = (priorities / largest if largest > 0 else priorities) ** exponent
    total = powers.sum()
    return np.asarray(powers / total if total > 0 else powers)


def inclusion(chances: Float64, count: int) -> Float64:
    """[N] the chance of each group to be in a sample of `count` different ones: count·P(i), capped at 1 (see above)."""
    positive = chances > 0
    if count >= np.count_nonzero(positive):
        return positive.astype(np.float64)
    if count * chances.max() <= 1:
        return count * chances
    descending = np.sort(chances)[::-1]
    not_larger = np.cumsum(descending[::-1])[::-1]
    places = count - np.arange(count)
    certain = int(np.argmax(places * descending[:count] <= not_larger[:count]))
    return np.asarray(np.minimum(1.0, chances * (places[certain] / not_larger[certain])))


def draw(included: Float64, rng: np.random.Generator) -> Int64:
    """Indices of a sample in which group i is with chance `included[i]`, each at most once, in random order.

    `included` sums to a whole number: the size of the sample.
    """
    candidates = rng.permutation(np.flatnonzero(included > 0))
    if len(candidates) == 0:
        return candidates
    edges = np.cumsum(included[candidates])
    size = round(edges[-1])
    points = (rng.random() + np.arange(size)) * (edges[-1] / size)
    slots = np.minimum(np.searchsorted(edges, points, side="right"), len(candidates) - 1)
    return np.asarray(candidates[np.unique(slots)])  # unique: two points in one slot can only come from rounding


def importance_weights(included: Float64, chosen: Int64, exponent: float) -> Float64:
    """[len(chosen)] (N·P(i))^-exponent over the largest of all groups that can be drawn, not only of the chosen.

    N and the size of the sample cancel: (P_min / P(i))^exponent.
    """
    smallest = included.min(initial=1.0, where=included > 0)
    return np.asarray((smallest / included[chosen]) ** exponent)


@dataclass(slots=True)
class ReuseIndex:
    """What sampling needs to know of the N consumed groups, in memory. Arrays are [N], oldest consumed first."""

    order: Int64
    """Number of the consumption, ascending; finds the group in the store."""
    versions: Int64
    priorities: Float64
    times_sampled: Int64

    @classmethod
    def of(cls, rows: list[tuple[int, int, float, int]]) -> "ReuseIndex":
        """From (order, version, priority, times_sampled) of each group, by order."""
        order, versions, priorities, times = zip(*rows, strict=True) if rows else ((), (), (), ())
        return cls(
            np.array(order, np.int64), np.array(versions, np.int64), np.array(priorities, np.float64), np.array(times, np.int64)
        )

    def append(self, rows: list[tuple[int, int, float, int]]) -> None:
        """Adds newly consumed groups."""
        new = ReuseIndex.of(rows)
        self.order = np.concatenate([self.order, new.order])
        self.versions = np.concatenate([self.versions, new.versions])
        self.priorities = np.concatenate([self.priorities, new.priorities])
        self.times_sampled = np.concatenate([self.times_sampled, new.times_sampled])

    def drop_until(self, order: int) -> None:
        """Forgets the groups consumed up to and including `order`."""
        first = int(np.searchsorted(self.order, order, side="right"))
        self.order, self.versions = self.order[first:], self.versions[first:]
        self.priorities, self.times_sampled = self.priorities[first:], self.times_sampled[first:]

    def set_priorities(self, updates: list[tuple[int, float]]) -> None:
        """New priorities of groups, each by its order; of two for one group the last counts."""
        for order, priority in updates:
            self.priorities[np.searchsorted(self.order, order)] = priority

    def eligible(self, min_version: int, max_times_sampled: int | None) -> Int64:
        """Indices of the groups that may be reused."""
        mask: Bool = self.versions >= min_version
        if max_times_sampled is not None:
            mask &= self.times_sampled < max_times_sampled
        return np.flatnonzero(mask)
