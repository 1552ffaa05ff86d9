"""`python -m tests.chaos.run` runs the whole job group under seeded faults, once per seed, and
reports recovery times.

Options are `--seeds 0,1,2 --steps 60 --faults 30 --json FILE`. `--episodes` trains on episodes,
with two environment-server nodes, and hits the processes they need. The exit status is 1 if an
invariant was violated. `make chaos` runs it.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.faults import EPISODES, EVERYTHING, Fault, schedule
from tests.chaos.group import ROOT, Group, wait_gone
from tests.chaos.inject import inject
from tests.chaos.invariants import read_evidence, violations
from tests.support.environments.own_environments import PONDERS

BATCH = 16
TARGET_ACCURACY = 0.6
LOST_AFTER_S, SERVICE_TIMEOUT_S, HANG_S = 10, 20, 8
HOLD_S = (SERVICE_TIMEOUT_S * 1.2, SERVICE_TIMEOUT_S * 1.7)
"""Seconds of a stop: longer than the time after which trainers and engines are replaced."""


@dataclass
class Outcome:
    """The result of a run."""

    seed: int
    planned: int
    seconds: float
    steps: int
    """Trained steps, undone ones included."""
    accuracy: float | None
    faults: list[dict[str, Any]]
    restarts: dict[str, int]
    violations: list[str]
    dropped: dict[str, int] = field(default_factory=dict)
    """Groups dropped since the trainer's last start; their prompts were tried again."""
    left_out: int = 0
    """Prompts given up after too many tries."""
    episodes: int = 0
    """Trained episodes."""


def settings(base_model: Path, steps: int, seed: int = 0, max_staleness: int = 0) -> dict[str, str]:
    """Returns settings for one epoch of the built-in task, with limits that a stop of half a minute
    exceeds."""
    return {
        "RUN_CONFIG": str(ROOT / "jobgroup" / "configs" / "tiny-cpu.yaml"),
        "MODEL_NAME": str(base_model),
        "SEED": str(seed),
        "NUM_EPOCHS": "1",
        "BATCH_SIZE": str(BATCH),
        "MAX_STEPS": str(steps),
        "RLHF_DATA__NUM_SAMPLES": str(steps * BATCH),
        "RLHF_ROLLOUT__HANG_TIMEOUT_S": str(HANG_S),
        "RLHF_TRAINER__MAX_STALENESS": str(max_staleness),
        "RLHF_CHECKPOINT__EVERY": "5",
        "RLHF_EVALUATION__EVERY": "0",
        "RLHF_EVALUATION__SAMPLES": "128",
        "RLHF_EVALUATION__PASS_SAMPLES": "0",
        "RLHF_LIMITS__LOST_AFTER_S": str(LOST_AFTER_S),
        "RLHF_LIMITS__SERVICE_TIMEOUT_S": str(SERVICE_TIMEOUT_S),
        "RLHF_LIMITS__FENCE_AFTER_S": "90",
        "RLHF_LIMITS__STUCK_AFTER_S": "180",
        "RLHF_SAMPLING__REQUEST_TIMEOUT_S": "60",
    }


def episode_settings() -> dict[str, str]:
    """Returns the extra settings of a run on episodes. They teach nothing, so nobody checks whether
    the run learned."""
    return {"RLHF_ENVIRONMENT__NAME": PONDERS, "RLHF_ENVIRONMENT__DEADLINE_S": "120"}


def chaos(
    folder: Path, values: dict[str, str], faults: Sequence[Fault], seed: int, limit_s: float
) -> Outcome:
    """Runs the group in `folder` under these faults and checks the invariants."""
    group, began = Group(folder, values), time.monotonic()
    with group.running():
        done = inject(group, faults, limit_s)
    assert group.process is not None
    status, left = group.process.returncode, wait_gone(group)
    evidence = read_evidence(group.run_dir, group.state_dir, group.seen, TARGET_ACCURACY)
    evidence.status, evidence.processes = status, left
    if not evidence.metrics:
        raise RuntimeError(f"the run did not begin:\n{group.output()[-4000:]}")
    problems = violations(evidence)
    return Outcome(
        seed=seed,
        planned=len(faults),
        seconds=time.monotonic() - began,
        steps=len(group.step_times),
        accuracy=evidence.evaluations[-1]["accuracy"] if evidence.evaluations else None,
        faults=[injected.as_json(group) for injected in done],
        restarts=dict(group.restarts()),
        violations=problems,
        dropped=evidence.metrics[-1]["dropped"],
        left_out=len(evidence.left_out),
        episodes=len(evidence.trained()) * evidence.group_size if evidence.episodes else 0,
    )


