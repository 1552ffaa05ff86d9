"""Writes the run directory and the console output.

The directory contains `config.json` (resolved configuration), `metrics.jsonl` (a line per step),
`groups.jsonl` and `groups/` (groups of each step: `trainer.observe.group_files`),
`evaluations.jsonl`, `samples.jsonl` (one graded group per step), `attempts.jsonl` (a line per
start), `curves.png`, `checkpoints/` and `weights/`.
"""

import io
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self, cast

from prometheus_client import Counter
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from common.errors import ConfigError, shorten
from common.process.logs import SHOWN, is_set_up, structured
from common.process.storage import storing
from common.settings.config import Config
from common.wire.codec import group_json
from common.wire.schemas import Group
from trainer.evaluation.evaluation import Answer, Evaluation
from trainer.evaluation.uncertainty import accuracy_text
from trainer.observe.hints import hints, remember
from trainer.observe.output import Output
from trainer.timing import STAGES, WAITING
from trainer.trackers.base import numbers
from trainer.trackers.trackers import Trackers

log = logging.getLogger("run")
_SHOWN_PROBLEMS = 3
Line = dict[str, Any]
ATTEMPTS = "attempts.jsonl"
PLACES = frozenset({"state_dir", "trainer.run_dir", "trackers.run_name"})
"""Settings that are specific to each run and do not affect training."""
STEP_FILES = ("metrics", "groups", "samples")
"""The files with a line for each step of every run."""
_AGAIN_AFTER = 20
"""Steps until the same alarm or hint is logged again; `metrics.jsonl` has every occurrence."""


@dataclass
class StepRecord:
    """One line of `metrics.jsonl`; `trainer.observe.metrics` says what each number is."""

    step: int
    reward: float
    accuracy: float | None
    """None, like the next two counts, when the rewards are not verdicts (`verified`)."""
    zero_variance_groups: int
    solved_groups: int | None
    failed_groups: int | None
    reused_groups: int
    staleness: float
    completion_tokens: float
    truncated: float
    unparsable: float
    dropped: dict[str, int]
    seconds: dict[str, float]
    generating: float
    in_flight: float
    coordinator: float
    cpu_seconds: float
    update: dict[str, float]
    critic: dict[str, float | None] | None
    """None without a critic."""
    alarms: dict[str, str]
    """Alarms by name, with the likely cause (`trainer.observe.alarms`)."""
    hints: dict[str, str] = field(default_factory=dict)
    """Hints by name (`trainer.observe.hints`); the recorder adds them."""
    gpus: int | None = None
    """None when external servers generate."""
    verified: bool = True
    """Whether the rewards are verdicts on correctness: the same in all lines of a run."""
    lost_episodes: dict[str, int] = field(default_factory=dict)
    """Episodes without a reward since the last step, by status."""
    refused_calls: int = 0
    weights_checksum: str | None = None
    """The checksum of the weights after the step, with `reproducible`."""
    copies: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)


