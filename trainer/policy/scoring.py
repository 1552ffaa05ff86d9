"""Scoring of a batch, or of one micro-batch, under any model."""

import numpy as np
import torch
from torch import Tensor

from common.settings.config import Config
from common.wire.schemas import Float32
from learning.batching import Indices, score_shared
from learning.layout import Layout, moved
from learning.ranks import Ranks
from learning.sampling_support import Support
from trainer.algorithms.batch import Batch, lay_out
from trainer.policy.scorer import Scorer, TokenScores, computes_in_bfloat16


def score_batch(scorer: Scorer, batch: Batch, config: Config, ranks: Ranks) -> list[Float32]:
    """Returns [L] for each row: the log-probabilities of its tokens in nats, the same on every
    rank. A collective.
    """

    def score(indices: Indices) -> Tensor:
        rows = [batch.rows[i] for i in indices.tolist()]
        targets = torch.from_numpy(np.concatenate([row.targets for row in rows]).astype(np.int64))
        support = Support.of([row.sampled for row in rows], [len(row.targets) for row in rows])
        scores = score_tokens(
            scorer,
            moved(lay_out(scorer.layout, rows, scorer.routers), ranks.device),
            moved(targets, ranks.device),
            config=config,
            ranks=ranks,
            support=moved(support, ranks.device),
        )
        return scores.logprobs

    with torch.no_grad():
        return score_shared(
            batch.sizes(scorer.layout.shared),
            ranks,
            config.trainer.micro_batch_tokens,
            score=score,
            max_rows=config.trainer.micro_batch_size,
        )


def score_tokens(
    scorer: Scorer,
    tokens: Layout,
    targets: Tensor,
    *,
    config: Config,
    ranks: Ranks,
    entropy_gradient: bool = False,
    support: Support | None = None,
) -> TokenScores:
    """Scores [C] completion tokens of a micro-batch at the sampling temperature, in the run's
    compute precision.

    Args:
        scorer: the model.
        tokens: the rows in the model's layout.
        targets: [C] the tokens to score, row by row.
        config: with the temperature and the precision.
        ranks: with the device of the model.
        entropy_gradient: whether the entropies get a gradient, too.
        support: the tokens that each target was sampled from; None for the whole vocabulary.
    """
    in_bfloat16 = computes_in_bfloat16(config.model, ranks)
    casts = in_bfloat16 and not ranks.sharded  # FSDP2 does its own casting
    with torch.autocast(ranks.device.type, torch.bfloat16, enabled=casts):
        scores: TokenScores = scorer(
            tokens,
            targets,
            config.sampling.temperature,
            entropy_gradient=entropy_gradient,
            support=support,
        )
        return scores
