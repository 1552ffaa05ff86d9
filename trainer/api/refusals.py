"""Collects everything that is wrong with what a caller gives, to say it all at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import ConfigError


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

    def raise_all(self) -> None:
        """Raises the only error, or one that lists all of them; does nothing without any."""
        errors = self._errors
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
