"""`OnlineRLTrainer`: training in this process on the caller's model, data and reward function."""

import math
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from common.errors import ConfigError
from common.schemas import Prompt
from services.reward.functions import RewardFunction
from trainer.api.datasets import as_prompts, as_rewards
from trainer.api.evaluator import EvaluationResults, ModelEvaluator
from trainer.api.output import check_output, remove_run
from trainer.api.settings import FIELDS, TrainerConfig
from trainer.cli.export import export
from trainer.in_process import Problems, train_in_process
from trainer.observe.run_dir import console, read_lines
from trainer.policy import checkpoint
from trainer.policy.scorer import context_length, is_adapter, load_tokenizer
from trainer.rollouts.prompts import Prompter

_NOT_THE_MODEL = ("trainer_state.json", "state", "critic", "critic-server", "reference")
"""Content of a checkpoint beside the model."""
_OLD_WEIGHTS = ("model*.safetensors", "*.safetensors.index.json", "pytorch_model*", "*.bin.index.json")


@dataclass(frozen=True)
class TrainResult:
    """Result of `train`."""

    global_step: int
    """Steps of the run, including earlier calls."""
    metrics: dict[str, float]
    """`reward`, `accuracy`, `completion_tokens`, `loss` and `kl` of the last step; `eval_accuracy` with evaluation data."""
    history: list[dict[str, Any]]
    """Record of every step (`metrics.jsonl`)."""
    evaluations: list[dict[str, Any]]
    """Record of every evaluation (`evaluations.jsonl`)."""
    checkpoint: Path
    """A Hugging Face directory with the trainer's state."""
    output_dir: Path


class OnlineRLTrainer:
    """Trains a model by reinforcement learning on problems whose answers a reward function can grade.

    Args:
        config: settings.
        reward_fn: grades the answers; several are combined as in the reward-server.
        train_dataset: a list of `Prompt`, a list of rows, or a Hugging Face `Dataset`. A row has `prompt` or `question` (a
            text or a chat) and `ground_truth` or `answer`; its other columns reach the reward function as keyword arguments.
        eval_dataset: like train_dataset; evaluated before and after training, and every `config.eval_steps` steps.

    Raises ConfigError for settings and data that do not fit together, before a model is loaded.
    """

    def __init__(
        self,
        config: TrainerConfig,
        reward_fn: RewardFunction | Sequence[RewardFunction],
        train_dataset: Iterable[Any],
        eval_dataset: Iterable[Any] | None = None,
    ) -> None:
        self.config = TrainerConfig(**config.model_dump())
        self._rewards = as_rewards(reward_fn)
        held_out = as_prompts(eval_dataset, "eval_dataset") if eval_dataset is not None else []
        self._problems = Problems(as_prompts(train_dataset, "train_dataset"), held_out)
        name = f"{config.trainer_type}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.output_dir = config.output_dir or Path("outputs") / name
        self._rounds, self._began = 0, False
        self._checkpoint: Path | None = None
        _check(self.config, self._problems)

    def train(self, resume_from_checkpoint: bool = False) -> TrainResult:
        """Trains, and writes metrics, samples, curves and checkpoints to `output_dir`.

        A second call trains for as many steps again; after an interruption it continues from the newest checkpoint.

        Args:
            resume_from_checkpoint: continue the run in `output_dir` from its newest checkpoint, if there is one.

        Raises ConfigError when `output_dir` holds another run and neither this nor `overwrite_output_dir` is set, and
        ServiceError when training fails.
        """
        resume = resume_from_checkpoint or self._began
        check_output(self.output_dir, resume or self.config.overwrite_output_dir)
        with self._config_field_names():
            _check_lengths(self.config, [*self._problems.train, *self._problems.held_out])
        if not resume:
            remove_run(self.output_dir)
        self._began = True
        count, per_round = len(self._problems.train), self.config.total_steps(len(self._problems.train))
        newest = checkpoint.newest(self.output_dir / "checkpoints")
        done = int(newest.name.removeprefix("step_")) if newest else 0
        rounds = max(self._rounds + 1, math.ceil(done / per_round))
        settings = self.config.to_config(count, len(self._problems.held_out), self.output_dir, rounds)
        target = console() if self.config.verbose else Console(quiet=True)
        try:
            with self._config_field_names():
                self._checkpoint = train_in_process(settings, target, problems=self._problems, rewards=self._rewards)
        except ConfigError:
            if not resume and not (self.output_dir / "metrics.jsonl").exists():  # nothing was trained: all of it is this call's
                remove_run(self.output_dir)
                self._began = False
            raise
        self._rounds = rounds
        return self._result(self._checkpoint)

    def save_model(self, path: str | Path) -> Path:
        """Writes the trained model as a plain Hugging Face directory and returns its path; an older model there is replaced.

        A LoRA adapter is merged into its model.

        Raises ConfigError before `train`, and for a path that is a file.
        """
        if self._checkpoint is None:
            raise ConfigError(
                "there is no trained model yet", field="path", value=str(path), remedy="call train() before save_model()"
            )
        target = Path(path)
        if target.exists() and not target.is_dir():
            raise ConfigError("it is a file", field="path", value=str(target), remedy="name a directory")
        target.mkdir(parents=True, exist_ok=True)
        for pattern in _OLD_WEIGHTS:
            for old in target.glob(pattern):
                old.unlink()
        with TemporaryDirectory(prefix="rlhf-math-") as temporary:
            adapter = is_adapter(self._checkpoint)
            source = export(self._checkpoint, Path(temporary) / "merged") if adapter else self._checkpoint
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_NOT_THE_MODEL), dirs_exist_ok=True)
        return target

    def evaluate(self, dataset: Iterable[Any] | None = None, k: int = 1) -> EvaluationResults:
        """Evaluates the current model, before `train` the initial one, with the reward function.

        Args:
            dataset: the trainer's `eval_dataset` when None.
            k: samples per problem, as in `ModelEvaluator.evaluate`.
        """
        if dataset is None and not self._problems.held_out:
            raise ConfigError("there is no data to evaluate on", field="dataset", remedy="give it here, or as eval_dataset")
        settings = self.config
        evaluator = ModelEvaluator(
            self._checkpoint or settings.model_name_or_path,
            system_prompt=settings.system_prompt,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
            progress=settings.verbose,
        )
        return evaluator.evaluate(self._problems.held_out if dataset is None else dataset, self._rewards, k)

    @contextmanager
    def _config_field_names(self) -> Iterator[None]:
        """Renames the field of an error to that of the Python API."""
        try:
            yield
        except ConfigError as error:
            reference = error.value == self.config.ref_model_name_or_path != self.config.model_name_or_path
            names = {**FIELDS, "reward.functions": "reward_fn"} | (
                {"model.name": "ref_model_name_or_path"} if reference else {}
            )
            field = names.get(error.field or "", error.field)
            raise ConfigError(error.message, field=field, value=error.value, remedy=error.remedy) from None

    def _result(self, saved: Path) -> TrainResult:
        history = read_lines(self.output_dir / "metrics.jsonl")
        evaluations = read_lines(self.output_dir / "evaluations.jsonl")
        last = history[-1]
        metrics = {name: float(last[name]) for name in ("reward", "accuracy", "completion_tokens")}
        metrics |= {"loss": last["update"]["loss"], "kl": last["update"]["kl_reference"]}
        if evaluations:
            metrics["eval_accuracy"] = evaluations[-1]["accuracy"]
        return TrainResult(last["step"], metrics, history, evaluations, saved, self.output_dir)


