"""`reproducible`: the same weights after every step, whatever delays and failures a run meets."""

import asyncio
import json
import random
from collections.abc import Callable
from itertools import chain

import httpx
import pytest
from fastapi import FastAPI

from common.errors import ConfigError
from common.settings.config import Config
from common.wire.schemas import Group
from tests.support.runs.in_process import metrics, quiet, stored
from trainer import train_in_process

pytestmark = pytest.mark.integration
STEPS = 4
FRESH = 4
"""Groups per step."""


class Disturbed(httpx.AsyncBaseTransport):
    """Delays the engine's answers, and refuses two requests, whose second tries come last."""

    def __init__(self, app: FastAPI) -> None:
        self.engine = httpx.ASGITransport(app)
        self.delays = random.Random(0)
        self.calls = 0
        self.first_tries = 0
        """Requests in flight that were not refused before."""
        self.refused: set[int] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/generate":
            return await self.engine.handle_async_request(request)

        self.calls += 1
        seed = json.loads(await request.aread())["sampling_params"]["sampling_seed"]
        if self.calls in (2, 7):
            self.refused.add(seed)
            return httpx.Response(400, json={"detail": "refused"})
        if seed in self.refused:
            while self.first_tries:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            await asyncio.sleep(2.0)
            return await self.engine.handle_async_request(request)

        self.first_tries += 1
        await asyncio.sleep(self.delays.choice([0.0, 0.3]))
        response = await self.engine.handle_async_request(request)
        self.first_tries -= 1
        return response


def numbers(group: Group) -> list[object]:
    """Returns what a group was trained on."""
    found: list[object] = [group.position]
    for each in group.completions:
        found += [
            each.token_ids.tolist(),
            each.logprobs.tolist(),
            each.reward,
            each.weight_versions,
        ]
    return found


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_disturbed_run_has_the_weights_of_a_calm_one_after_every_step(
    settings: Callable[..., Config], staleness: int
) -> None:
    words = ["--reproducible", "true", "--trainer.max_staleness", str(staleness)]
    calm, disturbed = (settings(*words, "--trainer.max_steps", str(STEPS)) for _ in range(2))
    train_in_process(calm, quiet())
    train_in_process(disturbed, quiet(), Disturbed)
    assert metrics(disturbed)[-1]["dropped"] == {"generation": 2}

    sums = [line["weights_checksum"] for line in metrics(calm)]
    assert [line["weights_checksum"] for line in metrics(disturbed)] == sums
    assert len(set(sums)) == STEPS
    groups = stored(calm)
    assert [numbers(group) for group in stored(disturbed)] == [numbers(group) for group in groups]
    for group in groups:
        wanted = max(0, group.position // FRESH - staleness)
        spans = chain.from_iterable(each.weight_versions for each in group.completions)
        assert {version for version, _, _ in spans} == {wanted}


def test_engines_that_the_run_did_not_start_are_refused(settings: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError) as caught:
        train_in_process(settings("--reproducible", "true"), quiet(), engine="http://127.0.0.1:9")
    assert caught.value.field == "engine"
