"""What rank 0 does beside learning: it collects, publishes, evaluates, records, saves and says goodbye."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from common.clients import Client, wait_healthy
from common.config import Config
from common.errors import ConfigError
from common.schemas import Group, Prompt
from common.wire import decode_groups, encode_groups
from trainer import checkpoint
from trainer.algorithms import weigh
from trainer.clock import StageClock
from trainer.collect import CollectFailed, Collector, LoopThread, Prompter, Services, fresh_groups
from trainer.distributed import Ranks
from trainer.evaluate import Evaluation, evaluate
from trainer.learner import Learner, UpdateMetrics
from trainer.plots import plot_curves
from trainer.record import Recorder, StepRecord
from trainer.server import TrainerMetrics

_MIN_PRIORITY = 1e-3
"""Of a group without advantage: seldom reused, never excluded."""


class Publishes(Protocol):
    """Brings weights to every rollout engine; returns when they generate with them."""

    def publish(self, policy: nn.Module, version: int) -> None: ...


@dataclass
class Experience:
    """What one step trains on: fresh groups first, then reused ones."""

    groups: list[Group]
    weights: list[float]
    """Importance weight of each group."""
    fresh: int

    def encode(self) -> bytes:
        head = json.dumps({"weights": self.weights, "fresh": self.fresh}).encode()
        return len(head).to_bytes(8, "little") + head + encode_groups(self.groups)

    @classmethod
    def decode(cls, body: bytes) -> "Experience":
        size = 8 + int.from_bytes(body[:8], "little")
        head = json.loads(body[8:size])
        return cls(decode_groups(body[size:]), head["weights"], head["fresh"])

    @classmethod
    def share(cls, experience: "Experience | None", ranks: Ranks) -> "Experience":
        """Rank 0's experience on every rank."""
        if ranks.world_size == 1:
            assert experience is not None
            return experience
        return cls.decode(ranks.broadcast(experience.encode() if experience is not None else b""))


