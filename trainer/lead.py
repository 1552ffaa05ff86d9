"""What rank 0 does beside learning: it collects, publishes, evaluates, records, saves and says goodbye."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from common.clients import Client, wait_healthy
from common.config import Config
from common.errors import ConfigError, ServiceError
from common.schemas import CriticMetrics, Group, Prompt
from common.storing import storing
from learning.ranks import Ranks
from learning.saving import load_optimizer
from trainer.algorithms.batch import Batch
from trainer.background import LoopThread
from trainer.observe.alarms import alarms
from trainer.observe.group_files import GroupRecorder, RecordedGroup
from trainer.observe.plots import plot_curves
from trainer.observe.prometheus import TrainerMetrics
from trainer.observe.run_dir import Recorder, StepRecord
from trainer.policy import checkpoint
from trainer.policy.critic import ValueFunction
from trainer.policy.policy import Learner
from trainer.policy.update_metrics import UpdateMetrics
from trainer.rollouts.collector import CollectFailed, Collector, Progress, Services, fresh_groups
from trainer.rollouts.evaluation import Evaluation, evaluate
from trainer.rollouts.experience import Experience
from trainer.rollouts.mixing import failed_prompts, mix_successes, mixed_in
from trainer.rollouts.priorities import IMPORTANCE_EXPONENT, MIN_PRIORITY, load_priority
from trainer.rollouts.prompts import Prompter
from trainer.timing import CpuClock, StageClock
from trainer.weights.delivery import Delivery, Publishes

log = logging.getLogger(__name__)


class Lead:
    """Rank 0's side of the run.

    Args:
        config: of the run.
        learner: of this rank, already resumed.
        critic: of this rank, already resumed; None when the algorithm has none.
        tokenizer: of the policy.
        services: clients, used in `loop`.
        prompter: tokenises prompts.
        publisher: brings weights to the engines.
        loop: event loop in a thread of its own.
        recorder: of the run directory.
        metrics: of the trainer's `/metrics`.
        progress: in the prompt stream, from the checkpoint.
        run_id: of this attempt.
    """

    def __init__(
        self,
        config: Config,
        learner: Learner,
        critic: ValueFunction | None,
        tokenizer: Any,
        services: Services,
        prompter: Prompter,
        publisher: Publishes,
        loop: LoopThread,
        recorder: Recorder,
        metrics: TrainerMetrics,
        progress: Progress,
        run_id: str,
    ) -> None:
        self.config, self.learner, self.recorder, self.services = config, learner, recorder, services
        self.clock, self._cpu = StageClock(metrics.took), CpuClock()
        self.run_dir = recorder.directory
        self._tokenizer, self._prompter, self._publisher, self._loop = tokenizer, prompter, publisher, loop
        self._metrics, self._run_id, self._critic = metrics, run_id, critic
        self._priority = load_priority(config.replay.priority)
        self._collector = Collector(config, services, prompter, self.clock, loop, run_id, progress)
        self._delivery = Delivery(publisher, learner, self._collector, self.clock)
        self._groups = GroupRecorder(self.run_dir, config.trainer.keep_groups_mb << 20, learner.step)
        self._held_out: list[Prompt] = []
        self.total_steps = 0
        self.last_evaluation: Evaluation | None = None

    def prepare(self) -> None:
        """Waits for the services, agrees with them where the run goes on, publishes the weights, evaluates."""
        settings = self.config.trainer
        self._loop.call(wait_healthy(self.services.all(), settings.wait_timeout_s, self.recorder.say))
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
        # Trained on in steps that are lost: reuse would find their prompts twice, and experience of later weights than these.
        position = self._collector.progress().position
        lost_from = position if self._reads_replay else None
        dropped = self._loop.call(self.services.replay.reset_fresh(lost_from))
        if dropped:
            self.recorder.say(f"dropped {dropped} groups of an earlier attempt; their prompts are drawn again")
        self._loop.call(self.services.data.seek(position))
        if settings.eval_samples:
            self._held_out = self._loop.call(self.services.data.eval_prompts(settings.eval_samples))
        self._publisher.publish(self.learner.weights(), self.learner.step)
        if self._held_out and self.learner.step == 0:
            self._evaluate(settings.eval_pass_samples)

    def _check_replay(self) -> None:
        """Experience of another run must not be reused: its weight versions mean other weights.

        An attempt that came this far leaves the directory of its checkpoints, so that the next one knows that the
        experience is this run's, even if there is no checkpoint yet.
        """
        mine = self.run_dir / "checkpoints"
        known = self.learner.step > 0 or (self.config.trainer.resume and mine.is_dir())
        groups = 0 if known else self._loop.call(self.services.replay.stats())["groups"]
        if groups and self._reads_replay:
            raise ConfigError(
                f"the replay buffer holds {groups} groups of another run, which this run would reuse",
                field="state_dir",
                value=str(self.config.state_dir),
                remedy="empty it with POST /clear, give this run a state_dir of its own, or set replay.reuse_ratio and "
                "replay.mix_successes 0",
            )
        mine.mkdir(exist_ok=True)

    @property
    def _reads_replay(self) -> bool:
        """Whether batches contain experience of earlier steps."""
        return self.config.replay.reuse_ratio > 0 or self.config.replay.mix_successes > 0

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """The collector and the progress bar run while inside."""
        done = self.learner.step
        left = self.total_steps - done
        self._metrics.begin(done, self.total_steps)
        with (
            self.recorder.progress(done, self.total_steps),
            self._collector.running(left * fresh_groups(self.config)),
        ):
            self.clock.lap()
            self.clock.generating()
            self._cpu.lap()
            try:
                yield
                self._delivery.settle()
                self._groups.settle()
            except BaseException:
                self._groups.leave(self.learner.step + 1, self._dropped())
                raise
            finally:
                self._delivery.leave()

    def take(self) -> Experience:
        """The next batch: fresh groups, and `replay.reuse_ratio` of prioritised reuse."""
        settings, step = self.config, self.learner.step
        fresh = self._fresh(fresh_groups(settings), max(0, step - settings.trainer.max_staleness))
        groups, weights = list(fresh), [1.0] * len(fresh)
        if reuse := settings.trainer.batch_size - len(fresh):
            low = IMPORTANCE_EXPONENT
            beta = low + (1 - low) * step / self.total_steps
            sampled = self._collector.sample(reuse, self._oldest_reused, beta, seed=self.learner.seed)
            groups += sampled.groups
            weights += sampled.weights.tolist() if settings.replay.corrected else [1.0] * len(sampled.groups)
        return Experience(groups, weights, len(fresh))

    @property
    def _oldest_reused(self) -> int:
        """The oldest weight version whose experience may be used again."""
        return max(0, self.learner.step - self.config.replay.max_reuse_staleness)

    def _fresh(self, count: int, min_version: int) -> list[Group]:
        """Fresh groups; with dynamic sampling only ones whose rewards differ (DAPO, arXiv:2503.14476, section 3.2)."""
        algorithm = self.config.algorithm
        groups = self._mixed(self._collector.take(count, min_version))
        if not algorithm.dynamic_sampling:
            return groups
        for _ in range(algorithm.dynamic_sampling_rounds):
            equal = [group for group in groups if (group.rewards == group.rewards[0]).all()]
            if not equal:
                return groups
            self._collector.replace(equal)
            dropped = {group.id for group in equal}
            groups = [group for group in groups if group.id not in dropped]
            groups += self._mixed(self._collector.take(len(equal), min_version))
        raise CollectFailed(
            f"{algorithm.dynamic_sampling_rounds} rounds of dynamic sampling left groups of equal rewards in the batch",
            field="algorithm.dynamic_sampling_rounds",
            value=algorithm.dynamic_sampling_rounds,
            remedy="the prompts are too easy or too hard for this model: take others, or turn algorithm.dynamic_sampling off",
        )

    def _mixed(self, groups: list[Group]) -> list[Group]:
        """With `replay.mix_successes`, earlier right answers in groups that have none of their own."""
        count = self.config.replay.mix_successes
        if not count or not (failed := failed_prompts(groups)):
            return groups
        return mix_successes(groups, self._collector.successes(failed, self._oldest_reused), count)

    def finish(self, experience: Experience, batch: Batch, update: UpdateMetrics, critic: CriticMetrics | None) -> None:
        """After the update: acknowledge and publish, evaluate, free the slots, record.

        With `trainer.max_staleness` the publishing, and then the freeing of the slots, goes on beside the next step.
        """
        step, settings = self.learner.step, self.config.trainer
        fresh = experience.groups[: experience.fresh]
        columns = zip(experience.groups, batch.mean_advantages(), strict=True)
        # The buffer keeps a mixed group as it was sampled, all wrong: by itself there is nothing to learn from it.
        priorities = {g.id: MIN_PRIORITY if mixed_in(g) else self._priority(g, means) for g, means in columns}
        if settings.max_staleness:
            self._delivery.start(len(fresh))
        acknowledged = self._collector.begin_trained(fresh, priorities)
        if not settings.max_staleness:
            with self.clock.stage("publish"):
                self._publisher.publish(self.learner.weights(), step)
        acknowledged()
        self._collector.report_pass_rates(fresh)
        if self._held_out and settings.eval_every and step % settings.eval_every == 0 and step < self.total_steps:
            self._evaluate(0)
        if not settings.max_staleness:
            self._collector.release(len(fresh))
        record = self._record(experience, update, critic)
        self._groups.step(step, recorded(experience, batch), self._dropped())
        self.recorder.step(record, experience.groups)
        self._metrics.record(record, experience.fresh)

    def conclude(self, save: Callable[[], Path]) -> Path:
        """Final evaluation, checkpoint and report; returns the checkpoint's path. `save` is a call of all ranks."""
        if self._held_out and (self.last_evaluation is None or self.last_evaluation.step != self.learner.step):
            self._evaluate(self.config.trainer.eval_pass_samples)
        saved = save()
        curves = self.run_dir / "curves.png"
        with storing("curves.png", curves, "trainer.run_dir", f"look at {saved}: it is complete"):
            plot_curves(self.recorder.metrics(), self.recorder.evaluations(), curves)
        self.recorder.report(saved, curves)
        return saved

    def goodbye(self, agents: Sequence[Client]) -> None:
        """Asks every service to make its state durable and waits: SkyPilot does not tell them that the group ends."""
        self._loop.call(flush_all((*self.services.stateful(), *agents)))
        for client in agents:
            self._loop.call(client.close())

    def _evaluate(self, pass_samples: int) -> None:
        with self.clock.stage("publish"):
            self._delivery.settle()
        with self.clock.stage("evaluation"), self._cpu.stopped():
            evaluation = self._loop.call(
                evaluate(self.config, self.services, self._prompter, self._held_out, self.learner.step, pass_samples)
            )
        self.last_evaluation = evaluation
        self.recorder.evaluation(evaluation)
        self._metrics.evaluated(evaluation)

    def state(self) -> checkpoint.TrainerState:
        """What the next checkpoint says beside the tensors."""
        evaluation, progress = self.last_evaluation, self._collector.progress()
        return checkpoint.TrainerState(
            step=self.learner.step,
            position=progress.position,
            run_id=self._run_id,
            kl_coef=self.learner.kl_coef,
            finished=progress.finished,
            accuracy=evaluation.accuracy if evaluation and evaluation.step == self.learner.step else None,
        )

    def _dropped(self) -> list[RecordedGroup]:
        return [RecordedGroup(group, reason=reason, detail=detail) for group, reason, detail in self._collector.dropped()]

    def _record(self, experience: Experience, update: UpdateMetrics, critic: CriticMetrics | None) -> StepRecord:
        groups = experience.groups
        completions = [c for group in groups for c in group.completions[: len(group.completions) - mixed_in(group)]]
        ages = [self.learner.step - 1 - completion.weight_version for group in groups for completion in group.completions]
        fresh = sum(len(group.completions) for group in groups[: experience.fresh])
        equal = [group for group in groups if (group.rewards == group.rewards[0]).all()]
        return StepRecord(
            step=self.learner.step,
            reward=float(np.mean([completion.reward for completion in completions])),
            accuracy=float(np.mean([completion.correct for completion in completions])),
            equal_groups=len(equal),
            solved_groups=sum(all(completion.correct for completion in group.completions) for group in equal),
            failed_groups=sum(not any(completion.correct for completion in group.completions) for group in equal),
            reused_groups=len(groups) - experience.fresh,
            mixed_completions=sum(map(mixed_in, groups)),
            staleness=float(np.mean(ages[:fresh])),
            completion_tokens=float(np.mean([len(completion.token_ids) for completion in completions])),
            truncated=float(np.mean([completion.finish_reason == "length" for completion in completions])),
            unparsable=float(np.mean([completion.status == "unparsable" for completion in completions])),
            dropped=dict(self._collector.counts.dropped),
            seconds=self.clock.lap(),
            generating=self.clock.generating(),
            cpu_seconds=self._cpu.lap(),
            update=asdict(update),
            critic=asdict(critic) if critic else None,
            alarms=alarms(update, float(np.mean(ages)), self.config),
        )


