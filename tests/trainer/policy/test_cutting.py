"""How a batch is cut: every row exactly once, within budget, equally many passes on all ranks,
balanced."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.settings.config import Config
from common.settings.sections import TrainerSection
from learning.batching import Indices, Sizes, micro_batches, mini_batches, score_shared, shares
from learning.layout import Packed, Padded
from learning.ranks import Ranks
from tests.support.batches.groups import off_policy_groups, whole
from trainer.policy.policy import Policy
from trainer.policy.update_metrics import Sums

GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 60), min_size=1, max_size=8)),
    min_size=1,
    max_size=9,
)


def sizes_of(groups: list[tuple[int, list[int]]], shared: bool) -> Sizes:
    """Sizes of groups, each given as the length of its prompt and of its completions; no two groups
    share a prompt."""
    rows = [
        (i, prompt, completion)
        for i, (prompt, completions) in enumerate(groups)
        for completion in completions
    ]
    columns = [np.array(column, np.int64) for column in zip(*rows, strict=True)]
    return Sizes(columns[1], columns[2], columns[0], shared)


def tokens(sizes: Sizes, indices: list[int]) -> int:
    """Tokens computed for these rows together: each prompt once, or with padding."""
    if not indices:
        return 0
    if not sizes.shared:
        return int(sizes.totals[indices].max()) * len(indices)
    _, one_each = np.unique(sizes.groups[indices], return_index=True)
    return int(sizes.computed[indices].sum() + sizes.prompts[indices][one_each].sum())


@given(
    GROUPS,
    st.booleans(),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 200),
    st.none() | st.integers(1, 5),
)
def test_a_batch_is_cut_into_disjoint_and_complete_parts(
    groups: list[tuple[int, list[int]]],
    shared: bool,
    parts: int,
    world_size: int,
    max_tokens: int,
    max_rows: int | None,
) -> None:
    """Mini-batches, the ranks' shares of them and micro-batches: every row exactly once, none over
    the budgets."""
    sizes = sizes_of(groups, shared)
    found: list[int] = []
    for part in mini_batches(len(sizes.prompts), parts, seed=3):
        assert len(part), "an update of no rows"
        cuts = [
            micro_batches(sizes, part, Ranks(rank, world_size), max_tokens, max_rows)
            for rank in range(world_size)
        ]
        assert len({len(cut) for cut in cuts}) == 1, "passes are of all ranks together"
        for micro in (micro for cut in cuts for micro in cut):
            assert len(micro) <= 1 or tokens(sizes, micro.tolist()) <= max_tokens
            assert max_rows is None or len(micro) <= max_rows
            found += micro.tolist()
    assert sorted(found) == list(range(len(sizes.prompts)))


@given(GROUPS, st.integers(1, 4))
def test_ranks_have_nearly_the_same_work_and_whole_groups(
    groups: list[tuple[int, list[int]]], world_size: int
) -> None:
    sizes = sizes_of(groups, shared=True)
    everything = np.arange(len(sizes.prompts))
    parts = shares(sizes, everything, world_size)
    alone = [float(sizes.costs(np.array([i])).sum()) for i in everything]
    mean = sizes.costs(sizes.order(everything)).sum() / world_size
    for part in parts:
        assert sizes.costs(part).sum() <= mean + 2 * max(
            alone
        )  # half a row at each border, and a split prompt
    split = sum(
        len({rank for rank, part in enumerate(parts) if group in sizes.groups[part]}) - 1
        for group in range(len(groups))
    )
    assert split <= world_size - 1


def test_a_single_mini_batch_keeps_the_order_of_its_rows_and_several_do_not() -> None:
    (whole,) = mini_batches(50, 1, seed=3)
    assert whole.tolist() == list(range(50))
    first, again, other = (np.concatenate(mini_batches(50, 4, seed)) for seed in (3, 3, 4))
    assert first.tolist() == again.tolist() != other.tolist()
    assert first.tolist() != list(range(50))


def filled(sizes: Sizes, order: list[int], budget: int, max_rows: int | None) -> list[list[int]]:
    """Returns rows in parts, each as full as the budgets permit."""
    parts: list[list[int]] = []
    for row in order:
        has_room = bool(parts) and tokens(sizes, [*parts[-1], row]) <= budget
        if not has_room or len(parts[-1]) == max_rows:
            parts.append([])
        parts[-1].append(row)
    return parts


@given(GROUPS, st.booleans(), st.integers(1, 200), st.none() | st.integers(1, 5))
def test_micro_batches_are_as_few_as_when_each_is_filled_and_as_even_as_can_be(
    groups: list[tuple[int, list[int]]], shared: bool, max_tokens: int, max_rows: int | None
) -> None:
    """They are those of the smallest budget that gives no more of them."""
    sizes = sizes_of(groups, shared)
    order = sizes.order(np.arange(len(sizes.prompts))).tolist()
    found = [
        part.tolist()
        for part in micro_batches(sizes, np.array(order), Ranks(), max_tokens, max_rows)
    ]
    assert len(found) == len(filled(sizes, order, max_tokens, max_rows))
    smallest = max((tokens(sizes, part) for part in found if len(part) > 1), default=1)
    assert found == filled(sizes, order, smallest, max_rows)
    if smallest > 1:
        assert len(filled(sizes, order, smallest - 1, max_rows)) > len(found)


def test_cuts_hand_computed() -> None:
    """The last token of a completion is not computed."""
    groups = [(10, [5, 7]), (20, [6, 6, 6])]
    packed, padded = sizes_of(groups, shared=True), sizes_of(groups, shared=False)
    everything = np.arange(5)
    assert [tokens(packed, [0, 1, 2, 3, 4]), tokens(packed, [1, 2]), tokens(packed, [])] == [
        55,
        41,
        0,
    ]
    assert [tokens(padded, [0, 1, 2, 3, 4]), tokens(padded, [0, 1])] == [125, 32]
    assert [cut.tolist() for cut in micro_batches(packed, everything, Ranks(), 36)] == [
        [0, 1],
        [2, 3, 4],
    ]
    assert [cut.tolist() for cut in micro_batches(padded, everything, Ranks(), 99)] == [
        [0, 1, 2],
        [3, 4],
    ]
    assert [cut.tolist() for cut in micro_batches(packed, everything, Ranks(), 55)] == [
        [0, 1, 2, 3, 4]
    ]
    assert [part.tolist() for part in shares(packed, everything, 2)] == [[0, 1], [2, 3, 4]]
    one_row = [micro_batches(packed, np.array([3]), Ranks(rank, 2), 55) for rank in (0, 1)]
    assert sorted([cut.tolist() for cut in cuts] for cuts in one_row) == [[[]], [[3]]]


def test_ranks_that_compute_rows_together_have_the_same_micro_batches() -> None:
    """Two ranks have room for twice the tokens of one."""
    sizes = sizes_of([(10, [5, 7]), (20, [6, 6, 6])], shared=True)
    everything = np.arange(5)
    pairs = [
        [
            cut.tolist()
            for cut in micro_batches(sizes, everything, Ranks(rank, 4, context_size=2), 18)
        ]
        for rank in range(4)
    ]
    assert pairs[0] == pairs[1] == [[0, 1]], "20 tokens; 18 for each of two ranks"
    assert pairs[2] == pairs[3] == [[2, 3, 4]], "35 tokens"


def test_token_counts_match_those_of_the_layouts() -> None:
    prompts = [np.arange(length, dtype=np.int32) for length in (3, 3, 7, 7, 7)]
    completions = [np.arange(length, dtype=np.int32) for length in (4, 0, 9, 1, 2)]
    for layout in (Packed, Padded):
        rows = [
            SimpleNamespace(prompt_ids=prompt, completion_ids=completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        sizes = Sizes.of(rows, layout.shared)
        assert tokens(sizes, [0, 1, 2, 3, 4]) == layout.of(prompts, completions).input_ids.numel()
    assert sizes.groups.tolist() == [0, 0, 1, 1, 1]


class Alone(Ranks):
    """One of two ranks, without the other: a sum contains only its own part."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def sum_gradients(self, model: torch.nn.Module) -> None:
        pass


