"""Tinker's protobuf messages: passes and their outputs, samples.

The numbers of the fields are those of `tinker_public.proto` of the SDK 0.38.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from common.errors import InvalidInput
from trainer.tinker.interface import Array, Datum, Outputs
from trainer.tinker.protobuf import Messages

_FLOAT32 = 1
_DTYPES: dict[int, np.dtype[Any]] = {
    _FLOAT32: np.dtype("<f4"),
    2: np.dtype("<i8"),
    3: np.dtype("<i4"),
}
_INT64 = _DTYPES[2]
_INT32 = _DTYPES[3]
_MOST_NUMBERS = 1 << 26
_STOP_REASONS = {"stop": 0, "length": 1}
_NO_LOGPROB = -99999.0
"""What stands where nothing is known of the likeliest tokens."""

# A setting has at most one text, which may be empty. Spans of data, which say where tokens come
# from, are only for the original of stable_reinforce.
MESSAGES = Messages("""
Sparse: 1 values bytes, 2 row_ends bytes, 3 columns bytes
Tensor: 1 dense bytes, 2 sparse Sparse, 3 dtype int, 4 shape int*
Text: 1 tokens bytes
Chunk: 1 text Text, 2 image bytes, 3 audio bytes
Input: 1 key str, 2 value Tensor
Datum: 1 model_input Chunk*, 2 inputs Input*
Number: 1 key str, 2 value float
Setting: 1 number float, 2 texts str*
NewerNumber: 1 key str, 2 value Setting
Pass: 1 run str, 2 seq int, 3 data Datum*, 4 loss str, 5 config Number*, 6 forward_only int, \
7 newer_config NewerNumber*
Place: 1 run str, 2 seq int, 6 forward_only int
Arrays: 1 data bytes, 2 ends bytes, 3 dtype int, 4 trailing_shape int*
NamedArrays: 1 key str, 2 value Arrays
Record: 1 kind str, 2 arrays NamedArrays*, 3 count int
Outputs: 1 kind str, 2 records Record*, 3 metrics Number*
Top: 1 tokens bytes, 2 logprobs bytes, 3 k int, 4 length int
Sequence: 1 reason int, 2 tokens bytes, 3 logprobs bytes, 4 top Top
Samples: 1 sequences Sequence*, 2 prompt_logprobs bytes, 3 top_of_prompt Top, 5 targets Tensor
""")


Top = Sequence[Sequence[Sequence[Any]] | None]
"""Log-probability and token of the likeliest at each place; None where nothing is known."""


def read_pass(body: bytes) -> tuple[list[Datum], str, dict[str, float | str]]:
    """Returns the data of a pass, the name of its loss and the loss's settings. Raises InvalidInput
    for a request that is malformed or not text.
    """
    found = MESSAGES.decode("Pass", body)
    data = [_datum(each, f"data.{index}") for index, each in enumerate(found["data"])]
    config = {entry["key"]: entry["value"] for entry in found["config"]}
    for entry in found["newer_config"]:
        setting = entry["value"] or {"texts": [""]}
        config[entry["key"]] = setting["texts"][-1] if setting["texts"] else setting["number"]
    return data, found["loss"], config


def _datum(message: dict[str, Any], field: str) -> Datum:
    tokens: list[int] = []
    for chunk in message["model_input"]:
        if chunk["text"] is None:
            raise InvalidInput(
                "the model reads text only",
                field=f"{field}.model_input",
                value="image" if chunk["image"] else "audio",
                remedy="send chunks of tokens (EncodedTextChunk)",
            )
        tokens += _array(chunk["text"]["tokens"], _INT32, f"{field}.model_input").tolist()
    inputs: dict[str, Array] = {}
    for entry in message["inputs"]:
        name = entry["key"]
        inputs[name] = _dense(entry["value"] or {}, f"{field}.loss_fn_inputs.{name}")
    return Datum(tokens, inputs)


def _dense(message: dict[str, Any], field: str) -> Array:
    """Returns a tensor, dense: what a sparse one does not list is 0."""
    dtype = _DTYPES.get(message.get("dtype", 0))
    if dtype is None:
        raise InvalidInput(
            "a tensor has another type than float32 and int64",
            field=field,
            value=message.get("dtype"),
        )
    shape = message["shape"]
    sparse = message["sparse"]
    try:
        if sparse is None:
            values = _array(message["dense"], dtype, field)
            return values.reshape(shape) if shape else values

        rows, width = shape
        if max(rows, rows * width) > _MOST_NUMBERS:
            raise InvalidInput(
                f"a sparse tensor stands for more than {_MOST_NUMBERS:,} numbers",
                field=field,
                value=shape,
                remedy="send fewer targets for a token, or shorter sequences",
            )
        dense = np.zeros((rows, width), dtype)
        row_ends = _array(sparse["row_ends"], _INT64, field)
        columns = _array(sparse["columns"], _INT64, field)
        places = (np.repeat(np.arange(rows), np.diff(row_ends)), columns)
        dense[places] = _array(sparse["values"], dtype, field)
        return dense
    except (ValueError, IndexError, TypeError, OverflowError) as error:
        raise InvalidInput(
            f"a tensor does not have its shape: {error}", field=field, value=shape
        ) from None


def _array(content: bytes, dtype: np.dtype[Any], field: str) -> Array:
    if len(content) % dtype.itemsize:
        raise InvalidInput(
            f"{len(content)} bytes are not a whole number of {dtype.name}", field=field
        )
    return np.frombuffer(content, dtype)


def write_outputs(outputs: Outputs) -> bytes:
    """Returns Tinker's `ForwardBackwardOutput`."""
    kind = "ArrayRecord"
    records = []
    # The arrays of a record have all but the number of tokens in common.
    for shape, group in groupby(outputs.logprobs, key=lambda array: array.shape[1:]):
        parts = [np.ascontiguousarray(array, "<f4").tobytes() for array in group]
        joined = {
            "data": b"".join(parts),
            "ends": np.cumsum([0, *map(len, parts)], dtype="<i8").tobytes(),
            "dtype": _FLOAT32,
            "trailing_shape": shape,
        }
        arrays = [{"key": "logprobs", "value": joined}]
        records.append({"kind": kind, "arrays": arrays, "count": len(parts)})
    metrics = [{"key": name, "value": value} for name, value in outputs.metrics.items()]
    return MESSAGES.encode("Outputs", {"kind": kind, "records": records, "metrics": metrics})


