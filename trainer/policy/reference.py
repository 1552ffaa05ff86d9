"""The reference model of the KL term, and scoring of a batch under any model."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from common.settings.config import Config
from common.wire.schemas import Float32
from learning.batching import Indices, score_shared
from learning.layout import Layout, moved
from learning.parking import Resident
from learning.ranks import Ranks
from learning.saving import Contents, Snapshot
from learning.sharding import local, named_tensors
from learning.support import Support
from trainer.algorithms.batch import Batch, lay_out
from trainer.policy.lora import BaseScorer
from trainer.policy.scorer import Scorer, TokenScores, computes_in_bfloat16, load_scorer

if TYPE_CHECKING:
    from trainer.policy.policy import Policy


class Reference:
    """The reference model; without a KL term there is none, and every method does nothing.

    A refreshed reference is loaded from the checkpoint `directory` that the run resumes from (only
    rank 0's argument counts). Otherwise it is the model that the run began with, or with LoRA the
    base model of `policy`.
    """

    def __init__(self, policy: "Policy", directory: Path | None = None) -> None:
        self._config, self._ranks = policy.config, policy.ranks
        self.scorer = self._load(policy, directory) if self._config.algorithm.kl_coef > 0 else None
        """None without a KL term."""

    def _load(self, policy: "Policy", directory: Path | None) -> Scorer:
        model, settings = self._config.model, self._config.trainer
        if self._config.lora.rank and not model.reference:
            return BaseScorer(policy.scorer)
        saved = directory / "reference" if directory else None
        directory = self._ranks.broadcast_path(saved if saved and saved.exists() else None)
        named = model.model_copy(update={"name": model.reference or model.name})
        max_tokens = self._config.rollout.context_bound
        scorer: Scorer = load_scorer(
            named, self._ranks, settings, directory, trained=False, max_tokens=max_tokens
        ).eval()
        return scorer.to("cpu") if settings.offload_reference else scorer

    def logprobs(self, batch: Batch) -> list[Float32] | None:
        """Returns log-probabilities [L] for each row under the reference; None without one."""
        if self.scorer is None:
            return None
        if self._config.trainer.offload_reference:
            self.scorer.to(self._ranks.device)
        found = score_batch(self.scorer, batch, self._config, self._ranks)
        if self._config.trainer.offload_reference:
            self.scorer.to("cpu")
        return found

    def resident(self) -> Resident:
        """Returns the models and optimizers on the GPU during an update."""
        return [] if self.scorer is None else [self.scorer], []

    def refresh(self, policy: "Policy") -> None:
        """Copies the policy into the reference every `algorithm.reference_refresh` steps."""
        every = self._config.algorithm.reference_refresh
        if self.scorer is not None and every and policy.step % every == 0:
            theirs = named_tensors(self.scorer.model).values()
            with torch.no_grad():
                for old, new in zip(theirs, named_tensors(policy.model).values(), strict=True):
                    local(old).copy_(local(new))

    def snapshots(self, alone: bool) -> dict[str, Snapshot]:
        """Returns the reference's part of a checkpoint, by folder; empty unless it is refreshed. A
        collective.
        """
        if self.scorer is None or not self._config.algorithm.reference_refresh:
            return {}
        return {
            "reference": Snapshot.take(Contents.of(self.scorer.model), None, self._ranks, alone)
        }


def score_batch(scorer: Scorer, batch: Batch, config: Config, ranks: Ranks) -> list[Float32]:
    """Returns [L] for each row: the log-probabilities of its tokens, the same on every rank. A
    collective.
    """

    def score(indices: Indices) -> Tensor:
        rows = [batch.rows[i] for i in indices.tolist()]
        tokens = lay_out(scorer.layout, rows)
        targets = torch.from_numpy(np.concatenate([row.targets for row in rows]).astype(np.int64))
        support = Support.of([row.sampled for row in rows], [len(row.targets) for row in rows])
        on_device = (moved(tokens, ranks.device), moved(targets, ranks.device))
        return score_tokens(
            scorer, *on_device, config, ranks, support=moved(support, ranks.device)
        ).logprobs

    settings, sizes = config.trainer, batch.sizes(scorer.layout.shared)
    with torch.no_grad():
        return score_shared(
            sizes, ranks, settings.micro_batch_tokens, score, settings.micro_batch_size
        )


def score_tokens(
    scorer: Scorer,
    tokens: Layout,
    targets: Tensor,
    config: Config,
    ranks: Ranks,
    entropy_gradient: bool = False,
    support: Support | None = None,
) -> TokenScores:
    """Scores a micro-batch's completion tokens at the sampling temperature, in the run's compute
    precision.
    """
    low = (
        computes_in_bfloat16(config.model, ranks) and not ranks.sharded
    )  # FSDP2 does its own casting
    with torch.autocast(ranks.device.type, torch.bfloat16, enabled=low):
        temperature = config.sampling.temperature
        scores: TokenScores = scorer(
            tokens, targets, temperature, entropy_gradient=entropy_gradient, support=support
        )
        return scores
