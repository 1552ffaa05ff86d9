"""A store that is set back to an older copy is noticed by both sides and named."""

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from common.clients.base import Client
from common.clients.data import DataClient
from common.clients.replay import ReplayClient
from common.errors import ServiceError
from common.settings.config import Config
from common.settings.sections import ReplaySection
from common.wire.headers import STORE_HEADER, StoreMark
from common.wire.schemas import Prompt, SampleRequest, TakeRequest
from services.data.app import create_data_app
from services.replay.app import create_replay_app
from tests.support.batches.replay_groups import make_group

PROMPTS = [Prompt(id=f"p{i}", prompt=f"{i} + 1?", ground_truth=str(i + 1)) for i in range(9)]


def replay_app(state: Path) -> FastAPI:
    return create_replay_app(ReplaySection(), state)


def data_app(state: Path) -> FastAPI:
    return create_data_app(Config(state_dir=state), PROMPTS, [])


class Switch(httpx.AsyncBaseTransport):
    """Leads a client to one service after another, as an address does after a restart."""

    app: FastAPI

    def __init__(self) -> None:
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return await transport.handle_async_request(request)


async def work(client: Client, number: int) -> None:
    """Makes changes in the store of either service."""
    if isinstance(client, ReplayClient):
        await client.add([make_group(f"g{number}", number, number)])
        await client.take(TakeRequest(count=1, request_id=f"take-{number}"))
        await client.ack([f"g{number}"])
    else:
        assert isinstance(client, DataClient)
        await client.prompts(2, f"draw-{number}")


REPLAY_CALLS: list[Callable[[ReplayClient], Awaitable[object]]] = [
    lambda client: client.take(TakeRequest(count=1, request_id="later")),
    lambda client: client.add([make_group("new")]),
    lambda client: client.ack(["g0"]),
    lambda client: client.sample(SampleRequest(count=1)),
    lambda client: client.set_priorities({"g0": 1.0}),
    lambda client: client.reset_fresh(),
    lambda client: client.group("g0"),
    lambda client: client.stats(),
]
DATA_CALLS: list[Callable[[DataClient], Awaitable[object]]] = [
    lambda client: client.prompts(2, "later"),
    lambda client: client.seek(0),
    lambda client: client.stats(),
]