async def flush_all(clients: Sequence[Client], deadline_s: float = 60.0) -> list[Client]:
    """Flushes all services at once; returns, and logs, those that did not answer within `deadline_s` seconds.

    No error: the run is complete and saved, and what services have acknowledged is durable. A node that is just being
    replaced must not make a failure of it.
    """
    answers = await asyncio.gather(*(client.flush(deadline_s) for client in clients), return_exceptions=True)
    missing = []
    for client, answer in zip(clients, answers, strict=True):
        if isinstance(answer, ServiceError):
            log.warning("%s was not flushed, the end of its log may be missing: %s", client.service, answer)
            missing.append(client)
        elif isinstance(answer, BaseException):
            raise answer
    return missing


def recorded(experience: Experience, batch: Batch) -> list[RecordedGroup]:
    """The groups of a batch with what its columns say of them."""
    items = []
    for i, (group, weight) in enumerate(zip(experience.groups, experience.weights, strict=True)):
        rows = range(i * batch.group_size, (i + 1) * batch.group_size)
        advantages, logprobs = [batch.advantages[row] for row in rows], [batch.policy_logprobs(row) for row in rows]
        items.append(RecordedGroup(group, advantages, logprobs, weight, reused=i >= experience.fresh))
    return items


def new_run_id(name: str) -> str:
    """Distinguishes attempts: weights of an earlier attempt are never taken for those of this one."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{np.random.default_rng().integers(16**4):04x}"


def resumed_learner(config: Config, ranks: Ranks, run_dir: Path) -> tuple[Learner, Progress, Path | None]:
    """The learner, from rank 0's newest checkpoint when there is one; where it is in the prompt stream; that checkpoint.

    Rank 0 alone has to see the checkpoint: the others get from rank 0 what they do not see.
    """
    if ranks.first and not config.trainer.resume:
        checkpoint.set_aside(run_dir / "checkpoints")
    path = ranks.same_path(checkpoint.newest(run_dir / "checkpoints") if ranks.first else None)
    if path is None:
        return Learner(config, ranks), Progress(), None
    state = checkpoint.load_state(ranks.broadcast(checkpoint.read_state(path) if ranks.first else b""), path)
    learner = Learner(config, ranks, path)
    try:
        load_optimizer(learner.optimizer, path, ranks)
    except ConfigError:
        raise
    except Exception as error:  # whatever the damage leads to
        raise checkpoint.cannot_resume(error, path) from None
    learner.step, learner.kl_coef = state.step, state.kl_coef
    return learner, Progress(state.position, state.finished), path


def _tokenizer_files(directory: Path) -> list[Path]:
    """Of the directory's; what tells of the model is in every checkpoint by itself."""
    return [file for file in sorted(directory.iterdir()) if file.name not in ("config.json", "generation_config.json")]


def open_checkpoints(config: Config, ranks: Ranks, run_dir: Path) -> checkpoint.Checkpoints:
    """Those of the run. Every rank calls it."""
    settings, model = config.trainer, run_dir / "model"
    checkpoints = checkpoint.Checkpoints(
        run_dir / "checkpoints", ranks, settings.keep_checkpoints, lambda: _tokenizer_files(model)
    )
    if checkpoints.alone and ranks.first:
        log.info("the other ranks do not see %s: rank 0 gathers and writes all of every checkpoint", checkpoints.directory)
    return checkpoints
