"""Runs a job group once for every point of a grid or list of settings, and compares the runs.

A file names the job group, the settings of all runs, and those that vary:

    jobgroup: jobgroup/rlhf-math-jobgroup.yaml
    config: jobgroup/configs/tiny-cpu.yaml     # the settings file of every run (RUN_CONFIG)
    settings: {trainer.max_steps: 30}          # of every run, over the file
    grid:                                      # every combination of these values
      optimizer.learning_rate: [1.0e-4, 5.0e-4]
      seed: [0, 1]
    points:                                    # with it or instead of it: settings of single runs
      - {algorithm.name: rloo}

Each point is a run of its own in RUNS/NAME, named after its settings. A run that has finished is
not started again, and one that was interrupted goes on from its newest checkpoint: to continue a
sweep, start it again.
"""

import hashlib
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from common.errors import ConfigError, ServiceError
from common.process.cli import CommandParser, positive, run
from common.process.storage import make_directory, storing
from common.settings.config import load, names
from common.settings.sources import packaged, read_yaml, unknown, variable, yaml_problem
from trainer.cli.compare import compare
from trainer.dashboard.run_list import RunList
from trainer.dashboard.runs import RunReader

_EPILOG = """\
examples:
  rlhf sweep sweep.yaml --list                      # the runs, without starting one
  rlhf sweep sweep.yaml                             # one run after the other
  rlhf sweep sweep.yaml --parallel 2 --runs runs/lr
  rlhf sweep sweep.yaml --cluster --runs /shared/lr # a job group a run, by SkyPilot

The runs are on the dashboard's page meanwhile: rlhf dashboard RUNS
"""
_FIELDS = ("jobgroup", "config", "settings", "grid", "points")
_JOBGROUP = "jobgroup/rlhf-math-jobgroup.yaml"
_COPY = "sweep.yaml"
"""The file of the sweep, kept in the directory of its runs."""
_MOST_POINTS = 1000
Settings = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    """Names the run's directory: the settings that vary."""
    settings: Settings
    """By name, those of all runs included."""


@dataclass(frozen=True)
class Sweep:
    """A file of a sweep, checked."""

    jobgroup: Path
    config: str
    points: tuple[Point, ...]

    def environment(self, point: Point, run_dir: Path) -> dict[str, str]:
        """Returns the variables that give a run its settings."""
        return _environment(point.settings, self.config) | {"RUN_DIR": str(run_dir)}


