"""Every value of every argument and setting with choices: it is accepted, or the error says what it
needs."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from shutil import which
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import AfterValidator
from transformers import SchedulerType
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

import trainer
from common.errors import ConfigError
from common.settings.algorithm import RECIPES
from common.settings.config import from_mapping, names
from trainer.api.grpo import GRPOConfig, RLOOConfig
from trainer.api.settings import TrainerConfig
from trainer.api.trl import ARGUMENTS, LOSSES, Argument

OUT = Path("out")
SEQUENCE = {"importance_sampling_level": "sequence"}
TEACHER = {"settings": {"teacher.url": "http://127.0.0.1:1"}}
LOWEST = {"min_lr_rate": 0.1}
DECAY = {"num_decay_steps": 5}
ARGUMENT_NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("lr_scheduler_type", "cosine_warmup_with_min_lr"): {"lr_scheduler_kwargs": LOWEST},
    ("lr_scheduler_type", "cosine_with_min_lr"): {"lr_scheduler_kwargs": LOWEST},
    ("lr_scheduler_type", "warmup_stable_decay"): {"lr_scheduler_kwargs": DECAY},
    ("loss_type", "bnpo"): {"gradient_accumulation_steps": 1},
    ("loss_type", "luspo"): SEQUENCE,
    ("loss_type", "opd"): TEACHER,
    ("trainer_type", "opd"): TEACHER,
    ("trainer_type", "ppo"): {"settings": {}},
}
"""What a value of an argument needs beside it."""
SETTING_NEEDS: dict[tuple[str, str], dict[str, Any]] = {
    ("algorithm.advantage", "none"): {"teacher.url": "http://127.0.0.1:1"},
    ("algorithm.kl_estimator", "k1"): {"algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward"},
    ("algorithm.kl_estimator", "k2"): {"algorithm.kl_coef": 0.1},
    ("algorithm.kl_in", "reward"): {"algorithm.kl_coef": 0.1},
    ("algorithm.name", "opd"): {"teacher.url": "http://127.0.0.1:1"},
    ("algorithm.old_logprobs", "engine"): {"algorithm.rollout_correction": "none"},
    ("lora.publish", "merged"): {"lora.rank": 8},
    ("runtime.kind", "docker"): {"environment.name": "agent:true", "runtime.image": "image"},
    ("runtime.kind", "kubernetes"): {"environment.name": "agent:true", "runtime.image": "image"},
    ("runtime.kind", "sandbox"): {"environment.name": "agent:true"},
    ("optimizer.lr_schedule", "cosine_warmup_with_min_lr"): {"optimizer.lr_schedule_args": LOWEST},
    ("optimizer.lr_schedule", "cosine_with_min_lr"): {"optimizer.lr_schedule_args": LOWEST},
    ("optimizer.lr_schedule", "warmup_stable_decay"): {"optimizer.lr_schedule_args": DECAY},
    ("replay.priority", "reward"): {"replay.reuse_ratio": 0.5},
    ("trainer.when_stale", "drop"): {"trainer.max_staleness": 1},
    ("trainer.when_stale", "train"): {"trainer.max_staleness": 1},
}
"""The same for a setting of the system."""


def choices(annotation: Any) -> Iterator[Any]:
    """Yields the values that an annotation lists: those of a Literal, and the built-in names beside
    an import path."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
        return
    if isinstance(annotation, AfterValidator):
        yield from filter(None, inspect.getclosurevars(annotation.func).nonlocals.get("names", ()))
        return
    for inner in get_args(annotation):
        yield from choices(inner)


def of_argument(name: str, argument: Argument) -> set[Any]:
    """Returns the values that an argument of TRL accepts by its declaration."""
    found = {value for value in argument.accepted if value is not None}
    if isinstance(argument.convert, Mapping):
        found |= set(argument.convert)
    elif argument.convert is None:
        field = TrainerConfig.model_fields.get(argument.ours) or names().get(argument.ours)
        found |= set(choices(field.annotation)) if field else set()
    return found


OF_ARGUMENTS = {
    (name, value) for name, argument in ARGUMENTS.items() for value in of_argument(name, argument)
}
OF_FIELDS = {
    (name, value)
    for name, field in TrainerConfig.model_fields.items()
    for value in choices(field.annotation)
}
OF_LOSSES = {("loss_type", value) for value in (*LOSSES, *RECIPES)}
OF_SETTINGS = {
    (name, value)
    for name, field in names().items()
    for part in (field.annotation, *field.metadata)
    for value in choices(part)
    if name != "reward.functions"  # its entries have arguments: see the tests of the reward-server
}


