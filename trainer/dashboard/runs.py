"""A run directory, whole or half written, of this version or another: what is there is read, what is missing is said."""

import json
import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError, NotFound
from trainer.dashboard.columns import Columns, notes, numbers
from trainer.dashboard.lines import Lines
from trainer.dashboard.verdict import verdict
from trainer.observe.alarms import limits
from trainer.timing import STAGES, WAITING

_SHOWN_DAMAGE = 3


class Run:
    """One run, read on as it grows. Used from several threads.

    Args:
        directory: of the run.
        live: whether this process is the one that trains.
        replay_store: the replay buffer's file; where `config.json` says it is when None.

    Raises ConfigError when there is no such directory.
    """

    def __init__(self, directory: Path, live: bool = False, replay_store: Path | None = None) -> None:
        if not live and not directory.is_dir():
            raise ConfigError(
                "there is no such run directory", field="RUN_DIR", value=str(directory), remedy="name one, as runs/NAME"
            )
        self.directory, self.live = directory, live
        self._replay_store = replay_store
        self._lock = threading.Lock()
        self._metrics, self._evaluations = Lines(directory / "metrics.jsonl"), Lines(directory / "evaluations.jsonl")
        self._columns, self._offsets = Columns(), array("q")
        self._found: list[dict[str, Any]] = []
        self._generation = 0
        """Goes up when lines that were read before are no longer there."""
        self._config: tuple[float, dict[str, Any] | None, str] = (-1.0, None, "")

    @property
    def name(self) -> str:
        """For people."""
        return self.directory.resolve().name

    @property
    def config(self) -> dict[str, Any] | None:
        """The resolved configuration as it was written; None when it is missing or damaged."""
        return self._read_config()[0]

    @property
    def replay_store(self) -> Path | None:
        """The replay buffer's file, if it is there."""
        path = self._replay_store
        if path is None:
            state = (self.config or {}).get("state_dir")
            path = Path(state) / "replay" / "replay.db" if isinstance(state, str) else None
        return path if path is not None and path.is_file() else None

    def setting(self, section: str, name: str, default: Any = None) -> Any:
        """One setting; `default` where the configuration has none."""
        part = (self.config or {}).get(section)
        return part.get(name, default) if isinstance(part, dict) else default

    @property
    def problems(self) -> list[str]:
        """What is missing or damaged, for people."""
        self._refresh()
        _, problem = self._read_config()
        found = [problem] if problem else []
        with self._lock:
            if not self._columns.steps and not self._metrics.unreadable:
                there = self._metrics.path.exists()
                found.append("metrics.jsonl has no step yet" if there else "metrics.jsonl is missing: no step was recorded")
            for lines in (self._metrics, self._evaluations):
                name = lines.path.name
                if lines.unreadable:
                    found.append(f"{name} cannot be read: {lines.unreadable}")
                for number, reason in list(lines.damaged.items())[:_SHOWN_DAMAGE]:
                    found.append(f"line {number} of {name} is damaged and left out: {reason}")
                if (more := len(lines.damaged) - _SHOWN_DAMAGE) > 0:
                    found.append(f"{more} more lines of {name} are damaged")
        return found

    def summary(self) -> dict[str, Any]:
        """`name`, `directory`, `live`, `problems`, `step` (the newest, or None) and `time` (of that step)."""
        problems = self.problems
        with self._lock:
            steps, times = self._columns.steps, self._columns.column("time")
            newest = int(steps[-1]) if steps else None
            time = float(times[-1]) if steps and np.isfinite(times[-1]) else None
        return {
            "name": self.name,
            "directory": str(self.directory),
            "live": self.live,
            "problems": problems,
            "step": newest,
            "time": time,
        }

    def facts(self) -> dict[str, Any]:
        """`config`, `limits` (where alarms begin, by column), `stages` (of a step, in the order in which they are shown)."""
        old = bool(self.setting("trainer", "max_staleness", 0) or self.setting("replay", "reuse_ratio", 0))
        return {
            "config": self.config,
            "limits": {
                f"update.{limit.metric}": {"alarm": name, "value": limit.value, "above": limit.above}
                for name, limit in limits(old).items()
            },
            "stages": [WAITING, *STAGES[3:], *STAGES[:3]],  # what is waited for, then what the trainer does itself
        }

    def steps(self, after: int = 0) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` of the steps after this one."""
        self._refresh()
        with self._lock:
            first = self._columns.rows(after + 1, 2**62).start
            lines = [self._metrics.at(offset) for offset in self._offsets[first:]]
        return [line for line in lines if line is not None]

    def step(self, step: int) -> dict[str, Any]:
        """`step`, `time`, `numbers` by name and `notes` (alarms and hints in words) of one step. Raises NotFound."""
        self._refresh()
        with self._lock:
            rows = self._columns.rows(step, step)
            line = self._metrics.at(self._offsets[rows.start]) if rows.start < rows.stop else None
        if line is None:
            raise NotFound("there is no such step", field="step", value=step, remedy="see /dashboard/api/series")
        return {"step": step, "time": line.get("time"), "numbers": numbers(line), "notes": notes(line)}

    def series(
        self, after: int = 0, generation: int = -1, evaluations: int = 0, points: int = 600, first: int = 0, last: int = 2**62
    ) -> dict[str, Any]:
        """What a chart draws.

        Args:
            after: the newest step the caller has; only later ones are answered, if they are at most `points`.
            generation: of what the caller has; of another one everything is answered.
            evaluations: how many evaluations the caller has.
            points: most rows that are answered: more are put together.
            first, last: steps that are asked for.

        Returns what `Columns.thinned` does, `whole` (false: to be put behind what the caller has), `generation`,
        `evaluations` (those the caller does not have), `newest` (step) and `verdict`.
        """
        self._refresh()
        with self._lock:
            known = generation == self._generation
            rows = self._columns.rows(max(first, after + 1), last)
            whole = not known or after <= 0 or rows.stop - rows.start > points
            if whole:
                rows = self._columns.rows(first, last)
            reward, accuracy = (self._columns.column(name) for name in ("reward", "accuracy"))
            return {
                "generation": self._generation,
                "whole": whole,
                "newest": int(self._columns.steps[-1]) if self._columns.steps else None,
                **self._columns.thinned(rows, points),
                "evaluations": self._found[evaluations if known else 0 :],
                "verdict": verdict(reward, accuracy),
            }

    def _refresh(self) -> None:
        """Reads what is new."""
        with self._lock:
            # Both begin anew together, since a resumed run cuts both.
            if any([self._metrics.is_another(), self._evaluations.is_another()]):
                self._metrics, self._evaluations = Lines(self._metrics.path), Lines(self._evaluations.path)
                self._columns, self._offsets, self._found = Columns(), array("q"), []
                self._generation += 1
            for offset, line in self._metrics.read():
                if not isinstance(step := line.get("step"), int) or abs(step) > 2**53:
                    continue
                if self._columns.append(step, numbers(line)):
                    self._generation += 1
                    del self._offsets[len(self._columns) - 1 :]
                self._offsets.append(offset)
            for _, line in self._evaluations.read():
                self._found.append({name: value for name, value in line.items() if isinstance(value, int | float | None)})

    def _read_config(self) -> tuple[dict[str, Any] | None, str]:
        """The configuration and what is wrong with it."""
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
