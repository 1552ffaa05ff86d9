"""The state of the running rows, on the host, vectorised: a step takes as many operations for one
row as for 256.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.jobs import Sequence
from services.engine.sampling import FIELDS, GREEDY_BELOW, Inputs, uniforms

_WHOLE_NUMBERS = ("token", "position", "count", "key", "limit", "least", "kept", "routed")
_FIELDS: dict[str, type[np.generic]] = {
    **dict.fromkeys(_WHOLE_NUMBERS, np.int64),
    "has_stops": np.bool_,
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"), np.float64),
}
_Flags = NDArray[np.bool_]


class Rows:
    """Dense rows 0..len-1, one per running sequence.

    `token` is the next input, `position` its index in the sequence, `count` the number of generated
    tokens, `limit` their maximum, `least` their minimum, `kept` how many tokens at most truncation
    leaves and the answer returns, `routed` whether it returns the experts, `has_stops` whether
    texts may end it; `stop` [rows, K] are the stop tokens, padded with -1; `tokens` and `logprobs`
    [rows, longest limit] are the output.
    """

    def __init__(self, capacity: int) -> None:
        self.sequences: list[Sequence] = []
        self.state: dict[str, NDArray[Any]] = {
            name: np.zeros(capacity, dtype) for name, dtype in _FIELDS.items()
        }
        self.state["stop"] = np.full((capacity, 1), -1)
        self.state["tokens"] = np.zeros((capacity, 64), np.int64)
        self.state["logprobs"] = np.zeros((capacity, 64), np.float32)

    def __len__(self) -> int:
        return len(self.sequences)

    def inputs(self, first: int) -> Inputs:
        """Returns the inputs of a step for rows `first` and up."""
        new = {name: self.state[name][first : len(self)] for name in _FIELDS}
        new["uniform"] = uniforms(new["key"], new["count"])
        state = np.stack([new[name] for name in FIELDS], dtype=np.float64)
        early = new["count"] < new["least"]
        if early.any():
            barred = np.where(early[:, None], self.state["stop"][first : len(self)], -1)
            state = np.concatenate((state, barred.T))
        whole = (new["top_p"] >= 1) & np.isinf(new["top_k"]) & (new["min_p"] <= 0)
        plain = bool((new["temperature"] >= GREEDY_BELOW).all() and whole.all())
        return Inputs(
            state,
            plain,
            kept=int(new["kept"].max(initial=0)),
            routed=bool(new["routed"].any()),
        )

    def add(self, sequences: list[Sequence], lengths: list[int]) -> None:
        """Adds sequences whose first `lengths` tokens have been computed."""
        first = len(self)
        params = [sequence.job.sampling for sequence in sequences]
        longest = max(each.max_new_tokens for each in params)
        self._widen("stop", max(len(each.stop_token_ids) for each in params), -1)
        self._widen("tokens", longest, 0)
        self._widen("logprobs", longest, 0)

        state = self.state
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True), first):
            sampling = sequence.job.sampling
            count = len(sequence.tokens)
            numbers = {
                # `append` increments the position: the token that it adds is at `length`.
                "position": length - 1,
                "count": count,
                "key": sequence.key,
                "limit": sampling.max_new_tokens,
                "least": sampling.min_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k if sampling.top_k > 0 else np.inf,
                "min_p": sampling.min_p,
                "kept": sampling.top_k if sequence.job.returns_kept else 0,
                "routed": sequence.job.returns_experts,
                "has_stops": bool(sampling.stop),
            }
            for name, number in numbers.items():
                state[name][row] = number
            state["stop"][row] = -1
            state["stop"][row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
            state["tokens"][row, :count] = sequence.tokens
            state["logprobs"][row, :count] = sequence.logprobs
        self.sequences += sequences

    def append(self, first: int, sampled: NDArray[np.float64]) -> tuple[_Flags, _Flags, _Flags]:
        """Appends what was sampled, as `sample` returns it, to rows first..len-1.

        Returns, each [B]: the token is a stop token, the limit is reached, the numbers are finite.
        """
        # Views: what is written here is written to the state.
        new = {name: array[first : len(self)] for name, array in self.state.items()}
        tokens = sampled[0].astype(np.int64)
        logprobs = sampled[1].astype(np.float32)
        rows = np.arange(len(tokens))
        new["tokens"][rows, new["count"]] = tokens
        new["logprobs"][rows, new["count"]] = logprobs
        new["token"][:] = tokens
        new["count"] += 1
        new["position"] += 1
        for row in np.flatnonzero(new["kept"]):
            among = float(sampled[2, row])
            count = int(sampled[3, row])
            kept_tokens = sampled[4 : 4 + count, row].astype(np.int32)
            self.sequences[first + row].kept.append((among, kept_tokens))
        stopped = (tokens[:, None] == new["stop"]).any(1)
        return stopped, new["count"] >= new["limit"], np.isfinite(logprobs)

    def append_experts(self, experts: NDArray[np.float64]) -> None:
        """Appends the experts [layers · top_k, rows] of the tokens that a step computed to the rows
        that return them.
        """
        numbers = experts.T.astype(np.int16)
        for row in np.flatnonzero(self.state["routed"][: len(self)]):
            self.sequences[row].experts.append(numbers[row, None])

    def tail(self, row: int, tokens: int) -> list[int]:
        """Returns the last tokens of a row."""
        count = int(self.state["count"][row])
        last: list[int] = self.state["tokens"][row, max(0, count - tokens) : count].tolist()
        return last

    def collect(self, rows: list[int]) -> None:
        """Copies the output of rows to their sequences."""
        for row in rows:
            count = int(self.state["count"][row])
            sequence = self.sequences[row]
            sequence.tokens = self.state["tokens"][row, :count].tolist()
            sequence.logprobs = self.state["logprobs"][row, :count].tolist()

    def remove(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Removes rows and fills the gaps with the last ones. Returns (target, source) of the rows
        that moved: of A B C D E without A and D, ([0], [4]) leaves E B C.
        """
        keep = len(self) - len(rows)
        holes = sorted(row for row in rows if row < keep)
        movers = sorted({*range(keep, len(self))} - {*rows})
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