def _check(config: TrainerConfig, problems: Problems) -> None:
    if config.use_gpu and not torch.cuda.is_available():
        remedy = "leave it out to train on the CPU, or check nvidia-smi and that torch is a CUDA build"
        raise ConfigError("torch finds no GPU", field="use_gpu", value=True, remedy=remedy)
    if config.total_steps(len(problems.train)) == 0:
        data, step = f"{len(problems.train)} problems × {config.num_train_epochs} epochs", config.problems_per_step
        message, field = f"{data} do not make one step of {step} problems", "gradient_accumulation_steps"
        remedy = "lower it or per_device_train_batch_size, or give more data or epochs"
        raise ConfigError(message, field=field, value=config.gradient_accumulation_steps, remedy=remedy)
    if config.eval_steps and not problems.held_out:
        raise ConfigError(
            "there is nothing to evaluate on", field="eval_steps", value=config.eval_steps, remedy="give an eval_dataset"
        )


def _check_lengths(config: TrainerConfig, prompts: Sequence[Prompt]) -> None:
    """Raises ConfigError for a problem that is too long for the settings or for the model."""
    model = config.to_config(len(prompts), 0, Path()).model
    prompter = Prompter(load_tokenizer(model), config.system_prompt, [])
    lengths = [len(prompter.token_ids(prompt)) for prompt in prompts]
    longest, positions = max(range(len(prompts)), key=lengths.__getitem__), context_length(model)
    if lengths[longest] > config.max_prompt_length:
        remedy = "raise it, or leave the problem out"
        message = f"the problem {prompts[longest].id} has {lengths[longest]} tokens"
        raise ConfigError(message, field="max_prompt_length", value=config.max_prompt_length, remedy=remedy)
    if positions is not None and lengths[longest] + config.max_new_tokens > positions:
        remedy = f"lower it to {max(1, positions - lengths[longest])}, or leave the problem out"
        message = f"the problem {prompts[longest].id} has {lengths[longest]} tokens, and the model's context is {positions}"
        raise ConfigError(message, field="max_new_tokens", value=config.max_new_tokens, remedy=remedy)
