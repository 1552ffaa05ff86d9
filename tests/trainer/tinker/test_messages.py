"""Tinker's protobuf messages, against bytes that the SDK 0.38 has written."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidInput, ServiceError, TooLarge
from trainer.tinker.interface import Outputs
from trainer.tinker.messages import (
    MESSAGES,
    read_pass,
    write_outputs,
    write_samples,
)
from trainer.tinker.protobuf import MOST_FIELDS

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
    data, loss, config = read_pass(_OF_SDK)
    place = MESSAGES.decode("Place", _OF_SDK)
    assert place == {"run": "s:train:0", "seq": 300, "forward_only": 1}
    assert loss == "ppo"
    assert config == {"clip_low_threshold": 0.8, "mode": "x"}
    one, two = data
    assert one.tokens == [1, 300, 7]
    assert one.inputs["target_tokens"].tolist() == [300, 7, 8]
    assert one.inputs["target_tokens"].dtype == np.int64
    assert one.inputs["weights"].tolist() == [0.0, 1.0, 0.5]
    assert two.inputs["target_tokens"].tolist() == [[1, 2], [3, 4]]
    assert two.inputs["weights"].tolist() == [[0.0, 2.0], [0.0, 0.0]]


def _tensor(shape: list[int], dtype: int = 1, **content: Any) -> bytes:
    tensor = {**content, "dtype": dtype, "shape": shape}
    return MESSAGES.encode("Pass", {"data": [{"inputs": [{"key": "weights", "value": tensor}]}]})


def test_sparse_tensors_are_dense_for_the_learner() -> None:
    values = np.array([2, 3], "<f4").tobytes()
    ends = np.array([0, 1, 2], "<i8").tobytes()
    columns = np.array([2, 0], "<i8").tobytes()
    sparse = {"values": values, "row_ends": ends, "columns": columns}
    (datum,), _, _ = read_pass(_tensor([2, 3], sparse=sparse))
    assert datum.inputs["weights"].tolist() == [[0, 0, 2], [3, 0, 0]]


@pytest.mark.parametrize(
    "body",
    [
        _OF_SDK[:-1],
        b"\x80" * 20,
        b"\x0b",
        _tensor([1], dense=b"abc"),
        _tensor([2], dense=b"abcd"),
        _tensor([1], dtype=4, dense=b"abcd"),
        _tensor([1 << 20, 1 << 20], sparse={}),
        _tensor([1 << 40, 0], sparse={}),
        _tensor([1 << 69], dense=b"abcd"),
        MESSAGES.encode("Pass", {"data": [{"model_input": [{"image": b"an image"}]}]}),
        MESSAGES.encode("Top", {"k": 5}) + b"\x08\x05",
        MESSAGES.encode("Text", {"tokens": b"\xff"}),
    ],
)
def test_refuses_what_it_cannot_read(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        read_pass(body)


def test_a_message_has_a_bounded_number_of_fields() -> None:
    with pytest.raises(TooLarge):
        read_pass(b"\x1a\x00" * (MOST_FIELDS + 1))


def test_outputs_have_every_array_of_every_datum() -> None:
    arrays = [
        np.array([-1, -2], np.float32),
        np.array([-3], np.float32),
        np.array([[-4, -5]], np.float32),
    ]
    found = MESSAGES.decode("Outputs", write_outputs(Outputs(arrays, {"loss:sum": 1.5})))
    assert found["metrics"] == [{"key": "loss:sum", "value": 1.5}]
    narrow, wide = found["records"]
    assert (narrow["count"], wide["count"]) == (2, 1)
    ((entry,), (of_wide,)) = (narrow["arrays"], wide["arrays"])
    assert entry["key"] == "logprobs"
    array = entry["value"]
    assert np.frombuffer(array["data"], "<f4").tolist() == [-1, -2, -3]
    assert np.frombuffer(array["ends"], "<i8").tolist() == [0, 8, 12]
    assert of_wide["value"]["trailing_shape"] == [2]


def test_samples_say_how_they_ended() -> None:
    top = [[(-0.5, 5), (-1.0, 8)], [(-1.0, 6), (-2.0, 9)]]
    sample = {"reason": "length", "tokens": [5, 6], "logprobs": [-0.5, -1], "top": top}
    found = MESSAGES.decode("Samples", write_samples([sample], [None, -2.0], [None, [(-2.0, 3)]]))
    (sequence,) = found["sequences"]
    assert sequence["reason"] == 1
    assert np.frombuffer(sequence["tokens"], "<i4").tolist() == [5, 6]
    assert np.frombuffer(sequence["top"]["tokens"], "<i4").tolist() == [5, 8, 6, 9]
    assert (sequence["top"]["k"], sequence["top"]["length"]) == (2, 2)
    scores = np.frombuffer(found["prompt_logprobs"], "<f4")
    assert np.isnan(scores[0])
    assert scores[1] == -2
    # The SDK takes the token 0 with this log-probability for a place without any.
    assert np.frombuffer(found["top_of_prompt"]["tokens"], "<i4").tolist() == [0, 3]
    assert np.frombuffer(found["top_of_prompt"]["logprobs"], "<f4").tolist() == [-99999, -2]


@given(
    st.lists(st.tuples(st.integers(0, len(_OF_SDK) - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, len(_OF_SDK)),
)
def test_a_damaged_message_is_refused_by_name(changes: list[tuple[int, int]], end: int) -> None:
    body = bytearray(_OF_SDK)
    for place, byte in changes:
        body[place] = byte
    with suppress(ServiceError):
        read_pass(bytes(body[:end]))
