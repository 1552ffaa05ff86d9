"""Log of a run: record, groups and metrics of every step, evaluations, and the final report."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import numpy as np

from common import Json
from common.settings.config import Config
from common.wire.schemas import Completion, Group
from trainer.algorithms.batch import Batch
from trainer.evaluation.evaluation import Evaluation
from trainer.evaluation.verdicts import Verdicts
from trainer.observe.alarms import (
    Agreement,
    alarms,
    other_reference,
    refused_calls,
    same_prompts,
)
from trainer.observe.duplicate_answers import copied_answers, duplicate_answers
from trainer.observe.group_files import GroupRecorder, RecordedGroup
from trainer.observe.prometheus import TrainerMetrics
from trainer.observe.run_dir import Recorder
from trainer.policy.critic import CriticMetrics
from trainer.policy.policy import PolicyUpdate
from trainer.rollouts.drops import Drops
from trainer.timing import CpuClock, StageClock
from trainer.trackers.base import Numbers, Record


class RunLog:
    """Log of a run that continues after `step`; records include the results of `measured` and
    `gpus`. Only rank 0 has one.

    `collecting_cpu` returns the CPU seconds of the collecting thread; `dropout` are the model's
    settings of dropout, `verdicts` says whether the rewards are verdicts.
    """

    def __init__(
        self,
        config: Config,
        recorder: Recorder,
        metrics: TrainerMetrics,
        *,
        clock: StageClock,
        step: int,
        measured: Callable[[int], Numbers] = lambda step: {},
        gpus: Callable[[], int | None] = lambda: None,
        collecting_cpu: Callable[[], float],
        verdicts: Verdicts,
        drops: Drops,
        dropout: Collection[str] = (),
    ) -> None:
        self._config = config
        self._drops = drops
        self._verdicts = verdicts
        self._recorder = recorder
        self._metrics = metrics
        self._clock = clock
        self._cpu = CpuClock()
        self._collecting_cpu = CpuClock(collecting_cpu)
        self._groups = GroupRecorder(
            recorder.directory,
            config.trainer.keep_groups_mb << 20,
            step,
            whole=config.trainer.audit,
        )
        self._step = step
        self._lost_before: Counter[str] = Counter()
        self._refused_before = 0
        self._agreement = Agreement()
        self._measured = measured
        self._gpus = gpus
        self._dropout = dropout

    @contextmanager
    def training(self, step: int, total_steps: int) -> Iterator[None]:
        """Shows a progress bar and runs the clocks inside the block; flushes the log at the end."""
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
                self._groups.abort(self._step + 1, _dropped(self._drops))
                raise

    def step(
        self,
        step: int,
        batch: Batch,
        update: PolicyUpdate,
        critic: CriticMetrics | None,
        *,
        weights_checksum: str | None = None,
    ) -> Record:
        """Records a finished step, and returns its line of `metrics.jsonl`, whose numbers
        `trainer.observe.metrics` explains.
        """
        drops = self._drops
        self._step = step
        record = self._record(step, batch, update)
        # The counts are totals of the run, the line has what was added since the last step.
        lost = Counter(drops.lost_episodes)
        refused = drops.refused_calls - self._refused_before
        rewards = [answer.reward for item in batch.groups for answer in item.group.answers]
        raised = refused_calls(refused, drops.refusal, rewards=rewards, config=self._config)
        record["alarms"] |= raised
        record |= {
            "dropped": dict(drops.counts),
            "lost_episodes": dict(lost - self._lost_before),
            "refused_calls": refused,
            "critic": asdict(critic) if critic else None,
            "weights_checksum": weights_checksum,
        }
        self._lost_before = lost
        self._refused_before = drops.refused_calls

        self._groups.step(step, _trained(batch, update), _dropped(drops))
        self._recorder.step(record, batch.groups[0].group)
        self._metrics.record(record, len(batch.fresh))
        return record

    def _record(self, step: int, batch: Batch, update: PolicyUpdate) -> Json:
        """Returns the numbers of the batch and of its update, with the alarms that they raise."""
        groups = [item.group for item in batch.groups]
        answers = list(chain.from_iterable(group.answers for group in groups))
        ages = [step - 1 - completion.weight_version for completion in _completions(groups)]
        fresh_ages = ages[: len(_completions(batch.fresh))]  # the fresh groups come first
        staleness = _mean(ages)
        update_metrics = asdict(update.metrics)
        teacher_kl = batch.teacher_kl()
        if teacher_kl is not None:
            update_metrics["teacher_kl"] = teacher_kl

        # Accuracy and the two counts are None when the rewards are not verdicts.
        verified = self._verdicts.of(answer.verified for answer in answers)
        correct = [answer.correct for answer in answers if answer.verified]
        equal = [group for group in groups if group.zero_variance]
        rights = [[completion.correct for completion in group.completions] for group in equal]

        equal_answers = duplicate_answers(batch.fresh)
        raised = alarms(
            update.metrics,
            staleness,
            self._config,
            dropout=self._dropout,
            agreement=self._agreement,
        )
        if 0 in ages and "delta_logprob" not in raised:
            self._agreement = Agreement(step, update.metrics.delta_logprob_current)
        if step == 1:
            raised |= other_reference(update.metrics.kl_reference, self._config)
        if not self._config.environment.name:  # an environment may keep the problem to itself
            raised |= same_prompts(batch.fresh, self._config)
        raised |= copied_answers(equal_answers, self._config)

        seconds = self._clock.lap()
        generating, generations = self._clock.generating()
        return {
            "step": step,
            "reward": _mean(answer.reward for answer in answers),
            "accuracy": _mean(correct) if verified and correct else None,
            "zero_variance_groups": len(equal),
            "solved_groups": sum(map(all, rights)) if verified else None,
            "failed_groups": sum(not any(right) for right in rights) if verified else None,
            "reused_groups": len(groups) - len(batch.fresh),
            "staleness": _mean(fresh_ages),
            "completion_tokens": float(sum(batch.lengths) / len(answers)),
            "truncated": _mean(answer.finish_reason == "length" for answer in answers),
            "unparsable": _mean(answer.status == "unparsable" for answer in answers),
            "copies": equal_answers.share,
            "seconds": seconds,
            "generating": generating,
            "in_flight": generations * self._config.sampling.group_size,
            "coordinator": self._collecting_cpu.lap() / max(1e-9, sum(seconds.values())),
            "cpu_seconds": self._cpu.lap(),
            "gpus": self._gpus(),
            "update": update_metrics,
            "verified": verified,
            "rewards": _rewards(answers),
            "logged": self._measured(step),
            "alarms": raised,
        }

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Excludes an evaluation's CPU time from that of the step."""
        with self._clock.stage("evaluation"), self._cpu.stopped():
            yield

    def evaluation(self, evaluation: Evaluation) -> None:
        """Records an evaluation."""
        self._recorder.evaluation(evaluation)
        self._metrics.evaluated(evaluation)

    def report(self, checkpoint: Path) -> None:
        """Prints the summary of a run that ended with this checkpoint."""
        self._recorder.report(checkpoint)


