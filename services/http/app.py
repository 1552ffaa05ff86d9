"""The app factory of all services (/health, /metrics, /flush, errors, token, bounded load) and
their server.
"""

import asyncio
import contextlib
import inspect
import logging
import select
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, TypeVar

import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from common import VERSION
from common.errors import ConfigError, InvalidInput, NotReady, ServiceLost, did_you_mean
from common.process import garbage, progress, watchdog
from common.process.logs import event
from common.process.metrics import Metrics
from common.process.security import check_certificate, is_loopback, tls, token
from common.wire import codec
from services.http.admission import BODIES_AT_ONCE, Admission, CallerAuth, Load
from services.http.connections import BoundedConnection
from services.http.errors import add_error_handlers, answer_error
from services.http.openapi import EVERYWHERE, described, errors
from services.http.sqlite_store import SqliteStore
from services.http.store_rollback import GoingBack
from services.http.tracing import RequestTracing

log = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=BaseModel)
SMALL_BYTES = 64 << 10
"""Smaller bodies are parsed in the event loop, larger ones in a thread."""
GRACE_S = 30.0
"""Seconds after SIGTERM in which requests in flight may finish; the rest is then answered with
503."""
_LAST_S = 5.0
_ACCEPTING = 100
"""More rounds of the event loop than a full queue of connections takes, of which each round accepts
100: under a flood, or at the limit of open files, the queue may never be empty."""
_ROUNDS = 16
"""More rounds of the event loop than lie between the acceptance of a connection and the first line
of its handler."""
Hook = Callable[[], object]
"""Its result may be awaitable."""
_HEALTH = {
    "type": "object",
    "properties": {
        "status": {"enum": ["healthy", "unhealthy"]},
        "service": {"type": "string"},
        "reason": {"type": "string"},
        "lost": {"type": "boolean"},
        "progress": {"type": "integer"},
    },
    "required": ["status"],
}


