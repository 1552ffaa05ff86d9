"""Trackers get what a run records; a tracker that hangs, raises or exits loses records and affects
nothing else."""

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common.errors import ConfigError
from common.settings.config import Config, load
from common.settings.sections import TrackersSection
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.runs.fake_trackers import END
from tests.support.services.apps import tiny
from trainer import TrainerConfig, train_in_process
from trainer.observe.run_dir import read_lines
from trainer.trackers.base import LIBRARIES, RunInfo, check
from trainer.trackers.thread import TrackerThread

FAKES = "tests.support.runs.fake_trackers"


@pytest.fixture(autouse=True)
def _no_tracker_outlives_its_test() -> Iterator[None]:
    yield
    END.set()
    for each in threading.enumerate():
        if each.name.startswith("tracker "):
            each.join(60)
            assert not each.is_alive(), each.name
    END.clear()


@pytest.fixture(autouse=True)
def frequent_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.trackers.trackers.SAMPLE_EVERY", 2)


def settings(model: Path, directory: Path, *names: str, more: tuple[str, ...] = ()) -> Config:
    """Settings of a run of two steps with these fake trackers."""
    words = [word for name in names for word in ("--trackers.names", f"{FAKES}:{name}")]
    return tiny(model, directory, *words, *more)


def kept(config: Config) -> list[list[Any]]:
    """Returns the calls that `Keeps` received."""
    assert config.trainer.run_dir is not None
    return read_calls(config.trainer.run_dir / "trackers")


def read_calls(directory: Path) -> list[list[Any]]:
    lines = (directory / "kept.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.integration
def test_a_tracker_gets_what_the_run_directory_gets(base_model: Path, tmp_path: Path) -> None:
    config = settings(
        base_model,
        tmp_path,
        "Keeps",
        more=("--evaluation.samples", "4", "--evaluation.pass_samples", "0"),
    )
    train_in_process(config, Console(quiet=True))
    assert config.trainer.run_dir is not None
    calls = kept(config)
    assert [call for call, _ in calls] == [
        *("start", "metrics", "table", "metrics"),  # the evaluation before training, then step 1
        *("metrics", "table", "metrics", "table", "close"),  # step 2, then the evaluation after it
    ]
    start = calls[0][1]
    assert (start["name"], start["project"], start["step"]) == ("run", "rlhf-math", 0)
    assert (
        start["config"]["trainer"]["batch_size"] == start["parameters"]["trainer.batch_size"] == 4
    )
    lines = read_lines(config.trainer.run_dir / "metrics.jsonl")
    steps = [
        content for call, content in calls if call == "metrics" and "reward" in content["values"]
    ]
    assert [content["step"] for content in steps] == [1, 2]
    for line, content in zip(lines, steps, strict=True):
        values = content["values"]
        assert values["reward"] == line["reward"]
        assert values["update/kl_reference"] == line["update"]["kl_reference"]
        assert values["seconds/generation"] == line["seconds"]["generation"]
    evaluation = read_lines(config.trainer.run_dir / "evaluations.jsonl")[-1]
    assert calls[6][1] == {"step": 2, "values": calls[6][1]["values"]}
    assert calls[6][1]["values"]["evaluation/standard_error"] == evaluation["standard_error"]
    samples = calls[5][1]
    first = read_lines(config.trainer.run_dir / "samples.jsonl")[-1]
    assert (samples["name"], samples["step"]) == ("samples", 2)
    shown = [dict(zip(samples["columns"], row, strict=True)) for row in samples["rows"]]
    assert [row["completion"] for row in shown] == [
        completion["text"] for completion in first["completions"]
    ]
    assert [row["reward"] for row in shown] == pytest.approx(
        [completion["reward"] for completion in first["completions"]]
    )
    assert calls[-1][1] == {"finished": True}


@pytest.mark.integration
def test_a_resumed_run_goes_on_in_the_same_run_and_a_new_one_does_not(
    base_model: Path, tmp_path: Path
) -> None:
    first = settings(base_model, tmp_path, "Keeps")
    train_in_process(first, Console(quiet=True))
    longer = settings(base_model, tmp_path, "Keeps", more=("--trainer.max_steps", "3"))
    train_in_process(longer, Console(quiet=True))
    anew = settings(
        base_model,
        tmp_path,
        "Keeps",
        more=("--checkpoint.resume", "false", "--trainer.max_steps", "1"),
    )
    train_in_process(anew, Console(quiet=True))
    starts = [content for call, content in kept(first) if call == "start"]
    assert [start["step"] for start in starts] == [0, 2, 0]
    assert starts[0]["id"] == starts[1]["id"] != starts[2]["id"]


@pytest.mark.integration
@pytest.mark.slow
def test_trackers_that_hang_raise_or_exit_cost_only_records(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-key-of-nobody")
    broken = ("Hangs", "NeverStarts", "Raises", "Exits", "Refuses")
    config = settings(base_model, tmp_path, *broken, "Keeps")
    monkeypatch.setattr("trainer.trackers.trackers._FLUSH_S", 10.0)
    output = io.StringIO()
    train_in_process(config, Console(file=output, width=1000))
    assert config.trainer.run_dir is not None
    assert [line["step"] for line in read_lines(config.trainer.run_dir / "metrics.jsonl")] == [1, 2]
    assert [
        content["step"]
        for call, content in kept(config)
        if call == "metrics" and "reward" in content["values"]
    ] == [1, 2]
    told = [line for line in output.getvalue().splitlines() if line.startswith("tracker ")]
    by_name = {
        name: [line for line in told if f"{FAKES}:{name}" in line] for name in (*broken, "Keeps")
    }
    assert "did not accept the remaining records" in by_name["Hangs"][1]
    assert "did not accept the remaining records" in by_name["NeverStarts"][0]
    assert "ConnectionError: no way to [secret]" in by_name["Raises"][1]
    assert "SystemExit: 9" in by_name["Exits"][1]
    assert "ValueError: there is no such project" in by_name["Refuses"][0]
    for name, lost in (
        ("Hangs", "3 of 3"),
        ("NeverStarts", "3 of 3"),
        ("Raises", "2 of 3"),
        ("Exits", "3 of 3"),
    ):
        assert f"{lost} records are lost" in by_name[name][-1], by_name[name]
    assert by_name["Keeps"] == [f"tracker {FAKES}:Keeps: kept.jsonl"]


def run_info(directory: Path) -> RunInfo:
    return RunInfo("abc", "run", "p", directory, {"seed": 0, "trackers": {}}, 0)


def test_a_tracker_that_does_not_return_is_said_to_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.trackers.thread.HANGS_S", 0.0)
    told = list[str]()
    thread = TrackerThread(f"{FAKES}:Hangs", run_info(tmp_path), told.append, lambda _: None)
    while not any("it hangs: one record takes longer" in line for line in told):
        thread.put("metrics", step=1, values={})
        time.sleep(0.01)
    assert sum("it hangs" in line for line in told) == 1
    thread.end(finished=True)


def test_a_queue_that_is_full_loses_records_at_once_and_says_so_once(tmp_path: Path) -> None:
    told, counted = list[str](), list[str]()
    thread = TrackerThread(
        f"{FAKES}:NeverStarts", run_info(tmp_path), told.append, counted.append, limit=2
    )
    for step in range(6):
        thread.put("metrics", step=step, values={})
    assert (thread.lost, counted) == (4, ["lost"] * 4)
    assert len(told) == 1
    assert "too slow: 2 records are already waiting" in told[0]
    thread.end(finished=True)
    thread.wait(time.monotonic())
    thread.put("metrics", step=7, values={})
    assert (thread.written, thread.lost) == (0, 7)
    assert "6 of 6 records are lost" in told[-1]


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_missing_is_named_with_the_command_that_installs_it(name: str) -> None:
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    with raises(ConfigError, field="trackers.names", value=name) as caught:
        check(TrackersSection(names=[name]))
    assert f"[{name}]" in str(caught.value.remedy)


def test_wandb_online_needs_its_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    check(TrackersSection(names=["wandb"]))
    monkeypatch.delenv("WANDB_MODE")
    with raises(ConfigError, field="WANDB_API_KEY"):
        check(TrackersSection(names=["wandb"]))


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--trackers.names", "tensorbord"], "trackers.names", "tensorbord"),
        (["--trackers.project", "mine"], "trackers.project", None),
    ],
)
def test_wrong_settings_are_refused(words: list[str], field: str, value: str | None) -> None:
    with raises(ConfigError, field=field, value=value):
        load(words, {})


