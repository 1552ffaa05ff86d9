"""A miniature training run over the real service: problems of known difficulty, random answers,
reported pass rates."""

from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from common.clients.data import DataClient
from common.settings.config import Config
from common.settings.sections import DataSection
from common.wire.schemas import Prompt
from services.data.app import create_data_app

pytestmark = pytest.mark.integration

SOLVED = {"hard": 0.02, "medium": 0.5, "easy": 0.98}
"""The chance of a right answer to each problem."""
EACH, BATCH, GROUP, STEPS = 40, 16, 8, 150
TRAIN = [
    Prompt(id=f"{kind}-{n}", prompt=f"{kind} {n}", ground_truth="1")
    for n in range(EACH)
    for kind in SOLVED
]
EVAL = [Prompt(id="e", prompt="held-out", ground_truth="1")]


async def simulate(state_dir: Path, curriculum: Any, seed: int) -> tuple[list[str], dict[str, Any]]:
    """Returns (every prompt id in the order drawn, the last statistics)."""
    config = Config(
        state_dir=state_dir, seed=seed, data=DataSection(source="tiny", curriculum=curriculum)
    )
    app = create_data_app(config, TRAIN, EVAL)
    answers, drawn = np.random.default_rng(seed), list[str]()
    async with (
        app.router.lifespan_context(app),
        DataClient(
            "data-server", "http://data", transport=httpx.ASGITransport(app), deadline_s=20
        ) as client,
    ):
        for step in range(STEPS):
            batch = [prompt.id for prompt in (await client.prompts(BATCH, f"draw-{step}")).prompts]
            rates = [
                answers.binomial(GROUP, SOLVED[name.partition("-")[0]]) / GROUP for name in batch
            ]
            if curriculum != "none":
                for _ in range(2):  # a retry counts once
                    await client.report_pass_rates(batch, rates, f"report-{step}")
            drawn += batch
        return drawn, (await client.http.get("/stats")).json()


def shares(drawn: list[str]) -> dict[str, float]:
    counts = Counter(name.partition("-")[0] for name in drawn)
    return {kind: counts[kind] / len(drawn) for kind in SOLVED}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_medium_problems_are_preferred_and_all_are_visited(tmp_path: Path, seed: int) -> None:
    drawn, stats = await simulate(tmp_path / "difficulty", "difficulty", seed)
    first = len(TRAIN)
    assert sorted(drawn[:first]) == sorted(prompt.id for prompt in TRAIN)  # unknown ones first
    later = drawn[first:]
    found = shares(later)
    # A fifth is drawn freely, a third of that is medium, and so is nearly all of the rest: 0.8 +
    # 0.2 / 3 = 0.87. The share is a little lower because one right or wrong answer in eight makes
    # an easy or hard problem look medium.
    assert found["medium"] > 0.7
    assert found["hard"] > 0.2 / 3 / 2
    assert found["easy"] > 0.2 / 3 / 2
    free = stats["curriculum"]["drawn_freely"]
    assert set(later[: 6 * first]) == {
        prompt.id for prompt in TRAIN
    }  # five passes draw one free pass
    assert free + stats["curriculum"]["drawn_by_difficulty"] == stats["position"] == STEPS * BATCH
    assert stats["curriculum"]["known"] == first
    again, _ = await simulate(tmp_path / "again", "difficulty", seed)
    assert again == drawn


async def test_without_a_curriculum_nothing_is_preferred(tmp_path: Path) -> None:
    drawn, stats = await simulate(tmp_path, "none", 0)
    assert shares(drawn) == {kind: pytest.approx(1 / 3) for kind in SOLVED}
    assert "curriculum" not in stats
