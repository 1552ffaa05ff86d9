"""The mathematics of prioritised reuse (Schaul et al. 2016), as pure functions over arrays.

A sample of k groups holds k different groups. PER as published draws with replacement, so that E[draws of i] = k·P(i);
here every group is drawn at most once and its chance to be in the sample is π(i) = k·P(i), which is the same expectation.
Where k·P(i) would be over 1 the group comes for certain and the rest of k is shared by the others in proportion to their
P (fixed-size sampling with unequal probabilities, systematic design). The importance weights use the chance a group
really had, P(i) = π(i)/k, so they stay right in that case too: a sample that takes all that is there has weights of 1.
"""

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


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


class ReuseIndex:
    """What sampling needs to know of the consumed groups, in memory.

    `rows` is a structured array, oldest consumed first. `order` is the number of the consumption: it ascends and finds the
    group in the store.
    """

    _FIELDS = np.dtype([("order", np.int64), ("version", np.int64), ("priority", np.float64), ("times_sampled", np.int64)])

    def __init__(self, rows: list[tuple[int, int, float, int]]) -> None:
        """Starts from (order, version, priority, times_sampled) of each group, by order."""
        self.rows = np.array(rows, self._FIELDS)

    def append(self, rows: list[tuple[int, int, float, int]]) -> None:
        """Adds newly consumed groups."""
        self.rows = np.concatenate([self.rows, np.array(rows, self._FIELDS)])

    def drop_until(self, order: int) -> None:
        """Forgets the groups consumed up to and including `order`."""
        self.rows = self.rows[np.searchsorted(self.rows["order"], order, side="right") :]

    def set_priorities(self, updates: list[tuple[int, float]]) -> None:
        """Sets priorities by order; of two for one group the last counts."""
        new = np.array(updates, [("order", np.int64), ("priority", np.float64)])
        self.rows["priority"][np.searchsorted(self.rows["order"], new["order"])] = new["priority"]

    def eligible(self, min_version: int, max_times_sampled: int | None) -> Int64:
        """Indices of the groups that may be reused."""
        mask = self.rows["version"] >= min_version
        if max_times_sampled is not None:
            mask &= self.rows["times_sampled"] < max_times_sampled
        return np.flatnonzero(mask)
