"""The learner: policy, optimiser and the update. The same code on one process and on many."""

import logging
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.config import Config
from common.errors import ServiceError
from common.sections import TrainerSection
from trainer.algorithms import policy_loss
from trainer.batch import Batch, MicroBatch
from trainer.distributed import Ranks
from trainer.losses import (
    PolicyLoss,
    importance_correction,
    kl_divergence,
    off_policy_mask,
    probability_ratio,
    token_coefficients,
)
from trainer.model import TokenScores, load_model, score_tokens

log = logging.getLogger(__name__)


class NotFinite(ServiceError):
    """The gradient is NaN or infinite, several times in a row."""

    code = "not_finite"


@dataclass(frozen=True)
class UpdateMetrics:
    """Of one update; means are over the completion tokens that were trained on, of all ranks."""

    loss: float
    grad_norm: float
    learning_rate: float
    clip_fraction: float
    ratio: float
    delta_logprob: float
    """Mean |logprob of the trainer − logprob of the rollout engine|; 0 when both compute the same policy exactly."""
    kl_rollout: float
    """k3 estimate of KL(rollout ‖ trainer)."""
    kl_reference: float
    entropy: float
    effective_sample_size: float
    """Of the trainer's policy over the rollout engine's, as a share of the tokens; 1 on policy."""
    trained_tokens: int
    skipped: int = 0
    """1 when the gradient was not finite: the update was not applied, and numbers that were not finite are 0 here."""


class _Sums:
    """Sums over tokens that give the metrics; they add up over micro-batches and ranks."""

    _NAMES = ("loss", "clipped", "ratio", "delta", "kl_rollout", "kl_reference", "entropy", "weight", "weight_square", "tokens")

    def __init__(self, values: Tensor | None = None) -> None:
        self.values = torch.zeros(len(self._NAMES), dtype=torch.float64) if values is None else values

    @classmethod
    def of(cls, loss: Tensor, policy: PolicyLoss, scores: TokenScores, behaviour: Tensor, kl_reference: Tensor) -> "_Sums":
        weight = probability_ratio(scores.logprobs, behaviour)
        columns = (
            policy.clipped,
            policy.ratio,
            (scores.logprobs - behaviour).abs(),
            kl_divergence(behaviour, scores.logprobs, "k3"),
            kl_reference,
            scores.entropy,
            weight,
            weight.square(),
            torch.ones_like(weight),
        )
        return cls(torch.stack([loss, *(column.sum() for column in columns)]).double().cpu())

    def __iadd__(self, other: "_Sums") -> "_Sums":
        self.values += other.values
        return self

    def metrics(self, grad_norm: float, learning_rate: float) -> UpdateMetrics:
        sums = dict(zip(self._NAMES, self.values.tolist(), strict=True))
        tokens = int(sums["tokens"])
        mean = 1 / max(1, tokens)
        return UpdateMetrics(
            loss=sums["loss"],
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            clip_fraction=sums["clipped"] * mean,
            ratio=sums["ratio"] * mean if tokens else 1.0,
            delta_logprob=sums["delta"] * mean,
            kl_rollout=sums["kl_rollout"] * mean,
            kl_reference=sums["kl_reference"] * mean,
            entropy=sums["entropy"] * mean,
            effective_sample_size=sums["weight"] ** 2 / sums["weight_square"] * mean if tokens else 1.0,
            trained_tokens=tokens,
        )


def learning_rate(step: int, total_steps: int | None, settings: TrainerSection) -> float:
    """Of the update after `step` steps: linear warm-up, then `settings.lr_schedule`, which ends at zero after `total_steps`."""
    warmup = settings.warmup_steps
    if step < warmup or settings.lr_schedule == "constant" or total_steps is None:
        return settings.learning_rate * min(1.0, (step + 1) / max(1, warmup))
    done = (step - warmup) / max(1, total_steps - warmup)
    left = 1 - done if settings.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * left


