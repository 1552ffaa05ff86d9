"""`OnlineRLTrainer`: training in this process on the caller's model, data and reward function."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from common import Json
from common.errors import ConfigError, ServiceError
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import names as setting_names
from common.wire.schemas import Prompt
from services.environment.environments import Environment
from services.reward.functions.composite import weights_of
from trainer.api import on_use
from trainer.api.assignments import check_assignment
from trainer.api.datasets import as_held_out, as_prompts, as_rewards
from trainer.api.engine import choose_engine
from trainer.api.episodes import (
    EnvironmentReward,
    EpisodeGrader,
    as_environment,
    takes_environments,
    with_environment,
)
from trainer.api.hub import push, write_card
from trainer.api.objects import CallerModel, optimizer_settings
from trainer.api.output import check_newest, check_output, decided, remove_run
from trainer.api.refusals import Given, Names, Refusals, with_names
from trainer.api.settings import TrainerConfig
from trainer.api.trial import try_functions
from trainer.api.trl import NamedNumbers
from trainer.evaluation.results import EvaluationResults
from trainer.observe.problems import Problems
from trainer.observe.run_dir import console, read_lines, read_settings
from trainer.policy.export import MODEL_FILES, export
from trainer.trackers.base import Numbers

if TYPE_CHECKING:
    from transformers.trainer_callback import TrainerState

# Content of a checkpoint besides the model.
_NOT_THE_MODEL = ("trainer_state.json", "state", "critic", "reference")


@dataclass(frozen=True)
class TrainResult:
    """Result of `train`. It can be unpacked and indexed as transformers' TrainOutput: global_step,
    training_loss, metrics.
    """

    global_step: int
    """Steps of the run, including those of earlier calls."""
    metrics: Numbers
    """`reward`, `accuracy`, `completion_tokens`, `loss` and `kl` of the last step; `eval_accuracy`
    with evaluation data; of the whole call `train_runtime` (seconds), `train_samples_per_second`
    (answers), `train_steps_per_second`, `train_loss` and `epoch`.

    Both accuracies are absent when the rewards are not verdicts, and `train_loss` without a step.
    """
    history: list[Json]
    """Record of every step (`metrics.jsonl`)."""
    evaluations: list[Json]
    """Record of every evaluation (`evaluations.jsonl`)."""
    checkpoint: Path
    """A Hugging Face directory with the trainer's state."""
    output_dir: Path

    @property
    def training_loss(self) -> float | None:
        """Mean loss of the steps of this call; None without one."""
        return self.metrics.get("train_loss")

    def __iter__(self) -> Iterator[Any]:
        return iter((self.global_step, self.training_loss, self.metrics))

    def __getitem__(self, place: int) -> Any:
        return tuple(self)[place]


