"""`environment_factory` and `tools` as a user of TRL passes them: classes and functions of a
script."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from common.errors import ConfigError
from common.settings.sections import RewardSection
from common.wire.schemas import EpisodeRequest
from examples.tool_calculator.base import build
from services.environment.environments import Environment
from tests.support.environments.environments import Calculator, request_for, served
from tests.support.environments.own_environments import Insists
from tests.support.errors import raises
from trainer import GRPOConfig, GRPOTrainer
from trainer.api.datasets import as_rewards
from trainer.api.episodes import EpisodeGrader
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
    with raises(ConfigError, field="evaluate"):
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
        (by_environment, {}, "takes environments, and there are none.*environment_factory"),
        (length, {"environment_factory": Insists}, "has get_reward, which gives the whole reward"),
        (None, {"environment_factory": Silent}, "argument is required.*reward_funcs"),
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
    with raises(ConfigError, field="environment.name", value="python"):
        GRPOTrainer(str(base_model), length, other, ROWS, environment_factory=Silent)


def used_tool(completions: list[Any], prompts: list[Any], **_: Any) -> list[float | None]:
    """Grades the whole episode, as TRL's own examples do."""
    assert prompts == ["1+2?"]
    (turns,) = completions
    assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant"]
    assert turns[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2}
    return [2.0 if turns[1]["content"] == "3" else 0.0]


async def of_environment(
    environments: list[Any], completion_ids: list[Any], ground_truth: list[str]
) -> list[float | None]:
    """Reads what the episode left in the environment."""
    if ground_truth == ["none"]:
        return [None]
    assert len(completion_ids[0]) > 10
    return [float(environment.sum) for environment in environments]


def graded(*functions: Any, **weights: float) -> Environment:
    """Returns an environment whose episodes these functions grade."""

    class Adds(Calculator):
        get_reward = None  # type: ignore[assignment]

        def reset(self, **columns: Any) -> None:  # type: ignore[override]
            """Begins."""

    rewards = as_rewards(list(functions))
    by_name = {function.name: weights.get(function.name, 1.0) for function in rewards}
    made = Environment.of(Adds, "python:given:Adds")
    grader = EpisodeGrader(RewardSection().for_objects(by_name), rewards)
    return replace(made, grade=grader, has_reward=True)


def adds(text: str) -> str:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    return "so it is 3" if "<tool_response>" in text else call


def with_chat(request: EpisodeRequest) -> EpisodeRequest:
    """Returns a request about a problem that is a chat."""
    request.task.columns = {"prompts": "1+2?"}
    return request


async def test_reward_functions_get_all_messages_and_the_environment_of_an_episode() -> None:
    environment = graded(used_tool, of_environment, used_tool=0.5)
    async with served(environment, adds) as server:
        (episode,) = await server.client.episodes(with_chat(request_for(environment.name)))
    assert (episode.status, episode.detail) == ("ok", "")
    assert episode.reward == 0.5 * 2.0 + 3.0
    assert episode.components == {"used_tool": 2.0, "of_environment": 3.0}


async def test_an_episode_that_no_function_grades_is_an_error_and_no_zero() -> None:
    environment = graded(of_environment)
    async with served(environment, adds) as server:
        request = with_chat(request_for(environment.name, truth="none"))
        (episode,) = await server.client.episodes(request)
    assert (episode.status, episode.reward) == ("error", None)
    assert "an episode could not be graded" in episode.detail


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

    build(tmp_path, console=Console(quiet=True), steps=300, batch=8)
    rows = [{"prompt": [{"role": "user", "content": f"{4700 + n} * 8526 = ?"}]} for n in range(8)]
    settings = config(tmp_path, max_completion_length=128, max_tool_calling_iterations=2)
    result = GRPOTrainer(str(tmp_path / "base"), length, settings, rows, tools=[multiply]).train()
    assert calls
    assert result.history[0]["update"]["delta_logprob"] < 1e-5
    assert result.history[0]["rewards"]["length"] > 0
