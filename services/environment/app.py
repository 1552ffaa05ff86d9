"""HTTP API of the environment-server: episodes for the trainer, and the gateway for programs that
talk to a model.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from common import Json
from common.errors import InvalidInput, ServiceError, Unauthorized
from common.wire import codec
from common.wire.schemas import EpisodeRequest, Episodes
from services.environment.dialects import DIALECTS, MESSAGES, Dialect, read_call
from services.environment.messages import written
from services.environment.outcome import EpisodeFailed, parse_reward
from services.environment.program_requests import REWARD, FollowedRequest, Following
from services.environment.service import MAX_EPISODES, EpisodeService
from services.environment.session import Session
from services.http.app import Service, create_app, read_json
from services.http.disconnect import cancel_on_disconnect
from services.http.errors import error_response
from services.http.openapi import JSON, OBJECT, described, struct_schema

_Route = Callable[..., Awaitable[Response]]
SESSIONS = "/sessions/"
EVENTS = "text/event-stream"
_MODEL = {
    "id": "policy",
    "object": "model",
    "type": "model",
    "display_name": "policy",
    "owned_by": "policy",
    "created": 0,
    "created_at": "1970-01-01T00:00:00Z",
}
MODELS = {
    "object": "list",
    "data": [_MODEL],
    "has_more": False,
    "first_id": "policy",
    "last_id": "policy",
}
"""The list of models, as OpenAI's and Anthropic's libraries read it."""
_REWARD = {"type": ["number", "object"]}
MAX_CALLS = 4096
"""Maximum concurrent calls of the gateway."""


def create_environment_app(
    service: EpisodeService, max_body_bytes: int = 256 << 20, metrics: Any = None, nodes: int = 1
) -> Service:
    """Creates the app of the environment-server, one of several nodes; the app closes `service`
    when it ends.
    """

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.close()

    app = create_app(
        "environment-server",
        not_ready=service.problem,
        lifespan=lifespan,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
        max_requests=MAX_EPISODES + MAX_CALLS,
        keyed_path=SESSIONS,
    )
    app.entrance = Following(app.entrance, service.session)

    # First, since routes are tried in order and most requests are for these.
    for dialect in DIALECTS:
        _gateway_route(app, service, dialect)

    @app.post(
        "/episodes",
        **described(answer=struct_schema(Episodes), writes=(JSON, codec.MSGPACK), fails=(409,)),
    )
    async def episodes(body: EpisodeRequest, request: Request) -> Response:
        """Runs n episodes of a task; a repeated request gets the same episodes.

        `Accept: application/msgpack` for msgpack.
        """
        played = Episodes(await service.episodes(body))
        if codec.MSGPACK in request.headers.get("accept", ""):
            return Response(codec.encode(played), media_type=codec.MSGPACK)
        return JSONResponse(codec.plain(played))

    @app.delete("/episodes/{request_id}", **described(fails=(404,)))
    async def delete(request_id: str) -> dict[str, str]:
        """Ends the episodes of a request, and forgets it."""
        service.delete(request_id)
        return {"status": "deleted"}

    @app.get("/environments")
    async def environments() -> list[Json]:
        """The served environments and their tools."""
        return service.environments()

    @app.get("/stats")
    async def stats() -> Json:
        """Episodes so far by status, running episodes, hung calls, and the server's number of
        nodes.
        """
        return service.stats() | {"load": app.state.load.stats(), "nodes": nodes}

    _session_routes(app, service)

    @app.post(f"{SESSIONS}{{session}}{REWARD}", **described(_REWARD, OBJECT, fails=(404, 409, 410)))
    async def reward(session: str, request: Request) -> Response:
        """Takes the reward of this episode's program, a number or a mapping of its parts, and ends
        the session.
        """
        graded = _session(service, session, request)
        content = await read_json(request)
        try:
            parse_reward(content, "the reward is")
        except EpisodeFailed as error:
            raise InvalidInput(
                str(error), field="body", value=content, remedy='send 1.0 or {"part": 1.0}'
            ) from None
        graded.grade(content)
        return JSONResponse({"status": "graded"})

    return app


def _session_routes(app: Service, service: EpisodeService) -> None:
    """Adds the routes of a session that do not sample."""
    base = f"{SESSIONS}{{session}}/v1"

    @app.get(f"{base}/models", **described(answer=OBJECT, fails=(404, 410)))
    async def models(session: str, request: Request) -> Response:
        """The one model of a session, for clients that ask before they call."""
        _session(service, session, request)
        return JSONResponse(MODELS)

    @app.get(f"{base}/models/{{name:path}}", **described(answer=OBJECT, fails=(404, 410)))
    async def model(session: str, name: str, request: Request) -> Response:
        """A model by any name: calls to all of them are answered by the policy."""
        _session(service, session, request)
        return JSONResponse(_MODEL | {"id": name})

    async def count_tokens(session: str, request: Request) -> Response:
        """The number of tokens that this call would send to the engine."""
        called = _session(service, session, request)
        parsed = read_call(await read_json(request), MESSAGES)
        tokens = called.count_tokens(parsed.messages, parsed.tools)
        return JSONResponse({"input_tokens": tokens})

    _add_call(app, "messages/count_tokens", count_tokens, MESSAGES)


def _gateway_route(app: Service, service: EpisodeService, dialect: Dialect) -> None:
    """Adds the route of one of the session APIs."""
    count = service.calls.labels(dialect.path)

    async def call(session: str, request: Request) -> Response:
        """Answers a call of this episode's program. The session's key is its name."""
        called = _session(service, session, request)
        followed: FollowedRequest = request.scope["followed"]
        count.inc()
        try:
            body = await read_json(request)
            key = _request_key(body, dialect)
            parsed = read_call(body, dialect, called.chat)
            called.chat = parsed.chat
            followed.key = key
            # A call that its client leaves goes on, and counts as unanswered.
            answer = await cancel_on_disconnect(
                request,
                called.call(
                    parsed.messages,
                    parsed.tools,
                    key,
                    is_retry=followed.is_retry,
                    options=parsed.options,
                ),
            )
        except InvalidInput as error:
            service.refuse(called, error)
            raise
        answer.call.has_answer = followed.has_answer
        content = dialect.write(answer, parsed, secrets.token_hex(16))
        if parsed.streams:
            # As one body with its length, since clients stop reading at the last event.
            events = "".join(dialect.events(content, parsed))
            return Response(events, media_type=EVENTS)
        return Response(_json(content), media_type=JSON)

    _add_call(app, dialect.path, call, dialect)


def _add_call(app: Service, path: str, route: _Route, dialect: Dialect) -> None:
    """Adds a call of a session. The message of its errors has field, value and remedy too, since it
    is the only part that client libraries show.
    """

    @wraps(route)
    async def answered(session: str, request: Request) -> Response:
        try:
            return await route(session=session, request=request)
        except ServiceError as error:
            error.message = str(error)
            return error_response(error, request.scope)

    app.add_bare_route(
        f"{SESSIONS}{{session}}/v1/{path}",
        answered,
        **described(dialect.body, OBJECT, writes=(JSON, EVENTS), fails=(400, 404, 410)),
    )


def _json(content: Json) -> bytes:
    try:
        return orjson.dumps(content)
    except TypeError:  # an integer of more than 64 bits in the arguments of a tool call
        return json.dumps(content).encode()


def _request_key(body: Any, dialect: Dialect) -> str:
    """Returns a key that is the same for equal requests. Raises InvalidInput."""
    content = written(body, orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(dialect.path.encode() + content, digest_size=16).hexdigest()


def _session(service: EpisodeService, name: str, request: Request) -> Session:
    """Returns the session that a request is for. Raises Unauthorized unless the request has the
    session's key, in OpenAI's or Anthropic's header; SessionClosed or NotFound.
    """
    bearer = request.headers.get("authorization", "").partition(" ")[2]
    sent = request.headers.get("x-api-key") or bearer
    if not hmac.compare_digest(sent.encode(), name.encode()):
        raise Unauthorized(
            "the key is not this session's",
            remedy="set OPENAI_API_KEY (or ANTHROPIC_API_KEY) as the episode was started with",
        )
    return service.session(name)
