"""Collects everything that is wrong with what a caller gives, to say it all at once."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from types import MappingProxyType
from typing import Any, TypeVar

from common.errors import ConfigError, ServiceError

Names = Mapping[str, str]
"""What settings and fields are called by somebody else."""
Given = Mapping[str, Any]
"""Arguments, fields or settings by name."""
_Error = TypeVar("_Error", bound=ServiceError)


def own_names(settings: Iterable[str], names: Names) -> str:
    """Returns what settings are called elsewhere, such as `algorithm.kl_coef is beta here`; empty
    if `names` has none of them.
    """
    known = [name for name in dict.fromkeys(settings) if names.get(name, name) != name]
    return ", ".join(f"{name} is {names[name]} here" for name in known)


def with_names(error: _Error, names: Names) -> _Error:
    """Returns the error with the caller's name of its field, and of its other settings."""
    changed = copy(error)
    changed.field = names.get(error.field or "", error.field)
    others = own_names([name for name in error.settings if name != error.field], names)
    changed.remedy = "; ".join(filter(None, [error.remedy, others])) or None
    changed.settings = [names.get(name, name) for name in error.settings]
    return changed


class Refusals:
    """Errors about arguments that do not depend on one another."""

    def __init__(self) -> None:
        self._errors: list[ConfigError] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keeps a ConfigError for later instead of raising it."""
        try:
            yield
        except ConfigError as error:
            self._errors.append(error)

    def add(self, error: ConfigError) -> None:
        """Keeps an error for later."""
        self._errors.append(error)

    def raise_all(self, names: Names = MappingProxyType({})) -> None:
        """Raises the only error, or one that lists all of them; does nothing without any.

        `names` are the caller's names of fields.
        """
        errors = [with_names(error, names) for error in self._errors]
        if not errors:
            return
        if len(errors) == 1:
            raise errors[0]
        fields = dict.fromkeys(error.field or "" for error in errors)
        raise ConfigError(
            "\n  ".join([f"{len(errors)} arguments are wrong:", *map(str, errors)]),
            field=", ".join(fields),
            remedy="correct all of them",
        )
