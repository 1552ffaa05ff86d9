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


def plot_curves(
    metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path
) -> None:
    """Draws the `curves` of a run and writes them to `path`."""
    curves(metrics, evaluations).figure.savefig(path, dpi=110)


def curves(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> Picture:
    """Draws learning curves, lengths and entropy, agreement with the rollout engine, and seconds by
    stage.
    """
    steps = [line["step"] for line in metrics]
    figure, ((learning, shape), (agreement, seconds)) = plt.subplots(
        2, 2, figsize=(11, 7), layout="constrained"
    )
    rated = all(line["accuracy"] is not None for line in (*metrics, *evaluations))
    training, held_out = ("accuracy", "accuracy") if rated else ("reward", "mean_reward")
    learning.plot(
        steps,
        [line[training] for line in metrics],
        color="tab:blue",
        alpha=0.6,
        label="training batch (sampled)",
    )
    if evaluations:
        how = "sampled" if evaluations[-1].get("temperature") else "greedy"
        learning.errorbar(
            [line["step"] for line in evaluations],
            [line[held_out] for line in evaluations],
            yerr=[line["standard_error"] for line in evaluations] if rated else None,
            marker="o",
            capsize=3,
            color="tab:orange",
            label=f"held-out ({how}, ± standard error)" if rated else f"held-out ({how})",
        )
    learning.set(
        title="Accuracy" if rated else "Reward", xlabel="step", ylim=(0, 1.02) if rated else None
    )
    learning.legend(loc="lower right")
    shape.plot(steps, [line["completion_tokens"] for line in metrics], color="tab:green")
    shape.set(title="Completion length and entropy", xlabel="step")
    shape.set_ylabel("tokens", color="tab:green")
    entropy = shape.twinx()
    entropy.plot(steps, [line["update"]["entropy"] for line in metrics], color="tab:purple")
    entropy.set_ylabel("nats per token", color="tab:purple")
    agreement.plot(
        steps,
        [line["update"]["delta_logprob"] for line in metrics],
        label="mean |Δ logprob| to the rollout engine",
    )
    agreement.plot(
        steps, [line["update"]["clip_fraction"] for line in metrics], label="clip fraction"
    )
    agreement.set(title="Agreement with the rollout engine", xlabel="step")
    agreement.set_yscale("symlog", linthresh=1e-6)
    agreement.legend()
    stages = [*STAGES, WAITING]
    seconds.stackplot(
        steps,
        *([line["seconds"].get(stage, 0.0) for line in metrics] for stage in stages),
        labels=stages,
    )
    seconds.set(title="Seconds of a step", xlabel="step")
    seconds.legend(loc="upper right", fontsize="small", ncols=2)
    plt.close(figure)  # removes it from pyplot's list: a notebook would show it twice
    return Picture(figure)


def plot_losses(
    metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path
) -> None:
    """Writes losses, gradient norm and learning rate of a run on worked answers to `path`."""
    steps = [line["step"] for line in metrics]
    figure, (losses, norms) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    losses.plot(
        steps,
        [line["update"]["loss"] for line in metrics],
        color="tab:blue",
        alpha=0.6,
        label="training batch",
    )
    if evaluations:
        held_out = ([line[name] for line in evaluations] for name in ("step", "loss"))
        losses.plot(*held_out, marker="o", color="tab:orange", label="held-out")
    losses.set(title="Loss (nats per token)", xlabel="step")
    losses.legend()
    norms.plot(steps, [line["update"]["grad_norm"] for line in metrics], color="tab:green")
    norms.set(title="Gradient norm and learning rate", xlabel="step")
    rates = norms.twinx()
    rates.plot(steps, [line["update"]["learning_rate"] for line in metrics], color="tab:purple")
    figure.savefig(path, dpi=110)
    plt.close(figure)
