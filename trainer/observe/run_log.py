"""Log of a run: record, groups and metrics of every step, evaluations, and the final report."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from common.settings.config import Config
from common.wire.schemas import Completion, CriticMetrics
from trainer.algorithms.batch import Batch
from trainer.observe.alarms import alarms
from trainer.observe.group_files import GroupRecorder, RecordedGroup
from trainer.observe.prometheus import TrainerMetrics
from trainer.observe.run_dir import Recorder, StepRecord
from trainer.policy.policy import PolicyUpdate
from trainer.rollouts.drops import DroppedGroup, Drops
from trainer.rollouts.evaluation import Evaluation
from trainer.timing import CpuClock, StageClock


class RunLog:
    """Log of a rank above 0, which does nothing: rank 0 records the run."""

    @contextmanager
    def training(self, step: int, total_steps: int, drops: Drops) -> Iterator[None]:
        """Shows a progress bar and runs the clocks inside the block; flushes the log at the end."""
        yield

    def step(
        self,
        step: int,
        batch: Batch,
        update: PolicyUpdate,
        critic: CriticMetrics | None,
        drops: Drops,
    ) -> Mapping[str, Any]:
        """Records a finished step, and returns the record."""
        return {}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Excludes an evaluation's CPU time from that of the step."""
        yield

    def evaluation(self, evaluation: Evaluation) -> None:
        """Records an evaluation."""

    def report(self, checkpoint: Path) -> None:
        """Writes the curves and prints the summary of a run that ended with this checkpoint."""


class LeaderRunLog(RunLog):
    """Log of rank 0 for a run that continues after `step`; records include the results of
    `measured` and `gpus`.

    `collecting_cpu` returns the CPU seconds of the collecting thread; `dropout` are the model's
    settings of dropout.
    """

    def __init__(
        self,
        config: Config,
        recorder: Recorder,
        metrics: TrainerMetrics,
        clock: StageClock,
        step: int,
        measured: Callable[[int], dict[str, float]] = lambda step: {},
        gpus: Callable[[], int | None] = lambda: None,
        collecting_cpu: Callable[[], float] = lambda: 0.0,
        dropout: Collection[str] = (),
    ) -> None:
        self._config, self._recorder, self._metrics, self._clock = config, recorder, metrics, clock
        self._cpu, self._collecting_cpu = CpuClock(), CpuClock(collecting_cpu)
        self._groups = GroupRecorder(recorder.directory, config.trainer.keep_groups_mb << 20, step)
        self._step, self._measured, self._gpus = step, measured, gpus
        self._dropout = dropout

    @contextmanager
    def training(self, step: int, total_steps: int, drops: Drops) -> Iterator[None]:
        self._metrics.begin(step, total_steps)
        with self._recorder.progress(step, total_steps):
            self._clock.lap()
            self._clock.generating()
            self._cpu.lap()
            self._collecting_cpu.lap()
            try:
                yield
                self._groups.flush()
            except BaseException:
                self._groups.abort(self._step + 1, _dropped(drops.recent()))
                raise

    def step(
        self,
        step: int,
        batch: Batch,
        update: PolicyUpdate,
        critic: CriticMetrics | None,
        drops: Drops,
    ) -> Mapping[str, Any]:
        """See `RunLog`."""
        self._step = step
        record = self._record(step, batch, update, critic, drops)
        self._groups.step(step, _trained(batch, update), _dropped(drops.recent()))
        self._recorder.step(record, [item.group for item in batch.groups])
        self._metrics.record(record, len(batch.fresh))
        return asdict(record)

    def _record(
        self,
        step: int,
        batch: Batch,
        update: PolicyUpdate,
        critic: CriticMetrics | None,
        drops: Drops,
    ) -> StepRecord:
        groups, fresh = [item.group for item in batch.groups], batch.fresh
        completions = [completion for group in groups for completion in group.completions]
        answers = [answer for group in groups for answer in group.answers]
        ages = [step - 1 - completion.weight_version for completion in completions]
        equal = [group for group in groups if group.zero_variance]
        verified = all(answer.verified for answer in answers)
        seconds, (generating, generations) = self._clock.lap(), self._clock.generating()
        return StepRecord(
            step=step,
            reward=float(np.mean([answer.reward for answer in answers])),
            accuracy=float(np.mean([answer.correct for answer in answers])) if verified else None,
            zero_variance_groups=len(equal),
            solved_groups=sum(all(c.correct for c in group.completions) for group in equal)
            if verified
            else None,
            failed_groups=sum(not any(c.correct for c in group.completions) for group in equal)
            if verified
            else None,
            reused_groups=len(groups) - len(fresh),
            staleness=float(np.mean(ages[: sum(len(group.completions) for group in fresh)])),
            completion_tokens=float(sum(batch.lengths) / len(answers)),
            truncated=float(np.mean([answer.finish_reason == "length" for answer in answers])),
            unparsable=float(np.mean([answer.status == "unparsable" for answer in answers])),
            dropped=dict(drops.counts),
            seconds=seconds,
            generating=generating,
            in_flight=generations * self._config.sampling.group_size,
            coordinator=self._collecting_cpu.lap() / max(1e-9, sum(seconds.values())),
            cpu_seconds=self._cpu.lap(),
            update=asdict(update.metrics)
            | ({} if (kl := batch.teacher_kl()) is None else {"teacher_kl": kl}),
            critic=asdict(critic) if critic else None,
            gpus=self._gpus(),
            verified=verified,
            rewards=_rewards(answers),
            logged=self._measured(step),
            alarms=alarms(update.metrics, float(np.mean(ages)), self._config, self._dropout),
        )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self._clock.stage("evaluation"), self._cpu.stopped():
            yield

    def evaluation(self, evaluation: Evaluation) -> None:
        self._recorder.evaluation(evaluation)
        self._metrics.evaluated(evaluation)

    def report(self, checkpoint: Path) -> None:
        self._recorder.report(checkpoint)


def _trained(batch: Batch, update: PolicyUpdate) -> list[RecordedGroup]:
    assert batch.advantages is not None
    logprobs = batch.old_logprobs or update.logprobs or [None] * len(batch.rows)
    items = []
    for item, rows in zip(batch.groups, batch.parts, strict=True):
        items.append(
            RecordedGroup(
                item.group, batch.advantages[rows], logprobs[rows], item.weight, item.reused
            )
        )
    return items


def _rewards(answers: Sequence[Completion]) -> dict[str, float]:
    """Returns the mean score of every reward function, over the answers that it applies to."""
    scores: dict[str, list[float]] = {}
    for name, score in (
        (name, score) for answer in answers for name, score in answer.components.items()
    ):
        if score is not None:
            scores.setdefault(name, []).append(score)
    return {name: float(np.mean(found)) for name, found in scores.items()}


def _dropped(groups: Sequence[DroppedGroup]) -> list[RecordedGroup]:
    return [RecordedGroup(group, reason=reason, detail=detail) for group, reason, detail in groups]