@pytest.mark.parametrize("kind", [TrainerConfig, GRPOConfig, RLOOConfig])
@pytest.mark.parametrize(("name", "value"), sorted(OF_ARGUMENTS | OF_FIELDS | OF_LOSSES, key=str))
def test_every_choice_of_an_argument_is_accepted(
    kind: type[TrainerConfig], name: str, value: Any
) -> None:
    if name == "trainer_type" and kind is not TrainerConfig:
        # of these two it is no argument of TRL, and their loss_type is not that of every recipe
        return
    needs = ARGUMENT_NEEDS.get((name, value), {})
    made = kind(**{"use_cpu": True, name: value, **needs})
    assert made.to_config(100, 0, OUT).trainer.device == "cpu"
    assert made.changed() == made, "its own names mean the same"


@pytest.mark.parametrize(
    ("name", "value"), sorted(key for key, needs in ARGUMENT_NEEDS.items() if any(needs.values()))
)
def test_an_argument_without_what_it_needs_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainerConfig(**{name: value})
    assert refused.value.remedy


@pytest.mark.parametrize(("name", "value"), sorted(OF_SETTINGS, key=str))
def test_every_choice_of_a_setting_is_accepted(name: str, value: Any) -> None:
    given = [value] if "list" in str(names()[name].annotation) else value
    needs = SETTING_NEEDS.get((name, value), {})
    section, _, setting = name.partition(".")
    made = from_mapping({name: given, **needs})
    assert getattr(getattr(made, section), setting) in (given, "truncate", "none"), (
        "`auto` is resolved"
    )
    if needs:
        with pytest.raises(ConfigError) as refused:
            from_mapping({name: given})
        assert refused.value.remedy


def test_what_is_needed_is_known_of_values_that_exist() -> None:
    assert SETTING_NEEDS.keys() <= OF_SETTINGS
    assert ARGUMENT_NEEDS.keys() <= OF_LOSSES | OF_FIELDS


def of_classes() -> Iterator[tuple[str, str, Any]]:
    """Yields class, parameter and value for every choice of the constructors of the Python API."""
    for name in trainer.__all__:
        public = getattr(trainer, name)
        others = (dict, TrainerConfig, trainer.RewardModelFunction)  # the last loads a model
        if inspect.isclass(public) and not issubclass(public, others):
            for parameter in inspect.signature(public).parameters.values():
                for value in choices(parameter.annotation):
                    yield name, parameter.name, value


@pytest.mark.integration
@pytest.mark.parametrize(("name", "parameter", "value"), list(of_classes()))
def test_every_choice_of_a_constructor_is_accepted(name: str, parameter: str, value: Any) -> None:
    public = getattr(trainer, name)
    required = [
        each for each in inspect.signature(public).parameters.values() if each.default is each.empty
    ]
    refused = (
        pytest.raises(ConfigError, match="remedy")
        if parameter == "sandbox" and not which("bwrap")
        else nullcontext()
    )
    with refused if value == "bubblewrap" else nullcontext():
        public(*("model" for _ in required), **{parameter: value})


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("eval_strategy", IntervalStrategy.NO, "eval_steps"),
        ("save_strategy", SaveStrategy.STEPS, "save_steps"),
        ("lr_scheduler_type", SchedulerType.COSINE, "lr_scheduler_type"),
    ],
)
def test_the_enumerations_of_transformers_are_accepted(name: str, value: Enum, field: str) -> None:
    assert getattr(GRPOConfig(**{name: value}), field) == getattr(
        GRPOConfig(**{name: value.value}), field
    )


def test_a_value_of_the_wrong_type_is_refused_by_name() -> None:
    """GRPOConfig has all fields of TrainerConfig, and validates them in the same way."""
    strange = [
        object(),
        "x",
        -1,
        0.5,
        1e30,
        float("nan"),
        [],
        ["x"],
        [None],
        {"x": 1},
        {1: 2},
        (),
        True,
        b"x",
        {1},
        3j,
    ]
    refused = []
    for name in {*ARGUMENTS, *GRPOConfig.model_fields}:
        for value in strange:
            try:
                GRPOConfig(**{"use_gpu": False, name: value})
            except ConfigError as error:
                refused.append(error)
    assert len(refused) > 1000
    assert all(error.field for error in refused)
