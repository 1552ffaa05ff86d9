"""Reads a run directory, complete or not, of this or another version."""

import json
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from common.errors import ConfigError, NotFound
from trainer.dashboard.columns import TOKENS, Columns, notes, numbers
from trainer.dashboard.jsonl import JsonlReader
from trainer.dashboard.run_facts import changed_settings, read_note
from trainer.dashboard.verdict import verdict
from trainer.observe.alarms import limits
from trainer.timing import STAGES, WAITING

_RECENT = 10
"""Number of newest steps whose mean the list of runs shows."""


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
    """`algorithm.name`; `sft` for a run on worked answers."""
    reward: float | None
    """Mean of the newest steps."""
    loss: float | None
    accuracy: float | None
    """Accuracy of the newest evaluation."""
    standard_error: float | None
    hours: float
    """Wall time of all steps."""
    gpu_hours: float | None
    """Wall time of each step times the GPUs of trainer and engines; 0 on CPUs, None if their number
    is unknown."""
    changed: dict[str, Any]
    """Settings that differ from their defaults, by name."""
    note: str
    """The user's note about the run."""


class RunReader:
    """One run, read as it grows; `live` if this process trains it. Thread-safe. Raises ConfigError
    if it is missing.
    """

    def __init__(self, directory: Path, live: bool = False, name: str = "") -> None:
        if not live and not directory.is_dir():
            raise ConfigError(
                "there is no such run directory",
                field="RUN_DIR",
                value=str(directory),
                remedy="name the directory of a run, such as runs/NAME",
            )
        self.directory = directory
        self.live = live
        self.name = name or directory.resolve().name
        self._lock = threading.Lock()
        self._start_over()
        self._generation = 0
        """Increases when lines that were already read are gone."""
        self._config: tuple[float, dict[str, Any] | None, str] = (-1.0, None, "")
        """Modification time, content, and what is wrong with the content."""

    def _start_over(self) -> None:
        self._metrics = JsonlReader(self.directory / "metrics.jsonl")
        self._evaluations = JsonlReader(self.directory / "evaluations.jsonl")
        self._columns = Columns()
        self._offsets = array("q")
        """Byte offset of each row's line in `metrics.jsonl`."""
        self._evaluated: list[dict[str, Any]] = []
        """The numbers of each evaluation."""

    @property
    def config(self) -> dict[str, Any] | None:
        """The resolved configuration; None when it is missing or damaged."""
        return self._read_config()[0]

    def setting(self, section: str, name: str, default: Any = None) -> Any:
        """Returns one setting, or `default` when the configuration lacks it."""
        part = (self.config or {}).get(section)
        return part.get(name, default) if isinstance(part, dict) else default

    @property
    def problems(self) -> list[str]:
        """A sentence for each missing or damaged part."""
        self._refresh()
        _, problem = self._read_config()
        found = [problem] if problem else []
        with self._lock:
            if not self._columns.steps and not self._metrics.unreadable:
                if self._metrics.path.exists():
                    found.append("metrics.jsonl has no step yet")
                else:
                    found.append("metrics.jsonl is missing: no step was recorded")
            return found + self._metrics.problems() + self._evaluations.problems()

    def summary(self, run: int = 0) -> RunSummary:
        problems = self.problems
        with self._lock:
            columns = self._columns
            newest = int(columns.steps[-1]) if columns.steps else None
            total_steps = columns.last("total_steps")
            newest_time = columns.last("time")
            is_sft = columns.last("examples") is not None
            reward = columns.last("reward", _RECENT)
            loss = columns.last("update.loss", _RECENT)
            seconds = columns.column("seconds")
            gpus = columns.column("gpus")
            evaluation = self._evaluated[-1] if self._evaluated else {}
        recent_s = seconds[-20:]
        seconds_per_step = float(np.nanmean(recent_s)) if np.isfinite(recent_s).any() else 0.0
        return RunSummary(
            run=run,
            name=self.name,
            directory=str(self.directory),
            live=self.live,
            problems=problems,
            step=newest,
            time=newest_time,
            total_steps=None if total_steps is None else int(total_steps),
            state=_state(newest, total_steps, newest_time, seconds_per_step=seconds_per_step),
            model=_text(self.setting("model", "name")),
            data=_text(self.setting("data", "source")),
            recipe="sft" if is_sft else _text(self.setting("algorithm", "name")),
            reward=reward,
            loss=loss,
            accuracy=evaluation.get("accuracy"),
            standard_error=evaluation.get("standard_error"),
            hours=float(np.nansum(seconds)) / 3600,
            gpu_hours=_gpu_hours(seconds, gpus),
            changed=changed_settings(self.config),
            note=read_note(self.directory),
        )

    def facts(self) -> dict[str, Any]:
        """Returns the settings (`config`), those that differ from their defaults (`changed`),
        `limits` and `stages`.

        `limits` are those of the alarms, by column; `stages` those of a step, in display order.
        """
        max_staleness = self.setting("trainer", "max_staleness", 0)
        reuse_ratio = self.setting("replay", "reuse_ratio", 0)
        shown_limits = {}
        for name, limit in limits(bool(max_staleness or reuse_ratio)).items():
            shown_limits[f"update.{limit.metric}"] = {
                "alarm": name,
                "value": limit.value,
                "above": limit.above,
            }
        return {
            "config": self.config,
            "changed": changed_settings(self.config),
            "limits": shown_limits,
            # Waiting first, then the trainer's own work.
            "stages": [WAITING, *STAGES[3:], *STAGES[:3]],
        }

    def steps(self) -> list[dict[str, Any]]:
        """Returns the lines of `metrics.jsonl`."""
        self._refresh()
        with self._lock:
            lines = [self._metrics.at(offset) for offset in self._offsets]
        return [line for line in lines if line is not None]

    def step(self, step: int) -> dict[str, Any]:
        """Returns `step`, `time`, `numbers` by name and `notes` (alarms and hints in words) of a
        step. Raises NotFound.
        """
        self._refresh()
        with self._lock:
            rows = self._columns.rows(step, step)
            line = self._metrics.at(self._offsets[rows.start]) if rows.start < rows.stop else None
        if line is None:
            raise NotFound(
                "there is no such step",
                field="step",
                value=step,
                remedy="see /dashboard/api/series",
            )
        return {
            "step": step,
            "time": line.get("time"),
            "numbers": numbers(line),
            "notes": notes(line),
        }

    def series(
        self,
        after: int = 0,
        generation: int = -1,
        evaluations: int = 0,
        points: int = 600,
        first: int = 0,
        last: int = 2**62,
    ) -> dict[str, Any]:
        """Returns the data of the charts, at most `points` rows: all steps from `first` to `last`,
        or only new ones.

        The caller has the steps up to `after` and this many `evaluations` of a `generation`; if the
        generation has changed, it gets everything. Returns the result of `Columns.thinned`, `whole`
        (false: append it to the caller's data), `generation`, `evaluations`, `newest` (step) and
        `verdict`.
        """
        self._refresh()
        with self._lock:
            known = generation == self._generation
            rows = self._columns.rows(max(first, after + 1), last)
            whole = not known or after <= 0 or rows.stop - rows.start > points
            if whole:
                rows = self._columns.rows(first, last)
            reward = self._columns.column("reward")
            accuracy = self._columns.column("accuracy")
            judged: dict[str, Any] = {"level": "none", "text": ""}
            # A run on worked answers has steps without rewards.
            if len(reward) == 0 or not np.isnan(reward).all():
                judged = verdict(reward, accuracy)
            return {
                "generation": self._generation,
                "whole": whole,
                "newest": int(self._columns.steps[-1]) if self._columns.steps else None,
                **self._columns.thinned(rows, points),
                "evaluations": self._evaluated[evaluations if known else 0 :],
                "verdict": judged,
            }

    def _refresh(self) -> None:
        with self._lock:
            # A resumed run truncates both files: read both again.
            metrics_replaced = self._metrics.replaced()
            evaluations_replaced = self._evaluations.replaced()
            if metrics_replaced or evaluations_replaced:
                self._start_over()
                self._generation += 1
            for offset, line in self._metrics.read():
                step = line.get("step")
                if not isinstance(step, int) or abs(step) > 2**53:
                    continue
                row = numbers(line)
                tokens_before = self._columns.before(step, TOKENS) or 0.0
                row[TOKENS] = tokens_before + row.get("update.trained_tokens", 0.0)
                if self._columns.append(step, row):
                    self._generation += 1
                    del self._offsets[len(self._columns) - 1 :]
                self._offsets.append(offset)
            for _, line in self._evaluations.read():
                single = {
                    name: value
                    for name, value in line.items()
                    if isinstance(value, int | float | None)
                }
                self._evaluated.append(single)

    def _read_config(self) -> tuple[dict[str, Any] | None, str]:
        """Returns the configuration, and what is wrong with it or an empty text."""
        path = self.directory / "config.json"
        try:
            changed = path.stat().st_mtime
            if changed == self._config[0]:
                return self._config[1:]
            content = json.loads(path.read_bytes())
            problem = "" if isinstance(content, dict) else "config.json is not an object"
        except FileNotFoundError:
            return None, "config.json is missing: the settings of this run are not known"
        except (OSError, ValueError, RecursionError) as error:
            return None, f"config.json cannot be read: {error}"
        self._config = (changed, content if not problem else None, problem)
        return self._config[1:]

    def csv(self) -> str:
        """Returns all numbers of all steps as CSV."""
        self._refresh()
        with self._lock:
            return self._columns.csv()


def _state(
    step: int | None,
    total_steps: float | None,
    newest_time: float | None,
    seconds_per_step: float,
) -> str:
    if step is None:
        return "empty"
    if total_steps is not None and step >= total_steps:
        return "finished"
    patience_s = 60 + 5 * seconds_per_step
    if newest_time is not None and time.time() - newest_time < patience_s:
        return "running"
    return "stopped"


def _gpu_hours(seconds: NDArray[np.float64], gpus: NDArray[np.float64]) -> float | None:
    held = seconds * gpus
    return float(held.sum()) / 3600 if len(held) and np.isfinite(held).all() else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
