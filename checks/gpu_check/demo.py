"""The built-in task in one process on the device: does the model learn?"""

from pathlib import Path

from rich.console import Console

from benchmarks.command import setting_words
from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting
from common.settings.config import load
from trainer.observe.run_dir import read_lines
from trainer.start.in_process import train_in_process

_CONFIG = Path(__file__).resolve().parents[2] / "jobgroup" / "configs" / "tiny-cpu.yaml"
_LEARNED = 0.9
_STEPS = 40
"""Held-out accuracy after this many steps; twenty steps solve the task
(`docs/explanation/built-in-task.md`)."""


def learns(found: Findings, setting: Setting) -> None:
    """Trains with data, rewards, replay, engine and trainer in this process, the last two on the
    device.
    """
    run_dir = setting.scratch / "demo"
    steps = 2 if setting.small else _STEPS
    settings: dict[str, object] = {
        "config": _CONFIG,
        "model.name": setting.tiny_base(),
        "state_dir": setting.scratch / "state",
        "rollout.device": setting.device_kind,
        "trainer.device": setting.device_kind,
        "trainer.run_dir": run_dir,
        "trainer.max_steps": steps,
        "evaluation.every": steps,
        "evaluation.pass_samples": 0,
        "checkpoint.every": 0,
    }
    if setting.small:
        settings |= {"trainer.batch_size": 4, "evaluation.samples": 16}
    train_in_process(load(setting_words(settings), {}), Console(quiet=True))
    accuracy = [float(line["accuracy"]) for line in read_lines(run_dir / "evaluations.jsonl")]
    lines = read_lines(run_dir / "metrics.jsonl")
    measured = f"{accuracy[0]:.3f} → {accuracy[-1]:.3f}"
    predicted = f"≥ {_LEARNED} after {steps} steps"
    found.claim(
        "the tiny demo learns: held-out accuracy",
        predicted,
        measured,
        None if setting.small else accuracy[-1] >= _LEARNED,
    )
    apart = sorted(float(line["update"]["delta_logprob"]) for line in lines)
    found.at_most(
        "the tiny demo: median |Δ log-probability| of engine and trainer",
        apart[len(apart) // 2],
        0.02,
    )
    found.figures = {"accuracy": accuracy, "steps": len(lines)}
