"""Reads a run directory, complete or not, of this or another version."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from common import Json
from common.errors import ConfigError, NotFound
from common.process.run_lock import LOCK
from trainer.dashboard.columns import Columns
from trainer.dashboard.run_facts import changed_settings, read_note, unsolvable
from trainer.dashboard.verdict import verdict
from trainer.diagnosis.facts import Finding
from trainer.diagnosis.find import find
from trainer.diagnosis.live import collect
from trainer.diagnosis.report import first_line
from trainer.diagnosis.run_files import holder_of, read_facts
from trainer.observe.catalogue import ALARMS, limits
from trainer.observe.jsonl import JsonlReader, parsed_line
from trainer.observe.metrics import SECTIONS
from trainer.observe.run_dir import ATTEMPTS, no_run, read_settings
from trainer.timing import STAGES, WAITING
from trainer.trackers.base import flatten, numbers

# Number of newest steps whose mean the list of runs shows.
_RECENT = 10
_DIAGNOSE_EVERY_S = 5.0


class RunSummary(BaseModel):
    """Summary of a run directory."""

    run: int
    """Index of the run in all other calls."""
    name: str
    directory: str
    live: bool
    """Whether this process trains it."""
    problems: list[str]
    """What is missing or damaged in the directory."""
    step: int | None
    """The newest step."""
    time: float | None
    """Time of the newest step, in seconds since 1970."""
    total_steps: int | None
    state: str
    """`running`, `finished`, `stopped`, or `empty` without a step."""
    model: str | None
    data: str | None
    recipe: str | None
    """`algorithm.name`; `sft` for a run of supervised fine-tuning."""
    reward: float | None
    """Mean of the newest steps."""
    held_out: Json | None
    """The numbers of the newest evaluation."""
    hours: float
    """Wall time of all steps."""
    gpu_hours: float | None
    """Wall time of each step times the GPUs of trainer and engines; 0 on CPUs, None if their number
    is unknown."""
    changed: Json
    """Settings that differ from their defaults, by name."""
    note: str
    """The user's note about the run."""


class Diagnosis(BaseModel):
    """What is wrong with a run, the most important first."""

    first_line: str
    findings: list[Finding]


