"""`TrainerConfig`: settings of the Python API, which also accept TRL's names, and their conversion
to `Config`.
"""

import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from common import Json
from common.errors import ConfigError, Refused, did_you_mean, shorten
from common.settings.algorithm import RECIPES, Recipe
from common.settings.config import Config, from_mapping
from common.settings.explain import explained
from common.settings.lr_schedules import LrSchedule
from common.settings.section import Named
from trainer.api.refusals import Given, Names, Refusals
from trainer.api.trl import ARGUMENTS, LOSSES, READ_AS, translated, with_present_names

# Settings that the trainer decides for every run.
_SET_BY_TRAINER = ("state_dir", "evaluation.samples", "checkpoint.resume")
OWN_SGLANG = (
    "engine_python",
    "engine_args",
    "tensor_parallel_size",
    "colocate",
    "hang_timeout_s",
    "stuck_after_s",
)
"""Settings of `rollout` for an SGLang that the trainer starts."""
OWN_NAMES = "own names"
"""The context of a validation in which no name is TRL's."""
# Defaults that differ from the system's.
_DEFAULTS: Json = {"evaluation.pass_samples": 0, "limits.max_failed_groups": 8}


@dataclass(frozen=True)
class SettingRow:
    """What a field of `TrainerConfig` is called in the system's settings and in TRL."""

    setting: str
    """The setting of the system that it determines."""
    when: Literal["always", "given", "computed"] = "always"
    """When the field determines the setting. `given`: only if the user set it; otherwise the recipe
    or the system's default applies. `computed`: together with other fields and the data
    (`to_config`)."""
    trl: str = ""
    """TRL's name, if it has another."""


def row(
    default: Any,
    setting: str,
    when: Literal["always", "given", "computed"] = "always",
    trl: str = "",
    **bounds: Any,
) -> Any:
    """Declares a field of `TrainerConfig` with its row."""
    declared = Field(default, **bounds)
    declared.metadata.append(SettingRow(setting, when, trl))
    return declared


class GivenSettings(Json):
    """The settings of a config, with the arguments that made it."""

    arguments: Given = MappingProxyType({})


class ArgumentsOfOneProcess:
    """What scripts read from transformers' TrainingArguments about their process."""

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
        """What scripts read as accelerate's PartialState."""
        return one_process(self.device)

    def get_process_log_level(self) -> int:
        """Returns the level that a script gives its loggers."""
        return logging.INFO

    @contextmanager
    def main_process_first(self, **_: Any) -> Iterator[None]:
        """Waits for no other process: there is none."""
        yield

    def to_dict(self) -> Json:
        """Returns the fields as JSON has them."""
        return self.model_dump(mode="json")  # type: ignore[attr-defined,no-any-return]

    def to_json_string(self) -> str:
        """Returns the fields as a text in JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> Json:
        """Returns the fields as trackers take them: numbers, texts and truth values."""
        fields = self.to_dict().items()
        return {
            name: value if isinstance(value, int | float) else str(value) for name, value in fields
        }


def one_process(device: str) -> Any:
    """Returns a stand-in for accelerate's Accelerator and PartialState in a run of one process."""
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


