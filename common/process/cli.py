"""Shared parts of all command lines: help, argument errors, and exit statuses."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from common.errors import ConfigError, ServiceError, did_you_mean
from common.process.logs import log_exit_reason
from common.process.storage import make_directory


class CommandParser(argparse.ArgumentParser):
    """An argument parser that keeps line breaks in the help; wrong arguments end with status 2 and
    the usual error.

    `prog` is the command, such as `rlhf eval`; `usage` describes the arguments and is derived from
    them when empty.
    """

    def __init__(
        self, prog: str, description: str | None, usage: str = "", epilog: str = ""
    ) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}" if usage else None,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        # argparse takes only -1 and -0.5 for values, and -1e-4 for an unknown argument.
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self.elsewhere: Mapping[str, str] = {}
        """What to give instead of the arguments of another program, by their names."""
        # `Path("")` is the working directory.
        self.register("type", Path, _path)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Reads an argument by its type, which raises ConfigError for a text that is wrong."""
        try:
            return super()._get_values(action, arg_strings)
        except ConfigError as error:
            wrong = error
        except argparse.ArgumentError:  # the text is no `int` or `float`
            what = "number" if action.type is float else "whole number"
            wrong = ConfigError(
                f"this is not a {what}", value=" ".join(arg_strings), remedy=f"give a {what}"
            )
        *_, name = action.option_strings or [str(action.metavar or action.dest)]
        return fail(ConfigError(wrong.message, field=name, value=wrong.value, remedy=wrong.remedy))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            remedy = did_you_mean(str(value), map(str, action.choices))
            raise ConfigError("there is no such choice", value=value, remedy=remedy)

    def error(self, message: str) -> NoReturn:
        """Exits with argparse's message, which is all that it gives, in the usual error format."""
        options, _, problem = message.removeprefix("argument ").partition(": ")
        field = options.rpartition("/")[2]  # the last of `-o/--output`
        value: str | None = None
        remedy = f"{self.prog} --help explains every argument"

        if message.startswith("unrecognized arguments: "):
            field, *rest = problem.split()
            option = field.partition("=")[0]
            near = did_you_mean(option, [], self._option_string_actions)
            own = self.elsewhere.get(option.strip("-").replace("-", "_"))
            value = " ".join(rest) or None
            problem = "there is no such argument"
            remedy = own or f"{near} {remedy}".strip()
        elif message.startswith("the following arguments are required: "):
            field = problem
            problem = "this argument is required"
            remedy = f"add it; {remedy}"
        elif not problem:  # a message about several arguments
            problem = options
            field = ""
        elif problem == "expected one argument":
            problem = "it has no value"
            remedy = f"write {field} VALUE"

        fail(ConfigError(problem, field=field, value=value, remedy=remedy))


def fail(error: Exception, status: int = 2) -> NoReturn:
    """Prints the error, with its notes in lines of their own, and exits."""
    lines = [f"error: {error}", *getattr(error, "__notes__", [])]
    facts = error.event() if isinstance(error, ServiceError) else {"code": type(error).__name__}
    log_exit_reason("\n".join(lines), **facts)
    raise SystemExit(status)


def _path(text: str) -> Path:
    if not text:
        raise ConfigError("it is empty", remedy="name a path, or leave it out")
    return Path(text)


def output_file(text: str) -> Path:
    """Parses the name of a file that will be written. Raises ConfigError where none can be."""
    file = _path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(
            "this is a directory" if file.is_dir() else "there is no such directory",
            value=text,
            remedy="name a file in an existing directory",
        )
    make_directory(file.parent, "")
    return file


def positive(text: str) -> int:
    """Parses an integer above 0. Raises ConfigError."""
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{text!r} is not a whole number above 0", remedy="give one, such as 8")
    return int(text)


def count(text: str) -> int:
    """Parses an integer of at least 0. Raises ConfigError."""
    return 0 if text == "0" else positive(text)


def run(main: Callable[[], None], interrupted: str) -> None:
    """Runs a command: a ServiceError ends with status 2, Ctrl-C with 130 and `interrupted`, a
    closed pipe with 141.
    """
    try:
        main()
    except ServiceError as error:
        fail(error)
    except BrokenPipeError:  # such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        print(f"\ninterrupted{interrupted}", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
