"""What trackers are given, and when: no library is needed, and no model."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import ConfigError
from common.settings.config import from_mapping
from common.settings.sections import TrackersSection
from tests.support.errors import raises
from tests.support.runs.recorded_groups import group
from trainer.evaluation.evaluation import Answer
from trainer.trackers import trackers as trackers_module
from trainer.trackers.base import RunInfo, check, numbers
from trainer.trackers.thread import TrackerThread
from trainer.trackers.trackers import Trackers

KEEPS = "tests.support.runs.fake_trackers:Keeps"


@pytest.fixture(autouse=True)
def _nothing_is_left_or_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers set variables of the process for good, and are given up after seconds."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for limit in ("_FLUSH_S", "_INTERRUPTED_S"):
        monkeypatch.setattr(trackers_module, limit, 400.0)


def made(
    directory: Path, *, step: int = 0, resume: bool = True, names: Sequence[str] = (KEEPS,)
) -> Trackers:
    content = {"trackers.names": list(names), "checkpoint.resume": resume}
    return Trackers(from_mapping(content), directory, step, say=lambda _: None)


def kept(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = (directory / "trackers/kept.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        call, content = json.loads(line)
        yield call, content


def test_numbers_are_finite_also_as_float32() -> None:
    draw = np.random.default_rng(0)
    drawn = [float(10.0**power * sign) for power in range(-45, 60) for sign in (1, -4)]
    drawn += [*draw.normal(size=20).tolist(), np.inf, -np.inf, np.nan]
    record = {"of": {str(place): value for place, value in enumerate(drawn)}, "is": True, "n": 3}
    found = numbers(record, "/")
    assert found.keys().isdisjoint(["is"])
    with np.errstate(over="ignore"):
        are_finite = np.isfinite(np.array(list(found.values()), np.float32))
    assert are_finite.all()
    small = {f"of/{place}": value for place, value in enumerate(drawn) if abs(value) <= 1e37}
    assert found.items() >= (small | {"n": 3.0}).items()


@pytest.mark.parametrize(
    ("mode", "is_sent"),
    [(None, True), ("online", True), ("offline", False), ("disabled", False)],
)
def test_wandb_needs_a_key_where_it_sends(
    mode: str | None, is_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.trackers.base.find_spec", lambda name: name)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    settings = TrackersSection(names=["wandb"])
    if is_sent:
        with raises(ConfigError, field="WANDB_API_KEY"):
            check(settings)
        monkeypatch.setenv("WANDB_API_KEY", "a-key-of-nobody")
    check(settings)
    check(TrackersSection(names=["mlflow"]))


def test_a_run_is_the_same_for_its_trackers_unless_it_begins_anew(tmp_path: Path) -> None:
    """Also one that was interrupted before its first checkpoint, and continues after step 0."""
    attempts = [(0, True), (0, True), (4, True), (4, False), (0, False), (0, True)]
    for step, resume in attempts:
        made(tmp_path, step=step, resume=resume).close(finished=True)
    starts = [content for call, content in kept(tmp_path) if call == "start"]
    assert [start["step"] for start in starts] == [step for step, _ in attempts]
    ids = [start["id"] for start in starts]
    assert ids[0] == ids[1] == ids[2] == ids[3] != ids[4] == ids[5]


@pytest.mark.parametrize("finished", [True, False])
def test_a_tracker_is_told_whether_the_run_finished(tmp_path: Path, finished: bool) -> None:
    made(tmp_path).close(finished=finished)
    assert [content for call, content in kept(tmp_path) if call == "close"] == [
        {"finished": finished}
    ]


def test_a_sample_has_a_verdict_only_where_one_was_given(tmp_path: Path) -> None:
    trackers = made(tmp_path)
    sampled = group(1, [1.0, 0.0, 1.0], ["a", "b" * 5000, "c"])
    sampled.completions[2].verified = False
    for step in (trackers_module.SAMPLE_EVERY - 1, trackers_module.SAMPLE_EVERY):
        trackers.step({"step": step, "reward": 0.5}, sampled)
    trackers.close(finished=True)
    (table,) = [content for call, content in kept(tmp_path) if call == "table"]
    assert table["step"] == trackers_module.SAMPLE_EVERY
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert [row["correct"] for row in rows] == [True, False, None]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 1.0]
    assert rows[1]["completion"] == "b" * 4000 + "…"
    assert [row["tokens"] for row in rows] == [7, 7, 7]


def test_the_first_answers_of_an_evaluation_are_shown(tmp_path: Path) -> None:
    trackers = made(tmp_path)
    answers = [
        Answer(f"id {place}", f"problem {place}", "5", response=f"#### {place}", correct=place == 5)
        for place in range(trackers_module._MAX_ROWS + 6)
    ]
    trackers.evaluation({"step": 3, "accuracy": 0.5}, answers)
    trackers.evaluation({"step": 4, "accuracy": 0.5}, [])
    trackers.close(finished=True)
    calls = [(call, content) for call, content in kept(tmp_path) if call in ("metrics", "table")]
    assert [call for call, _ in calls] == ["metrics", "table", "metrics"]
    assert calls[0][1]["values"] == {"evaluation/accuracy": 0.5, "evaluation/step": 3.0}
    prompts = [row[0] for row in calls[1][1]["rows"]]
    assert prompts == [f"problem {place}" for place in range(trackers_module._MAX_ROWS)]


def test_all_trackers_flush_before_the_first_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first that hangs leaves the others no time."""
    calls: list[tuple[str, str]] = []

    class Noting:
        def __init__(self, name: str, *_: object) -> None:
            self._name = name

        def end(self, finished: bool) -> None:
            calls.append(("end", self._name))

        def wait(self, deadline: float) -> None:
            calls.append(("wait", self._name))

    monkeypatch.setattr(trackers_module, "TrackerThread", Noting)
    names = [KEEPS, KEEPS.replace("Keeps", "Hangs")]
    made(tmp_path, names=names).close(finished=True)
    assert calls == [(call, name) for call in ("end", "wait") for name in names]