class TrainerConfig(ArgumentsOfOneProcess, BaseModel):
    """Settings of `OnlineRLTrainer`.

    Raises ConfigError with field, value and remedy for an unknown name, a value out of bounds, and
    settings that contradict each other.
    """

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    betas: ClassVar[tuple[float, float]] = (0.9, 0.98)
    """AdamW's betas, unless set otherwise."""
    assumed: ClassVar[Json] = {}
    """TRL's arguments that count as given with these values when the user leaves them out."""
    has_trl_names: ClassVar[bool] = False
    """Whether errors call a field by TRL's name when the user gave neither of its names."""
    script_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields that a script's own subclass adds; the trainer does not read them."""

    trainer_type: Recipe = row("grpo", "algorithm.name")
    """The recipe. ppo has a critic, opd a teacher (`settings={"teacher.url": …}`), the others
    compare the answers to one problem. It provides the values of algorithm settings that are
    unset."""
    loss_type: str | None = None
    """Only the loss: TRL's grpo, bnpo, dapo, dr_grpo, luspo, cispo or sapo, or another recipe's;
    trainer_type's when unset."""
    model_name_or_path: str = row("Qwen/Qwen2.5-0.5B-Instruct", "model.name", min_length=1)
    """The model to train: a name on the Hugging Face hub, or a local directory."""
    ref_model_name_or_path: str | None = row(None, "model.reference")
    """Reference model of the KL divergence; the initial model when unset."""
    num_generations: int = row(4, "sampling.group_size", ge=1)
    """Answers sampled for each problem."""
    learning_rate: float = row(5e-6, "optimizer.learning_rate", gt=0)
    """Learning rate of the policy."""
    critic_learning_rate: float | None = row(None, "critic.learning_rate", gt=0)
    """Learning rate of the critic of ppo; 1e-5 when unset."""
    num_train_epochs: float = row(1, "trainer.num_epochs", "computed", gt=0)
    """Passes over the training data, a fraction too; not read with `max_steps`."""
    max_steps: int | None = row(None, "trainer.max_steps", "computed", gt=0)
    """Steps of the run, over the training data as often as they need; unset, or -1 as in TRL:
    `num_train_epochs` passes."""
    per_device_train_batch_size: int = row(8, "trainer.micro_batch_size", gt=0)
    """Answers in one forward and backward pass, as in TRL: lower it when memory is short."""
    gradient_accumulation_steps: int = row(4, "trainer.batch_size", "computed", gt=0)
    """Passes in one step. A step learns from per_device_train_batch_size ×
    gradient_accumulation_steps answers, num_generations for each problem."""
    max_prompt_length: int = row(1024, "rollout.max_context_tokens", "computed", gt=0)
    """Longest problem in tokens, chat template included; a longer one is refused at the start."""
    max_new_tokens: int = row(256, "sampling.max_new_tokens", trl="max_completion_length", gt=0)
    """Longest answer in tokens."""
    temperature: float = row(1.0, "sampling.temperature", gt=0)
    """Sampling temperature."""
    top_p: float = row(1.0, "sampling.top_p", "given", gt=0, le=1)
    """Sample from the likeliest tokens with this share of the probability; 1: from all."""
    top_k: int | None = row(None, "sampling.top_k", "given", gt=1)
    """Sample from this many of the likeliest tokens; from all when unset."""
    min_p: float | None = row(None, "sampling.min_p", "given", ge=0, lt=1)
    """Sample no token whose probability is below this share of the likeliest one's."""
    generation_kwargs: Json | None = None
    """More sampling arguments, named as in transformers and vLLM: stop, stop_token_ids,
    min_new_tokens, ignore_eos."""
    system_prompt: str = row("", "sampling.system_prompt")
    """System message before every problem, in the model's chat template."""
    kl_coef: float = row(0.1, "algorithm.kl_coef", trl="beta", ge=0)
    """Weight of the KL divergence to the reference model in the loss; 0 loads no reference."""
    clip_range: float = row(0.2, "algorithm.clip_low", "given", trl="epsilon", gt=0, le=1)
    """The probability ratio is clipped to 1 ± clip_range. When this is unset, the recipe's own
    bounds apply."""
    clip_range_high: float | None = row(
        None, "algorithm.clip_high", "given", trl="epsilon_high", gt=0
    )
    """When set, the upper bound is 1 + clip_range_high."""
    num_iterations: int = row(1, "algorithm.update_epochs", "given", gt=0)
    """Passes over the answers of a step, each with an update."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """Share of all steps over which the learning rate rises from zero."""
    warmup_steps: int = row(0, "optimizer.warmup_steps", "computed", ge=0)
    """The same as a number of steps."""
    lr_scheduler_type: LrSchedule = row("constant", "optimizer.lr_schedule")
    """After the warm-up: constant, or a decay to zero at the last step."""
    weight_decay: float = row(0.0, "optimizer.weight_decay", ge=0)
    """Decoupled weight decay of AdamW."""
    max_grad_norm: float = row(1.0, "optimizer.max_grad_norm", gt=0)
    """Gradients are clipped to this norm."""
    gradient_checkpointing: bool = row(False, "trainer.activation_checkpointing", "given")
    """Keep only the inputs of layers and recompute the rest: less memory, about a third more
    time."""
    reward_weights: list[float] | None = None
    """Weight of each reward function, in their order; 1 each when unset."""
    use_gpu: bool = False
    """Generate answers and update the policy on the first GPU."""
    bf16: bool = False
    """Generate and compute the update in bfloat16; needs use_gpu. The weights that are trained stay
    float32."""
    output_dir: Named[Path | None] = row(None, "trainer.run_dir", "computed")
    """Directory of metrics, samples and checkpoints; a new `outputs/TRAINER_TYPE-DATE-TIME`
    when unset."""
    overwrite_output_dir: bool = False
    """Remove an earlier run in output_dir; otherwise it is an error."""
    save_steps: int | float | Literal["epoch"] = row(50, "checkpoint.every", "computed")
    """Steps between checkpoints, or a share of all steps below 1, or `epoch`; one is always written
    at the end; 0: only at the end."""
    save_total_limit: int = row(3, "checkpoint.keep", gt=0)
    """Number of newest checkpoints to keep."""
    eval_steps: int | float | Literal["epoch"] = row(0, "evaluation.every", "computed")
    """Steps between evaluations on the trainer's eval_dataset, or a share of all steps below 1, or
    `epoch`; 0: only before and after training."""
    seed: int = row(0, "seed", ge=0)
    """Seed of data order and sampling. Runs with the same seed are equal."""
    report_to: str = row("", "trackers.names", "computed")
    """Experiment trackers, separated by commas: tensorboard, wandb, mlflow, trackio
    (docs/how-to/metrics.md), or `all` for every installed one; none when empty."""
    run_name: str = row("", "trackers.run_name", "computed")
    """Name of the run in trackers; the name of output_dir when empty."""
    push_to_hub: bool = False
    """Write the model with its card to `output_dir/hub` after training, and push it to the Hugging
    Face hub."""
    hub_model_id: str | None = None
    """Name of the model on the hub, `org/name`; the name of output_dir when unset."""
    hub_private_repo: bool | None = None
    """Whether a new repository is private; the account decides when unset."""
    hub_token: SecretStr | None = None
    """Token for the hub; the machine's (HF_TOKEN) when unset."""
    verbose: bool = True
    """Print a line per step, and a summary at the end."""
    settings: Json = {}
    """Any other setting of the system (`python -m trainer --help-all`), as {"section.name":
    value}."""
    _given: Json = PrivateAttr(default_factory=dict)
    """The arguments by the names that they were given with."""

    @classmethod
    def as_trl(cls, given: Given, was_warned: bool) -> Given:
        """Returns the arguments with TRL's defaults for the others; this class has its own.

        `was_warned`: an earlier call warned about these arguments already.
        """
        return given

    def changed(self, **changes: Any) -> Self:
        """Returns these settings with changes to fields, checked again. Raises ConfigError as the
        constructor does.
        """
        fields = self.model_dump(exclude_unset=True) | changes
        made = type(self).model_validate(fields, context=OWN_NAMES)
        made._given = self._given | changes
        return made

    def __getattr__(self, name: str) -> Any:
        """Returns the value of one of TRL's arguments, as given or as the field has it."""
        if name not in ARGUMENTS:
            return super().__getattr__(name)  # type: ignore[misc]  # pydantic hides it
        if self._given.get(name) is not None:
            return self._given[name]
        if name in READ_AS:
            return READ_AS[name]
        # What transformers makes of an argument that is not given.
        if name == "greater_is_better":
            metric = self.metric_for_best_model
            return metric and not metric.endswith("loss")
        if name == "eval_strategy" and self.eval_steps != "epoch":
            return "steps" if self.eval_steps else "no"
        return getattr(self, ARGUMENTS[name].ours, None)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field or one of TRL's arguments. Raises ConfigError as the constructor does."""
        if name in ARGUMENTS and name not in type(self).model_fields:
            warned = self._given.keys() - {name}
            made = type(self).model_validate(self._given | {name: value}, context=warned)
            self.__dict__.update(made.__dict__)
            self.model_fields_set.update(made.model_fields_set)
            self._given = made._given
            return
        super().__setattr__(name, value)
        if name in type(self).model_fields:
            self._given = self._given | {name: value}

    # ------------------------------------------------------------ derived values

    @property
    def problems_per_step(self) -> int:
        """Problems whose answers make a step."""
        return (
            self.per_device_train_batch_size
            * self.gradient_accumulation_steps
            // self.num_generations
        )

    def total_steps(self, problems: int) -> int:
        """Returns the steps of a run over this number of training problems; 0 if they do not fill
        one step.
        """
        return self.max_steps or int(problems * self.num_train_epochs) // self.problems_per_step

    def check_steps(self, problems: int) -> None:
        """Raises ConfigError when this number of training problems does not fill one step."""
        if self.total_steps(problems) == 0:
            raise ConfigError(
                f"{problems} problems × {self.num_train_epochs} epochs are too few for one step of "
                f"{self.problems_per_step} problems",
                field="gradient_accumulation_steps",
                value=self.gradient_accumulation_steps,
                remedy="lower it or per_device_train_batch_size, give more data or more epochs, "
                "or set max_steps",
            )

    def names(self, arguments: Names = MappingProxyType({})) -> dict[str, str]:
        """Returns the user's names of settings and of fields (`_names`)."""
        return self._names(self._given, arguments)

    @classmethod
    def _names(
        cls, given: Collection[str], arguments: Names = MappingProxyType({})
    ) -> dict[str, str]:
        """Returns the user's names of settings and of fields.

        A field that was `given` by TRL's name is known by it, and in TRL's own configs also one
        that was not given. `arguments` are the trainer's own names of further fields.
        """
        named: dict[str, str] = {}
        if cls.has_trl_names:
            named = {field: row.trl for field, row in ROWS.items() if row.trl}
            named["reward_fn"] = "reward_funcs"
        named |= arguments
        for name in given:
            named.pop(name, None)
        for name in given:
            field = ARGUMENTS[name].ours if name in ARGUMENTS else ""
            if field in TrainerConfig.model_fields and field not in given:
                named[field] = name
        settings = {setting: named.get(field, field) for setting, field in FIELDS.items()}
        return named | settings

    def _steps_of(self, interval: float | str, problems: int) -> int:
        """Returns the number of steps of an interval: `save_steps` or `eval_steps`."""
        if interval == "epoch":
            return max(1, problems // self.problems_per_step)
        share = float(interval)
        return math.ceil(share * self.total_steps(problems)) if share < 1 else int(share)

    def to_config(
        self,
        problems: int,
        held_out: int,
        output_dir: Path,
        *,
        rounds: int = 1,
        engine: str | Sequence[str] = "embedded",
        data: Given = MappingProxyType({}),
    ) -> Config:
        """Returns the system's configuration of a run.

        Args:
            problems, held_out: number of training and of evaluation problems.
            output_dir: directory of the run.
            rounds: number of calls of `train`, including this one; each adds the steps of a whole
                run.
            engine: as returned by `choose_engine`.
            data: settings of the data set, where they describe the problems.

        Raises ConfigError when `settings` are invalid.
        """
        total_steps = self.total_steps(problems)
        # Whole epochs are counted by the data-server, which knows the prompts; a fraction of one is
        # a number of steps.
        counts_epochs = self.max_steps is None and self.num_train_epochs == int(
            self.num_train_epochs
        )
        mapped = self._defaults() | self._mapped()
        mapped |= {
            "trainer.run_dir": output_dir,
            "state_dir": output_dir / "state",
            "trainer.num_epochs": math.ceil(self.num_train_epochs) * rounds,
            "trainer.max_steps": None if counts_epochs else max(1, total_steps) * rounds,
            "optimizer.warmup_steps": self.warmup_steps
            or math.ceil(self.warmup_ratio * total_steps),
            "checkpoint.every": self._steps_of(self.save_steps, problems),
            "evaluation.every": self._steps_of(self.eval_steps, problems),
            "evaluation.samples": held_out,
        }
        if engine != "embedded":
            mapped["rollout.engine"] = "sglang"
        if engine == "sglang":
            mapped["rollout.colocate"] = self.use_gpu
        elif engine != "embedded":
            mapped["rollout.device"] = "auto"  # a server has its own, which is not known here
        return from_mapping(mapped | self.settings | dict(data))

    def _defaults(self) -> Json:
        """Returns the defaults that differ from the system's; `settings` may set them."""
        return _DEFAULTS

    def _mapped(self) -> Json:
        """Returns the system's settings that follow from the fields."""
        mapped: Json = {}
        given: Json = {}
        for field, row in ROWS.items():
            value = getattr(self, field)
            if value is None or field in self.script_fields:
                continue
            if row.when == "always":
                mapped[row.setting] = value
            elif row.when == "given" and field in self.model_fields_set:
                given[row.setting] = value
        # The recipe gives defaults. The loss wins over fields that always count, and fields that
        # count only when given win over the loss.
        for name, value in self._loss().items():
            mapped[f"algorithm.{name}"] = value
        # One `clip_range` is both bounds, as in PPO.
        if "clip_range" in self.model_fields_set and "clip_range_high" not in self.model_fields_set:
            mapped["algorithm.clip_high"] = self.clip_range
        mapped |= given
        trackers = [name.strip() for name in self.report_to.split(",") if name.strip()]
        if trackers and self.run_name:
            mapped["trackers.run_name"] = self.run_name
        return mapped | {
            "model.dtype": "bfloat16" if self.bf16 else "float32",
            "rollout.engine": "embedded",
            "rollout.max_context_tokens": self.max_prompt_length + self.max_new_tokens,
            "trainer.device": "cuda" if self.use_gpu else "cpu",
            "rollout.device": "cuda" if self.use_gpu else "cpu",
            "trainer.batch_size": self.problems_per_step,
            "trackers.names": trackers,
        }

    def _loss(self) -> Given:
        """Returns the settings of the algorithm that `loss_type` determines."""
        if self.loss_type is None:
            return {}
        if self.loss_type in LOSSES:
            return LOSSES[self.loss_type]
        return {} if self.loss_type == self.trainer_type else RECIPES[self.loss_type]

    # ------------------------------------------------------------ checks

    @field_validator("max_steps", mode="before")
    @classmethod
    def _unset_if_minus_one(cls, value: Any) -> Any:
        return None if value == -1 else value

    @field_validator("save_steps", "eval_steps")
    @classmethod
    def _checked_interval(cls, value: float | str) -> float | str:
        if not isinstance(value, str) and (value < 0 or (value > 1 and value % 1)):
            raise Refused("no interval", "give a whole number of steps, or a share of them below 1")
        return value

    @field_validator("loss_type")
    @classmethod
    def _known_loss(cls, value: str | None) -> str | None:
        losses = list(dict.fromkeys([*LOSSES, *RECIPES]))
        if value is not None and value not in losses:
            raise Refused("there is no such loss", did_you_mean(value, losses))
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _checked(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        given = {}
        refusals = Refusals()
        # A script's own fields mean nothing to TRL; all other names may be TRL's.
        if isinstance(data, dict) and info.context != OWN_NAMES:
            given = with_present_names(cls.assumed | data)
            own = {name: given[name] for name in given if name in cls.script_fields}
            others = {name: given[name] for name in given if name not in cls.script_fields}
            data = own | translated(
                cls.as_trl(others, was_warned=bool(info.context)),
                cls.model_fields,
                cls.betas,
                refusals=refusals,
                warned=info.context or (),
            )
        try:
            config = handler(data)
        except ValidationError as error:
            # Together with what is wrong with TRL's arguments: one error tells everything.
            for problem in error.errors():
                refusals.add(_named(problem, cls.__name__))
            refusals.raise_all(cls._names(given))
            raise
        config._given = given
        if given:  # `dataclasses.replace` finds the arguments there (`GRPOConfig.__init__`)
            settings = GivenSettings(config.settings)
            settings.arguments = given
            config.__dict__["settings"] = settings
        config._check(refusals)
        refusals.raise_all(cls._names(given))
        return config

    def _check(self, refusals: Refusals) -> None:
        """Adds contradictions between the fields to `refusals`; without any, the first one between
        the settings that follow from the fields.
        """
        wrong = [
            ConfigError(
                message, field=field, value=getattr(self, field), remedy=remedy, settings=others
            )
            for field, message, remedy, *others in self._contradictions()
        ]
        wrong += self._wrong_settings()
        for error in wrong:
            refusals.add(error)
        if not wrong:
            # `Config` checks the rest now, not when training starts. Settings of an environment
            # need a name, which the trainer may provide later: `python` stands for it here.
            checked = self
            uses_environment = any(name.startswith("environment.") for name in self.settings)
            if uses_environment and not self.settings.get("environment.name"):
                settings = self.settings | {"environment.name": "python"}
                checked = self.model_copy(update={"settings": settings})
            with refusals.collected():
                checked.to_config(self.problems_per_step, 0, Path("outputs"))

    def _contradictions(self) -> Iterator[tuple[str, ...]]:
        """Yields field, message and remedy for every contradiction between fields, and the other
        fields that they name if commands call these otherwise.
        """
        recipe = self.trainer_type
        answers = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if answers % self.num_generations:
            yield (
                "per_device_train_batch_size",
                f"per_device_train_batch_size × gradient_accumulation_steps = {answers} answers "
                f"a step are not a multiple of num_generations = {self.num_generations}",
                "change one of these three",
            )
        if recipe != "ppo" and self.critic_learning_rate is not None:
            yield (
                "critic_learning_rate",
                f"{recipe} has no critic",
                "leave it out, or use trainer_type='ppo'",
                "trainer_type",
            )
        is_other_recipe = self.loss_type not in (None, recipe, *LOSSES)
        if is_other_recipe and "advantage" in RECIPES[self.loss_type or recipe]:
            yield (
                "loss_type",
                f"{self.loss_type} is a way to compute advantages, and trainer_type is {recipe}",
                "set trainer_type to this value, and leave loss_type out",
                "trainer_type",
            )
        if self.loss_type == "bnpo" and self.gradient_accumulation_steps > 1:
            yield (
                "loss_type",
                "TRL's bnpo weighs tokens by the forward pass in which they happen to be, not by "
                "the batch",
                "set gradient_accumulation_steps=1 and a larger per_device_train_batch_size, or "
                "loss_type='dapo'",
            )
        level = RECIPES[recipe].get("importance_level")
        if self.loss_type == "luspo" and "sequence" not in (
            level,
            self.settings.get("algorithm.importance_level"),
        ):
            yield (
                "loss_type",
                "luspo compares the probabilities of whole answers",
                "set importance_sampling_level='sequence'",
            )
        if self.bf16 and not self.use_gpu:
            yield (
                "bf16",
                "the update on a CPU is computed in float32",
                "set use_gpu, or leave it out",
            )

    def _wrong_settings(self) -> Iterator[ConfigError]:
        """Yields an error for every item of `settings` that cannot be set there."""
        fixed = {row.setting for row in ROWS.values() if row.when != "given"}
        fixed |= {*self._mapped(), *_SET_BY_TRAINER}
        fixed -= {f"algorithm.{name}" for name in LOSSES.get(self.loss_type or "", {})}
        for name, value in self.settings.items():
            if isinstance(value, Mapping) and "." not in name:
                message = f"{name} is a section, not a setting"
                remedy = f"write {{'{name}.name': value}}"
            elif name in fixed:
                message = f"{name} is derived from the other fields"
                field = FIELDS.get(name)
                remedy = f"set {field} instead" if field else "leave it out"
            elif _decided_elsewhere(name):
                message = (
                    f"{name} does not apply to a run in one process with your own data and reward "
                    "function"
                )
                remedy = (
                    "leave it out and change the data set or the reward function instead, or run "
                    "the job group"
                )
            else:
                continue
            yield ConfigError(message, field=f'settings["{name}"]', value=value, remedy=remedy)


ROWS: dict[str, SettingRow] = {
    field: row
    for field, info in TrainerConfig.model_fields.items()
    for row in info.metadata
    if isinstance(row, SettingRow)
}
"""The row of each field that has one."""
FIELDS: dict[str, str] = {row.setting: field for field, row in ROWS.items()} | {
    "data.source": "train_dataset",
    "model.dtype": "bf16",
    "optimizer.lr_schedule_args": "lr_scheduler_kwargs",
    "reward.functions": "reward_fn",
    "reward.functions.reward_model.model": "reward_fn",
    "rollout.device": "use_gpu",
    "state_dir": "output_dir",
    "trainer.device": "use_gpu",
}
"""The field, or the argument of the trainer, that determines a setting."""


def _decided_elsewhere(name: str) -> bool:
    """Returns whether a setting does not apply: the caller's data or reward function, or the single
    process, decide it.
    """
    section, _, rest = name.partition(".")
    return rest == "port" or {
        "data": rest not in ("curriculum", "prompt_template"),
        "reward": rest not in ("workers", "function_timeout_s", "require_stop"),
        "rollout": rest not in ("max_running_requests", *OWN_SGLANG),
    }.get(section, False)


def _named(problem: Given, config: str) -> ConfigError:
    """Returns an error for a problem that pydantic found with a field of the class `config`."""
    name = str(problem["loc"][0]) if problem["loc"] else config
    if problem["type"] == "extra_forbidden":
        fields = list(TrainerConfig.model_fields)
        return ConfigError(
            f"{config} has no field {name}",
            field=name,
            value=shorten(problem["input"]),
            remedy=did_you_mean(name, [], [*fields, *ARGUMENTS])
            or f"the fields are {', '.join(fields)}",
        )
    wrong = explained(problem)
    return ConfigError(
        wrong.reason, field=name, value=shorten(problem["input"]), remedy=wrong.remedy
    )