class Sharded(Alone):
    @property
    def sharded(self) -> bool:
        return True


def test_a_pass_takes_a_shared_prompt_once_and_padding_too() -> None:
    groups = [(3, [2, 4]), (5, [2])]
    assert sizes_of(groups, shared=True).together(np.arange(3)) == 3 + 1 + 3 + 5 + 1
    assert sizes_of(groups, shared=True).together(np.array([1, 2])) == 3 + 3 + 5 + 1
    assert sizes_of(groups, shared=False).together(np.arange(3)) == 3 * 6


def test_passes_are_compared_with_those_of_rows_that_can_be_cut() -> None:
    sums = Sums()
    sums.add_passes([60, 60, 60], room=100)
    assert sums.metrics([1.0], 0.0, 0.0, skipped=0, stopped=False).pass_fill == pytest.approx(2 / 3)
    sums.add_passes([30], room=100)  # the last pass of a mini-batch is never called half empty
    assert sums.metrics([1.0], 0.0, 0.0, skipped=0, stopped=False).pass_fill == pytest.approx(3 / 4)
    assert Sums().metrics([], 0.0, 0.0, skipped=0, stopped=False).pass_fill == 1


def idle(kind: type[Ranks]) -> Ranks:
    """Returns the rank that gets no part of a single row."""
    one = sizes_of([(3, [2])], shared=True)
    return kind(
        next(rank for rank in (0, 1) if not len(shares(one, np.arange(1), 2)[rank])),
        2,
        shard_size=1,
    )


@pytest.mark.parametrize(("kind", "expected"), [(Alone, []), (Sharded, [[0]])])
def test_a_rank_without_rows_scores_only_where_models_are_spread(
    kind: type[Ranks], expected: list[list[int]]
) -> None:
    sizes, seen = sizes_of([(3, [2])], shared=True), []

    def score(indices: Indices) -> torch.Tensor:
        seen.append(indices.tolist())
        return torch.ones(int(sizes.completions[indices].sum()))

    (found,) = score_shared(sizes, idle(kind), TrainerSection(micro_batch_tokens=100), score)
    assert len(found) == 0, "the other rank has the row"
    assert seen == expected


@pytest.mark.parametrize("kind", [Alone, Sharded])
def test_a_rank_without_rows_learns_nothing_but_takes_part_where_models_are_spread(
    config: Config, kind: type[Ranks]
) -> None:
    batch = whole(off_policy_groups()[:1], config)
    policy = Policy(config, Ranks())
    policy.ranks = idle(kind)
    sums, _ = policy._accumulate(batch, np.zeros(1, np.int64), first=True)
    gradients = [parameter.grad for parameter in policy.model.parameters()]
    assert sums["tokens"] == 0
    assert [gradient is not None for gradient in gradients] == [kind is Sharded] * len(gradients)
    assert not any(gradient.any() for gradient in gradients if gradient is not None)
