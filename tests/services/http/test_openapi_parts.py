"""Parts of `/openapi.json` that handlers describe themselves: no reference is left, and every body,
answer and error is where a reader looks for it.
"""

import random
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from services.http.openapi import (
    EVERYWHERE,
    ErrorBody,
    described,
    errors,
    struct_schema,
    without_references,
)


class Inner(BaseModel):
    number: int


class Outer(BaseModel):
    inner: Inner
    many: list[Inner]


class Row(msgspec.Struct):
    name: str
    span: tuple[int, int]


class Rows(msgspec.Struct):
    rows: list[Row]


def resolved(node: Any, definitions: dict[str, Any]) -> Any:
    """Returns a schema with each reference looked up: another way, from the references on."""
    if isinstance(node, dict) and "$ref" in node:
        return resolved(definitions[node["$ref"].split("/")[-1]], definitions)
    if isinstance(node, dict):
        return {key: resolved(value, definitions) for key, value in node.items() if key != "$defs"}
    if isinstance(node, list):
        return [resolved(value, definitions) for value in node]
    return node


@pytest.mark.parametrize("seed", range(10))
def test_references_are_replaced_by_what_they_name(seed: int) -> None:
    draw = random.Random(seed)
    names = ["A", "B", "C"]

    def part(depth: int, may_name: list[str]) -> Any:
        kind = draw.choice(["ref", "object", "list", "text"]) if depth else "text"
        if kind == "ref" and may_name:
            return {"$ref": f"#/$defs/{draw.choice(may_name)}"}
        if kind == "object":
            return {"properties": {key: part(depth - 1, may_name) for key in "xy"}}
        if kind == "list":
            return {"anyOf": [part(depth - 1, may_name) for _ in range(2)]}
        return {"type": "string"}

    definitions = {name: part(3, names[:place]) for place, name in enumerate(names)}
    content = {"properties": {"p": part(3, names)}, "$defs": definitions}
    assert without_references(content) == resolved(content, definitions)


def test_bodies_and_answers_have_their_content_types() -> None:
    made = described(Outer, {"type": "string"}, writes=("text/plain", "a/b"), statuses=(200, 503))
    schema = resolved(Outer.model_json_schema(), Outer.model_json_schema()["$defs"])
    assert made["openapi_extra"] == {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
    }
    content = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "a/b")}
    assert made["responses"] == {200: {"content": content}, 503: {"content": content}}
    given = {"type": "object"}
    made = described(given, reads=("x/y",), fails=(404, 409))
    assert made["openapi_extra"]["requestBody"]["content"] == {"x/y": {"schema": given}}
    assert made["responses"] == errors(404, 409)
    assert "response_class" not in made
    assert "openapi_extra" not in described(fails=(404,))


def test_errors_have_the_one_shape_and_their_names() -> None:
    assert errors(404, 503) == {
        404: {"model": ErrorBody, "description": "Not Found"},
        503: {"model": ErrorBody, "description": "Service Unavailable"},
    }
    assert sorted(EVERYWHERE) == [401, 403, 408, 413, 415, 422, 503]


def test_a_tuple_is_a_list_of_its_first_kind() -> None:
    row = struct_schema(Rows)["properties"]["rows"]["items"]
    span = row["properties"]["span"]
    assert (span["items"], span["minItems"], span["maxItems"]) == ({"type": "integer"}, 2, 2)
    assert "prefixItems" not in span
