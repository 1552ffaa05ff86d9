"""The state of the running rows as tensors: a step takes as many operations for one row as for 256."""

import torch
from torch import Tensor

from services.engine.jobs import Sequence
from services.engine.sampling import sample, uniforms

_FIELDS = {
    **dict.fromkeys(("token", "position", "count", "key", "limit"), torch.long),
    **dict.fromkeys(("temperature", "top_p"), torch.float32),
}


class Rows:
    """Dense rows 0..len-1, one per running sequence.

    `token` is the next input, `position` its index in the sequence, `count` the number of generated tokens, `limit` their
    maximum; `stop` [rows, K] are the stop tokens, padded with -1; `tokens` and `logprobs` [rows, longest limit] are the output.
    """

    def __init__(self, capacity: int) -> None:
        self.sequences: list[Sequence] = []
        self.state: dict[str, Tensor] = {name: torch.zeros(capacity, dtype=dtype) for name, dtype in _FIELDS.items()}
        self.state["stop"] = torch.full((capacity, 1), -1)
        self.state["tokens"] = torch.zeros(capacity, 64, dtype=torch.long)
        self.state["logprobs"] = torch.zeros(capacity, 64)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, name: str) -> Tensor:
        """Returns a view of the state `name` of the running rows."""
        return self.state[name][: len(self.sequences)]

    def add(self, sequences: list[Sequence], lengths: list[int]) -> None:
        first, last = len(self), len(self) + len(sequences)
        chosen = [sequence.job.sampling for sequence in sequences]
        values: dict[str, list[int] | list[float]] = {
            "position": lengths,
            "count": [len(sequence.tokens) for sequence in sequences],
            "key": [sequence.key for sequence in sequences],
            "limit": [sampling.max_new_tokens for sampling in chosen],
            "temperature": [sampling.temperature for sampling in chosen],
            "top_p": [sampling.top_p for sampling in chosen],
        }
        for name, value in values.items():
            self.state[name][first:last] = torch.tensor(value, dtype=_FIELDS[name])
        self._widen("stop", max(len(sampling.stop_ids) for sampling in chosen), -1)
        longest = max(sampling.max_new_tokens for sampling in chosen)
        self._widen("tokens", longest, 0)
        self._widen("logprobs", longest, 0)
        self.state["stop"][first:last] = -1
        for row, sequence in enumerate(sequences, first):
            if stop_ids := sequence.job.sampling.stop_ids:
                self.state["stop"][row, : len(stop_ids)] = torch.tensor(stop_ids)
            if had := len(sequence.tokens):
                self.state["tokens"][row, :had] = torch.tensor(sequence.tokens)
                self.state["logprobs"][row, :had] = torch.tensor(sequence.logprobs)
        self.sequences += sequences

    def append(self, first: int, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Samples a token for rows first..len-1 from logits [B, V].

        Returns, each bool [B]: the token is a stop token, the limit is reached, the numbers are finite.
        """
        new = {name: tensor[first : len(self)] for name, tensor in self.state.items()}
        finite = torch.isfinite(logits.sum(-1))
        draws = uniforms(new["key"], new["count"])
        tokens, logprobs = sample(logits, new["temperature"], new["top_p"], draws)
        rows = torch.arange(first, len(self))
        self.state["tokens"][rows, new["count"]] = tokens
        self.state["logprobs"][rows, new["count"]] = logprobs
        new["token"].copy_(tokens)
        new["count"] += 1
        stopped = (tokens[:, None] == new["stop"]).any(1)
        return stopped, new["count"] >= new["limit"], finite & torch.isfinite(logprobs)

    def collect(self, rows: list[int]) -> None:
        counts = self.state["count"][rows].tolist()
        longest = max(counts)
        tokens = self.state["tokens"][rows, :longest].tolist()
        logprobs = self.state["logprobs"][rows, :longest].tolist()
        for row, count, row_tokens, row_logprobs in zip(rows, counts, tokens, logprobs, strict=True):
            sequence = self.sequences[row]
            sequence.tokens, sequence.logprobs = row_tokens[:count], row_logprobs[:count]

    def remove(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Removes rows and fills the gaps with the last ones. Returns (target, source) of the rows that moved."""
        gone, keep = set(rows), len(self) - len(rows)
        holes = sorted(row for row in gone if row < keep)
        movers = [row for row in range(keep, len(self)) if row not in gone]
        if holes:
            to, origin = torch.tensor(holes), torch.tensor(movers)
            for tensor in self.state.values():
                tensor[to] = tensor[origin]
            for hole, mover in zip(holes, movers, strict=True):
                self.sequences[hole] = self.sequences[mover]
        del self.sequences[keep:]
        return holes, movers

    def _widen(self, name: str, columns: int, fill: int) -> None:
        old = self.state[name]
        if columns > old.shape[1]:
            self.state[name] = old.new_full((len(old), columns), fill)
            self.state[name][:, : old.shape[1]] = old