def parser() -> CommandParser:
    """Returns the command line."""
    usage = "FILE [--runs DIR] [--parallel N] [--cluster | --list]"
    made = CommandParser("rlhf sweep", __doc__ or "", usage, _EPILOG)
    add = made.add_argument
    add("file", type=Path, metavar="FILE", help="the file of the sweep")
    add("--runs", type=Path, metavar="DIR", help="directory of the runs (default runs/FILE's name)")
    add(
        "--parallel",
        type=positive,
        default=1,
        metavar="N",
        help="runs at a time on this machine (default 1)",
    )
    where = made.add_mutually_exclusive_group()
    where.add_argument(
        "--cluster",
        action="store_true",
        help="launch every run with SkyPilot, which queues them; DIR is then on a volume of the "
        "job group",
    )
    where.add_argument("--list", action="store_true", help="print the points and end")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the sweep. Raises ConfigError for a wrong file, SystemExit 1 when a run has failed."""
    arguments = parser().parse_args(argv)
    sweep = read(arguments.file)
    runs: Path = arguments.runs or Path("runs") / arguments.file.stem
    console = Console()

    if arguments.list:
        for point in sweep.points:
            console.print(point.name, highlight=False, soft_wrap=True)
        return
    if arguments.cluster:
        _launch(sweep, runs, console)
        return

    _keep_copy(arguments.file, runs)
    failed = _Local(sweep, runs, console).run(arguments.parallel)
    compare(RunList([runs])(), console)
    if failed:
        raise SystemExit(1)


def read(path: Path) -> Sweep:
    """Reads the file of a sweep. Raises ConfigError for a file that is not one, and for settings
    of a point that are wrong.
    """
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the file of the sweep cannot be read: {yaml_problem(error)}",
            field="FILE",
            value=str(path),
            remedy="name a YAML file; --help shows one",
        ) from None
    if not isinstance(content, dict):
        raise _wrong("FILE", content, "this is not a mapping")
    for name in content:
        if name not in _FIELDS:
            raise _wrong(
                str(name), content[name], f"there is no such field among {', '.join(_FIELDS)}"
            )

    jobgroup = packaged(Path(str(content.get("jobgroup") or _JOBGROUP)), "jobgroup")
    if not jobgroup.is_file():
        raise _wrong("jobgroup", str(jobgroup), "there is no such file")
    config = str(content.get("config") or "")
    settings = _settings("settings", content.get("settings"))
    points = tuple(_points(settings, content.get("grid"), content.get("points")))
    _check(points, config)
    return Sweep(jobgroup=jobgroup, config=config, points=points)


def _wrong(field: str, value: object, problem: str) -> ConfigError:
    return ConfigError(
        problem, field=field, value=value, remedy="--help shows what the file of a sweep looks like"
    )


def _settings(field: str, content: object) -> Settings:
    """Returns settings by name. Raises ConfigError for names that do not exist."""
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise _wrong(field, content, "this is not a mapping of settings, such as {seed: 1}")
    for name, value in content.items():
        if isinstance(value, dict) and str(name) not in names():
            raise ConfigError(
                f"{name} is a section, not a setting",
                field=f"{field}.{name}",
                value=_text(value),
                remedy=f"write each setting by its full name: {name}.{next(iter(value), 'name')}",
            )
        if name not in names():
            raise unknown(names(), str(name), f"{field}.{name}", _text(value))
    return dict(content)


def _points(settings: Settings, grid: object, points: object) -> Iterator[Point]:
    """Yields the runs of the grid, then those of the list."""
    varying = [*_combinations(grid), *_single_runs(points)]
    if not varying:
        raise _wrong("grid", grid, "nothing varies: give a grid or points")
    if len(varying) > _MOST_POINTS:
        raise _wrong("grid", len(varying), f"these are more than {_MOST_POINTS} runs")
    taken: dict[str, dict[str, str]] = {}
    for own in varying:
        texts = _environment(own, "")
        name = _name(own)
        if texts in taken.values():
            raise _wrong("points", name, "two runs have the same settings")
        if name in taken:  # it leaves out sections, special characters and what is too long
            digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()
            name = f"{name},{digest[:8]}"
        taken[name] = texts
        yield Point(name, settings | own)


def _combinations(grid: object) -> Iterator[Settings]:
    values_by_name = _settings("grid", grid)
    for name, values in values_by_name.items():
        if not isinstance(values, list) or not values:
            raise _wrong(f"grid.{name}", values, "this is not a list of values")
    if values_by_name:
        for values in itertools.product(*values_by_name.values()):
            yield dict(zip(values_by_name, values, strict=True))


def _single_runs(points: object) -> Iterator[Settings]:
    if points is not None and not isinstance(points, list):
        raise _wrong("points", points, "this is not a list of mappings")
    for number, own in enumerate(points or []):
        yield _settings(f"points[{number}]", own)


def _name(own: Settings) -> str:
    """Returns the settings as the name of a directory: `learning_rate=0.0001,algorithm=rloo`."""
    parts = []
    for name, value in own.items():
        name = name.removesuffix(".name")
        text = re.sub(r"[^A-Za-z0-9.+-]+", "_", _text(value)).strip("_")
        parts.append(f"{name.rpartition('.')[2]}={text}")
    return ",".join(parts)[:200] or "defaults"


def _text(value: object) -> str:
    """Returns a value as the text of an environment variable."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isfinite(value):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, (list, dict)):
        return yaml.safe_dump(value, default_flow_style=True, width=math.inf).strip()
    return str(value)


def _environment(settings: Settings, config: str) -> dict[str, str]:
    """Returns the variables for settings over those of the file `config`."""
    found = {variable(name): _text(value) for name, value in settings.items()}
    return found | {"RUN_CONFIG": config} if config else found


