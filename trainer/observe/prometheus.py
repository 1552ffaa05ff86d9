"""Metrics of the trainer on the `/metrics` page of rank 0."""

import math
from collections import Counter

from common.process.metrics import Metrics
from trainer.evaluation.evaluation import Evaluation
from trainer.observe.metrics import METRICS
from trainer.trackers.base import Record, numbers

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
        self._step = metrics.newest("trainer_step", "Optimiser steps done; also the weight version")
        self._total_steps = metrics.newest("trainer_total_steps", "Steps of the whole run")
        self._time = metrics.newest(
            "trainer_last_step_timestamp_seconds", "When the newest step was done, in Unix time"
        )
        self._newest = {
            metric.name: metrics.newest(f"trainer_{metric.gauge}", f"Newest step: {metric.text}")
            for metric in METRICS
            if metric.gauge
        }
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

    def record(self, record: Record, fresh_groups: int) -> None:
        """Shows the numbers of a step."""
        self._step.set(record["step"])
        self._time.set_to_current_time()
        known = numbers(record)
        for name, gauge in self._newest.items():
            gauge.set(known.get(name, math.nan))
        for stage, seconds in record["seconds"].items():
            self._seconds.labels(stage).set(seconds)
            self._all_seconds.labels(stage).inc(seconds)
        self._durations.observe(sum(record["seconds"].values()))
        update = record["update"]
        self._tokens.inc(update["trained_tokens"])
        self._updates.labels("applied").inc(update["updates"])
        self._updates.labels("skipped").inc(update["skipped"])
        self._early_stops.inc(update["stopped_early"])
        self._groups.labels("fresh").inc(fresh_groups)
        self._groups.labels("reused").inc(record["reused_groups"])
        dropped = Counter[str](record["dropped"])
        for reason, count in (dropped - self._known_dropped).items():
            self._dropped.labels(reason).inc(count)
        self._known_dropped = dropped
        alarms = record["alarms"]
        self._alarmed |= alarms.keys()
        for name in self._alarmed:
            self._alarm.labels(name).set(name in alarms)

    def evaluated(self, evaluation: Evaluation) -> None:
        known = numbers(evaluation.summary())
        for name, gauge in self._evaluation.items():
            gauge.set(known.get(name, math.nan))
        if evaluation.pass_at_k is not None:
            self._pass_at_k.labels(evaluation.k).set(evaluation.pass_at_k)

    def took(self, stage: str, seconds: float) -> None:
        self._activities.labels(stage).observe(seconds)

    def published(self, size: int, seconds: float) -> None:
        self._published_bytes.set(size)
        self._publish.observe(seconds)
