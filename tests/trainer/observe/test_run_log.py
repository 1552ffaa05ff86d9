"""A run's log against its definitions: the line, the groups and the metrics of random steps."""

import io
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from common.process.metrics import Metrics
from common.process.storage import StorageFailed
from common.settings.config import Config
from common.wire.schemas import Group
from tests.support.batches.groups import make_group
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.evaluation.evaluation import Answer, Evaluation
from trainer.evaluation.verdicts import Verdicts
from trainer.observe.group_files import read_trained, recorded_steps
from trainer.observe.prometheus import TrainerMetrics
from trainer.observe.run_dir import Recorder, read_lines
from trainer.observe.run_log import RunLog
from trainer.policy.critic import CriticMetrics
from trainer.policy.policy import PolicyUpdate
from trainer.policy.update_metrics import UpdateMetrics
from trainer.rollouts.drops import Drops
from trainer.timing import STAGES, WAITING, CpuClock, StageClock

STEPS = 3


def shown(metrics: Metrics) -> dict[str, float]:
    """Returns the numbers of `/metrics`, by name and label."""
    return {
        " ".join([sample.name.removeprefix("rlhf_"), *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
    }


def random_group(draw: random.Random, rng: np.random.Generator, step: int, place: int) -> Group:
    rewards = draw.choice([[1.0] * 4, [0.0] * 4, [1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    version = draw.randint(max(0, step - 3), step - 1)
    group = make_group(rng, rewards, version, position=10 * step + place)
    for completion in group.completions:
        completion.verified = True
        completion.finish_reason = draw.choice(["stop", "length"])
        completion.status = draw.choice(["unparsable", "ok"])
        completion.components = {"math": completion.reward, "brief": draw.choice([None, 0.5, 0.25])}
    return group


def random_update(draw: random.Random) -> UpdateMetrics:
    numbers: dict[str, Any] = {
        name: draw.uniform(0.0, 1e-3)
        for name, kind in UpdateMetrics.__annotations__.items()
        if kind in (float, "float")
    }
    counts = {name: draw.randint(0, 9) for name in ("updates", "skipped", "stopped_early")}
    return UpdateMetrics(**numbers, **counts, trained_tokens=draw.randint(1, 999))


@pytest.mark.parametrize("seed", range(4))
def test_every_number_is_as_defined(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    rng = np.random.default_rng(seed)
    config = Config()
    config.sampling.group_size = 4
    config.trainer.keep_groups_mb = 1
    config.trainer.audit = True
    drops = Drops()
    metrics = Metrics("trainer")
    said = io.StringIO()
    totals = Counter[str]()
    lost_before = Counter[str]()
    refused_before = 0
    with Recorder(tmp_path, config, Console(file=said)) as recorder:
        log = RunLog(
            config,
            recorder,
            TrainerMetrics(metrics),
            clock=StageClock(),
            step=0,
            measured=lambda step: {"mine": step / 8},
            gpus=lambda: 3,
            collecting_cpu=time.thread_time,
            verdicts=Verdicts(seed != 3 or None),
            drops=drops,
        )
        with log.training(0, STEPS):
            page = shown(metrics)
            assert (page["trainer_step"], page["trainer_total_steps"]) == (0, STEPS)
            for step in range(1, STEPS + 1):
                fresh = [random_group(draw, rng, step, n) for n in range(draw.randint(1, 4))]
                reused = [random_group(draw, rng, step, n + 5) for n in range(draw.randint(0, 2))]
                items = [TrainingGroup(group, draw.random()) for group in fresh]
                items += [TrainingGroup(group, draw.random(), reused=True) for group in reused]
                batch = Batch.of(items, config, step - 1)
                answers = [answer for group in fresh + reused for answer in group.completions]
                batch.advantages = [
                    rng.normal(size=len(answer.token_ids)).astype(np.float32) for answer in answers
                ]
                update = PolicyUpdate(random_update(draw), [each.logprobs - 1 for each in answers])
                lost = [random_group(draw, rng, step, n + 7) for n in range(draw.randint(0, 2))]
                reason = draw.choice(["stale", "episode"])
                drops.add(lost, reason, "why")
                drops.lost_episodes.update(draw.choices(["died", "timeout"], k=draw.randint(0, 3)))
                drops.refused_calls += draw.randint(0, 2)

                record = log.step(step, batch, update, None, weights_checksum=f"sum {step}")
                equal = [
                    group
                    for group in fresh + reused
                    if len({answer.reward for answer in group.completions}) == 1
                ]
                solved = sum(group.completions[0].reward == 1 for group in equal)
                ages = [
                    step - 1 - answer.weight_version
                    for group in fresh
                    for answer in group.completions
                ]
                brief = [
                    score for each in answers if (score := each.components["brief"]) is not None
                ]
                scores = {"math": fmean(each.reward for each in answers)}
                if brief:
                    scores["brief"] = fmean(brief)
                expected = {
                    "step": step,
                    "reward": fmean(each.reward for each in answers),
                    "accuracy": fmean(each.correct for each in answers),
                    "zero_variance_groups": len(equal),
                    "solved_groups": solved,
                    "failed_groups": len(equal) - solved,
                    "reused_groups": len(reused),
                    "staleness": fmean(ages),
                    "completion_tokens": fmean(len(each.token_ids) for each in answers),
                    "truncated": fmean(each.finish_reason == "length" for each in answers),
                    "unparsable": fmean(each.status == "unparsable" for each in answers),
                    "gpus": 3,
                    "verified": True,
                    "rewards": pytest.approx(scores),
                    "logged": {"mine": step / 8},
                    "dropped": dict(drops.counts),
                    "lost_episodes": dict(drops.lost_episodes - lost_before),
                    "refused_calls": drops.refused_calls - refused_before,
                    "critic": None,
                    "weights_checksum": f"sum {step}",
                }
                for name, value in expected.items():
                    exact = isinstance(value, str | dict | bool | None) or name == "rewards"
                    assert record[name] == (value if exact else pytest.approx(value)), name
                assert record["update"]["loss"] == update.metrics.loss
                assert ("refused_calls" in record["alarms"]) == (record["refused_calls"] > 0)
                assert f"step {step:>4}/{STEPS} " in said.getvalue()
                lost_before = drops.lost_episodes.copy()
                refused_before = drops.refused_calls

                totals["trainer_trained_tokens_total"] += update.metrics.trained_tokens
                totals["trainer_updates_total applied"] += update.metrics.updates
                totals["trainer_updates_total skipped"] += update.metrics.skipped
                totals["trainer_early_stops_total"] += update.metrics.stopped_early
                totals["trainer_groups_total fresh"] += len(fresh)
                totals["trainer_groups_total reused"] += len(reused)
                totals["trainer_step_duration_seconds_count"] += 1
                if lost:
                    totals[f"trainer_dropped_groups_total {reason}"] += len(lost)
                page = shown(metrics)
                assert {name: page[name] for name in totals} == totals
                assert page["trainer_reward"] == pytest.approx(expected["reward"])
                assert page["trainer_step"] == step
                log._groups.flush()
                kept = read_trained(tmp_path, step)
                assert [item.group.id for item in kept] == [group.id for group in fresh + reused]
                for name in ("token_ids", "logprobs"):
                    rows = [getattr(each, name) for item in kept for each in item.group.completions]
                    were = [getattr(each, name) for each in answers]
                    assert all(np.array_equal(*pair) for pair in zip(rows, were, strict=True))
                assert [item.weight for item in kept] == [item.weight for item in items]
                assert [item.reused for item in kept] == [item.reused for item in items]
                computed: dict[str, Any] = {
                    "advantages": batch.advantages,
                    "logprobs": update.logprobs,
                }
                for name, columns in computed.items():
                    rows = [row for item in kept for row in getattr(item, name)]
                    assert all(np.array_equal(*pair) for pair in zip(rows, columns, strict=True))

        answer = Answer("p", "problem", "1", "1", True, 1.0)
        log.evaluation(Evaluation(STEPS, 0.5, 0.125, 1, 0.75, 8, [answer]))
        page = shown(metrics)
        assert page["trainer_evaluation_accuracy_ratio"] == 0.5
        assert page["trainer_evaluation_standard_error_ratio"] == 0.125
        assert page["trainer_evaluation_pass_ratio 8"] == 0.75
        log.report(tmp_path / "step_3")
        with pytest.raises(ZeroDivisionError), log.training(STEPS, STEPS):
            raise ZeroDivisionError
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["total_steps"] for line in lines] == [STEPS] * 3
    assert "step_3" in said.getvalue()


def log_of(directory: Path, drops: Drops, recorder: Recorder, **options: Any) -> RunLog:
    config = Config()
    config.trainer.keep_groups_mb = 1
    return RunLog(
        config,
        recorder,
        TrainerMetrics(Metrics("trainer")),
        clock=StageClock(),
        step=options.pop("step", 0),
        collecting_cpu=options.pop("collecting_cpu", lambda: 0.0),
        verdicts=Verdicts(True),
        drops=drops,
        **options,
    )


def random_step(step: int) -> tuple[Batch, PolicyUpdate]:
    draw = random.Random(step)
    rng = np.random.default_rng(step)
    groups = [random_group(draw, rng, step, place) for place in range(2)]
    batch = Batch.of([TrainingGroup(group) for group in groups], Config(), step - 1)
    answers = [answer for group in groups for answer in group.completions]
    batch.advantages = [np.zeros(len(answer.token_ids), np.float32) for answer in answers]
    return batch, PolicyUpdate(random_update(draw), [each.logprobs for each in answers])


@pytest.mark.parametrize("trained", [0, 2])
def test_a_run_that_fails_records_what_it_dropped_for_the_next_step(
    tmp_path: Path, trained: int
) -> None:
    drops = Drops()
    first = 4
    folder = tmp_path / "groups"
    folder.mkdir()
    for step in range(first - 1, first + 3):  # of an attempt that came further
        (folder / f"step_{step:06d}.zip").write_bytes(b"before")
    with Recorder(tmp_path, Config(), Console(file=io.StringIO())) as recorder:
        log = log_of(tmp_path, drops, recorder, step=first)
        with suppress(ZeroDivisionError), log.training(first, 99):
            for step in range(first + 1, first + 1 + trained):
                log.step(step, *random_step(step), None)
            drops.add([random_group(random.Random(1), np.random.default_rng(1), 9, 0)], "stale", "")
            raise ZeroDivisionError
    lines = read_lines(tmp_path / "groups.jsonl")
    assert [len(line["groups"]) for line in lines] == [2] * trained + [0]
    assert [len(line["dropped"]) for line in lines] == [0] * trained + [1]
    assert lines[-1]["step"] == first + trained + 1
    kept = [first - 1, first]
    assert sorted(recorded_steps(tmp_path)) == [*kept, *(line["step"] for line in lines)]


def test_a_step_has_the_critic_and_the_distance_to_the_teacher(tmp_path: Path) -> None:
    critic = CriticMetrics(0.5, None, 0.25, 0.75, 1.0, 2.0, skipped=1)
    config = Config()
    config.teacher.url = "http://127.0.0.1:1"
    rng = np.random.default_rng(1)
    group = random_group(random.Random(1), rng, 1, 0)
    distances = []
    for answer in group.completions:
        answer.teacher_logprobs = rng.normal(size=len(answer.token_ids)).astype(np.float32)
        distances += (answer.logprobs - answer.teacher_logprobs).tolist()
    batch = Batch.of([TrainingGroup(group)], config, 0)
    batch.advantages = [np.zeros(len(each.token_ids), np.float32) for each in group.completions]
    update = PolicyUpdate(random_update(random.Random(1)), None)
    with Recorder(tmp_path, Config(), Console(file=io.StringIO())) as recorder:
        log = log_of(tmp_path, Drops(), recorder)
        with log.training(0, 2):
            without = log.step(1, *random_step(1), None)
            record = log.step(2, batch, update, critic)
    assert "teacher_kl" not in without["update"]
    assert record["update"]["teacher_kl"] == pytest.approx(fmean(distances), abs=1e-5)
    assert record["critic"] == asdict(critic)


def test_times_are_those_of_the_clocks_without_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every clock is one of the test: the collecting thread works three quarters of the time."""
    now = 100.0
    clock = StageClock()
    seconds = dict.fromkeys((*STAGES, WAITING), 0.0) | {"update": 0.5, "waiting": 1.5}
    monkeypatch.setattr(clock, "lap", lambda: seconds)
    monkeypatch.setattr(clock, "generating", lambda: (0.5, 3.0))
    with Recorder(tmp_path, Config(), Console(file=io.StringIO())) as recorder:
        drops = Drops()
        log = log_of(tmp_path, drops, recorder, collecting_cpu=lambda: 0.75 * now)
        log._clock = clock
        log._cpu = CpuClock(lambda: now)
        with log.training(0, 2):
            now += 1.0
            first = log.step(1, *random_step(1), None)
            with log.evaluating():
                now += 40.0
            now += 0.5
            second = log.step(2, *random_step(2), None)
    assert (first["generating"], first["in_flight"]) == (0.5, 3.0 * Config().sampling.group_size)
    assert first["coordinator"] == pytest.approx(0.75 / 2)
    assert (first["cpu_seconds"], second["cpu_seconds"]) == (1.0, 0.5)
    assert first["seconds"] == seconds


def test_an_evaluation_has_a_stage_of_its_own(tmp_path: Path) -> None:
    clock = StageClock()
    stages: list[str] = []
    with Recorder(tmp_path, Config(), Console(file=io.StringIO())) as recorder:
        log = log_of(tmp_path, Drops(), recorder)
        log._clock = clock
        clock.lap()
        with log.evaluating():
            sum(range(1000))
        stages = [name for name, seconds in clock.lap().items() if seconds and name != "waiting"]
    assert stages == ["evaluation"]


def test_a_run_ends_once_its_groups_are_written(tmp_path: Path) -> None:
    (tmp_path / "groups").touch()  # no file can be written there
    with Recorder(tmp_path, Config(), Console(file=io.StringIO())) as recorder:
        log = log_of(tmp_path, Drops(), recorder)
        with pytest.raises(StorageFailed), log.training(0, 1):
            log.step(1, *random_step(1), None)
