"""`environment_factory` and `tools` as a user of TRL passes them: classes and functions of a
script."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common.errors import ConfigError
from examples.tool_calculator.base import build
from tests.support.own_environments import Insists
from trainer import GRPOConfig, GRPOTrainer
from trainer.observe.run_dir import read_lines

pytestmark = pytest.mark.integration
ROWS = [
    {"prompt": f"How many apples are {n} and 1?", "ground_truth": str(n + 1)} for n in range(12)
]


class Starting(Insists):
    """Has an argument of its constructor."""

    def __init__(self, word: str) -> None:
        self.word = word

    def reset(self, ground_truth: str) -> str:
        """Begins."""
        return super().reset(ground_truth) + self.word


def config(folder: Path, **fields: Any) -> GRPOConfig:
    small = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 60,
        "use_cpu": True,
    }
    return GRPOConfig(output_dir=folder / "run", verbose=False, **small | {"max_steps": 1} | fields)


def length(completions: list[Any], **_: Any) -> list[float]:
    return [len(str(completion)) / 50 for completion in completions]


def test_an_environment_that_a_function_makes_plays_and_rewards_the_episodes(
    base_model: Path, tmp_path: Path
) -> None:
    class Local(Starting):
        """Cannot be imported."""

    settings = config(tmp_path, settings={"environment.turns": 4})
    factory = partial(Local, " At once.")
    trainer = GRPOTrainer(
        str(base_model), None, settings, ROWS, ROWS[:2], environment_factory=factory
    )
    result = trainer.train()
    assert result.history[0]["update"]["delta_logprob"] < 1e-5
    assert len(result.evaluations) == 2
    (group,) = read_lines(result.output_dir / "samples.jsonl")
    assert all(completion["turns"] for completion in group["completions"])
    assert {completion["reward"] for completion in group["completions"]} <= {
        n / 97 for n in range(97)
    }
    with pytest.raises(ConfigError, match=r"evaluate is for single answers.*eval_dataset"):
        trainer.evaluate()


def test_conflicting_arguments_are_refused(base_model: Path, tmp_path: Path) -> None:
    def by_environment(environments: Any, **_: Any) -> list[float]:
        return [0.0 for _ in environments]

    def undescribed(a, b):  # type: ignore[no-untyped-def]
        return a + b

    class Silent:
        def reset(self) -> None:
            """Begins."""

    refused: list[tuple[Any, dict[str, Any], str]] = [
        (by_environment, {"environment_factory": Silent}, "receive no environments.*get_reward"),
        (length, {"environment_factory": Insists}, "has get_reward, which gives the whole reward"),
        (None, {"environment_factory": Silent}, "argument is required.*reward_fn"),
        (length, {"environment_factory": 7}, "cannot make environments.*environment_factory"),
        (length, {"environment_factory": dict}, "not a class of environments"),
        (length, {"environment_factory": Silent, "tools": [length]}, "brings its own tools"),
        (length, {"tools": [undescribed]}, "undescribed of .* cannot be described"),
        (length, {"tools": [Silent]}, "not a function"),
    ]
    for reward, given, message in refused:
        with pytest.raises(ConfigError, match=message):
            GRPOTrainer(str(base_model), reward, config(tmp_path), ROWS, **given)
    other = config(tmp_path, settings={"environment.name": "python"})
    with pytest.raises(ConfigError, match="the arguments give another environment"):
        GRPOTrainer(str(base_model), length, other, ROWS, environment_factory=Silent)


@pytest.mark.slow
def test_functions_are_tools_and_reward_functions_grade_the_last_answer(tmp_path: Path) -> None:
    calls = []

    def multiply(a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        calls.append((a, b))
        return a * b

    build(tmp_path, console=Console(quiet=True), steps=80, batch=8)
    rows = [{"prompt": [{"role": "user", "content": f"{4700 + n} * 8526 = ?"}]} for n in range(8)]
    settings = config(tmp_path, max_completion_length=128, max_tool_calling_iterations=2)
    result = GRPOTrainer(str(tmp_path / "base"), length, settings, rows, tools=[multiply]).train()
    assert calls
    assert result.history[0]["update"]["delta_logprob"] < 1e-5
    assert result.history[0]["rewards"]["length"] > 0
