"""Work for a disconnected client, or in a stopping service, is cancelled; other work is
finished."""

import asyncio

import pytest
from fastapi import FastAPI, Request
from starlette.types import Message

from common.errors import InvalidInput, NotReady
from services.http.disconnect import ClientGone, cancel_on_disconnect


class Connection:
    """A request whose client stays until `close`."""

    def __init__(self) -> None:
        self.app, self._closed = FastAPI(), asyncio.Event()
        self.app.state.draining = False
        self.request = Request({"type": "http", "app": self.app}, self._receive)

    def close(self) -> None:
        self._closed.set()

    async def _receive(self) -> Message:
        await self._closed.wait()
        return {"type": "http.disconnect"}


class Work:
    """Runs until it is cancelled."""

    def __init__(self) -> None:
        self.started, self.cancelled = asyncio.Event(), False

    async def run(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled = True


async def test_work_ends_with_its_result_or_its_error() -> None:
    async def refuse() -> None:
        raise InvalidInput("no")

    connection = Connection()
    assert (
        await cancel_on_disconnect(connection.request, asyncio.sleep(0, "done"), drain=True)
        == "done"
    )
    with pytest.raises(InvalidInput):
        await cancel_on_disconnect(connection.request, refuse())


async def test_work_is_cancelled_when_its_client_has_gone() -> None:
    connection, work = Connection(), Work()
    waiting = asyncio.create_task(cancel_on_disconnect(connection.request, work.run()))
    await work.started.wait()
    connection.close()
    with pytest.raises(ClientGone) as caught:
        await waiting
    assert (caught.value.status, work.cancelled) == (499, True)


async def test_stopping_service_cancels_only_work_that_allows_it() -> None:
    connection, work, longer = Connection(), Work(), Work()
    finished = asyncio.create_task(cancel_on_disconnect(connection.request, longer.run()))
    waiting = asyncio.create_task(cancel_on_disconnect(connection.request, work.run(), drain=True))
    await work.started.wait()
    connection.app.state.draining = True
    with pytest.raises(NotReady, match="stopping"):
        await waiting
    assert work.cancelled
    assert not finished.done()
    finished.cancel()
    await asyncio.gather(finished, return_exceptions=True)
    assert longer.cancelled
