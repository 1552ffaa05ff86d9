"""Groups as bytes: every group survives the round trip, and any other input is refused by name."""

import copy
import itertools
import json
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidInput
from common.wire.codec import (
    decode,
    decode_groups,
    decode_json,
    encode,
    encode_groups,
    from_plain,
    parse_json,
    plain,
)
from common.wire.schemas import FLOAT32_MAX, Completion, Group, Groups, SampledGroups, TakenGroups
from tests.support.errors import raises

ANSWERS: list[Any] = [Groups, TakenGroups, SampledGroups]

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
text = st.text(st.characters(codec="utf-8"), max_size=20)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    logprobs = draw(st.lists(finite, min_size=1, max_size=8))
    length = len(logprobs)
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=2))) if length > 1 else []
    edges = [0, *cuts, length]
    return Completion(
        token_ids=np.array(
            draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length)), np.int32
        ),
        logprobs=np.array(logprobs, np.float32),
        text=draw(text),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        weight_versions=[(draw(st.integers(0, 1000)), a, b) for a, b in itertools.pairwise(edges)],
        reward=draw(st.floats(-FLOAT32_MAX, FLOAT32_MAX)),
        correct=draw(st.booleans()),
        status=draw(
            st.sampled_from(["ok", "unparsable", "unevaluated", "timeout", "died", "error"])
        ),
        extracted_answer=draw(st.none() | text),
        components=draw(
            st.dictionaries(
                text, st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=2
            )
        ),
    )


groups = st.builds(
    Group,
    id=text.filter(bool),
    prompt_id=text,
    prompt=text,
    ground_truth=text,
    prompt_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=6).map(
        lambda ids: np.array(ids, np.int32)
    ),
    completions=st.lists(completions(), min_size=1, max_size=3),
    epoch=st.integers(0, 2**53 - 1),
    position=st.integers(0, 2**53 - 1),
    created_at=st.floats(0, 1e12),
    metadata=st.dictionaries(
        text, st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text, max_size=3
    ),
)


def one() -> Group:
    first = Completion(
        token_ids=np.array([5, 6], np.int32),
        logprobs=np.array([-0.5, -1.5], np.float32),
        text="ab",
        finish_reason="stop",
        weight_versions=[(3, 0, 1), (4, 1, 2)],
    )
    second = Completion(
        token_ids=np.array([7], np.int32),
        logprobs=np.array([-2.0], np.float32),
        text="c",
        finish_reason="length",
        weight_versions=[(4, 0, 1)],
        reward=1.0,
    )
    return Group(
        id="g",
        prompt_id="p",
        prompt="prompt",
        ground_truth="12",
        prompt_token_ids=np.array([1, 2, 3], np.int32),
        completions=[first, second],
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(groups, max_size=3))
def test_groups_survive_msgpack_and_json(items: list[Group]) -> None:
    contents = [plain(group) for group in items]
    decoded = decode_groups(encode_groups(items))
    assert [plain(group) for group in decoded] == contents
    assert [
        plain(decode_json(json.dumps(content).encode(), Group)) for content in contents
    ] == contents
    for before, after in zip(items, decoded, strict=True):
        for a, b in zip(before.completions, after.completions, strict=True):
            assert (b.token_ids.dtype.name, b.logprobs.dtype.name) == ("int32", "float32")
            np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_answers_survive_the_round_trip() -> None:
    taken = decode(encode(TakenGroups([one(), one()], evicted=3)), TakenGroups)
    assert (len(taken.groups), taken.evicted) == (2, 3)
    sampled = decode(encode(SampledGroups([one()], np.array([0.25], np.float32))), SampledGroups)
    assert sampled.weights.tolist() == [0.25]
    assert sampled.groups[0].weight_version == 3
    assert sampled.groups[0].rewards.tolist() == [0.0, 1.0]


def test_arrays_are_little_endian_and_four_bytes_a_number() -> None:
    content = msgpack.unpackb(encode_groups([one()]))["groups"][0]
    assert content["prompt_token_ids"] == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])
    assert content["completions"][1]["logprobs"] == b"\x00\x00\x00\xc0"


BAD_FIELDS: list[tuple[str, object]] = [
    ("id", ""),
    ("id", None),
    ("id", "x" * 129),
    ("prompt", 5),
    ("prompt", "x" * 1_000_001),
    ("ground_truth", ["12"]),
    ("prompt_token_ids", "text"),
    ("prompt_token_ids", [2**31]),
    ("prompt_token_ids", [1.5]),
    ("prompt_token_ids", b"\x00\x00\x00"),
    ("completions", []),
    ("completions", [{}] * 1025),
    ("completions", "none"),
    ("epoch", -1),
    ("epoch", True),
    ("position", 2**53),
    ("position", 1.0),
    ("created_at", float("nan")),
    ("created_at", 10**400),
    ("metadata", []),
    ("metadata", {"a": float("nan")}),
    ("metadata", {"a": b"bytes"}),
    ("metadata", {"a": 2**70}),
    ("metadata", {"a": "\ud800"}),
    ("completions[1].correct", float("nan")),
    ("surprise", 1),
    ("completions[0]", 5),
    ("completions[1].token_ids", []),
    ("completions[1].token_ids", [-1]),
    ("completions[1].token_ids", [True]),
    ("completions[1].logprobs", [-1.0, -1.0]),
    ("completions[1].logprobs", [float("nan")]),
    ("completions[1].logprobs", [float("-inf")]),
    ("completions[1].logprobs", [1e300]),
    ("completions[1].logprobs", [10**400]),
    ("completions[1].logprobs", None),
    ("completions[1].text", b"bytes"),
    ("completions[1].finish_reason", "eos"),
    ("completions[1].components", [1.0]),
    ("completions[1].components", {"math": "1"}),
    ("completions[1].components", {"math": float("nan")}),
    ("completions[1].finish_reason", None),
    ("completions[1].weight_versions", []),
    ("completions[1].weight_versions", [[4, 0]]),
    ("completions[1].weight_versions", [[4, 1, 2]]),
    ("completions[1].weight_versions", [[4, 0, 0]]),
    ("completions[1].weight_versions", [[4, 0, 2]]),
    ("completions[1].weight_versions", [[-1, 0, 1]]),
    ("completions[1].weight_versions", [[True, 0, 1]]),
    ("completions[1].reward", float("inf")),
    ("completions[1].reward", "1"),
    ("completions[1].reward", True),
    ("completions[1].reward", 10**400),
    ("completions[1].correct", "yes"),
    ("completions[1].status", "fine"),
    ("completions[1].extracted_answer", 12),
    ("completions[1].surprise", 1),
]


