"""Compares students on the built-in task that learn from reward, from a teacher (on-policy
distillation) or from both.

`python -m benchmarks.distillation [--seeds 3] [--steps 20] [--teacher-steps 60]` trains the teacher
by GRPO from the tiny base model, serves it with the embedded engine, and trains students from the
same base model on 32 completions per step, otherwise with the demo's settings. Needs the tiny base
model (`make demo` or `make test` creates it).
"""

import tempfile
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from benchmarks.command import command_parser, figures_table
from benchmarks.learning import Curve, interpolated, mean_curve, train, train_each
from benchmarks.processes import engine_command, local_url, processes
from trainer.policy.checkpoint import newest

EVERY = 2
STUDENT = {
    "trainer.batch_size": 8,
    "sampling.group_size": 4,
    "trainer.warmup_steps": 0,
    "trainer.eval_every": EVERY,
}
"""An eighth of the demo's batch, to measure what a few tokens teach."""


def main() -> None:
    parser = command_parser("distillation", __doc__)
    parser.add_argument("--seeds", type=int, default=3, help="students of each kind")
    parser.add_argument("--steps", type=int, default=20, help="steps of a student")
    parser.add_argument("--teacher-steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        train(place / "teacher", {"seed": 100, "trainer.max_steps": options.teacher_steps})
        teacher = Curve.read(place / "teacher")
        model = newest(place / "teacher" / "checkpoints")
        assert model is not None
        url = local_url()
        kinds: dict[str, dict[str, object]] = {
            "reward alone (grpo)": {"algorithm.name": "grpo"},
            "teacher alone (opd)": {"algorithm.name": "opd", "teacher.url": url},
            "reward and teacher": {"algorithm.name": "grpo", "teacher.url": url},
        }
        for settings in kinds.values():
            settings |= {**STUDENT, "trainer.max_steps": options.steps}
        with processes([engine_command(model, url, max_context_tokens=256)], [url]):
            curves = train_each(kinds, options.seeds, place)
    Console(width=160).print(_table(curves, teacher))


def _table(curves: dict[str, list[Curve]], teacher: Curve) -> Table:
    """Tabulates accuracy by step, and the tokens generated until it is 50 % and 90 % of the way to
    the teacher's.
    """
    base = teacher.accuracy[0]
    best = teacher.accuracy[-1]
    targets = [base + share * (best - base) for share in (0.5, 0.9)]
    seeds = len(next(iter(curves.values())))
    title = (
        f"held-out greedy accuracy, mean of {seeds} seeds; "
        f"teacher {best:.3f} after {teacher.tokens[-1]:,.0f} tokens"
    )
    steps = [f"step {step}" for step in next(iter(curves.values()))[0].steps]
    costs = [f"tokens to {target:.2f}" for target in targets]
    table = figures_table(title, ["student learns from", *steps, *costs, "CPU s"])
    for kind, found in curves.items():
        accuracies = (f"{value:.3f}" for value in mean_curve(found).accuracy)
        reached = [[_tokens_until(curve, target) for curve in found] for target in targets]
        shown = ("–" if None in each else f"{mean(filter(None, each)):,.0f}" for each in reached)
        seconds = mean(curve.cpu_seconds[-1] for curve in found)
        table.add_row(kind, *accuracies, *shown, f"{seconds:.1f}")
    return table


def _tokens_until(curve: Curve, target: float) -> float | None:
    """Returns the tokens generated until this accuracy; None if it is not reached."""
    return interpolated(curve.accuracy, curve.tokens, target)


if __name__ == "__main__":
    main()
