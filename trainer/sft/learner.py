"""The update and the held-out loss of learning from worked answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learning.batching import Indices, Sizes, score_shared
from learning.layout import Layout, moved
from learning.passes import passes
from trainer.policy.policy import Policy, learning_rate
from trainer.policy.scorer import TokenScores
from trainer.policy.scoring import score_tokens
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
        self._policy, self._config, self._ranks = policy, policy.config, policy.ranks

    def learn(self, rows: Sequence[TrainingSequence]) -> Update:
        """Makes one update. A collective. Raises NonFiniteGradients after too many skipped updates
        in a row.
        """
        policy, settings, ranks = self._policy, self._config.trainer, self._ranks
        total = sum(float(row.learned.sum()) for row in rows)
        sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        policy.optimizer.zero_grad()
        limits = (settings.micro_batch_tokens, settings.micro_batch_size)
        for indices, counts in passes(
            policy.scorer, ranks, self._sizes(rows), np.arange(len(rows)), *limits
        ):
            scores, learned = self._score(rows, indices)
            weights = learned if counts else learned * 0
            loss = -(scores.logprobs * weights).sum()
            (loss / total).backward()
            sums += torch.stack([loss.detach(), (scores.entropy.detach() * weights).sum()]).double()
        ranks.sum_gradients(policy.model)
        rate = learning_rate(policy.step, policy.total_steps, settings)
        norm = policy.optimizer.step(rate)
        policy.step += 1
        loss_sum, entropy = ranks.sum(sums).tolist()
        applied = math.isfinite(norm)
        loss, mean_entropy, norm = (
            value if math.isfinite(value) else 0.0
            for value in (loss_sum / total, entropy / total, norm)
        )
        return Update(
            loss,
            mean_entropy,
            norm,
            rate,
            int(total),
            updates=int(applied),
            skipped=int(not applied),
        )

    def loss(self, rows: Sequence[TrainingSequence]) -> float:
        """Returns the mean negative log-probability of the answers' tokens in nats, without
        learning. A collective.
        """
        policy, settings = self._policy, self._config.trainer
        policy.model.eval()
        with torch.no_grad():
            scored = score_shared(
                self._sizes(rows),
                self._ranks,
                settings.micro_batch_tokens,
                lambda indices: self._score(rows, indices)[0].logprobs,
                settings.micro_batch_size,
            )
        policy.model.train()
        pairs = [
            (logprobs.astype(np.float64), row.learned)
            for logprobs, row in zip(scored, rows, strict=True)
        ]
        return -float(
            sum((logprobs * learned).sum() for logprobs, learned in pairs)
            / sum(part.sum() for _, part in pairs)
        )

    def _sizes(self, rows: Sequence[TrainingSequence]) -> Sizes:
        prompts, completions = (
            [row.prompt_ids for row in rows],
            [row.completion_ids for row in rows],
        )
        return Sizes.of(prompts, completions, self._policy.scorer.layout.shared)

    def _score(
        self, rows: Sequence[TrainingSequence], indices: Indices
    ) -> tuple[TokenScores, Tensor]:
        """Scores the rows at `indices`; returns the scores and [C], 1 for learned tokens."""
        chosen, device = [rows[i] for i in indices.tolist()], self._ranks.device
        tokens: Layout = self._policy.scorer.layout.of(
            [row.prompt_ids for row in chosen], [row.completion_ids for row in chosen]
        )
        targets = torch.from_numpy(
            np.concatenate([row.completion_ids for row in chosen]).astype(np.int64)
        )
        learned = torch.from_numpy(np.concatenate([row.learned for row in chosen]))
        scores = score_tokens(
            self._policy.scorer,
            moved(tokens, device),
            moved(targets, device),
            config=self._config,
            ranks=self._ranks,
        )
        return scores, moved(learned, device)
