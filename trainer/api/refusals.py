"""Collects everything that is wrong with what a caller gives, to say it all at once."""

import re
from collections.abc import Iterator, Mapping
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


def names_in(text: str, names: Names) -> str:
    """Returns what the settings in a text are called elsewhere, such as `algorithm.kl_coef is beta
    here`; empty if it mentions none of `names`.
    """
    known = []
    for name, other in names.items():
        is_word = re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w)", text)
        if is_word and other != name:
            known.append(f"{name} is {other} here")
    return ", ".join(known)


def with_names(error: _Error, names: Names) -> _Error:
    """Returns the error with the caller's name of its field, and of the other settings that it
    mentions.
    """
    changed = copy(error)
    others = {name: other for name, other in names.items() if name != error.field}
    remedy = [error.remedy or "", names_in(f"{error.message} {error.remedy}", others)]
    ServiceError.__init__(
        changed,
        error.message,
        field=names.get(error.field or "", error.field),
        value=error.value,
        remedy="; ".join(filter(None, remedy)) or None,
        code=error.code,
        status=error.status,
        request=error.request,
        about=error.about,
    )
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
