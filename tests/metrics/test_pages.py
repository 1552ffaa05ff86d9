"""The /metrics page of every service: standard names, complete documentation, and the trainer's
numbers."""

import re
from math import isnan
from typing import Any

import pytest
from prometheus_client import generate_latest

from common.process.metrics import Metrics
from tests.support.package.metrics_pages import (
    DOCUMENT,
    Family,
    documented,
    framed,
    step_table,
    step_table_documented,
    table,
)
from trainer.evaluation.evaluation import Evaluation
from trainer.observe.prometheus import TrainerMetrics
from trainer.policy.update_metrics import UpdateMetrics
from trainer.timing import STAGES, WAITING, StageClock

pytestmark = pytest.mark.integration

NOT_BASE_UNITS = re.compile(
    r"_(ms|millis\w*|us|micros\w*|minutes|hours|kb|mb|gb|kib|mib|gib|percent|pct)(_|$)"
)


def test_the_document_lists_every_metric_of_every_service(
    found: dict[str, dict[str, Family]],
) -> None:
    made = framed(table(found))
    assert documented() == made, (
        f"{DOCUMENT} is stale: PYTHONPATH=. .venv/bin/python -m tests.support.package.metrics_pages writes it"
    )


def test_the_document_lists_every_number_of_a_step() -> None:
    assert step_table_documented() == step_table(), (
        f"{DOCUMENT} is stale: PYTHONPATH=. .venv/bin/python -m tests.support.package.metrics_pages writes it"
    )


def test_names_and_units_follow_prometheus(found: dict[str, dict[str, Family]]) -> None:
    for service, families in found.items():
        for family in families.values():
            where = f"{family.name} of {service}"
            assert family.name.startswith(("rlhf_", "process_")), where
            assert family.name.endswith("_total") == (family.kind == "counter"), where
            assert not NOT_BASE_UNITS.search(family.name), where
            assert family.text, where
            if family.kind == "histogram":
                assert family.name.endswith("_seconds"), where


def test_every_service_reports_its_identity_and_process_usage(
    found: dict[str, dict[str, Family]],
) -> None:
    common = {
        "rlhf_build_info",
        "rlhf_healthy",
        "rlhf_http_requests_total",
        "rlhf_http_request_duration_seconds",
    }
    common |= {
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_open_fds",
        "process_max_fds",
    }
    for service, families in found.items():
        assert common <= set(families), service


def record(step: int, dropped: dict[str, int], alarms: dict[str, str]) -> dict[str, Any]:
    update = UpdateMetrics(
        0.5,
        1.5,
        1e-6,
        0.1,
        1.0,
        0.01,
        0.0,
        0.0,
        0.0,
        0.01,
        0.001,
        0.02,
        0.1,
        2.0,
        0.9,
        trained_tokens=100,
        pass_fill=1.0,
        updates=2,
        skipped=1,
    )
    return {
        "step": step,
        "reward": 0.75,
        "accuracy": 0.5,
        "zero_variance_groups": 1,
        "solved_groups": 1,
        "failed_groups": 0,
        "unparsable": 0.25,
        "generating": 0.5,
        "in_flight": 48.0,
        "coordinator": 0.25,
        "reused_groups": 1,
        "staleness": 1.0,
        "completion_tokens": 20.0,
        "truncated": 0.25,
        "dropped": dropped,
        "seconds": dict.fromkeys((*STAGES, WAITING), 0.5),
        "cpu_seconds": 1.0,
        "update": dict(update.__dict__),
        "critic": None,
        "alarms": alarms,
    }


def test_metrics_have_no_value_before_the_first_step_and_then_add_up() -> None:
    metrics = Metrics("ppo-trainer")
    numbers = TrainerMetrics(metrics)

    def value(metric: str, **labels: str) -> float:
        got = metrics.registry.get_sample_value(f"rlhf_trainer_{metric}", labels)
        assert got is not None, metric
        return got

    names = (
        "reward",
        "accuracy_ratio",
        "kl_reference_nats",
        "evaluation_accuracy_ratio",
        "last_step_timestamp_seconds",
    )
    assert all(isnan(value(name)) for name in names), "0 would be a number"
    numbers.begin(0, 10)
    numbers.record(record(1, {"stale": 2}, {"kl_rollout": "too high"}), fresh_groups=3)
    assert value("alarm", name="kl_rollout") == 1
    numbers.record(record(2, {"stale": 2, "reward": 1}, {}), fresh_groups=3)
    assert (value("step"), value("total_steps"), value("reward"), value("truncated_ratio")) == (
        2,
        10,
        0.75,
        0.25,
    )
    assert (value("effective_sample_ratio"), value("entropy_nats"), value("kl_coefficient")) == (
        0.9,
        2.0,
        0.1,
    )
    assert value("alarm", name="kl_rollout") == 0
    assert value("dropped_groups_total", reason="stale") == 2
    assert value("dropped_groups_total", reason="reward") == 1
    assert (value("groups_total", source="fresh"), value("groups_total", source="reused")) == (6, 2)
    assert value("trained_tokens_total") == 200
    assert (value("updates_total", result="applied"), value("updates_total", result="skipped")) == (
        4,
        2,
    )
    assert value("stage_seconds_total", stage="update") == 1
    assert (value("step_duration_seconds_count"), value("step_duration_seconds_sum")) == (2, 8)
    assert isnan(value("critic_value_loss")), "there is no critic"
    numbers.evaluated(Evaluation(2, 0.5, 0.1, 25, 0.8, 8, []))
    assert (value("evaluation_accuracy_ratio"), value("evaluation_standard_error_ratio")) == (
        0.5,
        0.1,
    )
    assert value("evaluation_pass_ratio", k="8") == 0.8
    numbers.record(record(3, {}, {}) | {"accuracy": None}, fresh_groups=3)
    numbers.evaluated(Evaluation(3, None, None, 25, None, 8, []))
    assert isnan(value("accuracy_ratio"))
    assert isnan(value("evaluation_accuracy_ratio"))
    assert b"rlhf_trainer_reward 0.75" in generate_latest(metrics.registry)


def test_every_single_activity_of_a_stage_is_measured() -> None:
    metrics = Metrics("ppo-trainer")
    clock = StageClock(TrainerMetrics(metrics).took)
    with clock.stage("generation"), clock.stage("generation"):
        pass
    with pytest.raises(ZeroDivisionError), clock.stage("reward"):
        raise ZeroDivisionError
    for stage, count in (("generation", 2), ("reward", 1)):
        name = "rlhf_trainer_activity_duration_seconds_count"
        assert metrics.registry.get_sample_value(name, {"stage": stage}) == count
