"""Shared parts of `rlhf train` and `rlhf eval`: arguments from fields, and data sets."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from common import Json
from common.errors import ConfigError, ServiceError
from common.process.cli import CommandParser
from common.settings.config import names
from common.settings.sources import read_text
from trainer.api.refusals import Names, with_names

DATASETS = (
    "gsm8k or math (from the Hugging Face hub), tiny (generated on the spot), or the path of a "
    "file or directory"
)
"""What `--dataset` accepts, for the help."""


def add_fields(
    parser: argparse._ArgumentGroup, fields: dict[str, FieldInfo], flags: dict[str, str]
) -> None:
    """Adds an argument for every field, with the field's description as help. Arguments not given
    are absent.

    Args:
        parser: argument group to add them to.
        fields: fields of a pydantic model.
        flags: flags by field, where they differ from the field's name.
    """
    for name, field in fields.items():
        flag = flags.get(name, f"--{name.replace('_', '-')}")
        default = field.get_default()
        text = " ".join((field.description or "").split())
        if default not in (None, "", False):
            text += f" (default {default})"
        options: Json = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": text.replace("%", "%%"),
        }
        # The types of a union, or the values of a Literal; a plain type has no arguments.
        kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
        kinds = kinds or [field.annotation]
        if kinds == [bool]:
            options["action"] = argparse.BooleanOptionalAction if default else "store_true"
        elif all(isinstance(kind, str) for kind in kinds):
            options["choices"] = kinds
        else:
            options["type"] = kinds[0]
            options["metavar"] = flag.rpartition("-")[2].upper()
        parser.add_argument(flag, **options)


def run_parser(prog: str, description: str | None, usage: str, epilog: str) -> CommandParser:
    """Returns the command line of a command whose first argument is the directory of a run."""
    made = CommandParser(prog, description, usage, epilog)
    made.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    return made


def add_settings(parser: argparse._ActionsContainer, text: str) -> None:
    """Adds `--set`, which may be given several times, with this help."""
    parser.add_argument(
        "--set", type=setting, action="append", default=[], metavar="NAME=VALUE", help=text
    )


def setting(text: str) -> tuple[str, Any]:
    """Splits `section.name=value`; a list may be written with commas. Raises ConfigError for any
    other form.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(
            f"{text!r} is not NAME=VALUE", remedy="write it like algorithm.entropy_coef=0.001"
        )
    known = names().get(name)
    return name, value if known is None else read_text(known, value, name)


@contextmanager
def argument_names(flags: Names) -> Iterator[None]:
    """Names the command's argument in an error inside the block: as its field, and for its other
    settings.

    Args:
        flags: arguments by the names of settings and of the Python API's fields and parameters.
    """
    try:
        yield
    except ServiceError as error:
        # An item of `TrainerConfig.settings` is an argument of `--set`.
        field = (error.field or "").removeprefix('settings["').removesuffix('"]')
        flag = flags.get(field, f"--set {field}" if "." in field else field)
        names = {name: f"--set {name}=VALUE" for name in error.settings if "." in name}
        # Nobody needs to be told that kl_coef is --kl-coef.
        names |= {
            name: flag for name, flag in flags.items() if flag != f"--{name.replace('_', '-')}"
        }
        raise with_names(error, names | {error.field or "": flag}) from None
