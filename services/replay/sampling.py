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
_FEW = 64
"""All completions are scanned when there are fewer than this many times the requested count."""


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
    rewards: Float32, count: int, *, prioritized: bool, rng: np.random.Generator
) -> Int64:
    """Returns the indices of up to `count` distinct completions.

    `prioritized` draws higher rewards more often: the weight of a completion rises linearly from
    0.1 at the lowest reward to 1.1 at the highest. A few of many are drawn one by one, by
    rejection, so the time hardly depends on the total number.
    """
    low = float(rewards.min()) if len(rewards) else 0.0
    high = float(rewards.max()) if len(rewards) else 0.0

    def weights(some: Float32) -> Float64:
        if not prioritized or high == low:
            return np.ones(len(some))
        return (some.astype(np.float64) - low) / (high - low) + LOWEST_WEIGHT

    if count * _FEW > len(rewards):
        return draw(inclusion(probabilities(weights(rewards), 1.0), count), rng)
    found: dict[int, None] = {}
    while len(found) < count:
        slots = rng.integers(len(rewards), size=4 * count)
        accepted = rng.random(len(slots)) * (1 + LOWEST_WEIGHT) < weights(rewards[slots])
        found |= dict.fromkeys(slots[accepted].tolist())
    return np.array(list(found)[:count])


class AnswerIndex:
    """Rewards of all completions, in memory; those of one group are adjacent."""

    def __init__(self, rows: list[tuple[int, bytes]]) -> None:
        """Builds the index from the key and the float32 rewards of each group."""
        self._keys, self._starts, self.rewards = _flat(rows)

    def update(self, changed: list[int], rows: list[tuple[int, bytes]]) -> None:
        """Replaces the groups with the keys in `changed` by `rows`."""
        kept = ~np.isin(self._keys, np.array(changed, np.int64))
        sizes = np.diff(self._starts)
        keys, starts, rewards = _flat(rows)
        if not kept.all():
            self.rewards = self.rewards[np.repeat(kept, sizes)]
        self._keys = np.concatenate([self._keys[kept], keys])
        new_sizes = np.concatenate([sizes[kept], np.diff(starts)])
        self._starts = np.concatenate([[0], np.cumsum(new_sizes)])
        self.rewards = np.concatenate([self.rewards, rewards])

    def place(self, slot: int) -> tuple[int, int]:
        """Returns the key of the group with this completion, and the completion's index in the
        group.
        """
        place = int(np.searchsorted(self._starts, slot, side="right")) - 1
        return int(self._keys[place]), slot - int(self._starts[place])


def _flat(rows: list[tuple[int, bytes]]) -> tuple[Int64, Int64, Float32]:
    """Returns the keys [N], where the rewards of each begin [N + 1], and all rewards."""
    keys = np.array([key for key, _ in rows], np.int64)
    sizes = [len(rewards) // 4 for _, rewards in rows]
    joined = np.frombuffer(b"".join(rewards for _, rewards in rows), "<f4")
    return keys, np.cumsum([0, *sizes]), joined
