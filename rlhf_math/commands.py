"""`rlhf COMMAND ARGUMENT…`: every program that a person starts, by one word.

Ranks and services are started by their module, as the job groups do: `python -m services.reward`.
"""

import os
import runpy
import sys

from rlhf_math import PACKAGES, ROOT  # isort: skip  (it makes the others importable)

from common import VERSION
from common.errors import ConfigError, did_you_mean
from common.process.cli import fail

COMMANDS = {
    "train": ("trainer.train_math", "train a model in one process"),
    "sft": ("trainer.sft", "fine-tune a model on given answers"),
    "tinker": ("trainer.tinker", "serve Tinker's API: training loops of other programs"),
    "eval": ("trainer.evaluate_model", "measure a model, or compare two"),
    "export": ("trainer.export", "make a model's directory from a checkpoint or an adapter"),
    "local": ("jobgroup.local", "run a job group on this machine"),
    "compare": ("trainer.compare", "compare runs, paired by problem"),
    "report": ("trainer.report", "write a page about a run"),
    "dashboard": ("trainer.dashboard", "show runs in a browser"),
    "diagnose": ("trainer.diagnose", "say what is wrong with a run"),
    "audit": ("trainer.audit", "execute a step of a run again and compare every stage"),
    "regrade": ("trainer.what_if.regrade", "grade the recorded answers of a run again"),
    "why": ("trainer.what_if.why", "say why a run collapsed or jumped"),
    "fork": ("trainer.what_if.fork", "continue a run from a step with something changed"),
    "doctor": ("jobgroup.doctor", "check this machine, or plan a run's GPUs"),
    "gpu-check": ("checks.gpu_check", "test on one GPU what needs one"),
    "tiny-model": ("trainer.tiny_model", "make the built-in model, which trains on a CPU"),
}
"""The module and the purpose of each command."""


def main() -> None:
    """Runs the command, or the module of this project, that the first argument names."""
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in ("-h", "--help"):
        print(_help())
        return
    if word == "--version":
        print(f"rlhf-math {VERSION}")
        return

    module = COMMANDS[word][0] if word in COMMANDS else word
    if module.partition(".")[0] not in (*PACKAGES, "benchmarks", "checks"):
        remedy = f"{did_you_mean(word, COMMANDS)}; rlhf --help says what each does"
        fail(ConfigError("there is no such command", field="rlhf", value=word, remedy=remedy))
    del sys.argv[1]
    try:
        _run(module)
    except KeyboardInterrupt:  # while it was imported: afterwards the command says more
        print("\ninterrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None


def _help() -> str:
    lines = ["usage: rlhf COMMAND ARGUMENT…   (rlhf COMMAND --help explains its arguments)", ""]
    lines += [f"  {name:<12}{purpose}" for name, (_, purpose) in COMMANDS.items()]
    lines += ["", f"The job groups and settings files are in {ROOT / 'jobgroup'}"]
    return "\n".join(lines)


def _run(module: str) -> None:
    """Runs `module` with the arguments of this process, as `python -m` does in a checkout.

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
