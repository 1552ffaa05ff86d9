"""Metrics of an update: sums over tokens, accumulated over micro-batches, updates and ranks, and
their means.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from trainer.algorithms.batch import MicroBatch
from trainer.algorithms.losses import PolicyLoss, kl_divergence, ratio_of
from trainer.policy.scorer import TokenScores


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of the updates on one batch; means are over the completion tokens trained on, of all
    ranks and passes.
    """

    loss: float
    """Mean over the updates."""
    grad_norm: float
    """Mean over the updates, before clipping."""
    learning_rate: float
    clip_fraction: float
    ratio: float
    delta_logprob: float
    """Mean |trainer's logprob − sampling policy's logprob|, before the first update."""
    delta_logprob_current: float
    """`delta_logprob` over the tokens that the current policy sampled: 0 when engine and trainer
    compute the same."""
    logprob_gap: float
    """Mean of sampling policy's logprob − trainer's over the same tokens: near 0 when they round
    differently, near `delta_logprob_current` when the engine truncates its distribution."""
    likelihood_gap: float
    """Mean of entropy + logprob over the same tokens, in nats: 0 when they were sampled from the
    policy, above 0 when they are likelier."""
    likelihood_error: float
    """Standard error of `likelihood_gap`, of independent tokens."""
    kl_rollout: float
    """k3 estimate of KL(sampling policy ‖ trainer), before the first update."""
    kl_reference: float
    """k3 estimate of KL(policy ‖ reference), whatever estimator the loss uses."""
    kl_coef: float
    entropy: float
    effective_sample_size: float
    """Share of the tokens, for weights trainer / sampling policy; 1 on policy."""
    trained_tokens: int
    pass_fill: float
    """How full the passes were: the fewest that have room for all their tokens, per pass that was
    made. Below 1 because an answer is never cut."""
    updates: int
    """Optimiser updates that were applied."""
    skipped: int = 0
    """Updates skipped because the gradient was not finite; metrics that were not finite are then
    0."""
    stopped_early: int = 0
    """1 when `algorithm.early_stop_kl` ended the updates on this batch."""

    def finite(self) -> "UpdateMetrics":
        """Returns these with 0 in place of what is not finite, which JSON cannot hold."""
        values = asdict(self)
        return UpdateMetrics(
            **{name: value if math.isfinite(value) else 0 for name, value in values.items()}
        )


_OF_UPDATES = ["loss", "tokens", "clipped", "ratio", "kl_old", "kl_reference", "entropy"]
_OF_COMPARISON = [
    "first",
    "delta",
    "current",
    "delta_current",
    "gap_current",
    "likelier",
    "likelier_square",
    "kl_rollout",
    "weight",
    "weight_square",
]
"""Sums over the tokens that were scored before the first update; `first` counts these tokens."""
_NAMES = [*_OF_UPDATES, *_OF_COMPARISON, "passes", "full_passes"]


class Sums:
    """Sums over tokens by name.

    They stay on `device` until they are read, so that `add` does not wait for a GPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.values = torch.zeros(len(_NAMES), dtype=torch.float64, device=device)

    def __getitem__(self, name: str) -> float:
        return float(self.values[_NAMES.index(name)])

    def add_passes(self, tokens: Sequence[int], room: int) -> None:
        """Adds passes by their tokens; each had room for `room` tokens."""
        fewest = math.ceil(sum(tokens) / room)
        self.values[_NAMES.index("passes")] += len(tokens)
        # An answer that is longer than `room` has a pass of its own.
        self.values[_NAMES.index("full_passes")] += min(len(tokens), fewest)

    def _add(self, columns: Mapping[str, Tensor]) -> None:
        for name, column in columns.items():
            self.values[_NAMES.index(name)] += column.sum()

    def add(
        self,
        micro: MicroBatch,
        scores: TokenScores,
        policy: PolicyLoss,
        *,
        loss: Tensor,
        old_logprobs: Tensor,
    ) -> None:
        """Adds the tokens of one micro-batch.

        Args:
            micro: C tokens.
            scores: of these tokens, [C].
            policy: their loss, ratio and clipping, [C].
            loss: [] the micro-batch's part of the loss.
            old_logprobs: [C] of the policy that the ratio refers to, in nats.
        """
        logprobs = scores.logprobs
        columns = {
            "loss": loss,
            "tokens": torch.ones_like(logprobs),
            "clipped": policy.clipped,
            "ratio": policy.ratio,
            "kl_old": kl_divergence(old_logprobs, logprobs, "k3"),
            "entropy": scores.entropy,
        }
        if micro.ref_logprobs is not None:
            columns["kl_reference"] = kl_divergence(logprobs, micro.ref_logprobs, "k3")
        self._add(columns)

    def compare(self, micro: MicroBatch, scores: TokenScores) -> None:
        """Adds the comparison of sampling policy and trainer, before the first update."""
        logprobs = scores.logprobs
        behaviour = micro.rollout_logprobs
        current = micro.current
        weight = ratio_of(logprobs, behaviour)
        delta = (logprobs - behaviour).abs()
        # E[−log p] = H under the policy itself: the mean is 0 for its own samples.
        likelier = (scores.entropy + logprobs) * current
        self._add(
            {
                "first": torch.ones_like(logprobs),
                "delta": delta,
                "current": current,
                "delta_current": delta * current,
                "gap_current": (behaviour - logprobs) * current,
                "likelier": likelier,
                "likelier_square": likelier.square(),
                "kl_rollout": kl_divergence(behaviour, logprobs, "k3"),
                "weight": weight,
                "weight_square": weight.square(),
            }
        )

    def mean(self, name: str, over: str = "tokens") -> float:
        """Returns the sum `name` per `over`, a count; 0 where there is nothing to count."""
        return self[name] / max(1.0, self[over])

    def metrics(
        self,
        grad_norms: Sequence[float],
        learning_rate: float,
        kl_coef: float,
        *,
        skipped: int,
        stopped: bool,
    ) -> UpdateMetrics:
        """Returns the metrics of updates with these gradient norms.

        `skipped` of them were not finite. If `stopped`, one more was computed and not applied.
        """
        self.values = self.values.cpu()
        first = self["first"]
        tokens = int(self["tokens"])
        updates = len(grad_norms)
        current = max(1.0, self["current"])
        spread = self["likelier_square"] / current - (self["likelier"] / current) ** 2
        sample_size = self["weight"] ** 2 / self["weight_square"] / first if first else 1.0
        return UpdateMetrics(
            loss=self["loss"] / max(1, updates + stopped),
            grad_norm=sum(grad_norms) / max(1, updates),
            learning_rate=learning_rate,
            clip_fraction=self.mean("clipped"),
            ratio=self.mean("ratio") if tokens else 1.0,
            delta_logprob=self.mean("delta", "first"),
            delta_logprob_current=self.mean("delta_current", "current"),
            logprob_gap=self.mean("gap_current", "current"),
            likelihood_gap=self.mean("likelier", "current"),
            likelihood_error=math.sqrt(max(0.0, spread) / current),
            kl_rollout=self.mean("kl_rollout", "first"),
            kl_reference=self.mean("kl_reference"),
            kl_coef=kl_coef,
            entropy=self.mean("entropy"),
            effective_sample_size=sample_size,
            trained_tokens=tokens,
            pass_fill=self["full_passes"] / self["passes"] if self["passes"] else 1.0,
            updates=updates - skipped,
            skipped=skipped,
            stopped_early=int(stopped),
        )