class Recorder:
    """Writes the run directory and prints to the console.

    The run continues after `step`: lines of later steps are removed, and a warning names earlier
    steps without a line. `tracked` counts records for trackers; `run_id` names this attempt;
    `data` says where the prompts come from if not from `data.source`; `verdicts` whether the
    rewards are verdicts, None when the first answers decide; `files` are those with a line per
    step; `words` gives settings in a hint or alarm the names that this user knows.
    """

    def __init__(
        self,
        directory: Path,
        config: Config,
        console: Console,
        *,
        step: int = 0,
        tracked: Counter | None = None,
        run_id: str = "",
        data: str = "",
        verdicts: bool | None = None,
        files: Sequence[str] = STEP_FILES,
        words: Callable[[str], str] = lambda text: text,
    ) -> None:
        self.directory = directory
        self.console = console
        self._config = config
        settings = directory / "config.json"
        before = _settings_in(settings) if step else {}
        with storing_run(settings):
            directory.mkdir(parents=True, exist_ok=True)
            settings.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        kept = {
            f"{name}.jsonl": _keep_before(directory / f"{name}.jsonl", step + 1) for name in files
        }
        evaluated = _keep_before(directory / "evaluations.jsonl", step + 1 if step else 0)
        _keep_before(directory / ATTEMPTS, sys.maxsize)  # drops a last line that a crash cut
        attempt = {"time": time.time(), "run_id": run_id, "step": step, "verdicts": verdicts}
        append_line(directory / ATTEMPTS, {**attempt, "data": data or config.data.source})
        self._words = words
        self._progress: Progress | None = None
        self._total = 0
        self._warned: dict[str, int] = {}
        self._history: list[Mapping[str, Any]] = []
        for line in read_lines(directory / "metrics.jsonl"):
            remember(self._history, line)
        self._tell_changes(before)
        for name, there in kept.items():
            self._tell_gap(name, [number for number in range(1, step + 1) if number not in there])
        if step and config.evaluation.samples:
            self._tell_gap("evaluations.jsonl", [0] if 0 not in evaluated else [])
        self._trackers = Trackers(config, directory, step, say=self.say, counted=tracked)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._trackers.close(finished=kind is None)

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Writes text to the console and the log; only to the log when logs are JSON."""
        tell(self.console, text, level)

    def _tell_gap(self, name: str, lost: list[int]) -> None:
        """Warns of steps before a resume that a file lacks. Training does not need them; curves and
        report do.
        """
        if lost:
            which = (
                f"step {lost[0]}"
                if len(lost) == 1
                else f"{len(lost)} of the steps {lost[0]} to {lost[-1]}"
            )
            text = f"{name} lacks {which}, which the checkpoint has: the file was cut or removed"
            self.say(
                f"warning: {text}; training continues, but curves, report and dashboard lack them",
                logging.WARNING,
            )

    def _tell_changes(self, before: Mapping[str, Any]) -> None:
        """Says which settings have changed since `before`: nothing else would show it."""
        changes = []
        for name, value in _settings_in(self.directory / "config.json").items():
            was = before.get(name, value)
            if was != value and name not in PLACES:
                changes.append(f"{name} {shorten(was)} → {shorten(value)}")
        if changes:
            self.say(self._words(f"settings changed since the last attempt: {', '.join(changes)}"))

    def show(self, table: Table) -> None:
        """Writes a table to the console and the log."""
        text = io.StringIO()
        Console(file=text, width=min(120, self.console.width)).print(table)
        self.say(text.getvalue())

    @contextmanager
    def progress(self, done: int, total: int) -> Iterator[None]:
        """Shows a progress bar inside the block, on a terminal only."""
        self._total = total
        with progress_bar("training", self.console, hidden=structured() is not None) as progress:
            self._progress = progress
            self._task = progress.add_task("training", completed=done, total=total)
            yield
        self._progress = None

    def step(self, record: StepRecord, groups: Sequence[Group]) -> None:
        self._append("samples", {"step": record.step, **group_json(groups[0])})
        remember(self._history, asdict(record))
        record.hints = self._in_words(hints(self._history, self._config))
        record.alarms = self._in_words(record.alarms)
        self.measured(record.__dict__, step_line(record, self._total), groups[0])
        self._warn("alarm", record.step, record.alarms)
        self._warn("hint", record.step, record.hints)

    def _in_words(self, texts: Mapping[str, str]) -> dict[str, str]:
        return {name: self._words(text) for name, text in texts.items()}

    def measured(self, record: Mapping[str, Any], text: str, group: Group | None = None) -> None:
        """Writes the numbers of a step and prints `text`; trackers get them, and sometimes the
        samples of `group`.
        """
        self._append("metrics", {"time": time.time(), "total_steps": self._total, **record})
        self._trackers.step(record, group)
        self.say(text)
        if self._progress is not None:
            self._progress.update(self._task, completed=record["step"])

    def _warn(self, kind: str, step: int, texts: Mapping[str, str]) -> None:
        """Logs new alarms or hints, and repeats those that persist."""
        for name, text in texts.items():
            if step - self._warned.get(f"{kind} {name}", -_AGAIN_AFTER) >= _AGAIN_AFTER:
                self._warned[f"{kind} {name}"] = step
                self.say(f"{kind}: {text}", logging.WARNING)

    def evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.accuracy is None:
            result = f"held-out reward {evaluation.mean_reward:.3f}"
        else:
            error = evaluation.standard_error or 0.0
            result = accuracy_text(evaluation.accuracy, error, evaluation.num_samples)
            result = f"held-out accuracy {result}"
        problems = f"{evaluation.num_samples} problems"
        if evaluation.trained_on:
            problems += f", {evaluation.trained_on} of which were trained on"
        text = f"evaluation at step {evaluation.step}: {result} ({problems})"
        if evaluation.pass_at_k is not None:
            text += f"  pass@{evaluation.k} {evaluation.pass_at_k:.3f}"
        self.evaluated(evaluation.summary(), text, evaluation.answers)
        if evaluation.trained_on:
            leaked = (
                f"{evaluation.trained_on} of {evaluation.num_samples} held-out problems were "
                "trained on: the evaluation measures what was memorised, too. Remove them from the "
                "training data, or evaluate on others"
            )
            self._warn("warning", evaluation.step, {"trained_on": leaked})

    def evaluated(
        self, summary: Mapping[str, Any], text: str, answers: Sequence[Answer] = ()
    ) -> None:
        """Writes an evaluation, passes it to the trackers and prints `text`."""
        # Drops the lines of a killed attempt.
        _keep_before(self.directory / "evaluations.jsonl", summary["step"])
        line = {"time": time.time(), **summary}
        if answers:
            line["answers"] = [answer.__dict__ for answer in answers]
        self._append("evaluations", line)
        self._trackers.evaluation(summary, answers)
        self.say(text)

    def report(self, checkpoint: Path) -> None:
        """Writes the curves, and prints seconds by stage, evaluations before and after, sample
        problems if there are any, and paths.
        """
        from trainer.observe.plots import plot_curves  # heavy: matplotlib

        metrics = read_lines(self.directory / "metrics.jsonl")
        evaluations = read_lines(self.directory / "evaluations.jsonl")
        curves = self.directory / "curves.png"
        with storing("curves.png", curves, "trainer.run_dir", f"use {checkpoint}: it is complete"):
            plot_curves(metrics, evaluations, curves)
        self.show(seconds_table(metrics))
        if len(evaluations) >= 2:
            before = evaluations[0]
            after = evaluations[-1]
            self.show(_comparison_table(before, after))
            for old, new in _interesting(before.get("answers", []), after.get("answers", [])):
                self.say(f"\nproblem: {old['prompt']}  (answer {old['ground_truth']})")
                self.say(f"  before: {_one_line(old)}\n  after:  {_one_line(new)}")
        self.say(f"\ncurves:     {curves}\ncheckpoint: {checkpoint}\nrun:        {self.directory}")

    def _append(self, name: str, content: dict[str, Any]) -> None:
        append_line(self.directory / f"{name}.jsonl", content)


def tell(console: Console, text: str, level: int = logging.INFO) -> None:
    """Writes text to the console and the log; only to the log when logs are JSON."""
    if console.quiet or is_set_up():
        log.log(level, "%s", text, extra=SHOWN)
    if structured() is None:
        # `module:Fire: text` is no picture of a fire.
        console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def run_ids(directory: Path) -> list[str]:
    """Returns the ids of all attempts of the run in `directory`; they are the prefixes of its group
    ids.
    """
    return [line["run_id"] for line in read_lines(directory / ATTEMPTS)]


def _settings_in(path: Path) -> dict[str, Any]:
    """Returns the settings in a `config.json` by name; none if it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
        sections = {name: value for name, value in content.items() if isinstance(value, dict)}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    found = {name: value for name, value in content.items() if name not in sections}
    for section, values in sections.items():
        found |= {f"{section}.{name}": value for name, value in values.items()}
    return found