class Service(FastAPI):
    """An app behind the middleware that all services share, which is outside of FastAPI's.

    Bare routes are served right behind it. What FastAPI and Starlette have between there and a
    handler takes longer than a small handler (`python -m benchmarks.agents calls`).
    """

    entrance: ASGIApp
    """The outermost middleware."""
    bare_routes: list[APIRoute]

    def add_bare_route(
        self, path: str, handler: Callable[..., Awaitable[Response]], **options: Any
    ) -> None:
        """Adds a POST whose function gets the request and the path parameters as texts, and returns
        the response: nothing is validated or converted.
        """
        responses = {**self.router.responses, **options.pop("responses", {})}
        route = APIRoute(path, handler, methods=["POST"], responses=responses, **options)
        self.router.routes.append(route)  # for /openapi.json, and for other methods
        self.bare_routes.append(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.entrance(scope, receive, send)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves what the middleware let in."""
        if scope["type"] == "http" and scope["method"] == "POST":
            for route in self.bare_routes:
                match = route.path_regex.match(scope["path"])
                if match is not None:
                    scope.update(app=self, route=route)
                    request = Request(scope, receive)
                    try:
                        response = await route.endpoint(request=request, **match.groupdict())
                    except Exception as error:
                        response = await answer_error(request, error)
                    await response(scope, receive, send)
                    return
        await super().__call__(scope, receive, send)


def create_app(
    name: str,
    *,
    not_ready: Callable[[], str | ServiceLost | None] = lambda: None,
    flush: Hook = lambda: None,
    lifespan: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    metrics: Metrics | None = None,
    max_body_bytes: int = 256 << 20,
    max_requests: int = 256,
    fails: tuple[int, ...] = (),
    open_paths: frozenset[str] = frozenset(),
    access_level: int = logging.INFO,
    keyed_path: str = "",
    store: SqliteStore | None = None,
) -> Service:
    """Returns a FastAPI app with the parts that all services share.

    Args:
        name: name of the service in `/health` and metrics.
        not_ready: returns why the service cannot serve now, or None; decides `/health`. A
            ServiceLost says that it never will.
        flush: makes everything durable; `POST /flush` answers when it is done.
        lifespan: entered before the first request, left after the last.
        metrics: Prometheus metrics; a new set when None.
        max_body_bytes: larger request bodies get 413.
        max_requests: more requests at once get 503, as do bodies of more than `BODIES_AT_ONCE` ×
            `max_body_bytes` in all. The counts are in `app.state.load`.
        fails: error statuses of any call, besides those in `EVERYWHERE`.
        open_paths: paths whose GET needs no token, like `/health`: files without data of a run.
        access_level: log level of successful requests.
        keyed_path: paths with this prefix need no token: their handlers check a key before they
            read a body.
        store: what the service stores; a client that has seen it further on is refused (409).
    """
    metrics = metrics or Metrics(name)
    load = Load(max_requests, BODIES_AT_ONCE * max_body_bytes)

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[None]:
        app.state.draining.clear()
        watchdog.follow(asyncio.get_running_loop())
        async with lifespan() if lifespan else nullcontext():
            yield

    app = Service(
        title=name,
        version=VERSION,
        lifespan=run,
        responses=EVERYWHERE | errors(*fails),
        # Services have their own metrics; looking for OpenTelemetry's in every request takes longer
        # than the router.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.bare_routes = []
    app.router.route_class = _JsonRoute
    app.state.draining = asyncio.Event()
    app.state.metrics = metrics
    app.state.load = load
    inner = GoingBack(app.serve, store) if store else app.serve
    admission = Admission(inner, load, max_body_bytes, metrics)
    # Before Admission: a body without a token is not read.
    caller_auth = CallerAuth(admission, open_paths, keyed_path)
    app.entrance = RequestTracing(caller_auth, metrics, access_level)
    add_error_handlers(app)

    def problem() -> str | ServiceLost | None:
        return "draining: the process is ending" if app.state.draining.is_set() else not_ready()

    metrics.healthy.set_function(lambda: problem() is None)

    @app.get("/health", **described(answer=_HEALTH, statuses=(200, 503)))
    async def health(request: Request) -> Response:
        """200 with `"status": "healthy"` when the service can serve, else 503; callers with the
        token get the reason.

        `"lost"` says that the service will never serve, so that nobody waits for it. While
        `"progress"` grows, the service is still starting, and callers go on waiting.
        """
        reason = problem()
        content: dict[str, object] = {"status": "unhealthy" if reason else "healthy"}
        if request.scope["known"]:
            content["service"] = name
            if reason:
                content["reason"] = str(reason)
                content["lost"] = isinstance(reason, ServiceLost)
                content["progress"] = progress.total()
        return JSONResponse(content, 503 if reason else 200)

    @app.get("/metrics", **described(answer={"type": "string"}, writes=("text/plain",)))
    async def metrics_page() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/where")
    async def where() -> watchdog.Where:
        """What this process is doing: the calls that it waits for, and its stacks."""
        return watchdog.where()

    @app.post("/flush")
    async def flush_now() -> dict[str, str]:
        """Makes everything in this service durable. The trainer calls it before it ends."""
        result = flush()
        if inspect.isawaitable(result):
            await result
        return {"status": "flushed"}

    return app


class _JsonRequest(Request):
    async def json(self) -> Any:
        return await read_json(self)


class _JsonRoute(APIRoute):
    """A route whose JSON body is bounded (`common.wire.codec.parse_json`), and which refuses
    parameters that it does not read, if it reads any.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        known = _parameters(self.dependant)

        async def handle(request: Request) -> Response:
            given = request.query_params if known else {}
            unknown = next((name for name in given if name not in known), None)
            if unknown is not None:
                raise InvalidInput(
                    "there is no such parameter",
                    field=unknown,
                    value=given[unknown],
                    remedy=did_you_mean(unknown, sorted(known)),
                )
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


def _parameters(dependant: Dependant) -> set[str]:
    """Returns the parameters of the address that a route and its dependencies read."""
    names: set[str] = set()
    for parameter in dependant.query_params:
        # One parameter may be a model whose fields are in the address.
        names.update(getattr(parameter.field_info.annotation, "model_fields", [parameter.alias]))
    return names.union(*map(_parameters, dependant.dependencies))


async def read_json(request: Request) -> Any:
    """Returns the JSON body of a request. Raises InvalidInput when it is not JSON in UTF-8, or
    TooLarge.
    """
    body = await request.body()
    if len(body) < SMALL_BYTES:
        return codec.parse_json(body)
    return await asyncio.to_thread(codec.parse_json, body)


async def read_model(request: Request, kind: type[_Model]) -> _Model:
    """Returns the JSON body of a request as a model, for a bare route. Raises what FastAPI does."""
    try:
        return kind.model_validate(await read_json(request))
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


class Server(uvicorn.Server):
    """A uvicorn server that reports "draining" on /health from the first SIGTERM until all requests
    are answered.

    Requests that take longer than `GRACE_S` get 503.
    """

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        self.app = app
        self.port = port
        self.listening = set[socket.socket]()
        files = tls()
        check_certificate(files)
        self.url = f"{files.scheme}://{host}:{port}"
        if token() is None and not is_loopback(host):
            log.warning(
                "anyone who can reach %s can call %s: set the same API_TOKEN in every task "
                "(SECURITY.md)",
                self.url,
                app.title,
            )
        config = uvicorn.Config(
            app,
            host,
            port,
            http=BoundedConnection,
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            # After that uvicorn drops requests, each with a traceback.
            timeout_graceful_shutdown=int(GRACE_S + _LAST_S),
            timeout_keep_alive=30,
            ssl_certfile=files.certificate or None,
            ssl_keyfile=files.key or None,
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.app.state.draining.set()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.update(sockets or ())
        _running[self.port] = self

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        _running.pop(self.port, None)
        timer = asyncio.get_running_loop().call_later(GRACE_S, self.app.state.load.end)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


_running: dict[int, Server] = {}
"""The servers of this process, by port."""


@asynccontextmanager
async def serving_also(port: int, sock: socket.socket) -> AsyncIterator[None]:
    """Lets this process's server at `port` also serve at another listening socket, and closes that
    one at the end.
    """
    server = _running[port]
    _send_at_once(sock)

    def connect() -> BoundedConnection:
        return BoundedConnection(server.config, server.server_state, server.lifespan.state)

    loop = asyncio.get_running_loop()
    other = await loop.create_server(connect, sock=sock, ssl=server.config.ssl)
    server.listening.add(sock)
    try:
        yield
    finally:
        server.listening.discard(sock)
        other.close()


async def until_read() -> None:
    """Returns when this process's servers have read what had reached this machine before."""
    waiting = select.poll()
    for server in _running.values():
        for sock in server.listening:
            if sock.fileno() >= 0:  # it is closed before its server is forgotten
                waiting.register(sock, select.POLLIN)
    # A socket that listens can be read while connections wait to be accepted.
    for _ in range(_ACCEPTING):
        if not waiting.poll(0):
            break
        await asyncio.sleep(0)
    for _ in range(_ROUNDS):
        await asyncio.sleep(0)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises ConfigError for a port in use."""
    try:
        sock = socket.create_server((host, port), family=socket.AF_INET, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            field="port",
            value=port,
            remedy="end the process that uses the port, or set another port; "
            "the host must be an address of this machine",
        ) from None

    _send_at_once(sock)
    sock.setblocking(False)
    return sock


def free_port() -> int:
    """Returns a port of this machine on which nothing listens now."""
    with listen("", 0) as found:
        return int(found.getsockname()[1])


def _send_at_once(sock: socket.socket) -> None:
    # asyncio sets TCP_NODELAY only if the socket has an explicit protocol; otherwise responses take
    # 40 ms (Nagle).
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@asynccontextmanager
async def serving(app: FastAPI, sock: socket.socket) -> AsyncIterator[None]:
    """Serves an app and runs its lifespan in the caller's event loop. Raises NotReady when the
    lifespan fails.
    """
    host, port = sock.getsockname()
    server = Server(app, host, port)

    async def until_its_end() -> None:
        # Uvicorn's reaction to a lifespan that fails would end the caller's loop.
        with contextlib.suppress(SystemExit):
            await server.serve(sockets=[sock])

    task = asyncio.create_task(until_its_end())
    try:
        while not server.started and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if not server.started:
            sock.close()
            raise _did_not_start(app)
        yield
    finally:
        server.should_exit = True
        await task


def serve(app: FastAPI, host: str, port: int, settings: str = "") -> None:
    """Serves until SIGTERM or SIGINT, then answers the requests in flight. Raises ConfigError for a
    port in use.

    The log line with the address shows `settings`, the most important ones as `name=value`.
    """
    sock = listen(host, port)
    server = Server(app, host, port)
    watchdog.start()

    def end(_sig: int, _frame: object) -> None:
        """Ends the startup; uvicorn raises the signal again after a clean shutdown, which is
        ignored.
        """
        if not server.should_exit:
            raise SystemExit(0)

    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, end)
    shown = f": {settings}" if settings else ""
    started = event("started")
    log.info("%s %s listens on %s%s", app.title, VERSION, server.url, shown, extra=started)
    garbage.collect_less_often(garbage.OF_SERVICE)
    uvloop.run(server.serve(sockets=[sock]))
    if not server.started:
        raise _did_not_start(app)


def _did_not_start(app: FastAPI) -> NotReady:
    return NotReady(f"{app.title} did not start", remedy="see the log above")
