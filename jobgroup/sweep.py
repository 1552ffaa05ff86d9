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

import asyncio
import itertools
import math
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console

from common.errors import ConfigError
from common.process.cli import CommandParser, positive, run
from common.process.storage import make_directory, storing
from common.settings.config import load, names
from common.settings.sources import packaged, read_yaml, unknown, variable, yaml_problem
from jobgroup import spec
from trainer.cli.compare import compare
from trainer.dashboard.run_list import RunList
from trainer.dashboard.runs import RunReader

_EPILOG = """\
examples:
  rlhf sweep sweep.yaml --list                      # the runs and their variables, without a start
  rlhf sweep sweep.yaml                             # one run after the other
  rlhf sweep sweep.yaml --parallel 2 --runs runs/lr

The runs are on the dashboard's page meanwhile: rlhf dashboard RUNS
"""
_COPY = "sweep.yaml"
"""The file of the sweep, kept in the directory of its runs."""
_MOST_POINTS = 1000
_REMEDY = "--help shows what the file of a sweep looks like"
Settings = dict[str, Any]


class _File(BaseModel):
    """The content of the file of a sweep."""

    model_config = ConfigDict(extra="forbid")

    jobgroup: Path = Path("jobgroup/rlhf-math-jobgroup.yaml")
    config: str = ""
    settings: Settings = {}
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    points: list[Settings] = []


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

    def options(self, point: Point, run_dir: Path) -> list[str]:
        """Returns the options of `rlhf local` and `sky jobs launch` that give a run its
        settings.
        """
        variables = _environment(point.settings, self.config) | {"RUN_DIR": str(run_dir)}
        words = []
        for name, value in variables.items():
            words += ["--env", f"{name}={value}"]
        return words


def parser() -> CommandParser:
    """Returns the command line."""
    usage = "FILE [--runs DIR] [--parallel N | --list]"
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
    add("--list", action="store_true", help="print every run with its variables, and end")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the sweep. Raises ConfigError for a wrong file, SystemExit 1 when a run has failed."""
    arguments = parser().parse_args(argv)
    sweep = read(arguments.file)
    runs: Path = arguments.runs or Path("runs") / arguments.file.stem
    console = Console()

    if arguments.list:
        for point in sweep.points:
            options = sweep.options(point, runs / point.name)
            _say(console, f"{point.name}: {shlex.join(options)}")
        return

    _keep_copy(arguments.file, runs)
    failed = asyncio.run(_run_here(sweep, runs, arguments.parallel, console))
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
    file = spec.validated(_File, content, "FILE", remedy=_REMEDY)
    jobgroup = packaged(file.jobgroup, "jobgroup")
    if not jobgroup.is_file():
        raise _wrong("jobgroup", str(jobgroup), "there is no such file")
    points = tuple(_points(file))
    _check(points, file.config)
    return Sweep(jobgroup=jobgroup, config=file.config, points=points)


def _wrong(field: str, value: object, problem: str) -> ConfigError:
    return ConfigError(problem, field=field, value=value, remedy=_REMEDY)


def _refuse_unknown(field: str, settings: Settings) -> None:
    """Raises ConfigError for names that are no settings, sections included."""
    for name, value in settings.items():
        if name not in names():
            raise unknown(names(), str(name), f"{field}.{name}", _text(value))


def _points(file: "_File") -> Iterator[Point]:
    """Yields the runs of the grid, then those of the list."""
    for field, settings in (("settings", file.settings), ("grid", file.grid)):
        _refuse_unknown(field, settings)
    varying: list[Settings] = []
    if file.grid:
        for values in itertools.product(*file.grid.values()):
            varying.append(dict(zip(file.grid, values, strict=True)))
    for number, own in enumerate(file.points):
        _refuse_unknown(f"points[{number}]", own)
        varying.append(own)
    if not varying:
        raise _wrong("grid", file.grid, "nothing varies: give a grid or points")
    if len(varying) > _MOST_POINTS:
        raise _wrong("grid", len(varying), f"these are more than {_MOST_POINTS} runs")

    taken: dict[str, dict[str, str]] = {}
    for own in varying:
        texts = _environment(own, "")
        name = _name(own)
        if texts in taken.values():
            raise _wrong("points", name, "two runs have the same settings")
        if name in taken:  # it leaves out sections, special characters and what is too long
            name = f"{name},{len(taken)}"
        taken[name] = texts
        yield Point(name, file.settings | own)


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
            error.add_note(f"in the run {point.name}")
            raise


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


async def _run_here(sweep: Sweep, runs: Path, parallel: int, console: Console) -> int:
    """Runs all points on this machine, `parallel` at a time; returns how many have failed. When it
    is cancelled (Ctrl-C), it ends the runs that are going on.
    """
    slots = asyncio.Semaphore(parallel)

    async def run(index: int, point: Point) -> bool:
        async with slots:
            label = f"[{index}/{len(sweep.points)}] {point.name}"
            return await _run_point(sweep, point, runs / point.name, label, console)

    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(run(*each)) for each in enumerate(sweep.points, start=1)]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return sum(not task.result() for task in started)


async def _run_point(
    sweep: Sweep, point: Point, run_dir: Path, label: str, console: Console
) -> bool:
    """Runs a point, unless it has finished before; returns whether it succeeded."""
    if _finished(run_dir):
        _say(console, f"{label}: has finished before")
        return True

    make_directory(run_dir, "--runs")
    log = run_dir / "console.log"
    command = [sys.executable, "-m", "jobgroup.local", str(sweep.jobgroup)]
    command += ["--follow", "ppo-trainer", *sweep.options(point, run_dir)]
    began = time.monotonic()
    with log.open("ab") as output:
        _say(console, f"{label}: started, its output is in {log}")
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        status = await process.wait()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):  # it has just ended
            process.terminate()
        await process.wait()
        raise

    seconds = time.monotonic() - began
    if status == 0:
        _say(console, f"{label}: finished in {seconds:.0f} s")
        return True
    last = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
    _say(console, f"{label}: FAILED with status {status} after {seconds:.0f} s: {last}")
    return False


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _finished(run_dir: Path) -> bool:
    return (run_dir / "metrics.jsonl").exists() and RunReader(run_dir).summary().state == "finished"


if __name__ == "__main__":
    run(main, ": start the sweep again to go on")
