"""Arguments that come as bare text get the types of the tool's schema, by an independent validator."""

import itertools
import json
from typing import Any

import jsonschema_rs
from hypothesis import given
from hypothesis import strategies as st

from services.environment.call_formats import FORMATS, parse_answer

_KINDS = ["boolean", "integer", "number", "object", "array", "null", "string"]
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.5, -1.5]),
    st.just([1]),
    st.just({"a": 1}),
)
_TYPES = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(_KINDS)}),
    st.fixed_dictionaries({"type": st.lists(st.sampled_from(_KINDS), min_size=1, unique=True)}),
    st.fixed_dictionaries({"enum": st.lists(_VALUES, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"const": _VALUES}),
    st.sampled_from([{"$ref": "#/$defs/Whole"}, {"$ref": "#/$defs/Both"}, {}]),
)
_PARTS = ("anyOf", "oneOf", "allOf")
_SCHEMAS = st.recursive(
    _TYPES,
    lambda inner: st.builds(
        lambda name, parts: {name: parts},
        st.sampled_from(_PARTS),
        st.lists(inner, min_size=1, max_size=2),
    ),
    max_leaves=4,
)
_DEFINITIONS = {"Whole": {"type": "integer"}, "Both": {"anyOf": [{"type": "null"}, {"const": 2}]}}


def _several(schema: Any, value: Any) -> bool:
    """Whether more than one part of a `oneOf` holds: the reader takes the value nevertheless."""
    if not isinstance(schema, dict):
        return False
    parts = [part for name in _PARTS for part in schema.get(name, [])]
    holding = [_allows(part, value) for part in schema.get("oneOf", [])]
    return sum(holding) > 1 or any(_several(part, value) for part in parts)


def _allows(schema: dict[str, Any], value: Any) -> bool:
    return jsonschema_rs.is_valid({**schema, "$defs": _DEFINITIONS}, value)


def _check(schema: dict[str, Any], value: Any) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": _DEFINITIONS}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    written = json.dumps(value)
    call = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    qwen = next(each for each in FORMATS if each.name == "Qwen3-Coder")
    message, problem = parse_answer(call, [tool], qwen)
    assert not problem
    (made,) = message.tool_calls
    arguments = made["function"]["arguments"]
    read = (json.loads(arguments) if isinstance(arguments, str) else arguments)["x"]
    expected = value if _allows(schema, value) else written
    assert (type(read), read) == (type(expected), expected)


@given(schema=_SCHEMAS, value=_VALUES)
def test_an_argument_has_the_value_that_its_schema_allows_and_is_text_otherwise(
    schema: dict[str, Any], value: Any
) -> None:
    if not _several(schema, value):
        _check(schema, value)


def test_every_type_takes_its_values_and_no_others() -> None:
    """Random schemas miss some of these pairs."""
    for value in (None, True, 0, 3, 0.5, [], [1], {}, {"a": 1}):
        for first, second in itertools.product(_KINDS, repeat=2):
            _check({"type": first}, value)
            _check({"type": sorted({first, second})}, value)