class Learner:
    """Policy, optimiser and step count; `step` is also the weight version of the policy.

    Args:
        config: of the run.
        ranks: this process among the trainer's processes.
        directory: of a checkpoint to load the policy from; `config.model.name` when None.
    """

    def __init__(self, config: Config, ranks: Ranks, directory: Path | None = None) -> None:
        self.config, self.ranks, self.step = config, ranks, 0
        self.total_steps: int | None = None
        """Of the run; a schedule that falls needs it."""
        self._skipped = 0
        self.policy = load_model(config.model, directory).to(ranks.device)
        self.policy.train()
        self.reference: nn.Module | None = None
        if config.algorithm.kl_coef > 0:
            self.reference = load_model(config.model).to(ranks.device).eval().requires_grad_(False)
        settings = config.trainer
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=settings.learning_rate,
            betas=settings.adam_betas,
            weight_decay=settings.weight_decay,
            fused=ranks.device.type == "cuda",
        )

    def update(self, batch: Batch) -> UpdateMetrics:
        """One optimiser step on the batch; the result does not depend on how the batch is cut.

        An update whose gradient is not finite is skipped: the policy is unchanged and the metrics say so. Raises
        NotFinite after more than `trainer.max_skipped_updates` of them in a row.
        """
        self.optimizer.zero_grad()
        sums = _Sums()
        for micro in batch.micro_batches(self.config.trainer.micro_batch_tokens):
            sums += self._accumulate(micro.to(self.ranks.device), batch)
        self.ranks.sum_gradients(self.policy)
        self.ranks.sum(sums.values)
        grad_norm = float(nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.trainer.max_grad_norm))
        rate = learning_rate(self.step, self.total_steps, self.config.trainer)
        if not math.isfinite(grad_norm):
            return self._skip(sums.metrics(grad_norm, rate))
        self._skipped = 0
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.step += 1
        return sums.metrics(grad_norm, rate)

    def _skip(self, metrics: UpdateMetrics) -> UpdateMetrics:
        """Counts an update that was not applied: a step of its own, with the weights it began with."""
        self.optimizer.zero_grad()
        self._skipped += 1
        if self._skipped > self.config.trainer.max_skipped_updates:
            raise NotFinite(
                f"the gradients of {self._skipped} steps in a row, the last one {self.step + 1}, are not finite",
                field="grad_norm",
                value=metrics.grad_norm,
                remedy="lower trainer.learning_rate or resume from an earlier checkpoint",
            )
        log.warning("the gradient of step %d is not finite: the update is skipped", self.step + 1)
        self.step += 1
        broken: dict[str, Any] = {name: 0.0 for name, value in asdict(metrics).items() if not math.isfinite(value)}
        return replace(metrics, skipped=1, **broken)

    def _accumulate(self, micro: MicroBatch, batch: Batch) -> "_Sums":
        """Adds this micro-batch's share of the gradient; returns sums over its tokens for the metrics."""
        algorithm, rows, count = self.config.algorithm, micro.rows, len(micro.input_ids)
        scores = self._scores(self.policy, micro)
        behaviour = micro.behaviour_logprobs
        scale = token_coefficients(
            algorithm.aggregation, micro.lengths, batch.total_tokens, batch.total_rows, self.config.sampling.max_new_tokens
        )
        scale = scale * micro.weights
        old = behaviour
        if algorithm.rollout_correction != "none":
            # Decoupled: the ratio is taken to the trainer's own policy before the update, w corrects for the engine's.
            old = scores.logprobs.detach()
            scale = scale * importance_correction(
                old,
                behaviour,
                rows,
                count,
                algorithm.rollout_correction,
                algorithm.correction_level,
                algorithm.correction_cap,
            )
        policy = policy_loss(algorithm, scores.logprobs, old, micro.advantages, rows, count)
        kept = torch.ones_like(policy.loss)
        if algorithm.off_policy_delta is not None:
            delta = algorithm.off_policy_delta
            kept = off_policy_mask(scores.logprobs, behaviour, micro.advantages, rows, count, delta)
        per_token, kl_reference = policy.loss * kept, torch.zeros_like(scores.logprobs)
        if self.reference is not None:
            with torch.no_grad():
                reference = self._scores(self.reference, micro).logprobs
            kl_reference = kl_divergence(scores.logprobs, reference, algorithm.kl_estimator)
            per_token = per_token + algorithm.kl_coef * kl_reference
        per_token = per_token - algorithm.entropy_coef * scores.entropy
        loss = (per_token * scale).sum()
        loss.backward()
        with torch.no_grad():
            return _Sums.of(loss, policy, scores, behaviour, kl_reference)

    def _scores(self, model: Any, micro: MicroBatch) -> TokenScores:
        device = self.ranks.device.type
        low = device == "cuda" and self.config.model.dtype == "bfloat16"
        with torch.autocast(device, torch.bfloat16, enabled=low):
            temperature = self.config.sampling.temperature
            bonus = self.config.algorithm.entropy_coef > 0 and model is self.policy
            return score_tokens(model, micro.input_ids, micro.attention_mask, micro.predicts, micro.targets, temperature, bonus)
