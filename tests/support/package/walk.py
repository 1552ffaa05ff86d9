"""Counts the functions of this project that one prompt crosses, from the data-server to an update:

    python -m tests.support.package.walk [--names]

A run in one process, with the embedded engine and one group a step, is watched by a profiler in all
threads, from the acknowledgement of one batch (the next prompt is drawn then) to the end of the
next update. Functions count once, by file and name; a lambda or a comprehension is a part of its
function. *Carries* are those that take or return the prompt or what becomes of it: its group,
completions, rewards, rows and tensors. Answers differ between machines, and how they are graded
with them, so the counts vary by a few.
"""

import argparse
import inspect
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from rich.console import Console

from common.settings.config import load
from tests.support.paths import ROOT
from trainer.algorithms.batch import Batch
from trainer.rollouts.rollouts import Rollouts
from trainer.start.in_process import train_in_process
from trainer.weights.sync import WeightSync

PACKAGES = ("common", "learning", "services", "trainer")
BESIDE = (
    "learning/",
    "services/engine/",
    "services/http/",
    "common/process/",
    "trainer/diagnosis/",
    "trainer/evaluation/",
    "trainer/observe/",
    "trainer/trackers/",
    "trainer/weights/",
    "trainer/run.py",
    "trainer/timing.py",
    "trainer/policy/checkpoint.py",
)
"""What a reader of the walk may pass by: how models compute, servers and processes, records,
checkpoints, and the weights' way back."""
CARRIERS = {
    *("Prompt", "PromptBatch", "DrawnPrompt", "TokenisedPrompt"),
    *("Group", "Completion", "Answer", "_Answer", "UntakenGroup", "GroupRecord", "Lease"),
    *("RewardItem", "RewardResult", "BatchRewardResult", "Score"),
    *("TrainingGroup", "Batch", "Row", "RowTokens", "Sampled"),
    *("MicroBatch", "ModelInputs", "TokenTerms", "TokenScores", "PolicyLoss"),
}
"""Types of a prompt and of what becomes of it."""
BATCH = 5
"""The batch after which the walk begins."""


class Walk:
    """The functions that were called while it was `on`."""

    def __init__(self) -> None:
        self.on = False
        self.called: set[tuple[str, str]] = set()
        self.carries: set[tuple[str, str]] = set()

    def watch(self, frame: FrameType, event: str, result: Any) -> None:
        """Notes a call or a return, as `sys.setprofile` asks."""
        code = frame.f_code
        if not self.on or event not in ("call", "return") or code.co_name.startswith("<"):
            return
        path = Path(code.co_filename)
        # The body of a class is code too, but no function.
        if not path.is_relative_to(ROOT) or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        file = path.relative_to(ROOT).as_posix()
        if not file.startswith(PACKAGES):
            return

        function = (file, code.co_qualname)
        self.called.add(function)
        given = [result]
        if event == "call":
            count = code.co_argcount + code.co_kwonlyargcount
            given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        if any(map(_is_carried, given)):
            self.carries.add(function)


def _is_carried(value: Any, depth: int = 0) -> bool:
    """Returns whether a value, or one of the first two in it, has a type of `CARRIERS`."""
    if type(value).__name__ in CARRIERS:
        return True
    if depth == 2:
        return False
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(_is_carried(each, depth + 1) for each in value[:2])
    return False


def walk() -> Walk:
    """Trains seven steps and returns what was seen."""
    seen = Walk()
    batches = 0
    start_acknowledging = Rollouts.start_acknowledging
    gather = WeightSync.gather

    def begin(rollouts: Rollouts, batch: Batch) -> None:
        nonlocal batches
        batches += 1
        seen.on = batches == BATCH
        start_acknowledging(rollouts, batch)

    def end(weights: WeightSync, policy: Any) -> Any:
        if batches > BATCH:
            seen.on = False
        return gather(weights, policy)

    with (
        patch.object(Rollouts, "start_acknowledging", begin),
        patch.object(WeightSync, "gather", end),
        tempfile.TemporaryDirectory() as directory,
    ):
        settings = {
            "model.name": ROOT / ".cache/tiny-base",
            # Few, so that the check of all ground truths ends before the walk begins.
            "data.num_samples": 16,
            "trainer.batch_size": 1,
            # With it a group whose answers are all wrong has a gradient too.
            "algorithm.entropy_coef": 0.001,
            "trainer.max_steps": BATCH + 2,
            "trainer.run_dir": f"{directory}/run",
            "state_dir": f"{directory}/state",
            "evaluation.every": 0,
            "evaluation.samples": 0,
        }
        words = ["--config", str(ROOT / "jobgroup/configs/tiny-cpu.yaml")]
        words += [f"--{name}={value}" for name, value in settings.items()]
        config = load(words, {})
        threading.setprofile(seen.watch)
        sys.setprofile(seen.watch)
        try:
            train_in_process(config, Console(quiet=True))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return seen


def _count(functions: set[tuple[str, str]]) -> str:
    files = {file for file, _ in functions}
    return f"{len(functions)} functions in {len(files)} files"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the counts, and with `--names` what carries the prompt."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.package.walk",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--names", action="store_true", help="name the functions that carry it")
    options = parser.parse_args(argv)
    seen = walk()
    path = {each for each in seen.carries if not each[0].startswith(BESIDE)}
    print("every function that ran:", _count(seen.called))
    print("carries the prompt:", _count(seen.carries))
    print("the same without models, servers, processes, records, weights:", _count(path))
    if options.names:
        for file, name in sorted(path):
            print(f"  {file} {name}")


if __name__ == "__main__":
    main()
