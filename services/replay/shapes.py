"""Bodies and answers of the replay-buffer that are read and written by hand, for `/openapi.json`. Checks: `common.wire`."""

from common import wire
from common.schemas import Group, Groups, SampledGroups, TakenGroups
from services.http.openapi import JSON, struct_schema

KINDS = (JSON, wire.MSGPACK)
"""In msgpack the arrays of numbers are raw bytes, little-endian, 4 bytes a number."""
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
GROUP = struct_schema(Group)
GROUPS = struct_schema(Groups) | {"examples": [{"groups": [_EXAMPLE]}]}
TAKEN = struct_schema(TakenGroups)
SAMPLED = struct_schema(SampledGroups)
