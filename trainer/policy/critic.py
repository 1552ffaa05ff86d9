"""The critic of PPO: values, value loss and update, on the trainer's ranks beside the policy.

The loop calls a `ValueFunction` in the same order on every rank; it is a `Critic` if the algorithm
needs one.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from common.settings.config import Config
from common.wire.schemas import Float32
from learning.batching import Indices, Sizes, micro_batch_passes, mini_batches, score_shared
from learning.fitting import fitted
from learning.layout import Layout, moved
from learning.optimizer import Optimizer
from learning.parking import Resident
from learning.ranks import Ranks
from learning.saving import Contents, Snapshot, load_optimizer
from trainer.algorithms.batch import Batch
from trainer.policy.value_model import load_value_model

_FOLDER = "critic"
_STATE = "critic_state.json"
_FORMAT = 2


@dataclass(frozen=True)
class CriticMetrics:
    """Metrics of one update of the critic. The first three cover the optimiser steps that were
    applied; None: no step.
    """

    value_loss: float | None
    """Mean over tokens and optimiser steps."""
    grad_norm: float | None
    """Mean gradient norm before clipping."""
    clip_fraction: float | None
    """Share of tokens whose value was clipped."""
    explained_variance: float
    """1 − Var(returns − old values) / Var(returns) over the tokens; 0 when the returns do not
    vary."""
    value_mean: float
    """Mean old value."""
    return_mean: float
    skipped: int
    """Optimiser steps not applied because the gradient was not finite."""


class ValueFunction:
    """Base class, for algorithms without a critic. Every method is a collective call."""

    def values(self, batch: Batch) -> list[Float32] | None:
        """Returns [L] for each row of this rank: the values of the states before its completion
        tokens; None without a critic.
        """
        return None

    def update(self, batch: Batch, seed: int) -> CriticMetrics | None:
        """Learns the batch's returns."""
        return None

    def resident(self) -> Resident:
        """Returns the models and optimisers on the GPU during an update."""
        return [], []

    def warming_up(self, step: int) -> bool:
        """Whether only the critic learns in the step after `step` steps (`critic.warmup_steps`)."""
        return False

    def snapshots(self, gathered: bool) -> dict[str, Snapshot]:
        """Returns the critic's part of a checkpoint, by folder. See `Snapshot.take`."""
        return {}


