"""Programs that catch every error, under seeded faults: no reward of a fault is stored."""

from pathlib import Path

import pytest

from tests.chaos.episodes.invariants import violations
from tests.chaos.episodes.run import FAULTS, chaos

pytestmark = pytest.mark.integration


@pytest.mark.usefixtures("base_model")
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(("seed", "faults"), [(14, 4), pytest.param(0, 12, marks=pytest.mark.long)])
async def test_every_invariant_holds_for_programs_that_catch_every_error(
    kind: str, seed: int, faults: int, tmp_path: Path
) -> None:
    evidence = await chaos(kind, seed, faults, tmp_path)
    assert violations(evidence) == []
    assert len(evidence.groups) > faults
