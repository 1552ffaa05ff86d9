"""The critic: value model, loss, optimiser and update, for the ranks of the trainer and for the
critic-server.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError, InvalidInput
from common.settings.config import Config
from common.wire.schemas import CriticMetrics, Float32, TokenSequence, ValueTargets
from learning.batching import Indices, Sizes, mini_batches, score_shared
from learning.layout import Layout, moved
from learning.optimizer import Optimizer
from learning.passes import passes
from learning.ranks import Ranks
from learning.saving import Contents, Snapshot, load_optimizer
from services.critic.model import load_value_model

_STATE = "critic_state.json"
_FORMAT = 2


class Critic:
    """Predicts the return of every state of a completion, and learns from observed returns.

    `step` counts its training batches. Every rank calls the same methods with the same arguments
    and gets the same results; each computes its share. The critic starts from the checkpoint in
    `directory` (on rank 0), or from `critic.model` with a new value head. Raises ConfigError when
    it cannot be loaded.
    """

    def __init__(self, config: Config, ranks: Ranks, directory: Path | None = None) -> None:
        self._config, self._ranks, self.step = config, ranks, 0
        directory = ranks.broadcast_path(directory)
        self.model = load_value_model(config, ranks, directory)
        trainer = config.trainer
        parameters = trainer.adam_betas, trainer.weight_decay, trainer.max_grad_norm
        self.optimizer = Optimizer(self.model.module, *parameters, "critic.learning_rate")
        if directory is not None:
            self._restore(directory)

    def values(self, sequences: Sequence[TokenSequence]) -> list[Float32]:
        """Returns, for each sequence, the values [L] of the states before each completion token.

        Raises InvalidInput for tokens outside the vocabulary and for sequences that are too long.
        """
        self._check(sequences, "sequences")
        with torch.no_grad():
            budget, sizes = self._config.trainer.micro_batch_tokens, self._sizes(sequences)
            return score_shared(
                sizes,
                self._ranks,
                budget,
                lambda indices: self.model(self._rows(sequences, indices)),
            )

    def update(self, rows: Sequence[ValueTargets], seed: int) -> CriticMetrics:
        """Trains for `algorithm.update_epochs` passes of `algorithm.mini_batches` optimiser steps
        over the rows.

        The loss of a step is the mean over the completion tokens of its whole mini-batch, each
        times its row's weight, so the result does not depend on micro-batches or the number of
        ranks. `seed` determines the order of the rows. A step whose gradient is not finite is
        skipped and counted. Raises InvalidInput like `values` and when there are no rows, and
        NonFiniteGradients after more than `MAX_SKIPPED_UPDATES` skipped steps in a row, when the
        critic is unusable.
        """
        if not rows:
            raise InvalidInput(
                "there are no rows to learn from",
                field="rows",
                value=0,
                remedy="send at least one row",
            )
        self._check(rows, "rows")
        sizes, norms = self._sizes(rows), []
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for epoch in range(self._config.algorithm.update_epochs):
            for indices in mini_batches(
                len(rows), self._config.algorithm.mini_batches, seed + epoch
            ):
                self.optimizer.zero_grad()
                part = self._accumulate(rows, sizes, indices)
                self._ranks.sum_gradients(self.model.module)
                norms.append(self.optimizer.step(self._config.critic.learning_rate))
                if math.isfinite(norms[-1]):
                    sums += part
        self.step += 1
        return _metrics(rows, self._ranks.sum(sums), norms)

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

    def _accumulate(self, rows: Sequence[ValueTargets], sizes: Sizes, indices: Indices) -> Tensor:
        """Adds this rank's share of a mini-batch to the gradient. Returns its sums [loss, clipped
        tokens, tokens].
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        tokens = sum(len(rows[i].returns) for i in indices)
        for part, counts in passes(
            self.model, self._ranks, sizes, indices, self._config.trainer.micro_batch_tokens
        ):
            if not counts:
                (self.model(self._rows(rows, part)).sum() * 0).backward()
                continue
            values, chosen = self.model(self._rows(rows, part)), [rows[i] for i in part]
            old, returns, weights = (
                torch.from_numpy(np.concatenate(arrays)).to(values.device, non_blocking=True)
                for arrays in (
                    [row.old_values for row in chosen],
                    [row.returns for row in chosen],
                    [np.full(len(row.returns), row.weight, np.float32) for row in chosen],
                )
            )
            result = value_loss(values, old, returns, self._config.critic.value_clip)
            loss = (result.loss * weights).sum()
            (loss / tokens).backward()
            sums += torch.stack(
                [loss.detach(), result.clipped.sum(), torch.ones_like(loss) * len(values)]
            ).double()
        return sums

    def _sizes(self, sequences: Sequence[TokenSequence]) -> Sizes:
        prompts, completions = (
            [getattr(s, name) for s in sequences] for name in ("prompt_ids", "completion_ids")
        )
        return Sizes.of(prompts, completions, self.model.layout.shared)

    def _rows(self, sequences: Sequence[TokenSequence], indices: Indices) -> Layout:
        chosen = [sequences[i] for i in indices.tolist()]
        rows = self.model.layout.of(
            [s.prompt_ids for s in chosen], [s.completion_ids for s in chosen]
        )
        return moved(rows, self._ranks.device)

    def _check(self, sequences: Sequence[TokenSequence], where: str) -> None:
        """Refuses tokens outside the vocabulary, which would crash the process, and sequences that
        are too long.
        """
        known, longest = self.model.vocabulary, self.model.max_tokens
        for i, sequence in enumerate(sequences):
            for name in ("prompt_ids", "completion_ids"):
                ids = getattr(sequence, name)
                wrong = ids[(ids < 0) | (ids >= known)]
                if len(wrong):
                    reason = f"the critic's model knows only the tokens 0 to {known - 1}"
                    remedy = "use a critic.model with the policy's tokenizer"
                    raise InvalidInput(
                        reason, field=f"{where}[{i}].{name}", value=int(wrong[0]), remedy=remedy
                    )
            if longest is not None and len(sequence) > longest:
                reason = f"the critic's model accepts at most {longest} tokens"
                remedy = "lower sampling.max_new_tokens, or use another critic.model"
                raise InvalidInput(
                    reason, field=f"{where}[{i}]", value=len(sequence), remedy=remedy
                )

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
            reason = f"the critic cannot resume from the checkpoint: {reason}"
            remedy = "remove that directory to continue from the checkpoint before it, or start with --trainer.resume false"
            raise ConfigError(
                reason, field="checkpoint", value=str(directory), remedy=remedy
            ) from None


