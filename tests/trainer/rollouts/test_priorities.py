"""Priorities of groups against hand-computed numbers, and custom functions, good and bad."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.settings.config import Config
from common.wire.schemas import Group
from tests.support.batches.groups import make_group
from tests.support.errors import raises
from trainer.rollouts.priorities import PRIORITIES, load_priority, reuse_request


def group_of(rewards: list[float]) -> Group:
    """Makes a group whose completions are right if their reward is above 0."""
    return make_group(np.random.default_rng(0), rewards)


@pytest.mark.parametrize(
    ("name", "rewards", "advantages", "expected"),
    [
        ("advantage", [1, 0, 0, 1], [0.5, -1.5, 1.0, -2.0], 1.25),  # (0.5 + 1.5 + 1 + 2) / 4
        ("advantage", [1, 1], [0.0, 0.0], 0),
        ("advantage", [1, 0], [1e-3, -4e-3], 2.5e-3),
        ("advantage", [1, 0], [math.nan, 1.0], 0),
        ("advantage", [1, 0], [math.inf, 1.0], 0),
        ("reward", [1, 0, 0, 1], [1, -1, -1, 1], 0.6),  # 0.1 + ½
        ("reward", [3, 1.5], [1, -1], 2.35),
        ("reward", [0, 0], [5, 5], 0.1),
        ("reward", [-3, 1], [-1, 0], 0.1),
        ("reward", [1, 1], [0, 0], 0),  # without a gradient, the group is not reused
    ],
)
def test_hand_computed(
    name: str, rewards: list[float], advantages: list[float], expected: float
) -> None:
    assert load_priority(name)(group_of(rewards), advantages) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("step", "beta", "oldest"), [(0, 0.4, 0), (5, 0.7, 2), (10, 1.0, 7)])
def test_the_request_for_reused_groups_hand_computed(step: int, beta: float, oldest: int) -> None:
    """A run of 11 steps: β rises from 0.4 to 1, and no group is older than `max_reuse_staleness`
    versions."""
    config = Config(seed=2)
    config.replay.max_reuse_staleness, config.replay.max_times_sampled = 3, 5
    asked = reuse_request(config, 7, step, 11, "id")
    assert asked.importance_exponent == pytest.approx(beta, abs=1e-12)
    assert (asked.min_version, asked.count, asked.max_times_sampled, asked.request_id) == (
        oldest,
        7,
        5,
        "id",
    )
    assert (asked.priority_exponent, asked.seed) == (0.6, 2_000_006 + step)
    assert reuse_request(config, 1, 0, 1, "id").importance_exponent == 0.4  # a run of one step


@given(
    st.sampled_from(sorted(PRIORITIES)),
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats()), min_size=1, max_size=6),
)
def test_every_priority_can_be_stored(name: str, rows: list[tuple[float, float]]) -> None:
    value = load_priority(name)(
        group_of([reward for reward, _ in rows]), [advantage for _, advantage in rows]
    )
    assert 0 <= value < math.inf


SOURCE = """
import numpy as np

print("imported")

def right(group, advantages):
    return sum(completion.correct for completion in group.completions) + max(advantages)

def constant(value):
    return lambda group, advantages: value

zero, whole, single = constant(0), constant(7), constant(np.float32(0.5))
nothing, text, negative, nan, infinite, huge = map(constant, (None, "1", -0.5, float("nan"), np.inf, 10**400))
boolean = constant(True)
number = 5

def broken(group, advantages):
    raise KeyError("mine")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The import path of a module with SOURCE, in a package made for this test."""
    name = f"own_priorities_{abs(hash(request.node.name))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / name / "module.py").write_text(SOURCE)
    (tmp_path / name / "raises.py").write_text("1 / 0")
    (tmp_path / name / "garbled.py").write_text("def def")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_custom_function_is_imported_once(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    priority = load_priority(f"{package}.module:right")
    assert [priority(group_of([1, 0, 1]), [0.5, -1, 0.25]) for _ in range(2)] == [2.5, 2.5]
    assert capsys.readouterr().out == "imported\n"


@pytest.mark.parametrize(("name", "expected"), [("zero", 0.0), ("whole", 7.0), ("single", 0.5)])
def test_returned_numbers_are_accepted(package: str, name: str, expected: float) -> None:
    assert load_priority(f"{package}.module:{name}")(group_of([1]), [0.5]) == expected
    assert load_priority(f"{package}.module:{name}")(group_of([1]), [0.0]) == 0.0


@pytest.mark.parametrize(
    "name", ["nothing", "text", "negative", "nan", "infinite", "huge", "boolean"]
)
def test_an_invalid_priority_is_refused_with_the_group(package: str, name: str) -> None:
    group, path = group_of([1]), f"{package}.module:{name}"
    with raises(ConfigError, field="replay.priority", value=path) as error:
        load_priority(path)(group, [0])
    assert group.id in error.value.message
    assert error.value.remedy == "return a finite number of at least 0"


def test_an_error_of_a_custom_function_is_passed_on(package: str) -> None:
    with pytest.raises(KeyError, match="mine"):
        load_priority(f"{package}.module:broken")(group_of([1]), [0])


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("entropy", "an import path has the form"),
        ("", "an import path has the form"),
        (":right", "an import path has the form"),
        ("{}.module:", "an import path has the form"),
        ("nowhere.module:right", "No module named 'nowhere'"),
        ("{}.missing:right", "cannot be imported"),
        (".module:right", "cannot be imported"),
        ("{}.raises:right", "ZeroDivisionError"),
        ("{}.garbled:right", "SyntaxError"),
        ("{}.module:wrong", "has no attribute 'wrong'"),
        ("{}.module:number", "of type int"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(package: str, path: str, why: str) -> None:
    path = path.format(package)
    with pytest.raises(ConfigError, match=why) as error:
        load_priority(path)
    assert error.value.field == "replay.priority"
    assert error.value.value == path
    assert error.value.remedy
