"""Groups as bytes: msgpack with raw little-endian arrays for programs, JSON for people.

Measured on 256 completions × 1,024 tokens: 30 ms as msgpack against 535 ms as JSON through pydantic. Nothing here
trusts the other side: every field is checked, and an error names it.
"""

import json
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, get_args

import msgpack
import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidInput
from common.schemas import Completion, FinishReason, Group, RewardStatus, SampledGroups, TakenGroups

MSGPACK = "application/msgpack"
MAX_COMPLETIONS = 1024
"""Of one group."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)
_STATUSES: tuple[str, ...] = get_args(RewardStatus)
_T = TypeVar("_T", bound=np.generic)


def encode_groups(groups: list[Group], **extra: object) -> bytes:
    """`{"groups": […], **extra}` as msgpack."""
    return _pack({"groups": [_group_dict(group, _raw) for group in groups], **extra})


def encode_taken(taken: TakenGroups) -> bytes:
    return encode_groups(taken.groups, evicted=taken.evicted)


def encode_sampled(sampled: SampledGroups) -> bytes:
    return encode_groups(sampled.groups, weights=_raw(sampled.weights))


def group_json(group: Group) -> dict[str, Any]:
    """A group as plain lists and numbers, for `GET /groups/{id}` and sample files."""
    return _group_dict(group, lambda array: array.tolist())


def decode_groups(body: bytes) -> list[Group]:
    """Raises InvalidInput naming the first field that is wrong."""
    return _groups(_unpack(body))


def decode_taken(body: bytes) -> TakenGroups:
    content = _unpack(body)
    return TakenGroups(_groups(content), _integer(content.get("evicted", 0), "evicted"))


def decode_sampled(body: bytes) -> SampledGroups:
    content = _unpack(body)
    groups = _groups(content)
    weights = _array(content.get("weights"), np.float32, "weights")
    if len(weights) != len(groups):
        _refuse("weights", len(weights), f"{len(groups)} groups need as many weights")
    return SampledGroups(groups, weights)


def group_from_dict(content: object, where: str = "group") -> Group:
    """Checks and builds one group; arrays are raw bytes (msgpack) or lists of numbers (JSON).

    Raises InvalidInput naming the field, e.g. `groups[3].completions[0].logprobs`.
    """
    if not isinstance(content, dict):
        _refuse(where, content, "a group is a mapping")
    _only_known(content, set(Group.__dataclass_fields__), where)
    items = content.get("completions")
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_COMPLETIONS:
        _refuse(f"{where}.completions", items, f"a group has 1 to {MAX_COMPLETIONS} completions")
    return Group(
        id=_text(content, "id", where, limit=128, empty=False),
        prompt_id=_text(content, "prompt_id", where, limit=512),
        prompt=_text(content, "prompt", where),
        ground_truth=_text(content, "ground_truth", where),
        prompt_token_ids=_array(content.get("prompt_token_ids"), np.int32, f"{where}.prompt_token_ids"),
        completions=[_completion(item, f"{where}.completions[{i}]") for i, item in enumerate(items)],
        epoch=_integer(content.get("epoch", 0), f"{where}.epoch"),
        position=_integer(content.get("position", 0), f"{where}.position"),
        created_at=_number(content.get("created_at", 0.0), f"{where}.created_at"),
        metadata=_metadata(content.get("metadata", {}), f"{where}.metadata"),
    )


def _completion(content: object, where: str) -> Completion:
    if not isinstance(content, dict):
        _refuse(where, content, "a completion is a mapping")
    _only_known(content, set(Completion.__dataclass_fields__), where)
    token_ids = _array(content.get("token_ids"), np.int32, f"{where}.token_ids")
    logprobs = _array(content.get("logprobs"), np.float32, f"{where}.logprobs")
    if len(token_ids) == 0:
        _refuse(f"{where}.token_ids", "[]", "a completion has at least one token (its end of sequence)")
    if (token_ids < 0).any():
        _refuse(f"{where}.token_ids", int(token_ids.min()), "token ids are not negative")
    if len(logprobs) != len(token_ids):
        _refuse(f"{where}.logprobs", len(logprobs), f"{len(token_ids)} tokens need as many logprobs")
    if not np.isfinite(logprobs).all():
        _refuse(f"{where}.logprobs", "NaN or infinity", "send what the engine returned; drop the group if it is not finite")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        text=_text(content, "text", where),
        finish_reason=_choice(content.get("finish_reason"), _FINISH_REASONS, f"{where}.finish_reason"),
        weight_versions=_spans(content.get("weight_versions"), len(token_ids), f"{where}.weight_versions"),
        reward=_number(content.get("reward", 0.0), f"{where}.reward"),
        correct=_boolean(content.get("correct", False), f"{where}.correct"),
        status=_choice(content.get("status", "ok"), _STATUSES, f"{where}.status"),
        extracted_answer=None if content.get("extracted_answer") is None else _text(content, "extracted_answer", where),
    )


def _group_dict(group: Group, array: Callable[[NDArray[Any]], Any]) -> dict[str, Any]:
    content = {name: getattr(group, name) for name in Group.__dataclass_fields__}
    content["prompt_token_ids"] = array(group.prompt_token_ids)
    content["completions"] = [
        {name: getattr(completion, name) for name in Completion.__dataclass_fields__}
        | {"token_ids": array(completion.token_ids), "logprobs": array(completion.logprobs)}
        for completion in group.completions
    ]
    return content


def _raw(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def _pack(content: dict[str, Any]) -> bytes:
    packed = msgpack.packb(content, use_bin_type=True)
    assert isinstance(packed, bytes)
    return packed


def _unpack(body: bytes) -> dict[str, Any]:
    try:
        content = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError) as error:
        reason = _first_line(error)
        raise InvalidInput(f"the body is not msgpack: {reason}", field="body", remedy=f"send {MSGPACK}") from None
    if not isinstance(content, dict):
        _refuse("body", content, "the body is a mapping with the key groups")
    return content


def _first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def _groups(content: dict[str, Any]) -> list[Group]:
    items = content.get("groups")
    if not isinstance(items, list):
        _refuse("groups", items, "groups is a list")
    return [group_from_dict(item, f"groups[{i}]") for i, item in enumerate(items)]


def _array(value: object, dtype: type[_T], where: str) -> NDArray[_T]:
    if isinstance(value, bytes):
        if len(value) % 4:
            _refuse(where, f"{len(value)} bytes", "raw arrays are 4 bytes a number")
        return np.frombuffer(value, np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False)
    if isinstance(value, list) and all(isinstance(x, int | float) and not isinstance(x, bool) for x in value):
        if dtype is np.int32 and not all(isinstance(x, int) and -(2**31) <= x < 2**31 for x in value):
            _refuse(where, value, "token ids are 32-bit integers")
        if dtype is np.float32 and not all(abs(x) <= _FLOAT32_MAX for x in value):
            _refuse(where, value, "finite 32-bit numbers")
        return np.array(value, dtype)
    return _refuse(where, value, "an array is raw bytes (msgpack) or a list of numbers (JSON)")


def _spans(value: object, length: int, where: str) -> list[tuple[int, int, int]]:
    if not isinstance(value, list) or not value:
        _refuse(where, value, "weight_versions is a list of [version, start, end]")
    spans, reached = [], 0
    for item in value:
        if not isinstance(item, list | tuple) or len(item) != 3 or not all(type(x) is int for x in item):
            _refuse(where, item, "a span is [version, start, end]")
        version, start, end = item
        if version < 0 or start != reached or end <= start:
            _refuse(where, item, "spans follow each other from 0 and are not empty")
        spans.append((version, start, end))
        reached = end
    if reached != length:
        _refuse(where, value, f"spans cover all {length} tokens")
    return spans


def _only_known(content: dict[str, Any], known: set[str], where: str) -> None:
    for key in content:
        if key not in known:
            _refuse(f"{where}.{key}", content[key], f"no such field; known: {', '.join(sorted(known))}")


def _text(content: dict[str, Any], key: str, where: str, limit: int = 1_000_000, empty: bool = True) -> str:
    value = content.get(key, "" if empty else None)
    if not isinstance(value, str) or len(value) > limit or not (value or empty):
        _refuse(f"{where}.{key}", value, f"a text of {0 if empty else 1} to {limit} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(f"{where}.{key}", value, "text that can be sent as UTF-8, without lone surrogates")
    return value


def _metadata(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(where, value, "metadata is a mapping")
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        msgpack.packb(value)
    except (ValueError, TypeError, OverflowError, RecursionError):
        _refuse(where, value, "metadata is what both JSON and msgpack can carry")
    return value


def _integer(value: object, where: str) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        _refuse(where, value, "a whole number that is not negative")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        _refuse(where, value, "a finite number")
    return float(value)


def _boolean(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        _refuse(where, value, "true or false")
    return value


def _choice(value: object, choices: tuple[str, ...], where: str) -> Any:
    if value not in choices:
        _refuse(where, value, f"one of {', '.join(choices)}")
    return value


def _refuse(where: str, value: object, remedy: str) -> NoReturn:
    raise InvalidInput(f"{where} cannot be used", field=where, value=value, remedy=remedy)
