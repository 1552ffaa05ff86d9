"""The KV cache of the running rows: a dense row per completion, with position p in column p."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """Keys and values [rows, kv_heads, columns, head_dim] of one layer; rows and columns are capacities."""

    def __init__(self, shared: "SlotCache") -> None:
        super().__init__()
        self.shared = shared

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, columns = self.shared.mask.shape
        self.keys = key_states.new_zeros(rows, key_states.shape[1], columns, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], columns, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        rows, heads, _, size = key_states.shape
        length, columns = self.shared.length, self.keys.shape[2]
        # Indices into the storage as [rows · heads · columns, head_dim], for a plain copy instead of an indexed one.
        base = torch.arange(rows * heads).view(rows, heads) * columns
        places = (base + self.shared.where[:, None]).view(-1)
        self.keys.view(-1, size).index_copy_(0, places, key_states.reshape(-1, size))
        self.values.view(-1, value_states.shape[3]).index_copy_(0, places, value_states.reshape(places.shape[0], -1))
        return self.keys[:rows, :, :length], self.values[:rows, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.shared.length, 0

    def get_seq_length(self) -> int:
        return self.shared.length - 1

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The KV of the running rows, for decode steps of one token per row.

    Storage doubles as needed in both directions and is zeroed, since even a masked NaN spreads. `mask` is the additive
    attention mask [rows, columns], updated in place each step.
    """

    def __init__(self, layers: int) -> None:
        self.mask = torch.full((0, 0), -torch.inf)
        self.rows = self.where = torch.empty(0, dtype=torch.long)
        self.length = 1
        super().__init__(layers=[_Layer(self) for _ in range(layers)])

    def begin_step(self, positions: Tensor) -> Tensor:
        """Reserves space for tokens at `positions` [B] of rows 0..B-1. Returns the mask [B, 1, 1, columns in use]."""
        self.where, self.rows = positions, torch.arange(len(positions))
        self.length = int(positions.max()) + 1
        self._reserve(len(positions), self.length)
        self.mask[self.rows, positions] = 0.0
        return self.mask[: len(positions), None, None, : self.length]

    def fill(self, first: int, source: Cache, owners: Sequence[int], lengths: Sequence[int]) -> None:
        """Copies rows `owners` of a prefill's cache to rows first, first + 1, …; `lengths` are those of the prefill's rows."""
        longest = max(lengths)
        last = first + len(owners)
        self._reserve(last, longest)
        self.length = max(self.length, longest)  # `move` may come before the next step
        owner = torch.tensor(owners)
        for mine, theirs in zip(self.layers, source.layers, strict=True):
            if not mine.is_initialized:
                mine.lazy_initialization(theirs.keys, theirs.values)
            mine.keys[first:last, :, :longest] = theirs.keys[owner]
            mine.values[first:last, :, :longest] = theirs.values[owner]
        visible = torch.arange(self.mask.shape[1]) < torch.tensor(lengths)[owner][:, None]
        self.mask[first:last] = torch.where(visible, 0.0, -torch.inf)

    def move(self, to: list[int], origin: list[int]) -> None:
        """Copies rows `origin` over rows `to`."""
        target, source = torch.tensor(to), torch.tensor(origin)
        self.mask[target] = self.mask[source]
        for layer in self.layers:
            layer.keys[target, :, : self.length] = layer.keys[source, :, : self.length]
            layer.values[target, :, : self.length] = layer.values[source, :, : self.length]

    def zero(self, rows: list[int]) -> None:
        """Zeroes rows, which may hold values that are not finite."""
        for layer in self.layers:
            layer.keys[torch.tensor(rows)] = 0.0
            layer.values[torch.tensor(rows)] = 0.0

    def release(self) -> None:
        """Frees the memory; only when no row is running."""
        self.__init__(len(self.layers))  # type: ignore[misc]

    def _reserve(self, rows: int, columns: int) -> None:
        old_rows, old_columns = self.mask.shape
        if rows <= old_rows and columns <= old_columns:
            return
        new_rows = old_rows if rows <= old_rows else max(rows, 2 * old_rows, 8)
        new_columns = old_columns if columns <= old_columns else max(columns, 2 * old_columns, 64)
        mask = torch.full((new_rows, new_columns), -torch.inf)
        mask[:old_rows, :old_columns] = self.mask
        self.mask = mask
        for layer in self.layers:
            if layer.is_initialized:
                keys, values = layer.keys, layer.values
                layer.lazy_initialization(keys, values)
                layer.keys[:old_rows, :, :old_columns] = keys
                layer.values[:old_rows, :, :old_columns] = values
