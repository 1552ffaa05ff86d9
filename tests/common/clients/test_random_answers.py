"""What clients make of loads, marks and versions, over random ones, by definitions that are written
anew.
"""

import random
import time
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise, product
from math import ceil

import httpx
import pytest

from common.clients.base import Client
from common.clients.engines import EngineLoad
from common.clients.rollout import BASE_VERSION, GenerationFailed, completion_from_answer
from common.errors import ServiceError
from common.wire.headers import STORE_HEADER, StoreMark
from tests.simulation.virtual_time import simulated


def test_the_room_of_any_engine() -> None:
    """A quarter more than it decodes at once, of which the last is a whole one."""
    for slots, running, waiting in product(range(1, 14), range(14), range(4)):
        load = EngineLoad(
            num_running_reqs=running, num_waiting_reqs=waiting, max_running_requests=slots
        )
        # Where some run and others wait, there is no room for more at once, whatever its slots say.
        at_once = running if running and waiting else slots
        wanted = ceil(Fraction(5, 4) * at_once)
        assert load.room == max(0, wanted - running - waiting), load


@pytest.mark.parametrize("seed", range(5))
async def test_the_latest_mark_of_a_store_is_sent_whatever_answers_overtake(seed: int) -> None:
    draw = random.Random(seed)
    marks = [StoreMark(draw.choice([1, 1, 1, 2]), draw.randrange(6)) for _ in range(20)]
    answers = iter(marks)
    sent: list[StoreMark | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(StoreMark.parse(request.headers.get(STORE_HEADER, "")))
        # A refusal says how far the store is, too.
        status = draw.choice([200, 200, 404])
        return httpx.Response(status, headers={STORE_HEADER: str(next(answers))})

    async with Client("store", "http://store", transport=httpx.MockTransport(answer)) as client:
        for _ in marks:
            with suppress(ServiceError):
                await client.request("GET", "/")

    known: StoreMark | None = None
    wanted: list[StoreMark | None] = []
    for mark in marks:
        wanted.append(known)
        is_of_another_store = known is None or known.identity != mark.identity
        if is_of_another_store or (known is not None and mark.changes >= known.changes):
            known = mark
    assert sent == wanted


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_nobody_returns_before_the_time_that_was_asked_for(
    chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    at: list[float] = []

    async def play() -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path != "/work":  # whether the service gets on
                return httpx.Response(200)
            at.append(time.monotonic())
            if len(at) < 4:
                return httpx.Response(503, headers={"retry-after": "7"})
            return httpx.Response(200)

        transport = httpx.MockTransport(answer)
        async with Client("thing", "http://thing", transport=transport, deadline_s=400) as client:
            await client.request("GET", "/work")

    with simulated(0) as loop:
        monkeypatch.setattr(random, "uniform", lambda low, high: low + chance * (high - low))
        loop.run_until_complete(play())
    pauses = [later - earlier for earlier, later in pairwise(at)]
    assert len(pauses) == 3
    assert min(pauses) >= 7


@pytest.mark.parametrize("seed", range(10))
def test_an_adapter_answers_only_on_the_weights_of_the_start(seed: int) -> None:
    draw = random.Random(seed)
    labels = draw.choices([BASE_VERSION, "3"], weights=[3, 1], k=draw.randint(1, 3))
    spans = [
        {"version": label, "start": place, "end": place + 1} for place, label in enumerate(labels)
    ]
    answer = {
        "text": "",
        "output_ids": list(range(len(spans))),
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-1.0, token, None] for token in range(len(spans))],
            "weight_version": labels[-1],
            "weight_versions": spans,
        },
    }
    if {*labels} == {BASE_VERSION}:
        found = completion_from_answer(answer, adapter_version=7)
        assert found.weight_versions == [(7, 0, len(spans))]
    else:
        with pytest.raises(GenerationFailed):
            completion_from_answer(answer, adapter_version=7)