class _Client:
    """What the tracker calls of MLflow's."""

    def __init__(self, tracking_uri: str) -> None:
        self.logged: list[tuple[str, float, int, int]] = []
        self.ended: list[str] = []

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1")

    def search_runs(self, *_: object, **__: object) -> list[Any]:
        return [SimpleNamespace(info=SimpleNamespace(run_id="2"))]

    def update_run(self, run: str, status: str) -> None:
        assert (run, status) == ("2", "RUNNING")

    def log_batch(self, run: str, metrics: list[tuple[str, float, int, int]]) -> None:
        self.logged += metrics

    def set_terminated(self, run: str, status: str) -> None:
        self.ended.append(status)


def test_mlflow_counts_time_in_milliseconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[_Client] = []

    def client(tracking_uri: str) -> _Client:
        clients.append(_Client(tracking_uri))
        return clients[0]

    library = ModuleType("mlflow")
    entities = ModuleType("mlflow.entities")
    monkeypatch.setattr(library, "MlflowClient", client, raising=False)
    for name in ("Metric", "Param"):
        monkeypatch.setattr(entities, name, lambda *fields: fields, raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", library)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    # Under a name of its own: the module itself is not to be left with a stand-in.
    file = Path(trackers_module.__file__).with_name("to_mlflow.py")
    spec = spec_from_file_location("to_mlflow_of_a_test", file)
    assert spec is not None
    assert spec.loader is not None
    to_mlflow = module_from_spec(spec)
    spec.loader.exec_module(to_mlflow)
    monkeypatch.setattr(to_mlflow, "time", SimpleNamespace(time=lambda: 1234.5678))
    run = RunInfo("abc", "run", "p", tmp_path, {"seed": 0}, 0)
    for finished in (True, False):
        tracker = to_mlflow.MlflowTracker(run)
        tracker.metrics(3, {"reward": 0.5})
        tracker.close(finished)
    assert clients[0].logged == [("reward", 0.5, 1_234_567, 3)] * 2
    assert clients[0].ended == ["FINISHED", "KILLED"]


def test_a_reason_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-key-of-nobody")
    told: list[str] = []
    thread = TrackerThread(
        KEEPS.replace("Keeps", "Raises"),
        RunInfo("abc", "run", "p", tmp_path, {}, 0),
        told.append,
        lambda _: None,
    )
    thread.put("metrics", step=1, values={})
    thread.end(finished=True)
    thread.wait(time.monotonic() + 400)
    assert any("no way to [secret]" in line for line in told), told
