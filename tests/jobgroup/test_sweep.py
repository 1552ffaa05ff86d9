"""A sweep reads its file before anything starts, runs every point, goes on where it was, and
launches through SkyPilot.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import ConfigError
from jobgroup.sweep import main, read
from tests.support.paths import ROOT

GROUP = """\
name: small
execution: parallel
primary_tasks: [ppo-trainer]
---
name: ppo-trainer
run: |
  mkdir -p "$RUN_DIR"
  echo "$RLHF_OPTIMIZER__LEARNING_RATE $RLHF_SEED" >> "$RUN_DIR/started"
  {then}
"""
FINISH = """\
echo '{"step": 1, "total_steps": 1, "reward": 0.5}' > "$RUN_DIR/metrics.jsonl"
  echo '{}' > "$RUN_DIR/config.json"
"""
SWEEP = """\
jobgroup: {group}
settings: {{seed: 3}}
grid:
  optimizer.learning_rate: [1.0e-4, 5.0e-4]
points:
  - {{algorithm.name: rloo, data.source: math, data.levels: [4, 5]}}
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of three runs of a job group that ends at once."""
    (tmp_path / "group.yaml").write_text(GROUP.replace("{then}", FINISH))
    path = tmp_path / "lr.yaml"
    path.write_text(SWEEP.format(group=tmp_path / "group.yaml"))
    return path


def test_points_are_the_grid_and_the_list(sweep: Path) -> None:
    found = read(sweep)
    assert [point.name for point in found.points] == [
        "learning_rate=0.0001",
        "learning_rate=0.0005",
        "algorithm=rloo,source=math,levels=4_5",
    ]
    assert found.options(found.points[2], Path("runs/x"))[1::2] == [
        "RLHF_SEED=3",
        "RLHF_ALGORITHM__NAME=rloo",
        "RLHF_DATA__SOURCE=math",
        "RLHF_DATA__LEVELS=[4, 5]",
        "RUN_DIR=runs/x",
    ]


def test_numbers_arrive_exactly_and_near_ones_are_different_runs(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    rates = [1.23456789e-5, 1.2345679e-5, 0.1 + 0.2, 0.3, 1e-4, 5.0, 1 / 3]
    path.write_text(json.dumps({"grid": {"optimizer.learning_rate": rates}}))
    found = read(path)
    for rate, point in zip(rates, found.points, strict=True):
        given = found.options(point, tmp_path)[1].removeprefix("RLHF_OPTIMIZER__LEARNING_RATE=")
        assert float(given) == rate
        assert point.name == f"learning_rate={given}"
    assert [point.name.split("=")[1] for point in found.points[3:6]] == ["0.3", "0.0001", "5"]


@pytest.mark.parametrize(
    "points",
    [
        [{"optimizer.learning_rate": 0.5}, {"critic.learning_rate": 0.5}],
        [{"model.name": "a/b"}, {"model.name": "a_b"}],
        [{"model.name": "a" * 250}, {"model.name": "a" * 250 + "b"}],
    ],
)
def test_other_settings_are_another_run_even_if_their_names_are_alike(
    tmp_path: Path, points: list[dict[str, object]]
) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(json.dumps({"points": points, "settings": {"algorithm.name": "ppo"}}))
    first, second = read(path).points
    assert second.name.startswith(f"{first.name},")
    assert [first.settings, second.settings] == [
        {"algorithm.name": "ppo", **point} for point in points
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("grid: {seed: [1, 1.0]}", "two runs have the same settings"),
        ("grid: {trainer.learning_rat: [1]}", "no setting trainer.learning_rat"),
        ("grid: {optimizer.learning_rate: 1.0e-4}", "grid.optimizer.learning_rate|a valid list"),
        ("grid: {algorithm.clip_low: [0.2, -1]}", "clip_low=-1"),
        ("grid: {seed: [0, 0]}", "two runs have the same settings"),
        ("settings: {seed: 1}", "nothing varies"),
        ("gird: {seed: [0]}", "FILE.gird|no such field"),
        ("points: {seed: 0}", "points|a valid list"),
        ("[1]", "a valid dict"),
        ("grid: {seed: [0]}\njobgroup: nowhere.yaml", "jobgroup|nowhere.yaml"),
        ("grid: [", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_starts(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        main([str(path), "--runs", str(tmp_path / "runs")])
    found = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for part in told.split("|"):
        assert part in found
    assert not (tmp_path / "runs").exists()


RUNNER = """\
#!/bin/sh
# Stands for `python -m jobgroup.local GROUP --follow ppo-trainer --env NAME=VALUE …`
for word; do case "$word" in RUN_DIR=*) dir="${word#RUN_DIR=}";; esac; done
echo "$@" >> "$dir/started"
case "$dir" in *rate=0.0001) echo before; echo no luck; exit 3;; esac
echo '{"step": 1, "total_steps": 1, "reward": 0.5}' > "$dir/metrics.jsonl"
echo '{}' > "$dir/config.json"
"""


def test_runs_are_started_with_their_options_and_counted(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = sweep.parent / "runner"
    runner.write_text(RUNNER)
    runner.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(runner))
    runs = sweep.parent / "runs"
    with pytest.raises(SystemExit) as ended:
        main([str(sweep), "--runs", str(runs)])
    assert ended.value.code == 1
    found = read(sweep)
    for point in found.points:
        options = " ".join(found.options(point, runs / point.name))
        command = f"-m jobgroup.local {sweep.parent / 'group.yaml'} --follow ppo-trainer {options}"
        assert (runs / point.name / "started").read_text() == f"{command}\n"
    assert (runs / "learning_rate=0.0001" / "console.log").read_text() == "before\nno luck\n"
    assert (runs / "sweep.yaml").read_text() == sweep.read_text()
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in said if "FAILED" in line] == ["no luck"]
    compared = " ".join(line for line in said if not line.startswith("["))
    assert "learning_rate=0.0005" in compared

    # Everything runs that has not finished, and only that.
    runner.write_text(RUNNER.replace("exit 3", ":"))
    main([str(sweep), "--runs", str(runs)])
    starts = [(runs / point.name / "started").read_text().count("\n") for point in found.points]
    assert starts == [2, 1, 1]

    runs.joinpath("sweep.yaml").write_text("grid: {seed: [9]}")
    with pytest.raises(ConfigError) as refused:
        main([str(sweep), "--runs", str(runs)])
    assert (refused.value.field, refused.value.value) == ("--runs", str(runs))


@pytest.mark.integration
def test_every_point_runs_once_and_a_second_start_runs_what_is_missing(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = sweep.parent / "runs"
    main([str(sweep), "--runs", str(runs), "--parallel", "2"])
    (runs / "learning_rate=0.0005" / "metrics.jsonl").unlink()  # as if it had been interrupted
    main([str(sweep), "--runs", str(runs)])

    started = {path.parent.name: path.read_text() for path in sorted(runs.glob("*/started"))}
    assert started == {
        "learning_rate=0.0001": "0.0001 3\n",
        "learning_rate=0.0005": "0.0005 3\n" * 2,
        "algorithm=rloo,source=math,levels=4_5": " 3\n",
    }
    assert capsys.readouterr().out.count("has finished before") == 2

    sweep.write_text(sweep.read_text().replace("seed: 3", "seed: 4"))
    with pytest.raises(ConfigError, match="other settings"):
        main([str(sweep), "--runs", str(runs)])


@pytest.mark.integration
def test_a_run_that_fails_is_named_with_its_last_line_and_the_others_go_on(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fail = '[ "$RLHF_OPTIMIZER__LEARNING_RATE" != 0.0001 ] || { echo no luck; exit 3; }\n  '
    group = sweep.parent / "group.yaml"
    group.write_text(group.read_text().replace('echo \'{"step"', fail + 'echo \'{"step"'))
    with pytest.raises(SystemExit) as ended:
        main([str(sweep), "--runs", str(sweep.parent / "runs")])
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "[1/3] learning_rate=0.0001: FAILED with status 3" in said
    assert said.count(": finished in") == 2


@pytest.mark.integration
def test_ctrl_c_ends_the_run_that_is_going_on(sweep: Path) -> None:
    group = sweep.parent / "group.yaml"
    group.write_text(GROUP.replace("{then}", "sleep 600 & echo $! > $RUN_DIR/pid; wait"))
    runs = sweep.parent / "runs"
    command = [sys.executable, "-m", "jobgroup.sweep", str(sweep), "--runs", str(runs)]
    # The signal is not ignored, as it is where the tests are a shell's background job.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid = runs / "learning_rate=0.0001" / "pid"
    while not (pid.exists() and pid.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "start the sweep again to go on" in said
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()
    assert not (runs / "learning_rate=0.0005").exists()


def test_the_list_has_the_variables_of_every_run(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(sweep), "--list", "--runs", "/shared/lr"])

    first, _, last = capsys.readouterr().out.splitlines()
    assert first == (
        "learning_rate=0.0001: --env RLHF_SEED=3 --env RLHF_OPTIMIZER__LEARNING_RATE=0.0001 "
        "--env RUN_DIR=/shared/lr/learning_rate=0.0001"
    )
    assert "--env 'RLHF_DATA__LEVELS=[4, 5]'" in last
