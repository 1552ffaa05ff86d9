"""Plots a run as one PNG."""

import io
from pathlib import Path
from typing import Any

import matplotlib as mpl

from trainer.timing import STAGES, WAITING

mpl.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt


class Picture:
    """Curves that a notebook displays as the value of a cell."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=80)
        return file.getvalue()


def _column(lines: list[dict[str, Any]], name: str, section: str = "") -> list[Any]:
    """Returns a number of every line, which may be in a section (`update`)."""
    return [(line[section] if section else line)[name] for line in lines]


def plot_curves(
    metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path
) -> None:
    """Draws the `curves` of a run and writes them to `path`."""
    curves(metrics, evaluations).figure.savefig(path, dpi=110)


def curves(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> Picture:
    """Draws learning curves, lengths and entropy, agreement with the rollout engine, and seconds by
    stage.
    """
    steps = _column(metrics, "step")
    figure, ((learning, length), (agreement, seconds)) = plt.subplots(
        2, 2, figsize=(11, 7), layout="constrained"
    )
    _draw_learning(learning, metrics, evaluations)

    length.plot(steps, _column(metrics, "completion_tokens"), color="tab:green")
    length.set(title="Completion length and entropy", xlabel="step")
    length.set_ylabel("tokens", color="tab:green")
    entropy = length.twinx()
    entropy.plot(steps, _column(metrics, "entropy", "update"), color="tab:purple")
    entropy.set_ylabel("nats per token", color="tab:purple")

    agreement.plot(
        steps,
        _column(metrics, "delta_logprob", "update"),
        label="mean |Δ logprob| to the rollout engine",
    )
    agreement.plot(steps, _column(metrics, "clip_fraction", "update"), label="clip fraction")
    agreement.set(title="Agreement with the rollout engine", xlabel="step")
    agreement.set_yscale("symlog", linthresh=1e-6)
    agreement.legend()

    stages = [*STAGES, WAITING]
    layers = [[line["seconds"].get(stage, 0.0) for line in metrics] for stage in stages]
    seconds.stackplot(steps, layers, labels=stages)
    seconds.set(title="Seconds of a step", xlabel="step")
    seconds.legend(loc="upper right", fontsize="small", ncols=2)

    plt.close(figure)  # removes it from pyplot's list: a notebook would show it twice
    return Picture(figure)


def _draw_learning(
    axes: Any, metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> None:
    """Draws accuracy or, when the rewards are not verdicts, the reward."""
    rated = all(line["accuracy"] is not None for line in (*metrics, *evaluations))
    axes.plot(
        _column(metrics, "step"),
        _column(metrics, "accuracy" if rated else "reward"),
        color="tab:blue",
        alpha=0.6,
        label="training batch (sampled)",
    )
    if evaluations:
        sampling = "sampled" if evaluations[-1].get("temperature") else "greedy"
        axes.errorbar(
            _column(evaluations, "step"),
            _column(evaluations, "accuracy" if rated else "mean_reward"),
            yerr=_column(evaluations, "standard_error") if rated else None,
            marker="o",
            capsize=3,
            color="tab:orange",
            label=f"held-out ({sampling}, ± standard error)" if rated else f"held-out ({sampling})",
        )
    axes.set(
        title="Accuracy" if rated else "Reward", xlabel="step", ylim=(0, 1.02) if rated else None
    )
    axes.legend(loc="lower right")


def plot_losses(
    metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path
) -> None:
    """Writes losses, gradient norm and learning rate of a run on worked answers to `path`."""
    steps = _column(metrics, "step")
    figure, (losses, norms) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    losses.plot(
        steps,
        _column(metrics, "loss", "update"),
        color="tab:blue",
        alpha=0.6,
        label="training batch",
    )
    if evaluations:
        losses.plot(
            _column(evaluations, "step"),
            _column(evaluations, "loss"),
            marker="o",
            color="tab:orange",
            label="held-out",
        )
    losses.set(title="Loss (nats per token)", xlabel="step")
    losses.legend()
    norms.plot(steps, _column(metrics, "grad_norm", "update"), color="tab:green")
    norms.set(title="Gradient norm and learning rate", xlabel="step")
    rates = norms.twinx()
    rates.plot(steps, _column(metrics, "learning_rate", "update"), color="tab:purple")
    figure.savefig(path, dpi=110)
    plt.close(figure)
