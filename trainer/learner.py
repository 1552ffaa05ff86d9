"""The learner: policy, optimiser and the update. The same code on one process and on many."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.config import Config
from common.errors import ServiceError
from trainer.batch import Batch, MicroBatch
from trainer.distributed import Ranks
from trainer.losses import clipped_surrogate, kl_divergence
from trainer.model import TokenScores, load_model, score_tokens


class NotFinite(ServiceError):
    """The gradient is NaN or infinite: the update was not applied."""

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
    trained_tokens: int


class Learner:
    """Policy, optimiser and step count; `step` is also the weight version of the policy.

    Args:
        config: of the run.
        ranks: this process among the trainer's processes.
        directory: of a checkpoint to load the policy from; `config.model.name` when None.
    """

    def __init__(self, config: Config, ranks: Ranks, directory: Path | None = None) -> None:
        self.config, self.ranks, self.step = config, ranks, 0
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

    def learning_rate(self) -> float:
        """Of the next update: linear warm-up, then constant."""
        settings = self.config.trainer
        return settings.learning_rate * min(1.0, (self.step + 1) / max(1, settings.warmup_steps))

    def update(self, batch: Batch) -> UpdateMetrics:
        """One optimiser step on the batch; token-mean over the global batch, however it is cut.

        Raises NotFinite, with the policy unchanged, when the gradient is not finite.
        """
        self.optimizer.zero_grad()
        sums = torch.zeros(7, dtype=torch.float64)
        for micro in batch.micro_batches(self.config.trainer.micro_batch_tokens):
            sums += self._accumulate(micro.to(self.ranks.device), batch.total_tokens)
        self.ranks.sum_gradients(self.policy)
        self.ranks.sum(sums)
        grad_norm = float(nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.trainer.max_grad_norm))
        if not torch.isfinite(torch.tensor(grad_norm)):
            self.optimizer.zero_grad()
            raise NotFinite(
                f"the gradient of step {self.step + 1} is not finite",
                field="grad_norm",
                value=grad_norm,
                remedy="lower trainer.learning_rate or resume from an earlier checkpoint",
            )
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.step += 1
        loss, clipped, ratio, delta, kl_rollout, kl_reference, entropy = (float(value) for value in sums)
        tokens = int(self._tokens(batch))
        mean = 1 / max(1, tokens)
        return UpdateMetrics(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=rate,
            clip_fraction=clipped * mean,
            ratio=ratio * mean if tokens else 1.0,
            delta_logprob=delta * mean,
            kl_rollout=kl_rollout * mean,
            kl_reference=kl_reference * mean,
            entropy=entropy * mean,
            trained_tokens=tokens,
        )

    def _tokens(self, batch: Batch) -> Tensor:
        own = sum(len(row.completion_ids) for row in batch.rows)
        return self.ranks.sum(torch.tensor(own))

    def _accumulate(self, micro: MicroBatch, total_tokens: int) -> Tensor:
        """Adds this micro-batch's share of the gradient; returns sums over its tokens for the metrics."""
        algorithm = self.config.algorithm
        scores = self._scores(self.policy, micro)
        policy = clipped_surrogate(
            scores.logprobs, micro.behaviour_logprobs, micro.advantages, algorithm.clip_low, algorithm.clip_high
        )
        per_token, kl_reference = policy.loss, torch.zeros_like(scores.logprobs)
        if self.reference is not None:
            with torch.no_grad():
                reference = self._scores(self.reference, micro).logprobs
            kl_reference = kl_divergence(scores.logprobs, reference, algorithm.kl_estimator)
            per_token = per_token + algorithm.kl_coef * kl_reference
        loss = (per_token * micro.weights).sum() / total_tokens
        loss.backward()
        with torch.no_grad():
            delta = (scores.logprobs - micro.behaviour_logprobs).abs()
            kl_rollout = kl_divergence(micro.behaviour_logprobs, scores.logprobs, "k3")
            columns = (policy.clipped, policy.ratio, delta, kl_rollout, kl_reference, scores.entropy)
            return torch.stack([loss, *(column.sum() for column in columns)]).double().cpu()

    def _scores(self, model: Any, micro: MicroBatch) -> TokenScores:
        device = self.ranks.device.type
        low = device == "cuda" and self.config.model.dtype == "bfloat16"
        with torch.autocast(device, torch.bfloat16, enabled=low):
            temperature = self.config.sampling.temperature
            return score_tokens(model, micro.input_ids, micro.attention_mask, micro.predicts, micro.targets, temperature)
