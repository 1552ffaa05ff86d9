"""A short GRPO run of a real model on real problems: does the reward rise, and do engine and
trainer agree?
"""

import json
import statistics
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.command import setting_words
from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting
from common.settings.config import load
from services.data.tiny import problems
from trainer.observe.run_dir import read_lines
from trainer.start.in_process import train_in_process

_STEPS = 20
_PART = 5
"""Steps at either end whose rewards are compared."""
_FALL = 0.05
"""How much the reward of so short a run may fall by chance: twice the error of the means of 5 × 128
completions."""


def trains(found: Findings, setting: Setting) -> None:
    """Trains the given model on the given problems, with SGLang if there is one, else with the
    embedded engine.
    """
    if setting.small:  # a person's model would take hours on a CPU
        model = setting.tiny_base()
        data = _write_problems(setting.scratch / "problems")
    else:
        assert setting.model_path is not None
        assert setting.data is not None
        model = setting.model_path
        data = setting.data

    python = setting.sglang_python()
    engine = "embedded" if python is None else "sglang"
    run_dir = setting.scratch / "grpo"
    words = _words(setting, model, data, run_dir)
    if engine == "sglang":
        words += ["--rollout.engine", "sglang", "--rollout.engine_python", str(python)]
        words += ["--rollout.colocate", str(setting.on_gpu).lower()]
    train_in_process(load(words, {}), Console(quiet=True), engine=engine)

    lines = read_lines(run_dir / "metrics.jsonl")
    _judge(
        found,
        lines=lines,
        about=f"GRPO, {len(lines)} steps with the engine {engine}",
        small=setting.small,
    )


def _words(setting: Setting, model: Path, data: Path, run_dir: Path) -> list[str]:
    """Returns the settings: 128 completions a step, 16 in the small form."""
    sizes = {"group_size": 4, "max_new_tokens": 24, "batch_size": 4, "steps": 2}
    if not setting.small:
        sizes = {"group_size": 8, "max_new_tokens": 512, "batch_size": 16, "steps": _STEPS}
    options: dict[str, object] = {
        "model.name": model,
        "data.source": data / "train.jsonl",
        "sampling.group_size": sizes["group_size"],
        "sampling.max_new_tokens": sizes["max_new_tokens"],
        "rollout.device": setting.device_kind,
        "rollout.max_context_tokens": 256 if setting.small else 1536,
        "trainer.device": setting.device_kind,
        "trainer.run_dir": run_dir,
        "trainer.batch_size": sizes["batch_size"],
        "trainer.max_steps": sizes["steps"],
        "optimizer.learning_rate": 2e-6,
        "checkpoint.every": 0,
        "evaluation.samples": 0,
        "state_dir": setting.scratch / "grpo-state",
    }
    return setting_words(options)


def _write_problems(directory: Path) -> Path:
    """Writes a few generated problems in GSM8K's form; returns the directory."""
    directory.mkdir(exist_ok=True)
    rows = [
        {"question": each.question, "answer": each.solution}
        for each in islice(problems("train", 0), 64)
    ]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (directory / "train.jsonl").write_text(text, encoding="utf-8")
    return directory


def _judge(found: Findings, *, lines: list[dict[str, Any]], about: str, small: bool) -> None:
    """Claims what the lines of `metrics.jsonl` say."""
    rewards = [float(line["reward"]) for line in lines]
    first = statistics.mean(rewards[:_PART])
    last = statistics.mean(rewards[-_PART:])
    text = f"{about}: mean reward of the first and the last {_PART}"
    predicted = f"rises, or falls by at most {_FALL}"
    found.claim(
        text, predicted, f"{first:.3f} → {last:.3f}", None if small else last >= first - _FALL
    )
    apart = statistics.median(float(line["update"]["delta_logprob"]) for line in lines)
    found.at_most(f"{about}: median |Δ log-probability| of engine and trainer", apart, 0.02)

    stages = sorted({stage for line in lines for stage in line["seconds"]})
    rows = [["stage", "median s of a step"]]
    rows += [
        [stage, f"{statistics.median(line['seconds'].get(stage, 0.0) for line in lines):.2f}"]
        for stage in stages
    ]
    found.tables["Seconds of a step of the GRPO run"] = rows
    times = [sum(map(float, line["seconds"].values())) for line in lines]
    found.claim(
        f"{about}: seconds a step", "", f"{statistics.median(times):.2f} (the first {times[0]:.2f})"
    )
    found.figures = {"rewards": rewards, "seconds": times, "delta_logprob": apart}
