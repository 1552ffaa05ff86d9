"""Plots a run as one PNG."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from trainer.observe.metrics import METRICS, Metric
from trainer.timing import STAGES, WAITING
from trainer.trackers.base import numbers

mpl.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt

Lines = Sequence[Mapping[str, Any]]
_DRAWN = (
    "accuracy",
    "reward",
    "update.loss",
    "completion_tokens",
    "update.entropy",
    "update.delta_logprob_current",
    "update.grad_norm",
)
"""The numbers that have a plot, if the run has them."""
_ROWS = 2


class Picture:
    """Curves that a notebook displays as the value of a cell."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=80)
        return file.getvalue()


def plot_curves(metrics: Lines, evaluations: Lines, path: Path) -> None:
    """Draws the `curves` of a run and writes them to `path`."""
    curves(metrics, evaluations).figure.savefig(path, dpi=110)


def curves(metrics: Lines, evaluations: Lines) -> Picture:
    """Draws the numbers of `_DRAWN` with those of the evaluations, and the seconds by stage."""
    rows = [numbers(line) for line in metrics]
    held_out = [numbers(line) for line in evaluations]
    known = {name for row in rows for name in row}
    drawn = [metric for metric in METRICS if metric.name in _DRAWN and metric.name in known]
    columns = math.ceil((len(drawn) + 1) / _ROWS)
    figure, grid = plt.subplots(
        _ROWS, columns, figsize=(4 * columns, 7), layout="constrained", squeeze=False
    )
    places = grid.flatten()
    for metric, axes in zip(drawn, places, strict=False):
        _draw(axes, metric, rows, held_out)
    for axes in places[len(drawn) + 1 :]:
        axes.remove()

    seconds = places[len(drawn)]
    stages = [*STAGES, WAITING]
    layers = [[row.get(f"seconds.{stage}", 0.0) for row in rows] for stage in stages]
    seconds.stackplot(_column(rows, "step"), layers, labels=stages)
    seconds.set(title="Seconds of a step", xlabel="step")
    seconds.legend(loc="upper right", fontsize="small", ncols=2)

    plt.close(figure)  # removes it from pyplot's list: a notebook would show it twice
    return Picture(figure)


def _column(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [row.get(name, math.nan) for row in rows]


def _draw(
    axes: Any,
    metric: Metric,
    rows: Sequence[Mapping[str, float]],
    held_out: Sequence[Mapping[str, float]],
) -> None:
    """Draws a number over the steps, and that of the evaluations."""
    axes.plot(_column(rows, "step"), _column(rows, metric.name), label="training batch")
    evaluated = [row for row in held_out if metric.held_out in row]
    if evaluated:
        errors = _column(evaluated, "standard_error") if metric.name == "accuracy" else None
        axes.errorbar(
            _column(evaluated, "step"),
            _column(evaluated, metric.held_out),
            yerr=errors,
            marker="o",
            capsize=3,
            label="held-out",
        )
        axes.legend()
    axes.set(title=metric.chart, xlabel="step", ylabel=metric.unit)