def changed(path: str, value: object) -> dict[str, Any]:
    content = copy.deepcopy(plain(one()))
    target: Any = content
    *parents, last = path.replace("[", ".").replace("]", "").split(".")
    for key in parents:
        target = target[int(key) if key.isdecimal() else key]
    target[int(last) if last.isdecimal() else last] = value
    return content


@pytest.mark.parametrize(("path", "value"), BAD_FIELDS, ids=lambda item: repr(item)[:40])
def test_a_bad_field_is_named(path: str, value: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_plain(changed(path, value), Group, "groups[2]")
    assert str(caught.value.field).startswith(f"groups[2].{path}")
    assert caught.value.remedy
    assert len(str(caught.value.value)) <= 200


@pytest.mark.parametrize("text", ["prompt", "completions[0].text", "completions[1].components"])
def test_text_that_is_not_utf_8_is_refused(text: str) -> None:
    value = {"\ud800": 1.0} if text.endswith("components") else "\ud800"
    with raises(InvalidInput, field="body"):
        decode_json(json.dumps(changed(text, value)).encode(), Group)
    value = {"?1": 1.0} if text.endswith("components") else "?1"
    with raises(InvalidInput, field="body"):
        decode(encode(changed(text, value)).replace(b"\xa2?1", b"\xa2\xff1"), Group)


def test_texts_may_be_left_out_of_a_body() -> None:
    content = plain(one())
    for name in ("prompt_id", "prompt", "ground_truth"):
        del content[name]
    del content["completions"][0]["text"]
    (group,) = decode_json(json.dumps({"groups": [content]}).encode(), Groups).groups
    assert (group.prompt_id, group.prompt, group.ground_truth, group.completions[0].text) == (
        "",
        "",
        "",
        "",
    )


def test_an_error_has_the_reason_and_the_value() -> None:
    with pytest.raises(InvalidInput) as caught:
        decode(encode_groups([one()]).replace(b"\xa8position\x00", b"\xa8position\xa1x"), Groups)
    assert (caught.value.field, caught.value.value) == ("groups[0].position", "x")
    with pytest.raises(InvalidInput) as caught:
        from_plain(changed("completions[0].logprobs", [-1.0]), Group)
    assert (caught.value.field, caught.value.value) == ("completions[0].logprobs", "[-1.0]")
    with pytest.raises(InvalidInput) as caught:
        from_plain(changed("completions[0].surprise", 5), Group)
    assert (caught.value.field, caught.value.value) == ("completions[0].surprise", "5")


@pytest.mark.parametrize("missing", ["id", "completions", "prompt_token_ids"])
def test_a_missing_field_is_named(missing: str) -> None:
    content = plain(one())
    del content[missing]
    with raises(InvalidInput, field=missing):
        from_plain(content, Group)


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"[]", msgpack.packb([]), msgpack.packb({}), msgpack.packb({"groups": {}})],
)
def test_bodies_that_are_no_groups_are_refused(body: bytes) -> None:
    for kind in ANSWERS:
        with pytest.raises(InvalidInput):
            decode(body, kind)


@pytest.mark.parametrize("evicted", ["x", None, -1, [1]])
def test_a_bad_count_of_evicted_groups_is_refused(evicted: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        decode(encode_groups([one()], evicted=evicted), TakenGroups)
    assert caught.value.field == "evicted"


def test_weights_must_match_the_groups() -> None:
    with pytest.raises(InvalidInput) as caught:
        decode(encode(SampledGroups([one()], np.array([1, 2], np.float32))), SampledGroups)
    assert caught.value.field == "weights"


def test_every_truncation_is_refused() -> None:
    body = encode(SampledGroups([one()], np.array([1], np.float32)))
    for end in range(len(body)):
        with pytest.raises(InvalidInput):
            decode(body[:end], SampledGroups)
    with pytest.raises(InvalidInput):
        decode(body + b"\x00", SampledGroups)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_invalid_input_and_nothing_else(body: bytes) -> None:
    for kind in ANSWERS:
        with pytest.raises(InvalidInput):
            decode(body, kind)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_decode_or_are_invalid_input(data: st.DataObject) -> None:
    body = bytearray(encode(SampledGroups([one()], np.array([1], np.float32))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        sampled = decode(bytes(body), SampledGroups)
    except InvalidInput:
        return
    assert len(sampled.weights) == len(sampled.groups)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(InvalidInput):
        decode_groups(b"\x91" * 100_000)


@pytest.mark.parametrize("body", ['{"temperature": NaN}', "[-Infinity]", '{"a": "NaN", "b" 1}'])
def test_what_is_no_json_is_refused_with_its_place(body: str) -> None:
    with raises(InvalidInput, field="body") as caught:
        parse_json(body.encode())
    assert "line 1 column" in caught.value.message