class Critic(ValueFunction):
    """Predicts the return of every state of a completion, and learns from observed returns.

    `step` counts its training batches. Every rank calls the same methods with its rows of the same
    batch; each computes its share. The critic starts from the checkpoint `saved` (on rank 0), or
    from `critic.model` with a new value head. Raises ConfigError when it cannot be loaded.
    """

    def __init__(self, config: Config, ranks: Ranks, saved: Path | None = None) -> None:
        self._config = config
        self._ranks = ranks
        self.step = 0
        saved = ranks.broadcast(saved)
        # With the same decisions about memory as the policy beside it.
        fitting = fitted(config, ranks, config.model.name)
        self._pass_settings = fitting.trainer
        self.model = load_value_model(fitting, ranks, saved)
        self.optimizer = Optimizer(self.model.module, config.optimizer, "critic.learning_rate")
        if saved is not None:
            self._restore(saved)

    def values(self, batch: Batch) -> list[Float32]:
        """Returns [L] values for each row of this rank's share; an empty array for the others.

        Raises ConfigError for tokens outside the vocabulary and for rows that are too long.
        """
        self._check(batch)
        with torch.no_grad():
            return score_shared(
                batch.sizes(self.model.layout.shared),
                self._ranks,
                self._pass_settings,
                score=lambda indices: self.model(self._rows(batch, indices)),
            )

    def update(self, batch: Batch, seed: int) -> CriticMetrics:
        """Trains for `algorithm.update_epochs` passes of `algorithm.mini_batches` optimiser steps
        over the rows.

        The loss of a step is a mean over all completion tokens of its mini-batch, in which a token
        counts by its row's weight. So the result depends neither on micro-batches nor on the number
        of ranks. `seed` determines the order of the rows. A step whose gradient is not finite is
        skipped and counted. Raises NonFiniteGradients after more than `MAX_SKIPPED_UPDATES` skipped
        steps in a row: the critic is then unusable.
        """
        sizes = batch.sizes(self.model.layout.shared)
        algorithm = self._config.algorithm
        norms: list[float] = []
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for epoch in range(algorithm.update_epochs):
            for indices in mini_batches(len(batch.rows), algorithm.mini_batches, seed + epoch):
                self.optimizer.zero_grad()
                part = self._accumulate(batch, sizes, indices)
                self._ranks.sum_gradients(self.model.module)
                # The step may be skipped; then its loss is not in the metrics.
                norms.append(self.optimizer.step(self._config.critic.learning_rate))
                if math.isfinite(norms[-1]):
                    sums += part
        self.step += 1
        own = sizes.owned(self._ranks.share).tolist()
        return _metrics(batch, own, self._ranks, self._ranks.sum_shares(sums), norms=norms)

    def resident(self) -> Resident:
        """See `ValueFunction`."""
        return [self.model], [self.optimizer]

    def warming_up(self, step: int) -> bool:
        """See `ValueFunction`."""
        return step < self._config.critic.warmup_steps

    def snapshots(self, gathered: bool) -> dict[str, Snapshot]:
        """Copies weights (as a Hugging Face model), optimiser and step."""
        snapshot = Snapshot.take(
            Contents.of(self.model.module), self.optimizer, self._ranks, gathered
        )
        if self._ranks.is_rank_zero:
            snapshot.texts[_STATE] = json.dumps({"format": _FORMAT, "step": self.step})
        return {_FOLDER: snapshot}

    def _accumulate(self, batch: Batch, sizes: Sizes, indices: Indices) -> Tensor:
        """Adds this rank's share of a mini-batch to the gradient. Returns its sums [loss, clipped
        tokens, tokens].
        """
        assert batch.values is not None
        assert batch.returns is not None
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        tokens = int(sizes.completions[indices].sum())
        for part, are_own in micro_batch_passes(
            self.model,
            self._ranks,
            sizes,
            rows=indices,
            settings=self._pass_settings,
        ):
            values = self.model(self._rows(batch, part))
            if not are_own:  # the other ranks have one more pass: join its collective calls
                (values.sum() * 0).backward()
                continue

            own = part.tolist()
            weights = [
                np.full(len(batch.returns[i]), batch.rows[i].weight, np.float32) for i in own
            ]
            losses, clipped = value_loss(
                values,
                old_values=_concatenated([batch.values[i] for i in own], values.device),
                returns=_concatenated([batch.returns[i] for i in own], values.device),
                clip=self._config.critic.value_clip,
            )
            loss = (losses * _concatenated(weights, values.device)).sum()
            (loss / tokens).backward()
            count = torch.ones_like(loss) * len(values)
            sums += torch.stack([loss.detach(), clipped.sum(), count]).double()
        return sums

    def _rows(self, batch: Batch, indices: Indices) -> Layout:
        selected = [batch.tokens[i] for i in indices.tolist()]
        rows = self.model.layout.of(
            [row.prompt_ids for row in selected],
            [row.completion_ids for row in selected],
        )
        return moved(rows, self._ranks.device)

    def _check(self, batch: Batch) -> None:
        """Refuses tokens outside the vocabulary, which would crash the process, and rows that are
        too long.
        """
        vocabulary = self.model.vocabulary
        longest = self.model.max_tokens
        name = self._config.critic.model or self._config.model.name
        for row in batch.tokens.values():
            highest = max(int(row.prompt_ids.max()), int(row.completion_ids.max()))
            if highest >= vocabulary:
                raise ConfigError(
                    f"the critic's model knows the tokens 0 to {vocabulary - 1}, not {highest}",
                    field="critic.model",
                    value=name,
                    remedy="use a model with the policy's tokenizer",
                )
            length = len(row.prompt_ids) + len(row.completion_ids)
            if longest is not None and length > longest:
                raise ConfigError(
                    f"the critic's model accepts at most {longest} tokens, not {length}",
                    field="critic.model",
                    value=name,
                    remedy="lower sampling.max_new_tokens, or use another critic.model",
                    settings=("sampling.max_new_tokens",),
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
            raise ConfigError(
                f"the critic cannot resume from the checkpoint ({_STATE} or state/): {reason}",
                field="checkpoint",
                value=str(directory),
                remedy="remove that directory to continue from the checkpoint before it, "
                "or start with checkpoint.resume false",
            ) from None


def value_function(config: Config, ranks: Ranks, directory: Path | None) -> ValueFunction:
    """Returns the critic of the checkpoint `directory`, of which only rank 0's counts, or a new one
    for None. A collective.

    Raises ConfigError when there is no critic in `directory`, or it is damaged.
    """
    if not config.algorithm.needs_critic:
        return ValueFunction()
    saved = None if directory is None else directory / _FOLDER
    if ranks.is_rank_zero and saved is not None and not saved.is_dir():
        raise ConfigError(
            "the checkpoint holds no critic that this run can continue with",
            field="algorithm.advantage",
            value=str(directory),
            remedy="keep algorithm.advantage as it was in that run, or set another trainer.run_dir",
            settings=("trainer.run_dir",),
        )
    return Critic(config, ranks, saved)


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
    batch: Batch, own: Sequence[int], ranks: Ranks, sums: Tensor, *, norms: Sequence[float]
) -> CriticMetrics:
    """Returns the metrics of an update on all ranks' rows, of which `own` are this rank's. A
    collective.
    """
    assert batch.values is not None
    assert batch.returns is not None
    loss, clipped, tokens = sums.tolist()
    old = np.concatenate([np.zeros(0), *(batch.values[i] for i in own)])
    returns = np.concatenate([np.zeros(0), *(batch.returns[i] for i in own)])
    errors = returns - old
    own_sums = torch.tensor([float(len(old)), old.sum(), returns.sum()], dtype=torch.float64)
    count, old_sum, return_sum = ranks.sum_shares(own_sums).tolist()

    # 1 where the values predicted every return, 0 where a constant would have done as well.
    return_squares = ((returns - return_sum / count) ** 2).sum()
    error_squares = ((errors - (return_sum - old_sum) / count) ** 2).sum()
    squares = torch.tensor([return_squares, error_squares], dtype=torch.float64)
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