def report(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints tables of the faults, the recovery times and the violated invariants."""
    for title, key in (("by kind", "kind"), ("by target", "target")):
        table = Table(title=f"faults {title}; seconds as median / worst")
        for name in (key, "faults", "recovered", "healthy again after", "next step after"):
            table.add_column(name, justify="left" if name == key else "right")
        faults = [fault for outcome in outcomes for fault in outcome.faults]
        for value in [*sorted({fault[key] for fault in faults}), "all"]:
            chosen = [fault for fault in faults if value in ("all", fault[key])]
            well = [fault["healthy_s"] for fault in chosen if fault["healthy_s"] is not None]
            steps = [fault["next_step_s"] for fault in chosen if fault["next_step_s"] is not None]
            recovered = sum(
                None not in (fault["healthy_s"], fault["next_step_s"]) for fault in chosen
            )
            table.add_row(value, str(len(chosen)), str(recovered), _seconds(well), _seconds(steps))
        console.print(table)
    restarts = sum((Counter(outcome.restarts) for outcome in outcomes), Counter[str]())
    console.print(f"restarts of tasks: {dict(restarts)}")
    for outcome in outcomes:
        accuracy = "none" if outcome.accuracy is None else f"{outcome.accuracy:.3f}"
        console.print(
            f"seed {outcome.seed}: {len(outcome.faults)} of {outcome.planned} faults in {outcome.seconds:.0f} s, "
            f"{outcome.steps} steps with those done again, accuracy {accuracy}, dropped {outcome.dropped}, "
            f"prompts left out {outcome.left_out}, "
            + (f"{outcome.episodes} episodes trained on, " if outcome.episodes else "")
            + f"{len(outcome.violations)} invariants violated"
        )
        for problem in outcome.violations:
            console.print(f"  {problem}", style="red", markup=False)


def _seconds(values: Sequence[float]) -> str:
    return f"{median(values):.1f} / {max(values):.1f}" if values else "–"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.run", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--faults", type=int, default=30, help="faults per run")
    parser.add_argument(
        "--episodes", action="store_true", help="train on episodes and hit the processes they need"
    )
    parser.add_argument("--base-model", type=Path, default=ROOT / ".cache" / "tiny-base")
    parser.add_argument("--limit", type=float, default=2400, help="time limit of a run in seconds")
    parser.add_argument(
        "--keep", type=Path, help="keep all run folders here (default: only failed runs)"
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(argv)
    console, outcomes = Console(width=120, highlight=False), []
    for seed in (int(text) for text in options.seeds.split(",")):
        choices = EPISODES if options.episodes else EVERYTHING
        faults = schedule(seed, options.steps, options.faults, HOLD_S, choices)
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-seed{seed}-", dir=options.keep))
        # Every second seed trains with a staleness of one, so that groups overtake one another.
        values = settings(options.base_model.resolve(), options.steps, seed, max_staleness=seed % 2)
        values |= episode_settings() if options.episodes else {}
        console.print(f"seed {seed}: {len(faults)} faults in {options.steps} steps, in {folder}")
        outcomes.append(chaos(folder, values, faults, seed, options.limit))
        report(outcomes[-1:], console)
        if options.keep is None and not outcomes[-1].violations:
            shutil.rmtree(folder)
        if options.json:
            options.json.write_text(
                json.dumps([outcome.__dict__ for outcome in outcomes], indent=1) + "\n"
            )
    if len(outcomes) > 1:
        report(outcomes, console)
    return int(any(outcome.violations for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
