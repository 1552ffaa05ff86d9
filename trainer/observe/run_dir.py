"""Writes the run directory and the console output.

The directory contains `config.json` (resolved configuration), `metrics.jsonl` (a line per step),
`groups.jsonl` and `groups/` (groups of each step: `trainer.observe.group_files`),
`evaluations.jsonl`, `samples.jsonl` (one graded group per step), `attempts.jsonl` (a line per
start), `checkpoints/` and `weights/`.
"""

import io
import json
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Self, cast

from msgspec.structs import asdict
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
from rich.table import Column, Table

from common import Json
from common.errors import ConfigError, shorten
from common.process.logs import SHOWN, is_set_up, structured
from common.process.storage import storing
from common.settings.config import Config
from common.wire.codec import plain
from common.wire.schemas import Group
from trainer.evaluation.evaluation import Answer, Evaluation
from trainer.evaluation.uncertainty import accuracy_text
from trainer.observe.hints import hints, remember
from trainer.observe.jsonl import parsed, parsed_line
from trainer.observe.output import Output
from trainer.timing import STAGES, WAITING
from trainer.trackers.base import Record, flatten, numbers
from trainer.trackers.trackers import Trackers

log = logging.getLogger("run")
_SHOWN_PROBLEMS = 3
ATTEMPTS = "attempts.jsonl"
AUDIT = "audit.jsonl"
WHY = "why.json"
"""What `rlhf why` found last."""
PROBLEMS = "given_problems.json"
"""What a program gave to train and to evaluate on (`trainer.observe.problems`)."""
# Settings that each run has its own value of, and that do not affect training.
_OF_EACH_RUN = frozenset({"state_dir", "trainer.run_dir", "trackers.run_name"})
DETAILS = frozenset(
    {"kept_tokens", "kept_counts", "routed_experts", "barred", "prompt_routed_experts"}
)
"""Sampling details of a group and its completions: large, and only of use to an audit. The experts
of a group of 16 answers of 8,192 tokens are 50 million numbers."""
STEP_FILES = ("metrics", "groups", "samples")
"""The files with a line for each step of every run."""
# Steps until the same alarm or hint is logged again; `metrics.jsonl` has every occurrence.
_AGAIN_AFTER = 20


