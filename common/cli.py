"""Shared parts of all command lines: help, errors of arguments, and exit statuses."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from common.config import fail, program
from common.errors import ConfigError, ServiceError


class Parser(argparse.ArgumentParser):
    """Keeps line breaks of the help; a wrong argument ends with status 2 and an error like any other.

    `prog` is the module that `python -m` runs; `usage` is that of the arguments, derived from them when empty.
    """

    def __init__(self, prog: str, description: str, usage: str = "", epilog: str = "") -> None:
        super().__init__(
            prog=program(prog),
            usage=f"{program(prog)} {usage}" if usage else None,
            description=description,
            epilog=epilog.replace(f"python -m {prog} ", f"{program(prog)} "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        fail(ConfigError(message, remedy=f"{self.prog} --help explains every argument"))


def positive(text: str) -> int:
    """Parses a whole number above 0. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def run(main: Callable[[], None], interrupted: str) -> None:
    """Runs a command: a ServiceError ends with status 2, Ctrl-C with 130 and `interrupted`, a closed pipe with 141."""
    try:
        main()
    except ServiceError as error:
        fail(error)
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        print(f"\ninterrupted{interrupted}", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
