"""Collects everything that is wrong with what a caller gives, to say it all at once."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from types import MappingProxyType
from typing import TypeVar

from common.errors import ConfigError, ServiceError

_Error = TypeVar("_Error", bound=ServiceError)


def in_words(text: str, names: Mapping[str, str]) -> str:
    """Returns a text with other names for settings, wherever it mentions them."""
    if not names:
        return text
    mentioned = rf"(?<![\w.-])(?:{'|'.join(map(re.escape, names))})(?!\w|\.\w)"
    return re.sub(mentioned, lambda found: names[found[0]], text)


def renamed(error: _Error, names: Mapping[str, str], prefix: str = "") -> _Error:
    """Returns the error with other names for settings, wherever it mentions them."""
    changed = copy(error)
    ServiceError.__init__(
        changed,
        prefix + in_words(error.message, names),
        field=error.field and in_words(error.field, names),
        value=error.value,
        remedy=error.remedy and in_words(error.remedy, names),
        code=error.code,
        status=error.status,
        request=error.request,
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

    def raise_all(self, names: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raises the only error, or one that lists all of them; does nothing without any.

        `names` are the caller's names of fields.
        """
        errors = [renamed(error, names) for error in self._errors]
        if not errors:
            return
        if len(errors) == 1:
            raise errors[0]
        lines = [f"{len(errors)} arguments are wrong:"]
        fields = []
        for error in errors:
            about = [f"value: {error.value}"] if error.value is not None else []
            about += [error.remedy] if error.remedy else []
            fields.append(error.field or "")
            lines.append(f"  {error.field}: {error.message} ({'; '.join(about)})")
        raise ConfigError(
            "\n".join(lines),
            field=", ".join(dict.fromkeys(fields)),
            remedy="correct all of them",
        )
