"""Seconds to grade 100,000 recorded answers to GSM8K-like problems again.

python -m benchmarks.regrade            # 40 MB in a temporary directory
"""

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from common.wire.schemas import Completion, Group
from services.data.tiny import problems
from trainer.observe.group_files import GroupRecorder, RecordedGroup
from trainer.what_if.regrade import main as regrade

_ANSWERS = 8
_TOKENS = 150
_GROUPS = 250
_WORKING = "She works 8 hours a day for $18 per hour, so she makes 8*18 = $<<8*18=144>>144. " * 6


def _completion(rng: random.Random, answer: int) -> Completion:
    """Returns an answer with some working: 60 % right, 5 % a fraction that a worker compares."""
    kind = rng.random()
    final = f"#### {answer}"
    if kind < 0.35:
        final = f"#### {answer + rng.randint(1, 99)}"
    elif kind < 0.6:
        final = rf"The answer is \boxed{{{answer}}}."
    elif kind < 0.65:
        final = rf"The answer is \boxed{{\frac{{{rng.randint(1, 99)}}}{{7}}}}."
    return Completion(
        token_ids=np.full(_TOKENS, rng.randint(3, 99), np.int32),
        logprobs=np.full(_TOKENS, -0.5, np.float32),
        text=_WORKING + final,
        finish_reason="stop",
        weight_versions=[(0, 0, _TOKENS)],
    )


def _write(run_dir: Path, answers: int) -> None:
    rng = random.Random(0)
    recorder = GroupRecorder(run_dir, 1 << 34, 0)
    tasks = problems("train")
    for step in range(1, answers // (_ANSWERS * _GROUPS) + 1):
        groups = []
        for number in range(_GROUPS):
            task = next(tasks)
            group = Group(
                id=f"{step}-{number}",
                prompt_id=f"{step}-{number}",
                prompt=task.question,
                ground_truth=str(task.answer),
                prompt_token_ids=np.arange(60, dtype=np.int32),
                completions=[_completion(rng, task.answer) for _ in range(_ANSWERS)],
            )
            groups.append(RecordedGroup(group))
        recorder.step(step, groups, [])
    recorder.flush()
    settings = {"reward": {"functions": ["math"]}, "data": {"source": "tiny"}}
    (run_dir / "config.json").write_text(json.dumps(settings))
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')


def main() -> None:
    """Writes the answers, grades them, and prints the seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=100_000)
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        _write(run_dir, parser.parse_args().answers)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        began = time.monotonic()
        regrade([str(run_dir), "--show", "0"])
        own = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
        print(f"{time.monotonic() - began:.1f} s, of which {own:.1f} processor seconds here")


if __name__ == "__main__":
    main()
