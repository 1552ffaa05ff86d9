"""Compares runs: their results, the settings in which they differ, and their held-out answers
problem by problem.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from common.errors import ConfigError
from common.process.cli import CommandParser, count, run
from trainer.dashboard.run_list import RunList
from trainer.dashboard.runs import RunReader, RunSummary
from trainer.evaluation.uncertainty import (
    PairedDifference,
    mean_difference,
    paired_difference,
    wilson_interval,
)
from trainer.observe.jsonl import JsonlReader, parsed
from trainer.observe.run_dir import no_step

_EPILOG = """\
examples:
  rlhf compare runs/first runs/second
  rlhf compare runs/rates             # every run below a directory
  rlhf compare runs/first runs/second --step 40

Every run is compared with the first, on the problems that both evaluations hold. A comparison is
paired, problem by problem. When the interval of a difference does not contain 0, the difference is
more than chance; p is that of McNemar's exact test, or, for rewards that are no verdicts, that of a
mean of differences.
"""
_NONE = "–"


class RecordedAnswer(msgspec.Struct):
    """The greedy answer to a problem, as `evaluations.jsonl` has it; earlier versions lack
    fields.
    """

    prompt_id: str
    prompt: str = ""
    ground_truth: str = ""
    response: str = ""
    correct: bool | None = None
    """None for an answer without a verdict."""
    reward: float | None = None


class RecordedEvaluation(msgspec.Struct):
    """A line of `evaluations.jsonl`."""

    step: int
    answers: list[RecordedAnswer] = []

    @property
    def verdicts(self) -> dict[str, bool | None]:
        """Whether each answer is right, by the problem's id."""
        return {answer.prompt_id: answer.correct for answer in self.answers}

    @property
    def rewards(self) -> dict[str, float]:
        """The rewards of the answers that have one, by the problem's id."""
        found = {answer.prompt_id: answer.reward for answer in self.answers}
        return {prompt_id: reward for prompt_id, reward in found.items() if reward is not None}

    @property
    def graded(self) -> list[bool]:
        """The verdicts that there are."""
        return [answer.correct for answer in self.answers if answer.correct is not None]


def recorded_evaluations(run_dir: Path) -> Iterator[RecordedEvaluation]:
    """Yields the evaluations of a run; damaged lines are left out."""

    def decoded(line: bytes) -> RecordedEvaluation:
        return msgspec.convert(parsed(line), RecordedEvaluation)

    return JsonlReader(run_dir / "evaluations.jsonl", decoded).read()


def parser() -> CommandParser:
    """Returns the command line."""
    usage = "RUN_DIR [RUN_DIR ...] [--step STEP]"
    made = CommandParser("rlhf compare", __doc__, usage, _EPILOG)
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
    """Prints the comparison. Raises ConfigError for a directory without a run, and if no run has a
    step.
    """
    arguments = parser().parse_args(argv)
    # `runs/*` may also name a file.
    directories = [path for path in arguments.run_dirs if not path.is_file()]
    runs = RunList(directories or arguments.run_dirs)()
    if all(each.summary().step is None for each in runs):
        raise no_step(", ".join(map(str, directories)))
    compare(runs, Console(), arguments.step)


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
        steps = {each.step for run in runs for each in recorded_evaluations(run.directory)}
        known = ", ".join(map(str, sorted(steps)))
        raise ConfigError(
            "no run was evaluated at this step",
            field="--step",
            value=step,
            remedy=f"name one of {known}" if known else "leave it out: there is no evaluation",
        )
    console.print("runs", style="italic")
    for number, summary in enumerate(summaries, start=1):
        console.print(f"{number:>4}  {summary.name}", highlight=False, markup=False, soft_wrap=True)
    console.print(_results(summaries, evaluations))
    different = _differing_settings(runs, summaries)
    if different:
        console.print(_settings_table(different, len(runs)))
    if len(runs) > 1:
        columns = ["run", "problems", "difference", "95 % interval", "p", "gained", "lost"]
        table = plain_table("held-out answers beside those of run 1", columns)
        for number, evaluation in enumerate(evaluations[1:], start=2):
            table.add_row(str(number), *_difference(evaluation, evaluations[0]))
        console.print(table)


def evaluated(run_dir: Path, step: int | None) -> RecordedEvaluation | None:
    """Returns the newest evaluation of a run, or that of `step`; None without one."""
    found = None
    for evaluation in recorded_evaluations(run_dir):
        if step in (None, evaluation.step):
            found = evaluation
    return found


