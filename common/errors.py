"""The one error shape of the system: what is wrong, in which field, with which value, and what to do about it."""

from typing import Any

_MAX_VALUE_CHARS = 200
_MAX_TEXT_CHARS = 10_000


def shorten(value: object, limit: int = _MAX_VALUE_CHARS) -> str:
    """`value` as text of at most `limit` characters, so that an error never carries a whole bad body."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("utf-8", "replace").decode()  # lone surrogates cannot be sent
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


class ServiceError(Exception):
    """An error with a code for programs and a message, field, value and remedy for people.

    Domain code raises one of the subclasses and knows nothing of HTTP; `services.http.app` turns it into the status and
    `{"error": {code, message, field?, value?, remedy?}}`; `common.clients` turns that body back into this exception, with the
    id of the `request`, under which the logs of both sides have it.
    """

    status = 500
    code = "internal"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        remedy: str | None = None,
        code: str | None = None,
        status: int | None = None,
        request: str | None = None,
    ) -> None:
        self.message = shorten(message, _MAX_TEXT_CHARS)
        self.field = None if field is None else shorten(field)
        self.value = None if value is None else shorten(value)
        self.remedy = None if remedy is None else shorten(remedy, _MAX_TEXT_CHARS)
        self.code = code or type(self).code
        self.status = status or type(self).status
        self.request = request
        super().__init__(self._text())

    def _text(self) -> str:
        parts = [self.message]
        if self.field is not None:
            parts.append(f"field: {self.field}")
        if self.value is not None:
            parts.append(f"value: {self.value}")
        if self.remedy is not None:
            parts.append(f"remedy: {self.remedy}")
        if self.request is not None:
            parts.append(f"request: {self.request}")
        return " · ".join(parts)

    def body(self) -> dict[str, Any]:
        """The JSON body of this error."""
        detail = {"code": self.code, "message": self.message}
        for key in ("field", "value", "remedy"):
            if (item := getattr(self, key)) is not None:
                detail[key] = item
        return {"error": detail}


class InvalidInput(ServiceError):
    """The request or the configuration cannot be used as it is (422)."""

    status = 422
    code = "invalid_input"


class NotFound(ServiceError):
    """No such prompt, group or worker (404)."""

    status = 404
    code = "not_found"


class Conflict(ServiceError):
    """The request does not fit the state of the service (409); repeating it would not help."""

    status = 409
    code = "conflict"


class TooLarge(ServiceError):
    """The body is over the limit of the service (413)."""

    status = 413
    code = "too_large"


class Unauthorized(ServiceError):
    """The request does not have the token of this service (401)."""

    status = 401
    code = "unauthorized"


class NotReady(ServiceError):
    """The service is starting, draining or waits for another one (503)."""

    status = 503
    code = "not_ready"


class Overloaded(NotReady):
    """More is in work than the service takes on at a time (503); nothing was done."""

    code = "overloaded"


class ConfigError(ServiceError):
    """A setting is wrong; programs print it and exit with status 2."""

    code = "config"