def test_the_python_api_names_trackers_as_trl_does() -> None:
    config = TrainerConfig(report_to=["tensorboard", "a.b:C"], run_name="try 3")
    assert config.report_to == "tensorboard,a.b:C"
    trackers = config.to_config(64, 0, Path("out")).trackers
    assert (trackers.names, trackers.run_name) == (["tensorboard", "a.b:C"], "try 3")
    assert TrainerConfig(report_to="none").to_config(64, 0, Path("out")).trackers.names == []
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(report_to="tensorbord")
    assert (caught.value.field, caught.value.value) == ("report_to", "tensorbord")
    assert "tensorboard" in str(caught.value.remedy)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("ending", "status"), [("", 0), ("raise SystemExit(3)", 3), ("raise ValueError", 1)]
)
def test_a_hung_tracker_and_its_exit_hook_keep_no_process_from_ending(
    tmp_path: Path, ending: str, status: int
) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from trainer.trackers.base import RunInfo\n"
        "from trainer.trackers.thread import TrackerThread, exit_despite_hung_tracker\n"
        "with exit_despite_hung_tracker():\n"
        "    run = RunInfo('abc', 'run', 'p', Path(sys.argv[1]), {}, 0)\n"
        f"    thread = TrackerThread('{FAKES}:HangsAtExit', run, print, lambda result: None)\n"
        "    thread.put('metrics', step=1, values={})\n"
        "    while not (run.directory / 'kept.jsonl').exists():\n"
        "        time.sleep(0.01)\n"
        "    thread.end(True)\n"
        "    thread.wait(time.monotonic() + 1)\n"
        f"    {ending}\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == status
    assert "1 of 1 records are lost" in done.stdout
    assert ("ValueError" in done.stderr) == ("ValueError" in ending)


def test_a_tracker_that_is_left_behind_writes_nothing_later(tmp_path: Path) -> None:
    counted = list[str]()
    thread = TrackerThread(f"{FAKES}:Waits", run_info(tmp_path), lambda _: None, counted.append)
    thread.put("metrics", step=1, values={})
    thread.put("metrics", step=2, values={})
    thread.end(finished=True)
    thread.wait(time.monotonic())
    (tmp_path / "go").touch()
    for each in [each for each in threading.enumerate() if each.name == f"tracker {FAKES}:Waits"]:
        each.join()
    assert counted == ["lost", "lost"]
    assert [call for call, _ in read_calls(tmp_path)].count("metrics") <= 1
    assert "close" not in [call for call, _ in read_calls(tmp_path)]
