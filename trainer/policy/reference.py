"""The reference model of the KL term."""

from pathlib import Path

import torch

from common.wire.schemas import Float32
from learning.parking import Resident
from learning.saving import Contents, Snapshot
from learning.sharding import local, named_tensors
from trainer.algorithms.batch import Batch
from trainer.policy.lora import BaseScorer
from trainer.policy.policy import Policy
from trainer.policy.scorer import Scorer, load_scorer
from trainer.policy.scoring import score_batch


class Reference:
    """The reference model; without a KL term there is none, and every method does nothing.

    A refreshed reference is loaded from the checkpoint `directory` that the run resumes from (only
    rank 0's argument counts). Otherwise it is the model that the run began with, or with LoRA the
    base model of `policy`.
    """

    def __init__(self, policy: Policy, directory: Path | None = None) -> None:
        self._config = policy.config
        self._ranks = policy.ranks
        self.scorer = self._load(policy, directory) if self._config.algorithm.kl_coef > 0 else None
        """None without a KL term."""

    def _load(self, policy: Policy, directory: Path | None) -> Scorer:
        model = self._config.model
        # Without its adapter the policy is the model that the run began with: no copy is needed.
        if self._config.lora.rank and not model.reference:
            return BaseScorer(policy.scorer)

        # A refreshed reference is in the checkpoint.
        saved = directory / "reference" if directory else None
        refreshed = self._ranks.broadcast(saved if saved and saved.exists() else None)
        scorer: Scorer = load_scorer(
            model.model_copy(update={"name": model.reference or model.name}),
            self._ranks,
            self._config,
            path=refreshed,
            trained=False,
            max_tokens=self._config.rollout.context_bound,
        ).eval()
        return scorer.to("cpu") if self._config.parallel.offload_reference else scorer

    def logprobs(self, batch: Batch) -> list[Float32] | None:
        """Returns log-probabilities [L] in nats for each row of this rank under the reference; None
        without one.
        """
        if self.scorer is None:
            return None
        if self._config.parallel.offload_reference:
            self.scorer.to(self._ranks.device)
        logprobs = score_batch(self.scorer, batch, self._config, self._ranks)
        if self._config.parallel.offload_reference:
            self.scorer.to("cpu")
        return logprobs

    def resident(self) -> Resident:
        """Returns the models and optimisers on the GPU during an update."""
        return [] if self.scorer is None else [self.scorer], []

    def refresh(self, policy: Policy) -> None:
        """Copies the policy into the reference after every `algorithm.reference_refresh` steps."""
        interval = self._config.algorithm.reference_refresh
        if self.scorer is None or not interval or policy.step % interval:
            return
        old_tensors = named_tensors(self.scorer.model).values()
        new_tensors = named_tensors(policy.model).values()
        with torch.no_grad():
            for old, new in zip(old_tensors, new_tensors, strict=True):
                local(old).copy_(local(new))

    def snapshots(self, gathered: bool) -> dict[str, Snapshot]:
        """Returns the reference's part of a checkpoint, by folder; empty unless it is refreshed. A
        collective.
        """
        if self.scorer is None or not self._config.algorithm.reference_refresh:
            return {}
        snapshot = Snapshot.take(
            Contents.of(self.scorer.model), None, self._ranks, gathered=gathered
        )
        return {"reference": snapshot}
