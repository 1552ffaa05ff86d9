"""What the running rows keep between steps: keys and values, a dense row per completion with
position p in column p, and the states of convolutional and recurrent layers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from common.errors import ConfigError

_STATES = ("conv_states", "recurrent_states")


class _Keys(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """Keys and values [rows, kv_heads, columns, head_dim] of one layer; rows and columns are
    capacities.
    """

    def __init__(self, shared: "SlotCache") -> None:
        super().__init__()
        self.shared = shared

    def make_room(self, keys: Tensor, values: Tensor) -> None:
        """Allocates storage for keys and values like these."""
        rows = self.shared.rows
        columns = self.shared.columns
        self.keys = keys.new_zeros(rows, keys.shape[1], columns, keys.shape[3])
        self.values = values.new_zeros(rows, values.shape[1], columns, values.shape[3])
        self.is_initialized = True

    lazy_initialization = make_room

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.make_room(key_states, value_states)
        return self.shared.write(self, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.shared.length, 0

    def get_seq_length(self) -> int:
        return self.shared.before

    def get_max_length(self) -> int:
        return -1


class _States(LinearAttentionLayer):  # type: ignore[misc]  # transformers is not typed
    """States of one layer: `stored` has those of all rows, and the inherited attributes those of
    the rows of the current pass, which transformers' layers change in place.
    """

    def __init__(self, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.stored: dict[tuple[str, int], Tensor] = {}
        """[rows, …] by kind and number of the state; `rows` is a capacity."""

    def begin(self, rows: Tensor | slice | None) -> None:
        """Gives the pass the states of `rows`; with None its rows begin without any."""
        for index in range(self.number_of_states):
            for kind in _STATES:
                stored = self.stored.get((kind, index))
                states = None if rows is None or stored is None else stored[rows]
                getattr(self, kind)[index] = states
                getattr(self, f"is_{kind}_initialized")[index] = states is not None
            self.has_previous_state[index] = rows is not None

    def end(self, rows: Tensor | slice, owners: Tensor | None, capacity: int) -> None:
        """Stores the states of the pass, or those of its rows `owners`, in `rows`."""
        for kind in _STATES:
            for index, states in getattr(self, kind).items():
                if states is None:
                    continue
                if (kind, index) not in self.stored:
                    self.stored[kind, index] = states.new_zeros(capacity, *states.shape[1:])
                stored = self.stored[kind, index]
                # A step's states are a view of what is stored.
                if states.data_ptr() != stored.data_ptr():
                    stored[rows] = states if owners is None else states[owners]

    def resize(self, rows: int) -> None:
        """Makes room for this many rows; the states of the first ones stay."""
        for key, stored in self.stored.items():
            grown = stored.new_zeros(rows, *stored.shape[1:])
            kept = min(rows, len(stored))
            grown[:kept] = stored[:kept]
            self.stored[key] = grown


class _KeysAndStates(_States, _Keys):
    """A layer with both."""

    def __init__(self, shared: "SlotCache", number_of_states: int) -> None:
        _Keys.__init__(self, shared)
        _States.__init__(self, number_of_states)


class SlotCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """Keys, values and states of the running rows, for prefills and for decode steps of one token
    per row.

    Every pass is begun here (`begin_prefill`, `begin_tokens`), computed by the model and ended here
    (`end`). Storage doubles as needed in both directions, unless `allocate` fixed its size. It is
    zeroed, because even a masked NaN would spread.

    A state has no positions: it is that of the last token that was computed, whichever that was. So
    a pass over prompts with states has no padding (`has_states`), and no row may miss a step or
    compute one twice.
    """

    write: Callable[[_Keys, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Stores the keys and values of the current pass; returns those to attend to."""
    _visible: Callable[[int | None], Tensor]

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        """Makes a cache for a model of this text configuration.

        Raises ConfigError for layers that keep something else.
        """
        self.config = config
        self.device = device
        self.dtype = dtype
        self.rows = 0
        self.columns = 0
        self.length = 1
        """Columns of the current pass."""
        self.longest = 1
        """Columns that some row may use."""
        self.before = 0
        self.token_rows: Tensor | None = None
        """[B] rows of the tokens of the current pass, one of each; None in a prefill."""
        self.fixed = False
        super().__init__(layers=list(self._own_layers(config)))
        self.has_states = bool(self._with_states())

    def _own_layers(self, config: Any) -> Iterator[Any]:
        """Yields a layer of our own for each of the cache that transformers makes for the model."""
        for layer in DynamicCache(config=config).layers:
            has_keys = isinstance(layer, CacheLayerMixin)
            if not isinstance(layer, LinearAttentionCacheLayerMixin):
                yield _Keys(self) if has_keys else layer
                continue
            if not hasattr(layer, "number_of_states"):
                raise ConfigError(
                    "this version of transformers does not show the states of its layers",
                    field="transformers",
                    value=transformers.__version__,
                    remedy="install transformers 5.23",
                )
            states = layer.number_of_states
            yield _KeysAndStates(self, states) if has_keys else _States(states)

    def begin_prefill(
        self, lengths: Sequence[int], rows: Sequence[int], owners: Sequence[int]
    ) -> None:
        """Starts a pass over prompts of `lengths`, padded on the right. Row `rows[i]` is to hold
        the prompt `owners[i]`. A prompt that is only scored has no row.
        """
        self.length = max(lengths)
        self.before = 0
        self.token_rows = None
        length = self.length
        self.longest = max(self.longest, length)  # `move` may be called before the next step
        self.reserve(max(rows, default=-1) + 1, length)
        targets: Tensor | slice
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1:  # they ascend: writing is a copy
            targets = slice(rows[0], rows[-1] + 1)
        else:
            targets = torch.tensor(rows, dtype=torch.long, device=self.device)
        sources = torch.tensor(owners, dtype=torch.long, device=self.device)

        def write(layer: _Keys, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            layer.keys[targets, :, :length] = keys[sources]
            layer.values[targets, :, :length] = values[sources]
            return keys, values

        self._begin_states(None)
        self._rows = targets
        self._owners = sources
        self.write = write
        self._masks: dict[int | None, Tensor | None] = {None: None}
        self._visible = lambda window: self._band(length, window)

    def begin_tokens(
        self,
        positions: Tensor,
        columns: int,
        rows: Tensor | None = None,
        *,
        begins: bool = False,
    ) -> None:
        """Starts a pass over one token for each of `positions` [B], which are below `columns`, of
        rows 0..B-1.

        With `rows` [B] it is over tokens of these rows, which may repeat: a token sees the earlier
        ones of its row, those of this pass too. The room must be reserved. With states only the
        same token may repeat, and `begins` says whether all positions are 0 or none is.
        """
        read: Tensor | slice
        if rows is None:
            self.reserve(len(positions), columns)
            rows = torch.arange(len(positions), device=self.device)
            read = slice(len(positions))  # a view, where indices would copy
        else:
            read = rows
        self.length = self.longest = columns
        self.before = columns - 1
        self.token_rows = rows
        self._begin_states(None if begins else read)
        self._rows = read
        self._owners = None
        # Indices into the storage as [rows · heads · columns, head_dim], for a plain copy instead
        # of an indexed one.
        places: dict[int, Tensor] = {}

        def write(layer: _Keys, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            heads = keys.shape[1]
            if heads not in places:
                lines = rows[:, None] * heads + torch.arange(heads, device=self.device)
                places[heads] = (lines * self.columns + positions[:, None]).view(-1)
            for states, new in ((layer.keys, keys), (layer.values, values)):
                size = new.shape[3]
                states.view(-1, size).index_copy_(0, places[heads], new.reshape(-1, size))
            return layer.keys[read, :, :columns], layer.values[read, :, :columns]

        def visible(window: int | None) -> Tensor:
            column = torch.arange(columns, device=self.device)
            position = positions[:, None, None, None]
            seen = column <= position
            return seen if window is None else seen & (column > position - window)

        self.write = write
        self._masks = {}
        self._visible = visible

    def _begin_states(self, rows: Tensor | slice | None) -> None:
        for layer in self._with_states():
            layer.begin(rows)

    def end(self) -> None:
        """Stores the states after the pass."""
        for layer in self._with_states():
            layer.end(self._rows, self._owners, self.rows)

    @contextmanager
    def states_unchanged(self) -> Iterator[None]:
        """Undoes what passes inside this context do to the states. Keys and values need no undoing:
        a pass that is repeated writes the same.
        """
        kept = [(states, states.clone()) for states in self._states()]
        yield
        for states, before in kept:
            states.copy_(before)

    def mask(self, window: int | None) -> Tensor | None:
        """Returns the additive mask of the current pass for layers with this window; None: plain
        causal attention.

        It is [B, 1, 1, columns] in a decode step and [T, T] in a prefill of T tokens.
        """
        if window is not None and window >= self.length:
            window = None
        if window not in self._masks:
            self._masks[window] = additive(self._visible(window), self.dtype)
        return self._masks[window]

    def causal_mask(self) -> Tensor:
        """Returns the additive mask of a prefill without a window, for attention that has no causal
        kernel.
        """
        return additive(self._band(self.length, None), self.dtype)

    def _band(self, length: int, window: int | None) -> Tensor:
        allowed = torch.ones(length, length, dtype=torch.bool, device=self.device).tril_()
        return allowed if window is None else allowed.triu_(1 - window)

    def move(self, to: list[int], origin: list[int]) -> None:
        """Copies rows `origin` over rows `to`."""
        target = torch.tensor(to, device=self.device)
        source = torch.tensor(origin, device=self.device)
        for keys_or_values in self._keys_and_values():
            keys_or_values[target, :, : self.longest] = keys_or_values[source, :, : self.longest]
        for states in self._states():
            states[target] = states[source]

    def zero(self, rows: list[int]) -> None:
        """Zeroes rows, which may hold values that are not finite."""
        broken = torch.tensor(rows, device=self.device)
        for states in self.tensors():
            states[broken] = 0.0

    def release(self) -> None:
        """Frees the memory, or clears it if its size is fixed; only call it when no row is
        running.
        """
        if not self.fixed:
            self.__init__(self.config, self.device, self.dtype)  # type: ignore[misc]
        for states in self.tensors():
            states.zero_()

    def tensors(self) -> list[Tensor]:
        """Returns the storage of all rows."""
        return self._keys_and_values() + self._states()

    def _keys_and_values(self) -> list[Tensor]:
        found: list[Tensor] = []
        for layer in self._with_keys():
            found += [layer.keys, layer.values]
        return found

    def _states(self) -> list[Tensor]:
        found: list[Tensor] = []
        for layer in self._with_states():
            found += layer.stored.values()
        return found

    def bytes_per_row(self, columns: int) -> int:
        """Returns the bytes of a row of `columns` columns; known after the first pass."""
        total = 0
        for each in self._keys_and_values():
            total += columns * each.shape[1] * each.shape[3] * each.element_size()
        for states in self._states():
            total += states[0].numel() * states.element_size()
        return total

    def allocate(self, rows: int, columns: int) -> None:
        """Allocates storage for this many rows and columns, which then neither moves nor grows."""
        self.rows = rows
        self.columns = columns
        self.fixed = True
        for layer in self._with_keys():
            layer.make_room(layer.keys, layer.values)
        for layer in self._with_states():
            layer.resize(rows)

    def _with_keys(self) -> list[_Keys]:
        """Returns the layers that have their own keys."""
        return [each for each in self.layers if isinstance(each, _Keys) and each.is_initialized]

    def _with_states(self) -> list[_States]:
        """Returns the layers that keep states."""
        return [each for each in self.layers if isinstance(each, _States)]

    def reserve(self, rows: int, columns: int) -> None:
        """Makes room for this many rows and columns; what is stored stays."""
        old_rows = self.rows
        old_columns = self.columns
        if rows <= old_rows and columns <= old_columns:
            return
        assert not self.fixed, "the scheduler admits more than there is room for"
        self.rows = old_rows if rows <= old_rows else max(rows, 2 * old_rows, 8)
        self.columns = old_columns if columns <= old_columns else max(columns, 2 * old_columns, 64)
        for states in self._with_states():
            states.resize(self.rows)
        for layer in self._with_keys():
            keys = layer.keys
            values = layer.values
            layer.make_room(keys, values)
            layer.keys[:old_rows, :, :old_columns] = keys
            layer.values[:old_rows, :, :old_columns] = values


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 0 where `visible`, and -inf elsewhere."""
    return torch.where(visible, 0.0, -torch.inf).to(dtype)
