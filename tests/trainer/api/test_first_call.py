"""The first call of a custom reward function is checked before training; a single error says what
to change."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from services.reward.functions.base import DetailedRewardFunction, Message, RewardFunction, Score
from tests.support.errors import raises
from trainer import OnlineRLTrainer, TrainerConfig
from trainer.evaluation.results import compare_evaluations
from trainer.observe.run_dir import read_lines

pytestmark = pytest.mark.integration

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


def trainer(
    base_model: Path, folder: Path, function: Callable[..., Any], **settings: Any
) -> OnlineRLTrainer:
    fields: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_steps": 1,
        "kl_coef": 0,
    }
    config = TrainerConfig(
        model_name_or_path=str(base_model),
        output_dir=folder / "run",
        max_new_tokens=4,
        settings=settings,
        **fields,
    )
    return OnlineRLTrainer(config, Own(function), ROWS)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda completions, **_: [1.0], ["own returned 1 scores for 2 completions"]),
        (lambda completions, **_: ["1.0" for _ in completions], ["'1.0' is not a number"]),
        (coroutine, ["own is a coroutine: define it with def, not async def"]),
        (
            broken,
            ["IndexError: list index out of range", "test_first_call.py", "in broken"],
        ),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_a_broken_function_is_refused_before_training(
    base_model: Path, tmp_path: Path, function: Callable[..., Any], told: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer(base_model, tmp_path, function).train()
    assert caught.value.field == "reward_fn"
    assert caught.value.remedy
    for words in told:
        assert words in caught.value.message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_broken_function_is_found_before_the_model_is_loaded(
    base_model: Path, tmp_path: Path
) -> None:
    without_weights = tmp_path / "model"
    ignored = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(base_model, without_weights, ignore=ignored)
    with pytest.raises(ConfigError, match="IndexError: list index out of range"):
        trainer(without_weights, tmp_path, broken).train()
    assert not any((tmp_path / "run").iterdir())


def test_the_trial_is_one_call_and_a_slow_function_is_only_warned_of(
    base_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    trained = threading.Event()

    def slow_at_first(completions: list[Any], **_: Any) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 1:
            trained.wait(300)
        return [1.0 for _ in completions]

    trainer(base_model, tmp_path, slow_at_first, **{"reward.function_timeout_s": 2}).train()
    trained.set()
    assert calls[0] == 2, "two made-up answers"
    # One or several groups of four, as they come together.
    assert [count for count in calls[1:] if count % 4] == [], "groups, and no second trial"
    assert "a reward function is slow: own: no answer within 2.0 s" in caplog.text
    assert "raise reward.function_timeout_s" in caplog.text


def test_rewards_that_are_not_verdicts_have_no_accuracy_anywhere(
    base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lengths(completions: list[Any], **_: Any) -> list[float]:
        return [8.5 + i for i, _ in enumerate(completions)]

    fields = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_new_tokens": 4,
        "kl_coef": 0,
    }
    config = TrainerConfig(
        model_name_or_path=str(base_model),
        output_dir=tmp_path,
        max_steps=3,
        save_steps=1,
        save_total_limit=1,
        **fields,
    )
    made = OnlineRLTrainer(config, Own(lengths), ROWS, ROWS[:3])
    result, said = made.train(), capsys.readouterr().out
    assert "held-out reward 8.500 (3 problems)" in said
    assert all(word not in said for word in (" acc ", "accuracy", "pass@", "[right]", "[wrong]"))
    assert {"accuracy", "eval_accuracy"}.isdisjoint(result.metrics)
    nothing = dict.fromkeys(("accuracy", "solved_groups", "failed_groups"))
    assert all(line.items() >= nothing.items() for line in result.history)
    nothing = dict.fromkeys(("accuracy", "standard_error", "pass_at_k"))
    assert all(line.items() >= nothing.items() for line in result.evaluations)
    assert {answer["correct"] for line in result.evaluations for answer in line["answers"]} == {
        None
    }
    groups = [group for line in read_lines(tmp_path / "groups.jsonl") for group in line["groups"]]
    assert {group["correct"] for group in groups} == {None}
    assert (tmp_path / "checkpoints" / "best").readlink() == Path(
        "step_000003"
    )  # the mean reward is equal everywhere
    measured = made.evaluate(ROWS[:2], k=2)
    names = (
        "accuracy",
        "standard_error",
        "confidence_interval",
        "pass_at_k",
        "avg_at_k",
        "maj_at_k",
        "pass_at",
    )
    assert (measured["mean_reward"], {measured[name] for name in names}) == (8.5, {None})  # type: ignore[literal-required]
    assert measured["correct"] == [None, None]
    with raises(ConfigError, field="first"):
        compare_evaluations(measured, measured)


def test_whether_rewards_are_verdicts_is_declared_and_decided_once(
    base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def halves(completions: list[Any], **_: Any) -> list[float]:
        return [float(i % 2) for i, _ in enumerate(completions)]

    def later_higher(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        """0 and 1 at first, like a bonus for a format that no answer has yet."""
        bonus = 0.5 if trainer_state.global_step else 0.0
        return [bonus + i % 2 for i, _ in enumerate(completions)]

    def run(function: Callable[..., Any], folder: Path) -> tuple[Any, str]:
        config = TrainerConfig(
            model_name_or_path=str(base_model),
            output_dir=folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=1,
            max_steps=2,
            max_new_tokens=4,
        )
        result = OnlineRLTrainer(config, function, ROWS, ROWS[:4]).train()
        return result, capsys.readouterr().out

    result, said = run(later_higher, tmp_path / "rewards")
    assert "the rewards are not verdicts" in said
    assert "evaluation at step 0: held-out reward 0.000" in said
    assert " acc " not in said
    assert {line["accuracy"] for line in result.history + result.evaluations} == {None}
    assert {line["verified"] for line in result.history + result.evaluations} == {False}

    vars(halves)["gives_verdicts"] = True
    result, said = run(halves, tmp_path / "verdicts")
    assert "the rewards are verdicts" in said
    assert "evaluation at step 0: held-out accuracy 0.000" in said
    assert said.count(" acc 0.500 ") == 2
    assert {line["accuracy"] for line in result.history} == {0.5}
    assert {line["accuracy"] for line in result.evaluations} == {0.0}  # one answer in each call
    assert [each["verdicts"] for each in read_lines(tmp_path / "verdicts/attempts.jsonl")] == [True]


def test_a_function_that_declares_verdicts_returns_nothing_else(
    base_model: Path, tmp_path: Path
) -> None:
    def graded(completions: list[Any], **_: Any) -> list[float]:
        return [0.7 for _ in completions]

    vars(graded)["gives_verdicts"] = True
    fields: dict[str, Any] = {"max_steps": 1, "max_new_tokens": 4, "output_dir": tmp_path}
    config = TrainerConfig(model_name_or_path=str(base_model), **fields)
    with pytest.raises(ConfigError, match=r"declares that it gives verdicts, but returned 0\.7"):
        OnlineRLTrainer(config, graded, ROWS).train()


class Away(DetailedRewardFunction):
    """Has no scores at first, like a judge that cannot be reached."""

    name = "away"

    def __init__(self) -> None:
        self.calls = 0

    def scores(self, completions: list[list[Message]], **_: Any) -> list[Score]:
        self.calls += 1
        return [Score(None, "error") if self.calls == 1 else Score(1.0) for _ in completions]


def test_a_service_that_is_away_at_first_does_not_end_the_run(
    base_model: Path, tmp_path: Path
) -> None:
    away = Away()
    fields = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_steps": 1,
        "max_new_tokens": 4,
    }
    config = TrainerConfig(
        model_name_or_path=str(base_model), output_dir=tmp_path / "run", **fields
    )
    assert OnlineRLTrainer(config, away, ROWS).train().global_step == 1
    assert away.calls > 1
