"""Bits that change in the file of the prompt stream: the prompts are those that were drawn, or an
error names the file.
"""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from common.errors import ServiceError
from common.wire.schemas import Prompt
from services.data.curriculum import Difficulty
from services.data.stream import PromptStream
from tests.support.errors import raises
from tests.support.services.damage import check_flipped_bits

PROMPTS = [Prompt(id=f"p{i}", prompt=f"{i} + 1?", ground_truth=str(i + 1)) for i in range(12)]


def opened(state_dir: Path) -> PromptStream:
    return PromptStream(PROMPTS, 7, state_dir, Difficulty())


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Returns the state directory of a stream with draws, answers and pass rates."""
    state = tmp_path / "stored"
    stream = opened(state)
    for i in range(5):
        batch = stream.take(4, request_id=f"run-{i}")
        stream.report([(prompt.id, 0.25 * (i % 3)) for prompt in batch.prompts], f"rates-{i}")
    stream.take(3, shuffle=False, request_id="in-order")
    stream.close()
    return state


def served(state: Path) -> list[Any]:
    """Returns what a stream hands out."""
    stream = opened(state)
    try:
        return [
            stream.stats(),
            *(stream.take(4, request_id=f"run-{i}") for i in range(5)),
            stream.take(3, shuffle=False, request_id="in-order"),
            stream.take(6, request_id="new"),
        ]
    finally:
        stream.close()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("seed", "flips"), [(0, 100), pytest.param(1, 500, marks=pytest.mark.slow)]
)
def test_a_flipped_bit_anywhere_changes_no_prompt_or_is_named(
    stored: Path, seed: int, flips: int
) -> None:
    check_flipped_bits(stored, "data/stream.db", served, flips=flips, seed=seed)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE cursors SET position = 3 WHERE stream = 'shuffled'",
        "UPDATE cursors SET served = 3",
        "DELETE FROM cursors",
        "UPDATE identity SET seed = '8'",
        "UPDATE answers SET answer = replace(answer, '\"position\": ', '\"position\": 1')",
        "UPDATE draws SET place = (place + 1) % 12",
        "UPDATE draws SET free = 1 - free",
        "DELETE FROM draws WHERE position = 3",
        "UPDATE reports SET body = replace(body, '0.5', '0.9')",
        "UPDATE reports SET position = position - 1",
    ],
)
def test_a_changed_field_is_named_when_it_is_read(change: str, stored: Path) -> None:
    path = stored / "data" / "stream.db"
    db = sqlite3.connect(path)
    assert db.execute(change).rowcount
    db.commit()
    db.close()
    with raises(ServiceError, code="damaged", field="state_dir", value=str(path)) as error:
        served(stored)
    assert "remove the file" in str(error.value.remedy)
