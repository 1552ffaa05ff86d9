"""The KV cache of the running rows: a dense row per completion, with position p in column p."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """Keys and values [rows, kv_heads, columns, head_dim] of one layer; rows and columns are
    capacities.
    """

    def __init__(self, shared: "SlotCache") -> None:
        super().__init__()
        self.shared = shared

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows = self.shared.rows
        columns = self.shared.columns
        self.keys = key_states.new_zeros(rows, key_states.shape[1], columns, key_states.shape[3])
        self.values = value_states.new_zeros(
            rows, value_states.shape[1], columns, value_states.shape[3]
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self.shared.write(self, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.shared.length, 0

    def get_seq_length(self) -> int:
        return self.shared.before

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The KV of the running rows, for prefills and for decode steps of one token per row.

    Storage doubles as needed in both directions, unless `allocate` fixed its size. It is zeroed,
    because even a masked NaN would spread.
    """

    write: Callable[[_Layer, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Stores the keys and values of the current pass; returns those to attend to."""
    _visible: Callable[[int | None], Tensor]

    def __init__(self, layers: int, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self.rows = 0
        self.columns = 0
        self.length = 1
        """Columns of the current pass."""
        self.longest = 1
        """Columns that some row may use."""
        self.before = 0
        self.fixed = False
        super().__init__(layers=[_Layer(self) for _ in range(layers)])

    def begin_prefill(self, lengths: Sequence[int], first: int, owners: Sequence[int]) -> None:
        """Starts a pass over prompts of `lengths`, padded on the right. Row `first` + i is to hold
        the prompt `owners[i]`.
        """
        self.length = max(lengths)
        self.before = 0
        last = first + len(owners)
        length = self.length
        self.longest = max(self.longest, length)  # `move` may be called before the next step
        self.reserve(last, length)
        # A scored prompt has no owners.
        owner = torch.tensor(owners, dtype=torch.long, device=self.device)

        def write(layer: _Layer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            layer.keys[first:last, :, :length] = keys[owner]
            layer.values[first:last, :, :length] = values[owner]
            return keys, values

        self.write = write
        self._masks: dict[int | None, Tensor | None] = {None: None}
        self._visible = lambda window: self._band(length, window)

    def begin_tokens(self, positions: Tensor, columns: int, rows: Tensor | None = None) -> None:
        """Starts a pass over one token for each of `positions` [B], which are below `columns`, of
        rows 0..B-1.

        With `rows` [B] it is over tokens of these rows, which may repeat: a token sees the earlier
        ones of its row, those of this pass too. The room must be reserved.
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
        # Indices into the storage as [rows · heads · columns, head_dim], for a plain copy instead
        # of an indexed one.
        places: dict[int, Tensor] = {}

        def write(layer: _Layer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
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
        for states in self.tensors():
            states[target, :, : self.longest] = states[source, :, : self.longest]

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
            self.__init__(len(self.layers), self.device, self.dtype)  # type: ignore[misc]
        for states in self.tensors():
            states.zero_()

    def tensors(self) -> list[Tensor]:
        """Returns the storage of all rows."""
        found: list[Tensor] = []
        for layer in self._used():
            found += [layer.keys, layer.values]
        return found

    def bytes_per_token(self) -> int:
        """Returns the bytes per token of a row; known after the first pass."""
        return sum(
            states.shape[1] * states.shape[3] * states.element_size() for states in self.tensors()
        )

    def allocate(self, rows: int, columns: int) -> None:
        """Allocates storage for this many rows and columns, which then neither moves nor grows."""
        self.rows = rows
        self.columns = columns
        self.fixed = True
        for layer in self._used():
            layer.lazy_initialization(layer.keys, layer.values)

    def _used(self) -> list[_Layer]:
        """Returns the layers that have their own keys."""
        return [layer for layer in self.layers if layer.is_initialized]

    def reserve(self, rows: int, columns: int) -> None:
        """Makes room for this many rows and columns; what is stored stays."""
        old_rows = self.rows
        old_columns = self.columns
        if rows <= old_rows and columns <= old_columns:
            return
        assert not self.fixed, "the scheduler admits more than there is room for"
        self.rows = old_rows if rows <= old_rows else max(rows, 2 * old_rows, 8)
        self.columns = old_columns if columns <= old_columns else max(columns, 2 * old_columns, 64)
        for layer in self._used():
            keys = layer.keys
            values = layer.values
            layer.lazy_initialization(keys, values)
            layer.keys[:old_rows, :, :old_columns] = keys
            layer.values[:old_rows, :, :old_columns] = values


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 0 where `visible`, and -inf elsewhere."""
    return torch.where(visible, 0.0, -torch.inf).to(dtype)
