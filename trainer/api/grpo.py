"""TRL's interface: `GRPOTrainer` and `GRPOConfig`, with TRL's arguments and defaults, on top of
`OnlineRLTrainer`.
"""

import inspect
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, make_dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import Field

from common import Json
from common.errors import ConfigError
from common.process.topology import cuda_of_driver
from common.settings.algorithm import RECIPES, Recipe
from common.settings.lr_schedules import LrSchedule
from common.wire.schemas import Prompt
from trainer.api.assignments import overridden, own_methods
from trainer.api.refusals import Given, Names, Refusals
from trainer.api.settings import GivenSettings, TrainerConfig
from trainer.api.transformers_names import WithTransformersNames
from trainer.api.trl import ARGUMENTS, TRAINER, converted

_log = logging.getLogger(__name__)


class _OnlyTrlParser:
    """Refuses transformers' HfArgumentParser, which reads this name of each of its classes."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise ConfigError(
            "transformers' HfArgumentParser does not know this class",
            field=owner.__name__,
            remedy="use TrlParser of this package, which has parse_args_into_dataclasses, too",
        )


class GRPOConfig(TrainerConfig):
    """`TrainerConfig` with the arguments and defaults of TRL's GRPOConfig
    (docs/how-to/from-trl.md).

    A GPU is used if there is one, in bfloat16, unless `use_cpu` is set. Without
    `eval_strategy="steps"` the model is evaluated only before and after training.
    """

    betas: ClassVar[tuple[float, float]] = (0.9, 0.999)
    assumed: ClassVar[Json] = {"eval_strategy": "no"}
    has_trl_names: ClassVar[bool] = True
    loss_type: str | None = "dapo"
    num_generations: int = Field(8, ge=1)
    learning_rate: float = Field(1e-6, gt=0)
    num_train_epochs: float = Field(3, gt=0)
    gradient_accumulation_steps: int = Field(1, gt=0)
    max_new_tokens: int = Field(512, gt=0)
    kl_coef: float = Field(0.0, ge=0)
    lr_scheduler_type: LrSchedule = "linear"
    save_steps: int | float | Literal["epoch"] = 500
    save_total_limit: int = Field(1_000_000, gt=0)
    seed: int = Field(42, ge=0)

    _argument_group_name: ClassVar[Any] = _OnlyTrlParser()

    def __init__(self, output_dir: Any = None, **arguments: Any) -> None:
        if output_dir is not None:
            arguments["output_dir"] = output_dir
        earlier = arguments.get("settings")
        if isinstance(earlier, GivenSettings):  # `dataclasses.replace` gives all fields
            before = type(self)(**earlier.arguments)
            changes = {
                name: value
                for name, value in arguments.items()
                if name != "settings" and value != getattr(before, name)
            }
            arguments = {**earlier.arguments, **changes}
        super().__init__(**arguments)
        self.__post_init__()

    # Otherwise pydantic would call it, without its context, to validate fields.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __post_init__(self) -> None:
        """Does nothing; a subclass may do something, as in TRL."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Prepares a subclass for `@dataclass`, as scripts declare more arguments."""
        if cls.__module__ == __name__:
            return  # RLOOConfig is no script's
        names = [name for name in cls.__annotations__ if name in cls.model_fields]
        defaults = {
            name: cls.model_fields[name].get_default(call_default_factory=True) for name in names
        }
        cls.script_fields = cls.script_fields | {name for name in names if name not in ARGUMENTS}
        cls.assumed = cls.assumed | {
            name: default for name, default in defaults.items() if name in ARGUMENTS
        }
        for method in ("__init__", "__repr__", "__eq__"):
            # `@dataclass` writes no method that the class itself has.
            if method not in cls.__dict__:
                setattr(cls, method, getattr(cls, method))

    def _defaults(self) -> Json:
        advantage = self.settings.get(
            "algorithm.advantage", RECIPES[self.trainer_type].get("advantage", "group_normalised")
        )
        # TRL divides by the standard deviation plus 1e-4.
        compared = (
            {"algorithm.advantage_eps": 1e-4}
            if advantage in ("group_normalised", "reward_normalised")
            else {}
        )
        near = {"algorithm.kl_estimator": "k2"} if self.kl_coef else {}
        return super()._defaults() | {"optimizer.adam_betas": self.betas} | compared | near

    @classmethod
    def as_trl(cls, given: Given, was_warned: bool) -> Given:
        """Chooses device, precision and warm-up as TRL does."""
        say = _log.debug if was_warned else _log.warning
        chosen = dict(given)
        # TRL takes a GPU where there is one; `TrainerConfig` only where it is told to.
        if not {"use_gpu", "use_cpu"} & chosen.keys():
            chosen["use_gpu"] = _finds_gpu()
        if chosen.get("use_gpu") or chosen.get("use_cpu") is False:
            chosen.setdefault("bf16", True)
        elif chosen.get("bf16"):
            say("without effect here: bf16: on a CPU the update is computed in float32")
            chosen["bf16"] = False
        warmup = [name for name in ("warmup_steps", "warmup_ratio") if chosen.get(name)]
        if warmup and chosen.get("lr_scheduler_type") == "constant":
            say(
                "without effect here: %s: constant has no warm-up in transformers either; "
                "constant_with_warmup has one",
                ", ".join(warmup),
            )
            for name in warmup:
                del chosen[name]
        return chosen