class Recorder:
    """Writes the run directory and prints to the console.

    The run continues after `step`: lines of later steps are removed, and a warning names earlier
    steps without a line. `tracked` counts records for trackers; `run_id` names this attempt;
    `data` says where the prompts come from if not from `data.source`; `verdicts` whether the
    rewards are verdicts, None when the first answers decide; `files` are those with a line per
    step; `in_user_names` adds to a hint or alarm what its settings are called in the user's
    interface.
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
        in_user_names: Callable[[str, Iterable[str]], str] = lambda text, _: text,
    ) -> None:
        self.directory = directory
        self.console = console
        self._config = config
        settings = directory / "config.json"
        before = known_settings(directory) if step else {}
        with storing_run(settings):
            directory.mkdir(parents=True, exist_ok=True)
            settings.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        names = [f"{name}.jsonl" for name in files]
        kept = {name: _keep_before(directory / name, step + 1) for name in names}
        evaluated = _keep_before(directory / "evaluations.jsonl", step + 1 if step else 0)
        _keep_before(directory / ATTEMPTS, sys.maxsize)  # drops a last line that a crash cut
        attempt = {
            "time": time.time(),
            "run_id": run_id,
            "step": step,
            "verdicts": verdicts,
            "data": data or config.data.source,
        }
        append_line(directory / ATTEMPTS, attempt)
        self._in_user_names = in_user_names
        self._progress: Progress | None = None
        self._total = 0
        self._warned: dict[str, int] = {}
        self._history: list[Record] = []
        for line in read_lines(directory / "metrics.jsonl"):
            remember(self._history, line)
        changes = {
            name: f"{name} {shorten(before[name])} → {shorten(value)}"
            for name, value in changed(before, known_settings(directory)).items()
        }
        if changes:  # nothing else would show it
            text = f"settings changed since the last attempt: {', '.join(changes.values())}"
            self.say(in_user_names(text, changes))
        for name, there in kept.items():
            self._tell_gap(name, sorted(set(range(1, step + 1)) - there))
        if step and config.evaluation.samples:
            self._tell_gap("evaluations.jsonl", sorted({0} - evaluated))
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
        if not lost:
            return
        which = f"step {lost[0]}"
        if len(lost) > 1:
            which = f"{len(lost)} of the steps {lost[0]} to {lost[-1]}"
        self.say(
            f"warning: {name} lacks {which}, which the checkpoint has: the file was cut or "
            "removed; training continues, but curves, report and dashboard lack them",
            logging.WARNING,
        )

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

    def step(self, record: Json, group: Group) -> None:
        """Adds the hints to the record of a step, then writes and prints it; `group` is a sample of
        its groups.
        """
        sample = {
            **without(DETAILS, asdict(group)),
            "completions": [without(DETAILS, asdict(each)) for each in group.completions],
        }
        append_line(self.directory / "samples.jsonl", {"step": record["step"], **plain(sample)})
        remember(self._history, record)
        found = {"alarm": record["alarms"], "hint": hints(self._history, self._config)}
        for kind, texts in found.items():
            record[f"{kind}s"] = {
                name: self._in_user_names(text, text.settings) for name, text in texts.items()
            }
        self.measured(record, step_line(record, self._total), group)
        for kind in found:
            self._warn(kind, record["step"], record[f"{kind}s"])

    def measured(self, record: Record, text: str, group: Group | None = None) -> None:
        """Writes the numbers of a step and prints `text`; trackers get them, and sometimes the
        samples of `group`.
        """
        line = {"time": time.time(), "total_steps": self._total, **record}
        append_line(self.directory / "metrics.jsonl", line)
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
        count = evaluation.num_samples
        if evaluation.accuracy is None:
            result = f"reward {evaluation.mean_reward:.3f}"
        else:
            error = evaluation.standard_error or 0.0
            result = f"accuracy {accuracy_text(evaluation.accuracy, error, count)}"
        problems = f"{count} problems"
        if evaluation.trained_on:
            problems += f", {evaluation.trained_on} of which were trained on"
        text = f"evaluation at step {evaluation.step}: held-out {result} ({problems})"
        if evaluation.pass_at_k is not None:
            text += f"  pass@{evaluation.k} {evaluation.pass_at_k:.3f}"
        self.evaluated(evaluation.summary(), text, evaluation.answers)
        if evaluation.trained_on:
            leaked = (
                f"{evaluation.trained_on} of {count} held-out problems were trained on: the "
                "evaluation measures what was memorised, too. Remove them from the training data, "
                "or evaluate on others"
            )
            self._warn("warning", evaluation.step, {"trained_on": leaked})

    def evaluated(self, summary: Record, text: str, answers: Sequence[Answer] = ()) -> None:
        """Writes an evaluation, passes it to the trackers and prints `text`."""
        path = self.directory / "evaluations.jsonl"
        _keep_before(path, summary["step"])  # drops the lines of a killed attempt
        line = {"time": time.time(), **summary}
        if answers:
            line["answers"] = [answer.__dict__ for answer in answers]
        append_line(path, line)
        self._trackers.evaluation(summary, answers)
        self.say(text)

    def report(self, checkpoint: Path) -> None:
        """Prints seconds by stage, evaluations before and after, sample problems if there are any,
        and paths.
        """
        metrics = read_lines(self.directory / "metrics.jsonl")
        evaluations = read_lines(self.directory / "evaluations.jsonl")
        self.show(seconds_table(metrics))
        if len(evaluations) >= 2:
            before = evaluations[0]
            after = evaluations[-1]
            self.show(_comparison_table(before, after))
            pairs = list(zip(before.get("answers", []), after.get("answers", []), strict=True))
            # Those with another verdict than before come first.
            pairs.sort(key=lambda pair: pair[0]["correct"] == pair[1]["correct"])
            for old, new in pairs[:_SHOWN_PROBLEMS]:
                truth = f"  (answer {old['ground_truth']})" if old["ground_truth"] else ""
                self.say(f"\nproblem: {old['prompt']}{truth}")
                self.say(f"  before: {_one_line(old)}\n  after:  {_one_line(new)}")
        self.say(f"\ncheckpoint: {checkpoint}\nrun:        {self.directory}")


def tell(console: Console, text: str, level: int = logging.INFO) -> None:
    """Writes text to the console and the log; only to the log when logs are JSON."""
    if console.quiet or is_set_up():
        log.log(level, "%s", text, extra=SHOWN)
    if structured() is None:
        # `module:Fire: text` is no picture of a fire.
        console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def is_run(directory: Path) -> bool:
    """Whether this is the directory of a run; the directory of a model also has a config.json."""
    if any((directory / name).exists() for name in ("metrics.jsonl", ATTEMPTS)):
        return True
    return "trainer.max_steps" in known_settings(directory)


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


def damaged(message: str, path: Path, remedy: str = "") -> ConfigError:
    """Returns the error for a file of a run that is damaged, incomplete or missing."""
    return ConfigError(
        message,
        field="trainer.run_dir",
        value=str(path),
        remedy=remedy or "restore that file from a copy",
    )


def check_run(directory: Path) -> None:
    """Raises ConfigError unless this is the directory of a run that has recorded a step."""
    if not is_run(directory):
        raise no_run(directory)
    if not has_step(directory):
        raise no_step(str(directory))


def audited_steps(directory: Path) -> set[int]:
    """Returns the steps in the audit record of a run. Raises ConfigError without a record."""
    path = directory / AUDIT
    if not path.is_file():
        raise ConfigError(
            "this run has no audit record",
            field="trainer.audit",
            value=str(path),
            remedy="name the directory of a run that was made with trainer.audit true",
        )
    return {line["step"] for line in read_lines(path) if line.get("kind") == "step"}


def not_audited(step: int | None, steps: Collection[int]) -> ConfigError:
    """Returns the error for a step that is not in the audit record, or not named at all."""
    known = f"{min(steps)} to {max(steps)}" if steps else "none"
    return ConfigError(
        "no step is named" if step is None else f"the audit record lacks step {step}",
        field="--step",
        value=step,
        remedy=f"name a recorded step: {known}",
    )


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


def without(names: frozenset[str], content: Json) -> Json:
    """Returns `content` without some of its fields."""
    return {name: value for name, value in content.items() if name not in names}


def append_line(path: Path, content: Json) -> None:
    """Appends a line to a JSONL file of the run. Raises StorageFailed when the disk is full."""
    with storing_run(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content, ensure_ascii=False) + "\n")


def step_line(record: Record, total: int) -> str:
    """Returns the console line of a step, at most 120 columns; zero counts at the end are left
    out.
    """
    accuracy = "" if record["accuracy"] is None else f"acc {record['accuracy']:.3f}  "
    seconds = record["seconds"]
    training = seconds["update"] + seconds["publish"]
    line = (
        f"step {record['step']:>4}/{total}  reward {record['reward']:.3f}  {accuracy}"
        f"tokens {record['completion_tokens']:.0f}  {_short(sum(seconds.values()))} s "
        f"(gen {_short(seconds['generation'])}, train {_short(training)})"
    )
    if record["truncated"] >= 0.005:
        line += f"  cut {record['truncated']:.0%}"
    if record["staleness"]:
        line += f"  stale {record['staleness']:.1f}"
    counts = {
        "lost": sum(record["lost_episodes"].values()),
        "refused": record["refused_calls"],
        "dropped": sum(record["dropped"].values()),
    }
    return line + "".join(f"  {name} {count}" for name, count in counts.items() if count)


def _short(seconds: float) -> str:
    """Formats seconds with three significant digits."""
    if seconds < 10:
        return f"{seconds:.2f}"
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"


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


def read_lines(path: Path) -> list[Json]:
    """Reads a JSONL file, except a last line that a crash cut. Raises ConfigError for any other
    damaged line.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")  # as bytes: a cut may split a character
    found = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            found.append(parsed_line(line))
        except (ValueError, RecursionError) as error:
            raise damaged(
                f"line {number} of {path.name} is damaged: {error}",
                path,
                "remove that line, or move the file away",
            ) from None
    return found