def _check(points: Sequence[Point], config: str) -> None:
    """Reads every point's settings as its run will. Raises ConfigError with the run's name."""
    for point in points:
        try:
            load([], _environment(point.settings, config))
        except ConfigError as error:
            raise ConfigError(
                f"{error.message} (run {point.name})",
                field=error.field,
                value=error.value,
                remedy=error.remedy,
            ) from None


def _keep_copy(file: Path, runs: Path) -> None:
    """Keeps the file beside its runs. Raises ConfigError when they are those of another sweep."""
    make_directory(runs, "--runs")
    copy = runs / _COPY
    text = file.read_text(encoding="utf-8")
    if copy.exists() and read_yaml(copy.read_text(encoding="utf-8")) != read_yaml(text):
        raise ConfigError(
            "this directory has the runs of a sweep with other settings",
            field="--runs",
            value=str(runs),
            remedy=f"name another directory, or compare with {copy}",
        )
    with storing(copy.name, copy, "--runs", "name another directory"):
        copy.write_text(text, encoding="utf-8")


class _Local:
    """Runs job groups on this machine, some at a time."""

    def __init__(self, sweep: Sweep, runs: Path, console: Console) -> None:
        self._sweep = sweep
        self._runs = runs
        self._console = console
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._failed = 0

    def run(self, parallel: int) -> int:
        """Runs all points; returns how many have failed. Ctrl-C ends the runs that are going on."""
        with ThreadPoolExecutor(parallel) as pool:
            try:
                list(pool.map(self._run, range(len(self._sweep.points))))
            except KeyboardInterrupt:
                self._stop()
                raise
        return self._failed

    def _run(self, index: int) -> None:
        point = self._sweep.points[index]
        run_dir = self._runs / point.name
        label = f"[{index + 1}/{len(self._sweep.points)}] {point.name}"
        if _finished(run_dir):
            self._say(f"{label}: has finished before")
            return

        make_directory(run_dir, "--runs")
        console = run_dir / "console.log"
        command = [sys.executable, "-m", "jobgroup.local", str(self._sweep.jobgroup)]
        command += ["--follow", "ppo-trainer"]
        for name, value in self._sweep.environment(point, run_dir).items():
            command += ["--env", f"{name}={value}"]
        began = time.monotonic()
        with console.open("ab") as output, self._lock:
            if self._stopped:
                return
            self._say(f"{label}: started, its output is in {console}")
            process = subprocess.Popen(command, stdout=output, stderr=output)
            self._running.add(process)
        status = process.wait()

        with self._lock:
            self._running.discard(process)
        seconds = time.monotonic() - began
        if self._stopped:
            return
        if status != 0:
            self._failed += 1
            self._say(
                f"{label}: FAILED with status {status} after {seconds:.0f} s: {_last_line(console)}"
            )
            return
        self._say(f"{label}: finished in {seconds:.0f} s")

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.send_signal(signal.SIGTERM)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _finished(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists() and RunReader(run_dir).summary().state == "finished"


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _launch(sweep: Sweep, runs: Path, console: Console) -> None:
    """Launches every run as a managed job group. Raises ServiceError when SkyPilot refuses one."""
    prefix = re.sub("[^a-z0-9]+", "-", runs.name.lower()).strip("-")
    for index, point in enumerate(sweep.points):
        name = f"{prefix}-{index}"
        command = ["sky", "jobs", "launch", str(sweep.jobgroup), "--name", name, "--yes"]
        command += ["--detach-run"]
        for key, value in sweep.environment(point, runs / point.name).items():
            command += ["--env", f"{key}={value}"]
        console.print(
            f"[{index + 1}/{len(sweep.points)}] {point.name}: job group {name}", markup=False
        )
        try:
            status = subprocess.run(command, check=False, env=os.environ).returncode
        except FileNotFoundError:
            raise ConfigError(
                "there is no program sky",
                field="--cluster",
                remedy="install SkyPilot (docs/how-to/clusters.md), or leave --cluster out",
            ) from None
        if status != 0:
            raise ServiceError(f"sky jobs launch ended with status {status} for {point.name}")
    console.print("sky jobs queue shows them")


if __name__ == "__main__":
    run(main, ": start the sweep again to go on")