class RunReader:
    """One run, read as it grows; `live` if this process trains it. Thread-safe. Raises ConfigError
    if it is missing.
    """

    def __init__(self, directory: Path, live: bool = False, name: str = "") -> None:
        if not live and not directory.is_dir():
            raise no_run(directory)
        self.directory = directory
        self.live = live
        self.name = name or directory.resolve().name
        self._lock = threading.Lock()
        self._diagnosing = threading.Lock()
        self._diagnosis: tuple[float, Diagnosis] | None = None
        self._start_over()
        # Increases with every change.
        self._generation = 0

    def _start_over(self) -> None:
        self._metrics = JsonlReader(self.directory / "metrics.jsonl", parsed_line)
        self._evaluations = JsonlReader(self.directory / "evaluations.jsonl", parsed_line)
        self._attempts = JsonlReader(self.directory / ATTEMPTS, parsed_line)
        # Where the prompts come from; runs of earlier versions do not say.
        self._data: str | None = None
        self._columns = Columns()
        # The numbers of each evaluation.
        self._evaluated: list[Json] = []

    def _config(self) -> tuple[Json, str]:
        """Returns the resolved settings by name, and what is wrong with their file."""
        try:
            return flatten(read_settings(self.directory)), ""
        except ConfigError as error:
            return {}, f"{error.message}: the settings of this run are not known"

    @property
    def problems(self) -> list[str]:
        """A sentence for each missing or damaged part, and for problems that no answer solves."""
        _, problem = self._config()
        found = [problem] if problem else []
        found += unsolvable(self.directory)
        with self._newest() as columns:
            if not columns.steps and not self._metrics.unreadable:
                there = self._metrics.path.exists()
                problem = "has no step yet" if there else "is missing: no step was recorded"
                found.append(f"metrics.jsonl {problem}")
            evaluation = self._evaluated[-1] if self._evaluated else {}
            if evaluation.get("trained_on"):
                found.append(
                    f"{evaluation['trained_on']:.0f} of {evaluation['num_samples']:.0f} held-out "
                    "problems were trained on"
                )
            return found + self._metrics.problems() + self._evaluations.problems()

    def summary(self, run: int = 0) -> RunSummary:
        problems = self.problems
        config, _ = self._config()
        with self._newest() as columns:
            newest = int(columns.steps[-1]) if columns.steps else None
            newest_time = columns.last("time")
            total_steps = columns.last("total_steps")
            is_sft = columns.last("examples") is not None
            reward = columns.last("reward", _RECENT)
            seconds = columns.column("seconds")
            seconds_of_gpus = seconds * columns.column("gpus")
            evaluation = self._evaluated[-1] if self._evaluated else None
            data = self._data or config.get("data.source") or None
        state = "stopped"
        if newest is None:
            state = "empty"
        elif total_steps is not None and newest >= total_steps:
            state = "finished"
        elif holder_of(self.directory / LOCK)[1]:
            state = "running"
        gpu_hours = None
        if newest is not None and np.isfinite(seconds_of_gpus).all():
            gpu_hours = float(seconds_of_gpus.sum()) / 3600
        return RunSummary(
            run=run,
            name=self.name,
            directory=str(self.directory),
            live=self.live,
            problems=problems,
            step=newest,
            time=newest_time,
            total_steps=None if total_steps is None else int(total_steps),
            state=state,
            model=config.get("model.name") or None,
            data=data,
            recipe="sft" if is_sft else config.get("algorithm.name") or None,
            reward=reward,
            held_out=evaluation,
            hours=float(np.nansum(seconds)) / 3600,
            gpu_hours=gpu_hours,
            changed=changed_settings(config),
            note=read_note(self.directory),
        )

    def diagnosis(self) -> Diagnosis:
        """Returns what is wrong, from the files of the run; if this process trains it, also from
        what its services and ranks answer. A result is reused for some seconds.
        """
        with self._diagnosing:
            if self._diagnosis is None or time.monotonic() - self._diagnosis[0] > _DIAGNOSE_EVERY_S:
                known = collect(self.directory) if self.live else read_facts(self.directory)
                findings = find(known)
                said = Diagnosis(first_line=first_line(known, findings), findings=findings)
                self._diagnosis = (time.monotonic(), said)
            return self._diagnosis[1]

    def facts(self) -> Json:
        """Returns the settings (`config`), those that differ from their defaults (`changed`), the
        `sections` of charts, the `limits` of alarms by column, and the `stages` of a step in
        display order.
        """
        config, _ = self._config()
        is_old = config.get("trainer.max_staleness") or config.get("replay.reuse_ratio")
        shown_limits = {}
        for name, limit in limits(is_old=bool(is_old)).items():
            shown_limits[f"update.{ALARMS[name].metric}"] = {
                "alarm": name,
                "value": limit,
                "above": not ALARMS[name].is_minimum,
            }
        return {
            "config": config or None,
            "changed": changed_settings(config),
            "sections": SECTIONS,
            "limits": shown_limits,
            # Waiting first, then the trainer's own work.
            "stages": [WAITING, *STAGES[3:], *STAGES[:3]],
        }

    def notes(self) -> list[Json]:
        """Returns the alarms and hints of all steps, each with `step`, `kind` and `text`."""
        with self._newest() as columns:
            steps = columns.notes.items()
            return [{"step": step, **note} for step, notes in steps for note in notes]

    def step(self, step: int) -> Json:
        """Returns `step`, `time`, `numbers` by name and `notes` (alarms and hints in words) of a
        step. Raises NotFound.
        """
        with self._newest() as columns:
            row = columns.row(step)
            notes = columns.notes.get(step, [])
        if not row:
            raise NotFound(
                "there is no such step",
                field="step",
                value=step,
                remedy="see /dashboard/api/series",
            )
        return {"step": step, "time": row.get("time"), "numbers": row, "notes": notes}

    def series(self, known: int = -1, points: int = 600, first: int = 0, last: int = 2**62) -> Json:
        """Returns the data of the charts for the steps from `first` to `last`, at most `points`
        rows.

        The result of `Columns.thinned`, with `evaluations`, `newest` (step), `verdict` and
        `generation`, a number that changes with the data: only this if the caller already has the
        `known` generation.
        """
        with self._newest() as columns:
            if known == self._generation:
                return {"generation": known}
            reward = columns.column("reward")
            judged: Json = {"level": "none", "text": ""}
            # A run of supervised fine-tuning has steps without rewards.
            if len(reward) == 0 or not np.isnan(reward).all():
                judged = verdict(reward, columns.column("accuracy"))
            return {
                "generation": self._generation,
                "newest": int(columns.steps[-1]) if columns.steps else None,
                **columns.thinned(columns.rows(first, last), points),
                "evaluations": self._evaluated,
                "verdict": judged,
            }

    @contextmanager
    def _newest(self) -> Iterator[Columns]:
        """Reads what was appended to the files, and holds the lock."""
        with self._lock:
            # A resumed run truncates both files: read both again.
            replaced = [reader.replaced() for reader in (self._metrics, self._evaluations)]
            if any(replaced):
                self._start_over()
                self._generation += 1
            for line in self._metrics.read():
                step = line.get("step")
                if not isinstance(step, int) or abs(step) > 2**53:
                    continue
                self._generation += 1
                self._columns.append(step, line)
            for line in self._evaluations.read():
                self._generation += 1
                self._evaluated.append(numbers(line))
            for line in self._attempts.read():
                self._data = line.get("data")
            yield self._columns

    def csv(self) -> str:
        """Returns all numbers of all steps as CSV."""
        with self._newest() as columns:
            return columns.csv()