def read_settings(run_dir: Path) -> Json:
    """Returns the content of a run's `config.json`. Raises ConfigError when it is missing or
    damaged.
    """
    path = run_dir / "config.json"
    try:
        return parsed(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        problem = "is missing" if is_missing else f"cannot be read: {error}"
        raise damaged(f"{path.name} {problem}", path) from None


def reward_names(content: Json) -> list[str]:
    """Returns the names of the reward functions in the content of a `config.json`."""
    entries = content.get("reward", {}).get("functions", ["math"])
    return [entry if isinstance(entry, str) else entry["name"] for entry in entries]


def known_settings(run_dir: Path) -> Json:
    """Returns the settings in a run's `config.json` by name, such as `trainer.batch_size`; none if
    it cannot be read.
    """
    with suppress(ConfigError):
        return flatten(read_settings(run_dir))
    return {}


def changed(before: Record, now: Record) -> Json:
    """Returns the settings `now` that were something else `before`, without those that are specific
    to each run.
    """
    return {
        name: value
        for name, value in now.items()
        if name not in _OF_EACH_RUN and before.get(name, value) != value
    }


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
    return storing(
        path.name,
        path,
        "trainer.run_dir",
        "start again with the same run directory: the run continues from its newest checkpoint",
    )


def seconds_table(metrics: list[Json]) -> Table:
    """Returns a table of a step's mean seconds by stage, from the lines of `metrics.jsonl`."""
    stages = (*STAGES, WAITING)
    count = max(1, len(metrics))
    means = [sum(line["seconds"].get(stage, 0.0) for line in metrics) / count for stage in stages]
    table = _table(f"seconds of a step (mean over {len(metrics)} steps)", *stages, "step")
    table.add_row(*(f"{mean:.3f}" for mean in [*means, sum(means)]))
    return table


def _table(title: str, *columns: str) -> Table:
    return Table(*(Column(name, justify="right") for name in columns), title=title)


def _comparison_table(before: Record, after: Record) -> Table:
    table = _table(
        f"held-out split, {after['num_samples']} problems",
        "",
        f"before (step {before['step']})",
        f"after (step {after['step']})",
    )
    was = numbers(before)
    found = numbers(after)
    titles = {
        "loss": "loss (nats per token)",
        "accuracy": "accuracy" if found.get("temperature") else "greedy accuracy",
        "mean_reward": "mean reward",
        "pass_at_k": f"pass@{after.get('k')}",
    }
    if "accuracy" in found:
        del titles["mean_reward"]
    for key, title in titles.items():
        if key in found and key in was:
            table.add_row(title, f"{was[key]:.3f}", f"{found[key]:.3f}")
    return table


def _one_line(answer: Json) -> str:
    text = " ⏎ ".join(answer["response"].splitlines())
    verdict = {True: "  [right]", False: "  [wrong]"}.get(answer["correct"], "")
    return f"{text[:300]}{verdict}"