@pytest.mark.parametrize(
    ("make_app", "kind", "call"),
    [
        *((replay_app, ReplayClient, call) for call in REPLAY_CALLS),
        *((data_app, DataClient, call) for call in DATA_CALLS),
    ],
)
async def test_every_call_after_the_store_has_gone_back_is_refused(
    make_app: Callable[[Path], FastAPI],
    kind: type[Client],
    call: Callable[[Client], Awaitable[object]],
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    switch = Switch()
    async with kind("service", "http://x", transport=switch, deadline_s=30) as client:
        switch.app = make_app(state)
        async with switch.app.router.lifespan_context(switch.app):
            await work(client, 0)
        shutil.copytree(state, tmp_path / "snapshot")
        switch.app = make_app(state)
        async with switch.app.router.lifespan_context(switch.app):
            await work(client, 1)
        shutil.rmtree(state)
        shutil.copytree(tmp_path / "snapshot", state)

        switch.app = make_app(state)
        async with switch.app.router.lifespan_context(switch.app):
            with pytest.raises(ServiceError) as error:
                await call(client)
            async with kind("service", "http://x", transport=switch) as new:
                await work(new, 2)  # a run that starts again has seen nothing of what is gone
    assert (error.value.status, error.value.code) == (409, "gone_back")
    assert "start the run again" in str(error.value.remedy)


async def test_a_copy_of_a_call_that_a_lost_store_has_answered_changes_nothing(
    tmp_path: Path,
) -> None:
    """The new store does not know the call, and would hand out groups to nobody."""
    switch = Switch()
    async with ReplayClient("service", "http://x", transport=switch, deadline_s=30) as client:
        switch.app = replay_app(tmp_path / "lost")
        async with switch.app.router.lifespan_context(switch.app):
            await client.add([make_group("g0", 0, 0), make_group("g1", 0, 1)])
            await client.take(TakeRequest(count=1, request_id="take-0"))
            await client.take(TakeRequest(count=1, request_id="take-1"))
        copied = switch.requests[-1]

        switch.app = replay_app(tmp_path / "new")
        async with switch.app.router.lifespan_context(switch.app):
            await client.add([make_group("g2", 0, 2)])  # it is refused, and sent again
            late = await switch.handle_async_request(copied)
            answer = await client.take(TakeRequest(count=1, request_id="take-2"))
    await late.aread()
    assert (late.status_code, late.json()["error"]["code"]) == (503, "another_store")
    assert [group.id for group in answer.groups] == ["g2"]


def removed(state: Path, snapshot: Path) -> None:
    shutil.rmtree(state)


def replaced(state: Path, snapshot: Path) -> None:
    shutil.rmtree(state)
    shutil.copytree(snapshot, state)


def renamed(state: Path, snapshot: Path) -> None:
    state.rename(state.with_name("away"))
    shutil.copytree(snapshot, state)


def file_by_file(state: Path, snapshot: Path) -> None:
    """As rsync does: it writes another file and gives it the name."""
    for file in sorted(each for each in snapshot.rglob("*") if each.is_file()):
        target = state / file.relative_to(snapshot)
        new = target.with_suffix(".tmp")
        shutil.copy(file, new)
        new.replace(target)


def in_place(state: Path, snapshot: Path) -> None:
    shutil.copytree(snapshot, state, dirs_exist_ok=True)


@pytest.mark.parametrize("deed", [removed, replaced, renamed, file_by_file])
@pytest.mark.parametrize(("make_app", "kind"), [(replay_app, ReplayClient), (data_app, DataClient)])
async def test_a_store_replaced_under_the_running_service_is_named_at_the_next_change(
    make_app: Callable[[Path], FastAPI],
    kind: type[Client],
    deed: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    await _replaced(make_app, kind, deed, tmp_path)


async def test_a_replay_store_overwritten_in_place_is_named_at_the_next_change(
    tmp_path: Path,
) -> None:
    await _replaced(replay_app, ReplayClient, in_place, tmp_path)


async def _replaced(
    make_app: Callable[[Path], FastAPI],
    kind: type[Client],
    deed: Callable[[Path, Path], None],
    directory: Path,
) -> None:
    state = directory / "state"
    app = make_app(state)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        kind("service", "http://x", transport=transport, deadline_s=30) as client,
    ):
        await work(client, 0)
        await client.flush()
        shutil.copytree(state, directory / "snapshot")
        await work(client, 1)
        deed(state, directory / "snapshot")
        with pytest.raises(ServiceError) as error:
            await work(client, 2)
    assert (error.value.status, error.value.code) == (500, "replaced")
    assert str(error.value.value).endswith(".db")


async def test_a_store_that_cannot_say_how_far_it_is_answers_why(tmp_path: Path) -> None:
    """The client has seen more than the service, which looks into its file and finds none."""
    app = data_app(tmp_path / "state")
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(base_url="http://x", transport=transport) as client,
    ):
        before = await client.get("/prompts")
        mark = StoreMark.parse(before.headers[STORE_HEADER])
        assert mark is not None
        shutil.rmtree(tmp_path / "state")
        seen = {STORE_HEADER: str(mark._replace(changes=mark.changes + 1))}
        answer = await client.get("/prompts", headers=seen)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "replaced")


async def test_a_new_store_is_another_one_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    switch = Switch()
    async with ReplayClient("replay-buffer", "http://x", transport=switch) as client:
        for number, state in enumerate((tmp_path / "one", tmp_path / "two")):
            switch.app = replay_app(state)
            async with switch.app.router.lifespan_context(switch.app):
                await work(client, number)
    assert caplog.text.count("replay-buffer has a new store") == 1
