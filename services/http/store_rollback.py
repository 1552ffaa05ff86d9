"""Refuses requests when the service's store is not the one that the client has seen, or has gone
back behind it.
"""

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import Conflict, ServiceError
from common.wire.headers import STORE_HEADER, StoreMark
from services.http.errors import error_response
from services.http.sqlite_store import SqliteStore


class GoingBack:
    """Sends the mark of the store with every answer, and refuses a client that has seen a later
    one: groups would be handed out a second time, and acknowledged ones would be missing.

    A request with the mark of another store is refused, too. Its client asks again with the new
    mark; a copy that arrives late does not, and the new store could not tell that it is one.
    """

    def __init__(self, app: ASGIApp, store: SqliteStore) -> None:
        self.app = app
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        store = self._store
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[STORE_HEADER] = str(store.mark)
            await send(message)

        seen = StoreMark.parse(Headers(scope=scope).get(STORE_HEADER, ""))
        try:
            if seen is not None:
                await self._check(seen)
        except ServiceError as error:  # which no handler of the app would see
            await error_response(error, scope)(scope, receive, marked)
        else:
            await self.app(scope, receive, marked)

    async def _check(self, seen: StoreMark) -> None:
        """Raises ServiceError when the store is another one or earlier than what was seen."""
        mark = self._store.mark
        if mark.identity != seen.identity:
            raise ServiceError(
                "this request was made for a store that is no longer here",
                code="another_store",
                status=503,
                field=STORE_HEADER,
                value=str(seen),
                remedy="send it again with the mark of this answer, or without one",
            )
        if mark.is_behind(seen):
            mark = await asyncio.to_thread(self._store.read_mark)
        if mark.is_behind(seen):
            raise Conflict(
                f"the store has gone back: it has {mark.changes} changes, and this client has seen "
                f"{seen.changes}; its directory was set to an older copy",
                code="gone_back",
                field="state_dir",
                value=str(mark),
                remedy="start the run again: it resumes from its checkpoint, and collects again "
                "what it has not trained on",
            )
