"""JSON bodies that FastAPI reads: text that cannot be sent on is refused here, so that nobody behind has to think of it."""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class _TextRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if _SURROGATE.search(body):
            orjson.loads(body)  # refuses half of a surrogate pair, which Python reads and can never write as UTF-8
        return json.loads(body.decode())


class TextRoute(APIRoute):
    """A route whose JSON body holds text alone: a surrogate without its other half is no JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_TextRequest(request.scope, request.receive))

        return handle
