"""What scripts for transformers' Trainer do after training: metrics, model card, accelerator."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.api.callbacks import TrainerCallback
from trainer.api.online import OnlineRLTrainer
from trainer.api.output import link_checkpoint
from trainer.evaluation.results import EvaluationResults


class ArgumentsOfOneProcess:
    """What scripts ask transformers' TrainingArguments about their process, besides arguments."""

    use_gpu: bool
    world_size = 1
    process_index = 0
    local_process_index = 0
    should_log = True
    should_save = True

    @property
    def device(self) -> str:
        """The device of this process."""
        return "cuda" if self.use_gpu else "cpu"

    @property
    def n_gpu(self) -> int:
        """Number of GPUs that this process uses."""
        return int(self.use_gpu)

    @property
    def distributed_state(self) -> Any:
        """One process."""
        return _one_process(self.device)

    def get_process_log_level(self) -> int:
        """Returns the level that a script gives its loggers."""
        return logging.INFO

    @contextmanager
    def main_process_first(self, **_: Any) -> Iterator[None]:
        """Waits for nobody."""
        yield

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON has them."""
        return self.model_dump(mode="json")  # type: ignore[attr-defined,no-any-return]


def _one_process(device: str) -> Any:
    """Returns what a script asks accelerate's Accelerator or PartialState."""
    return SimpleNamespace(
        is_main_process=True,
        is_local_main_process=True,
        num_processes=1,
        process_index=0,
        local_process_index=0,
        device=device,
        print=print,
        wait_for_everyone=lambda: None,
        unwrap_model=lambda model, **_: model,
        free_memory=lambda *_: None,
    )


class _CheckpointLinks(TrainerCallback):
    """Gives the checkpoints in `directory` the names of transformers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_save(self, state: Any, checkpoint: Path) -> None:
        link_checkpoint(self._directory, checkpoint)


class WithTransformersNames(OnlineRLTrainer):
    """`OnlineRLTrainer` with the further methods of transformers' Trainer."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.add_callback(_CheckpointLinks(self.output_dir))

    def save_model(
        self, path: str | Path | None = None, *_: Any, output_dir: str | Path | None = None
    ) -> Path:
        """See `OnlineRLTrainer.save_model`; `output_dir` is TRL's name of the path."""
        return super().save_model(path or output_dir)

    def evaluate(
        self, dataset: Any = None, k: Any = 1, *_: Any, eval_dataset: Any = None, **__: Any
    ) -> EvaluationResults:
        """See `OnlineRLTrainer.evaluate`; `eval_dataset` is TRL's name of the data set, and its
        further arguments have no effect.
        """
        given = eval_dataset if dataset is None else dataset
        return super().evaluate(given, k if isinstance(k, int) else 1)

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback, or those of a class."""
        self._callbacks.remove(callback)

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
        return _one_process("cuda" if self.config.use_gpu else "cpu")

    def is_world_process_zero(self) -> bool:
        """Returns True: there is one process."""
        return True

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Prints the numbers of `metrics`."""
        print(f"***** {split} metrics *****")
        for name, value in sorted(_numbers(metrics).items()):
            print(f"  {name:<24} = {value:>10.4g}")

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
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
        """Does nothing: a checkpoint has the state that a run needs to go on."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Does nothing: `save_model` writes the card of the run."""


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def _write(path: Path, content: dict[str, float]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
