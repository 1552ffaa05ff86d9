"""The policy: its weights, its optimiser and the updates on a batch, on one or many processes."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import ConfigError
from common.settings.config import Config
from common.wire.schemas import Float32
from learning.batching import Indices, by_row, micro_batch_passes, mini_batches, owners
from learning.digest import digest
from learning.fitting import fitted
from learning.hub_names import to_hub
from learning.optimizer import Optimizer
from learning.parking import Resident
from learning.ranks import Ranks
from learning.saving import Contents, Snapshot, load_optimizer
from learning.sharding import full, named_tensors, reshard
from trainer.algorithms.advantages import NEED_MORE_THAN_REWARDS, named_advantage
from trainer.algorithms.batch import Batch, MicroBatch
from trainer.algorithms.losses import (
    TokenTerms,
    adapted_kl_coef,
    kl_divergence,
    named_loss,
    policy_loss,
    policy_weights,
    token_coefficients,
)
from trainer.policy import checkpoint
from trainer.policy.checkpoint import RunState
from trainer.policy.identity import LearnsFrom, check_same, identity
from trainer.policy.learning_rate import learning_rate
from trainer.policy.lora import (
    adapter_contents,
    adapter_tensors,
    base_tensors,
    load_policy,
    merged_tensors,
)
from trainer.policy.scorer import TokenScores, computes_in_bfloat16
from trainer.policy.scoring import score_batch
from trainer.policy.update_metrics import Sums, UpdateMetrics

_COMPARED_ROWS = 8
"""Number of rows on which engine and trainer are compared when no row has a gradient."""


@dataclass(frozen=True)
class PolicyUpdate:
    """The result of an update on a batch."""

    metrics: UpdateMetrics
    logprobs: list[Float32 | None] | None = None
    """[L] for each row before the update; None for rows that the update did not score here."""
    norms: Sequence[float] = ()
    """The norm of the gradient of each optimiser update, before clipping."""
    gradients: Sequence[str] = ()
    """The checksum of each of these gradients, before clipping (`trainer.audit`)."""
    digest_seconds: float = 0.0
    """Time that these checksums took."""


class Policy:
    """The model that is trained, and its optimiser.

    The model is loaded from the checkpoint `directory`, or from `config.model.name` when it is
    None. Only rank 0's argument counts, and only rank 0 needs to see the directory.
    """

    def __init__(self, config: Config, ranks: Ranks, directory: Path | None = None) -> None:
        self.ranks = ranks
        self.step = 0
        """The number of batches that it was trained on, which is also the weight version. The loop
        counts it."""
        self.total_steps: int | None = None
        """Total steps of the run; a decaying learning rate schedule needs them."""
        self.kl_coef = config.algorithm.kl_coef
        """Adapted after every update when `algorithm.kl_target` is set."""
        self._ratio_to_own_logprobs = config.algorithm.own_old_logprobs(
            computes_in_bfloat16(config.model, ranks)
        )
        """Whether the ratio refers to the trainer's own log-probabilities, not the engine's."""

        # A wrong import path is refused now, not after the first batch was generated.
        named_loss(config.algorithm)
        if config.algorithm.advantage not in NEED_MORE_THAN_REWARDS:
            named_advantage(config.algorithm)

        if config.parallel.offload_optimizer and not ranks.sharded:
            raise ConfigError(
                "only sharded models can be offloaded",
                field="parallel.offload_optimizer",
                value=True,
                remedy="leave parallel.shard_size unset, or set this to false: "
                "one process on a CPU has nothing to offload",
            )

        # With `auto` decided for the memory of this GPU.
        self.config = fitted(config, ranks, config.model.name)
        self.scorer = load_policy(self.config, ranks, directory)
        """The model with its head, which computes log-probabilities."""
        self.model = self.scorer.model
        self.model.train()
        self.optimizer = Optimizer(self.model, config.optimizer)

    @classmethod
    def resume(
        cls, config: Config, ranks: Ranks, run_dir: Path, learns_from: LearnsFrom = "rewards"
    ) -> "tuple[Policy, RunState | None, Path | None]":
        """Returns the policy of the newest checkpoint in `run_dir`, and that checkpoint's state and
        path; without a checkpoint a new policy, and None for both.

        With `checkpoint.resume` false, checkpoints of an earlier run are set aside first. Only rank
        0 needs to see the directory; what it reads is broadcast. Raises ConfigError when the
        checkpoint is damaged or belongs to another run. A collective.

        `learns_from` is a part of the run's identity.
        """
        checkpoints = run_dir / "checkpoints"
        if ranks.is_rank_zero and not config.checkpoint.resume:
            checkpoint.set_aside(checkpoints)
        path = ranks.broadcast(checkpoint.newest(checkpoints) if ranks.is_rank_zero else None)
        if path is None:
            return cls(config, ranks), None, None

        content = checkpoint.read_state(path) if ranks.is_rank_zero else b""
        state = checkpoint.load_state(ranks.broadcast(content), path)
        # Rank 0 alone: the others may lack the files of the data set.
        if ranks.is_rank_zero:
            check_same(state.identity, identity(config, learns_from), path)
        return cls.restore(config, ranks, path, state), state, path

    @classmethod
    def restore(cls, config: Config, ranks: Ranks, path: Path, state: RunState) -> "Policy":
        """Returns the policy of the checkpoint at `path`, whose state is `state`. Raises
        ConfigError when a file of it has changed. A collective.
        """
        changed = checkpoint.changed_file(path) if ranks.is_rank_zero else ""
        changed = ranks.broadcast(changed)
        if changed:
            raise checkpoint.has_changed(changed, path)

        policy = cls(config, ranks, path)
        load_optimizer(policy.optimizer, path, ranks)
        policy.step = state.step
        # Without `kl_target` the coefficient is the setting, which may differ in a resumed run.
        if config.algorithm.kl_target is not None:
            policy.kl_coef = state.kl_coef
        return policy

    def snapshots(self, gathered: bool) -> dict[str, Snapshot]:
        """Returns the policy's part of a checkpoint, by folder (`Snapshot.take`). A collective."""
        has_adapter = self.config.lora.rank > 0
        if has_adapter:
            contents = adapter_contents(self.model)
        else:
            contents = Contents.of(self.model, self.model.kept)
        return {".": Snapshot.take(contents, self.optimizer, self.ranks, gathered)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights to publish, in the layout of the model's files and the engines'
        precision. A collective.

        With LoRA these are the adapter's, with PEFT's names, or the model's with the adapter
        merged. Of tied tensors only the first is yielded, as in hub files. A tensor is valid until
        the next update.
        """
        model = self.model
        lora = self.config.lora
        device = self.ranks.device
        in_bfloat16 = computes_in_bfloat16(self.config.model, self.ranks)
        tensors = named_tensors(model)

        def published(tensor: Tensor) -> Tensor:
            reduced = in_bfloat16 and tensor.is_floating_point()
            dtype = torch.bfloat16 if reduced else tensor.dtype
            return tensor.detach().to(device, dtype)

        if lora.publishes_adapter:
            for name, tensor in adapter_tensors(model):
                yield name, full(published(tensor))
            return

        if not lora.rank:
            whole = ((name, full(published(tensor))) for name, tensor in tensors.items())
            yield from to_hub(model, whole, tensors)
            return

        # W + scale × B A is computed in the precision of the master weights, and rounded once.
        exact = ((name, full(tensor.detach().to(device))) for name, tensor in tensors.items())
        merged = merged_tensors(exact, lora.alpha / lora.rank)
        rounded = ((name, published(tensor)) for name, tensor in merged)
        yield from to_hub(model, rounded, base_tensors(tensors))

    def digest(self) -> str:
        """Returns the checksum of the weights that are trained. A collective."""
        trained = [
            (name, tensor)
            for name, tensor in named_tensors(self.model).items()
            if tensor.requires_grad
        ]
        return digest(trained, self.ranks)

    def resident(self) -> Resident:
        """Returns the models and optimisers on the GPU during an update."""
        return [self.scorer], [self.optimizer]

    @property
    def seed(self) -> int:
        """The seed of all randomness in the next update. It differs between runs with another
        `config.seed`, and between the first million steps of a run.
        """
        return self.config.seed * 1_000_003 + self.step

    def logprobs(self, batch: Batch) -> list[Float32] | None:
        """Returns log-probabilities [L] for each row of this rank under the current policy; None
        when the algorithm needs none.
        """
        algorithm = self.config.algorithm
        # The first update takes them from its own pass (`_backward`).
        for_ratio = self._ratio_to_own_logprobs and algorithm.updates_per_batch > 1
        for_reward = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
        # For rows that the current policy sampled, the engine's log-probabilities serve.
        off_policy = not all(row.current for row in batch.rows)
        for_teacher = batch.teacher_logprobs is not None and off_policy
        if not (for_ratio or for_reward or for_teacher):
            return None

        self.model.eval()  # dropout is only for updates
        logprobs = score_batch(self.scorer, batch, self.config, self.ranks)
        self.model.train()
        return logprobs

    def assign(self, batch: Batch) -> None:
        """Decides which rank computes which rows of a batch, so that their shares of every pass
        over the batch, and of every mini-batch of the first epoch, are even.
        """
        ranks = self.ranks
        if ranks.world_size == 1:
            return
        equal = np.array([row.equal for row in batch.rows])
        # Of all rows, and then of those in the loss.
        parts: list[Indices] = [np.arange(len(batch.rows))]
        for rows in self._mini_batches(batch, epoch=0):
            # Groups of equal rewards mostly have no gradient, and no pass.
            parts += [rows[equal[rows]], rows[~equal[rows]]]
        sizes = batch.sizes(self.scorer.layout.shared)
        batch.assign(owners(sizes, parts, ranks.shares), ranks.share)

    def _mini_batches(self, batch: Batch, epoch: int) -> list[Indices]:
        """Returns the rows of each optimiser update of an epoch."""
        loss_rows = np.flatnonzero([row.in_loss for row in batch.rows])
        seed = self.seed * 1_000 + epoch
        parts = mini_batches(len(loss_rows), self.config.algorithm.mini_batches, seed)
        return [loss_rows[part] for part in parts]

    def update(self, batch: Batch) -> PolicyUpdate:
        """Makes `algorithm.update_epochs` × `algorithm.mini_batches` optimiser updates, each with
        the gradient of one mini-batch, whose micro-batches are passes of bounded memory.

        An update whose gradient is not finite is skipped and counted. Raises NonFiniteGradients
        after more than `MAX_SKIPPED_UPDATES` of them in a row.
        """
        algorithm = self.config.algorithm
        sums = Sums(self.ranks.device)
        rate = learning_rate(self.step, self.total_steps, self.config.optimizer)
        norms: list[float] = []
        gradients: list[str] = []
        digest_seconds = 0.0
        logprobs: list[Float32 | None] | None = None
        stopped = False

        rows_of_updates: list[Indices] = []
        for epoch in range(algorithm.update_epochs):
            rows_of_updates += self._mini_batches(batch, epoch)

        for rows in rows_of_updates:
            is_first = len(norms) == 0
            mini_sums, scored = self._accumulate(batch, rows, first=is_first)
            if is_first:
                logprobs = scored
            sums.values += mini_sums.values

            limit = algorithm.early_stop_kl
            stopped = limit is not None and mini_sums.mean("kl_old") > limit
            if stopped:
                break  # the gradient of this mini-batch is not applied
            if self.config.trainer.audit:
                began = time.perf_counter()
                gradients.append(digest(self.optimizer.gradients(), self.ranks))
                digest_seconds += time.perf_counter() - began
            # A forward pass without a backward pass keeps the weights gathered: the optimiser
            # step would make them stale.
            reshard(self.scorer)
            norms.append(self.optimizer.step(rate))

        skipped = sum(not math.isfinite(norm) for norm in norms)
        metrics = sums.metrics(norms, rate, self.kl_coef, skipped=skipped, stopped=stopped)
        target = algorithm.kl_target
        # A KL that overflowed, or that has no tokens, must not change the coefficient.
        measured = metrics.trained_tokens > 0 and math.isfinite(metrics.kl_reference)
        if target is not None and measured:
            kl = metrics.kl_reference
            self.kl_coef = adapted_kl_coef(self.kl_coef, kl, target, rows=len(batch.rows))
        return PolicyUpdate(
            metrics.finite() if skipped else metrics,
            logprobs,
            norms=norms,
            gradients=gradients,
            digest_seconds=digest_seconds,
        )

    def gradient(self, batch: Batch) -> list[Tensor]:
        """Returns the gradient of the loss over a whole batch, before any update. A collective."""
        loss_rows = np.flatnonzero([row.in_loss for row in batch.rows])
        self._accumulate(batch, loss_rows, first=True)
        return [gradient.detach().clone() for _, gradient in self.optimizer.gradients()]

    def skip_update(self) -> PolicyUpdate:
        """Returns the result of a step in which only the critic learns: no updates, no tokens."""
        return PolicyUpdate(Sums().metrics([], 0.0, self.kl_coef, skipped=0, stopped=False))

    def _has_gradient(self, batch: Batch) -> NDArray[np.bool_]:
        """Returns [rows] whether a row has a gradient. A collective.

        A row whose advantages are 0 has no policy gradient. Without a KL term and an entropy bonus
        its pass would add 0 to the gradient and is left out; the totals that normalise the loss
        include the row, so that the gradient is the same with and without its pass.
        """
        algorithm = self.config.algorithm
        kl_in_loss = algorithm.kl_coef > 0 and algorithm.kl_in == "loss"
        if kl_in_loss or algorithm.entropy_coef > 0:
            return np.ones(len(batch.rows), bool)
        assert batch.advantages is not None
        own = np.zeros(len(batch.rows), np.int32)
        own[batch.own] = [batch.advantages[i].any() for i in batch.own]
        self.ranks.sum_shares(torch.from_numpy(own))  # in place
        return own > 0

    def _accumulate(
        self, batch: Batch, loss_rows: Indices, first: bool
    ) -> tuple[Sums, list[Float32 | None] | None]:
        """Computes the gradient of the loss over a mini-batch, the rows at `loss_rows`, on all
        ranks.

        Returns the sums over its tokens. In the `first` update it also returns what the log of
        groups shows: [L] log-probabilities of the policy before the update for each row of the
        batch, None for rows without a pass here; None instead of the list when the log does not
        need them.
        """
        sums = Sums(self.ranks.device)
        self.optimizer.zero_grad()

        gradient_rows = loss_rows[self._has_gradient(batch)[loss_rows]]
        if first and len(gradient_rows) == 0:
            # Engine and trainer are compared on a few rows nevertheless: an engine with damaged
            # weights gives wrong answers only, and would not be seen.
            with torch.no_grad():
                for _, micro, are_own in self._passes(batch, loss_rows[:_COMPARED_ROWS]):
                    scores = self._score(micro)
                    if are_own:
                        sums.compare(micro, scores)

        total_tokens = sum(batch.rows[i].trained_tokens for i in loss_rows.tolist())
        scored: list[tuple[Indices, Tensor]] = []
        for indices, micro, are_own in self._passes(batch, gradient_rows):
            if not are_own:  # the other ranks have one more pass: join its collective calls
                (self._score(micro).logprobs.sum() * 0).backward()
                continue
            logprobs = self._backward(
                micro,
                total_tokens=total_tokens,
                total_rows=len(loss_rows),
                sums=sums,
                first=first,
            )
            scored.append((indices, logprobs))
        sizes = batch.sizes(self.scorer.layout.shared)
        sums.add_passes(
            [sizes.together(indices) for indices, _ in scored],
            room=self.config.trainer.pass_tokens * self.ranks.context_size,
        )
        self.ranks.sum_gradients(self.model)
        self.ranks.sum_shares(sums.values)

        keeps_groups = self.config.trainer.keep_groups_mb > 0
        if not (first and keeps_groups and batch.old_logprobs is None):
            return sums, None
        by_rows = by_row(scored, np.array(batch.lengths))
        return sums, [logprobs if len(logprobs) else None for logprobs in by_rows]

    def _passes(self, batch: Batch, rows: Indices) -> Iterator[tuple[Indices, MicroBatch, bool]]:
        """Yields the micro-batches of some rows that this rank computes, as indices and as tensors,
        and whether they are its own (`micro_batch_passes`).
        """
        for indices, are_own in micro_batch_passes(
            self.scorer,
            self.ranks,
            batch.sizes(self.scorer.layout.shared),
            rows=rows,
            settings=self.config.trainer,
        ):
            micro = MicroBatch.of(
                batch,
                indices,
                self.scorer.layout,
                device=self.ranks.device,
                routers=self.scorer.routers,
            )
            yield indices, micro, are_own

    def _backward(
        self,
        micro: MicroBatch,
        *,
        total_tokens: int,
        total_rows: int,
        sums: Sums,
        first: bool,
    ) -> Tensor:
        """Adds a micro-batch to the gradient and to `sums`.

        loss = Σ_t g_t · c_t · (w_t · policy loss_t + β · KL_t − entropy_coef · H_t), where g is the
        weight of the token's group (`MicroBatch.weights`), c the coefficient of the aggregation, w
        the weight of corrections and masks, and β the KL coefficient if the KL is in the loss.

        Args:
            micro: C tokens.
            total_tokens, total_rows: of the mini-batch, on all ranks.
            sums: for the metrics.
            first: whether the policy has not been updated on this batch yet.

        Returns: [C] the log-probabilities of its tokens in nats, without gradient.
        """
        algorithm = self.config.algorithm
        scores = self._score(micro, entropy_gradient=algorithm.entropy_coef > 0)

        # π_old, to which the ratio refers, is the policy that sampled, as the engine computed it,
        # or the trainer's own policy before this batch. In the first update that is the policy of
        # this pass: log-probabilities of an earlier pass (`logprobs`) may be rounded differently in
        # bfloat16, and the ratio would not be exactly 1.
        if not self._ratio_to_own_logprobs:
            old_logprobs = micro.rollout_logprobs
        elif first:
            old_logprobs = scores.logprobs.detach()
        else:
            assert micro.old_logprobs is not None, "`logprobs` computes them for several updates"
            old_logprobs = micro.old_logprobs
        tokens = TokenTerms(
            logprobs=scores.logprobs,
            old_logprobs=old_logprobs,
            rollout_logprobs=micro.rollout_logprobs,
            advantages=micro.advantages,
            row_of_token=micro.row_of_token,
            row_count=micro.row_count,
        )

        policy = policy_loss(algorithm, tokens)
        per_token = policy.loss * policy_weights(algorithm, tokens)
        if micro.ref_logprobs is not None and algorithm.kl_in == "loss":
            kl = kl_divergence(scores.logprobs, micro.ref_logprobs, algorithm.kl_estimator)
            per_token = per_token + self.kl_coef * kl
        per_token = per_token - algorithm.entropy_coef * scores.entropy

        coefficients = token_coefficients(
            algorithm.aggregation,
            micro.lengths,
            total_tokens=total_tokens,
            total_rows=total_rows,
            max_new_tokens=self.config.sampling.max_new_tokens,
        )
        loss = (per_token * (micro.weights * coefficients)).sum()
        loss.backward()

        with torch.no_grad():
            sums.add(micro, scores, policy, loss=loss, old_logprobs=old_logprobs)
            if first:
                sums.compare(micro, scores)
        return scores.logprobs.detach()

    def _score(self, micro: MicroBatch, entropy_gradient: bool = False) -> TokenScores:
        scores: TokenScores = self.scorer(
            micro.inputs.tokens,
            micro.inputs.targets,
            self.config.sampling.temperature,
            entropy_gradient=entropy_gradient,
            support=micro.inputs.support,
        )
        return scores
