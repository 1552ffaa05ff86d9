"""Shared parts of the commands: argument parser, exit status, arguments from fields, data sets."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, get_args

import yaml
from pydantic.fields import FieldInfo

from common.config import fail
from common.errors import ConfigError, ServiceError
from common.schemas import Prompt
from services.data.loaders import CustomDatasetLoader, GSM8KLoader, Loader, MATHLoader, TinyLoader

_LOADERS = {"gsm8k": GSM8KLoader, "math": MATHLoader, "tiny": TinyLoader}
DATASETS = "gsm8k or math (from the Hugging Face hub), tiny (generated on the spot), or the path of a file or directory"


class Parser(argparse.ArgumentParser):
    """Keeps the line breaks of the help; a wrong argument ends like every other error."""

    def __init__(self, prog: str, usage: str, description: str, epilog: str) -> None:
        super().__init__(
            prog=f"python -m {prog}",
            usage=f"python -m {prog} {usage}",
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        fail(ConfigError(message, remedy=f"{self.prog} --help explains every argument"))


def run(main: Callable[[], None], interrupted: str) -> None:
    """Runs a command. It ends with status 2 for a ServiceError, 130 and `interrupted` for Ctrl-C, 141 for a closed pipe."""
    try:
        main()
    except ServiceError as error:
        fail(error)
    except BrokenPipeError:  # of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        print(f"\ninterrupted{interrupted}", file=sys.stderr, flush=True)
        raise SystemExit(130) from None


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


def positive(text: str) -> int:
    """Parses an integer above 0. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


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
