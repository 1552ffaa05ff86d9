"""Encodes the msgspec structs of `common.wire.schemas` as bytes: msgpack for programs, JSON for
users.

An array is raw little-endian bytes in msgpack, 4 per number (`UInt8`: 1), and a list of numbers in
JSON. Every field of a body is validated, and an error names its path, e.g.
`groups[3].completions[0].logprobs` (docs/adr/0010-msgspec.md).
"""

import gc
import json
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, TypeVar, get_args

import msgpack
import msgspec
import numpy as np
import orjson
from msgspec import Meta, ValidationError
from numpy.typing import NDArray

from common import Json
from common.errors import InvalidInput, TooLarge
from common.wire.schemas import (
    FLOAT32_MAX,
    MAX_LISTED,
    Completion,
    Float32,
    Group,
    Groups,
    Int32,
    SampledGroups,
    TakenGroups,
)

MSGPACK = "application/msgpack"
MAX_JSON_BYTES = 128 << 20
"""Limit of a JSON body. Decoding holds the interpreter and so blocks every other request: 128 MiB
of text take 0.15 s."""
MAX_JSON_ITEMS = 2_000_000
"""Limit on the items of a JSON body. A list or mapping counts twice, as it takes up to 232 bytes of
memory."""
_CHUNK = 256 << 10
_BACKSLASHES = re.compile(rb"\\*.?", re.DOTALL)
MAX_ITEMS = 4_000_000
"""Limit on the items of all lists and mappings of a msgpack body. An empty mapping takes one byte
there but 64 in Python, so a body of the permitted size could otherwise fill the memory. Real bodies
have few items, since arrays are raw bytes."""
_ARRAYS: dict[Any, tuple[np.dtype[Any], Any]] = {
    np.int32: (np.dtype("<i4"), list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]),
    np.float32: (np.dtype("<f4"), list[Annotated[float, Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]]),
    np.uint8: (np.dtype("u1"), list[Annotated[int, Meta(ge=0, le=255)]]),
}
"""For each number type of the arrays in `common.wire.schemas`: its msgpack dtype and its JSON type.
Integers are token ids."""
_T = TypeVar("_T")


