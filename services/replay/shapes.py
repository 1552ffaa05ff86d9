"""Bodies and answers of the replay-buffer that are read and written by hand, for `/openapi.json`. Checks: `common.wire`."""

from typing import Any, get_args

from common import wire
from common.schemas import FinishReason, RewardStatus
from services.http.openapi import JSON, Schema, fields

KINDS = (JSON, wire.MSGPACK)
"""In msgpack the arrays of numbers are raw bytes, little-endian, 4 bytes a number."""


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


_TEXT: Schema = {"type": "string", "maxLength": 1_000_000}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
_TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_NUMBER: Schema = {"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}
_COMPLETION = fields(
    ("token_ids", "logprobs", "finish_reason", "weight_versions"),
    token_ids=_list(_TOKEN, minItems=1),
    logprobs=_list(_NUMBER, minItems=1, description="As many as token_ids"),
    text=_TEXT,
    finish_reason={"enum": list(get_args(FinishReason))},
    weight_versions=_list(
        _list(_COUNT, minItems=3, maxItems=3),
        minItems=1,
        description="[version, start, end], one after the other, over all tokens",
    ),
    reward=_NUMBER,
    correct={"type": "boolean"},
    status={"enum": list(get_args(RewardStatus))},
    extracted_answer={"anyOf": [_TEXT, {"type": "null"}]},
    components={"type": "object", "additionalProperties": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
)
GROUP = fields(
    ("id", "prompt_token_ids", "completions"),
    id={"type": "string", "minLength": 1, "maxLength": 128},
    prompt_id={"type": "string", "maxLength": 512},
    prompt=_TEXT,
    ground_truth=_TEXT,
    prompt_token_ids=_list(_TOKEN),
    completions=_list(_COMPLETION, minItems=1, maxItems=wire.MAX_COMPLETIONS),
    epoch=_COUNT,
    position=_COUNT,
    created_at={"type": "number"},
    metadata={"type": "object"},
)
_EXAMPLE = {
    "id": "run-1-000017",
    "prompt_id": "gsm8k-17",
    "prompt": "2 + 3 = ?",
    "ground_truth": "5",
    "prompt_token_ids": [11, 12, 13],
    "completions": [
        {
            "token_ids": [21, 2],
            "logprobs": [-0.3, -0.1],
            "text": "5",
            "finish_reason": "stop",
            "weight_versions": [[3, 0, 2]],
            "reward": 1.0,
            "correct": True,
        }
    ],
}
GROUPS = fields(("groups",), groups=_list(GROUP, minItems=1)) | {"examples": [{"groups": [_EXAMPLE]}]}
TAKEN = fields(("groups", "evicted"), groups=_list(GROUP), evicted=_COUNT)
SAMPLED = fields(("groups", "weights"), groups=_list(GROUP), weights=_list({"type": "number"}))
EXPERIENCES = fields(
    ("experiences",),
    experiences=_list(
        fields(
            ("prompt", "response", "reward", "ground_truth"),
            prompt=_TEXT,
            response=_TEXT,
            reward=_NUMBER,
            ground_truth={"anyOf": [_TEXT, {"type": "null"}]},
        )
    ),
)
