"""The log-probabilities of a whole batch under any model."""

import torch
from torch import Tensor

from common.settings.config import Config
from common.wire.schemas import Float32
from learning.batching import Indices, score_shared
from learning.layout import moved
from learning.ranks import Ranks
from trainer.algorithms.batch import Batch, ModelInputs
from trainer.policy.scorer import Scorer, TokenScores


def score_batch(scorer: Scorer, batch: Batch, config: Config, ranks: Ranks) -> list[Float32]:
    """Returns [L] for each row of this rank: the log-probabilities of its tokens in nats at the
    sampling temperature; an empty array for the others' rows. A collective.
    """

    def score(indices: Indices) -> Tensor:
        rows = [batch.tokens[i] for i in indices.tolist()]
        inputs = moved(ModelInputs.of(rows, scorer.layout, scorer.routers), ranks.device)
        scores: TokenScores = scorer(
            inputs.tokens, inputs.targets, config.sampling.temperature, support=inputs.support
        )
        return scores.logprobs

    with torch.no_grad():
        return score_shared(
            batch.sizes(scorer.layout.shared),
            ranks,
            config.trainer,
            score=score,
        )