def _trained(batch: Batch, update: PolicyUpdate) -> list[RecordedGroup]:
    assert batch.advantages is not None
    logprobs = batch.old_logprobs or update.logprobs or [None] * len(batch.rows)
    items = []
    for item, rows in zip(batch.groups, batch.parts, strict=True):
        items.append(
            RecordedGroup(
                group=item.group,
                advantages=batch.advantages[rows],
                logprobs=logprobs[rows],
                weight=item.weight,
                reused=item.reused,
            )
        )
    return items


def _dropped(drops: Drops) -> list[RecordedGroup]:
    """Returns the groups dropped since the last call."""
    return [
        RecordedGroup(dropped.group, reason=dropped.reason, detail=dropped.detail)
        for dropped in drops.recent()
    ]


def _mean(numbers: Iterable[float]) -> float:
    return float(np.mean(list(numbers)))


def _completions(groups: Sequence[Group]) -> list[Completion]:
    return list(chain.from_iterable(group.completions for group in groups))


def _rewards(answers: Sequence[Completion]) -> Numbers:
    """Returns the mean score of every reward function, over the answers that it applies to."""
    scores: dict[str, list[float]] = {}
    for answer in answers:
        for name, score in answer.components.items():
            if score is not None:
                scores.setdefault(name, []).append(score)
    return {name: _mean(found) for name, found in scores.items()}
