"""Error responses: one shape for errors of services, of the framework and of unexpected crashes."""

import logging
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from common.errors import InvalidInput, ServiceError, TooLarge
from services.http.disconnect import ClientGone

log = logging.getLogger(__name__)


def add_error_handlers(app: FastAPI) -> None:
    """Registers the handlers that give every error the one shape."""
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Returns the response to an error, for a handler that FastAPI does not call."""
    handle = next(each for kind, each in _HANDLERS.items() if isinstance(error, kind))
    return await handle(request, error)


def error_response(error: ServiceError, scope: Scope) -> JSONResponse:
    """Returns the response of an error and puts the error into the scope for the access log."""
    scope["error"] = error
    headers = {503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
    return JSONResponse(error.body(), error.status, headers)


async def _on_service_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServiceError)
    return error_response(error, request.scope)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    where = ".".join(parts) or "body"
    if first["type"] == "too_long":
        limit = first["ctx"]["max_length"]
        found = first["ctx"]["actual_length"]
        too_long = TooLarge(
            f"the list has more than {limit} items",
            field=where,
            value=found,
            remedy="send fewer",
        )
        return error_response(too_long, request.scope)

    wrong = InvalidInput(
        first["msg"],
        field=where,
        value=first.get("input"),
        remedy="the fields are described at /docs",
    )
    return error_response(wrong, request.scope)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ServiceError):  # FastAPI wraps what reading a body raises
        return error_response(error.__cause__, request.scope)
    codes = {404: "not_found", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "http_error")
    wrapped = ServiceError(
        str(error.detail),
        code=code,
        status=error.status_code,
        remedy="the calls are listed at /docs",
    )
    response = error_response(wrapped, request.scope)
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(request: Request, _: Exception) -> JSONResponse:
    """Handles a client that disconnects before its body ends, which is not a crash of the
    service.
    """
    return error_response(ClientGone("the client closed the connection"), request.scope)


async def _on_crash(request: Request, error: Exception) -> JSONResponse:
    log.error("%s %s failed", request.method, quote(request.scope["path"]), exc_info=error)
    crash = ServiceError(
        f"internal error: {type(error).__name__}", remedy="see the log of this service"
    )
    return error_response(crash, request.scope)


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[JSONResponse]]] = {
    ServiceError: _on_service_error,
    RequestValidationError: _on_validation_error,
    HTTPException: _on_http_error,
    ClientDisconnect: _on_disconnect,
    Exception: _on_crash,
}
"""By kind of error, the special ones first."""
