"""What scripts for transformers' Trainer do after training: metrics, model card, accelerator."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.api.online import OnlineRLTrainer


class WithTransformersNames(OnlineRLTrainer):
    """`OnlineRLTrainer` with the further methods of transformers' Trainer."""

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
        return SimpleNamespace(
            is_main_process=True,
            is_local_main_process=True,
            num_processes=1,
            process_index=0,
            device="cuda" if self.config.use_gpu else "cpu",
            print=print,
            wait_for_everyone=lambda: None,
            unwrap_model=lambda model, **_: model,
        )

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
