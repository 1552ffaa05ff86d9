"""From groups to tensors: one rank's share of a training batch, cut into micro-batches by a token budget."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.config import Config
from common.schemas import Float32, Group, Int32
from trainer.algorithms import weigh


@dataclass(slots=True)
class Row:
    """One completion with its prompt, ready to be trained on."""

    prompt_ids: Int32
    completion_ids: Int32
    behaviour_logprobs: Float32
    """[L] under the policy that sampled the completion."""
    advantage: float
    weight: float
    """Importance weight of prioritised reuse; 1 for fresh experience."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(slots=True)
class Batch:
    """One rank's share of a training batch. All ranks together hold every row exactly once."""

    rows: list[Row]
    total_tokens: int
    """Completion tokens of the whole batch over all ranks that count in the loss: a normaliser."""
    total_rows: int
    """Completions of the whole batch over all ranks that count in the loss."""

    @classmethod
    def of(
        cls, groups: Sequence[Group], weights: Sequence[float], config: Config, rank: int = 0, world_size: int = 1
    ) -> "Batch":
        """This rank's rows of `groups`, balanced over the ranks by length.

        A row whose advantage is 0 has no policy gradient: it is left out of the forward pass, but it stays in the
        normalisers, so the result is the same. With a KL term or an entropy bonus every row counts. With
        `algorithm.mask_truncated` rows that were cut count nowhere.
        """
        algorithm = config.algorithm
        rows: list[Row] = []
        total_tokens = total_rows = 0
        advantages = weigh(groups, algorithm, config.sampling.max_new_tokens)
        for group, weight, row_advantages in zip(groups, weights, advantages, strict=True):
            for completion, advantage in zip(group.completions, row_advantages, strict=True):
                if algorithm.mask_truncated and completion.finish_reason == "length":
                    continue
                total_tokens += len(completion.token_ids)
                total_rows += 1
                if advantage != 0.0 or algorithm.kl_coef > 0 or algorithm.entropy_coef > 0:
                    ids = completion.token_ids
                    rows.append(Row(group.prompt_token_ids, ids, completion.logprobs, advantage, weight))
        rows.sort(key=len)  # stable: the order is the same on every rank
        return cls(rows[rank::world_size], total_tokens, total_rows)

    def micro_batches(self, max_tokens: int) -> list["MicroBatch"]:
        """Rows of similar length together, each micro-batch at most `max_tokens` padded tokens (or one row)."""
        cuts: list[list[Row]] = []
        for row in self.rows:  # by length, so the newest row is the longest of its micro-batch
            if not cuts or len(row) * (len(cuts[-1]) + 1) > max_tokens:
                cuts.append([])
            cuts[-1].append(row)
        return [MicroBatch.of(cut) for cut in cuts]


@dataclass(slots=True)
class MicroBatch:
    """Right-padded rows. `C` is the number of completion tokens of all rows together."""

    input_ids: Tensor
    """[rows, T]"""
    attention_mask: Tensor
    """[rows, T], 1 on real tokens."""
    predicts: Tensor
    """[rows, T] bool: positions whose next token is a completion token; selects hidden states before the head."""
    targets: Tensor
    """[C] the completion tokens, row by row."""
    behaviour_logprobs: Tensor
    """[C]"""
    advantages: Tensor
    """[C]"""
    weights: Tensor
    """[C]"""
    rows: Tensor
    """[C] which row each completion token belongs to."""
    lengths: Tensor
    """[C] completion length of that row."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "MicroBatch":
        width = max(len(row) for row in rows)
        input_ids = np.zeros((len(rows), width), np.int64)
        attention_mask = np.zeros((len(rows), width), np.int64)
        predicts = np.zeros((len(rows), width), bool)
        for i, row in enumerate(rows):
            start, end = len(row.prompt_ids), len(row)
            input_ids[i, :start] = row.prompt_ids
            input_ids[i, start:end] = row.completion_ids
            attention_mask[i, :end] = 1
            predicts[i, start - 1 : end - 1] = True
        lengths = [len(row.completion_ids) for row in rows]
        return cls(
            torch.from_numpy(input_ids),
            torch.from_numpy(attention_mask),
            torch.from_numpy(predicts),
            torch.from_numpy(np.concatenate([row.completion_ids for row in rows]).astype(np.int64)),
            torch.from_numpy(np.concatenate([row.behaviour_logprobs for row in rows])),
            torch.from_numpy(np.repeat(np.array([row.advantage for row in rows], np.float32), lengths)),
            torch.from_numpy(np.repeat(np.array([row.weight for row in rows], np.float32), lengths)),
            torch.from_numpy(np.repeat(np.arange(len(rows)), lengths)),
            torch.from_numpy(np.repeat(np.array(lengths), lengths)),
        )

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`."""
        return MicroBatch(*(getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__))
