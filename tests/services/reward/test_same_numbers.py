"""Values of programs are compared with the expected ones: properties over random numbers."""

import json
import math
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from services.sandbox.cases import Case
from services.sandbox.values import encoded

_FLOATS = st.floats(-1e12, 1e12)
_SMALL = st.floats(-1e-7, 1e-7)


def _passes(value: Any, expected: Any) -> bool:
    case = Case({"kind": "call"}, expected, comparison="close")
    done = {"status": "done", "seconds": 0, "detail": "", "value": json.dumps(encoded(value))}
    return case.verdict(done).status == "passed"


def _prints(output: str, expected: str) -> bool:
    case = Case({"kind": "stdin"}, expected)
    done = {"status": "done", "seconds": 0, "detail": "", "output": output}
    return case.verdict(done).status == "passed"


@given(value=_FLOATS, noise=st.floats(-1, 1))
def test_a_float_may_be_off_by_a_millionth_of_itself_and_no_more(
    value: float, noise: float
) -> None:
    assume(abs(value) > 1 and abs(noise) > 0.1)
    near = value * (1 + noise * 0.9e-6)
    far = value * (1 + 3e-6 * noise / abs(noise))
    assert _passes(near, value)
    assert _passes([near], [value])
    assert _passes({"a": (near,)}, {"a": [value]})
    assert _prints(repr(near), repr(value))
    assert not _passes(far, value)
    assert not _prints(f"1 {far!r}", f"1 {value!r}")


@given(small=_SMALL)
def test_beside_zero_a_millionth_counts_for_itself(small: float) -> None:
    assert _passes(small, 0.0)
    assert _prints(f"{small:.12f}", "0.0")
    assert not _passes(small + math.copysign(3e-6, small), 0.0)
    # An expected integer allows only the error of rounding.
    assert _passes(small, 0) == (abs(small) <= 1e-9)


@given(first=st.integers(-(10**9), 10**9), second=st.integers(-(10**9), 10**9))
def test_integers_are_exact(first: int, second: int) -> None:
    assert _passes(first, second) == (first == second)
    assert _prints(str(first), str(second)) == (first == second)
    assert _passes(float(first), first)
    assert not _passes(first + 0.001, first)


@given(
    items=st.lists(st.integers(-3, 3), max_size=4), others=st.lists(st.integers(-3, 3), max_size=4)
)
def test_containers_are_equal_as_those_of_python_are(items: list[int], others: list[int]) -> None:
    assert _passes(items, others) == (items == others)
    assert _passes(tuple(items), others) == (items == others)
    assert _passes(set(items), sorted(set(others))) == (set(items) == set(others))
    assert _passes(dict.fromkeys(items, 1), dict.fromkeys(map(str, others), 1)) == (
        set(items) == set(others)
    )