def _finds_gpu() -> bool:
    """Whether torch finds a GPU. Without a driver it finds none, and is not imported to say so."""
    has_driver = cuda_of_driver() is not None or Path("/dev/kfd").exists()  # NVIDIA's or AMD's
    if "torch" not in sys.modules and not has_driver:
        return False
    import torch

    return bool(torch.cuda.is_available())


# Some scripts read the arguments of GRPOConfig to leave out unknown ones.
GRPOConfig.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in dict.fromkeys(["output_dir", *GRPOConfig.model_fields, *ARGUMENTS])
    ]
)


def _dataclass() -> Any:
    """Returns a dataclass with TRL's arguments and with our fields that TRL lacks;
    `dataclasses.asdict` and `replace` read its description.
    """
    ours = {argument.ours for name, argument in ARGUMENTS.items() if argument.ours != name}
    names = dict.fromkeys([*ARGUMENTS, *(set(GRPOConfig.model_fields) - ours)])
    return make_dataclass(
        "Arguments", [(name, Any, field(default=None, kw_only=True)) for name in names]
    )


for _name in ("__dataclass_fields__", "__dataclass_params__"):
    setattr(GRPOConfig, _name, getattr(_dataclass(), _name))


class RLOOConfig(GRPOConfig):
    """The same for TRL's RLOOConfig, which uses leave-one-out advantages."""

    trainer_type: Recipe = "rloo"
    kl_coef: float = Field(0.05, ge=0)
    num_generations: int = Field(2, ge=1)


class GRPOTrainer(WithTransformersNames):
    """`OnlineRLTrainer` with the arguments of TRL's GRPOTrainer; unsupported ones are refused with
    the reason.

    As in TRL, a text prompt is continued as it is; only chats use the model's chat template.
    """

    _config: type[GRPOConfig] = GRPOConfig
    _arguments: ClassVar[Names] = MappingProxyType(
        {"reward_fn": "reward_funcs", "model_name_or_path": "model", "config": "args"}
    )

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TrainerConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        engine: str | Sequence[str] = "embedded",
    ) -> None:
        _say_differences(eval_dataset is not None)
        self._refusals = Refusals()
        given = {
            "reward_processing_classes": reward_processing_classes,
            "quantization_config": quantization_config,
            "rollout_func": rollout_func,
        }
        converted(given, TRAINER, self._refusals)
        for error in overridden(type(self), _OWN_METHODS):
            self._refusals.add(error)
        args = self._config() if args is None else args
        if not isinstance(args, TrainerConfig):
            raise ConfigError(
                f"this is of type {type(args).__name__}",
                field="args",
                remedy=f"give a {self._config.__name__} of this package",
            )
        train_dataset, plain = _is_plain(train_dataset)
        self._is_plain = plain
        # Plain text is continued as it is: the template is the text itself, unless something else
        # makes the prompts.
        templates = {"data.prompt_template", "model.chat_template", "environment.name"}
        if plain and not (environment_factory or tools or templates & args.settings.keys()):
            args = args.model_copy(
                update={"settings": args.settings | {"data.prompt_template": "{question}"}}
            )
            args.model_fields_set.add("settings")
        super().__init__(
            args,
            reward_funcs,
            train_dataset,
            eval_dataset,
            model=model,
            processing_class=processing_class,
            peft_config=peft_config,
            callbacks=callbacks or (),
            optimizers=optimizers,
            engine=engine,
            environment_factory=environment_factory,
            tools=tools,
        )

    def _training_problems(self, dataset: Any) -> list[Prompt]:
        if self._is_made:
            dataset, plain = _is_plain(dataset)
            if plain != self._is_plain:
                kinds = ("chats", "texts")
                raise ConfigError(
                    f"the prompts are {kinds[plain]}, the earlier ones {kinds[self._is_plain]}",
                    field="train_dataset",
                    remedy="make a new trainer, which renders them in another way",
                )
        return super()._training_problems(dataset)


_OWN_METHODS = own_methods(GRPOTrainer)


class RLOOTrainer(GRPOTrainer):
    """The same for TRL's RLOOTrainer."""

    _config = RLOOConfig


@cache
def _say_differences(evaluates: bool) -> None:
    """Says, once, what differs from TRL without an argument for it."""
    _log.warning(
        "unlike in TRL, a reward function that fails costs its group, which is tried again, but "
        "not the run%s",
        "; eval_dataset is evaluated before and after training too" if evaluates else "",
    )


def _is_plain(dataset: Any) -> tuple[Any, bool]:
    """Returns the data set, with no row consumed, and whether the prompt of its first row is a
    text.
    """
    if dataset is None or isinstance(dataset, str | Mapping) or not hasattr(dataset, "__iter__"):
        return dataset, False  # refused later, with the reason
    if hasattr(dataset, "iloc"):
        return dataset, len(dataset) > 0 and isinstance(dataset.iloc[0].get("prompt"), str)
    rows = iter(dataset)
    first = next(rows, None)
    plain = isinstance(first, Mapping) and isinstance(first.get("prompt"), str)
    if rows is dataset and first is not None:
        dataset = chain([first], rows)
    return dataset, plain
