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

from dataclasses import dataclass
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

    heads: list[tuple[int, int]]
    """Rows and width of each call for the beginnings of prompts, whose states are kept."""
    tails: list[tuple[int, int]]
    """Likewise for what follows these."""
    whole: list[tuple[int, int]]
    """Likewise for rows that begin anew."""
    tokens: Tensor
    """[sum of rows · width] places in the line, by call and row; 0 after the end of a row."""
    states: Tensor
    """[rows of `tails`] the rows of `heads` whose states they continue."""
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
        families = _families(columns)
        shared = _shared(families) if continues else []
        heads: list[_Array] = []
        continued: list[_Array] = []
        state_of: list[int] = []
        for cut, members in shared:
            for family in members:
                state_of += [len(heads)] * len(family.completions)
                heads.append(family.prompt[:cut])
                continued += family.rows(cut)
        is_shared = {id(family) for _, members in shared for family in members}
        whole = [row for family in families if id(family) not in is_shared for row in family.rows()]

        # transformers computes a single token after a state in place, which has no gradient.
        calls_after, order_after = _calls(continued, narrowest=2)
        calls_anew, order_anew = _calls(whole, narrowest=1)
        calls = [(len(members), cut) for cut, members in shared]
        rows = heads + [continued[i] for i in order_after] + [whole[i] for i in order_anew]
        counts, sizes = np.array([*calls, *calls_after, *calls_anew]).T
        widths = np.repeat(sizes, counts)
        firsts = np.cumsum(widths) - widths
        tokens = np.zeros(widths.sum(), np.int64)
        back = np.zeros(int(columns[1].sum()), np.int64)
        # Backwards, so that a token of several rows comes from the first.
        for row, first in zip(reversed(rows), reversed(firsts.tolist()), strict=True):
            places = first + np.arange(len(row))
            tokens[places] = row
            back[row] = places
        return cls(
            heads=calls,
            tails=calls_after,
            whole=calls_anew,
            tokens=torch.from_numpy(tokens),
            states=torch.tensor([state_of[i] for i in order_after], dtype=torch.int64),
            back=torch.from_numpy(back),
        )


@dataclass(slots=True, eq=False)
class _Family:
    """A prompt and its completions, as places in the line."""

    prompt: _Array
    completions: list[_Array]

    def rows(self, cut: int = 0) -> list[_Array]:
        """Returns a row for each completion, with its prompt from the token `cut` on."""
        own = self.completions or [self.prompt[:0]]
        return [np.concatenate([self.prompt[cut:], completion]) for completion in own]


def _families(columns: tuple[_Array, ...]) -> list[_Family]:
    found: dict[int, _Family] = {}
    for start, size, prompt_start, prefix in zip(*(c.tolist() for c in columns), strict=True):
        places = np.arange(start, start + size)
        if prefix:
            found[prompt_start].completions.append(places)
        else:
            found[start] = _Family(places, [])
    return list(found.values())


def _shared(families: list[_Family]) -> list[tuple[int, list[_Family]]]:
    """Returns the prompts whose beginnings are computed once: for each call, the length of the
    beginnings, and the prompts.

    What a prompt has beyond that length is computed with each of its completions.
    """
    several = [family for family in families if len(family.completions) > 1]
    several.sort(key=lambda family: -len(family.prompt))
    calls: list[tuple[int, list[_Family]]] = []
    again = 0
    for family in several:
        size = len(family.prompt)
        joins = False
        if calls:
            cut, members = calls[-1]
            again += (cut - size) * sum(len(member.completions) for member in members)
            joins = again <= _CALL
        if joins:
            calls[-1] = (size, [*members, family])
        else:
            calls.append((size, [family]))
            again = 0
    return [
        (cut, members)
        for cut, members in calls
        if cut * sum(len(member.completions) - 1 for member in members) > _CALL
    ]


def _calls(rows: list[_Array], narrowest: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns the rows and the width of each call for these rows, and the order of the rows.

    Rows of one call are so similar in length that padding them costs less than a further call.
    """
    lengths = np.array([len(row) for row in rows], np.int64)
    order = np.argsort(-lengths, kind="stable")
    lengths = lengths[order]
    calls: list[tuple[int, int]] = []
    done = 0
    while done < len(rows):
        longest = int(lengths[done])
        padding = np.cumsum(longest - lengths[done:])
        count = int((padding <= _CALL).sum())
        calls.append((count, max(longest, narrowest)))
        done += count
    return calls, order.tolist()


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

    def of(self, rows: Tensor) -> "_State":
        """Returns the states of some `rows`, which may be repeated."""
        return _State({name: state[rows] for name, state in self._tensors.items()})

    @classmethod
    def joined(cls, states: list["_State"]) -> "_State":
        """Returns the states of the rows of all `states`."""
        names = states[0]._tensors
        return cls({name: torch.cat([one._tensors[name] for one in states]) for name in names})


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
        calls = [*rows.heads, *rows.tails, *rows.whole]
        parts = embedding(rows.tokens, hidden_states[0]).split([n * width for n, width in calls])
        inputs = [part.unflatten(0, call) for part, call in zip(parts, calls, strict=True)]

        results: list[Tensor] = []
        states: list[_State] = []
        for part in inputs[: len(rows.heads)]:
            states.append(_State({}))
            results.append(self._forward(part, **options | {self._state: states[-1]}))
        continued = inputs[len(rows.heads) : len(rows.heads) + len(rows.tails)]
        which = rows.states.split([n for n, _ in rows.tails])
        for part, heads in zip(continued, which, strict=True):
            state = _State.joined(states).of(heads)
            results.append(self._forward(part, **options | {self._state: state}))
        results += [self._forward(part, **options) for part in inputs[len(results) :]]
        line = torch.cat([result.flatten(0, 1) for result in results])
        return embedding(rows.back, line)[None]


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
        if not isinstance(getattr(mixer.forward, "__self__", None), LinearLayer):
            LinearLayer(layer, mixer)


def continues_states(body: nn.Module) -> bool | None:
    """Returns whether all linear layers of a model can continue from a state, as most can and those
    of the first Mamba cannot; None for a model without any.
    """
    found = [getsource(type(mixer).forward) for _, mixer in linear_layers(body)]
    if not found:
        return None
    return all("initial_state" in code or "recurrent_state" not in code for code in found)


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