def write_samples(
    samples: Sequence[Mapping[str, Any]],
    prompt_logprobs: Sequence[float | None] | None = None,
    top_of_prompt: Top | None = None,
    targets: Mapping[str, Any] | None = None,
) -> bytes:
    """Returns Tinker's `SampleResponse`.

    Args:
        samples: `tokens` and `logprobs` [L], `reason` (`stop` or `length`), and perhaps
            `top`.
        prompt_logprobs: [T], None for tokens without one.
        top_of_prompt: [T].
        targets: a `Tensor`.
    """
    sequences = [
        {
            "reason": _STOP_REASONS[sample["reason"]],
            "tokens": np.asarray(sample["tokens"], "<i4").tobytes(),
            "logprobs": np.asarray(sample["logprobs"], "<f4").tobytes(),
            "top": _top(sample.get("top")),
        }
        for sample in samples
    ]
    scores = None
    if prompt_logprobs is not None:
        scores = np.array(prompt_logprobs, "<f4").tobytes()  # None becomes NaN
    answer = {
        "sequences": sequences,
        "prompt_logprobs": scores,
        "top_of_prompt": _top(top_of_prompt),
        "targets": targets,
    }
    return MESSAGES.encode("Samples", answer)


def _top(top: Top | None) -> dict[str, Any] | None:
    if top is None:
        return None
    k = max((len(place) for place in top if place), default=0)
    empty = [(_NO_LOGPROB, 0)] * k
    pairs = [pair for place in top for pair in place or empty]
    return {
        "tokens": np.array([token for _, token, *_ in pairs], "<i4").tobytes(),
        "logprobs": np.array([logprob for logprob, *_ in pairs], "<f4").tobytes(),
        "k": k,
        "length": len(top),
    }
