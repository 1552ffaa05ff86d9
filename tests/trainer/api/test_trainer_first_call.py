"""The first call of a user's reward function is checked before training, with one error that says what to change."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from services.reward.functions.base import RewardFunction
from trainer import OnlineRLTrainer, TrainerConfig

ROWS = [{"prompt": f"What is {n}+1?", "answer": str(n + 1), "level": n} for n in range(16)]


class Own(RewardFunction):
    name = "own"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, completions: list[Any], **columns: Any) -> Any:
        return self.function(completions, **columns)


async def coroutine(completions: list[Any], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


def broken(completions: list[Any], **_: Any) -> list[float]:
    return [1.0 / len(completions[5]) for _ in completions]


def slow(completions: list[Any], **_: Any) -> list[float]:
    time.sleep(0.5)
    return [1.0 for _ in completions]


def trainer(base_model: Path, folder: Path, function: Callable[..., Any], **settings: Any) -> OnlineRLTrainer:
    fields: dict[str, Any] = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 1, "kl_coef": 0}
    config = TrainerConfig(
        model_name_or_path=str(base_model), output_dir=folder / "run", max_new_tokens=4, settings=settings, **fields
    )
    return OnlineRLTrainer(config, Own(function), ROWS)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda completions, **_: [1.0], ["own returned 1 scores for 2 completions"]),
        (lambda completions, **_: ["1.0" for _ in completions], ["'1.0' is no number"]),
        (coroutine, ["own is a coroutine: define it with def, not async def"]),
        (broken, ["IndexError: list index out of range", "test_trainer_first_call.py", "in broken"]),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_a_function_that_cannot_work_ends_the_run_before_it_begins(
    base_model: Path, tmp_path: Path, function: Callable[..., Any], told: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer(base_model, tmp_path, function).train()
    assert caught.value.field == "reward_fn"
    assert caught.value.remedy
    for words in told:
        assert words in caught.value.message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_function_over_its_time_is_told_which_setting_to_raise(base_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no answer within 0\.05 s") as caught:
        trainer(base_model, tmp_path, slow, **{"reward.function_timeout_s": 0.05}).train()
    assert (caught.value.field, caught.value.value) == ("reward.function_timeout_s", "0.05")
    trainer(base_model, tmp_path, slow, **{"reward.function_timeout_s": 60}).train()  # the directory is free again


def test_rewards_that_are_no_verdicts_have_no_accuracy_on_the_console(
    base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lengths(completions: list[Any], **_: Any) -> list[float]:
        return [8.5 + i for i, _ in enumerate(completions)]

    trainer(base_model, tmp_path / "graded", lengths).train()
    said = capsys.readouterr().out
    assert "reward" in said
    assert " acc " not in said
    trainer(
        base_model, tmp_path / "verdicts", lambda completions, **_: [float(i % 2) for i, _ in enumerate(completions)]
    ).train()
    assert " acc 0.500 " in capsys.readouterr().out
