"""Tinker's protobuf messages: passes and their outputs, samples.

The numbers of the fields are those of `tinker_public.proto` of the SDK 0.38.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from common.errors import InvalidInput
from trainer.tinker.interface import Array, Datum, Outputs
from trainer.tinker.protobuf import (
    Value,
    as_bytes,
    as_text,
    bytes_field,
    double_field,
    entry,
    fields,
    map_field,
    numbers,
    varint_field,
)

_FLOAT32 = 1
_DTYPES: dict[int, np.dtype[Any]] = {
    _FLOAT32: np.dtype("<f4"),
    2: np.dtype("<i8"),
    3: np.dtype("<i4"),
}
_MOST_NUMBERS = 1 << 26
_STOP_REASONS = {"stop": 0, "length": 1}


@dataclass(frozen=True)
class Pass:
    """A request for `forward` or `forward_backward`."""

    data: list[Datum]
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool


@dataclass(frozen=True)
class SampleAnswer:
    """One sampled sequence."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: str
    """`stop` or `length`."""


def address(body: bytes) -> tuple[str, int]:
    """Returns run and sequence number of a request for a pass, whose data it skips."""
    run: Value = b""
    seq: Value = 0
    for number, value in fields(body):
        if number == 1:
            run = value
        elif number == 2:
            seq = value
    return as_text(run), seq if isinstance(seq, int) else 0


def read_pass(body: bytes) -> Pass:
    """Returns a request for a pass. Raises InvalidInput for one that is malformed or not text."""
    data: list[Datum] = []
    loss = ""
    config: dict[str, float | str] = {}
    newer_config: dict[str, float | str] = {}
    forward_only = False
    for number, value in fields(body):
        if number == 3:
            data.append(_datum(as_bytes(value), len(data)))
        elif number == 4:
            loss = as_text(value)
        elif number == 5:
            key, amount = entry(as_bytes(value))
            config[key] = amount if isinstance(amount, float) else 0.0
        elif number == 6:
            forward_only = bool(value)
        elif number == 7:
            key, message = entry(as_bytes(value))
            newer_config[key] = _config_value(as_bytes(message))
    return Pass(data, loss, newer_config or config, forward_only)


def _config_value(message: bytes) -> float | str:
    found = dict(fields(message))
    if 2 in found:
        return as_text(found[2])
    value = found.get(1, 0.0)
    return value if isinstance(value, float) else 0.0


def _datum(message: bytes, index: int) -> Datum:
    tokens: list[int] = []
    inputs: dict[str, Array] = {}
    for number, value in fields(message):
        if number == 1:
            tokens += _tokens(as_bytes(value), index)
        elif number == 2:
            name, tensor = entry(as_bytes(value))
            inputs[name] = _array(as_bytes(tensor), f"data.{index}.loss_fn_inputs.{name}")
        # Spans, which say where tokens come from, are only for stable_reinforce.
    return Datum(tokens, inputs)


def _tokens(chunk: bytes, index: int) -> list[int]:
    found = dict(fields(chunk))
    if 1 not in found:
        raise InvalidInput(
            "the model reads text only",
            field=f"data.{index}.model_input",
            value="image" if 2 in found else "audio",
            remedy="send chunks of tokens (EncodedTextChunk)",
        )
    text = dict(fields(as_bytes(found[1])))
    ids: list[int] = _numbers(as_bytes(text.get(1, b"")), _DTYPES[3], "model_input").tolist()
    return ids


def _array(message: bytes, field: str) -> Array:
    """Returns a tensor, dense: what a sparse one does not list is 0."""
    shape: list[int] = []
    content: dict[int, Value] = {}
    for number, value in fields(message):
        if number == 4:
            shape += numbers(value)
        else:
            content[number] = value
    dtype = _DTYPES.get(int(content.get(3, 0)))
    if dtype is None:
        raise InvalidInput(
            "a tensor has another type than float32 and int64", field=field, value=content.get(3)
        )
    try:
        if 2 not in content:
            values = _numbers(as_bytes(content.get(1, b"")), dtype, field)
            return values.reshape(shape) if shape else values
        return _densified(dict(fields(as_bytes(content[2]))), shape, dtype, field=field)
    except (ValueError, IndexError, TypeError) as error:
        raise InvalidInput(
            f"a tensor does not have its shape: {error}", field=field, value=shape
        ) from None


def _densified(
    sparse: dict[int, Value], shape: list[int], dtype: np.dtype[Any], *, field: str
) -> Array:
    int64 = _DTYPES[2]
    values = _numbers(as_bytes(sparse.get(1, b"")), dtype, field)
    row_ends = _numbers(as_bytes(sparse.get(2, b"")), int64, field)
    columns = _numbers(as_bytes(sparse.get(3, b"")), int64, field)
    rows, width = shape
    if rows * width > _MOST_NUMBERS:
        raise InvalidInput(
            f"a sparse tensor stands for more than {_MOST_NUMBERS:,} numbers",
            field=field,
            value=shape,
            remedy="send fewer targets for a token, or shorter sequences",
        )
    dense = np.zeros((rows, width), dtype)
    dense[np.repeat(np.arange(rows), np.diff(row_ends)), columns] = values
    return dense


def _numbers(content: bytes, dtype: np.dtype[Any], field: str) -> Array:
    if len(content) % dtype.itemsize:
        raise InvalidInput(
            f"{len(content)} bytes are not a whole number of {dtype.name}", field=field
        )
    return np.frombuffer(content, dtype)


def write_outputs(outputs: Outputs) -> bytes:
    """Returns Tinker's `ForwardBackwardOutput`."""
    parts = [bytes_field(1, b"ArrayRecord")]
    for _, group in groupby(outputs.arrays, key=_trailing):
        parts.append(bytes_field(2, _record(list(group))))
    for name, amount in outputs.metrics.items():
        parts.append(map_field(3, name, double_field(2, amount)))
    return b"".join(parts)


def _trailing(arrays: Mapping[str, Array]) -> list[tuple[str, tuple[int, ...]]]:
    """Returns what the arrays of one record have in common: all but the number of tokens."""
    return [(name, array.shape[1:]) for name, array in sorted(arrays.items())]


def _record(data: list[dict[str, Array]]) -> bytes:
    parts = [bytes_field(1, b"ArrayRecord")]
    for name in sorted(data[0]):
        arrays = [np.ascontiguousarray(each[name], "<f4") for each in data]
        ends = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
        tensor = [
            bytes_field(1, b"".join(array.tobytes() for array in arrays)),
            bytes_field(2, ends.tobytes()),
            varint_field(3, _FLOAT32),
        ]
        tensor += [varint_field(4, size) for size in arrays[0].shape[1:]]
        parts.append(map_field(2, name, bytes_field(2, b"".join(tensor))))
    parts.append(varint_field(3, len(data)))
    return b"".join(parts)


def write_samples(
    samples: Sequence[SampleAnswer], prompt_logprobs: Sequence[float | None] | None
) -> bytes:
    """Returns Tinker's `SampleResponse`."""
    parts = []
    for sample in samples:
        sequence = [
            varint_field(1, _STOP_REASONS[sample.stop_reason]),
            bytes_field(2, np.asarray(sample.tokens, "<i4").tobytes()),
            bytes_field(3, np.asarray(sample.logprobs, "<f4").tobytes()),
        ]
        parts.append(bytes_field(1, b"".join(sequence)))
    if prompt_logprobs is not None:
        scores = np.array([np.nan if x is None else x for x in prompt_logprobs], "<f4")
        parts.append(bytes_field(2, scores.tobytes()))
    return b"".join(parts)
