"""Hooks that teach schemathesis about these services (SCHEMATHESIS_HOOKS): msgpack, 503 as "not
now", long waits."""

from typing import Any

import msgpack
import schemathesis
from schemathesis import (
    Case,
    CheckContext,
    DeserializationContext,
    HookContext,
    Response,
    SerializationContext,
)

from tests.support.environments.own_environments import INSISTS, OPEN_SESSION

_SMALLEST = {"wait_s": 0.05, "n": 2, "deadline_s": 5.0}
"""Limits for waits and batches, which services grant as asked: long ones are not hangs but would
take time here."""


@schemathesis.serializer("application/msgpack")
def as_msgpack(_: SerializationContext, value: Any) -> bytes:
    try:
        packed = msgpack.packb(value)
    except (OverflowError, ValueError, TypeError):  # numbers and texts that only JSON can express
        packed = msgpack.packb(repr(value))
    assert isinstance(packed, bytes)
    return packed


@schemathesis.serializer("application/x-protobuf")
def as_protobuf(_: SerializationContext, value: Any) -> bytes:
    return value if isinstance(value, bytes) else repr(value).encode()


@schemathesis.deserializer("application/msgpack")
def from_msgpack(_: DeserializationContext, response: Response) -> Any:
    return _with_lists(msgpack.unpackb(response.content))


def _with_lists(value: Any) -> Any:
    """Replaces raw arrays by lists, as in JSON; other tests check their numbers."""
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_lists(item) for item in value]
    return [0] * (len(value) // 4) if isinstance(value, bytes) else value


@schemathesis.hook
def before_call(_: HookContext, case: "Case[Any]", kwargs: dict[str, Any]) -> None:
    if "/sessions/" in case.path:  # otherwise the call is refused before its body is read
        case.path_parameters["session"], case.headers["authorization"] = (
            OPEN_SESSION,
            f"Bearer {OPEN_SESSION}",
        )
    if (
        case.path == "/episodes"
        and isinstance(case.body, dict)
        and isinstance(task := case.body.get("task"), dict)
    ):
        task["env"] = INSISTS
    for part in (case.query, case.body):
        _shorten(part)


def _shorten(value: Any) -> None:
    if isinstance(value, dict):
        for name, most in _SMALLEST.items():
            if type(value.get(name)) in (int, float) and value[name] > most:
                value[name] = most
        for item in value.values():
            _shorten(item)
    elif isinstance(value, list):
        for item in value:
            _shorten(item)


@schemathesis.check
def no_crash(_: CheckContext, response: Response, case: "Case[Any]") -> None:
    """The only 5xx is 503, with the time to retry; `/health` answers 503 for "not healthy"."""
    if response.status_code >= 500 and case.path != "/health":
        assert response.status_code == 503, response.text
        assert response.headers["retry-after"] == ["1"]


@schemathesis.check
def one_error_shape(_: CheckContext, response: Response, case: "Case[Any]") -> None:
    """Every error has a code and a message, and quotes client input in shortened form."""
    if response.status_code >= 400 and case.path != "/health" and response.status_code != 400:
        error = response.json()["error"]
        assert {"code", "message"} <= error.keys()
        assert len(response.content) < 30_000