def is_run(directory: Path) -> bool:
    """Whether this is the directory of a run; that of a model has a config.json too."""
    if any((directory / name).exists() for name in ("metrics.jsonl", ATTEMPTS)):
        return True
    return "trainer.max_steps" in _settings_in(directory / "config.json")


def no_run(directory: Path, inside: str = "") -> ConfigError:
    """Returns the error for a path that is not that of a run; `inside` says what is below it."""
    message = f"this is not a run directory{inside}"
    if not directory.exists():
        message = "there is no such run directory"
    return ConfigError(
        message,
        field="RUN_DIR",
        value=str(directory),
        remedy="name the directory of a run, such as runs/NAME (it has a config.json)",
    )


def check_run(directory: Path) -> None:
    """Raises ConfigError unless this is the directory of a run that has recorded a step."""
    if not is_run(directory):
        raise no_run(directory)
    if not has_step(directory):
        raise no_step(str(directory))


def has_step(directory: Path) -> bool:
    """Whether a run has recorded a step."""
    metrics = directory / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def no_step(directories: str) -> ConfigError:
    """Returns the error for runs without a step."""
    return ConfigError(
        "no step is recorded here yet",
        field="RUN_DIR",
        value=directories,
        remedy="wait for the first step; `rlhf diagnose RUN_DIR` says why there is none",
    )


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Appends a line to a JSONL file of the run. Raises StorageFailed when the disk is full."""
    with storing_run(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content, ensure_ascii=False) + "\n")


def step_line(record: StepRecord, total: int) -> str:
    """Returns the console line of a step, at most 120 columns; zero counts at the end are left
    out.
    """
    accuracy = "" if record.accuracy is None else f"acc {record.accuracy:.3f}  "
    seconds = record.seconds
    training = seconds["update"] + seconds["publish"]
    line = (
        f"step {record.step:>4}/{total}  reward {record.reward:.3f}  {accuracy}"
        f"tokens {record.completion_tokens:.0f}  {_short(sum(seconds.values()))} s "
        f"(gen {_short(seconds['generation'])}, train {_short(training)})"
    )
    if record.truncated >= 0.005:
        line += f"  cut {record.truncated:.0%}"
    if record.staleness:
        line += f"  stale {record.staleness:.1f}"
    lost = sum(record.lost_episodes.values())
    if lost:
        line += f"  lost {lost}"
    if record.refused_calls:
        line += f"  refused {record.refused_calls}"
    dropped = sum(record.dropped.values())
    if dropped:
        line += f"  dropped {dropped}"
    return line


def _short(seconds: float) -> str:
    """Formats seconds with three significant digits."""
    if seconds < 10:
        return f"{seconds:.2f}"
    if seconds < 100:
        return f"{seconds:.1f}"
    return f"{seconds:.0f}"


def progress_bar(title: str, console: Console, hidden: bool) -> Progress:
    """Returns a progress bar; it is hidden if `hidden` or without a terminal."""
    return Progress(
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=hidden or not console.is_terminal,
    )


def console() -> Console:
    """Returns a console on standard output, 120 columns wide if that is not a terminal. A run goes
    on without it (`Output`).
    """
    output = Output()
    return Console(file=cast("IO[str]", output), width=None if output.isatty() else 120)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a JSONL file, except a last line that a crash cut. Raises ConfigError for any other
    damaged line.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")  # as bytes: a cut may split a character
    found = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(
                f"line {number} of {path.name} is damaged: {error}",
                field="trainer.run_dir",
                value=str(path),
                remedy="remove that line, or move the file away",
            ) from None
    return found


def read_settings(run_dir: Path) -> dict[str, Any]:
    """Returns the content of a run's `config.json`. Raises ConfigError when it is damaged."""
    path = run_dir / "config.json"
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path.name} cannot be read: {error}",
            field="trainer.run_dir",
            value=str(path),
            remedy="restore that file from a copy",
        ) from None
    return content


