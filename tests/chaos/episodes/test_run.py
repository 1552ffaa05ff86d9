"""Programs that catch every error, under a few seeded faults: no reward of a fault is stored."""

from pathlib import Path

import pytest

from tests.chaos.episodes.run import chaos

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.usefixtures("base_model")
@pytest.mark.parametrize("kind", ["agent", "server", "class"])
async def test_every_invariant_holds_for_programs_that_catch_every_error(
    kind: str, tmp_path: Path
) -> None:
    outcome = await chaos(kind, seed=14, count=4, folder=tmp_path)
    assert outcome["violations"] == []
    assert len(outcome["faults"]) == 4
    assert outcome["groups"] == outcome["episodes"] // 4 > 0
