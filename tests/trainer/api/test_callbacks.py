"""transformers' own callbacks, in real runs of a few steps."""

import json
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import DefaultFlowCallback, TrainerState

from common.errors import ConfigError, ServiceError
from common.process.run_lock import LOCK
from services.data.tiny import problems
from tests.support.errors import raises
from trainer import GRPOConfig, GRPOTrainer, OnlineRLTrainer, TrainerConfig
from trainer.api.callbacks import Callbacks

pytestmark = pytest.mark.integration

ROWS = [
    {"prompt": [{"role": "user", "content": p.question}]} for p in islice(problems("train"), 12)
]


def config(folder: Path, **fields: Any) -> GRPOConfig:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "max_completion_length": 8,
        "use_cpu": True,
    }
    given |= {"verbose": False, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 1}
    return GRPOConfig(output_dir=folder / "run", **given | fields)


class Scripted:
    """A reward function whose evaluations follow a list, by the number of steps before them."""

    __name__ = "scripted"

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __call__(
        self, completions: list[Any], trainer_state: Any, log_metric: Any, **_: Any
    ) -> list[float]:
        value = self.values[trainer_state.global_step]
        log_metric("length_loss", -value)
        return [value + len(completion[0]["content"]) * 1e-6 for completion in completions]


RISES = [9.0, 1, 2, 3, 2.5, 2, 1]
"""Before training and after each step; the best is that of step 3."""


