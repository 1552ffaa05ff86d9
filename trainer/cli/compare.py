"""Compares runs: their results, the settings in which they differ, and their held-out answers
problem by problem.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.errors import ConfigError
from common.process.cli import CommandParser, count, run
from trainer.dashboard.run_list import RunList
from trainer.dashboard.runs import RunReader, RunSummary
from trainer.evaluation.uncertainty import PairedDifference, paired_difference, wilson_interval
from trainer.observe.jsonl import JsonlReader, parsed

_EPILOG = """\
examples:
  python -m trainer.compare runs/first runs/second
  python -m trainer.compare runs/sweep             # every run below a directory
  python -m trainer.compare runs/first runs/second --step 40

Every run is compared with the first, on the problems that both evaluations hold. A comparison is
paired: only the problems on which two runs differ count. When the interval of a difference does not
contain 0, the difference is more than chance; p is that of McNemar's exact test.
"""
_NONE = "–"


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of a run."""

    step: int
    verdicts: Mapping[str, bool | None]
    """Whether the greedy answer to each problem is right, by the problem's id; None for an answer
    without a verdict."""

    @property
    def graded(self) -> list[bool]:
        """The verdicts that there are."""
        return [verdict for verdict in self.verdicts.values() if verdict is not None]


def parser() -> CommandParser:
    """Returns the command line."""
    usage = "RUN_DIR [RUN_DIR ...] [--step STEP]"
    made = CommandParser("trainer.compare", __doc__ or "", usage, _EPILOG)
    made.add_argument(
        "run_dirs",
        type=Path,
        nargs="+",
        metavar="RUN_DIR",
        help="directory of a run, or one above several",
    )
    made.add_argument(
        "--step",
        type=count,
        metavar="STEP",
        help="compare the evaluations of this step (default: the newest of each run)",
    )
    return made


def main(argv: list[str] | None = None) -> None:
    """Prints the comparison. Raises ConfigError for a directory without a run."""
    arguments = parser().parse_args(argv)
    # `runs/sweep/*` also names the file of the sweep.
    directories = [path for path in arguments.run_dirs if not path.is_file()]
    compare(RunList(directories or arguments.run_dirs)(), Console(), arguments.step)


def compare(runs: Sequence[RunReader], console: Console, step: int | None = None) -> None:
    """Prints the tables of the comparison.

    Args:
        runs: each is compared with the first.
        console: where to print.
        step: step of the evaluations; None for the newest of each run.

    Raises ConfigError when no run has been evaluated at `step`.
    """
    summaries = [each.summary() for each in runs]
    evaluations = [evaluated(each.directory, step) for each in runs]
    if step is not None and not any(evaluations):
        raise ConfigError(
            "no run was evaluated at this step",
            field="--step",
            value=step,
            remedy="see the column evaluated of the comparison without --step",
        )
    console.print(_results(summaries, evaluations))
    different = _differing_settings(runs, summaries)
    if different.row_count:
        console.print(different)
    if len(runs) > 1:
        console.print(_paired(summaries, evaluations))


def evaluated(run_dir: Path, step: int | None) -> Evaluated | None:
    """Returns the newest evaluation of a run, or that of `step`; None without one."""
    found = None
    for line in JsonlReader(run_dir / "evaluations.jsonl", parsed).read():
        at = line.get("step")
        if isinstance(at, int) and step in (None, at):
            found = Evaluated(step=at, verdicts=_verdicts(line.get("answers")))
    return found


def _verdicts(answers: object) -> dict[str, bool | None]:
    found = {}
    for answer in answers if isinstance(answers, list) else []:
        if isinstance(answer, dict) and isinstance(answer.get("prompt_id"), str):
            found[answer["prompt_id"]] = answer.get("correct")
    return found


def _results(summaries: Sequence[RunSummary], evaluations: Sequence[Evaluated | None]) -> Table:
    table = Table(title="runs", title_justify="left")
    for name in ("run", "state", "steps", "reward", "evaluated", "held-out accuracy", "time"):
        table.add_column(name, overflow="fold", justify="left" if name == "run" else "right")
    for summary, evaluation in zip(summaries, evaluations, strict=True):
        cells = [
            summary.name,
            summary.state,
            str(summary.step or 0),
            _NONE if summary.reward is None else f"{summary.reward:.3f}",
            _NONE if evaluation is None else f"step {evaluation.step}",
            _accuracy(evaluation),
            _duration(summary),
        ]
        table.add_row(*cells)
    return table


def _accuracy(evaluation: Evaluated | None) -> str:
    if evaluation is None or not evaluation.graded:
        return _NONE
    graded = evaluation.graded
    low, high = wilson_interval(sum(graded), len(graded))
    return f"{sum(graded) / len(graded):.1%} ({low:.1%} to {high:.1%})"


def _duration(summary: RunSummary) -> str:
    minutes = summary.hours * 60
    wall = f"{minutes:.1f} min" if minutes < 120 else f"{summary.hours:.1f} h"
    return f"{wall}, {summary.gpu_hours:.1f} GPU-h" if summary.gpu_hours else wall


def _differing_settings(runs: Sequence[RunReader], summaries: Sequence[RunSummary]) -> Table:
    """Returns a row for each setting in which the runs differ."""
    table = Table(title="settings that differ", title_justify="left")
    table.add_column("setting")
    for summary in summaries:
        table.add_column(summary.name, overflow="fold")
    changed = {name for summary in summaries for name in summary.changed}
    configs = [each.facts()["config"] or {} for each in runs]
    for name in sorted(changed):
        values = [_text(config.get(name)) for config in configs]
        if len(set(values)) > 1:
            table.add_row(name, *values)
    return table


def _text(value: Any) -> str:
    return _NONE if value is None else str(value)


def _paired(summaries: Sequence[RunSummary], evaluations: Sequence[Evaluated | None]) -> Table:
    baseline = evaluations[0]
    table = Table(
        title=f"held-out answers beside those of {summaries[0].name}", title_justify="left"
    )
    table.add_column("run", overflow="fold")
    for name in ("problems", "difference", "95 % interval", "p", "gained", "lost"):
        table.add_column(name, justify="right")
    for summary, evaluation in zip(summaries[1:], evaluations[1:], strict=True):
        found = _difference(evaluation, baseline)
        cells = ["0", *[_NONE] * 5]
        if found is not None:
            cells = [
                str(found.num_samples),
                f"{found.difference:+.1%}",
                f"{found.low:+.1%} to {found.high:+.1%}",
                f"{found.p_value:.2g}",
                str(len(found.gained)),
                str(len(found.lost)),
            ]
        table.add_row(summary.name, *cells)
    return table


def _difference(own: Evaluated | None, baseline: Evaluated | None) -> PairedDifference | None:
    """Compares two evaluations on the problems that both have a verdict on; None without one."""
    if own is None or baseline is None:
        return None
    common = [name for name in baseline.verdicts if name in own.verdicts]
    try:
        return paired_difference(
            [own.verdicts[name] for name in common],
            [baseline.verdicts[name] for name in common],
        )
    except ValueError:
        return None


if __name__ == "__main__":
    run(main, "")
