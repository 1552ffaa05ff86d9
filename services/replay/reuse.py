"""Draws consumed groups by priority, in time logarithmic in their number.

Inclusion probabilities and importance weights are those of `services.replay.sampling`. With many
eligible groups, shuffling them would be too slow: instead, equally spaced points are looked up in a
sum tree whose branches are swapped at random in every draw. So, as with the strata of Schaul et
al., close neighbours are hardly ever drawn together.
"""

import math

import numpy as np
from numpy.typing import NDArray

from services.replay import sampling
from services.replay.sampling import Float64, Int64

_FEW = 64
"""All groups are scanned when there are at most this many times the requested count."""
_LARGER = 100.0
"""Largest logarithm of a power relative to the scale; above it the scale is recomputed, to avoid
overflow."""
_LEAST = 1e-150
"""Below this sum of powers the scale is recomputed, because powers may have underflowed to 0."""
_UNLIMITED = np.iinfo(np.int32).max
_Rows = list[tuple[int, int, float, int]]


class ReuseIndex:
    """In-memory index of the consumed groups, with the fields that sampling needs.

    Groups are numbered in the order they were consumed; this `order` identifies a group in the
    store. Its place in the arrays is `order` modulo their size.
    """

    def __init__(self, rows: _Rows) -> None:
        """Builds the index from (order, version, priority, times_sampled) of each group, by
        order.
        """
        self._first = 0
        self._next = 0
        self._make(1)
        self.append(rows)

    def _make(self, size: int) -> None:
        self._size = size
        self._version = np.full(size, -1)  # -1: no group
        self._priority = np.zeros(size)
        self._sampled = np.zeros(size, np.int32)
        self._tree: _Tree | None = None
        self._scale = 0.0
        self._exponent = 0.0
        self._min_version = 0
        self._max_times = _UNLIMITED
        self._by_version: dict[int, list[Int64]] = {}
        """Orders of the groups in the tree, by weight version."""

    def rows(self) -> _Rows:
        """Returns the rows from which the index could be rebuilt."""
        orders = np.arange(self._first, self._next)
        places = orders % self._size
        rows = zip(
            orders.tolist(),
            self._version[places].tolist(),
            self._priority[places].tolist(),
            self._sampled[places].tolist(),
            strict=True,
        )
        return [row for row in rows if row[1] >= 0]

    def append(self, rows: _Rows) -> None:
        """Adds newly consumed groups."""
        if not rows:
            return
        first = self._first if self._first < self._next else rows[0][0]
        end = rows[-1][0] + 1
        if end - first > self._size:
            rows = self.rows() + rows
            self._make(1 << (end - first).bit_length())
        self._first = first
        self._next = end

        orders = np.array([order for order, _, _, _ in rows])
        places = orders % self._size
        self._version[places] = [version for _, version, _, _ in rows]
        self._priority[places] = [priority for _, _, priority, _ in rows]
        self._sampled[places] = [sampled for _, _, _, sampled in rows]
        if self._tree is not None:
            self._note_versions(orders)
            self._update(places)

    def drop_until(self, order: int) -> None:
        """Removes the groups up to and including `order`."""
        end = min(order + 1, self._next)
        if end > self._first:
            places = np.arange(self._first, end) % self._size
            self._first = end
            self._version[places] = -1
            self._update(places)

    def set_priorities(self, updates: list[tuple[int, float]]) -> None:
        """Sets priorities by order; the last one wins for a repeated group."""
        for order, priority in updates:
            self._priority[order % self._size] = priority
        self._update(np.array([order for order, _ in updates], np.int64) % self._size)

    def draw(
        self,
        count: int,
        seed: int,
        *,
        min_version: int,
        max_times: int | None,
        exponent: float,
        correction: float,
    ) -> tuple[list[int], Float64]:
        """Draws up to `count` distinct groups of `min_version` or newer that were drawn fewer than
        `max_times` times.

        `exponent` is that of the priorities, `correction` that of the importance weights. Returns
        the orders [n] and the importance weights [n], n at most `count`.
        """
        tree = self._prepared(min_version, min(max_times or _UNLIMITED, _UNLIMITED), exponent)
        rng = np.random.default_rng(seed)
        if tree.positive <= _FEW * count:
            places, weights = _draw_of_few(tree, count, rng, correction)
        else:
            places, weights = _draw_of_many(tree, count, rng, correction)
        return self._orders(places).tolist(), weights

    def drawn(self, orders: list[int]) -> None:
        """Counts one draw of each of these distinct groups."""
        places = np.array(orders) % self._size
        self._sampled[places] += 1
        self._update(places)

    def _prepared(self, min_version: int, max_times: int, exponent: float) -> "_Tree":
        """Returns the tree of the groups that may be drawn now.

        A new scale or new conditions rebuild it. A higher `min_version` does not: it only removes
        the groups that became too old.
        """
        same_conditions = (
            max_times == self._max_times
            and exponent == self._exponent
            and min_version >= self._min_version
        )
        self._max_times = max_times
        self._exponent = exponent
        self._min_version = min_version
        tree = self._tree
        underflows = tree is not None and tree.total < _LEAST and self._scale > 0
        if tree is None or not same_conditions or underflows:
            places = np.arange(self._size)
            self._scale = float(self._priority[self._allowed(places)].max(initial=0.0))
            self._tree = _Tree(self._powers(places))
            self._by_version = {}
            self._note_versions(self._orders(places)[self._version >= min_version])

        too_old = [version for version in self._by_version if version < min_version]
        for version in too_old:
            orders = np.concatenate(self._by_version.pop(version))
            self._update(orders[orders >= self._first] % self._size)
        assert self._tree is not None, "the update above lowers powers only"
        return self._tree

    def _orders(self, places: Int64) -> Int64:
        """Returns the orders of the groups at these places."""
        return self._first + (places - self._first) % self._size

    def _note_versions(self, orders: Int64) -> None:
        """Adds groups to `_by_version`."""
        versions = self._version[orders % self._size]
        by_version = np.argsort(versions, kind="stable")
        found, starts = np.unique(versions[by_version], return_index=True)
        parts = np.split(orders[by_version], starts)[1:]
        for version, some in zip(found.tolist(), parts, strict=True):
            self._by_version.setdefault(version, []).append(some)

    def _allowed(self, places: Int64) -> NDArray[np.bool_]:
        """Returns whether each of these groups may be drawn."""
        versions = self._version[places]
        is_recent = (versions >= 0) & (versions >= self._min_version)
        return is_recent & (self._sampled[places] < self._max_times)

    def _powers(self, places: Int64) -> Float64:
        """Returns (priority / scale)^exponent, and 0 for groups that may not be drawn."""
        allowed = self._allowed(places)
        scaled = self._priority[places] * allowed / (self._scale or 1.0)
        return np.where(allowed, scaled**self._exponent, 0.0)

    def _update(self, places: Int64) -> None:
        """Updates the tree after a change of these groups."""
        if self._tree is None or len(places) == 0:
            return
        largest = float(self._priority[places][self._allowed(places)].max(initial=0.0))
        if largest > 0 and self._overflows(largest):
            self._tree = None
        else:
            places = np.unique(places)
            self._tree.set(places, self._powers(places))

    def _overflows(self, largest: float) -> bool:
        """Whether the scale is too small for a power of this priority."""
        if self._scale == 0:
            return True
        logarithm = math.log(largest) - math.log(self._scale)
        return max(1.0, self._exponent) * logarithm > _LARGER