@pytest.mark.parametrize(
    ("values", "fields", "stops", "best"),
    [
        (RISES, {"metric_for_best_model": "reward"}, 5, 3),
        (RISES, {"metric_for_best_model": "eval_mean_reward"}, 5, 3),
        (RISES, {"metric_for_best_model": "length_loss"}, 5, 3),
        (RISES, {"metric_for_best_model": "reward", "greater_is_better": False}, 3, 1),
    ],
)
def test_early_stopping_stops_when_the_metric_stops_improving(
    base_model: Path,
    tmp_path: Path,
    values: list[float],
    fields: dict[str, Any],
    stops: int,
    best: int,
) -> None:
    trainer = GRPOTrainer(
        str(base_model),
        Scripted(values),
        config(tmp_path, save_steps=1, **fields),
        ROWS,
        ROWS[:2],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    result = trainer.train()
    assert result.global_step == stops
    assert trainer.state.best_global_step == best
    assert trainer.state.best_model_checkpoint is not None
    assert trainer.state.best_model_checkpoint.endswith(f"step_{best:06d}")
    steps = [line["step"] for line in result.evaluations]
    assert steps == list(range(stops + 1))
    found = [line["mean_reward"] for line in result.evaluations]
    known_step = pytest.approx(values[: stops + 1], abs=0.01)
    assert found == known_step, "the function knows the step of an evaluation"


def test_a_metric_that_evaluations_lack_is_refused_before_training(
    base_model: Path, tmp_path: Path
) -> None:
    settings = config(tmp_path, metric_for_best_model="rewrd")
    trainer = GRPOTrainer(str(base_model), Scripted(RISES), settings, ROWS, ROWS[:2])
    with raises(ConfigError, field="metric_for_best_model") as caught:
        trainer.train()
    assert caught.value.field == "metric_for_best_model"
    assert "reward" in str(caught.value.remedy)


@pytest.mark.parametrize("is_trl", [True, False])
def test_the_callbacks_of_transformers_follow_a_run(
    base_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_trl: bool
) -> None:
    callbacks = [DefaultFlowCallback, ProgressCallback(), PrinterCallback, TensorBoardCallback()]
    fields = {"max_steps": 2, "eval_steps": 2, "save_steps": 1}
    if is_trl:
        settings = config(tmp_path, **fields)
        trainer: OnlineRLTrainer = GRPOTrainer(
            str(base_model), Scripted(RISES), settings, ROWS, ROWS[:2], callbacks=callbacks
        )
    else:
        plain = TrainerConfig(
            model_name_or_path=str(base_model),
            output_dir=tmp_path / "run",
            gradient_accumulation_steps=1,
            max_new_tokens=8,
            verbose=False,
            **fields,
        )
        trainer = OnlineRLTrainer(plain, Scripted(RISES), ROWS, ROWS[:2], callbacks=callbacks)
    result = trainer.train()
    assert result.global_step == 2
    assert [line["step"] for line in result.evaluations] == [0, 2]
    saved = sorted(path.name for path in result.checkpoint.parent.glob("step_*"))
    assert saved == ["step_000001", "step_000002"]

    (events,) = (tmp_path / "run").glob("runs/*")
    board = EventAccumulator(str(events)).Reload()
    rewards = [event.value for event in board.Scalars("train/reward")]
    assert rewards == pytest.approx([line["reward"] for line in result.history])
    evaluated = [(event.step, event.value) for event in board.Scalars("eval/reward")]
    assert evaluated == [
        (line["step"], pytest.approx(line["mean_reward"])) for line in result.evaluations
    ]
    assert "eval_reward" in capsys.readouterr().out, "PrinterCallback"


class TakesOver(TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Lets another run take the directory over within the second step."""

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            holder = {"run": "another", "token": "of another"}
            (Path(args.output_dir) / LOCK).write_text(json.dumps(holder))


def test_a_run_that_is_taken_over_writes_no_checkpoint(base_model: Path, tmp_path: Path) -> None:
    settings = config(tmp_path, max_steps=3, save_steps=1, eval_strategy="no")
    trainer = GRPOTrainer(str(base_model), Scripted(RISES), settings, ROWS, callbacks=[TakesOver()])
    with pytest.raises(ServiceError) as caught:
        trainer.train()
    assert caught.value.code == "run_taken_over"
    saved = sorted(path.name for path in tmp_path.glob("run/checkpoints/step_*"))
    assert saved == ["step_000001"]


def test_a_state_is_that_of_transformers(base_model: Path, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Keeps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            seen.append(state.__dict__ | {"stop": control.should_epoch_stop})
            return control

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.save_to_json(str(tmp_path / "state.json"))
            (tmp_path / "args.json").write_text(args.to_json_string())

    trainer = GRPOTrainer(
        str(base_model),
        Scripted(RISES),
        config(tmp_path, max_steps=2, learning_rate=2e-5),
        ROWS,
        ROWS[:2],
        callbacks=[Keeps],
    )
    trainer.train()
    assert [state["global_step"] for state in seen] == [1, 2]
    assert not any(state["stop"] for state in seen)
    saved = TrainerState.load_from_json(str(tmp_path / "state.json"))
    assert saved.global_step == saved.max_steps == 2
    assert [line["step"] for line in saved.log_history] == [0, 1, 1, 2, 2, 2]
    assert json.loads((tmp_path / "args.json").read_text())["learning_rate"] == 2e-5
    popped = trainer.pop_callback(Keeps)
    assert isinstance(popped, Keeps)
    assert popped not in trainer.callback_handler.callbacks


def test_numbers_have_the_names_and_the_order_of_trl(base_model: Path, tmp_path: Path) -> None:
    """As a script of TRL reads them: from the result, the history, and the file of the state."""
    events: list[tuple[str, int]] = []

    class Watches(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            events.append(("step_end", state.global_step))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            kind = "eval_reward" if "eval_reward" in logs else "log"
            events.append((kind, state.global_step))

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            events.append(("evaluate", state.global_step))

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            events.append(("save", state.global_step))

    def varied(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(completion[0]["content"]) % 3) for completion in completions]

    settings = config(tmp_path, max_steps=2, save_steps=1)
    given = (str(base_model), varied, settings, ROWS, ROWS[:2])
    trainer = GRPOTrainer(*given, callbacks=[Watches()])
    step, loss, metrics = trainer.train()
    end = [("log", 2), ("eval_reward", 2), ("evaluate", 2), ("save", 2), ("log", 2)]
    assert events == [
        *(("eval_reward", 0), ("evaluate", 0)),
        *(("step_end", 1), ("log", 1), ("eval_reward", 1), ("evaluate", 1), ("save", 1)),
        *(("step_end", 2), *end),
    ]

    steps = [line for line in trainer.state.log_history if "reward_std" in line]
    assert (step, loss) == (2, pytest.approx(mean(line["loss"] for line in steps)))
    assert metrics["train_loss"] == loss
    assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(2 * 8)
    assert metrics["train_steps_per_second"] * metrics["train_runtime"] == pytest.approx(2)
    last = trainer.state.log_history[-1]
    assert (last["train_loss"], last["step"]) == (loss, 2)

    texts = (tmp_path / "run/groups.jsonl").read_text().splitlines()
    recorded = [json.loads(text) for text in texts]
    for line, groups in zip(steps, (each["groups"] for each in recorded), strict=True):
        rewards = [reward for group in groups for reward in group["rewards"]]
        lengths = [tokens for group in groups for tokens in group["tokens"]]
        assert line["reward_std"] == line["rewards/varied/std"] == pytest.approx(stdev(rewards))
        assert line["completions/min_length"] == min(lengths)
        assert line["completions/max_length"] == max(lengths)
        assert line["completions/max_terminated_length"] <= max(lengths)
        equal = [len(set(group["rewards"])) == 1 for group in groups]
        assert line["frac_reward_zero_std"] == mean(equal)
        assert line["step_time"] > 0
    assert all(line["eval_runtime"] > 0 for line in trainer.state.log_history if "n" in line)
    assert dict(trainer.evaluate())["eval_runtime"]

    for numbers, name in ((metrics, "total_flos"), (steps[0], "clip_ratio/low_mean")):
        with pytest.raises(KeyError) as caught:
            numbers[name]
        assert isinstance(caught.value, ConfigError)
        assert (caught.value.code, caught.value.field) == ("config", name)
        assert numbers.get(name) is None

    trainer.save_state()
    trainer.save_model()  # also where the state was saved before
    trainer.end()
    saved = TrainerState.load_from_json(str(tmp_path / "run/trainer_state.json"))
    assert saved.log_history == json.loads(json.dumps(trainer.state.log_history))


class Cuts:
    """Ends the epoch after the first step."""

    def on_step_end(self, state: Any, control: Any) -> None:
        control.should_epoch_stop = state.global_step == 1


class NamesWhatItWants:
    """Hooks that name some arguments only, and take the rest or have their own."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_begin(self, **about: Any) -> None:
        self.seen["begin"] = {"args", "state", "control"} <= about.keys()

    def on_step_end(self, _, state: Any, __, **about: Any) -> None:  # type: ignore[no-untyped-def]
        self.seen["step"] = state.global_step

    def on_log(self, logs: Any, state: Any, every: int = 1, **about: Any) -> None:
        if "reward" in logs:  # the last one has the numbers of the whole run
            self.seen["log"] = (state.global_step, every)

    def on_save(self, checkpoint: Path, **about: Any) -> None:
        self.seen["save"] = (checkpoint.name, about["state"].global_step)

    def on_train_end(self, *all_of_them: Any) -> None:
        self.seen["end"] = len(all_of_them)


def test_a_hook_gets_the_arguments_that_it_names(base_model: Path, tmp_path: Path) -> None:
    settings = config(tmp_path, max_steps=1, save_steps=1, eval_strategy="no")
    hooks = NamesWhatItWants()
    GRPOTrainer(str(base_model), Scripted(RISES), settings, ROWS, callbacks=[hooks]).train()
    assert hooks.seen == {
        "begin": True,
        "step": 1,
        "log": (1, 1),
        "save": ("step_000001", 1),
        "end": 3,
    }


@pytest.mark.parametrize("epochs", [1, 2])
def test_only_the_last_epoch_can_end_early(base_model: Path, tmp_path: Path, epochs: int) -> None:
    settings = config(tmp_path, max_steps=-1, num_train_epochs=epochs, eval_strategy="no")
    trainer = GRPOTrainer(str(base_model), Scripted(RISES), settings, ROWS, callbacks=[Cuts()])
    if epochs == 1:
        assert trainer.train().global_step == 1
        return
    with raises(ConfigError, field="control.should_epoch_stop"):
        trainer.train()


def test_the_state_of_a_resumed_run_knows_its_best_evaluation(tmp_path: Path) -> None:
    lines = [{"step": step, "mean_reward": RISES[step]} for step in range(4)]
    rest = {"accuracy": None, "standard_error": None, "pass_at_k": None}
    text = "".join(json.dumps(line | rest) + "\n" for line in lines)
    (tmp_path / "evaluations.jsonl").write_text(text)
    callbacks = Callbacks(config(tmp_path), tmp_path)
    callbacks.remember_best()
    assert callbacks.state.best_metric == 3
    assert callbacks.state.best_global_step == 3
