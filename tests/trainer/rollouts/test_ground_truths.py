"""A problem that no answer solves is named at the start of a run and not drawn, and a run of
mostly such problems stops."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from common.clients.data import DataClient
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient
from common.errors import ConfigError, ServiceError
from common.settings.config import load
from common.wire.schemas import Prompt
from services.data.app import create_data_app
from services.reward.app import create_reward_app
from tests.support.errors import raises
from trainer.rollouts.ground_truths import GROUND_TRUTHS, GroundTruthCheck
from trainer.rollouts.services import Services

pytestmark = pytest.mark.integration

GOOD = [Prompt(id=f"good{i}", prompt="?", ground_truth=str(i)) for i in range(40)]
BAD = Prompt(id="bad", prompt="?", ground_truth="x" * 4000)
EVAL = [Prompt(id=f"held-out{i}", prompt="?", ground_truth=str(i)) for i in range(20)]
BAD_EVAL = Prompt(id="held-out", prompt="?", ground_truth=" ")
TESTS = [{"input": "1", "output": "1"}]


@asynccontextmanager
async def served(
    train: Sequence[Prompt], evaluation: Sequence[Prompt], state: Path, *words: str
) -> AsyncIterator[Services]:
    config = load(["--state_dir", str(state), *words], {})
    apps = [
        create_data_app(config, list(train), list(evaluation)),
        create_reward_app(config.reward),
    ]
    async with AsyncExitStack() as stack:
        for app in apps:
            await stack.enter_async_context(app.router.lifespan_context(app))
        data, reward = map(httpx.ASGITransport, apps)
        services = Services(
            DataClient("data-server", "http://x", transport=data),
            RolloutClient("rollout-server", "http://x", transport=data),
            RewardClient("reward-server", "http://x", transport=reward),
            ReplayClient("replay-buffer", "http://x", transport=data),
        )
        for client in services.all():
            await stack.enter_async_context(client)
        yield services


async def check(services: Services, path: Path) -> dict[str, str]:
    checked = GroundTruthCheck(services, path)
    await checked.run()
    return checked.unsolvable


def test_the_problems_that_cannot_be_solved_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> dict[str, str]:
        async with served([*GOOD, BAD], [*EVAL, BAD_EVAL], tmp_path) as services:
            return await check(services, tmp_path / GROUND_TRUTHS)

    unsolvable = asyncio.run(run())

    assert set(unsolvable) == {"bad", "held-out"}
    assert "62 ground truths; 2 cannot be graded: bad ('xxx" in caplog.text
    stored = json.loads((tmp_path / GROUND_TRUTHS).read_text())
    assert stored == {"checked": 62, "repaired": 0, "unsolvable": unsolvable}


@pytest.mark.parametrize(
    ("ground_truth", "reason"),
    [
        ("There are some eggs left.", "only the same text matches it"),
        ("proof", "only the same text matches it"),
        ("\x0crac{1}{2}", "control character"),
        ("['5', '7']", "states no answer"),
        ("['5']", ""),
        (r"\frac{1", "braces"),
        ("", "states no answer"),
        ('["5"]', ""),
        ("There are 12 eggs left.", ""),
        (r"\text{Monday}", ""),
        (r"\text{6 cubic meters per second}", ""),
    ],
)
def test_what_is_a_ground_truth(tmp_path: Path, ground_truth: str, reason: str) -> None:
    problem = BAD.model_copy(update={"ground_truth": ground_truth})

    async def run() -> dict[str, str]:
        async with served([*GOOD, problem], [], tmp_path) as services:
            return await check(services, tmp_path / GROUND_TRUTHS)

    unsolvable = asyncio.run(run())

    assert set(unsolvable) == ({"bad"} if reason else set())
    assert reason in unsolvable.get("bad", "")


def test_what_was_checked_counts_when_a_service_stops_answering(tmp_path: Path) -> None:
    bad = [BAD.model_copy(update={"id": f"bad{i}"}) for i in range(300)]

    async def run() -> None:
        async with served(bad, [], tmp_path) as services:
            list_prompts = services.data.train_prompts

            async def first_page_only(limit: int, offset: int) -> list[Prompt]:
                if offset:
                    raise ServiceError("it has ended")
                return await list_prompts(limit, offset)

            services.data.train_prompts = first_page_only  # type: ignore[method-assign]
            await check(services, tmp_path / GROUND_TRUTHS)

    with raises(ConfigError, field="data.answer_field", value="256 of 256"):
        asyncio.run(run())


def test_each_split_is_judged_by_itself(tmp_path: Path) -> None:
    held_out = [BAD.model_copy(update={"id": f"bad{i}"}) for i in range(3)]

    async def run() -> None:
        async with served(GOOD, held_out, tmp_path) as services:
            await check(services, tmp_path / GROUND_TRUTHS)

    with raises(ConfigError, field="data.answer_field", value="3 of 43"):
        asyncio.run(run())


def test_a_run_of_mostly_unsolvable_problems_stops(tmp_path: Path) -> None:
    bad = [BAD.model_copy(update={"id": f"bad{i}"}) for i in range(9)]

    async def run() -> None:
        async with served([*GOOD, *bad], [], tmp_path) as services:
            await check(services, tmp_path / GROUND_TRUTHS)

    with raises(ConfigError, field="data.answer_field", value="9 of 49") as caught:
        asyncio.run(run())

    assert caught.value.field == "data.answer_field"


def test_tests_of_programs_are_checked_too(tmp_path: Path) -> None:
    right = [
        Prompt(id=f"right{i}", prompt="?", ground_truth="", columns={"test_cases": TESTS})
        for i in range(40)
    ]
    unsolved = {
        "idle": ["f(2) == 4"],
        "large": [{"input": "", "output": "x" * 5000}],
        "always": ["assert (f(2) == 4, 'message')"],
        "package": ["import sympy\nassert f(2) == 4 and True"],
    }
    wrong = [
        Prompt(id=name, prompt="?", ground_truth="", columns={"test_cases": tests})
        for name, tests in unsolved.items()
    ]

    async def run() -> dict[str, str]:
        words = ("--reward.functions", '[{"name": "code", "sandbox": "none", "output_kb": 4}]')
        async with served([*right, *wrong], [], tmp_path, *words) as services:
            return await check(services, tmp_path / GROUND_TRUTHS)

    unsolvable = asyncio.run(run())

    assert set(unsolvable) == set(unsolved)
    assert "the test asserts nothing" in unsolvable["idle"]
    assert "over the limit of 4096" in unsolvable["large"]
    assert "no program fails" in unsolvable["always"]
    assert "imports sympy, which programs do not have" in unsolvable["package"]
