"""A re-executed update against its record, of which one part was changed at a time."""

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.audit.comparison import LOGPROB_BOUND, NORM_BOUND
from trainer.audit.updates import compare_update

STAGES = ["logprobs", "advantages", "gradients", "new weights"]
ROUNDED = "torch was 0.1 and is 2.0"


def again_and_recorded(draw: random.Random, rows: int = 5) -> Any:
    """Returns an update whose recomputation equals its record."""
    lengths = [draw.randint(1, 6) for _ in range(rows)]
    columns = {
        name: [np.array([draw.gauss(0, 1) for _ in range(n)], np.float32) for n in lengths]
        for name in ("logprobs", "advantages")
    }
    updates = draw.randint(1, 3)
    line = SimpleNamespace(
        norms=[draw.uniform(0.1, 9.0) for _ in range(updates)],
        gradients=[f"gradient {n}" for n in range(updates)],
        weights="weights",
        critic=draw.choice([None, "critic"]),
        reference_logprobs=draw.choice([None, "reference"]),
        values=draw.choice([None, "values"]),
    )
    cut = draw.randint(1, rows - 1)
    groups = [
        SimpleNamespace(**{name: rows[part] for name, rows in columns.items()})
        for part in (slice(cut), slice(cut, None))
    ]
    recorded = SimpleNamespace(
        groups=groups, line=line, step=4, names=[f"row {n}" for n in range(rows)]
    )
    is_scored = draw.random() < 0.5
    batch = SimpleNamespace(
        advantages=copy.deepcopy(columns["advantages"]),
        old_logprobs=copy.deepcopy(columns["logprobs"]) if is_scored else None,
    )
    update = SimpleNamespace(logprobs=None if is_scored else copy.deepcopy(columns["logprobs"]))
    return SimpleNamespace(recorded=recorded, batch=batch, update=update, line=copy.deepcopy(line))


def states(again: Any, why_rounded: str = "") -> list[str]:
    found = list(compare_update(again, why_rounded))
    assert [outcome.stage for outcome in found] == STAGES
    for outcome in found:
        assert (outcome.where != "") == (outcome.state == "differs")
        assert (outcome.expected != outcome.found) == (outcome.state == "differs")
    return [outcome.state for outcome in found]


def moved(again: Any, stage: str, by: float, draw: random.Random) -> str:
    """Moves a number of a column; returns the place."""
    column = again.batch.advantages
    if stage == "logprobs":
        column = again.batch.old_logprobs or again.update.logprobs
    row = draw.randrange(len(column))
    token = draw.randrange(len(column[row]))
    column[row][token] += np.float32(by)
    return f"row {row}, trained token {token}"


@pytest.mark.parametrize("seed", range(30))
def test_the_stage_that_was_changed_differs_and_no_other(seed: int) -> None:
    draw = random.Random(seed)
    equal = ["equal"] * 4
    close = ["close", "close", "close", "equal"]
    again = again_and_recorded(draw)
    assert states(again) == equal
    assert states(again, ROUNDED) == close

    for place, stage in enumerate(("logprobs", "advantages")):
        for share, is_close in ((0.25, True), (4.0, False)):
            changed = copy.deepcopy(again)
            where = moved(changed, stage, share * LOGPROB_BOUND, draw)
            assert states(changed) == [*equal[:place], "differs", *equal[place + 1 :]]
            assert next(compare_update(changed, "")).where == (where if place == 0 else "")
            expected = list(close)
            expected[place] = "close" if is_close else "differs"
            assert states(changed, ROUNDED) == expected

    # What only a checksum tells is not compared with another rounding.
    for name, place in (
        ("reference_logprobs", 0),
        ("values", 0),
        ("weights", 3),
        ("critic", 3),
    ):
        changed = copy.deepcopy(again)
        setattr(changed.line, name, "another")
        expected = list(equal)
        expected[place] = "differs"
        assert states(changed) == expected
        expected = list(close)
        expected[place] = "close" if place == 0 else "not compared"
        assert states(changed, ROUNDED) == expected

    number = draw.randrange(len(again.line.norms))
    for share, rounded in ((0.5, "close"), (2.0, "differs")):
        changed = copy.deepcopy(again)
        changed.line.norms[number] *= 1 + draw.choice([-1, 1]) * share * NORM_BOUND
        assert states(changed) == ["equal", "equal", "differs", "equal"]
        assert list(compare_update(changed, ""))[2].where == f"update {number}"
        assert states(changed, ROUNDED) == ["close", "close", rounded, "equal"]
    changed = copy.deepcopy(again)
    changed.line.gradients[number] = "another"
    assert states(changed) == ["equal", "equal", "differs", "equal"]
    assert states(changed, ROUNDED) == close
    changed = copy.deepcopy(again)
    changed.line.norms.pop()
    changed.line.gradients.pop()
    for why in ("", ROUNDED):
        assert states(changed, why)[2] == "differs"
    # An update of which nothing is recorded made no gradient.
    changed.recorded.line.norms = changed.line.norms = []
    changed.recorded.line.gradients = changed.line.gradients = []
    assert states(changed, ROUNDED)[2] == "equal"
