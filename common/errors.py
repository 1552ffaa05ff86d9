"""The error type of the system: what is wrong, in which field, with which value, and how to fix
it.
"""

import difflib
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MAX_VALUE_CHARS = 200
_MAX_TEXT_CHARS = 10_000
_REPR = reprlib.Repr()
_REPR.maxlevel = 4
_REPR.maxdict = 10
_REPR.maxlist = 10
_REPR.maxstring = _MAX_VALUE_CHARS
_REPR.maxother = _MAX_VALUE_CHARS


def shorten(value: object, limit: int = _MAX_VALUE_CHARS) -> str:
    """Returns `value` as text of at most `limit` characters, so that no error carries or formats a
    whole bad body.
    """
    if isinstance(value, bytes):
        value = value[:limit]
    text = value if isinstance(value, str) else _REPR.repr(value)
    text = text[: limit + 1].encode("utf-8", "replace").decode()  # lone surrogates cannot be sent
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def error_text(error: BaseException) -> str:
    """Returns the type and the text of an exception of user code, whatever its `__str__` does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def did_you_mean(given: str, choices: Iterable[str], similar: Iterable[str] = ()) -> str:
    """Returns a remedy for an unknown name: the nearest known name, if any is close, and all
    `choices`.

    `similar` are further known names, too many to list.
    """
    choices = list(choices)
    near = difflib.get_close_matches(given.lower(), [*choices, *similar], n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else ""
    if not choices:
        return hint

    *others, last = choices
    listed = f"{', '.join(others)} or {last}" if others else last
    return f"{hint} use {listed}".strip()


class ServiceError(Exception):
    """An error with a code for programs, and a message, field, value and remedy for users.

    Domain code raises a subclass and does not depend on HTTP: `services.http.app` turns it into the
    status and `{"error": {code, message, field?, value?, remedy?}}`, and `common.clients.base`
    turns that body back into this exception, with the id of the `request` that both sides log.

    `about` has further facts for programs, such as the `service` that did not answer. A log line
    about this error carries its code and all of these (`common.process.logs`), which is what
    `rlhf diagnose` reads: the message may be reworded. `settings` are those that message and remedy
    name, for an interface that calls them otherwise.
    """

    status = 500
    code = "internal"
    request: str | None = None

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        remedy: str | None = None,
        code: str | None = None,
        status: int | None = None,
        about: Mapping[str, Any] | None = None,
        settings: Sequence[str] = (),
    ) -> None:
        self.message = shorten(message, _MAX_TEXT_CHARS)
        self.field = None if field is None else shorten(field)
        self.value = None if value is None else shorten(value)
        self.remedy = None if remedy is None else shorten(remedy, _MAX_TEXT_CHARS)
        self.code = code or type(self).code
        self.status = status or type(self).status
        self.about = dict(about or {})
        self.settings = settings
        super().__init__(self.message)

    def __str__(self) -> str:
        facts = self._known()
        if self.request:
            facts["request"] = self.request
        return " · ".join([self.message, *(f"{name}: {text}" for name, text in facts.items())])

    def body(self) -> dict[str, Any]:
        """Returns the JSON body of the response: the one error shape."""
        return {"error": {"code": self.code, "message": self.message, **self._known()}}

    def event(self) -> dict[str, Any]:
        """Returns the code and the fields of a log line about this error."""
        return {"code": self.code, **self._known(), **self.about}

    def _known(self) -> dict[str, str]:
        optional = {key: getattr(self, key) for key in ("field", "value", "remedy")}
        return {key: text for key, text in optional.items() if text is not None}


class Refused(ValueError):
    """Why a validator of pydantic refuses a value, and the remedy; the text has both, for scripts
    that make a section themselves. A validator that sees several settings says which ones both
    name: `settings`, of which the first is to change.
    """

    def __init__(self, reason: str, remedy: str, *settings: str) -> None:
        super().__init__(f"{reason}: {remedy}")
        self.reason = reason
        self.remedy = remedy
        self.settings = settings


class InvalidInput(ServiceError):
    """The request or the configuration is invalid (422)."""

    status = 422
    code = "invalid_input"


class NotFound(ServiceError):
    """No such prompt, group or worker (404)."""

    status = 404
    code = "not_found"


class Conflict(ServiceError):
    """The request contradicts the state of the service (409); a retry would not help."""

    status = 409
    code = "conflict"


class TooLarge(ServiceError):
    """The body exceeds the limit of the service (413)."""

    status = 413
    code = "too_large"


class Unauthorized(ServiceError):
    """The request lacks the token of this service (401)."""

    status = 401
    code = "unauthorized"


class NotReady(ServiceError):
    """The service is starting, shutting down, or waiting for another one (503)."""

    status = 503
    code = "not_ready"


class Overloaded(NotReady):
    """The service is at its limit of concurrent work and did nothing (503)."""

    code = "overloaded"


class ServiceLost(ServiceError):
    """The service will never answer again (500): its part that works has died or cannot start, and
    nobody restarts it.

    A run ends with this error at once, since neither a retry nor another prompt would help.
    """

    code = "service_lost"


class ConfigError(ServiceError):
    """A setting is wrong; programs print the error and exit with status 2."""

    code = "config"
