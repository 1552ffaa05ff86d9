"""The `/metrics` page of rank 0 after random steps, with a model of each of its numbers."""

import random
from collections import Counter
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.process.metrics import Metrics
from trainer.evaluation.evaluation import Evaluation
from trainer.observe.prometheus import TrainerMetrics

STAGES = ("update", "generation")
ALARMS = ("kl_rollout", "likelihood", "reference")


def shown(metrics: Metrics) -> dict[str, float]:
    """Returns the numbers of the page, by name and label."""
    page = generate_latest(metrics.registry).decode()
    return {
        " ".join([sample.name.removeprefix("rlhf_trainer_"), *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def random_record(draw: random.Random, step: int, dropped: dict[str, int]) -> dict[str, Any]:
    return {
        "step": step,
        "reward": draw.random(),
        "accuracy": draw.choice([None, draw.random()]),
        "seconds": {stage: draw.random() for stage in STAGES},
        "update": {
            "trained_tokens": draw.randint(0, 99),
            "updates": draw.randint(0, 3),
            "skipped": draw.randint(0, 3),
            "stopped_early": draw.randint(0, 1),
            "loss": draw.random(),
        },
        "reused_groups": draw.randint(0, 3),
        "dropped": dict(dropped),
        "alarms": {name: "text" for name in ALARMS if draw.random() < 0.4},
    }


@pytest.mark.parametrize("seed", range(4))
def test_the_page_has_the_newest_numbers_and_the_sums(seed: int) -> None:
    draw = random.Random(seed)
    metrics = Metrics("trainer")
    trainer = TrainerMetrics(metrics)
    page = shown(metrics)
    assert page["step"] != page["step"], "unknown before the first"
    sums = Counter[str]()
    dropped: dict[str, int] = {}
    raised: set[str] = set()
    for step in range(1, 7):
        for reason in ("stale", "reward"):
            dropped[reason] = dropped.get(reason, 0) + draw.randint(0, 2)
        record = random_record(draw, step, dropped)
        fresh = draw.randint(0, 5)
        trainer.record(record, fresh)

        update = record["update"]
        for stage, seconds in record["seconds"].items():
            sums[f"stage_seconds_total {stage}"] += seconds
        sums["step_duration_seconds_sum"] += sum(record["seconds"].values())
        sums["trained_tokens_total"] += update["trained_tokens"]
        sums["updates_total applied"] += update["updates"]
        sums["updates_total skipped"] += update["skipped"]
        sums["early_stops_total"] += update["stopped_early"]
        sums["groups_total fresh"] += fresh
        sums["groups_total reused"] += record["reused_groups"]
        raised |= record["alarms"].keys()

        page = shown(metrics)
        assert {name: page[name] for name in sums} == pytest.approx(sums)
        for reason, count in dropped.items():
            assert page.get(f"dropped_groups_total {reason}", 0) == count
        newest = {"step": step, "reward": record["reward"], "loss": update["loss"]}
        newest |= {f"step_stage_seconds {name}": each for name, each in record["seconds"].items()}
        assert {name: page[name] for name in newest} == pytest.approx(newest)
        accuracy = page["accuracy_ratio"]
        assert (None if accuracy != accuracy else accuracy) == record["accuracy"]
        alarms = {name: value for name, value in page.items() if name.startswith("alarm ")}
        assert alarms == {f"alarm {name}": float(name in record["alarms"]) for name in raised}


def test_a_measured_pass_at_k_stays_until_the_next_one() -> None:
    metrics = Metrics("trainer")
    trainer = TrainerMetrics(metrics)
    trainer.evaluated(Evaluation(4, 0.5, 0.125, 8, 0.75, 8, []))
    trainer.evaluated(Evaluation(6, None, None, 8, None, 8, []))
    trainer.published(1000, 2.0)
    trainer.published(3000, 1.0)
    trainer.took("reward", 0.5)
    page = shown(metrics)
    assert page["evaluation_step"] == 6
    assert page["evaluation_accuracy_ratio"] != page["evaluation_accuracy_ratio"], "unknown"
    assert page["evaluation_pass_ratio 8"] == 0.75
    assert page["published_bytes"] == 3000
    assert page["publish_duration_seconds_sum"] == 3.0
    assert page["activity_duration_seconds_sum reward"] == 0.5


def test_every_label_has_its_name() -> None:
    metrics = Metrics("trainer")
    trainer = TrainerMetrics(metrics)
    record = random_record(random.Random(0), 1, {"stale": 3})
    trainer.record(record | {"alarms": {"likelihood": "text"}}, 1)
    trainer.evaluated(Evaluation(4, 0.5, 0.125, 8, 0.75, 8, []))
    trainer.took("reward", 0.5)
    trainer.tracked.labels("wandb", "sent").inc()
    page = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    labels = {
        sample.name.removeprefix("rlhf_trainer_"): set(sample.labels) - {"le"}
        for family in page
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    named = {
        "step_stage_seconds": {"stage"},
        "alarm": {"name"},
        "stage_seconds_total": {"stage"},
        "activity_duration_seconds_bucket": {"stage"},
        "activity_duration_seconds_count": {"stage"},
        "activity_duration_seconds_sum": {"stage"},
        "updates_total": {"result"},
        "groups_total": {"source"},
        "dropped_groups_total": {"reason"},
        "evaluation_pass_ratio": {"k"},
        "tracker_records_total": {"tracker", "result"},
    }
    of_run = {name: found for name, found in labels.items() if not name.startswith("rlhf_")}
    assert {name: found for name, found in of_run.items() if found} == named
