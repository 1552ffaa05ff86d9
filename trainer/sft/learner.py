"""The update and the held-out loss of learning from examples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learning.batching import Indices, Sizes, micro_batch_passes, score_shared
from learning.layout import Layout, moved
from trainer.policy.learning_rate import learning_rate
from trainer.policy.policy import Policy
from trainer.policy.scorer import TokenScores
from trainer.sft.rows import TrainingSequence


@dataclass(frozen=True)
class Update:
    """Measurements of an update; means are over the learned tokens, before the update."""

    loss: float
    """Mean negative log-probability in nats, the loss."""
    entropy: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    trained_tokens: int
    updates: int
    """1, or 0 when it was skipped."""
    skipped: int
    """1 when the gradient was not finite: nothing was changed."""


class Learner:
    """Maximises the likelihood of answers. It trains `policy` and uses its model, optimiser, step
    and checkpoints.

    The loss is the mean over the learned tokens of the whole batch, so it does not depend on
    micro-batches or ranks.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._config = policy.config
        self._ranks = policy.ranks

    def learn(self, rows: Sequence[TrainingSequence]) -> Update:
        """Makes one update. A collective.

        The loss is L = −Σ mₜ log π(aₜ | s, a₍<ₜ₎) / Σ mₜ over all tokens of the batch, where mₜ is
        1 for the tokens of answers.

        Args:
            rows: the batch, the same on every rank.

        Raises NonFiniteGradients after too many skipped updates in a row.
        """
        policy = self._policy
        settings = self._config.trainer
        ranks = self._ranks
        total = sum(float(row.learned.sum()) for row in rows)
        sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        policy.optimizer.zero_grad()
        shares = micro_batch_passes(
            policy.scorer,
            ranks,
            Sizes.of(rows, policy.scorer.layout.shared),
            np.arange(len(rows)),
            settings=settings,
        )
        for indices, are_own in shares:
            scores, learned = self._score(rows, indices)
            # A pass that only keeps the ranks in step adds nothing.
            weights = learned if are_own else learned * 0
            loss = -(scores.logprobs * weights).sum()
            (loss / total).backward()
            entropy = (scores.entropy.detach() * weights).sum()
            sums += torch.stack([loss.detach(), entropy]).double()
        ranks.sum_gradients(policy.model)
        rate = learning_rate(policy.step, policy.total_steps, policy.config.optimizer)
        norm = policy.optimizer.step(rate)
        policy.step += 1
        loss_sum, entropy_sum = ranks.sum_shares(sums).tolist()
        applied = math.isfinite(norm)
        return Update(
            loss=_finite(loss_sum / total),
            entropy=_finite(entropy_sum / total),
            grad_norm=_finite(norm),
            learning_rate=rate,
            trained_tokens=int(total),
            updates=int(applied),
            skipped=int(not applied),
        )

    def loss(self, rows: Sequence[TrainingSequence]) -> float:
        """Returns the mean negative log-probability of the answers' tokens in nats, without
        learning. A collective.
        """
        policy = self._policy
        settings = self._config.trainer
        policy.model.eval()
        with torch.no_grad():
            scored = score_shared(
                Sizes.of(rows, policy.scorer.layout.shared),
                self._ranks,
                settings,
                lambda indices: self._score(rows, indices)[0].logprobs,
            )
        policy.model.train()
        logprob_sum = torch.zeros(1, dtype=torch.float64)
        for logprobs, row in zip(scored, rows, strict=True):
            if len(logprobs):  # else a row of another rank
                logprob_sum += (logprobs.astype(np.float64) * row.learned).sum()
        learned_tokens = sum(float(row.learned.sum()) for row in rows)
        return -float(self._ranks.sum_shares(logprob_sum)) / learned_tokens

    def _score(
        self, rows: Sequence[TrainingSequence], indices: Indices
    ) -> tuple[TokenScores, Tensor]:
        """Scores the rows at `indices`; returns the scores of their C completion tokens, and [C],
        1 for learned tokens.
        """
        device = self._ranks.device
        own = [rows[i] for i in indices.tolist()]
        prompts = [row.prompt_ids for row in own]
        completions = [row.completion_ids for row in own]
        tokens: Layout = self._policy.scorer.layout.of(prompts, completions)
        targets = torch.from_numpy(np.concatenate(completions).astype(np.int64))
        learned = torch.from_numpy(np.concatenate([row.learned for row in own]))
        scores: TokenScores = self._policy.scorer(
            moved(tokens, device), moved(targets, device), self._config.sampling.temperature
        )
        return scores, moved(learned, device)


def _finite(value: float) -> float:
    """Returns the value, or 0 for one that JSON cannot hold: the update was skipped and counted."""
    return value if math.isfinite(value) else 0.0