@dataclass
class ValueLoss:
    """The value loss of C tokens."""

    loss: Tensor
    """[C] with gradient."""
    clipped: Tensor
    """[C] bool: the value is so far from the old one that the loss no longer moves it."""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None
) -> ValueLoss:
    """Returns ½·max((v − R)², (clip(v, v_old ± clip) − R)²) for every token; ½(v − R)² when `clip`
    is None.

    The squared error of Schulman et al. 2017 (arXiv:1707.06347), clipped as in PPO's reference
    implementation in OpenAI baselines. Values, old values and returns are [C]; `clip` is the
    distance from the old value where clipping starts.
    """
    error = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * error, torch.zeros_like(error, dtype=torch.bool))
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    clipped = (bounded > error) & (
        (values - old_values).abs() > clip
    )  # inside the range both are equal up to rounding
    return ValueLoss(0.5 * torch.where(clipped, bounded, error), clipped)


def _metrics(rows: Sequence[ValueTargets], sums: Tensor, norms: Sequence[float]) -> CriticMetrics:
    loss, clipped, tokens = sums.tolist()
    old = np.concatenate([row.old_values for row in rows]).astype(np.float64)
    returns = np.concatenate([row.returns for row in rows]).astype(np.float64)
    variance = float(returns.var())
    applied = [norm for norm in norms if math.isfinite(norm)]
    return CriticMetrics(
        value_loss=loss / tokens if applied else None,
        grad_norm=float(np.mean(applied)) if applied else None,
        clip_fraction=clipped / tokens if applied else None,
        explained_variance=1 - float((returns - old).var()) / variance if variance > 0 else 0.0,
        value_mean=float(old.mean()),
        return_mean=float(returns.mean()),
        skipped=len(norms) - len(applied),
    )
