"""What `/openapi.json` says beyond what FastAPI finds out by itself: errors, and bodies that are read or written by hand."""

from typing import Any

import msgspec
from fastapi import Response
from pydantic import BaseModel, ConfigDict

JSON = "application/json"
OBJECT = {"type": "object"}
Schema = dict[str, Any]
"""Of JSON (2020-12), as in OpenAPI 3.1."""


def fields(required: tuple[str, ...], **properties: Schema) -> Schema:
    """An object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def struct_schema(kind: type[msgspec.Struct]) -> Schema:
    """A struct of `common.schemas` as JSON has it, without references: an OpenAPI page would look for them elsewhere."""
    content = msgspec.json.schema(kind, schema_hook=lambda _: {"type": "array"})
    definitions = content["$defs"]

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inlined(definitions[node["$ref"].rpartition("/")[2]])
            return {name: inlined(item) for name, item in node.items()}
        return [inlined(item) for item in node] if isinstance(node, list) else node

    return dict(inlined({"$ref": content["$ref"]}))


class ErrorDetail(BaseModel):
    """What went wrong, where, and what to do about it."""

    model_config = ConfigDict(extra="forbid")

    code: str
    message: str
    field: str = ""
    value: str = ""
    remedy: str = ""


class ErrorBody(BaseModel):
    """The one error shape."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


_REASONS = {
    400: "The request cannot be served as it is",
    401: "The token is missing or wrong",
    404: "It is not there",
    408: "The rest of the body did not come",
    409: "It does not fit the state of the service; repeating it would not help",
    413: "Too much at once",
    415: "A content type that is not read here",
    422: "The input is not valid",
    503: "Not now: try again after Retry-After",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route or an app that may answer with these statuses, in the one error shape."""
    return {status: {"model": ErrorBody, "description": _REASONS[status]} for status in statuses}


EVERYWHERE = errors(401, 408, 413, 422, 503)
"""What any call may answer with."""


def described(
    body: type[BaseModel] | Schema | None = None,
    answer: Schema | None = None,
    *,
    reads: tuple[str, ...] = (JSON,),
    writes: tuple[str, ...] = (JSON,),
    fails: tuple[int, ...] = (),
    statuses: tuple[int, ...] = (200,),
) -> dict[str, Any]:
    """Keyword arguments for a route.

    Args:
        body: that the handler reads by hand.
        answer: of a handler that returns a `Response`.
        reads, writes: content types of the two.
        fails: statuses of errors beside those of `EVERYWHERE`.
        statuses: that come with `answer`.
    """
    responses = errors(*fails)
    arguments: dict[str, Any] = {"responses": responses}
    if body is not None:
        schema = body if isinstance(body, dict) else body.model_json_schema()
        arguments["openapi_extra"] = {"requestBody": {"required": True, "content": _content(schema, reads)}}
    if answer is not None:
        arguments["response_class"] = Response
        responses |= {status: {"content": _content(answer, writes)} for status in statuses}
    return arguments


def _content(schema: Schema, kinds: tuple[str, ...]) -> dict[str, Any]:
    return {kind: {"schema": schema} for kind in kinds}
