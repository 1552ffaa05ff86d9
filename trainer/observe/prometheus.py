"""Metrics of the trainer on the `/metrics` page of rank 0."""

import math
from collections import Counter

from prometheus_client import Gauge

from common.process.metrics import Metrics, critic_gauges
from trainer.evaluation.evaluation import Evaluation
from trainer.observe.run_dir import StepRecord

_STEP = {
    "reward": ("reward", "mean reward"),
    "accuracy": ("accuracy_ratio", "share of correct completions"),
    "zero_variance_groups": (
        "zero_variance_groups",
        "groups whose completions all got the same reward",
    ),
    "staleness": ("staleness_versions", "mean age of the fresh completions in weight versions"),
    "completion_tokens": ("completion_tokens", "mean length of a completion"),
    "in_flight": ("completions_in_flight", "mean number of completions that were being generated"),
    "coordinator": (
        "coordinator_ratio",
        "processor time of the thread that collects, as a share of the wall time",
    ),
    "truncated": ("truncated_ratio", "share of completions cut at sampling.max_new_tokens"),
}
_UPDATE = {
    "loss": ("loss", "mean loss of its updates"),
    "grad_norm": ("gradient_norm", "mean gradient norm before clipping"),
    "learning_rate": ("learning_rate", "learning rate"),
    "clip_fraction": ("clip_ratio", "share of tokens that were clipped"),
    "ratio": ("probability_ratio", "mean probability ratio of new to old policy"),
    "delta_logprob": ("delta_logprob", "mean |logprob of trainer - of rollout engine|"),
    "delta_logprob_current": (
        "delta_logprob_same_weights",
        "the same over tokens sampled by these very weights",
    ),
    "kl_rollout": ("kl_rollout_nats", "KL(rollout policy || trainer) per token"),
    "kl_reference": ("kl_reference_nats", "KL to the reference model per token"),
    "kl_coef": ("kl_coefficient", "weight of the KL divergence in the loss"),
    "entropy": ("entropy_nats", "entropy per token"),
    "effective_sample_size": (
        "effective_sample_ratio",
        "effective sample size as a share of the tokens",
    ),
}
_EVALUATION = {
    "step": ("step", "its step"),
    "accuracy": ("accuracy_ratio", "accuracy"),
    "standard_error": ("standard_error_ratio", "its standard error"),
}


class TrainerMetrics:
    """Gauges of the newest step and evaluation (NaN before the first), counters of totals,
    histograms of durations.
    """

    def __init__(self, metrics: Metrics) -> None:
        def newest(names: dict[str, tuple[str, str]]) -> dict[str, Gauge]:
            return {
                field: metrics.newest(f"trainer_{name}", f"Newest step: {text}")
                for field, (name, text) in names.items()
            }

        self._step = metrics.newest("trainer_step", "Optimiser steps done; also the weight version")
        self._total_steps = metrics.newest("trainer_total_steps", "Steps of the whole run")
        self._time = metrics.newest(
            "trainer_last_step_timestamp_seconds", "When the newest step was done, in Unix time"
        )
        self._record = newest(_STEP)
        self._update = newest(_UPDATE)
        self._critic = critic_gauges(metrics, "trainer_critic")
        self._seconds = metrics.gauge(
            "trainer_step_stage_seconds", "Newest step: wall time by stage", ["stage"]
        )
        self._alarm = metrics.gauge(
            "trainer_alarm", "1 while a number is out of its bounds", ["name"]
        )
        self._all_seconds = metrics.counter(
            "trainer_stage_seconds_total", "Wall time of all steps by stage", ["stage"]
        )
        self._durations = metrics.histogram("trainer_step_duration_seconds", "Wall time of a step")
        self._activities = metrics.histogram(
            "trainer_activity_duration_seconds",
            "One activity, such as the generation of one group, by stage",
            ["stage"],
        )
        self._tokens = metrics.counter(
            "trainer_trained_tokens_total", "Completion tokens of all updates"
        )
        self._updates = metrics.counter(
            "trainer_updates_total", "Optimiser updates by result", ["result"]
        )
        self._early_stops = metrics.counter(
            "trainer_early_stops_total", "Batches ended by algorithm.early_stop_kl"
        )
        self._groups = metrics.counter("trainer_groups_total", "Groups trained on", ["source"])
        self._dropped = metrics.counter(
            "trainer_dropped_groups_total", "Groups that were not trained on", ["reason"]
        )
        self._known_dropped: Counter[str] = Counter()
        self._alarmed: set[str] = set()
        self._evaluation = {
            field: metrics.newest(f"trainer_evaluation_{name}", f"Newest evaluation: {text}")
            for field, (name, text) in _EVALUATION.items()
        }
        self._pass_at_k = metrics.gauge(
            "trainer_evaluation_pass_ratio", "Newest measured pass@k", ["k"]
        )
        self._published_bytes = metrics.newest(
            "trainer_published_bytes", "The newest weight version, as one engine gets it"
        )
        self._publish = metrics.histogram(
            "trainer_publish_duration_seconds", "Until the engines served a weight version"
        )
        self.tracked = metrics.counter(
            "trainer_tracker_records_total", "Records for trackers by result", ["tracker", "result"]
        )

    def begin(self, step: int, total_steps: int) -> None:
        self._step.set(step)
        self._total_steps.set(total_steps)

    def record(self, record: StepRecord, fresh_groups: int) -> None:
        self._step.set(record.step)
        self._time.set_to_current_time()
        for field, gauge in self._record.items():
            gauge.set(_known(getattr(record, field)))
        for gauges, values in ((self._update, record.update), (self._critic, record.critic or {})):
            for field in gauges.keys() & values.keys():
                gauges[field].set(_known(values[field]))
        for stage, seconds in record.seconds.items():
            self._seconds.labels(stage).set(seconds)
            self._all_seconds.labels(stage).inc(seconds)
        self._durations.observe(sum(record.seconds.values()))
        self._tokens.inc(record.update["trained_tokens"])
        self._updates.labels("applied").inc(record.update["updates"])
        self._updates.labels("skipped").inc(record.update["skipped"])
        self._early_stops.inc(record.update["stopped_early"])
        self._groups.labels("fresh").inc(fresh_groups)
        self._groups.labels("reused").inc(record.reused_groups)
        for reason, count in (Counter(record.dropped) - self._known_dropped).items():
            self._dropped.labels(reason).inc(count)
        self._known_dropped = Counter(record.dropped)
        self._alarmed |= record.alarms.keys()
        for name in self._alarmed:
            self._alarm.labels(name).set(name in record.alarms)

    def evaluated(self, evaluation: Evaluation) -> None:
        for field, gauge in self._evaluation.items():
            gauge.set(_known(getattr(evaluation, field)))
        if evaluation.pass_at_k is not None:
            self._pass_at_k.labels(evaluation.k).set(evaluation.pass_at_k)

    def took(self, stage: str, seconds: float) -> None:
        self._activities.labels(stage).observe(seconds)

    def published(self, size: int, seconds: float) -> None:
        self._published_bytes.set(size)
        self._publish.observe(seconds)


def _known(number: float | None) -> float:
    return math.nan if number is None else number