def _keep_before(path: Path, step: int) -> set[int]:
    """Removes the lines from `step` on and a cut last line, atomically; returns the steps of the
    remaining lines.
    """
    if not path.exists():
        return set()
    kept = [line for line in read_lines(path) if line["step"] < step]
    partial = path.with_name(f"{path.name}.partial")
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
    with storing_run(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    return {line["step"] for line in kept}


def storing_run(path: Path) -> AbstractContextManager[None]:
    """Returns the context in which to write a file of the run; it raises StorageFailed."""
    remedy = "start again with the same run directory: the run continues from its newest checkpoint"
    return storing(path.name, path, "trainer.run_dir", remedy)


def seconds_table(metrics: list[dict[str, Any]]) -> Table:
    """Returns a table of a step's mean seconds by stage, from the lines of `metrics.jsonl`."""
    means: dict[str, float] = {}
    for stage in (*STAGES, WAITING):
        seconds = sum(line["seconds"].get(stage, 0.0) for line in metrics)
        means[stage] = seconds / max(1, len(metrics))
    means["step"] = sum(means.values())

    table = Table(title=f"seconds of a step (mean over {len(metrics)} steps)")
    for name in means:
        table.add_column(name, justify="right")
    table.add_row(*(f"{mean:.3f}" for mean in means.values()))
    return table


def _comparison_table(before: Line, after: Line) -> Table:
    table = Table(title=f"held-out split, {after['num_samples']} problems")
    table.add_column("", justify="right")
    table.add_column(f"before (step {before['step']})", justify="right")
    table.add_column(f"after (step {after['step']})", justify="right")
    measured_before = _measured(before)
    for title, value in _measured(after).items():
        if title in measured_before:
            table.add_row(title, f"{measured_before[title]:.3f}", f"{value:.3f}")
    return table


def _measured(evaluation: Line) -> dict[str, float]:
    """Returns what an evaluation measured; the mean reward only without an accuracy."""
    found = numbers(evaluation)
    accuracy = "accuracy" if found.get("temperature") else "greedy accuracy"
    titles = {
        "loss": "loss (nats per token)",
        "accuracy": accuracy,
        "mean_reward": "mean reward",
        "pass_at_k": f"pass@{evaluation.get('k')}",
    }
    if "accuracy" in found:
        del titles["mean_reward"]
    return {title: found[key] for key, title in titles.items() if key in found}


def _interesting(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the answers before and after to a few problems, those with a changed verdict
    first.
    """
    pairs = list(zip(before, after, strict=True))
    pairs.sort(key=lambda pair: pair[0]["correct"] == pair[1]["correct"])  # stable
    return pairs[:_SHOWN_PROBLEMS]


def _one_line(answer: dict[str, Any]) -> str:
    text = " ⏎ ".join(answer["response"].splitlines())
    verdict = {True: "  [right]", False: "  [wrong]"}.get(answer["correct"], "")
    return f"{text[:300]}{verdict}"
