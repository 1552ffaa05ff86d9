"""Who may call a service: whoever has its token, before anything of the request's body is read."""

from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import Unauthorized
from common.security import accepts, token
from services.http.errors import error_response


class Guarded:
    """Refuses requests without the token with 401, where the run has one.

    `/health` answers without credentials, since probes have none; `scope["known"]` tells it whom it may give details. So do
    `open_paths`, files of a page that asks for the token itself.
    """

    def __init__(self, app: ASGIApp, open_paths: frozenset[str] = frozenset()) -> None:
        self.app, self._token, self._open = app, token(), open_paths | {"/health"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_to_all = self._token is None or scope["type"] == "lifespan"
        known = True if open_to_all else accepts(self._token or "", scope["headers"])
        scope["known"] = known
        if known or (known is None and scope.get("method") == "GET" and scope["path"] in self._open):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = Unauthorized(
                "the token is wrong" if known is False else "a token is needed",
                remedy="send `Authorization: Bearer …` with the API_TOKEN that this service was started with",
            )
            await error_response(error, scope)(scope, receive, send)
