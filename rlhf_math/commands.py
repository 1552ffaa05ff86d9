"""The console scripts. Each runs a module as `python -m` does in the root of a checkout."""

import os
import runpy
import sys

from rlhf_math import ROOT


def run(module: str) -> None:
    """Runs `module` with the arguments of this process.

    It and its child processes look for modules in this package first, then in the working
    directory. `PYTHONSAFEPATH` keeps `python -m` in a child from reversing that order: a folder
    there may have the name of one of our packages.
    """
    paths = [str(ROOT), os.getcwd()]  # noqa: PTH109
    sys.path[:] = [*paths, *(entry for entry in sys.path if entry not in paths)]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in inherited if entry not in (str(ROOT), ".")]
    os.environ |= {"PYTHONPATH": os.pathsep.join([str(ROOT), ".", *others]), "PYTHONSAFEPATH": "1"}
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def train() -> None:
    """`rlhf-train`: one process of the trainer."""
    run("trainer")


def sft() -> None:
    """`rlhf-sft`: supervised fine-tuning."""
    run("trainer.sft")


def evaluate() -> None:
    """`rlhf-eval`: measures a model, or compares two."""
    run("trainer.evaluate_model")


def local() -> None:
    """`rlhf-local`: runs a job group on this machine."""
    run("jobgroup.local")


def sweep() -> None:
    """`rlhf-sweep`: runs a job group for every point of a grid of settings."""
    run("jobgroup.sweep")


def compare() -> None:
    """`rlhf-compare`: compares runs, paired by problem."""
    run("trainer.compare")


def replay() -> None:
    """`rlhf-replay`: re-executes a step of a run and compares every stage."""
    run("trainer.replay")


def doctor() -> None:
    """`rlhf-doctor`: checks this machine, or a pod from within."""
    run("jobgroup.doctor")


def diagnose() -> None:
    """`rlhf-diagnose`: says what is wrong with a run."""
    run("trainer.diagnose")


def dashboard() -> None:
    """`rlhf-dashboard`: shows runs in a browser."""
    run("trainer.dashboard")


def gpu_check() -> None:
    """`rlhf-gpu-check`: tests on one GPU what could not be tested without one."""
    run("benchmarks.gpu_check")
