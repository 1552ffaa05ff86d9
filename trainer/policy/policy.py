"""The policy: its weights, its optimiser and the updates on a batch, on one or many processes."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from common.settings.config import Config
from common.settings.sections import TrainerSection
from common.wire.schemas import Float32
from learning.batching import Indices, by_row, mini_batches
from learning.hub_names import to_hub
from learning.optimizer import Optimizer
from learning.parking import Resident
from learning.passes import passes
from learning.ranks import Ranks
from learning.saving import Contents, Snapshot, load_optimizer
from learning.sharding import full, named_tensors
from trainer.algorithms.batch import Batch, MicroBatch
from trainer.algorithms.losses import (
    adapted_kl_coef,
    kl_divergence,
    policy_loss,
    policy_weights,
    token_coefficients,
)
from trainer.policy import checkpoint
from trainer.policy.checkpoint import RunState
from trainer.policy.identity import LearnsFrom, check_same, identity
from trainer.policy.lora import (
    adapter_contents,
    adapter_tensors,
    base_tensors,
    load_policy,
    merged_tensors,
)
from trainer.policy.reference import score_batch, score_tokens
from trainer.policy.scorer import computes_in_bfloat16
from trainer.policy.update_metrics import Sums, UpdateMetrics


def learning_rate(step: int, total_steps: int | None, settings: TrainerSection) -> float:
    """Returns the learning rate after `step` steps: linear warm-up, then `lr_schedule`, to zero
    after `total_steps`.

    The first of W warm-up steps has 1/W of the rate; with transformers' schedules it has 0, which
    wastes its batch.
    """
    warmup = settings.warmup_steps
    if step < warmup or settings.lr_schedule == "constant" or total_steps is None:
        return settings.learning_rate * min(1.0, (step + 1) / max(1, warmup))
    done = (step - warmup) / max(1, total_steps - warmup)
    left = 1 - done if settings.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * left


@dataclass(frozen=True)
class PolicyUpdate:
    """The result of an update on a batch."""

    metrics: UpdateMetrics
    logprobs: list[Float32 | None] | None = None
    """[L] for each row before the update; None for rows that the update did not score."""


class Policy:
    """The model that is trained, its optimiser and the step count.

    `step`, the number of batches trained on, is also the weight version. The model is loaded from
    the checkpoint `directory`, or from `config.model.name` when it is None. Only rank 0's argument
    counts, and only rank 0 needs to see the directory.
    """

    def __init__(self, config: Config, ranks: Ranks, directory: Path | None = None) -> None:
        self.config, self.ranks, self.step = config, ranks, 0
        self.total_steps: int | None = None
        """Total steps of the run; a decaying learning rate schedule needs them."""
        self.kl_coef = config.algorithm.kl_coef
        """Adapted after every update when `algorithm.kl_target` is set."""
        settings = config.trainer
        self._own_old = config.algorithm.own_old_logprobs(computes_in_bfloat16(config.model, ranks))
        if settings.offload_optimizer and not ranks.sharded:
            raise ConfigError(
                "only sharded models can be offloaded",
                field="trainer.offload_optimizer",
                value=True,
                remedy="leave trainer.shard_size unset, or set this to false: one process on a CPU has nothing to offload",
            )
        self.scorer = load_policy(config, ranks, directory)
        self.model = self.scorer.model
        self.model.train()
        self.optimizer = Optimizer(
            self.model, settings.adam_betas, settings.weight_decay, settings.max_grad_norm
        )

    @classmethod
    def resume(
        cls, config: Config, ranks: Ranks, run_dir: Path, learns_from: LearnsFrom = "rewards"
    ) -> "tuple[Policy, RunState | None, Path | None]":
        """Returns the policy, from the newest checkpoint in `run_dir` if there is one, and its
        state and path.

        Only rank 0 needs to see the checkpoint. Raises ConfigError when it is damaged or belongs to
        another run.
        """
        checkpoints = run_dir / "checkpoints"
        if ranks.is_rank_zero and not config.trainer.resume:
            checkpoint.set_aside(checkpoints)
        path = ranks.broadcast_path(checkpoint.newest(checkpoints) if ranks.is_rank_zero else None)
        if path is None:
            return cls(config, ranks), None, None
        state = checkpoint.load_state(
            ranks.broadcast(checkpoint.read_state(path) if ranks.is_rank_zero else b""), path
        )
        if ranks.is_rank_zero:  # others may lack the files of the data set
            check_same(state.identity, identity(config, learns_from), path)
        if changed := ranks.broadcast(
            checkpoint.changed_file(path).encode() if ranks.is_rank_zero else b""
        ).decode():
            raise checkpoint.has_changed(changed, path)
        policy = cls(config, ranks, path)
        try:
            load_optimizer(policy.optimizer, path, ranks)
        except ConfigError:
            raise
        except Exception as error:  # damage can lead to any error
            raise checkpoint.cannot_resume(error, path) from None
        policy.step = state.step
        if config.algorithm.kl_target is not None:  # it was adapted; otherwise the setting counts
            policy.kl_coef = state.kl_coef
        return policy, state, path

    def snapshots(self, alone: bool) -> dict[str, Snapshot]:
        """Returns the policy's part of a checkpoint, by folder. A collective; see
        `Snapshot.take`.
        """
        contents = (
            adapter_contents(self.model) if self.config.lora.rank else Contents.of(self.model)
        )
        return {".": Snapshot.take(contents, self.optimizer, self.ranks, alone)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights to publish, in the layout of the model's files and the engines'
        precision. A collective.

        With LoRA these are the adapter's, with PEFT's names, or the model's with the adapter
        merged. Of tied tensors only the first is yielded, as in hub files. A tensor is valid until
        the next update.
        """
        low, lora = computes_in_bfloat16(self.config.model, self.ranks), self.config.lora
        tensors = named_tensors(self.model)

        def sent(tensor: Tensor) -> Tensor:
            kind = torch.bfloat16 if low and tensor.is_floating_point() else tensor.dtype
            return tensor.detach().to(self.ranks.device, kind)

        if lora.publishes_adapter:
            yield from (
                (name, full(sent(tensor))) for name, tensor in adapter_tensors(tensors.items())
            )
        elif lora.rank:
            whole = (
                (name, full(tensor.detach().to(self.ranks.device)))
                for name, tensor in tensors.items()
            )
            merged = (
                (name, sent(tensor))
                for name, tensor in merged_tensors(whole, lora.alpha / lora.rank)
            )
            yield from to_hub(self.model, merged, base_tensors(tensors))
        else:
            yield from to_hub(
                self.model,
                ((name, full(sent(tensor))) for name, tensor in tensors.items()),
                tensors,
            )

    def resident(self) -> Resident:
        """Returns the models and optimizers on the GPU during an update."""
        return [self.scorer], [self.optimizer]

    @property
    def seed(self) -> int:
        """The seed for all randomness in this step."""
        return self.config.seed * 1_000_003 + self.step

    def logprobs(self, batch: Batch) -> list[Float32] | None:
        """Returns log-probabilities [L] for each row under the current policy; None when the
        algorithm needs none.
        """
        algorithm = self.config.algorithm
        decoupled = self._own_old and algorithm.updates_per_batch > 1
        in_reward = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
        taught = batch.teacher_logprobs is not None and not all(row.current for row in batch.rows)
        if not (decoupled or in_reward or taught or any(not row.corrected for row in batch.rows)):
            return None
        self.model.eval()  # dropout is only for updates
        found = score_batch(self.scorer, batch, self.config, self.ranks)
        self.model.train()
        return found

    def update(self, batch: Batch) -> PolicyUpdate:
        """Makes `algorithm.update_epochs` × `algorithm.mini_batches` optimiser updates;
        micro-batches do not matter.

        An update whose gradient is not finite is skipped and counted. Raises NonFiniteGradients
        after more than `MAX_SKIPPED_UPDATES` of them in a row.
        """
        algorithm, sums = self.config.algorithm, Sums(self.ranks.device)
        counting = np.array([i for i, row in enumerate(batch.rows) if row.counts], np.int64)
        rate = learning_rate(self.step, self.total_steps, self.config.trainer)
        norms: list[float] = []
        logprobs: list[Float32 | None] | None = None
        stopped = False
        for epoch in range(algorithm.update_epochs):
            for part in mini_batches(
                len(counting), algorithm.mini_batches, self.seed * 1_000 + epoch
            ):
                mini, scored = self._accumulate(batch, counting[part], first=not norms)
                logprobs = logprobs or scored
                sums.values += mini.values
                if (
                    stopped := algorithm.early_stop_kl is not None
                    and mini.mean("kl_old") > algorithm.early_stop_kl
                ):
                    break
                norms.append(self.optimizer.step(rate))
            if stopped:
                break
        skipped = sum(not math.isfinite(norm) for norm in norms)
        metrics = sums.metrics(norms, rate, self.kl_coef, skipped, stopped)
        self._advance(metrics, len(batch.rows))
        broken: dict[str, Any] = {
            name: 0.0 for name, value in asdict(metrics).items() if not math.isfinite(value)
        }
        return PolicyUpdate(replace(metrics, **broken) if skipped else metrics, logprobs)

    def skip_update(self, batch: Batch) -> PolicyUpdate:
        """Counts a step without an update (critic warm-up)."""
        metrics = Sums().metrics([], 0.0, self.kl_coef, 0, False)
        self._advance(metrics, len(batch.rows))
        return PolicyUpdate(metrics)

    def _advance(self, metrics: UpdateMetrics, completions: int) -> None:
        """Counts the step and adapts the KL coefficient."""
        self.step += 1
        algorithm = self.config.algorithm
        if (
            algorithm.kl_target is not None
            and metrics.trained_tokens
            and math.isfinite(metrics.kl_reference)
        ):
            self.kl_coef = adapted_kl_coef(
                self.kl_coef, metrics.kl_reference, algorithm.kl_target, completions
            )

    def _accumulate(
        self, batch: Batch, counting: Indices, first: bool
    ) -> tuple[Sums, list[Float32 | None] | None]:
        """Computes the gradient of the loss over the rows `counting` of all ranks.

        Returns the sums over their tokens and, for the log, the log-probabilities before the
        `first` update. A row whose
        advantages are 0 has no policy gradient: without a KL term or an entropy bonus it skips the
        forward pass, but counts in the normalisers, so the result is the same.
        """
        algorithm, settings, sums = (
            self.config.algorithm,
            self.config.trainer,
            Sums(self.ranks.device),
        )
        self.optimizer.zero_grad()
        total_tokens = sum(len(batch.rows[i].targets) for i in counting.tolist())
        every = (algorithm.kl_coef > 0 and algorithm.kl_in == "loss") or algorithm.entropy_coef > 0
        assert batch.advantages is not None
        trained = np.array(
            [i for i in counting.tolist() if every or batch.advantages[i].any()], np.int64
        )
        layout = self.scorer.layout
        sizes, tokens, rows = (
            batch.sizes(layout.shared),
            settings.micro_batch_tokens,
            settings.micro_batch_size,
        )
        scored: list[tuple[Indices, Tensor]] = []
        for indices, counts in passes(self.scorer, self.ranks, sizes, trained, tokens, rows):
            micro = MicroBatch.of(batch, indices, layout, self.ranks.device)
            if counts:
                scored.append(
                    (indices, self._backward(micro, total_tokens, len(counting), sums, first))
                )
            else:
                scores = score_tokens(
                    self.scorer,
                    micro.tokens,
                    micro.targets,
                    self.config,
                    self.ranks,
                    support=micro.support,
                )
                (scores.logprobs.sum() * 0).backward()
        self.ranks.sum_gradients(self.model)
        self.ranks.sum(sums.values)
        if not (first and settings.keep_groups_mb and batch.old_logprobs is None):
            return sums, None
        known, found = set(trained.tolist()), by_row(scored, batch.lengths, self.ranks)
        return sums, [logprobs if i in known else None for i, logprobs in enumerate(found)]

    def _backward(
        self, micro: MicroBatch, total_tokens: int, total_rows: int, sums: Sums, first: bool
    ) -> Tensor:
        """Adds a micro-batch to the gradient and to `sums`; returns [C] the log-probabilities of
        its tokens.
        """
        algorithm, rows, count = self.config.algorithm, micro.rows, micro.count
        bonus = algorithm.entropy_coef > 0
        options = (self.config, self.ranks, bonus, micro.support)
        scores = score_tokens(self.scorer, micro.tokens, micro.targets, *options)
        sampled, advantages = micro.rollout_logprobs, micro.advantages
        scale = micro.weights * token_coefficients(
            algorithm.aggregation,
            micro.lengths,
            total_tokens,
            total_rows,
            self.config.sampling.max_new_tokens,
        )
        old = sampled
        if (
            self._own_old
        ):  # a second bfloat16 pass would not give the first update a ratio of exactly 1
            old = (
                scores.logprobs.detach()
                if first or micro.old_logprobs is None
                else micro.old_logprobs
            )
        given = (algorithm, scores.logprobs, old, sampled, advantages, rows, count)
        policy = policy_loss(*given)
        per_token = policy.loss * policy_weights(*given)
        if micro.ref_logprobs is not None and algorithm.kl_in == "loss":
            per_token = per_token + self.kl_coef * kl_divergence(
                scores.logprobs, micro.ref_logprobs, algorithm.kl_estimator
            )
        per_token = per_token - algorithm.entropy_coef * scores.entropy
        loss = (per_token * scale).sum()
        loss.backward()
        with torch.no_grad():
            sums.add(loss, policy, scores, old, micro, first)
        return scores.logprobs.detach()