class OnlineRLTrainer:
    """Trains a model by reinforcement learning on problems whose answers a reward function can
    grade.

    Args:
        config: settings.
        reward_fn: grades the answers: a function of completions, a `RewardFunction`, the name of a
            reward model, or a list of them, whose scores are summed with `config.reward_weights`.
        train_dataset: `Prompt` objects or rows: a list, a generator, a DataFrame, or a Hugging Face
            data set; without a length as many rows as `config.max_steps` needs. A row has `prompt`
            or `question` (a text or a chat) and `ground_truth` or `answer`; all of its columns
            reach the reward function as keyword arguments.
        eval_dataset: like train_dataset, or a dict of several; evaluated before and after training,
            and every `config.eval_steps` steps.
        model: a name, a directory or a model object instead of `config.model_name_or_path`. An
            object has the trained weights after `train`.
        processing_class: a tokenizer, or its name, instead of the model's own.
        peft_config: PEFT's `LoraConfig`.
        callbacks: objects with the hooks of `TrainerCallback`.
        optimizers: an AdamW, whose learning rate, betas and weight decay are used, and no
            scheduler.
        engine: generates the answers: `embedded`; `sglang`, which is started and stopped here; or
            one or several URLs of SGLang servers that have the model and see this disk.
        environment_factory: an environment class, or a function that makes an environment: episodes
            of several turns instead of single answers (docs/how-to/agents.md). Its `get_reward`, if
            it has one, replaces `reward_fn`, which otherwise gets all messages after the prompt.
        tools: functions that the model may call, each with types and a docstring.

    Raises ConfigError for all conflicting settings and data, before a model is loaded.
    """

    _refusals: Refusals | None = None
    """What a subclass has refused already."""
    _arguments: ClassVar[Names] = MappingProxyType({})
    """A subclass's own names of the arguments below, for errors."""
    described: Given | None = None
    """The settings of data that `train_dataset` and `eval_dataset` were loaded with, if
    `reward.functions` is the reward function, too: such a run can be forked. None for objects."""
    _is_made = False
    _began = False

    def __init__(
        self,
        config: TrainerConfig | None = None,
        reward_fn: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        model: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        callbacks: Sequence[Any] = (),
        optimizers: tuple[Any, Any] = (None, None),
        engine: str | Sequence[str] = "embedded",
        environment_factory: Any = None,
        tools: Sequence[Any] | None = None,
    ) -> None:
        refusals = self._refusals or Refusals()
        config = TrainerConfig() if config is None else config
        self._given_config = config
        self._fields_before = config.model_dump()
        self.output_dir = config.output_dir or Path(
            "outputs", f"{config.trainer_type}-{time.strftime('%Y%m%d-%H%M%S')}"
        )
        self._environment: Environment | None = None
        self._has_factory = environment_factory is not None
        changes: Json = {}
        with refusals.collected():
            _check_alone()
        settings = config.settings
        with refusals.collected():
            changes |= optimizer_settings(optimizers)
            settings = settings | changes.get("settings", {})
        with refusals.collected():
            self._environment = as_environment(environment_factory, tools)
            settings = with_environment(self._environment, settings)
        with refusals.collected():
            self._caller_model = CallerModel(
                model, processing_class, self.output_dir / "initial", peft_config=peft_config
            )
            settings = settings | self._caller_model.lora_settings(config)
        with refusals.collected():
            _check_name(model, config)
        if isinstance(model, str | Path):
            changes["model_name_or_path"] = str(model)
        changes["settings"] = settings
        with refusals.collected():
            config = config.changed(**changes)
        self._config_now = config
        with refusals.collected():
            self._engine = choose_engine(engine, config)
        self._callbacks = on_use.Callbacks(config, self.output_dir)
        for callback in callbacks:
            with refusals.collected():
                self.add_callback(callback)

        with refusals.collected():
            self.reward_funcs = reward_fn
        self._problems = Problems([], [])
        with refusals.collected():
            self.train_dataset = train_dataset
        with refusals.collected():
            self.eval_dataset = eval_dataset
        _check_together(config, self._problems, refusals)
        refusals.raise_all(config.names(self._arguments))

        self._rounds = 0
        self._checkpoint: Path | None = None
        # Content of the run's `config.json` after `train`.
        self._settings: Json | None = None
        # The model that `model` loaded, after its checkpoint.
        self._loaded: tuple[Path | None, Any] | None = None
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_made:
            check_assignment(name, value, self._arguments.get("config", "config"))
        super().__setattr__(name, value)

    # ------------------------------------------------------------ what may be assigned

    @property
    def train_dataset(self) -> Any:
        """The training data, as given. An assignment before `train` replaces it."""
        return self._train_dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Any) -> None:
        if self._began:
            raise ConfigError(
                "the data of a run cannot change once it has begun",
                field="train_dataset",
                remedy="make a new trainer, with model=trainer.model",
            )
        self._problems = replace(self._problems, train=self._training_problems(dataset))
        self._train_dataset = dataset

    @property
    def eval_dataset(self) -> Any:
        """The evaluation data, as given. An assignment replaces it."""
        return self._eval_dataset

    @eval_dataset.setter
    def eval_dataset(self, dataset: Any) -> None:
        held_out = [] if dataset is None else as_held_out(dataset, "eval_dataset")
        self._eval_dataset = dataset
        self._held_out_names = list(map(str, dataset)) if isinstance(dataset, Mapping) else []
        self._problems = replace(self._problems, held_out=held_out)

    @property
    def reward_funcs(self) -> Any:
        """The reward functions, as given. An assignment replaces them."""
        return self._reward_funcs

    @reward_funcs.setter
    def reward_funcs(self, reward_fn: Any) -> None:
        given = reward_fn
        if not self._has_factory and takes_environments(given):
            raise ConfigError(
                "a reward function takes environments, and there are none",
                field="environment_factory",
                remedy="give it, or rename the argument of the function",
            )
        if self._environment is not None and self._environment.has_reward:
            if given is not None:
                raise ConfigError(
                    "the environment has get_reward, which gives the whole reward",
                    field="reward_fn",
                    remedy="leave out either the reward functions or get_reward",
                )
            reward_fn = EnvironmentReward()
        rewards = as_rewards(_required(reward_fn, "reward_fn"), self._callbacks)
        self._weights = weights_of(rewards, self.config.reward_weights, "reward_weights")
        self._rewards = rewards
        # The functions that are tried at the start of a run.
        self._tried: Sequence[Any] = rewards
        if takes_environments(reward_fn):
            self._tried = [EnvironmentReward()]
        # A list that is changed later would have no effect.
        self._reward_funcs = tuple(given) if isinstance(given, list) else given

    def _training_problems(self, dataset: Any) -> list[Prompt]:
        has_end = hasattr(_required(dataset, "train_dataset"), "__len__")
        if not has_end and self.config.max_steps is None:
            raise ConfigError(
                "the data set has no length",
                field="max_steps",
                value=None,
                remedy="set max_steps, which limits how much of the data set is read",
            )
        needed = self.config.problems_per_step * (self.config.max_steps or 0)
        return as_prompts(dataset, "train_dataset", needed)

    @property
    def config(self) -> TrainerConfig:
        """The settings. Their fields may be set before `train`."""
        return self._config_now

    def _read_changes(self) -> None:
        """Takes what has been set in the config, or in the one that was given, since the last call.

        Raises ConfigError as the constructor does.
        """
        fields = self._given_config.model_dump()
        changes = {
            name: value for name, value in fields.items() if value != self._fields_before[name]
        }
        self._fields_before = fields
        if "settings" in changes:
            changes["settings"] = self.config.settings | changes["settings"]
        self._config_now = self.config.changed(**changes)
        if self.config.output_dir not in (None, self.output_dir):
            raise ConfigError(
                "the output directory cannot change any more: this trainer writes to "
                f"{self.output_dir}",
                field="output_dir",
                value=str(self.config.output_dir),
                remedy="set it before the trainer is made",
            )
        self._callbacks.args = self.config
        self._weights = weights_of(self._rewards, self.config.reward_weights, "reward_weights")
        refusals = Refusals()
        _check_together(self.config, self._problems, refusals)
        refusals.raise_all(self.config.names(self._arguments))

    # ------------------------------------------------------------ the run

    @property
    def state(self) -> "TrainerState":
        """The progress of the run."""
        return self._callbacks.state

    @property
    def model(self) -> Any:
        """The model object, as given or loaded; it has the trained weights after `train`. With a
        LoRA adapter it is PEFT's object.
        """
        own = self._caller_model
        if own.is_object and (self._checkpoint is None or not own.gets_adapter):
            return own.model
        if self._loaded is None or self._loaded[0] != self._checkpoint:
            section = self.config.to_config(self.config.problems_per_step, 0, Path()).model
            if self._checkpoint is None:
                model = on_use.load_model(section)
            elif on_use.is_adapter(self._checkpoint):
                from peft import PeftModel

                model = PeftModel.from_pretrained(on_use.load_model(section), self._checkpoint)
            else:
                model = on_use.load_model(
                    section.model_copy(update={"name": str(self._checkpoint)})
                )
            self._loaded = (self._checkpoint, model)
        return self._loaded[1]

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, or one of a class. Raises ConfigError for an object without hooks."""
        self._callbacks.hooks.add_callback(callback)

    def train(self, resume_from_checkpoint: bool | str | Path | None = None) -> TrainResult:
        """Trains, and writes metrics, samples and checkpoints to `output_dir`.

        A second call trains for as many steps again; after an interruption, it continues from the
        newest checkpoint.

        Args:
            resume_from_checkpoint: True: continue the run in `output_dir` from its newest
                checkpoint, or from its beginning if it has none; `auto`: the same, but begin a run
                where there is none; or the path of this checkpoint.

        Raises ConfigError when `output_dir` holds another run and neither this nor
        `overwrite_output_dir` is set, or no run and this is set, and ServiceError when training
        fails.
        """
        self._read_changes()
        resume_from_checkpoint = decided(resume_from_checkpoint, self.output_dir)
        resume = bool(resume_from_checkpoint) or self._began
        if isinstance(resume_from_checkpoint, str | Path):
            check_newest(self.output_dir, Path(resume_from_checkpoint))
        check_output(
            self.output_dir,
            resume or self.config.overwrite_output_dir,
            resume=resume_from_checkpoint is True,
        )
        # A run with a checkpoint has called its functions before.
        if on_use.newest(self.output_dir / "checkpoints") is None:
            self._try_rewards()
        self.config.model_name_or_path = self._caller_model.saved(self.config)
        with self._own_names():
            _check_lengths(self.config, [*self._problems.train, *self._problems.held_out])
        if not resume:
            remove_run(self.output_dir)
        self._began = True

        # Each call adds the steps of a whole run. An interrupted call counts as not made, so that
        # the next one finishes it.
        count = len(self._problems.train)
        rounds = max(self._rounds + 1, self._rounds_on_disk())
        settings = self.config.to_config(
            count,
            len(self._problems.held_out),
            self.output_dir,
            rounds=rounds,
            engine=self._engine,
            data=self.described or {},
        )
        problems: Problems | None = None
        rewards: Sequence[Any] | None = None
        if self.described is None:
            problems = self._problems
            rewards = self._tried
            settings.reward = settings.reward.for_objects(self._weights)
        environment = self._environment
        # Without get_reward, the reward functions grade episodes, inside the environment-server.
        if environment is not None and not environment.has_reward:
            grader = EpisodeGrader(settings.reward, self._rewards)
            environment = replace(environment, grade=grader, has_reward=True)
        self._callbacks.begin(count)
        try:
            with self._own_names():
                self._checkpoint = on_use.train_in_process(
                    settings,
                    console() if self.config.verbose else Console(quiet=True),
                    problems=problems,
                    rewards=rewards,
                    listener=self._callbacks,
                    engine=self._engine,
                    environment=environment,
                )
        except ConfigError:
            # The caller corrects the mistake and calls again, which is no second run.
            nothing_trained = not (self.output_dir / "metrics.jsonl").exists()
            if not resume and nothing_trained:
                remove_run(self.output_dir)
                self._began = False
            raise

        self._rounds = rounds
        self._settings = read_settings(self.output_dir)
        self._load_into_object(self._checkpoint)
        if self.config.push_to_hub:
            try:
                self.push_to_hub()
            except ConfigError as error:  # the training that worked is not lost
                print(f"not pushed: {error}")
        return self._result(self._checkpoint)

    def _load_into_object(self, saved: Path) -> None:
        """Gives the caller's model object, if there is one, the trained weights."""
        if self._caller_model.has_adapter:
            self._caller_model.load_adapter(saved)
        elif self._caller_model.is_object:
            with self._whole_model() as directory:
                self._caller_model.load(directory)

    def _try_rewards(self) -> None:
        """Calls the reward functions with made-up answers to the first problem, before the model is
        loaded. Raises ConfigError for a function that fails.
        """
        settings = self.config.to_config(len(self._problems.train), 0, Path()).reward
        with self._own_names():
            try_functions(self._tried, self._problems.train[0], settings.for_objects(self._weights))

    def _rounds_on_disk(self) -> int:
        """Returns how many whole calls of `train` the newest checkpoint contains."""
        newest = on_use.newest(self.output_dir / "checkpoints")
        if newest is None:
            return 0
        steps = int(newest.name.removeprefix("step_"))
        return steps // self.config.total_steps(len(self._problems.train))

    def save_model(self, path: str | Path | None = None) -> Path:
        """Writes the trained model as a plain Hugging Face directory and returns its path; an older
        model or adapter there is replaced, with its tokenizer.

        A LoRA adapter is merged into its model. In `output_dir`, the default, `config.json`
        has both the model's configuration and the settings of the run.

        Raises ConfigError before `train`, and for a path that is a file or a checkpoint.
        """
        if self._checkpoint is None:
            raise ConfigError(
                "there is no trained model yet",
                field="path",
                value=str(path),
                remedy="call train() before save_model()",
            )
        target = Path(path or self.output_dir)
        if target.exists() and not target.is_dir():
            raise ConfigError(
                "this is a file", field="path", value=str(target), remedy="name a directory"
            )
        # In the output directory this file is that of `save_state`.
        if (target / "trainer_state.json").exists() and not target.samefile(self.output_dir):
            raise ConfigError(
                "this directory is a checkpoint, and no run could continue from it after that",
                field="path",
                value=str(target),
                remedy="name another directory",
            )
        target.mkdir(parents=True, exist_ok=True)
        for pattern in MODEL_FILES:
            for old in target.glob(pattern):
                old.unlink()
        own_settings = self.output_dir / "config.json"
        found = read_settings(self.output_dir)
        assert self._settings is not None
        settings = self._settings | found
        if settings != found:  # a script has overwritten them with the model's configuration
            own_settings.write_text(json.dumps(settings, indent=2), encoding="utf-8")
        with self._whole_model() as source:
            shutil.copytree(
                source, target, ignore=shutil.ignore_patterns(*_NOT_THE_MODEL), dirs_exist_ok=True
            )
        if target.samefile(self.output_dir):
            model = read_settings(target)
            own_settings.write_text(json.dumps(settings | model, indent=2), encoding="utf-8")
        write_card(target, self.output_dir, problems=len(self._problems.train))
        return target

    def push_to_hub(
        self,
        repo_id: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        **_: Any,
    ) -> str | None:
        """Writes the trained model with its card to `output_dir/hub` and pushes it to the hub.

        Args:
            repo_id, private, token: `hub_model_id`, `hub_private_repo` and `hub_token` of the
                config when None. TRL's further arguments are for its model card.

        Returns the model's URL there; if the hub cannot be reached, prints the reason and returns
        None: the directory is complete. Raises ConfigError before `train`, and when the hub refuses
        it.
        """
        config = self.config
        if not token and config.hub_token is not None:
            token = config.hub_token.get_secret_value()
        saved = self.save_model(self.output_dir / "hub")
        name = repo_id or config.hub_model_id or self.output_dir.resolve().name
        private = config.hub_private_repo if private is None else private
        return push(saved, name, private=private, token=token)

    def samples(self, step: int | None = None) -> Any:
        """Returns one group of each step, or of `step`, as a DataFrame: step, prompt, completion,
        reward, correct (None where the reward is not a verdict).
        """
        import pandas

        groups = [
            group
            for group in read_lines(self.output_dir / "samples.jsonl")
            if step in (None, group["step"])
        ]
        for completion in (each for group in groups for each in group["completions"]):
            if not completion["verified"]:
                completion["correct"] = None
        table = pandas.json_normalize(groups, "completions", ["step", "prompt"])
        table = table.rename(columns={"text": "completion"})
        return table.reindex(columns=["step", "prompt", "completion", "reward", "correct"])

    @contextmanager
    def _whole_model(self) -> Iterator[Path]:
        """Yields a directory of the trained model, with its adapter merged; it may be temporary."""
        assert self._checkpoint is not None
        if not on_use.is_adapter(self._checkpoint):
            yield self._checkpoint
            return
        with TemporaryDirectory(prefix="rlhf-math-") as temporary:
            yield export(self._checkpoint, Path(temporary) / "merged")

    def evaluate(self, dataset: Any = None, k: int = 1) -> EvaluationResults:
        """Evaluates the current model (before `train`, the initial one) with the reward function.

        Args:
            dataset: the trainer's `eval_dataset` when None.
            k: samples per problem, as in `ModelEvaluator.evaluate`.
        """
        if self.config.settings.get("environment.name"):
            raise ConfigError(
                "evaluate is for single answers, and this trainer runs episodes",
                field="evaluate",
                remedy="give an eval_dataset: the trainer evaluates it with episodes before and "
                "after training, and every eval_steps",
            )
        if dataset is None and not self._problems.held_out:
            raise ConfigError(
                "there is no data to evaluate on",
                field="dataset",
                remedy="give dataset here, or eval_dataset to the trainer",
            )
        evaluator = on_use.ModelEvaluator.of_run(
            self._checkpoint or self._caller_model.saved(self.config),
            self.config.to_config(self.config.problems_per_step, 0, Path()),
            progress=self.config.verbose,
        )
        return evaluator.evaluate(
            self._problems.held_out if dataset is None else dataset,
            self._rewards,
            k=k,
            reward_weights=list(self._weights.values()),
        )

    @contextmanager
    def _own_names(self) -> Iterator[None]:
        """Gives settings in an error their names in the Python API."""
        try:
            yield
        except ServiceError as error:
            names = self.config.names(self._arguments)
            if error.field in setting_names() and "." in error.field:
                names.setdefault(error.field, f'settings["{error.field}"]')
            if self._caller_model.model is not None:
                names["model.name"] = "model"
            reference = self.config.ref_model_name_or_path
            if error.value == reference != self.config.model_name_or_path:
                names["model.name"] = "ref_model_name_or_path"
            raise with_names(error, names) from None

    def _result(self, saved: Path) -> TrainResult:
        history = read_lines(self.output_dir / "metrics.jsonl")
        evaluations = read_lines(self.output_dir / "evaluations.jsonl")
        found: Json = dict(self._callbacks.summary)
        last = history[-1] if history else {}  # a callback may stop a run before its first step
        for name in ("reward", "accuracy", "completion_tokens"):
            found[name] = last.get(name)
        if last:
            found["loss"] = last["update"]["loss"]
            found["kl"] = last["update"]["kl_reference"]
        if evaluations:
            found["eval_accuracy"] = evaluations[-1]["accuracy"]
            found |= by_data_set(evaluations[-1]["answers"], self._held_out_names)
        return TrainResult(
            global_step=last.get("step", 0),
            metrics=NamedNumbers(
                {name: float(value) for name, value in found.items() if value is not None}
            ),
            history=history,
            evaluations=evaluations,
            checkpoint=saved,
            output_dir=self.output_dir,
        )


