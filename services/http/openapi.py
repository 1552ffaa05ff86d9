"""Parts of `/openapi.json` that FastAPI cannot derive: errors, and bodies that handlers read or
write themselves.
"""

from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import Response
from pydantic import BaseModel

from common.wire.schemas import Wire

JSON = "application/json"
OBJECT = {"type": "object"}
Schema = dict[str, Any]
"""A JSON schema (2020-12), as in OpenAPI 3.1."""


@cache
def struct_schema(kind: type[msgspec.Struct]) -> Schema:
    """Returns the schema of a struct of `common.wire.schemas`."""
    return without_references(msgspec.json.schema(kind, schema_hook=lambda _: {"type": "array"}))


@cache
def _model_schema(kind: type[BaseModel]) -> Schema:
    return without_references(kind.model_json_schema())


def without_references(content: Schema) -> Schema:
    """Returns a schema with its definitions in the place of references to them, which OpenAPI
    resolves elsewhere.
    """
    definitions = content.get("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inlined(definitions[node["$ref"].rpartition("/")[2]])
        if "prefixItems" in node:  # a tuple, whose items are of one kind; few tools know the word
            node = node | {"items": node["prefixItems"][0]}
            del node["prefixItems"]
        return {name: inlined(item) for name, item in node.items()}

    return dict(inlined({name: item for name, item in content.items() if name != "$defs"}))


class ErrorDetail(Wire):
    """The content of an error."""

    code: str
    message: str
    field: str = ""
    value: str = ""
    remedy: str = ""


class ErrorBody(Wire):
    """The one error shape."""

    error: ErrorDetail


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the `responses` of a route or an app for errors with these statuses."""
    return {
        status: {"model": ErrorBody, "description": HTTPStatus(status).phrase}
        for status in statuses
    }


EVERYWHERE = errors(401, 403, 408, 413, 415, 422, 503)
"""Errors of any call."""


def described(
    body: type[BaseModel] | Schema | None = None,
    answer: Schema | None = None,
    *,
    reads: tuple[str, ...] = (JSON,),
    writes: tuple[str, ...] = (JSON,),
    fails: tuple[int, ...] = (),
    statuses: tuple[int, ...] = (200,),
) -> dict[str, Any]:
    """Returns keyword arguments for a route.

    Args:
        body: schema of a body that the handler reads itself.
        answer: schema of the answer of a handler that returns a `Response`.
        reads: content types of the body.
        writes: content types of the answer.
        fails: error statuses besides those in `EVERYWHERE`.
        statuses: statuses that come with `answer`.
    """
    responses = errors(*fails)
    arguments: dict[str, Any] = {"responses": responses}
    if body is not None:
        schema = without_references(body) if isinstance(body, dict) else _model_schema(body)
        arguments["openapi_extra"] = {
            "requestBody": {"required": True, "content": _content(schema, reads)}
        }
    if answer is not None:
        arguments["response_class"] = Response
        responses |= {status: {"content": _content(answer, writes)} for status in statuses}
    return arguments


def _content(schema: Schema, kinds: tuple[str, ...]) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind in kinds}