def encode(content: object) -> bytes:
    """Encodes a struct, or mappings, lists and arrays, as msgpack."""
    return _ENCODER.encode(content)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Decodes a msgpack body to a struct. Raises InvalidInput that names the first invalid
    field.
    """
    return from_plain(unpack(body), kind)


def decode_json(body: bytes, kind: type[_T]) -> _T:
    """Decodes a JSON body to a struct. Raises InvalidInput that names the first invalid field, or
    TooLarge.
    """
    return from_plain(parse_json(body), kind)


def encode_groups(groups: list[Group], **extra: object) -> bytes:
    """Encodes `{"groups": […], **extra}` as msgpack."""
    return encode({"groups": groups, **extra})


def decode_groups(body: bytes) -> list[Group]:
    """Decodes the body of `POST /groups`. Raises InvalidInput."""
    return decode(body, Groups).groups


def plain(value: msgspec.Struct | Json) -> Json:
    """Converts a struct, or its fields, to mappings, lists and numbers, for JSON."""
    found: Json = msgspec.to_builtins(
        value, builtin_types=(bytes,), enc_hook=lambda array: array.tolist()
    )
    return found


def unpack(body: bytes) -> Any:
    """Decodes a msgpack body of limited size without validation. Raises InvalidInput."""
    left = MAX_ITEMS

    def count(items: Any) -> Any:
        nonlocal left
        # One for the container too: empty ones take a byte on the wire and 64 in memory.
        left = left - 1 - len(items)
        if left < 0:
            raise ValueError(f"it has more than {MAX_ITEMS} items")
        return items

    # A longer list or mapping is refused by its header, before its items are built.
    limits = {"max_array_len": MAX_LISTED, "max_map_len": MAX_LISTED, "max_ext_len": 0}
    try:
        return msgpack.unpackb(
            body, raw=False, strict_map_key=True, list_hook=count, object_hook=count, **limits
        )
    except (ValueError, TypeError, RecursionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise InvalidInput(
            f"the body is not msgpack: {reason}", field="body", remedy=f"send {MSGPACK}"
        ) from None


def parse_json(body: bytes) -> Any:
    """Decodes a JSON body without validation.

    Raises InvalidInput, or TooLarge because decoding holds the interpreter.
    """
    remedy = f"send smaller batches, or {MSGPACK} where the call takes it"
    if len(body) > MAX_JSON_BYTES:
        raise TooLarge(
            f"a JSON body has at most {MAX_JSON_BYTES} bytes",
            field="body",
            value=len(body),
            remedy=remedy,
        )
    # No byte counts for more than two items, so that short bodies need no counting.
    if 2 * len(body) > MAX_JSON_ITEMS and _json_items(body) > MAX_JSON_ITEMS:
        raise TooLarge(
            f"the body has more than {MAX_JSON_ITEMS} items",
            field="body",
            value=len(body),
            remedy=remedy,
        )
    try:
        with without_collection():
            return orjson.loads(body)  # refuses NaN, infinity and text that is not UTF-8
    except orjson.JSONDecodeError as error:
        raise InvalidInput(
            f"the body is not JSON: {error}",
            field="body",
            remedy="send JSON in UTF-8, which has neither NaN nor Infinity",
        ) from None


@contextmanager
def without_collection() -> Iterator[None]:
    """Pauses the garbage collector: while a million lists are created, it would scan the whole heap
    again and again, which took ten times as long as the parsing (`python -m benchmarks.collector`).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _json_items(body: bytes) -> int:
    """Counts items outside strings, with lists and mappings counted twice; stops soon after the
    limit.

    Works in chunks, between which other threads can run.
    """
    found = 0
    begin = 0
    in_text = False
    while begin < len(body) and found <= MAX_JSON_ITEMS:
        end = min(begin + _CHUNK, len(body))
        if body[end - 1] == ord("\\"):  # a chunk must not split an escape
            match = _BACKSLASHES.match(body, end)
            end = match.end() if match else end
        parts = body[begin:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        # Cut at its quotes, every other part of the text is outside strings.
        for part in parts[in_text::2]:
            found += part.count(b",") + 2 * (part.count(b"{") + part.count(b"["))
        # An odd number of quotes ends the chunk within a string, or leaves one.
        in_text ^= len(parts) % 2 == 0
        begin = end
    return found


def from_plain(content: Any, kind: type[_T], where: str = "") -> _T:
    """Builds a struct from mappings and lists; arrays are raw bytes or lists of numbers.

    Raises InvalidInput that names the field, prefixed with `where`.
    """
    try:
        value = msgspec.convert(content, kind, dec_hook=_array)
        for path, reason in _problems(value):
            raise ValidationError(f"{reason} - at `${path}`")
    except ValidationError as error:
        raise _invalid(str(error), content, where) from None
    return value


def _raw(value: object) -> object:
    """Encodes types that msgpack does not know: arrays and numpy scalars."""
    if isinstance(value, np.ndarray):
        if not value.size:  # most of the arrays of a completion
            return b""
        if value.dtype == np.uint8:
            return value.tobytes()
        return np.ascontiguousarray(value, "<i4" if value.dtype.kind in "iu" else "<f4").tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be sent")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_raw)


@cache
def _array_of(kind: Any) -> tuple[np.dtype[Any], Any, NDArray[Any]]:
    """Returns the type of the numbers of an array, that of their list in JSON, and an array of
    none.
    """
    (number,) = get_args(get_args(kind)[-1])  # of ndarray[shape, dtype[number]]
    dtype, numbers = _ARRAYS[number]
    none = np.zeros(0, dtype)
    none.flags.writeable = False
    return dtype, numbers, none


def _array(kind: Any, value: object) -> Any:
    """Decodes an array (read-only if it came as bytes). Raises ValueError, to which msgspec adds
    the path.
    """
    dtype, numbers, none = _array_of(kind)
    if value == b"":  # most of the arrays of a completion
        return none
    if not isinstance(value, bytes):
        try:
            return np.array(msgspec.convert(value, numbers), dtype)
        except ValidationError as error:
            raise ValueError(error) from None  # msgspec adds no path to its own errors
    if len(value) % dtype.itemsize:
        raise ValueError(f"raw arrays have {dtype.itemsize} bytes a number, got {len(value)} bytes")
    array = np.frombuffer(value, dtype)
    # The limits that JSON's types state above; bytes have no types, so they are checked here.
    if dtype.kind == "f":
        if not np.isfinite(array).all():
            raise ValueError("numbers have to be finite, got NaN or infinity")
    elif len(array) and array.min() < 0:
        raise ValueError(f"token ids are not negative, got {array.min()}")
    return array


_Problems = Iterator[tuple[str, str]]
"""The path of an invalid field, and what is wrong with it."""


def _problems(value: object) -> _Problems:
    """Yields violations of constraints that the field types do not express."""
    match value:
        case Group():
            yield from _of_group(value)
        case Groups() | TakenGroups() | SampledGroups():
            for i, group in enumerate(value.groups):
                for path, reason in _of_group(group):
                    yield f".groups[{i}]{path}", reason
            if isinstance(value, SampledGroups):
                groups = len(value.groups)
                yield from _of_length(groups, "groups need as many weights", weights=value.weights)


def _of_length(length: int, reason: str, **arrays: Float32 | Int32 | None) -> _Problems:
    """Yields the arrays that have another length."""
    for name, array in arrays.items():
        if array is not None and len(array) != length:
            yield f".{name}", f"{length} {reason}, got {len(array)}"


def _of_group(group: Group) -> _Problems:
    for i, completion in enumerate(group.completions):
        for path, reason in _of_completion(completion):
            yield f".completions[{i}]{path}", reason
    yield from _of_routed_experts(group)

    episodes = {completion.episode for completion in group.completions}
    if episodes != {None} and episodes != set(range(len(episodes))):
        yield (
            ".completions",
            "completions have the numbers of their episodes, from 0 without a gap, or none has one",
        )
    if group.metadata:
        try:
            json.dumps(group.metadata, allow_nan=False, ensure_ascii=False).encode()
            # Whole numbers beyond 64 bits are JSON, but no msgpack.
            encode(group.metadata)
        except (ValueError, TypeError, OverflowError, RecursionError):
            yield (
                ".metadata",
                "metadata has to be texts, finite numbers, lists and mappings, which JSON and "
                "msgpack can carry",
            )


def _of_completion(completion: Completion) -> _Problems:
    length = len(completion.token_ids)
    if not length:
        yield ".token_ids", "a completion has at least one token, its end of sequence"
    yield from _of_length(
        length,
        "tokens need as many logprobs",
        logprobs=completion.logprobs,
        teacher_logprobs=completion.teacher_logprobs,
    )
    yield from _of_kept_tokens(completion)

    # Each span begins where the one before it ends: [[3, 0, 5], [4, 5, 9]] covers 9 tokens.
    reached = 0
    for _, start, end in completion.weight_versions:
        if start != reached or end <= start:
            break
        reached = end
    if reached != length:
        yield (
            ".weight_versions",
            f"spans [version, start, end] follow one another from 0 to {length}, the number of "
            "tokens",
        )

    mask = completion.mask
    yield from _of_length(length, "tokens need as many marks", mask=mask)
    if mask is not None and mask.max() != 1:
        yield ".mask", "a mask has a 1 for every token to train, at least one, else 0"
    if completion.prompt_ids is not None and not len(completion.prompt_ids):
        yield ".prompt_ids", "a prompt has at least one token"
    for number, turn in enumerate(completion.turns):
        if not turn.start < turn.end <= length:
            yield f".turns[{number}]", f"a turn is a range of the {length} tokens"


def _of_kept_tokens(completion: Completion) -> _Problems:
    """Checks the tokens that truncated sampling kept: every sampled token must be among those kept
    for it.
    """
    counts = completion.kept_counts
    kept = completion.kept_tokens
    # Nothing was truncated: all tokens of the vocabulary were kept, and none is listed.
    if not len(counts):
        if len(kept):
            yield ".kept_counts", "kept_tokens need their counts"
        return

    length = len(completion.token_ids)
    yield from _of_length(length, "tokens need as many counts", kept_counts=counts)
    if counts.min() < 0 or counts.sum(dtype=np.int64) != len(kept):
        yield ".kept_counts", "their sum is the length of kept_tokens"

    # With counts [2, 0, 3], `kept` has the tokens of the first, then those of the third: the token
    # itself, repeated as often, is compared with them, and each stretch needs one hit.
    hits = np.repeat(completion.token_ids, counts) == kept
    first = np.cumsum(counts) - counts
    if len(hits) and not np.logical_or.reduceat(hits, first[counts > 0]).all():
        yield ".kept_tokens", "every token is among those it was sampled from"


def _of_routed_experts(group: Group) -> _Problems:
    """Checks that the experts of prompt and completions have as many bytes for every token."""
    prompt = group.prompt_routed_experts
    size, rest = divmod(len(prompt), max(1, len(group.prompt_token_ids)))
    if rest:
        yield ".prompt_routed_experts", "every token of the prompt has as many bytes"
    for i, completion in enumerate(group.completions):
        # The last token is sampled and never computed.
        computed = len(completion.token_ids) - 1
        if len(completion.routed_experts) != computed * size:
            yield (
                f".completions[{i}].routed_experts",
                f"{computed} tokens need {size} bytes each, as a token of the prompt has, got "
                f"{len(completion.routed_experts)} bytes",
            )


def _invalid(error: str, content: Any, where: str) -> InvalidInput:
    """Splits msgspec's error into reason and path, and adds the value at that path."""
    reason = error.split(" - at `", 1)[0]
    # msgspec names the innermost path first where one of our own errors is inside another.
    path = "".join(reversed(re.findall(r" - at `(?:key` in `)?\$([^`]*)`", error)))
    if field := re.search("field `(.*)`", reason):  # missing or unknown
        path += f".{field[1]}"
    value = content
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        try:
            # A field that is missing has a path, but no value.
            value = value[name or int(index)]
        except (KeyError, IndexError, TypeError):
            value = None
            break
    shown = value if value is None or isinstance(value, str) else reprlib.repr(value)
    full = f"{where}{path}".removeprefix(".") or "body"
    return InvalidInput(
        f"{full}: {reason}",
        field=full,
        value=shown,
        remedy="/docs of the service describes the fields",
    )