class Lead:
    """Rank 0's side of the run.

    Args:
        config: of the run.
        learner: of this rank, already resumed.
        tokenizer: of the policy.
        services: clients, used in `loop`.
        prompter: tokenises prompts.
        publisher: brings weights to the engines.
        loop: event loop in a thread of its own.
        recorder: of the run directory.
        metrics: gauges of the trainer's `/metrics`.
        position: of the prompt stream, from the checkpoint; 0 for a new run.
        run_id: of this attempt.
    """

    def __init__(
        self,
        config: Config,
        learner: Learner,
        tokenizer: Any,
        services: Services,
        prompter: Prompter,
        publisher: Publishes,
        loop: LoopThread,
        recorder: Recorder,
        metrics: TrainerMetrics,
        position: int,
        run_id: str,
    ) -> None:
        self.config, self.learner, self.recorder, self.services = config, learner, recorder, services
        self.clock = StageClock()
        self.run_dir = recorder.directory
        self._tokenizer, self._prompter, self._publisher, self._loop = tokenizer, prompter, publisher, loop
        self._metrics, self._run_id = metrics, run_id
        self._collector = Collector(config, services, prompter, self.clock, loop, run_id)
        self._collector.position = position
        self._held_out: list[Prompt] = []
        self.total_steps = 0
        self.last_evaluation: Evaluation | None = None

    def prepare(self) -> None:
        """Waits for the services, agrees with them where the run goes on, publishes the weights, evaluates."""
        settings = self.config.trainer
        clients: Sequence[Client] = (self.services.data, self.services.reward, self.services.replay, self.services.rollout)
        self._loop.call(wait_healthy(clients, settings.wait_timeout_s, self.recorder.say))
        prompts = self._loop.call(self.services.data.total()) * settings.num_epochs
        self.total_steps = min(prompts // fresh_groups(self.config), settings.max_steps or prompts)
        if self.total_steps == 0:
            raise ConfigError(
                f"{prompts} prompts over all epochs do not make one batch",
                field="trainer.batch_size",
                value=settings.batch_size,
                remedy="lower it or raise trainer.num_epochs",
            )
        self._check_replay()
        dropped = self._loop.call(self.services.replay.reset_fresh())
        if dropped:
            self.recorder.say(f"dropped {dropped} groups of an earlier attempt; their prompts are drawn again")
        self._loop.call(self.services.data.seek(self._collector.position))
        if settings.eval_samples:
            self._held_out = self._loop.call(self.services.data.eval_prompts(settings.eval_samples))
        self._publisher.publish(self.learner.policy, self.learner.step)
        if self._held_out and self.learner.step == 0:
            self._evaluate(settings.eval_pass_samples)

    def _check_replay(self) -> None:
        """Experience of another run must not be reused: its weight versions mean other weights."""
        if self.config.replay.reuse_ratio == 0 or self.learner.step > 0:
            return
        groups = self._loop.call(self.services.replay.stats())["groups"]
        if groups:
            raise ConfigError(
                f"the replay buffer holds {groups} groups of another run, which replay.reuse_ratio would reuse",
                field="state_dir",
                value=str(self.config.state_dir),
                remedy="empty it with POST /clear, give this run a state_dir of its own, or set replay.reuse_ratio 0",
            )

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """The collector and the progress bar run while inside."""
        done = self.learner.step
        left = self.total_steps - done
        with (
            self.recorder.progress(done, self.total_steps),
            self._collector.running(left * fresh_groups(self.config)),
        ):
            self.clock.lap()
            yield

    def take(self) -> Experience:
        """The next batch: fresh groups, and `replay.reuse_ratio` of prioritised reuse."""
        settings, step = self.config, self.learner.step
        fresh = self._fresh(fresh_groups(settings), max(0, step - settings.trainer.max_staleness))
        groups, weights = list(fresh), [1.0] * len(fresh)
        if reuse := settings.trainer.batch_size - len(fresh):
            oldest = max(0, step - settings.replay.max_reuse_staleness)
            low = settings.replay.importance_exponent
            beta = low + (1 - low) * step / self.total_steps
            sampled = self._collector.sample(reuse, oldest, beta, seed=settings.seed * 1_000_003 + step)
            groups += sampled.groups
            weights += sampled.weights.tolist()
        return Experience(groups, weights, len(fresh))

    def _fresh(self, count: int, min_version: int) -> list[Group]:
        """Fresh groups; with dynamic sampling only ones whose rewards differ (DAPO, arXiv:2503.14476, section 3.2)."""
        algorithm = self.config.algorithm
        groups = self._collector.take(count, min_version)
        if not algorithm.dynamic_sampling:
            return groups
        for _ in range(algorithm.dynamic_sampling_rounds):
            equal = [group for group in groups if (group.rewards == group.rewards[0]).all()]
            if not equal:
                return groups
            self._collector.replace(equal)
            dropped = {group.id for group in equal}
            groups = [group for group in groups if group.id not in dropped]
            groups += self._collector.take(len(equal), min_version)
        raise CollectFailed(
            f"{algorithm.dynamic_sampling_rounds} rounds of dynamic sampling left groups of equal rewards in the batch",
            field="algorithm.dynamic_sampling_rounds",
            value=algorithm.dynamic_sampling_rounds,
            remedy="the prompts are too easy or too hard for this model: take others, or turn algorithm.dynamic_sampling off",
        )

    def finish(self, experience: Experience, update: UpdateMetrics) -> None:
        """After the update: publish, acknowledge, evaluate, free the slots, save, record."""
        step, settings = self.learner.step, self.config.trainer
        with self.clock.stage("publish"):
            self._publisher.publish(self.learner.policy, step)
        fresh = experience.groups[: experience.fresh]
        self._collector.trained(fresh, self._priorities(experience.groups))
        if self._held_out and settings.eval_every and step % settings.eval_every == 0 and step < self.total_steps:
            self._evaluate(0)
        self._collector.release(len(fresh))
        if settings.checkpoint_every and step % settings.checkpoint_every == 0 and step < self.total_steps:
            self._save()
        record = self._record(experience, update)
        self.recorder.step(record, experience.groups[0])
        self._metrics.record(step, record.reward, record.accuracy, update, record.seconds)

    def conclude(self) -> Path:
        """Final evaluation, checkpoint and report; returns the checkpoint's path."""
        if self._held_out and (self.last_evaluation is None or self.last_evaluation.step != self.learner.step):
            self._evaluate(self.config.trainer.eval_pass_samples)
        saved = self._save()
        curves = self.run_dir / "curves.png"
        plot_curves(self.recorder.metrics(), self.recorder.evaluations(), curves)
        self.recorder.report(saved, curves)
        return saved

    def goodbye(self, agents: Sequence[Client]) -> None:
        """Asks every service to make its state durable and waits: SkyPilot does not tell them that the group ends."""
        for client in (self.services.data, self.services.reward, self.services.replay, *agents):
            self._loop.call(client.flush())
        for client in agents:
            self._loop.call(client.close())

    def _evaluate(self, pass_samples: int) -> None:
        with self.clock.stage("evaluation"):
            evaluation = self._loop.call(
                evaluate(self.config, self.services, self._prompter, self._held_out, self.learner.step, pass_samples)
            )
        self.last_evaluation = evaluation
        self.recorder.evaluation(evaluation)

    def _save(self) -> Path:
        state = checkpoint.TrainerState(
            step=self.learner.step,
            position=self._collector.position,
            run_id=self._run_id,
            optimizer=self.learner.optimizer.state_dict(),
            rng=torch.get_rng_state(),
        )
        directory = self.run_dir / "checkpoints"
        return checkpoint.save(directory, self.learner.policy, self._tokenizer, state, self.config.trainer.keep_checkpoints)

    def _priorities(self, groups: Sequence[Group]) -> dict[str, float]:
        """Mean |advantage| of each group."""
        advantages = weigh(groups, self.config.algorithm, self.config.sampling.max_new_tokens)
        means = (float(np.abs(row).mean()) for row in advantages)
        return {group.id: max(_MIN_PRIORITY, mean) for group, mean in zip(groups, means, strict=True)}

    def _record(self, experience: Experience, update: UpdateMetrics) -> StepRecord:
        completions = [completion for group in experience.groups for completion in group.completions]
        fresh = experience.groups[: experience.fresh]
        return StepRecord(
            step=self.learner.step,
            reward=float(np.mean([completion.reward for completion in completions])),
            accuracy=float(np.mean([completion.correct for completion in completions])),
            equal_groups=sum(bool((group.rewards == group.rewards[0]).all()) for group in experience.groups),
            reused_groups=len(experience.groups) - len(fresh),
            staleness=float(np.mean([self.learner.step - 1 - group.weight_version for group in fresh])),
            completion_tokens=float(np.mean([len(completion.token_ids) for completion in completions])),
            truncated=float(np.mean([completion.finish_reason == "length" for completion in completions])),
            dropped=dict(self._collector.counts.dropped),
            seconds=self.clock.lap(),
            update=asdict(update),
        )


def new_run_id(name: str) -> str:
    """Distinguishes attempts: weights of an earlier attempt are never taken for those of this one."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{np.random.default_rng().integers(16**4):04x}"


def resumed_learner(config: Config, ranks: Ranks, run_dir: Path) -> tuple[Learner, int]:
    """The learner, from rank 0's newest checkpoint when there is one, and the position in the prompt stream."""
    path = checkpoint.newest(run_dir / "checkpoints") if ranks.first and config.trainer.resume else None
    learner = Learner(config, ranks, path)
    ranks.broadcast_model(learner.policy)
    body = ranks.broadcast(checkpoint.read_state(path) if path else b"")
    if not body:
        return learner, 0
    state = checkpoint.load_state(body, path or run_dir)
    learner.optimizer.load_state_dict(state.optimizer)
    learner.step = state.step
    torch.set_rng_state(state.rng)
    return learner, state.position
