"""Linear layers over packed rows: a state that begins anew with each row and continues after a
shared prompt.

A linear layer (Mamba, gated delta rule, short convolution) keeps a state from token to token, so it
cannot be told which tokens of a line belong together. Here it computes rows instead, taken from the
line and put back into it:

    line    p0 p1 p2 p3 a0 a1 a2 b0        a prompt of 4 tokens and its two completions
    heads   p0 p1 p2 p3                    once; its last state is kept
    tails   a0 a1 a2                       from that state
            b0  ·  ·                       from that state; nothing depends on what follows

The layer of transformers is called as always, on rows of similar length, so this works for every
kind of layer and with any kernel. The state is what transformers would keep in its cache, with a
gradient.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from inspect import getsource, signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from common.errors import ConfigError

_Array = NDArray[np.int64]
_CALL = 512
"""Tokens that a layer computes in the time that a further call of it takes."""
_STATES = ("cache_params", "past_key_values")
"""What transformers calls the argument for the states."""


@dataclass(slots=True)
class StateRows:
    """The rows in which linear layers compute a packed line of T tokens."""

    calls: list[tuple[int, int]]
    """Rows and width of each call: of heads, of tails, and of rows that begin anew."""
    heads: int
    """How many calls are for heads: beginnings of prompts, whose states are kept."""
    tails: int
    """How many of the next calls continue from these."""
    tokens: Tensor
    """[sum of rows · width] places in the line, by call and row; 0 after the end of a row."""
    states: Tensor
    """[rows of the tails] the rows of the heads whose states they continue."""
    back: Tensor
    """[T] the position of each token of the line in `tokens`."""

    @classmethod
    def of(cls, columns: tuple[_Array, ...], continues: bool) -> "StateRows":
        """Arranges the segments of a line, described as for `Segments.of`.

        Args:
            columns: starts and sizes of the segments, and of the prompts before them.
            continues: whether the layers can continue from a state. If not, a prompt is computed
                again with each of its completions.
        """
        rows: list[_Array] = []
        calls: list[tuple[int, int]] = []
        tails: list[_Array] = []
        head_of: list[int] = []
        families = _families(columns)
        shared = [i for i, (_, own) in enumerate(families) if continues and len(own) > 1]
        anew = set(range(len(families))).difference(shared)
        prompts = [families[i][0] for i in shared]
        for part in _alike(prompts, [len(families[i][1]) for i in shared]):
            cut = len(prompts[part[-1]])
            numbers = [shared[i] for i in part]
            saved = cut * sum(len(families[number][1]) - 1 for number in numbers)
            if saved <= _CALL:
                anew.update(numbers)
                continue
            calls.append((len(part), cut))
            for number in numbers:
                prompt, completions = families[number]
                head_of += [len(rows)] * len(completions)
                rows.append(prompt[:cut])
                # What longer prompts have beyond the cut is computed with each completion.
                tails += [np.concatenate([prompt[cut:], each]) for each in completions]

        heads = len(calls)
        continued = 0
        states: list[int] = []
        for part in _alike(tails):
            # transformers computes a single token after a state in place, which has no gradient.
            calls.append((len(part), max(2, len(tails[part[0]]))))
            continued += 1
            states += [head_of[i] for i in part]
            rows += [tails[i] for i in part]

        whole: list[_Array] = []
        for prompt, completions in (families[number] for number in sorted(anew)):
            # A prompt without completions is a row too.
            whole += [np.concatenate([prompt, each]) for each in completions or [prompt[:0]]]
        for part in _alike(whole):
            calls.append((len(part), len(whole[part[0]])))
            rows += [whole[i] for i in part]

        widths = [width for count, width in calls for _ in range(count)]
        firsts = np.cumsum([0, *widths]).tolist()
        tokens = np.zeros(firsts[-1], np.int64)
        back = np.zeros(columns[1].sum(), np.int64)
        # Backwards, so that a token of several rows comes from the first.
        for number, row in reversed(list(enumerate(rows))):
            places = firsts[number] + np.arange(len(row))
            tokens[places] = row
            back[row] = places
        return cls(
            calls=calls,
            heads=heads,
            tails=continued,
            tokens=torch.from_numpy(tokens),
            states=torch.tensor(states, dtype=torch.int64),
            back=torch.from_numpy(back),
        )


def _families(columns: tuple[_Array, ...]) -> list[tuple[_Array, list[_Array]]]:
    """Returns the places of each prompt in the line, and of its completions."""
    found: dict[int, tuple[_Array, list[_Array]]] = {}
    for start, size, prompt_start, prefix in zip(*(c.tolist() for c in columns), strict=True):
        places = np.arange(start, start + size)
        if prefix:
            found[prompt_start][1].append(places)
        else:
            found[start] = (places, [])
    return list(found.values())


def _alike(rows: list[_Array], weights: list[int] | None = None) -> Iterator[list[int]]:
    """Yields groups of rows of similar length, by index, longest first. Padding the rows of a group
    to one length costs less than another call would.
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    factors = np.array(weights or np.ones_like(lengths))
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        missing = (lengths[order[0]] - lengths[order]) * factors[order]
        end = int((np.cumsum(missing) <= _CALL).sum())
        yield order[:end].tolist()
        order = order[end:]


