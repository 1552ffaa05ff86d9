"""The learner: policy, reference, optimiser and the updates on a batch. The same code on one process and on many."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.config import Config
from common.errors import ConfigError
from common.schemas import Float32
from common.sections import ModelSection, TrainerSection
from learning.batching import Indices, by_row, micro_batches, mini_batches, score_shared
from learning.layout import Layout, moved
from learning.optimizer import Optimizer
from learning.ranks import Ranks
from learning.saving import Contents, Snapshot
from learning.sharding import full, local, named_tensors
from trainer.algorithms.batch import Batch, MicroBatch
from trainer.algorithms.compute_advantages import policy_loss
from trainer.algorithms.losses import adapted_kl_coef, importance_correction, kl_divergence, off_policy_mask, token_coefficients
from trainer.policy.lora import BaseScorer, adapter_contents, load_policy, published_tensors
from trainer.policy.scorer import Scorer, TokenScores, computes_low, load_scorer
from trainer.policy.update_metrics import Sums, UpdateMetrics


def learning_rate(step: int, total_steps: int | None, settings: TrainerSection) -> float:
    """Of the update after `step` steps: linear warm-up, then `settings.lr_schedule`, which ends at zero after `total_steps`."""
    warmup = settings.warmup_steps
    if step < warmup or settings.lr_schedule == "constant" or total_steps is None:
        return settings.learning_rate * min(1.0, (step + 1) / max(1, warmup))
    done = (step - warmup) / max(1, total_steps - warmup)
    left = 1 - done if settings.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * left


class Learner:
    """Policy, optimiser and step count; `step`, the batches learned from, is also the weight version of the policy.

    Args:
        config: of the run.
        ranks: this process among the trainer's processes.
        directory: of a checkpoint to load the policy from; `config.model.name` when None. Only rank 0's counts, and only
            rank 0 has to see it.
    """

    def __init__(self, config: Config, ranks: Ranks, directory: Path | None = None) -> None:
        self.config, self.ranks, self.step = config, ranks, 0
        self.total_steps: int | None = None
        """Of the run; a schedule that falls needs it."""
        self.kl_coef = config.algorithm.kl_coef
        """Changes when `algorithm.kl_target` is set."""
        if config.trainer.offload_optimizer and not ranks.sharded:
            raise ConfigError(
                "models that are not sharded cannot be offloaded",
                field="trainer.offload_optimizer",
                value=True,
                remedy="leave trainer.shard_size unset, or set this to false: one process on a CPU has nothing to offload",
            )
        self._scorer = load_policy(config, ranks, directory)
        self.policy = self._scorer.model
        self.policy.train()
        self.reference: Scorer | None = None
        if config.algorithm.kl_coef > 0:
            self.reference = self._load_reference(config.model, directory)
        settings = config.trainer
        self.optimizer = Optimizer(
            self.policy,
            settings.optimizer,
            settings.adam_betas,
            settings.weight_decay,
            settings.max_grad_norm,
        )

    def _load_reference(self, config: ModelSection, directory: Path | None) -> Scorer:
        """A reference that was refreshed is in the checkpoint; else it is the model that the run began with."""
        if self.config.lora.rank and not config.reference:
            return BaseScorer(self._scorer)
        directory = self.ranks.same_path(directory / "reference" if directory and (directory / "reference").exists() else None)
        named = config.model_copy(update={"name": config.reference or config.name})
        reference: Scorer = load_scorer(named, self.ranks, self.config.trainer, directory, trained=False).eval()
        return reference.to("cpu") if self.config.trainer.offload_reference else reference

    def snapshots(self, alone: bool) -> dict[str, Snapshot]:
        """What a checkpoint holds of this learner, by folder. Every rank calls it; see `Snapshot.take`."""
        policy = adapter_contents(self.policy) if self.config.lora.rank else Contents.of(self.policy)
        parts = {".": Snapshot.take(policy, self.optimizer, self.ranks, alone)}
        if self.reference is not None and self.config.algorithm.reference_refresh:
            parts["reference"] = Snapshot.take(Contents.of(self.reference.model), None, self.ranks, alone)
        return parts

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights to publish, by their Hugging Face names, one at a time, in the precision engines compute in.

        With LoRA these are the adapter's, by PEFT's names, or the model's with the adapter merged.

        Every rank calls this and takes everything, so that weights spread over the ranks can be put together. Of tensors
        that are tied only the first is given, as the hub does. A tensor is good until the next update.
        """
        low, lora = computes_low(self.config.model, self.ranks), self.config.lora
        tensors = named_tensors(self.policy)

        def sent(tensor: Tensor) -> Tensor:
            kind = torch.bfloat16 if low and tensor.is_floating_point() else tensor.dtype
            return tensor.detach().to(self.ranks.device, kind)

        if lora.rank:
            whole = published_tensors(tensors, lora, lambda tensor: full(tensor.detach().to(self.ranks.device)))
            yield from ((name, sent(tensor)) for name, tensor in whole)
        else:
            yield from ((name, full(sent(tensor))) for name, tensor in tensors.items())

    def share_weights(self) -> None:
        """The part of a rank that does not publish, while rank 0 does."""
        deque(self.weights(), maxlen=0)

    @property
    def seed(self) -> int:
        """Of what is random in this step."""
        return self.config.seed * 1_000_003 + self.step

    def score(self, batch: Batch) -> None:
        """Sets the log-probabilities that the algorithm reads, of the policy as it is now and of the reference."""
        algorithm = self.config.algorithm
        decoupled = algorithm.correction is not None and algorithm.updates_per_batch > 1
        if self.config.lora.dropout:  # it is for updates
            self.policy.eval()
        in_reward = self.reference is not None and algorithm.kl_in == "reward"
        uncorrected = [i for i, row in enumerate(batch.rows) if not row.corrected]
        if decoupled or in_reward or uncorrected:
            old = self._logprobs(self._scorer, batch)
            for i in uncorrected:
                batch.rows[i].behaviour_logprobs = old[i]
            if decoupled or in_reward:
                batch.old_logprobs = old
        if self.reference is not None:
            if self.config.trainer.offload_reference:
                self.reference.to(self.ranks.device)
            batch.reference_logprobs = self._logprobs(self.reference, batch)
            if self.config.trainer.offload_reference:
                self.reference.to("cpu")
        self.policy.train()

    def _logprobs(self, scorer: Scorer, batch: Batch) -> list[Float32]:
        def score(indices: Indices) -> Tensor:
            rows = [batch.rows[i] for i in indices.tolist()]
            tokens = scorer.layout.of([row.prompt_ids for row in rows], [row.completion_ids for row in rows])
            targets = torch.from_numpy(np.concatenate([row.completion_ids for row in rows]).astype(np.int64))
            return self._scores(scorer, moved(tokens, self.ranks.device), moved(targets, self.ranks.device)).logprobs

        settings = self.config.trainer
        with torch.no_grad():
            sizes = batch.sizes(scorer.layout.shared)
            return score_shared(sizes, self.ranks, settings.micro_batch_tokens, score, settings.micro_batch_size)

    def update(self, batch: Batch) -> UpdateMetrics:
        """`algorithm.update_epochs` × `algorithm.mini_batches` optimiser updates; they do not depend on how the batch is cut.

        An update whose gradient is not finite is skipped and counted. Raises NotFinite after more than
        `MAX_SKIPPED_UPDATES` of them in a row.
        """
        algorithm, sums = self.config.algorithm, Sums(self.ranks.device)
        counting = np.array([i for i, row in enumerate(batch.rows) if row.counts], np.int64)
        rate = learning_rate(self.step, self.total_steps, self.config.trainer)
        norms: list[float] = []
        stopped = False
        for epoch in range(algorithm.update_epochs):
            for part in mini_batches(len(counting), algorithm.mini_batches, self.seed * 1_000 + epoch):
                mini = self._accumulate(batch, counting[part], first=not norms)
                sums.values += mini.values
                if stopped := algorithm.early_stop_kl is not None and mini.mean("kl_old") > algorithm.early_stop_kl:
                    break
                norms.append(self.optimizer.step(rate))
            if stopped:
                break
        skipped = sum(not math.isfinite(norm) for norm in norms)
        metrics = sums.metrics(norms, rate, self.kl_coef, skipped, stopped)
        self._moved(metrics, len(batch.rows))
        return _finite(metrics) if skipped else metrics

    def hold(self, batch: Batch) -> UpdateMetrics:
        """A step in which the policy stays as it is (critic warm-up)."""
        metrics = Sums().metrics([], 0.0, self.kl_coef, 0, False)
        self._moved(metrics, len(batch.rows))
        return metrics

    def _moved(self, metrics: UpdateMetrics, completions: int) -> None:
        """What follows the updates on a batch."""
        self.step += 1
        algorithm = self.config.algorithm
        if algorithm.kl_target is not None and metrics.trained_tokens and math.isfinite(metrics.kl_reference):
            self.kl_coef = adapted_kl_coef(self.kl_coef, metrics.kl_reference, algorithm.kl_target, completions)
        if self.reference is not None and algorithm.reference_refresh and self.step % algorithm.reference_refresh == 0:
            theirs = named_tensors(self.reference.model).values()
            for old, new in zip(theirs, named_tensors(self.policy).values(), strict=True):
                local(old).copy_(local(new))

    def _accumulate(self, batch: Batch, counting: Indices, first: bool) -> Sums:
        """Leaves the gradient of the loss over the rows `counting` of all ranks; returns the sums over their tokens.

        A row whose advantages are 0 has no policy gradient: it is left out of the forward pass, but it stays in the
        normalisers, so the result is the same. With a KL term or an entropy bonus every row is computed.
        """
        algorithm, settings, sums = self.config.algorithm, self.config.trainer, Sums(self.ranks.device)
        self.optimizer.zero_grad()
        total_tokens = sum(len(batch.rows[i].completion_ids) for i in counting.tolist())
        every = (algorithm.kl_coef > 0 and algorithm.kl_in == "loss") or algorithm.entropy_coef > 0
        trained = np.array([i for i in counting.tolist() if every or batch.advantages[i].any()], np.int64)
        layout = self._scorer.layout
        sizes, tokens, rows = batch.sizes(layout.shared), settings.micro_batch_tokens, settings.micro_batch_size
        scored: list[tuple[Indices, Tensor]] = []
        for indices in micro_batches(sizes, trained, self.ranks, tokens, rows):
            if len(indices):
                micro = MicroBatch.of(batch, indices, layout).to(self.ranks.device)
                scored.append((indices, self._backward(micro, total_tokens, len(counting), sums, first)))
            elif self.ranks.sharded:  # the other ranks' passes need this one's
                idle = MicroBatch.of(batch, trained[:1], layout).to(self.ranks.device)
                (self._scores(self._scorer, idle.tokens, idle.targets).logprobs.sum() * 0).backward()
        self.ranks.sum_gradients(self.policy)
        self.ranks.sum(sums.values)
        if first and settings.keep_groups_mb and not batch.old_logprobs:
            known, found = set(trained.tolist()), by_row(scored, batch.lengths, self.ranks)
            batch.first_logprobs = [logprobs if i in known else None for i, logprobs in enumerate(found)]
        return sums

    def _backward(self, micro: MicroBatch, total_tokens: int, total_rows: int, sums: Sums, first: bool) -> Tensor:
        """Adds to gradient and sums; returns [C] the log-probabilities of the tokens."""
        algorithm, rows, count = self.config.algorithm, micro.rows, micro.count
        scores = self._scores(self._scorer, micro.tokens, micro.targets)
        behaviour, advantages = micro.behaviour_logprobs, micro.advantages
        scale = micro.weights * token_coefficients(
            algorithm.aggregation, micro.lengths, total_tokens, total_rows, self.config.sampling.max_new_tokens
        )
        old = behaviour
        if algorithm.correction is not None:
            # Decoupled: the ratio is taken to the trainer's own policy before the updates, a weight corrects for the engine's.
            old = scores.logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
            mode, level, cap = algorithm.correction, algorithm.correction_level, algorithm.correction_cap
            scale = scale * importance_correction(old, behaviour, rows, count, mode, level, cap)
        policy = policy_loss(algorithm, scores.logprobs, old, advantages, rows, count)
        per_token, kl_reference = policy.loss, torch.zeros_like(scores.logprobs)
        if algorithm.off_policy_delta is not None:
            delta = algorithm.off_policy_delta
            per_token = per_token * off_policy_mask(scores.logprobs, behaviour, advantages, rows, count, delta)
        if micro.reference_logprobs is not None:
            kl_reference = kl_divergence(scores.logprobs, micro.reference_logprobs, algorithm.kl_estimator)
            if algorithm.kl_in == "loss":
                per_token = per_token + self.kl_coef * kl_reference
        per_token = per_token - algorithm.entropy_coef * scores.entropy
        loss = (per_token * scale).sum()
        loss.backward()
        with torch.no_grad():
            sums.add(loss, policy, scores, old, behaviour, kl_reference, micro.current, first)
        return scores.logprobs.detach()

    def _scores(self, scorer: Scorer, tokens: Layout, targets: Tensor) -> TokenScores:
        device = self.ranks.device.type
        low = device == "cuda" and self.config.model.dtype == "bfloat16" and not self.ranks.sharded  # FSDP2 casts by itself
        with torch.autocast(device, torch.bfloat16, enabled=low):
            bonus = self.config.algorithm.entropy_coef > 0 and scorer is self._scorer
            scores: TokenScores = scorer(tokens, targets, self.config.sampling.temperature, entropy_gradient=bonus)
            return scores


def _finite(metrics: UpdateMetrics) -> UpdateMetrics:
    broken: dict[str, Any] = {name: 0.0 for name, value in asdict(metrics).items() if not math.isfinite(value)}
    return replace(metrics, **broken)