def _draw_of_few(
    tree: "_Tree", count: int, rng: np.random.Generator, correction: float
) -> tuple[Int64, Float64]:
    """Returns at most `count` places in random order, and their importance weights; scans all
    places.
    """
    places = tree.leaves(np.nextafter(0.0, 1.0))
    if not len(places):
        return places, np.zeros(0)

    included = sampling.inclusion(tree.powers(places) / tree.total, count)
    sample = sampling.draw(included, rng)
    if not len(sample):
        return places[sample], np.zeros(0)
    return places[sample], sampling.importance_weights(included, sample, correction)


def _draw_of_many(
    tree: "_Tree", count: int, rng: np.random.Generator, correction: float
) -> tuple[Int64, Float64]:
    """Returns `count` places in random order, and their importance weights; more places must have a
    positive power.
    """
    certain: list[tuple[Int64, Float64]] = []  # places with count·P(i) >= 1
    left = count
    while left and len(found := tree.leaves(tree.total / left)):
        certain.append((found, tree.powers(found)))
        tree.set(found, np.zeros(len(found)))
        left -= len(found)

    # The others share the rest of the sample in proportion to their powers.
    share = left / tree.total
    drawn = np.zeros(0, np.int64)
    if left:
        points = (rng.random() + np.arange(left)) / share
        drawn = tree.find(np.asarray(points), rng)
    places = np.concatenate([*(found for found, _ in certain), drawn])
    always = len(places) - len(drawn)

    # The importance weights, as in `sampling.importance_weights`, with P(i) = included(i) / count.
    included = np.concatenate([np.ones(always), tree.powers(drawn) * share])
    exponent = 1 - correction
    expectation = (always + share**exponent * tree.sum_of_powers(exponent)) / count**exponent
    weights = (included / count) ** -correction / expectation

    for found, powers in certain:
        tree.set(found, powers)
    shuffled = rng.permutation(len(places))
    return places[shuffled], weights[shuffled]