class _State:
    """The state of one layer after the tokens of some rows: transformers' cache without changes in
    place, which would cut the gradient.
    """

    def __init__(self, tensors: dict[tuple[str, int], Tensor]) -> None:
        # [rows, ...] of the convolutions and the recurrences that a layer has, by number.
        self._tensors = tensors

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> Tensor | None:
        return self._tensors.get(("conv", state_idx))

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> Tensor | None:
        return self._tensors.get(("recurrent", state_idx))

    def is_recording_past(self, _layer: int) -> bool:
        return False

    def update_conv_state(
        self, inputs: Tensor, _layer: int, conv_kernel_size: int, state_idx: int = 0
    ) -> Tensor:
        """Keeps the last inputs of the convolution; returns `inputs` [rows, channels, T] with those
        before them.
        """
        before = self._tensors.get(("conv", state_idx))
        if before is not None:
            inputs = torch.cat([before, inputs], -1)
        # Zeros in front if there are fewer inputs than the kernel has, and else a cut.
        missing = conv_kernel_size - inputs.shape[-1]
        self._tensors["conv", state_idx] = pad(inputs, (missing, 0))
        return inputs

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0) -> None:
        self._tensors["recurrent", state_idx] = state

    @classmethod
    def after(cls, states: list["_State"], rows: Tensor) -> "_State":
        """Returns the states of some of the rows of all `states`; a row may be taken repeatedly."""
        names = states[0]._tensors
        return cls(
            {name: torch.cat([one._tensors[name] for one in states])[rows] for name in names}
        )


class LinearLayer:
    """Computes the linear layer `mixer` of a decoder layer row by row where the decoder layer is
    given `state_rows`; changes both in place.
    """

    def __init__(self, layer: nn.Module, mixer: nn.Module) -> None:
        self._layer_forward = layer.forward
        self._forward = mixer.forward
        self._state = _state_argument(mixer)
        self._rows: StateRows | None = None
        layer.forward = self._with_rows
        mixer.forward = self._by_rows

    def _with_rows(self, *inputs: Any, state_rows: StateRows | None = None, **options: Any) -> Any:
        # Not every decoder layer passes its options on.
        self._rows = state_rows
        return self._layer_forward(*inputs, **options)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch is not typed here
    def _by_rows(self, hidden_states: Tensor, **options: Any) -> Any:
        """Returns [1, T, H] from a packed line [1, T, H]; without rows what it always does."""
        rows = self._rows
        if rows is None:
            mask = options.get("attention_mask")
            if mask is not None and mask.ndim != 2:  # that of a packed line
                raise not_packed("are not given the options of their model")
            return self._forward(hidden_states, **options)
        parts = embedding(rows.tokens, hidden_states[0]).split([n * size for n, size in rows.calls])
        continuing = rows.calls[rows.heads : rows.heads + rows.tails]
        states_of = rows.states.split([count for count, _ in continuing])
        results: list[Tensor] = []
        states: list[_State] = []
        for number, call in enumerate(rows.calls):
            tail = number - rows.heads
            if tail < 0:
                states.append(_State({}))
                options[self._state] = states[-1]
            elif tail < rows.tails:
                options[self._state] = _State.after(states, states_of[tail])
            else:
                options[self._state] = None
            result = self._forward(parts[number].unflatten(0, call), **options)
            results.append(result.flatten(0, 1))
        return embedding(rows.back, torch.cat(results))[None]


def linear_layers(body: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Returns the decoder layers of a transformers model that have a linear layer, and that one.

    Such a module has a convolution and an argument for the state.
    """
    return [
        (layer, mixer)
        for layer in body.modules()
        for mixer in layer.children()
        if any(isinstance(child, nn.Conv1d) for child in mixer.children())
        and _state_argument(mixer)
        and "kwargs" in signature(type(layer).forward).parameters
    ]


def compute_by_rows(body: nn.Module) -> None:
    """Makes every linear layer of a model compute rows where the model is given `state_rows`."""
    for layer, mixer in linear_layers(body):
        if not is_by_rows(mixer):
            LinearLayer(layer, mixer)


def is_by_rows(module: nn.Module) -> bool:
    """Whether `compute_by_rows` has changed this linear layer."""
    return isinstance(getattr(module.forward, "__self__", None), LinearLayer)


def continues_states(body: nn.Module) -> bool | None:
    """Returns whether all linear layers of a model can continue from a state, as most can and those
    of the first Mamba cannot; None for a model without any.
    """
    found = [_continues(type(mixer).forward) for _, mixer in linear_layers(body)]
    return all(found) if found else None


@cache
def _continues(forward: Callable[..., Any]) -> bool:
    code = getsource(forward)
    return "initial_state" in code or "recurrent_state" not in code


def _state_argument(mixer: nn.Module) -> str:
    """Returns the name of the argument for the state; empty if there is none."""
    names = signature(type(mixer).forward).parameters
    if "attention_mask" not in names:  # it is a part of one
        return ""
    return next((name for name in _STATES if name in names), "")


def not_packed(reason: str) -> ConfigError:
    """Returns the error for layers that cannot be told which tokens of a line belong together."""
    return ConfigError(
        f"the layers of this model {reason}, so its rows cannot be packed",
        field="trainer.packing",
        remedy="set it to off",
    )
