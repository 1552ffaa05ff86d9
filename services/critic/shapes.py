"""The msgpack bodies of the critic-server, for `/openapi.json`. The checks: `common.critic_wire`."""

from services.http.openapi import Schema, fields

_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1}
_NUMBERS: Schema = {"type": "array", "items": {"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
_RUN: Schema = {"type": "string", "minLength": 1, "maxLength": 128}


_SEQUENCE = {"prompt_ids": _TOKENS, "completion_ids": _TOKENS}
_ROW = fields(
    ("prompt_ids", "completion_ids", "old_values", "returns"),
    **_SEQUENCE,
    old_values=_NUMBERS,
    returns=_NUMBERS,
    weight={"type": "number", "minimum": 0, "maximum": 3.4e38},
)
VALUE_REQUEST = fields(
    ("sequences",),
    sequences={"type": "array", "items": fields(("prompt_ids", "completion_ids"), **_SEQUENCE)},
    run_id=_RUN,
    step=_COUNT,
) | {
    "dependentRequired": {"run_id": ["step"], "step": ["run_id"]},
    "examples": [{"sequences": [{"prompt_ids": [5, 6], "completion_ids": [7, 2]}]}],
}
VALUES = fields(("values", "step"), values={"type": "array", "items": _NUMBERS}, step=_COUNT)
UPDATE_REQUEST = fields(
    ("run_id", "step", "seed", "rows"),
    run_id=_RUN,
    step=_COUNT,
    seed=_COUNT,
    rows={"type": "array", "items": _ROW, "minItems": 1},
)
