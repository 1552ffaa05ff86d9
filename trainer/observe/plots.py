"""Plots of a run in one PNG."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

from trainer.observe.timing import STAGES, WAITING

mpl.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt


def plot_curves(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path) -> None:
    """Writes learning curves, lengths and entropy, agreement with the rollout engine, and seconds by stage to `path`."""
    steps = [line["step"] for line in metrics]
    figure, ((learning, shape), (agreement, seconds)) = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    learning.plot(steps, [line["accuracy"] for line in metrics], color="tab:blue", alpha=0.6, label="training batch (sampled)")
    if evaluations:
        learning.errorbar(
            [line["step"] for line in evaluations],
            [line["accuracy"] for line in evaluations],
            yerr=[line["standard_error"] for line in evaluations],
            marker="o",
            capsize=3,
            color="tab:orange",
            label="held-out (greedy, ± standard error)",
        )
    learning.set(title="Accuracy", xlabel="step", ylim=(0, 1.02))
    learning.legend(loc="lower right")
    shape.plot(steps, [line["completion_tokens"] for line in metrics], color="tab:green")
    shape.set(title="Completion length and entropy", xlabel="step")
    shape.set_ylabel("tokens", color="tab:green")
    entropy = shape.twinx()
    entropy.plot(steps, [line["update"]["entropy"] for line in metrics], color="tab:purple")
    entropy.set_ylabel("nats per token", color="tab:purple")
    agreement.plot(steps, [line["update"]["delta_logprob"] for line in metrics], label="mean |Δ logprob| to the rollout engine")
    agreement.plot(steps, [line["update"]["clip_fraction"] for line in metrics], label="clip fraction")
    agreement.set(title="Agreement with the rollout engine", xlabel="step")
    agreement.set_yscale("symlog", linthresh=1e-6)
    agreement.legend()
    stages = [*STAGES, WAITING]
    seconds.stackplot(steps, *([line["seconds"][stage] for line in metrics] for stage in stages), labels=stages)
    seconds.set(title="Seconds of a step", xlabel="step")
    seconds.legend(loc="upper right", fontsize="small", ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)
