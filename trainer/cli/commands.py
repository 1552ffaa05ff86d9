"""Shared parts of `trainer.train_math` and `trainer.evaluate_model`: arguments from fields, and data sets."""

import argparse
from typing import Any, get_args

import yaml
from pydantic.fields import FieldInfo

from common.errors import ConfigError
from common.schemas import Prompt
from services.data.loaders import CustomDatasetLoader, GSM8KLoader, Loader, MATHLoader, TinyLoader

_LOADERS = {"gsm8k": GSM8KLoader, "math": MATHLoader, "tiny": TinyLoader}
DATASETS = "gsm8k or math (from the Hugging Face hub), tiny (generated on the spot), or the path of a file or directory"


def add_fields(parser: argparse._ArgumentGroup, fields: dict[str, FieldInfo], flags: dict[str, str]) -> None:
    """Adds an argument for every field, with its documentation as help. Arguments that are not given are absent.

    Args:
        parser: argument group that gets them.
        fields: fields of a pydantic model.
        flags: names of arguments that differ from the name of the field.
    """
    for name, field in fields.items():
        flag, default = flags.get(name, f"--{name.replace('_', '-')}"), field.get_default()
        text = " ".join((field.description or "").split())
        shown = "" if default in (None, "", False) else f" (default {default})"
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": (text + shown).replace("%", "%%")}
        kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)] or [field.annotation]
        if kinds == [bool]:
            options |= {"action": argparse.BooleanOptionalAction} if default else {"action": "store_true"}
        elif all(isinstance(kind, str) for kind in kinds):
            options["choices"] = kinds
        else:
            options |= {"type": kinds[0], "metavar": flag.rpartition("-")[2].upper()}
        parser.add_argument(flag, **options)


def setting(text: str) -> tuple[str, Any]:
    """Splits `section.name=value`. Raises ArgumentTypeError for another form."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"the value of {text!r} cannot be read: {error}") from None


def problems(
    name: str, split: str, num_samples: int | None, at_most: int | None = None, seed: int = 0, shuffle: bool = False
) -> list[Prompt]:
    """Loads problems of the data set that a command names.

    Args:
        name: see `DATASETS`.
        split: split of the data set.
        num_samples: exact number of problems.
        at_most: largest number of problems when `num_samples` is None.
        seed, shuffle: passed to the loader.

    Raises ConfigError when the data set does not load.
    """
    loader: Loader = _LOADERS[name]() if name in _LOADERS else CustomDatasetLoader(name)
    try:
        found = loader.load(split, num_samples, seed, shuffle)
    except ConfigError as error:
        names = {"data.source": "--dataset", "data.num_samples": "--num-samples"}
        raise ConfigError(
            error.message, field=names.get(error.field or "", error.field), value=error.value, remedy=error.remedy
        ) from None
    return found if num_samples else found[:at_most]
