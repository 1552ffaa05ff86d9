"""Error responses: one shape for errors of services, of the framework and of unexpected crashes."""

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from common.errors import InvalidInput, ServiceError, TooLarge
from common.settings.explain import explained
from services.http.disconnect import ClientGone

log = logging.getLogger(__name__)


def add_error_handlers(app: FastAPI) -> None:
    """Gives every error the one shape."""
    for kind in (ServiceError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer_error)


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Returns the response to an error, also for a handler that FastAPI does not call."""
    response = error_response(_service_error(request, error), request.scope)
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


def error_response(error: ServiceError, scope: Scope) -> JSONResponse:
    """Returns the response of an error and puts the error into the scope for the access log."""
    scope["error"] = error
    headers = {503: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
    return JSONResponse(error.body(), error.status, headers)


def _service_error(request: Request, error: Exception) -> ServiceError:
    """Returns an error of a service for any error of a handler or of the framework."""
    if isinstance(error, HTTPException) and isinstance(error.__cause__, ServiceError):
        return error.__cause__  # FastAPI wraps what reading a body raises
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error.errors()[0])
    if isinstance(error, HTTPException):
        codes = {404: "not_found", 405: "method_not_allowed"}
        return ServiceError(
            str(error.detail),
            code=codes.get(error.status_code, "http_error"),
            status=error.status_code,
            remedy="the calls are listed at /docs",
        )
    if isinstance(error, ClientDisconnect):  # before its body ended: no crash of the service
        return ClientGone("the client closed the connection")
    return _crash(request, error)


def _crash(request: Request, error: Exception) -> ServiceError:
    """Logs an error that nobody expected; returns what its client is told."""
    log.error("%s %s failed", request.method, quote(request.scope["path"]), exc_info=error)
    return ServiceError(
        f"internal error: {type(error).__name__}", remedy="see the log of this service"
    )


def _invalid(wrong: Mapping[str, Any]) -> ServiceError:
    """Returns the error for what pydantic says is wrong with a request."""
    parts = [str(part) for part in wrong["loc"] if part not in ("body", "query", "path")]
    where = ".".join(parts) or "body"
    if wrong["type"] == "too_long":
        return TooLarge(
            f"the list has more than {wrong['ctx']['max_length']} items",
            field=where,
            value=wrong["ctx"]["actual_length"],
            remedy="send fewer",
        )
    refused = explained(wrong)
    return InvalidInput(
        refused.reason,
        field=where,
        value=wrong.get("input"),
        remedy=f"{refused.remedy}; the fields are described at /docs",
    )
