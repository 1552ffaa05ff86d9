"""Answers about groups, for `/openapi.json`."""

from typing import Any

from services.http.openapi import Schema, fields


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _all(**properties: Schema) -> Schema:
    return fields(tuple(properties), **properties)


_TEXT: Schema = {"type": "string"}
_TRUTH: Schema = {"type": "boolean"}
_WHOLE: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_NUMBERS = _list(_or_null(_NUMBER), description="One for each token; null where it is not finite")
_ROW = _all(
    step=_or_null(_WHOLE) | {"description": "null: no step of the run directory has it"},
    place=_or_null(_WHOLE),
    id=_TEXT,
    prompt_id=_or_null(_TEXT),
    prompt=_or_null(_TEXT) | {"description": "Its beginning"},
    position=_or_null(_WHOLE),
    oldest=_or_null(_WHOLE) | {"description": "Weight version"},
    newest=_or_null(_WHOLE) | {"description": "Weight version"},
    reward=_or_null(_NUMBER) | {"description": "Mean; null when a completion was not graded"},
    rewards=_list(_or_null(_NUMBER)),
    correct=_or_null(_WHOLE),
    completions=_or_null(_WHOLE),
    tokens=_or_null(_WHOLE) | {"description": "Of the longest completion"},
    lengths=_list(_WHOLE),
    advantage=_or_null(_NUMBER) | {"description": "Mean |advantage|"},
    delta=_or_null(_NUMBER) | {"description": "Mean |log-probability of the trainer − that of the rollout|"},
    marks=_list(_TEXT),
    reused=_TRUTH,
    reason=_or_null(_TEXT),
    detail=_or_null(_TEXT),
)
_COMPLETION = _all(
    text=_TEXT,
    token_ids=_list(_WHOLE),
    logprobs=_NUMBERS,
    reward=_or_null(_NUMBER),
    finish_reason=_TEXT,
    weight_versions=_list(_list(_WHOLE, minItems=3, maxItems=3)),
    tokens=_or_null(_list(_TEXT)),
    trainer_logprobs=_or_null(_NUMBERS),
    advantage=_or_null(_NUMBER),
    advantages=_or_null(_NUMBERS) | {"description": "Where tokens have different ones"},
    correct=_or_null(_TRUTH),
    status=_or_null(_TEXT) | {"description": "null: nobody graded it"},
    components={"type": "object", "additionalProperties": _or_null(_NUMBER)},
    extracted_answer=_or_null(_TEXT),
)
FOUND = _all(total=_WHOLE, groups=_list(_ROW), problems=_list(_TEXT))
GROUP = _all(
    id=_TEXT,
    prompt_id=_TEXT,
    prompt=_TEXT,
    ground_truth=_TEXT,
    epoch=_WHOLE,
    position=_WHOLE,
    metadata={"type": "object"},
    step=_or_null(_WHOLE),
    source={"enum": ["run", "replay"]},
    missing=_list(_TEXT),
    created_at=_or_null(_NUMBER) | {"description": "Seconds since 1970"},
    reused=_TRUTH,
    weight=_or_null(_NUMBER),
    reason=_or_null(_TEXT),
    detail=_or_null(_TEXT),
    marks=_list(_TEXT),
    prompt_tokens=_or_null(_list(_TEXT)),
    completions=_list(_COMPLETION),
)
OF_PROMPT = _all(prompt_id=_TEXT, prompt=_or_null(_TEXT), groups=_list(_ROW))
