"""Synthetic run directories as a trainer leaves them: long, half-written, or from other
versions."""

import json
import math
from pathlib import Path
from typing import Any

STAGES = (
    "update",
    "publish",
    "evaluation",
    "stragglers",
    "generation",
    "reward",
    "replay",
    "waiting",
)


def line(step: int, **more: Any) -> dict[str, Any]:
    """Returns a line of `metrics.jsonl`."""
    reward = 1 - math.exp(-step / 40)
    return {
        "time": 1.8e9 + step,
        "total_steps": 60,
        "step": step,
        "reward": reward,
        "accuracy": reward,
        "zero_variance_groups": 1,
        "staleness": 0.0,
        "completion_tokens": 12.0,
        "truncated": 0.0,
        "dropped": {"generation": 1},
        "seconds": dict.fromkeys(STAGES, 0.5),
        "update": {
            "loss": 0.1,
            "kl_rollout": 1e-8,
            "effective_sample_size": 1.0,
            "trained_tokens": 700,
        },
        "critic": None,
        "alarms": {},
        **more,
    }


def evaluation(step: int, accuracy: float) -> dict[str, Any]:
    """Returns a line of `evaluations.jsonl`."""
    answer = {
        "prompt_id": "p",
        "prompt": "1 + 1?",
        "ground_truth": "2",
        "response": "</script>2",
        "correct": step > 0,
    }
    summary = {
        "step": step,
        "accuracy": accuracy,
        "standard_error": 0.02,
        "num_samples": 256,
        "pass_at_k": None,
        "k": 8,
    }
    return {"time": 1.8e9 + step, **summary, "answers": [answer]}


def write(path: Path, lines: list[dict[str, Any]], mode: str = "w") -> None:
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(each) + "\n" for each in lines)


def make_run(directory: Path, steps: int, **more: Any) -> Path:
    """Writes a run of this many steps, with `more` in every line."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "state_dir": str(directory / "state"),
        "trainer": {"max_staleness": 0, "batch_size": 32},
    }
    (directory / "config.json").write_text(json.dumps(config))
    write(directory / "attempts.jsonl", [{"time": 1.8e9, "run_id": "group", "step": 0}])
    write(directory / "metrics.jsonl", [line(step, **more) for step in range(1, steps + 1)])
    write(directory / "evaluations.jsonl", [evaluation(0, 0.25), evaluation(steps, 0.9)])
    return directory
