"""The critic: value model, loss, optimiser and update.

The ranks of a trainer hold it (`trainer/policy/critic.py`, the training loop's side of it), or a
critic-server does (`service.py` and `app.py` here); see docs/adr/0005-one-critic-two-places.md.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError, InvalidInput
from common.models.memory import critic_only
from common.settings.config import Config
from common.wire.schemas import CriticMetrics, Float32, ValueTargets
from learning.batching import Indices, Sizes, Tokens, mini_batches, score_shared
from learning.fitting import fitted
from learning.layout import Layout, moved
from learning.micro_batch_passes import micro_batch_passes
from learning.optimizer import Optimizer
from learning.ranks import Ranks
from learning.saving import Contents, Snapshot, load_optimizer
from services.critic.model import load_value_model

_STATE = "critic_state.json"
_FORMAT = 2
_T = TypeVar("_T", bound=Tokens)
Rows = Sequence[_T] | Mapping[int, _T]
"""Rows by their index in the batch: all of them, or with `Sizes` those of this rank."""


class Critic:
    """Predicts the return of every state of a completion, and learns from observed returns.

    `step` counts its training batches. Every rank calls the same methods with the same rows, or
    with its own rows and the same sizes of all; each computes its share. The critic starts from the
    checkpoint in `directory` (on rank 0), or from `critic.model` with a new value head. Raises
    ConfigError when it cannot be loaded.
    """

    def __init__(self, config: Config, ranks: Ranks, directory: Path | None = None) -> None:
        self._config = config
        self._ranks = ranks
        self.step = 0
        directory = ranks.broadcast(directory)
        if config.critic.location == "trainer":
            decided = fitted(config, ranks, config.model.name)  # as the policy beside it
        else:
            decided = fitted(critic_only(config), ranks, config.critic.model or config.model.name)
        self._passes = decided.trainer
        self.model = load_value_model(decided, ranks, directory)
        self.optimizer = Optimizer(self.model.module, config.optimizer, "critic.learning_rate")
        if directory is not None:
            self._restore(directory)

    def values(self, sequences: Rows[Tokens], sizes: Sizes | None = None) -> list[Float32]:
        """Returns, for each sequence of this rank's share, the values [L] of the states before each
        completion token; an empty array for the others.

        Raises InvalidInput for tokens outside the vocabulary and for sequences that are too long.
        """
        sizes = self._measured(sequences, sizes, "sequences")
        with torch.no_grad():
            return score_shared(
                sizes,
                self._ranks,
                self._passes,
                score=lambda indices: self.model(self._rows(sequences, indices)),
            )

    def update(
        self, rows: Rows[ValueTargets], seed: int, sizes: Sizes | None = None
    ) -> CriticMetrics:
        """Trains for `algorithm.update_epochs` passes of `algorithm.mini_batches` optimiser steps
        over the rows.

        The loss of a step is a mean over all completion tokens of its mini-batch, in which a token
        counts by its row's weight. So the result depends neither on micro-batches nor on the number
        of ranks. `seed` determines the order of the rows. A step whose gradient is not finite is
        skipped and counted. Raises InvalidInput as `values` does, and NonFiniteGradients after more
        than `MAX_SKIPPED_UPDATES` skipped steps in a row: the critic is then unusable.
        """
        sizes = self._measured(rows, sizes, "rows")
        algorithm = self._config.algorithm
        norms: list[float] = []
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for epoch in range(algorithm.update_epochs):
            for indices in mini_batches(len(sizes.prompts), algorithm.mini_batches, seed + epoch):
                self.optimizer.zero_grad()
                part = self._accumulate(rows, sizes, indices)
                self._ranks.sum_gradients(self.model.module)
                # The step may be skipped; then its loss is not in the metrics.
                norms.append(self.optimizer.step(self._config.critic.learning_rate))
                if math.isfinite(norms[-1]):
                    sums += part
        self.step += 1
        own = [rows[i] for i in sizes.owned(self._ranks.share).tolist()]
        return _metrics(own, self._ranks, self._ranks.sum_shares(sums), norms=norms)

    def snapshot(self, alone: bool) -> Snapshot:
        """Copies weights (as a Hugging Face model), optimiser and step. A collective; see
        `Snapshot.take`.
        """
        snapshot = Snapshot.take(Contents.of(self.model.module), self.optimizer, self._ranks, alone)
        if self._ranks.is_rank_zero:
            snapshot.texts[_STATE] = json.dumps({"format": _FORMAT, "step": self.step})
        return snapshot

    def save(self, directory: Path) -> None:
        """Writes a snapshot into `directory` on rank 0. Every rank calls it."""
        snapshot = self.snapshot(alone=True)
        if self._ranks.is_rank_zero:
            snapshot.write(directory)

    def _accumulate(self, rows: Rows[ValueTargets], sizes: Sizes, indices: Indices) -> Tensor:
        """Adds this rank's share of a mini-batch to the gradient. Returns its sums [loss, clipped
        tokens, tokens].
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        tokens = int(sizes.completions[indices].sum())
        for part, are_own in micro_batch_passes(
            self.model,
            self._ranks,
            sizes,
            rows=indices,
            settings=self._passes,
        ):
            values = self.model(self._rows(rows, part))
            if not are_own:  # the other ranks have one more pass: join its collective calls
                (values.sum() * 0).backward()
                continue

            own = [rows[i] for i in part.tolist()]
            weights = [np.full(len(row.returns), row.weight, np.float32) for row in own]
            losses, clipped = value_loss(
                values,
                old_values=_concatenated([row.old_values for row in own], values.device),
                returns=_concatenated([row.returns for row in own], values.device),
                clip=self._config.critic.value_clip,
            )
            loss = (losses * _concatenated(weights, values.device)).sum()
            (loss / tokens).backward()
            count = torch.ones_like(loss) * len(values)
            sums += torch.stack([loss.detach(), clipped.sum(), count]).double()
        return sums

    def _rows(self, sequences: Rows[_T], indices: Indices) -> Layout:
        selected = [sequences[i] for i in indices.tolist()]
        rows = self.model.layout.of(
            [sequence.prompt_ids for sequence in selected],
            [sequence.completion_ids for sequence in selected],
        )
        return moved(rows, self._ranks.device)

    def _measured(self, sequences: Rows[_T], sizes: Sizes | None, where: str) -> Sizes:
        """Returns the sizes of all rows. Refuses tokens outside the vocabulary, which would crash
        the process, and sequences that are too long.
        """
        vocabulary = self.model.vocabulary
        longest = self.model.max_tokens
        here = dict(sequences.items() if isinstance(sequences, Mapping) else enumerate(sequences))
        for i, sequence in here.items():
            ids = np.concatenate([sequence.prompt_ids, sequence.completion_ids])
            unknown = ids[(ids < 0) | (ids >= vocabulary)]
            if len(unknown):
                raise InvalidInput(
                    f"the critic's model knows only the tokens 0 to {vocabulary - 1}",
                    field=f"{where}[{i}]",
                    value=int(unknown[0]),
                    remedy="use a critic.model with the policy's tokenizer",
                )
            if longest is not None and len(ids) > longest:
                raise InvalidInput(
                    f"the critic's model accepts at most {longest} tokens",
                    field=f"{where}[{i}]",
                    value=len(ids),
                    remedy="lower sampling.max_new_tokens, or use another critic.model",
                )
        return sizes or Sizes.of(list(here.values()), self.model.layout.shared)

    def _restore(self, directory: Path) -> None:
        try:
            text = (directory / _STATE).read_bytes() if self._ranks.is_rank_zero else b""
            content = json.loads(self._ranks.broadcast(text))
            if content["format"] != _FORMAT:
                raise ValueError("another format")
            load_optimizer(self.optimizer, directory, self._ranks)
            self.step = int(content["step"])
        except Exception as error:  # a damaged file may cause any error
            reason = f"{type(error).__name__} {error}".splitlines()[0]
            raise ConfigError(
                f"the critic cannot resume from the checkpoint ({_STATE} or state/): {reason}",
                field="checkpoint",
                value=str(directory),
                remedy="remove that directory to continue from the checkpoint before it, "
                "or start with --checkpoint.resume false",
            ) from None


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Returns [C] ½·max((v − R)², (clip(v, v_old ± clip) − R)²), or ½(v − R)² when `clip` is None,
    and [C] bool whether the value is so far from the old one that the loss no longer moves it.

    The squared error of Schulman et al. 2017 (arXiv:1707.06347), clipped as in PPO's reference
    implementation in OpenAI baselines. For example, with an old value of 0 and a clip of 0.2:

    | v | R | (v − R)² | (clipped v − R)² | loss | |
    |---|---|---|---|---|---|
    | 0.1 | 1 | 0.81 | 0.81 | 0.405 | inside the range |
    | 0.5 | 1 | 0.25 | 0.64 | 0.32 | moved far enough towards R: no gradient |
    | 0.5 | 0 | 0.25 | 0.04 | 0.125 | moved away: the full gradient |

    Args:
        values, old_values, returns: [C] v, v_old and R.
        clip: distance from the old value where clipping starts.
    """
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    change = values - old_values
    clipped_error = (old_values + change.clamp(-clip, clip) - returns).square()
    # Inside the range both errors are equal up to rounding.
    clipped = (clipped_error > error) & (change.abs() > clip)
    return 0.5 * torch.where(clipped, clipped_error, error), clipped


def _concatenated(arrays: Sequence[Float32], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)


def _metrics(
    rows: Sequence[ValueTargets], ranks: Ranks, sums: Tensor, *, norms: Sequence[float]
) -> CriticMetrics:
    """Returns the metrics of an update on these rows and those of the other ranks. A collective."""
    loss, clipped, tokens = sums.tolist()
    old = np.concatenate([np.zeros(0), *(row.old_values for row in rows)])
    returns = np.concatenate([np.zeros(0), *(row.returns for row in rows)])
    errors = returns - old
    own_sums = torch.tensor([float(len(old)), old.sum(), returns.sum()], dtype=torch.float64)
    count, old_sum, return_sum = ranks.sum_shares(own_sums).tolist()

    # 1 where the values predicted every return, 0 where a constant would have done as well.
    of_returns = ((returns - return_sum / count) ** 2).sum()
    of_errors = ((errors - (return_sum - old_sum) / count) ** 2).sum()
    squares = torch.tensor([of_returns, of_errors], dtype=torch.float64)
    variance, unexplained = ranks.sum_shares(squares).tolist()
    explained = 1 - unexplained / variance if variance > 0 else 0.0
    applied = [norm for norm in norms if math.isfinite(norm)]
    return CriticMetrics(
        value_loss=loss / tokens if applied else None,
        grad_norm=float(np.mean(applied)) if applied else None,
        clip_fraction=clipped / tokens if applied else None,
        explained_variance=explained,
        value_mean=old_sum / count,
        return_mean=return_sum / count,
        skipped=len(norms) - len(applied),
    )
