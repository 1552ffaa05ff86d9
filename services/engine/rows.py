"""The state of the running rows, on the host, vectorised: a step takes as many operations for one
row as for 256.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.jobs import Sequence
from services.engine.sampling import FIELDS, GREEDY_BELOW, Inputs, uniforms

_FIELDS = {
    **dict.fromkeys(("token", "position", "count", "key", "limit", "least", "kept"), np.int64),
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"), np.float64),
}
_Flags = NDArray[np.bool_]


class Rows:
    """Dense rows 0..len-1, one per running sequence.

    `token` is the next input, `position` its index in the sequence, `count` the number of generated
    tokens, `limit` their maximum, `least` their minimum, `kept` the most tokens of a truncation to
    be returned; `stop` [rows, K] are the stop tokens, padded with -1; `tokens` and `logprobs`
    [rows, longest limit] are the output.
    """

    def __init__(self, capacity: int) -> None:
        self.sequences: list[Sequence] = []
        self.state: dict[str, NDArray[Any]] = {
            name: np.zeros(capacity, kind) for name, kind in _FIELDS.items()
        }
        self.state["stop"] = np.full((capacity, 1), -1)
        self.state["tokens"] = np.zeros((capacity, 64), np.int64)
        self.state["logprobs"] = np.zeros((capacity, 64), np.float32)

    def __len__(self) -> int:
        return len(self.sequences)

    def counts(self) -> list[int]:
        """Returns the number of generated tokens of each row."""
        return [int(count) for count in self.state["count"][: len(self)]]

    def inputs(self, first: int) -> Inputs:
        """Returns the inputs of a step for rows `first` and up."""
        new = {name: self.state[name][first : len(self)] for name in _FIELDS}
        new["uniform"] = uniforms(new["key"], new["count"])
        state = np.stack([new[name] for name in FIELDS], dtype=np.float64)
        if (early := new["count"] < new["least"]).any():
            barred = np.where(early[:, None], self.state["stop"][first : len(self)], -1)
            state = np.concatenate((state, barred.T))
        whole = (new["top_p"] >= 1) & np.isinf(new["top_k"]) & (new["min_p"] <= 0)
        plain = bool((new["temperature"] >= GREEDY_BELOW).all() and whole.all())
        return Inputs(state, plain, int(new["kept"].max(initial=0)))

    def add(self, sequences: list[Sequence], lengths: list[int]) -> None:
        """Adds sequences whose first `lengths` tokens have been computed."""
        first, last = len(self), len(self) + len(sequences)
        chosen = [sequence.job.sampling for sequence in sequences]
        state = self.state
        # `append` increments the position: the token that it adds is at `lengths`.
        state["position"][first:last] = np.array(lengths) - 1
        state["count"][first:last] = [len(sequence.tokens) for sequence in sequences]
        state["key"][first:last] = [sequence.key for sequence in sequences]
        state["limit"][first:last] = [sampling.max_new_tokens for sampling in chosen]
        state["temperature"][first:last] = [sampling.temperature for sampling in chosen]
        state["top_p"][first:last] = [sampling.top_p for sampling in chosen]
        state["top_k"][first:last] = [sampling.top_k or np.inf for sampling in chosen]
        state["min_p"][first:last] = [sampling.min_p for sampling in chosen]
        state["least"][first:last] = [sampling.min_new_tokens for sampling in chosen]
        state["kept"][first:last] = [
            sampling.top_k if sampling.returns_kept else 0 for sampling in chosen
        ]
        self._widen("stop", max(len(sampling.stop_ids) for sampling in chosen), -1)
        longest = max(sampling.max_new_tokens for sampling in chosen)
        self._widen("tokens", longest, 0)
        self._widen("logprobs", longest, 0)
        self.state["stop"][first:last] = -1
        for row, sequence in enumerate(sequences, first):
            self.state["stop"][row, : len(sequence.job.sampling.stop_ids)] = (
                sequence.job.sampling.stop_ids
            )
            self.state["tokens"][row, : len(sequence.tokens)] = sequence.tokens
            self.state["logprobs"][row, : len(sequence.tokens)] = sequence.logprobs
        self.sequences += sequences

    def append(self, first: int, sampled: NDArray[np.float64]) -> tuple[_Flags, _Flags, _Flags]:
        """Appends what was sampled, as `sample` returns it, to rows first..len-1.

        Returns, each [B]: the token is a stop token, the limit is reached, the numbers are finite.
        """
        new = {name: array[first : len(self)] for name, array in self.state.items()}
        tokens, logprobs = sampled[0].astype(np.int64), sampled[1].astype(np.float32)
        rows = np.arange(len(tokens))
        new["tokens"][rows, new["count"]] = tokens
        new["logprobs"][rows, new["count"]] = logprobs
        new["token"][:] = tokens
        new["count"] += 1
        new["position"] += 1
        for row in np.flatnonzero(new["kept"]):
            among, count = float(sampled[2, row]), int(sampled[3, row])
            self.sequences[first + row].kept.append(
                (among, sampled[4 : 4 + count, row].astype(np.int32))
            )
        stopped = (tokens[:, None] == new["stop"]).any(1)
        return stopped, new["count"] >= new["limit"], np.isfinite(logprobs)

    def tail(self, row: int, tokens: int) -> list[int]:
        """Returns the last tokens of a row."""
        count = int(self.state["count"][row])
        last: list[int] = self.state["tokens"][row, max(0, count - tokens) : count].tolist()
        return last

    def collect(self, rows: list[int]) -> None:
        """Copies the output of rows to their sequences."""
        for row in rows:
            count, sequence = int(self.state["count"][row]), self.sequences[row]
            sequence.tokens = self.state["tokens"][row, :count].tolist()
            sequence.logprobs = self.state["logprobs"][row, :count].tolist()

    def remove(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Removes rows and fills the gaps with the last ones. Returns (target, source) of the rows
        that moved.
        """
        gone, keep = set(rows), len(self) - len(rows)
        holes = sorted(row for row in gone if row < keep)
        movers = [row for row in range(keep, len(self)) if row not in gone]
        if holes:
            for array in self.state.values():
                array[holes] = array[movers]
            for hole, mover in zip(holes, movers, strict=True):
                self.sequences[hole] = self.sequences[mover]
        del self.sequences[keep:]
        return holes, movers

    def _widen(self, name: str, columns: int, fill: int) -> None:
        old = self.state[name]
        if columns > old.shape[1]:
            self.state[name] = np.full((len(old), columns), fill, old.dtype)
            self.state[name][:, : old.shape[1]] = old
