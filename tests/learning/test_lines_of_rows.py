"""Where every token of random rows is, packed and padded, what predicts it, and from which tokens it
was sampled: by brute force, without a model."""

from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from common.errors import ConfigError
from common.settings.sections import TrainerSection
from common.wire.schemas import Int32
from learning.batching import (
    Indices,
    Sizes,
    by_row,
    micro_batch_passes,
    owners,
    score_shared,
    split,
)
from learning.context import ContextGroup
from learning.layout import Layout, Packed, Padded, layout_for, moved
from learning.ranks import Ranks
from learning.routing import Routes
from learning.sampling_support import Sampled, Support
from tests.support.errors import raises
from tests.support.models.tiny_models import make

WIDTH = 4
"""Numbers of experts of a token."""


class Rows:
    """Random rows, of which some share their prompt, and some of these its experts."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.prompts: list[Int32] = []
        self.completions: list[Int32] = []
        self.masks: list[Int32 | None] = []
        self.routes: list[Routes] = []
        for _ in range(rng.integers(1, 4)):
            prompt = rng.integers(1, 99, rng.integers(1, 6)).astype(np.int32)
            of_prompt = self._experts(rng, len(prompt))
            for _ in range(rng.integers(1, 4)):
                length = int(rng.integers(0, 6))
                completion = rng.integers(1, 99, length).astype(np.int32)
                mask = rng.integers(0, 2, length).astype(np.int32)
                if rng.random() < 0.3:
                    of_prompt = self._experts(rng, len(prompt))
                self.prompts.append(prompt.copy() if rng.random() < 0.5 else prompt)
                self.completions.append(completion)
                self.masks.append(mask if rng.random() < 0.5 else None)
                of_completion = self._experts(rng, max(0, length - 1))
                self.routes.append(Routes(of_prompt.copy(), of_completion))

    def _experts(self, rng: np.random.Generator, tokens: int) -> NDArray[np.int16]:
        return rng.integers(0, 9, (tokens, WIDTH)).astype(np.int16)

    def wanted(self) -> list[tuple[int, int, int, int]]:
        """Returns of every token that counts: its row and place in its completion, the token before
        it and the place of that in prompt and completion."""
        found = []
        for row, (prompt, completion) in enumerate(
            zip(self.prompts, self.completions, strict=True)
        ):
            whole = [*prompt, *completion]
            mask = self.masks[row]
            for place in range(len(completion)):
                if mask is None or mask[place]:
                    before = len(prompt) + place - 1
                    found.append((row, place, int(whole[before]), before))
        return found

    def computed(self, routed: bool) -> int:
        """Returns the tokens of a line in which nothing is computed twice."""
        total = 0
        last: Any = None
        for prompt, completion, routes in zip(
            self.prompts, self.completions, self.routes, strict=True
        ):
            key = (prompt.tolist(), routes.prompt.tolist() if routed else None)
            total += max(0, len(completion) - 1) + (len(prompt) if key != last else 0)
            last = key
        return total


def _laid_out(kind: type[Layout], rows: Rows, routed: bool) -> Layout:
    routes = rows.routes if routed else ()
    return kind.of(rows.prompts, rows.completions, rows.masks, routes)


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("kind", [Padded, Packed])
def test_every_token_is_predicted_from_the_one_before_it(kind: type[Layout], routed: bool) -> None:
    for seed in range(100):
        rows = Rows(seed)
        line = _laid_out(kind, rows, routed)
        wanted = rows.wanted()
        places = line.predicts.tolist()
        assert len(places) == len(wanted)
        tokens = line.input_ids.flatten()
        width = line.input_ids.shape[1]
        positions = (
            torch.arange(len(tokens)) % width if line.position_ids is None else line.position_ids[0]
        )
        for at, (row, place, before, position) in zip(places, wanted, strict=True):
            assert int(tokens[at]) == before
            assert int(positions[at]) == position
            if isinstance(line, Padded):
                assert at // width == row
            if not routed:
                continue
            assert line.experts is not None
            routes = rows.routes[row]
            own = routes.completion[place - 1] if place else routes.prompt[-1]
            assert line.experts[:, at].tolist() == (own + 1).tolist()

        if routed:
            assert line.experts is not None
            assert line.experts.shape == (WIDTH, len(tokens))
            chosen = line.experts.ne(0).any(0)
            real = len(tokens) if isinstance(line, Packed) else _real(rows)
            assert int(chosen.sum()) == real
        if isinstance(line, Packed):
            assert len(tokens) == rows.computed(routed)
            assert line.places.tolist() == places


def _real(rows: Rows) -> int:
    """Returns the tokens of padded rows that are no padding."""
    sizes = zip(rows.prompts, rows.completions, strict=True)
    return sum(len(prompt) + max(0, len(completion) - 1) for prompt, completion in sizes)


def test_a_position_may_predict_several_tokens_and_ranks_share_a_line() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        rows = Rows(seed)
        packed = Packed.of(rows.prompts, rows.completions, rows.masks)
        padded = Padded.of(rows.prompts, rows.completions, rows.masks)
        counts = rng.integers(0, 4, len(packed.places))
        for line in (packed, padded):
            before = line.predicts.tolist()
            line.repeat(counts)
            wanted = [at for at, count in zip(before, counts, strict=True) for _ in range(count)]
            assert line.predicts.tolist() == wanted
        length = packed.input_ids.shape[1]
        middle = int(rng.integers(0, length + 1))
        owned: list[int] = []
        for bounds in ((0, middle), (middle, length)):
            context: Any = SimpleNamespace(bounds=lambda size, bounds=bounds: bounds)
            own = packed.own(context)
            assert own is not None
            assert all(bounds[0] <= packed.places[each] < bounds[1] for each in own)
            owned += own.tolist()
        assert sorted(owned) == list(range(len(packed.places)))
        assert packed.own(None) is None


class Part(ContextGroup):
    """A place among ranks that compute a line together, of which only this one runs."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank


class Echo(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A decoder whose states are the tokens and positions that it was given."""

    def forward(self, input_ids: Tensor, use_cache: bool, **options: Any) -> Any:
        assert not use_cache, "it would only take memory"
        counted = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        position_ids = options.get("position_ids", counted)
        return SimpleNamespace(last_hidden_state=torch.stack([input_ids, position_ids], -1))


def test_states_are_those_before_the_tokens_also_of_ranks_that_share_a_line() -> None:
    for seed in range(40):
        rows = Rows(seed)
        wanted = [[before, position] for _, _, before, position in rows.wanted()]
        for kind in (Padded, Packed):
            line = _laid_out(kind, rows, routed=False)
            assert line.hidden(Echo()).tolist() == wanted
            # Of a line that is somewhere else.
            line.position_ids = torch.full_like(line.input_ids, 9)
            assert line.hidden(Echo()).tolist() == [[before, 9] for before, _ in wanted]
        line = _laid_out(Packed, rows, routed=False)
        size = 1 + seed % 4
        found: list[Any] = [None] * len(wanted)
        for rank in range(size):
            context = Part(size, rank)
            own = line.own(context)
            assert own is not None
            states = line.hidden(Echo(), context).tolist()
            for at, state in zip(own.tolist(), states, strict=True):
                assert found[at] is None
                found[at] = state
        assert found == wanted


class Pinned(Tensor):  # type: ignore[misc]  # torch is not typed here
    """A tensor that needs no GPU to be pinned."""

    def pin_memory(self, *_: Any) -> Tensor:
        return self


@dataclass
class Parcel:
    tensor: Tensor
    inner: "Parcel | None"
    number: int


def test_all_tensors_of_a_dataclass_are_moved_and_nothing_else() -> None:
    one, other = (torch.ones(2, size).as_subclass(Pinned) for size in (3, 4))
    sent = Parcel(one, Parcel(other, None, 8), 7)
    assert moved(sent, torch.device("cpu")) is sent

    found = moved(sent, torch.device("meta"))

    assert isinstance(found.inner, Parcel)
    assert [found.tensor.device.type, found.inner.tensor.device.type] == ["meta", "meta"]
    assert [found.tensor.shape, found.inner.tensor.shape] == [one.shape, other.shape]
    assert [found.number, found.inner.number, found.inner.inner] == [7, 8, None]
    assert sent.tensor is one


def test_a_row_adds_its_tokens_and_their_attention_but_no_prompt_of_its_neighbour() -> None:
    rng = np.random.default_rng(0)
    for shared in (True, False) * 10:
        count = int(rng.integers(1, 8))
        groups = rng.integers(0, 3, count)
        prompts = rng.integers(1, 40_000, 3)[groups]
        completions = rng.integers(0, 40_000, count)
        sizes = Sizes(prompts=prompts, completions=completions, groups=groups, shared=shared)
        order = sizes.order(rng.permutation(count))

        def cost(tokens: int) -> float:
            return tokens * (1 + tokens / 24_576)

        wanted = []
        seen: set[int] = set()
        for row in order.tolist():
            total = int(prompts[row]) + max(0, int(completions[row]) - 1)
            repeated = shared and groups[row] in seen
            seen.add(groups[row])
            wanted.append(cost(total) - (cost(int(prompts[row])) if repeated else 0))
        np.testing.assert_allclose(sizes.costs(order), wanted, rtol=1e-12)


class Root(FSDPModule, nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A sharded model that notes after which passes its gradients are summed."""

    gathers_once = True

    def __new__(cls) -> "Root":
        return object.__new__(cls)

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.told: list[tuple[str, bool]] = []

    def set_requires_gradient_sync(self, requires: bool, **_: Any) -> None:
        self.told.append(("sums", requires))

    def set_requires_all_reduce(self, requires: bool, **_: Any) -> None:
        self.told.append(("sums", requires))

    def set_reshard_after_backward(self, reshards: bool, **_: Any) -> None:
        self.told.append(("reshards", reshards))


def test_ranks_pass_through_all_rows_once_and_through_equally_many_passes() -> None:
    """Only the last pass sums gradients; a rank without rows takes part where models are spread."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        world_size = int(rng.integers(1, 4))
        shard_size = int(rng.choice([1, world_size]))
        count = int(rng.integers(1, 7))
        sizes = Sizes(
            prompts=np.full(count, 3),
            completions=rng.integers(1, 9, count),
            groups=np.arange(count),
            shared=bool(seed % 2),
        )
        if rng.random() < 0.5:
            sizes.owners = rng.integers(0, world_size, count)
        settings = TrainerSection(micro_batch_tokens=int(rng.integers(4, 40)))
        found: list[int] = []
        passes = set()
        for rank in range(world_size):
            ranks = Ranks(rank, world_size, shard_size=shard_size)
            root = Root()
            yielded = list(
                micro_batch_passes(root, ranks, sizes, rows=np.arange(count), settings=settings)
            )
            own = [rows for rows, is_own in yielded if is_own]
            spare = [rows.tolist() for rows, is_own in yielded if not is_own]
            found += np.concatenate([np.zeros(0, np.int64), *own]).tolist()
            number = len(root.told) // 2
            ends = [False] * (number - 1) + [True]
            assert root.told == [(what, end) for end in ends for what in ("sums", "reshards")]
            passes.add(number)
            idle = number - len(own) if ranks.sharded else 0
            assert spare == [sizes.spare(ranks.share).tolist()] * idle

            scored = score_shared(sizes, ranks, settings, score=partial(_numbered, sizes))
            of_rank = {int(row) for rows in own for row in rows}
            for row, numbers in enumerate(scored):
                length = int(sizes.completions[row]) if row in of_rank else 0
                assert numbers.tolist() == [row] * length
        assert len(passes) == 1
        assert sorted(found) == list(range(count))


def _numbered(sizes: Sizes, rows: Indices) -> Tensor:
    return torch.from_numpy(np.repeat(rows, sizes.completions[rows]))


def test_a_token_may_be_drawn_from_a_list_from_all_but_some_or_from_all() -> None:
    """Also within one completion, whose first tokens are not to be some."""
    vocabulary = 20
    for seed in range(100):
        rng = np.random.default_rng(seed)
        sampled: list[Sampled | None] = []
        lengths = rng.integers(1, 6, rng.integers(1, 5)).tolist()
        allowed = []
        for length in lengths:
            least = int(rng.integers(0, 7))
            barred = rng.choice(vocabulary, rng.integers(1, 4), replace=False).astype(np.int32)
            lists = [
                rng.choice(vocabulary, rng.integers(0, 5), replace=False) for _ in range(length)
            ]
            kind = rng.integers(3)
            if kind == 0:
                sampled.append(None)
                allowed += [set(range(vocabulary))] * length
                continue
            if kind == 1:
                lists = [rng.choice(vocabulary, 0)] * length
            counts = [len(each) for each in lists] if kind == 2 else []
            kept = np.concatenate(lists).astype(np.int32)
            sampled.append(Sampled(kept, np.array(counts, np.int32), barred, least))
            for place, each in enumerate(lists):
                free = set(range(vocabulary)) - (set(barred.tolist()) if place < least else set())
                allowed.append(set(each.tolist()) if len(each) else free)
        support = Support.of(sampled, lengths)
        assert (support is None) is all(each is None for each in sampled)
        if support is None:
            continue
        logits = torch.from_numpy(rng.normal(size=(len(allowed), vocabulary)))
        chosen = np.sort(rng.choice(len(allowed), rng.integers(len(allowed)), replace=False))
        first = int(rng.integers(len(allowed)))
        last = int(rng.integers(first, len(allowed) + 1))
        found = {
            "all": (support.apply(logits.clone(), 0), list(range(len(allowed)))),
            "a chunk": (support.apply(logits[first:last].clone(), first), list(range(first, last))),
            "some": (support.only_for(chosen).apply(logits[chosen].clone(), 0), chosen.tolist()),
        }
        for lowered, places in found.values():
            assert len(lowered) == len(places)
            for line, place in zip(lowered, places, strict=True):
                may_be = torch.tensor([token in allowed[place] for token in range(vocabulary)])
                assert torch.equal(line[may_be], logits[place][may_be])
                assert (line[~may_be] == -1e30).all()


def test_numbers_of_rows_come_back_to_their_rows() -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(0, 5, rng.integers(1, 9))
        values = [rng.normal(size=length).astype(np.float32) for length in lengths]
        order = rng.permutation(len(lengths))
        parts = np.array_split(order[: rng.integers(len(lengths) + 1)], 3)
        scored = [
            (
                part,
                torch.from_numpy(
                    np.concatenate([np.zeros(0, np.float32), *(values[i] for i in part)])
                ),
            )
            for part in parts
            if len(part)
        ]
        computed = {int(i) for part in parts for i in part}
        for row, found in enumerate(by_row(scored, lengths)):
            wanted = values[row] if row in computed else np.zeros(0)
            assert found.tolist() == wanted.tolist()
            assert found.dtype == np.float32
        flat = np.concatenate(values)
        assert [each.tolist() for each in split(flat, lengths.tolist())] == [
            each.tolist() for each in values
        ]
    assert split(np.zeros(0, np.float32), []) == []


def test_rows_that_share_a_prompt_and_owners_are_measured() -> None:
    for seed in range(50):
        rng = np.random.default_rng(seed)
        rows = Rows(seed)
        measured: Any = [
            SimpleNamespace(prompt_ids=prompt, completion_ids=completion)
            for prompt, completion in zip(rows.prompts, rows.completions, strict=True)
        ]
        sizes = Sizes.of(measured, shared=bool(seed % 2))
        names = [prompt.tolist() for prompt in rows.prompts]
        for one, other in np.ndindex(len(names), len(names)):
            is_same = sizes.groups[one] == sizes.groups[other]
            assert is_same == (names[one] == names[other])
        chosen = np.flatnonzero(rng.random(len(names)) < 0.6)
        packed = {tuple(names[i]) for i in chosen}
        computed = [max(0, len(rows.completions[i]) - 1) for i in chosen]
        totals = [len(names[i]) + size for i, size in zip(chosen, computed, strict=True)]
        wanted = (
            sum(map(len, packed)) + sum(computed)
            if sizes.shared
            else max(totals, default=0) * len(chosen)
        )
        assert sizes.together(chosen) == wanted

        count = int(rng.integers(1, 4))
        cut = int(rng.integers(len(names) + 1))
        order = rng.permutation(len(names))
        sizes.owners = owners(sizes, [order, order[:cut]], count)
        assert sizes.owners.dtype == np.int64
        assert set(sizes.owners.tolist()) <= set(range(count))
        owned = [sizes.owned(share).tolist() for share in range(count)]
        assert sorted(chain.from_iterable(owned)) == list(range(len(names)))
        for share, own in enumerate(owned):
            assert sizes.spare(share).tolist() == (own[:1] or [0])


def test_no_rows_are_measured_in_whole_numbers_too() -> None:
    sizes = Sizes.of([], shared=True)
    assert {sizes.prompts.dtype, sizes.completions.dtype, sizes.groups.dtype} == {np.dtype("int64")}


def test_models_that_cannot_be_packed_are_padded_and_ranks_divide_the_heads() -> None:
    plain = make("qwen3")  # of four heads
    assert layout_for(plain, "off") is Padded
    assert layout_for(plain, "auto", Part(2, 0)) is Packed
    with raises(ConfigError, field="parallel.context_size", value="3"):
        layout_for(plain, "auto", Part(3, 0))
    with raises(ConfigError, field="parallel.context_size", value="2"):
        layout_for(plain, "off", Part(2, 0))
    dropping = make("qwen3", attention_dropout=0.1)
    assert layout_for(dropping, "auto") is Padded
    with raises(ConfigError, field="trainer.packing", value="on"):
        layout_for(dropping, "on")
