"""Compares students on the built-in task that learn from reward, from a teacher (on-policy
distillation) or from both.

`python -m benchmarks.distillation [--seeds 3] [--steps 20] [--teacher-steps 60]` trains the teacher
by GRPO from the tiny base model, serves it with the embedded engine, and trains students from the
same base model on 32 completions per step, otherwise with the demo's settings. Needs the tiny base
model (`make demo` or `make test` creates it).
"""

import argparse
import tempfile
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from benchmarks.learning import Curve, mean_curve, train
from benchmarks.processes import free_port, processes
from trainer.policy.checkpoint import newest

EVERY = 2
STUDENT = (
    *("--trainer.batch_size", "8", "--sampling.group_size", "4", "--trainer.warmup_steps", "0"),
    *("--trainer.eval_every", str(EVERY)),
)
"""An eighth of the demo's batch, to measure what a few tokens teach."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.distillation", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=3, help="students of each kind")
    parser.add_argument("--steps", type=int, default=20, help="steps of a student")
    parser.add_argument("--teacher-steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        train(place / "teacher", "--seed", "100", "--trainer.max_steps", str(options.teacher_steps))
        teacher, model = Curve.read(place / "teacher"), newest(place / "teacher" / "checkpoints")
        assert model is not None
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        engine = (
            "-m",
            "services.engine",
            "--model-path",
            str(model),
            "--port",
            str(port),
            "--max-context-tokens",
            "256",
        )
        with processes([engine], [url]):
            kinds = {
                "reward alone (grpo)": ("--algorithm.name", "grpo"),
                "teacher alone (opd)": ("--algorithm.name", "opd", "--teacher.url", url),
                "reward and teacher": ("--algorithm.name", "grpo", "--teacher.url", url),
            }
            curves: dict[str, list[Curve]] = {kind: [] for kind in kinds}
            for seed in range(options.seeds):
                for number, (kind, words) in enumerate(kinds.items()):
                    directory = place / f"student-{number}-{seed}"
                    train(
                        directory,
                        *words,
                        "--seed",
                        str(seed),
                        *STUDENT,
                        "--trainer.max_steps",
                        str(options.steps),
                    )
                    curves[kind].append(Curve.read(directory))
                    Console().print(
                        kind,
                        seed,
                        [round(value, 3) for value in curves[kind][-1].accuracy],
                        highlight=False,
                    )
    Console(width=160).print(_table(curves, teacher))


def _table(curves: dict[str, list[Curve]], teacher: Curve) -> Table:
    """Tabulates accuracy by step, and the tokens generated until it is 50 % and 90 % of the way to
    the teacher's.
    """
    base, best = teacher.accuracy[0], teacher.accuracy[-1]
    targets = [base + share * (best - base) for share in (0.5, 0.9)]
    seeds = len(next(iter(curves.values())))
    title = f"held-out greedy accuracy, mean of {seeds} seeds; teacher {best:.3f} after {teacher.tokens[-1]:,.0f} tokens"
    table = Table(title=title)
    steps = next(iter(curves.values()))[0].steps
    for header in (
        "student learns from",
        *(f"step {step}" for step in steps),
        *(f"tokens to {t:.2f}" for t in targets),
    ):
        table.add_column(header, justify="right")
    table.add_column("CPU s", justify="right")
    for kind, found in curves.items():
        accuracies = (f"{value:.3f}" for value in mean_curve(found).accuracy)
        reached = [[_tokens_until(curve, target) for curve in found] for target in targets]
        shown = ("–" if None in each else f"{mean(filter(None, each)):,.0f}" for each in reached)
        table.add_row(
            kind, *accuracies, *shown, f"{mean(curve.cpu_seconds[-1] for curve in found):.1f}"
        )
    return table


def _tokens_until(curve: Curve, target: float) -> float | None:
    """Returns the tokens generated until this accuracy, linear between evaluations; None if it is
    not reached.
    """
    for i, reached in enumerate(curve.accuracy):
        if reached >= target:
            if i == 0:
                return 0.0
            part = (target - curve.accuracy[i - 1]) / (reached - curve.accuracy[i - 1])
            return curve.tokens[i - 1] + part * (curve.tokens[i] - curve.tokens[i - 1])
    return None


if __name__ == "__main__":
    main()
