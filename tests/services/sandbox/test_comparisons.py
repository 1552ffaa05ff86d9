"""What counts as the expected value or output, against definitions that are written anew here."""

import collections
import datetime
import json
import random
import uuid
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from services.sandbox.cases import Case, CaseResult
from services.sandbox.library_values import made, recipe, same
from services.sandbox.values import decoded, encoded


def reported(value: Any, /, **more: Any) -> dict[str, Any]:
    """What the sandbox reports of a call that returned `value`."""
    return {
        "status": "done",
        "seconds": 0.5,
        "detail": "",
        "output": "",
        "value": json.dumps(encoded(value)),
        **more,
    }


def passes(value: Any, expected: Any, comparison: Any = "close") -> bool:
    case = Case({"kind": "call"}, expected, comparison)
    found = case.verdict(reported(value))
    assert found.status in ("passed", "wrong")
    return found.status == "passed"


def prints(output: str, expected: str) -> bool:
    case = Case({"kind": "stdin"}, expected)
    return case.verdict(reported(None, output=output)).status == "passed"


def random_value(draws: random.Random, depth: int = 3) -> Any:
    kind = draws.randrange(5 if depth == 0 else 12)
    match kind:
        case 0:
            return None
        case 1:
            return draws.random() < 0.5
        case 2:
            return draws.choice([0, -1, 7, 2**63 - 1, 2**64, -(2**64), 3**99, -(3**99)])
        case 3:
            return draws.choice([0.0, -2.5, 1e300, float("inf")])
        case 4:
            return draws.choice(["", "a", "\ud800", '"', "é\n"])
        case 5:
            return draws.choice([b"", b"\x00\xff", 2j, 1 - 3.5j])
        case 6 | 7:
            items = [random_value(draws, depth - 1) for _ in range(draws.randrange(4))]
            return items if kind == 6 else tuple(items)
        case 8 | 9:
            kind_of_set = set if kind == 8 else frozenset
            return kind_of_set(draws.choice([1, "a", b"b", 2.5, (3, "c")]) for _ in range(3))
    return {draws.choice([1, "a", (2,), None]): random_value(draws, depth - 1) for _ in range(3)}


def test_values_of_literals_arrive_as_they_are() -> None:
    draws = random.Random(0)
    for _ in range(400):
        value = random_value(draws)
        found = decoded(json.loads(json.dumps(encoded(value))))
        assert found == value
        assert repr(found) == repr(value) or isinstance(value, (set, frozenset, tuple, list, dict))
        assert passes(value, value, "==")
        assert not passes(value, value, "!=")
        assert not passes(value, [value], "==")
        assert passes(value, [value], "!=")


class _Index:
    def __index__(self) -> int:
        return 6


class _Float:
    def __float__(self) -> float:
        return 2.5


class _Text(str):
    def __str__(self) -> str:
        return "another"


