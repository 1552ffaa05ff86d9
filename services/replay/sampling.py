"""Mathematics of prioritised reuse (Schaul et al. 2016), as pure functions over arrays.

A sample of k groups holds k different groups. PER as published draws with replacement, so that E[draws of i] = k·P(i);
here every group is drawn at most once and its chance to be in the sample is π(i) = k·P(i), which is the same expectation.
Where k·P(i) would exceed 1 the group is certain and the others share the rest of k in proportion to their P (fixed-size
sampling with unequal probabilities, systematic design). The importance weights use the actual probability P(i) = π(i)/k, so
they stay correct in that case: a sample of all groups has weights of 1. A group of priority 0 is never drawn.
"""

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


def probabilities(priorities: Float64, exponent: float) -> Float64:
    """Returns P(i) ∝ priority^exponent [N], which sums to 1; exponent 0 is uniform.

    With any other exponent a priority of 0 excludes a group; all are 0 when no priority is positive.
    """
    largest = priorities.max(initial=0.0)
    # Scaled first: a large priority to a large power must not overflow.
    powers = (priorities / largest if largest > 0 else priorities) ** exponent
    total = powers.sum()
    return np.asarray(powers / total if total > 0 else powers)


def inclusion(chances: Float64, count: int) -> Float64:
    """Returns the probability [N] that each group is in a sample of `count` different ones: count·P(i), capped at 1."""
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
    """Returns the indices of a sample, in random order, that contains group i once with probability `included[i]`.

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
    """Returns (N·P(i))^-exponent [len(chosen)], divided by its expectation over draws: P(i)^-exponent / Σ P(j)^(1-exponent).

    So the weights of a sample are 1 on average for every exponent, as those of fresh groups are, and a group that is hardly
    ever drawn changes no other group's weight. Schaul et al. divide by the largest weight instead, by which one such group in
    the buffer takes all others' weight (docs/explanation/off-policy.md).
    """
    chances = included / included.sum()
    return np.asarray(chances[chosen] ** -exponent / (chances[chances > 0] ** (1 - exponent)).sum())


class ReuseIndex:
    """In-memory fields of the consumed groups that sampling needs.

    `rows` is a structured array, oldest consumed first. `order` numbers the consumed groups: it ascends and identifies a group
    in the store.
    """

    _FIELDS = np.dtype([("order", np.int64), ("version", np.int64), ("priority", np.float64), ("times_sampled", np.int64)])

    def __init__(self, rows: list[tuple[int, int, float, int]]) -> None:
        """Builds the index from (order, version, priority, times_sampled) of each group, by order."""
        self.rows = np.array(rows, self._FIELDS)

    def append(self, rows: list[tuple[int, int, float, int]]) -> None:
        """Adds newly consumed groups."""
        self.rows = np.concatenate([self.rows, np.array(rows, self._FIELDS)])

    def drop_until(self, order: int) -> None:
        """Forgets the groups consumed up to and including `order`."""
        self.rows = self.rows[np.searchsorted(self.rows["order"], order, side="right") :]

    def set_priorities(self, updates: list[tuple[int, float]]) -> None:
        """Sets priorities by order; the last one counts for a repeated group."""
        new = np.array(updates, [("order", np.int64), ("priority", np.float64)])
        self.rows["priority"][np.searchsorted(self.rows["order"], new["order"])] = new["priority"]

    def eligible(self, min_version: int, max_times_sampled: int | None) -> Int64:
        """Returns the indices of the groups that may be reused."""
        mask = self.rows["version"] >= min_version
        if max_times_sampled is not None:
            mask &= self.rows["times_sampled"] < max_times_sampled
        return np.flatnonzero(mask)
