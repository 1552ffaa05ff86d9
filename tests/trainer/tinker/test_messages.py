"""Tinker's protobuf messages, against bytes that the SDK 0.38 has written."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidInput, ServiceError, TooLarge
from trainer.tinker.interface import Outputs
from trainer.tinker.messages import (
    SampleAnswer,
    address,
    read_pass,
    write_outputs,
    write_samples,
)
from trainer.tinker.protobuf import MOST_FIELDS, bytes_field, fields, numbers, varint_field

_OF_SDK = bytes.fromhex(
    "0a09733a747261696e3a3010ac021a6a0a0c0a0a0a08010000002c0100000a080a060a040700000012300a0d74617267"
    "65745f746f6b656e73121f0a182c01000000000000070000000000000008000000000000001802220103121e0a077765"
    "696768747312130a0c000000000000803f0000003f18012201031a6e0a0c0a0a0a08010000000200000012390a0d7461"
    "726765745f746f6b656e7312280a20010000000000000002000000000000000300000000000000040000000000000018"
    "022202020212230a077765696768747312180a1000000000000000400000000000000000180122020202220370706f2a"
    "1d0a12636c69705f6c6f775f7468726573686f6c64119a9999999999e93f30013a1f0a12636c69705f6c6f775f746872"
    "6573686f6c641209099a9999999999e93f3a0b0a046d6f64651203120178"
)
"""A forward pass of two data, one with several targets; `forward_backward_request_to_proto`."""


def test_reads_what_the_sdk_writes() -> None:
    assert address(_OF_SDK) == ("s:train:0", 300)
    found = read_pass(_OF_SDK)
    assert (found.loss, found.forward_only) == ("ppo", True)
    assert found.config == {"clip_low_threshold": 0.8, "mode": "x"}
    one, two = found.data
    assert one.tokens == [1, 300, 7]
    assert one.inputs["target_tokens"].tolist() == [300, 7, 8]
    assert one.inputs["target_tokens"].dtype == np.int64
    assert one.inputs["weights"].tolist() == [0.0, 1.0, 0.5]
    assert two.inputs["target_tokens"].tolist() == [[1, 2], [3, 4]]
    assert two.inputs["weights"].tolist() == [[0.0, 2.0], [0.0, 0.0]]


def _tensor(content: bytes, shape: list[int], dtype: int = 1) -> bytes:
    tensor = content + varint_field(3, dtype)
    for size in shape:
        tensor += varint_field(4, size)
    entry = bytes_field(1, b"weights") + bytes_field(2, tensor)
    return bytes_field(3, bytes_field(2, entry))


def test_sparse_tensors_are_dense_for_the_learner() -> None:
    values = np.array([2, 3], "<f4").tobytes()
    ends = np.array([0, 1, 2], "<i8").tobytes()
    columns = np.array([2, 0], "<i8").tobytes()
    sparse = bytes_field(1, values) + bytes_field(2, ends) + bytes_field(3, columns)
    found = read_pass(_tensor(bytes_field(2, sparse), [2, 3]))
    assert found.data[0].inputs["weights"].tolist() == [[0, 0, 2], [3, 0, 0]]


@pytest.mark.parametrize(
    "body",
    [
        _OF_SDK[:-1],
        b"\x80" * 20,
        b"\x0b",
        _tensor(bytes_field(1, b"abc"), [1]),
        _tensor(bytes_field(1, b"abcd"), [2]),
        _tensor(bytes_field(1, b"abcd"), [1], dtype=4),
        _tensor(bytes_field(2, b""), [1 << 20, 1 << 20]),
        bytes_field(3, bytes_field(1, bytes_field(2, b"an image"))),
    ],
)
def test_refuses_what_it_cannot_read(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        read_pass(body)


def test_a_message_has_a_bounded_number_of_fields() -> None:
    with pytest.raises(TooLarge):
        read_pass(bytes_field(3, b"") * (MOST_FIELDS + 1))


def test_outputs_have_every_array_of_every_datum() -> None:
    arrays = [
        {"logprobs": np.array([-1, -2], np.float32)},
        {"logprobs": np.array([-3], np.float32)},
        {"logprobs": np.array([[-4, -5]], np.float32)},
    ]
    message = list(fields(write_outputs(Outputs(arrays, {"loss:sum": 1.5}))))
    records = [dict(fields(value)) for number, value in message if number == 2]  # type: ignore[arg-type]
    assert [record[3] for record in records] == [2, 1]
    tensor = dict(fields(dict(fields(records[0][2]))[2]))  # type: ignore[arg-type]
    assert np.frombuffer(tensor[1], "<f4").tolist() == [-1, -2, -3]  # type: ignore[arg-type]
    assert np.frombuffer(tensor[2], "<i8").tolist() == [0, 8, 12]  # type: ignore[arg-type]
    wide = dict(fields(dict(fields(records[1][2]))[2]))  # type: ignore[arg-type]
    assert numbers(wide[4]) == [2]
    assert [value for number, value in message if number == 3][-1:] != []


def test_samples_say_how_they_ended() -> None:
    content = write_samples([SampleAnswer([5, 6], [-0.5, -1], "length")], [None, -2.0])
    found = dict(fields(content))
    sequence = dict(fields(found[1]))  # type: ignore[arg-type]
    assert sequence[1] == 1
    assert np.frombuffer(sequence[2], "<i4").tolist() == [5, 6]  # type: ignore[arg-type]
    scores = np.frombuffer(found[2], "<f4")  # type: ignore[arg-type]
    assert np.isnan(scores[0])
    assert scores[1] == -2


@given(
    st.lists(st.tuples(st.integers(0, len(_OF_SDK) - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, len(_OF_SDK)),
)
def test_a_damaged_message_is_refused_by_name(changes: list[tuple[int, int]], end: int) -> None:
    body = bytearray(_OF_SDK)
    for place, byte in changes:
        body[place] = byte
    with suppress(ServiceError):
        address(bytes(body[:end]))
        read_pass(bytes(body[:end]))
