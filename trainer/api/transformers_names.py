"""What scripts for transformers' Trainer do after training: metrics, model card, accelerator."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from common import Json
from trainer.api import on_use
from trainer.api.online import OnlineRLTrainer
from trainer.api.settings import one_process
from trainer.evaluation.results import EvaluationResults
from trainer.trackers.base import Numbers

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerControl

    from trainer.api.callbacks import Hooks


class WithTransformersNames(OnlineRLTrainer):
    """`OnlineRLTrainer` with the further methods of transformers' Trainer."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.add_callback(on_use.CheckpointLinks(self.output_dir))

    def save_model(
        self, path: str | Path | None = None, *_: Any, output_dir: str | Path | None = None
    ) -> Path:
        """See `OnlineRLTrainer.save_model`; `output_dir` is TRL's name of the path."""
        return super().save_model(path or output_dir)

    def evaluate(
        self,
        dataset: Any = None,
        k: Any = 1,
        metric_key_prefix: str = "eval",
        *,
        eval_dataset: Any = None,
        ignore_keys: Any = None,
    ) -> EvaluationResults:
        """See `OnlineRLTrainer.evaluate`; the result also has the mean reward and the accuracy by
        TRL's names, `eval_reward` and `eval_accuracy`. `eval_dataset` is TRL's name of the data
        set, and `ignore_keys`, its second argument, has no effect.
        """
        given = eval_dataset if dataset is None else dataset
        began = time.monotonic()
        results = super().evaluate(given, k if isinstance(k, int) else 1)
        seconds = max(1e-9, time.monotonic() - began)
        named = {
            f"{metric_key_prefix}_reward": results["mean_reward"],
            f"{metric_key_prefix}_runtime": seconds,
            f"{metric_key_prefix}_samples_per_second": results["num_samples"] / seconds,
        }
        if results["accuracy"] is not None:
            named[f"{metric_key_prefix}_accuracy"] = results["accuracy"]
        return cast("EvaluationResults", {**results, **named})

    @property
    def callback_handler(self) -> "Hooks":
        """The callbacks."""
        return self._callbacks.hooks

    @property
    def control(self) -> "TrainerControl":
        """What callbacks ask for."""
        return self._callbacks.control

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback, or the first of a class."""
        self.callback_handler.remove_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes and returns a callback, or the first of a class; None without one."""
        return self.callback_handler.pop_callback(callback)

    @property
    def hub_model_id(self) -> str:
        """The model's name on the hub."""
        return self.config.hub_model_id or self.output_dir.resolve().name

    @property
    def args(self) -> Any:
        """The settings."""
        return self.config

    @property
    def processing_class(self) -> Any:
        """The tokenizer, as given or the model's own."""
        return self._caller_model.tokenizer(self.config)

    tokenizer = processing_class

    @property
    def accelerator(self) -> Any:
        """One process: what a script asks accelerate's Accelerator."""
        return one_process("cuda" if self.config.use_gpu else "cpu")

    def is_world_process_zero(self) -> bool:
        """Returns True: there is one process."""
        return True

    def log_metrics(self, split: str, metrics: Json) -> None:
        """Prints the numbers of `metrics`."""
        print(f"***** {split} metrics *****")
        for name, value in sorted(_numbers(metrics).items()):
            print(f"  {name:<24} = {value:>10.4g}")

    def save_metrics(self, split: str, metrics: Json, combined: bool = True) -> None:
        """Writes the numbers of `metrics` to SPLIT_results.json and, if `combined`, adds them to
        all_results.json.
        """
        own = _numbers(metrics)
        everything = self.output_dir / "all_results.json"
        _write(self.output_dir / f"{split}_results.json", own)
        if combined:
            before = json.loads(everything.read_text()) if everything.exists() else {}
            _write(everything, before | own)

    def save_state(self) -> None:
        """Writes transformers' `trainer_state.json`, with the `log_history`, into `output_dir`. A
        run goes on from the state that its checkpoints have.
        """
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.state.save_to_json(str(self.output_dir / "trainer_state.json"))

    def end(self) -> None:
        """Does nothing: trackers have ended when `train` returns."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Does nothing: `save_model` writes the card of the run."""


def _numbers(metrics: Json) -> Numbers:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def _write(path: Path, content: Numbers) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