def by_data_set(answers: Sequence[Json], names: Iterable[str]) -> Numbers:
    """Returns `eval_NAME_reward`, and `eval_NAME_accuracy` if rewards are verdicts, for each data
    set in `names`.
    """
    means: Numbers = {}
    for name in names:
        own = [answer for answer in answers if answer["prompt_id"].startswith(f"{name}/")]
        for figure, key in (("reward", "reward"), ("accuracy", "correct")):
            values = [answer[key] for answer in own if answer[key] is not None]
            if values:
                means[f"eval_{name}_{figure}"] = mean(values)
    return means


def _required(given: Any, field: str) -> Any:
    """Returns what is given. Raises ConfigError for None."""
    if given is None:
        raise ConfigError("this argument is required", field=field, remedy=f"give {field}")
    return given


def _check_alone() -> None:
    """Raises ConfigError in one of several processes, which torchrun and accelerate start."""
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise ConfigError(
            "this trainer runs in one process: several would each write the same files",
            field="WORLD_SIZE",
            value=processes,
            remedy="start the script with python, without torchrun or accelerate launch; to train "
            "on many GPUs, run a job group (docs/how-to/clusters.md)",
        )


def _check_name(model: Any, config: TrainerConfig) -> None:
    """Raises ConfigError if the settings name another model than the argument."""
    named = config.model_name_or_path
    is_named = model is not None and "model_name_or_path" in config.model_fields_set
    if is_named and named != str(model):
        raise ConfigError(
            "the argument model names another model",
            field="model_name_or_path",
            value=named,
            remedy="leave one of them out",
        )