def plain_table(title: str, columns: Sequence[str]) -> Table:
    """Returns a table whose first column is text. Its cells name runs by number, since paths can be
    longer than a line, and tables should fit into 80 columns.
    """
    table = Table(
        title=title, title_justify="left", box=SIMPLE, pad_edge=False, collapse_padding=True
    )
    for place, name in enumerate(columns):
        table.add_column(name, overflow="fold", justify="right" if place else "left")
    return table


def _results(
    summaries: Sequence[RunSummary], evaluations: Sequence[RecordedEvaluation | None]
) -> Table:
    columns = ["run", "state", "steps", "reward", "evaluated", "held-out", "time"]
    table = plain_table("results; reward: in training, mean of the last 10 steps", columns)
    for number, (summary, evaluation) in enumerate(
        zip(summaries, evaluations, strict=True), start=1
    ):
        cells = [
            str(number),
            summary.state,
            str(summary.step or 0),
            _NONE if summary.reward is None else f"{summary.reward:.3f}",
            _NONE if evaluation is None else f"step {evaluation.step}",
            _held_out(evaluation),
            _duration(summary),
        ]
        table.add_row(*cells)
    return table


def _held_out(evaluation: RecordedEvaluation | None) -> str:
    """Returns the accuracy with its interval; the mean reward where answers have no verdicts."""
    if evaluation is None or not (evaluation.graded or evaluation.rewards):
        return _NONE
    if not evaluation.graded:
        return f"reward {mean(evaluation.rewards.values()):.3f}"
    graded = evaluation.graded
    low, high = wilson_interval(sum(graded), len(graded))
    return f"{sum(graded) / len(graded):.1%} ({low:.1%} to {high:.1%})"


def _duration(summary: RunSummary) -> str:
    minutes = summary.hours * 60
    wall = f"{minutes:.1f} min" if minutes < 120 else f"{summary.hours:.1f} h"
    return f"{wall}, {summary.gpu_hours:.1f} GPU-h" if summary.gpu_hours else wall


def _differing_settings(
    runs: Sequence[RunReader], summaries: Sequence[RunSummary]
) -> dict[str, list[str]]:
    """Returns the values of each setting in which the runs differ, in the order of the runs."""
    changed = {name for summary in summaries for name in summary.changed}
    configs = [each.facts()["config"] or {} for each in runs]
    different = {}
    for name in sorted(changed):
        values = [str(config.get(name, _NONE)) for config in configs]
        if len(set(values)) > 1:
            different[name] = values
    return different


def _settings_table(different: Mapping[str, Sequence[str]], num_runs: int) -> Table:
    """Returns a table of settings; its columns are the runs, or the settings if they are fewer."""
    title = "settings that differ"
    numbers = [str(number) for number in range(1, num_runs + 1)]
    if num_runs <= len(different):
        table = plain_table(title, ["setting", *numbers])
        for name, values in different.items():
            table.add_row(name, *values)
        return table

    table = plain_table(title, ["run", *different])
    for number, *values in zip(numbers, *different.values(), strict=True):
        table.add_row(number, *values)
    return table


def _difference(own: RecordedEvaluation | None, baseline: RecordedEvaluation | None) -> list[str]:
    """Compares two evaluations on the problems that both have a verdict on, or else a reward;
    returns the cells of the table.
    """
    if own is None or baseline is None:
        return ["0", *[_NONE] * 5]
    kinds: list[tuple[str, Callable[..., PairedDifference], str]] = [
        ("verdicts", paired_difference, "{:+.1%}"),
        ("rewards", mean_difference, "{:+.3f}"),
    ]
    for kind, compared, written in kinds:
        first = getattr(own, kind)
        second = getattr(baseline, kind)
        common = [name for name in second if name in first]
        with suppress(ValueError):  # nothing is common that could be compared
            found = compared([first[name] for name in common], [second[name] for name in common])
            unit = "reward " if kind == "rewards" else ""
            return [
                str(found.num_samples),
                unit + written.format(found.difference),
                f"{written.format(found.low)} to {written.format(found.high)}",
                f"{found.p_value:.2g}",
                str(len(found.gained)),
                str(len(found.lost)),
            ]
    return ["0", *[_NONE] * 5]


if __name__ == "__main__":
    run(main, "")
