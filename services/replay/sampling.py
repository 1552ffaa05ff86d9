"""Mathematics of prioritised reuse (Schaul et al. 2016), as pure functions over arrays.

A sample of k groups holds k distinct groups. PER as published draws with replacement, so that
E[draws of i] = k·P(i); here every group is drawn at most once and is in the sample with probability
π(i) = k·P(i), which is the same expectation. Where k·P(i) would exceed 1, the group is always drawn
and the others share the rest of k in proportion to their P (fixed-size sampling with unequal
probabilities, systematic design). The importance weights use the actual probability P(i) = π(i)/k,
so they stay correct in that case: a sample of all groups has weights of 1. A group with priority 0
is never drawn.
"""

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
LOWEST_WEIGHT = 0.1


def probabilities(priorities: Float64, exponent: float) -> Float64:
    """Returns P(i) ∝ priority^exponent [N], summing to 1; exponent 0 is uniform.

    With any other exponent, priority 0 excludes a group; all P are 0 when no priority is positive.
    """
    largest = priorities.max(initial=0.0)
    # Scaled first: a large priority to a large power must not overflow.
    powers = (priorities / largest if largest > 0 else priorities) ** exponent
    total = powers.sum()
    return np.asarray(powers / total if total > 0 else powers)


def inclusion(chances: Float64, count: int) -> Float64:
    """Returns each group's probability [N] to be in a sample of `count` distinct groups:
    count·P(i), capped at 1.
    """
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
    """Returns the indices of a sample, in random order; it contains group i once with probability
    `included[i]`.

    `included` must sum to a whole number, the size of the sample.
    """
    candidates = rng.permutation(np.flatnonzero(included > 0))
    if len(candidates) == 0:
        return candidates
    edges = np.cumsum(included[candidates])
    size = round(edges[-1])
    points = (rng.random() + np.arange(size)) * (edges[-1] / size)
    slots = np.minimum(np.searchsorted(edges, points, side="right"), len(candidates) - 1)
    return np.asarray(candidates[np.unique(slots)])  # only rounding can put two points in one slot


def importance_weights(included: Float64, sample: Int64, exponent: float) -> Float64:
    """Returns (N·P(i))^-exponent [len(sample)], divided by its expectation over draws:
    P(i)^-exponent / Σ P(j)^(1-exponent).

    `included` [N] are the probabilities of `inclusion`, `sample` the indices that `draw` returned.

    So for every exponent the weights of a sample average 1, like those of fresh groups, and a
    rarely drawn group does not change the other weights. Schaul et al. divide by the largest weight
    instead, where one rare group in the buffer shrinks all other weights towards 0
    (docs/explanation/off-policy.md).
    """
    chances = included / included.sum()
    expectation = (chances[chances > 0] ** (1 - exponent)).sum()
    return np.asarray(chances[sample] ** -exponent / expectation)


def draw_by_reward(
    rewards: Float32, count: int, prioritized: bool, rng: np.random.Generator
) -> Int64:
    """Returns the indices of up to `count` distinct completions.

    `prioritized` draws higher rewards more often: the weight of a completion rises linearly from
    0.1 at the lowest reward to 1.1 at the highest.
    """
    values = rewards.astype(np.float64)
    low = values.min(initial=np.inf)
    high = values.max(initial=-np.inf)
    weights = np.ones(len(values))
    if prioritized and low < high:
        weights = (values - low) / (high - low) + LOWEST_WEIGHT
    return draw(inclusion(probabilities(weights, 1.0), count), rng)
