"""Lays out prompts and completions as the tensors that a model reads: padded, or packed without
padding.

C is the number of unmasked completion tokens of all rows. Results for them are concatenated in the
order of the rows. The last token of a completion predicts nothing and is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from common.errors import ConfigError
from common.wire.schemas import Int32
from learning.attention import NAME, Segments, gathered, ranges, register, unpackable
from learning.context import ContextGroup, check_heads
from learning.linear_layers import (
    StateRows,
    compute_by_rows,
    continues_states,
    linear_layers,
)
from learning.routing import Experts, Routes

Packing = Literal["auto", "on", "off"]
_Array = NDArray[np.int64]
_T = TypeVar("_T")


@dataclass(slots=True)
class Padded:
    """One tensor row per row, padded on the right.

    It needs no mask, because causal attention never sees the padding.
    """

    shared: ClassVar[bool] = False
    """Whether rows with the same prompt share its computation, and nothing is padded."""
    input_ids: Tensor
    """[rows, T]"""
    predicts: Tensor
    """[C] positions in the flattened [rows · T] whose next token is a completion token."""
    experts: Tensor | None = None
    """[layers · top_k, rows · T] as `Routers.given`; None where routers choose."""
    position_ids: Tensor | None = None
    """[rows, T]; None for 0 to T - 1."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Int32],
        completions: Sequence[Int32],
        masks: Sequence[Int32 | None] = (),
        routes: Sequence[Routes] = (),
    ) -> Self:
        """Lays out rows of [P] and [L] token ids; prompts must not be empty.

        `masks` [L] drop completion tokens where 0. `routes` are the experts to compute the tokens
        with.
        """
        sequences = [
            np.concatenate([prompt, completion[:-1]])
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        width = max(map(len, sequences))
        input_ids = np.zeros((len(prompts), width), np.int64)
        for row, sequence in zip(input_ids, sequences, strict=True):
            row[: len(sequence)] = sequence
        first = np.arange(len(prompts)) * width + _lengths(prompts) - 1
        predicts = _kept(ranges(first, _lengths(completions)), completions, masks)

        experts: Tensor | None = None
        if routes:
            given = np.zeros((len(prompts), width, routes[0].prompt.shape[1]), np.int16)
            for of_row, route in zip(given, routes, strict=True):
                computed = np.concatenate(route)
                of_row[: len(computed)] = computed + 1
            experts = _by_layer(given.reshape(-1, given.shape[2]))
        return cls(torch.from_numpy(input_ids), torch.from_numpy(predicts), experts)

    def repeat(self, counts: _Array) -> None:
        """Lets every position predict as many tokens as `counts` [C] says, instead of one."""
        self.predicts = self.predicts.repeat_interleave(torch.from_numpy(counts))

    def own(self, context: ContextGroup | None) -> _Array | None:
        """Returns None: padded rows are never computed by several ranks together."""
        assert context is None, "`layout_for` refuses it"
        return None

    def hidden(self, body: nn.Module, context: ContextGroup | None = None) -> Tensor:
        """Returns [C, H] final hidden states of `body` (a decoder without its head) that predict
        the completions.
        """
        assert context is None, "`layout_for` refuses it"
        # Some models of other publishers cannot be told positions.
        positions = {} if self.position_ids is None else {"position_ids": self.position_ids}
        states = body(input_ids=self.input_ids, use_cache=False, **positions).last_hidden_state
        return gathered(states.flatten(0, 1), self.predicts)


@dataclass(slots=True)
class Packed:
    """All rows in one line of T tokens without padding; a prompt shared by consecutive rows is
    computed only once.

    Prompt, completion 1 … completion n, next prompt …: a completion's positions continue after its
    prompt, and it attends to its prompt and to itself. The state of a prompt's last token predicts
    the first token of every completion.
    """

    shared: ClassVar[bool] = True
    input_ids: Tensor
    """[1, T]"""
    position_ids: Tensor
    """[1, T]"""
    predicts: Tensor
    """[C] positions in the line whose next token is a completion token; a prompt's end occurs once
    per completion."""
    segments: Segments
    """Which tokens attend to which."""
    places: _Array
    """[C] `predicts`, which stays in CPU memory."""
    experts: Tensor | None = None
    """[layers · top_k, T] as `Routers.given`; None where routers choose."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Int32],
        completions: Sequence[Int32],
        masks: Sequence[Int32 | None] = (),
        routes: Sequence[Routes] = (),
    ) -> Self:
        """Lays out rows like `Padded.of`. Rows that share a prompt must be consecutive; with
        `routes`, they share it only if it is to be computed with the same experts.
        """
        is_first: list[bool] = []  # of the rows that share its prompt
        tokens: list[Int32] = []
        given: list[Experts] = []
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            shared = i > 0 and _same(prompt, prompts[i - 1])
            if routes:
                shared = shared and _same(routes[i].prompt, routes[i - 1].prompt)
                given += [routes[i].completion] if shared else routes[i]
            is_first.append(not shared)
            if not shared:
                tokens.append(prompt)
            tokens.append(completion[:-1])
        first = np.array(is_first)

        sizes = _lengths(prompts)
        lengths = _lengths(completions)
        computed = np.maximum(lengths - 1, 0)
        starts = np.cumsum(computed + sizes * first) - computed  # of the completions
        prompt_starts = (starts - sizes)[first][np.cumsum(first) - 1]

        # The end of its prompt predicts a completion's first token.
        some = lengths > 0
        predicts = ranges(starts - 1, lengths)
        predicts[(np.cumsum(lengths) - lengths)[some]] = (prompt_starts + sizes - 1)[some]

        # The segments: prompt and completion of every row in turn, without prompts that were there
        # already and completions of which nothing is computed.
        there = _alternating(first, computed > 0)
        segment_starts = _alternating(prompt_starts, starts)[there]
        segment_sizes = _alternating(sizes, computed)[there]
        prefix_starts = _alternating(prompt_starts, prompt_starts)[there]
        prefixes = _alternating(np.zeros_like(sizes), sizes)[there]
        places = _kept(predicts, completions, masks)
        return cls(
            input_ids=torch.from_numpy(np.concatenate(tokens).astype(np.int64))[None],
            position_ids=torch.from_numpy(ranges(prefixes, segment_sizes))[None],
            predicts=torch.from_numpy(places),
            segments=Segments.of(
                segment_starts, segment_sizes, prefix_starts=prefix_starts, prefixes=prefixes
            ),
            places=places,
            experts=_by_layer(np.concatenate(given) + 1) if routes else None,
        )

    def repeat(self, counts: _Array) -> None:
        """See `Padded.repeat`."""
        self.places = np.repeat(self.places, counts)
        self.predicts = torch.from_numpy(self.places)

    def own(self, context: ContextGroup | None) -> _Array | None:
        """Returns which of the C completion tokens this rank's part of the line predicts, as
        indices; None when it has the whole line.
        """
        if context is None:
            return None
        start, end = context.bounds(self.input_ids.shape[1])
        return np.flatnonzero((self.places >= start) & (self.places < end))

    def hidden(self, body: nn.Module, context: ContextGroup | None = None) -> Tensor:
        """Returns [C, H] final hidden states of `body` (a decoder without its head) that predict
        the completions; with `context` only this rank's `own` ones.
        """
        states = self._states(body, context)
        own = self.own(context)
        if context is None or own is None:
            return gathered(states, self.predicts)
        start, _ = context.bounds(self.input_ids.shape[1])
        places = torch.from_numpy(self.places[own] - start)
        return gathered(states, moved(places, states.device))

    def _states(self, body: nn.Module, context: ContextGroup | None = None) -> Tensor:
        """Returns the final hidden states of the line [T, H], or of this rank's part of it."""
        input_ids = self.input_ids
        position_ids = self.position_ids
        if context is not None:
            input_ids = context.part(input_ids)
            position_ids = context.part(position_ids)
        options: dict[str, Any] = {}
        continues = continues_states(body)
        if continues is not None:
            options["state_rows"] = moved(
                StateRows.of(self.segments.columns, continues), input_ids.device
            )
        states: Tensor = body(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=self.segments.mask,
            use_cache=False,
            segments=self.segments,
            context=context,
            **options,
        ).last_hidden_state[0]
        return states


Layout = Padded | Packed


def layout_for(model: Any, packing: Packing, context: ContextGroup | None = None) -> type[Layout]:
    """Returns the layout for a transformers model and prepares the model for it.

    `auto` packs if the model supports it; with `on`, raises ConfigError naming `trainer.packing` if
    it does not. With `context`, raises ConfigError for a model that these ranks cannot compute
    together.
    """
    reason = unpackable(model) if packing != "off" else "it is off"
    if context is not None:
        if reason:
            raise not_together(f"this model does not support packing: {reason}", context)
        if linear_layers(model):
            raise not_together("this model has layers that keep a state", context)
        check_heads(model, context)
    if packing == "on" and reason:
        raise ConfigError(
            f"this model does not support packing: {reason}",
            field="trainer.packing",
            value=packing,
            remedy="set it to auto, which pads the rows of such a model",
        )
    if reason:
        return Padded
    register()
    model.set_attn_implementation(NAME)
    compute_by_rows(model)
    return Packed


def not_together(reason: str, context: ContextGroup) -> ConfigError:
    """Returns the error for rows that several ranks cannot compute together, with the reason."""
    return ConfigError(
        f"context parallelism needs packed rows and attention in every layer, and {reason}",
        field="parallel.context_size",
        value=context.size,
        remedy="set it to 1, or trainer.packing to auto if it is off",
    )


def moved(value: _T, device: torch.device) -> _T:
    """Copies a tensor, or the tensors of a dataclass, to `device`; to a GPU asynchronously."""
    if device.type == "cpu" or not (isinstance(value, Tensor) or is_dataclass(value)):
        return value
    if isinstance(value, Tensor):
        source = value if value.is_cuda else value.pin_memory()
        return cast(_T, source.to(device, non_blocking=True))
    on_device = {field.name: moved(getattr(value, field.name), device) for field in fields(value)}
    return cast(_T, replace(cast(Any, value), **on_device))


def _kept(predicts: _Array, completions: Sequence[Int32], masks: Sequence[Int32 | None]) -> _Array:
    """Returns the positions of the tokens that are not masked."""
    if not any(mask is not None for mask in masks):
        return predicts
    kept = [
        np.ones(len(ids)) if mask is None else mask
        for ids, mask in zip(completions, masks, strict=True)
    ]
    found: _Array = predicts[np.concatenate(kept) == 1]
    return found


def _same(array: NDArray[Any], other: NDArray[Any]) -> bool:
    """Whether two arrays are equal. The rows of a group mostly share one array, which needs no
    comparison.
    """
    return array is other or np.array_equal(array, other)


def _by_layer(given: Experts) -> Tensor:
    """Returns [layers · top_k, T] from [T, layers · top_k]."""
    return torch.from_numpy(np.ascontiguousarray(given.T))


def _lengths(rows: Sequence[Int32]) -> _Array:
    return np.array([len(row) for row in rows], np.int64)


def _alternating(even: NDArray[Any], odd: NDArray[Any]) -> NDArray[Any]:
    """Returns even[0], odd[0], even[1], odd[1] and so on."""
    alternating: NDArray[Any] = np.stack([even, odd], 1).reshape(-1)
    return alternating
