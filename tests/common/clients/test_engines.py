"""A call to engines lasts as long as they generate, and no longer."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from aiohttp import web

from common.clients import base
from common.clients.base import Client, Unreachable
from common.clients.engines import EngineLoad, Engines
from common.clients.rollout import RolloutClient
from common.errors import Overloaded
from common.process import progress
from services.http.app import create_app, listen, serving
from tests.simulation.virtual_time import simulated
from tests.support.engines.modelled_engine import modelled
from tests.support.processes.ports import free_port
from trainer.rollouts.engine_room import EngineRoom

LIMIT_S = 3.0
TOKENS = 20
ONE: dict[str, Any] = {"n": 1, "max_new_tokens": TOKENS, "temperature": 1.0, "stop_token_ids": []}


def load(running: int, waiting: int, slots: int = 8, **fields: Any) -> dict[str, Any]:
    return {
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "max_running_requests": slots,
        **fields,
    }


def engines_that(answer: Callable[[httpx.Request], Any], urls: list[str]) -> Engines:
    """Returns engines that answer with a list of loads."""

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/workers":
            workers = [{"id": url, "url": url, "is_healthy": "sick" not in url} for url in urls]
            return httpx.Response(200, json={"workers": workers})
        return httpx.Response(200, json={"loads": answer(request)})

    return Engines(Client("router", "http://router", transport=httpx.MockTransport(respond)).get)


@pytest.mark.parametrize(
    ("running", "waiting", "slots", "room"),
    [
        (0, 0, 8, 10),  # all slots, and a quarter of them more that wait
        (8, 0, 8, 2),
        (8, 2, 8, 0),
        (4, 1, 8, 0),  # its memory is full: four at once
        (4, 9, 8, 0),
        (0, 4, 8, 6),  # it computes their prompts
        (5, 0, 0, float("inf")),  # another server, which does not say how many it takes
    ],
)
def test_the_room_of_an_engine(running: int, waiting: int, slots: int, room: float) -> None:
    assert EngineLoad(**load(running, waiting, slots)).room == room


async def test_room_is_that_of_all_healthy_engines_and_follows_their_number() -> None:
    urls = ["http://a", "http://b/", "http://sick"]
    engines = engines_that(lambda _: [load(0, 0), load(8, 0)], urls)
    assert await engines.room() == 24
    urls.append("http://c")
    assert await engines.room() == 36
    urls.clear()
    assert await engines.room() == float("inf")


async def test_progress_is_a_token_and_no_longer_queue() -> None:
    said = load(2, 0, num_used_tokens=100)
    engines = engines_that(lambda _: [said], ["http://a"])

    async def grows() -> bool:
        before = engines.progress
        await engines.look(0.0)
        return engines.progress > before

    assert not await grows(), "nothing is known of the time before the first look"
    assert not await grows()
    said["num_waiting_reqs"] = 5
    assert not await grows()
    said["num_used_tokens"] = 102
    assert await grows()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("groups", "limit_s"), [(128, 3.0), pytest.param(512, 12.0, marks=pytest.mark.slow)]
)
async def test_answers_may_queue_for_longer_than_the_limit_while_the_engine_generates(
    groups: int, limit_s: float
) -> None:
    """The groups of a step, sent at once to an engine that decodes an eighth of them."""
    async with (
        modelled(slots=groups // 8, step_s=limit_s / 60) as served,
        RolloutClient("rollout-server", served.url, deadline_s=limit_s) as client,
    ):
        began = time.monotonic()
        others = progress.of_others()
        answers = await asyncio.gather(*(client.answers([1], **ONE) for _ in range(groups)))
        assert len(answers) == groups
        assert time.monotonic() - began > 2 * limit_s
        assert progress.of_others() > others, "the training loop sees that the engines work"


@pytest.mark.integration
async def test_one_answer_may_take_longer_than_the_limit() -> None:
    async with (
        modelled(slots=4, step_s=3 * LIMIT_S / TOKENS) as served,
        RolloutClient("rollout-server", served.url, deadline_s=LIMIT_S) as client,
    ):
        (answer,) = await client.answers([1], **ONE)
        assert len(answer["output_ids"]) == TOKENS


@pytest.mark.integration
async def test_an_engine_that_hangs_is_given_up_after_the_limit() -> None:
    async with (
        modelled(slots=4) as served,
        RolloutClient("rollout-server", served.url, deadline_s=LIMIT_S) as client,
    ):
        served.hang()
        with pytest.raises(Unreachable) as caught:
            await client.answers([1], **ONE)
        assert caught.value.about == {"service": "rollout-server", "problem": "silent"}


@pytest.mark.integration
async def test_groups_wait_in_the_collector_and_not_in_the_engine() -> None:
    """However many there are, no engine gets more than a quarter beyond its slots, and none is
    left without work."""
    async with (
        modelled(slots=64, shortest=0.1) as served,
        RolloutClient("rollout-server", served.url, deadline_s=LIMIT_S) as client,
    ):
        room = EngineRoom(client.engines)
        loads: list[tuple[int, int]] = []

        async def group() -> None:
            async with room.enter(4):
                await client.answers([1], **{**ONE, "n": 4, "max_new_tokens": 150})

        async def watch() -> None:
            while True:
                await asyncio.sleep(0.05)
                loads.append((len(served.engine._running), len(served.engine._waiting)))

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(group() for _ in range(60)))
        watching.cancel()
        assert max(running + waiting for running, waiting in loads) <= 64 * 1.25 + 4
        busy = [running for running, _ in loads[4 : len(loads) * 2 // 3]]
        assert sum(busy) / len(busy) > 60


async def test_groups_that_end_make_room_without_another_look() -> None:
    looks = 0

    def idle(_: httpx.Request) -> list[dict[str, Any]]:
        nonlocal looks
        looks += 1
        return [load(0, 0, slots=8)]

    room = EngineRoom(engines_that(idle, ["http://a"]))
    for _ in range(20):
        async with room.enter(8):
            pass
    assert looks == 1


def test_an_answer_on_its_way_during_a_look_makes_room_once() -> None:
    said = load(0, 0, slots=8)  # room for ten, two of which wait
    room = EngineRoom(engines_that(lambda _: [said], ["http://a"]))
    inside: list[str] = []

    async def group(name: str, answered: asyncio.Event) -> None:
        async with room.enter(10):
            inside.append(name)
            await answered.wait()

    async def play() -> None:
        events = [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.create_task(group("first", events[0]))]
        await asyncio.sleep(2)  # the engine has them, and ends them: the look finds it empty
        tasks.append(asyncio.create_task(group("second", events[1])))
        await asyncio.sleep(0.2)
        assert inside == ["first", "second"]
        events[0].set()
        said.update(load(8, 2, slots=8))  # the second group has arrived
        tasks.append(asyncio.create_task(group("third", events[2])))
        await asyncio.sleep(2)
        assert inside == ["first", "second"]
        said.update(load(0, 0, slots=8))
        events[1].set()
        await asyncio.sleep(2)
        assert inside == ["first", "second", "third"]
        events[2].set()
        await asyncio.gather(*tasks)

    with simulated(0) as loop:
        loop.run_until_complete(play())


async def test_groups_do_not_wait_for_servers_that_do_not_say_what_they_do() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(404, json={"detail": "no"}))
    room = EngineRoom(Engines(Client("router", "http://x", transport=transport).get))
    async with asyncio.timeout(300):
        for _ in range(1000):
            async with room.enter(16):
                pass


@pytest.mark.integration
async def test_a_request_that_no_engine_has_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of its engine is gone, and the router waits for it."""
    monkeypatch.setattr(base, "_SILENT_S", 0.2)
    calls = 0

    async def workers(_: web.Request) -> web.Response:
        worker = {"id": "1", "url": served.url, "is_healthy": True}
        return web.json_response({"workers": [worker]})

    async def generate(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.sleep(60)
        return await served.engine.generate(request)

    app = web.Application()
    app.router.add_get("/workers", workers)
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    async with modelled(slots=4) as served:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with RolloutClient("rollout-server", url, deadline_s=60) as client:
            async with asyncio.timeout(30):
                await client.answers([1], **ONE)
        assert calls >= 2
        await runner.cleanup()


@pytest.mark.integration
async def test_a_request_that_makes_engines_crash_is_not_repeated_for_ever() -> None:
    """Other engines generate all the while."""
    attempts = tokens = 0

    async def respond(request: httpx.Request) -> httpx.Response:
        nonlocal attempts, tokens
        if request.url.path == "/workers":
            return httpx.Response(404)
        if request.url.path == "/v1/loads":
            tokens += 1
            return httpx.Response(200, json={"loads": [load(1, 0, computed_tokens=tokens)]})
        attempts += 1
        await asyncio.sleep(0.65 * limit_s)  # two looks
        return httpx.Response(502)

    limit_s = 4.0
    transport = httpx.MockTransport(respond)
    async with RolloutClient("router", "http://x", transport=transport, deadline_s=limit_s) as made:
        with pytest.raises(Unreachable):
            await made.answers([1], **ONE)
    assert 3 <= attempts <= 5


@pytest.mark.integration
@pytest.mark.parametrize("advances", [True, False])
async def test_a_service_that_gets_on_with_a_call_may_take_longer_than_its_limit(
    advances: bool,
) -> None:
    app = create_app("slow")

    @app.post("/work")
    async def work() -> dict[str, str]:
        for _ in range(25):
            await asyncio.sleep(LIMIT_S / 10)
            if advances:
                progress.moved()
        return {"status": "done"}

    port = free_port()
    async with (
        serving(app, listen("127.0.0.1", port)),
        Client("slow", f"http://127.0.0.1:{port}", deadline_s=LIMIT_S) as client,
    ):
        if advances:
            assert (await client.request("POST", "/work")).json() == {"status": "done"}
        else:
            with pytest.raises(Unreachable):
                await client.request("POST", "/work")


@pytest.mark.integration
@pytest.mark.parametrize("advances", [True, False])
async def test_a_full_service_that_empties_its_queue_is_waited_for(advances: bool) -> None:
    app = create_app("full")
    limit_s = 4.0  # several of its Retry-After
    full_until = time.monotonic() + 1.5 * limit_s

    @app.post("/work")
    async def work() -> dict[str, str]:
        if advances:
            progress.moved()
        if time.monotonic() < full_until:
            raise Overloaded("its queue is full")
        return {"status": "done"}

    port = free_port()
    async with (
        serving(app, listen("127.0.0.1", port)),
        Client("full", f"http://127.0.0.1:{port}", deadline_s=limit_s) as client,
    ):
        if advances:
            assert (await client.request("POST", "/work")).json() == {"status": "done"}
        else:
            with pytest.raises(Unreachable):
                await client.request("POST", "/work")