def _check_together(config: TrainerConfig, problems: Problems, refusals: Refusals) -> None:
    """Adds what does not fit between settings, data and machine to `refusals`."""
    with refusals.collected():
        if config.use_gpu:
            on_use.choose_device(
                "cuda", "use_gpu", value=True, on_cpu="leave it out to train on the CPU"
            )
    with refusals.collected():
        if problems.train:
            config.check_steps(len(problems.train))
    if config.eval_steps and not problems.held_out:
        refusals.add(
            ConfigError(
                "there is nothing to evaluate on",
                field="eval_steps",
                value=config.eval_steps,
                remedy="give an eval_dataset",
            )
        )


def _check_lengths(config: TrainerConfig, prompts: Sequence[Prompt]) -> None:
    """Raises ConfigError for a problem that is too long for the settings or for the model."""
    settings = config.to_config(len(prompts), 0, Path())
    prompter = Prompter(on_use.load_tokenizer(settings.model), PromptStyle.of(settings), [])
    lengths = [len(prompter.token_ids(prompt)) for prompt in prompts]
    longest = max(lengths)
    room = (on_use.context_length(settings.model) or sys.maxsize) - longest
    field = ""
    if longest > config.max_prompt_length:
        field = "max_prompt_length"
        limit = ""
        remedy = "raise it"
    elif config.max_new_tokens > room:
        field = "max_new_tokens"
        limit = f", and the model's context has only {longest + room}"
        remedy = f"lower it to {room}" if room > 0 else "use a model with a longer one"
    if field:
        raise ConfigError(
            f"the problem {prompts[lengths.index(longest)].id} has {longest} tokens{limit}",
            field=field,
            value=getattr(config, field),
            remedy=f"{remedy}, or leave the problem out",
        )