class _Tree:
    """Powers of places, with a binary tree of their sums and a histogram of their logarithms."""

    _WIDTH = 1 / 64
    """Width of a histogram class, in the logarithm of the power."""
    _FIRST = -750.0
    """Below the logarithm of the smallest positive float64."""
    _CLASSES = int(1500 / _WIDTH)

    def __init__(self, powers: Float64) -> None:
        self._size = len(powers)
        self._nodes = np.concatenate([np.zeros(self._size), powers])
        self._moments = np.zeros((3, self._CLASSES))
        """Per class: the count, and the sums of the logarithms' offsets from the middle and of the
        squared offsets."""
        width = self._size // 2
        while width:
            children = self._nodes[2 * width : 4 * width].reshape(-1, 2)
            self._nodes[width : 2 * width] = children.sum(1)
            width //= 2
        self.positive = 0
        """Number of places with a positive power."""
        self._count(powers, 1)

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    def powers(self, places: Int64) -> Float64:
        return np.asarray(self._nodes[self._size + places])

    def set(self, places: Int64, powers: Float64) -> None:
        """Sets the powers of distinct places."""
        self._count(self.powers(places), -1)
        self._count(powers, 1)
        nodes = self._size + places
        self._nodes[nodes] = powers
        while len(nodes := np.unique(nodes >> 1)) and nodes[0]:
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def _count(self, powers: Float64, sign: int) -> None:
        logarithms = np.log(powers[powers > 0])
        classes = ((logarithms - self._FIRST) / self._WIDTH).astype(np.int64)
        off = logarithms - self._middle(classes)
        self.positive += sign * len(off)
        for moments, each in zip(self._moments, (np.ones(len(off)), off, off**2), strict=True):
            np.add.at(moments, classes, sign * each)

    def _middle(self, classes: Int64) -> Float64:
        return np.asarray(self._FIRST + (classes + 0.5) * self._WIDTH)

    def leaves(self, least: float) -> Int64:
        """Returns the places whose power is at least `least` (> 0); the time depends on their
        number, not on all.
        """
        nodes = np.ones(1, np.int64)
        while nodes.size and nodes[0] < self._size:
            nodes = (2 * nodes[:, None] + np.arange(2)).ravel()
            nodes = nodes[self._nodes[nodes] >= least]
        return nodes[self._nodes[nodes] >= least] - self._size

    def find(self, points: Float64, rng: np.random.Generator) -> Int64:
        """Returns the distinct places at these points of the cumulative sum, with branches in
        random order.
        """
        nodes = np.ones(len(points), np.int64)
        salt = rng.integers(1 << 62)
        for _ in range(self._size.bit_length() - 1):
            first = 2 * nodes + _bits(nodes + salt)
            before = self._nodes[first]
            after = self._nodes[first ^ 1]
            beyond = (points >= before) & (after > 0)
            points = np.where(beyond, points - before, points)
            nodes = first ^ beyond
        return np.unique(nodes) - self._size  # only rounding can put two points in one place

    def sum_of_powers(self, exponent: float) -> float:
        """Returns the sum of power^exponent for an exponent from 0 to 1, with a relative error
        below 1e-7.
        """
        classes = np.flatnonzero(self._moments[0])
        count, first, second = self._moments[:, classes]
        near = count + exponent * first + exponent**2 / 2 * second
        return float((np.exp(exponent * self._middle(classes)) * near).sum())


def _bits(numbers: Int64) -> Int64:
    """Returns one pseudorandom bit (0 or 1) per number."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(63)).astype(np.int64)