class _Items(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        return [("another", 1)]


@pytest.mark.parametrize(
    ("value", "tagged"),
    [
        ((1, "a"), ["tuple", [1, "a"]]),
        ({}.keys(), ["set", []]),
        ({1: 2}.items(), ["set", [["tuple", [1, 2]]]]),
        ({1: 2}.values(), ["iterable", [2]]),
        (range(3), ["iterable", [0, 1, 2]]),
        (bytearray(b"ab"), ["bytes", "YWI="]),
        (2**64 - 1, 2**64 - 1),
        (2**64, ["int", "0x10000000000000000"]),
        (-(2**64), ["int", "-0x10000000000000000"]),
        (1 + 2j, ["complex", 1.0, 2.0]),
        (_Index(), 6),
        (_Float(), 2.5),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (_Text("a"), "a"),
        (_Items(a=1), ["dict", [["a", 1]]]),
        (np.array([[1, 2]]), ["list", [["list", [1, 2]]]]),
        (np.float32(0.5), 0.5),
        (object(), ["other", "object"]),
        (int, ["other", "type"]),
    ],
)
def test_the_tags_of_values(value: Any, tagged: Any) -> None:
    assert encoded(value) == tagged


def test_an_empty_array_is_compared_with_empty_ones_only() -> None:
    empty = np.array([])
    assert same([], [1]) is False
    assert same([], []) is True
    assert same(empty, empty).all()
    assert same(np.array([1, 2]), [1, 2]).all()
    for left, right in ((empty, 4), (4, empty), (np.array([1]), [])):
        with pytest.raises(AssertionError):
            same(left, right)


def test_values_with_too_many_levels_are_refused() -> None:
    value: Any = []
    for _ in range(100):
        value = [value]
    assert decoded(encoded(value)) == value
    with pytest.raises(RecursionError):
        encoded([value])


@pytest.mark.parametrize(
    "forged", [{"a": 1}, ["int"], ["int", 5], ["none of them", 1], [], ["list"], ["dict", [1]]]
)
def test_a_forged_value_is_wrong(forged: Any) -> None:
    case = Case({"kind": "call"}, 5, "==")
    assert case.verdict(reported(None, value=json.dumps(forged))).status == "wrong"


def test_an_iterable_is_no_literal_but_close_to_a_list() -> None:
    assert passes(range(3), [0, 1, 2])
    assert not passes(range(3), [0, 1, 2], "==")
    assert not passes(range(3), [0, 1, 3])
    assert not passes(range(3), [0, 1])


@pytest.mark.parametrize(
    ("value", "expected", "is_close"),
    [
        (1, 1, True),
        (1, 2, False),
        (True, 1, False),
        (1, True, False),
        (True, True, True),
        (False, False, True),
        ("a", "a", True),
        ("a", ["a"], False),
        (None, None, True),
        (None, 0, False),
        ((1, 2), [1, 2], True),
        ([1, 2], [2, 1], False),
        ([1], [1, 2], False),
        ({1, 2, 10}, [10, 2, 1], True),
        ({1, 2}, [1, 1], False),
        ({1}, [1, 1], False),
        ({"a", 1, (2, 3)}, [[2, 3], "a", 1], True),
        (frozenset([1.0000001]), [1.0], True),
        ({"a": 1}, {"a": 1}, True),
        ({1: 2}, {"1": 2}, True),
        ({1: 2.0000001}, {"1": 2.0}, True),
        ({"1": 0, 1: 0}, {"1": 0}, False),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({(1, 2): 3}, {"[1, 2]": 3}, True),
        ([1, [2.0000001, {"a": (3,)}]], [1, [2.0, {"a": [3]}]], True),
    ],
)
def test_what_is_close_to_a_value_from_json(value: Any, expected: Any, is_close: bool) -> None:
    assert passes(value, expected) == is_close


def test_numbers_are_close_within_a_millionth_or_the_rounding_of_an_integer() -> None:
    draws = random.Random(1)
    for _ in range(500):
        expected = draws.choice([0.0, 1e-9, 0.5, -3.25, 1e5, -1e12]) * draws.choice([1, 3])
        factor = draws.choice([0.5, 0.9, 1.1, 2.0])
        limit = max(1e-6, 1e-6 * abs(expected))
        assert passes(expected + factor * limit, expected) == (factor < 1)
        assert passes(expected - factor * limit, expected) == (factor < 1)

        whole = draws.choice([1, 1000, -(10**6)])
        limit = max(1e-9, 1e-14 * abs(whole))
        assert passes(whole + factor * limit, whole) == (factor < 1)
    assert passes(2.0, 2)
    assert not passes(2**53 + 1, 2**53)
    assert not passes(10**400, 1.0)
    assert not passes(1.0, 10**400)


def test_one_is_not_true_and_only_these_are_compared_by_is() -> None:
    for value in (None, True, False):
        for other in (None, True, False, 0, 1, ""):
            assert passes(other, value, "is") == (repr(other) == repr(value))


@pytest.mark.parametrize("expected", [[5], [5, 5], 5, [[5]]])
@pytest.mark.parametrize("value", [5, [5], [[5]], [5, 5]])
def test_only_one_list_may_be_around_the_expected_value(value: Any, expected: Any) -> None:
    assert passes(value, expected) == (value == expected)
    may_be = value == expected or [value] == expected
    assert passes(value, expected, "close or wrapped") == may_be


def test_words_and_lines_of_the_output() -> None:
    draws = random.Random(2)
    words = ["a", "1", "1.0", "007", "2.50", "-3", "1e3", "1000", ".5", "0.5", "0.5000001", "1_0"]
    numbers = {"1": 1, "1.0": 1, "2.50": 2.5, "-3": -3, "1e3": 1000, "1000": 1000}
    numbers |= {".5": 0.5, "0.5": 0.5, "0.5000001": 0.5}

    def same(word: str, other: str) -> bool:
        return word == other or (
            numbers.get(word) is not None and numbers.get(word) == numbers.get(other)
        )

    for _ in range(400):
        lines = [[draws.choice(words) for _ in range(2)] for _ in range(draws.randrange(1, 3))]
        others = [list(line) for line in lines]
        row = draws.randrange(len(lines))
        others[row][draws.randrange(2)] = draws.choice(words)
        are_same = all(
            same(word, other)
            for line, changed in zip(lines, others, strict=True)
            for word, other in zip(line, changed, strict=True)
        )
        text = "\n".join(map(" ".join, lines))
        other_text = "\n".join(map(" ".join, others))
        assert prints(text, other_text) == are_same, (text, other_text)
        assert prints(f"{text}  \n\n", text)
        assert not prints(f"{text}\nz", text)
        assert not prints(text, f"{text}\nz")
        assert not prints(f"\n{text}", text)
    assert prints("1000000000000.0", "1000000000000")
    assert not prints("1000000000000.5", "1000000000000")
    assert not prints("a  b", "a b")
    assert not prints("1" * 41 + ".0", "1" * 41)
    assert prints("1" * 38 + ".0", "1" * 38 + ".0")
    assert prints("1" * 10 + "." + "0" * 29, "1" * 10)
    assert not prints("1" * 10 + "." + "0" * 30, "1" * 10)


@pytest.mark.parametrize(
    "status", ["error", "timeout", "memory", "output", "died", "starved", "skipped"]
)
def test_what_is_not_done_keeps_its_status(status: Any) -> None:
    done = {"status": status, "seconds": 2, "detail": "why"}
    assert Case({"kind": "stdin"}, "").verdict(done) == CaseResult(status, 2.0, "why")
    code = Case({"kind": "code"}, test={"text": ""})
    assert code.verdict(reported(None)).status == "passed"


def test_the_size_of_what_is_expected() -> None:
    assert Case({"kind": "stdin"}, "é\n").expected_bytes == 3
    assert Case({"kind": "stdin"}, "\ud800").expected_bytes == 1
    assert Case({"kind": "call"}, [1, "a"]).expected_bytes == len('["list", [1, "a"]]')


@pytest.mark.parametrize(
    "value",
    [
        range(1, 9, 2),
        collections.deque([1, "a"], maxlen=2),
        collections.Counter("abca"),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, a=[1]),
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4, datetime.timezone(datetime.timedelta(hours=3))),
        datetime.time(1, 2),
        datetime.timedelta(days=-1, seconds=5),
        Decimal("1.50"),
        Fraction(3, 7),
        uuid.UUID(int=5),
        np.array([[1.5, 2.5]], np.float32),
        np.array(["a", "bc"]),
        np.array([True]),
        np.int16(7),
    ],
)
def test_values_of_the_library_are_built_again(value: Any) -> None:
    parts = recipe(value)
    assert parts is not None
    again = made(*parts)
    assert type(again) is type(value)
    assert repr(again) == repr(value)
    assert getattr(again, "dtype", None) == getattr(value, "dtype", None)


def test_other_types_are_not_built() -> None:
    assert recipe(object()) is None
    assert recipe(np.array([object()])) is None
    for module, name in (("os", "_exit"), ("datetime", "tzinfo"), ("numpy", "load")):
        with pytest.raises(ValueError, match="no such type"):
            made(module, name, [1], [])
    with pytest.raises(ValueError, match="O"):
        made("numpy", "array", ["O", [1], [1]], [])
