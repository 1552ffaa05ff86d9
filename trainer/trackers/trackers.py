"""All trackers of a run, on rank 0."""

import os
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from common.process.storage import storing
from common.settings.config import Config
from common.wire.schemas import Group
from trainer.evaluation.evaluation import Answer
from trainer.trackers.base import Cell, Record, RunInfo, check, numbers
from trainer.trackers.thread import TrackerThread

Sample = dict[str, Cell]
"""One row of a table, by column."""
# Time to flush when the run ends; what is left is lost and reported.
_FLUSH_S = 60.0
# Time to flush when the run is interrupted.
_INTERRUPTED_S = 5.0
# Default environment variables that switch off the libraries' telemetry.
_NO_TELEMETRY = {
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
SAMPLE_EVERY = 10
"""Steps between sample tables, each with the completions of one group."""
_MAX_TEXT = 4000
_MAX_ROWS = 64


class Trackers:
    """The trackers of `config.trackers` for a run that continues after `step`; they write to
    `trackers` in `run_dir`.

    `say` prints a line; `counted` counts records by tracker and result.

    Raises ConfigError for an unusable tracker, StorageFailed when `run_dir` cannot be written.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        step: int,
        say: Callable[[str], None],
        counted: Counter | None = None,
    ) -> None:
        self._threads: list[TrackerThread] = []
        names = config.trackers.names
        check(config.trackers)
        if not names:
            return
        directory = (run_dir / "trackers").absolute()
        with storing("id", directory, "trainer.run_dir"):
            directory.mkdir(exist_ok=True)
            run_id = _own_id(directory / "id", new=step == 0 and not config.checkpoint.resume)
        run = RunInfo(
            id=run_id,
            name=config.trackers.run_name or run_dir.absolute().name,
            project=config.trackers.project,
            directory=directory,
            config=config.model_dump(mode="json"),
            step=step,
        )
        for variable, value in _NO_TELEMETRY.items():
            os.environ.setdefault(variable, value)

        def count(name: str, result: str) -> None:
            if counted:
                counted.labels(name, result).inc()

        self._threads = [TrackerThread(name, run, say, partial(count, name)) for name in names]

    def step(self, record: Record, group: Group | None) -> None:
        """Records the numbers of a step, and every `SAMPLE_EVERY` steps the completions of
        `group`, if any.
        """
        step = record["step"]
        values = numbers(record, "/")
        del values["step"]
        self._put("metrics", step=step, values=values)
        if group is not None and step % SAMPLE_EVERY == 0:
            self._put_table(step, "samples", _samples(group))

    def evaluation(self, summary: Record, answers: Sequence[Answer]) -> None:
        """Records the numbers and the first answers of an evaluation, if it has any."""
        step = summary["step"]
        self._put("metrics", step=step, values=numbers({"evaluation": summary}, "/"))
        rows: list[Sample] = [
            {
                "prompt": _text(answer.prompt),
                "ground_truth": answer.ground_truth,
                "answer": _text(answer.response),
                "correct": answer.correct,
            }
            for answer in answers[:_MAX_ROWS]
        ]
        if rows:
            self._put_table(step, "evaluation/answers", rows)

    def close(self, finished: bool) -> None:
        """Waits at most `_FLUSH_S` (`_INTERRUPTED_S` unless `finished`) for the trackers, then
        abandons slow ones.
        """
        deadline = time.monotonic() + (_FLUSH_S if finished else _INTERRUPTED_S)
        # All of them flush at the same time, before the first one is waited for.
        for thread in self._threads:
            thread.end(finished)
        for thread in self._threads:
            thread.wait(deadline)
        self._threads = []

    def _put_table(self, step: int, name: str, rows: list[Sample]) -> None:
        cells = [list(row.values()) for row in rows]
        self._put("table", step=step, name=name, columns=list(rows[0]), rows=cells)

    def _put(self, call: str, **arguments: Any) -> None:
        for thread in self._threads:
            thread.put(call, **arguments)


def _own_id(path: Path, new: bool) -> str:
    known = path.read_text(encoding="ascii", errors="replace") if path.exists() else ""
    if known.isalnum() and not new:
        return known
    made = uuid.uuid4().hex[:12]
    partial = path.with_name("id.partial")
    partial.write_text(made, encoding="ascii")
    partial.replace(path)
    return made


def _samples(group: Group) -> list[Sample]:
    return [
        {
            "prompt": _text(group.prompt),
            "ground_truth": group.ground_truth,
            "completion": _text(completion.text),
            "reward": float(completion.reward),
            "correct": completion.correct if completion.verified else None,
            "extracted_answer": completion.extracted_answer,
            "status": completion.status,
            "tokens": len(completion.token_ids),
            "finish": completion.finish_reason,
        }
        for completion in group.completions
    ]


def _text(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
