"""All trackers of a run: what they are told of a step and of an evaluation. Rank 0 alone has them."""

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from common.config import Config
from common.schemas import Group
from common.storing import storing
from trainer.rollouts.evaluation import Evaluation
from trainer.trackers.base import Cell, RunInfo
from trainer.trackers.check import check
from trainer.trackers.outlet import Outlet

_FLUSH_S = 60.0
"""For what is still on its way when the run ends; then it is lost, and said to be."""
_INTERRUPTED_S = 5.0
"""To flush, when the run ends before its end: whoever ends it does not wait long."""
_MAX_TEXT, _MAX_ROWS = 4000, 64
_SAMPLES = ["prompt", "ground_truth", "completion", "reward", "correct", "extracted_answer", "status", "tokens", "finish"]
_ANSWERS = ["prompt", "ground_truth", "answer", "correct"]


class Trackers:
    """Starts those of `config.trackers`; with none of them it does nothing.

    Args:
        config: of the run.
        run_dir: the trackers' own files go to its folder `trackers`.
        step: the run goes on after this step.
        say: tells a person.
        counted: a counter with the labels tracker and result.

    Raises ConfigError when one cannot be used, StorageFailed when `run_dir` cannot be written.
    """

    def __init__(
        self, config: Config, run_dir: Path, step: int, say: Callable[[str], None], counted: Counter | None = None
    ) -> None:
        self._settings, self._outlets = config.trackers, list[Outlet]()
        check(config.trackers)
        directory = (run_dir / "trackers").absolute()
        if not config.trackers.names:
            return
        with storing("id", directory, "trainer.run_dir"):
            directory.mkdir(exist_ok=True)
            run_id = _own_id(directory / "id", new=step == 0 and not config.trainer.resume)
        run = RunInfo(
            id=run_id,
            name=config.trackers.run_name or run_dir.absolute().name,
            project=config.trackers.project,
            directory=directory,
            config=config.model_dump(mode="json"),
            step=step,
        )
        start = asdict(run) | {"directory": str(directory)}

        def count(name: str) -> Callable[[str], None]:
            return lambda result: counted.labels(name, result).inc() if counted else None

        for name in config.trackers.names:
            self._outlets.append(Outlet(name, start, directory, say, count(name)))

    def step(self, record: Mapping[str, Any], group: Group) -> None:
        """A step was done; its numbers, and every `trackers.sample_every` steps the completions of one of its groups."""
        step, every = record["step"], self._settings.sample_every
        self._put("metrics", step=step, values={name: value for name, value in _numbers(record) if name != "step"})
        if every and step % every == 0:
            self._table(step, "samples", _SAMPLES, _samples(group))

    def evaluation(self, evaluation: Evaluation) -> None:
        """An evaluation was done; its numbers and its first answers."""
        values = dict(_numbers({"evaluation": evaluation.summary()}))
        self._put("metrics", step=evaluation.step, values=values)
        answers = evaluation.answers[:_MAX_ROWS]
        rows: list[list[Cell]] = [[_text(a.prompt), a.ground_truth, _text(a.response), a.correct] for a in answers]
        self._table(evaluation.step, "evaluation/answers", _ANSWERS, rows)

    def close(self, finished: bool) -> None:
        """Waits until they have taken everything, `_FLUSH_S` at most, and ends them."""
        deadline = time.monotonic() + (_FLUSH_S if finished else _INTERRUPTED_S)
        for outlet in self._outlets:
            outlet.end(finished)
        for outlet in self._outlets:
            outlet.wait(deadline)
        self._outlets = []

    def _table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        self._put("table", step=step, name=name, columns=columns, rows=rows)

    def _put(self, call: str, **arguments: Any) -> None:
        for outlet in self._outlets:
            outlet.put(call, **arguments)


def _own_id(path: Path, new: bool) -> str:
    """The id of the run in this directory, made when it is not there."""
    if new or not path.exists():
        partial = path.with_name("id.partial")
        partial.write_text(uuid.uuid4().hex[:12], encoding="ascii")
        partial.replace(path)
    return path.read_text(encoding="ascii")


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a record, those in mappings as `mapping/name`."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)


def _samples(group: Group) -> list[list[Cell]]:
    return [
        [
            *(_text(group.prompt), group.ground_truth, _text(completion.text), float(completion.reward)),
            *(completion.correct, completion.extracted_answer, completion.status),
            *(len(completion.token_ids), completion.finish_reason),
        ]
        for completion in group.completions
    ]


def _text(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
