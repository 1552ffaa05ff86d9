"""One client per service.

On a cluster a client has a URL; in the Python API and in tests the same client gets
`httpx.ASGITransport(app)` and calls the service in process. Every connection resolves the host name
again, so a task that restarted at a new address is found.
"""

import asyncio
import json
import logging
import math
import random
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Self, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from common import Json
from common.clients.network import Network, Receive, Reply, Sent, exchange, refuse_compressed
from common.clients.unreachable import Problem, problem_of, problem_of_status
from common.errors import ServiceError, ServiceLost, Unauthorized, shorten
from common.process import logs, progress, watchdog
from common.process.progress import Progress
from common.process.security import authorization
from common.wire.headers import ASKED_ATTEMPT, ATTEMPT, PROGRESS, STORE_HEADER, WORKING, StoreMark

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_RETRIED_STATUSES = frozenset({429, 502, 503, 504, 507})
_FULL = frozenset({429, 503})
"""Among these, the statuses of a service that has too much to do, or does not serve yet."""
_NETWORK_ERRORS = (httpx.TransportError, TimeoutError, OSError)
_MAX_BACKOFF_S = 1.0
_MAX_LOST = 3
"""Attempts of a call that may fail although the service worked on them: a request that makes
engines crash would otherwise be repeated for ever."""
_LOOK_S = 5.0
"""A service that has not said by then how it is, is busy with something else, or hangs."""
_WARN_EVERY_S = 10.0
_SILENT_S = 10.0
"""After this many seconds without a byte, or a quarter of the call's time, a client asks whether
the service works on its request."""
_SAY_AFTER_S = 60.0
"""Seconds after which the log says that a call waits which its service may well work on; then ever
less often."""
_PROGRESS_BYTES = 16 << 10
"""After this many further bytes of a body, sent or received, the time of a call begins again."""
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


class Unreachable(ServiceError):
    """A service gave no usable answer before the call's deadline."""

    status = 503
    code = "unreachable"


async def _not_compressed(response: httpx.Response) -> None:
    try:
        refuse_compressed(response.headers)
    except ServiceError:
        await response.aclose()
        raise


async def _with_id(request: httpx.Request) -> None:
    """Adds the current request id, so that both sides log the same one."""
    request.headers.update(logs.sent_headers())


class Look(NamedTuple):
    """What is known of a request that has no answer yet."""

    works: bool | None = None
    """Whether its service works on it; None when it does not say."""
    progress: int | None = None
    """A number that grows as long as the service gets on with its work; None when it does not
    say."""


class _Patience:
    """The time of one call, all its attempts together: `limit_s` seconds, which begin again with
    every further piece of a body, and whenever the service has got on with its work. What a
    repeated attempt sends or receives again does not count.

    `math.inf`: no limit; the caller cancels the call.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._ends = time.monotonic() + limit_s
        self._most = 0
        self._attempt: asyncio.Timeout | None = None
        self._progress: int | None = None
        """How far the service was with its work, as of the last look."""
        self._was_worked_on = False
        """Whether the service got on while it had this attempt."""
        self._lost = 0
        """Attempts that failed although it did."""
        self.moved_at = 0.0
        """When the last byte of a body moved."""

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds of silence after which the service is asked what it does, and asked again: often
        enough that a call which it works on does not run out of time.
        """
        return min(_SILENT_S, self._limit_s / 4)

    def attempt(self) -> asyncio.Timeout:
        """Returns the time limit for a whole attempt."""
        left = self.left_s
        self._attempt = asyncio.timeout(left if left < math.inf else None)
        self._lost += self._was_worked_on
        self._was_worked_on = False
        return self._attempt

    def end_attempt(self) -> None:
        """Ends the attempt, so that the call makes another one."""
        if self._attempt is not None and not self._attempt.expired():
            self._attempt.reschedule(asyncio.get_running_loop().time())

    def moved(self, size: int) -> None:
        """Records that `size` bytes of this attempt's bodies were sent or received."""
        self.moved_at = time.monotonic()
        if size >= self._most + _PROGRESS_BYTES:
            self._most = size
            self._begin_again()

    def saw(self, progress_of_service: int | None, *, has_attempt: bool) -> None:
        """Records how far the service is with its work, of which this attempt is a part, or which
        it does before it takes the call.
        """
        before = self._progress
        if progress_of_service is None:
            return
        self._progress = progress_of_service
        if before is None or progress_of_service <= before:
            return
        progress.others_moved()
        if has_attempt:
            self._was_worked_on = True
        else:
            self._attempt = None  # it is over
        if self._lost < _MAX_LOST:
            self._begin_again()

    def _begin_again(self) -> None:
        if self._limit_s == math.inf:
            return
        self._ends = time.monotonic() + self._limit_s
        if self._attempt is not None and not self._attempt.expired():
            now = asyncio.get_running_loop().time()
            self._attempt.reschedule(now + self._limit_s)


class _Unhealthy(BaseModel):
    """What `/health` says of a service that cannot serve now."""

    reason: str
    progress: int = 0
    lost: bool = False


class Client:
    """HTTP client of one service. Retries with backoff and jitter for `deadline_s` seconds; raises
    ServiceError.

    Every call through `request` must be idempotent, by nature or through an id made by the client:
    an attempt may succeed although its response is lost. `transport` is `httpx.ASGITransport(app)`
    for a service in this process. `headers` are sent with every call; None: the token of this run,
    which must not reach anyone outside the run.
    """

    start_s = 0.0
    """Seconds in which a service that has never answered may be starting, without a warning."""

    def __init__(
        self,
        service: str,
        base_url: str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        deadline_s: float = 120.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.service = service
        self.base_url = base_url
        self.deadline_s = deadline_s
        self.progress = 0
        """What the service last said of its progress while it was not healthy."""
        self.problem: Problem = ""
        """Why it was not healthy then."""
        self._last_warning = 0.0
        self._made = time.monotonic()
        self._answered = False
        self._store_mark: StoreMark | None = None
        """The latest mark of the service's store that was seen."""
        own = authorization() if headers is None else headers
        self._default_headers = {"accept-encoding": "identity", **own}
        self._transport = transport or Network()
        self.http = httpx.AsyncClient(
            base_url=base_url,
            transport=self._transport,
            headers=self._default_headers,
            event_hooks={"request": [_with_id], "response": [_not_compressed]},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.http.aclose()

    async def request(
        self, method: str, path: str, *, deadline_s: float | None = None, **arguments: Any
    ) -> Reply:
        """Sends a request, with retries, until it succeeds or its deadline passes; honours
        Retry-After. It may take longer as long as the bytes of a large body move, or as the service
        says over another connection that it works on the request and gets on. An attempt on which
        it does not work is ended before.

        All attempts share a request id (`common.process.logs`). Raises Unreachable at the deadline,
        and ServiceError for a response that is not 2xx and not worth a retry.
        """
        identifier = logs.request_id() or logs.new_request_id()
        patience_s = self.deadline_s if deadline_s is None else deadline_s
        with logs.request(identifier), watchdog.waiting(f"{method} {path}", self.service):
            return await self._repeat(method, path, patience_s, arguments)

    @property
    def severity(self) -> int:
        """The level of a log line that the service does not answer."""
        is_new = not self._answered and time.monotonic() - self._made < self.start_s
        return logging.INFO if is_new else logging.WARNING

    async def _repeat(self, method: str, path: str, patience_s: float, arguments: Json) -> Reply:
        loop = asyncio.get_running_loop()
        call = f"{method} {path}"
        start = time.monotonic()
        patience = _Patience(patience_s)
        delay = 0.05
        reason = ""
        problem: Problem = "silent"
        looked = start

        while patience.left_s > 0:
            retry_after_s = 0.0
            attempt = logs.new_request_id()
            watching: list[asyncio.Task[None]] = []
            watch = partial(self._watch_attempt, attempt, call, patience, start=start)
            timer = loop.call_later(patience.silent_s, _begin, watch, watching)
            try:
                async with patience.attempt():
                    try:
                        response = await self._exchange(
                            method, path, attempt, patience=patience, arguments=arguments
                        )
                    finally:
                        timer.cancel()
                        for task in watching:
                            task.cancel()
            except _NETWORK_ERRORS as error:
                self._check_trust(error)
                # An attempt that the deadline cut off says less than the one before.
                if not reason or patience.left_s > 0:
                    reason = str(error) or "no answer"
                    problem = problem_of(error)
            else:
                self._answered = True
                if response.is_success:
                    log.debug("%s %s: %d of %s", method, path, response.status_code, self.service)
                    return response
                if not self._is_retryable(response):
                    raise self._error(response)
                reason = _retry_reason(response)
                problem = problem_of_status(response.status_code)
                retry_after_s = parse_retry_after(response)
                is_full = response.status_code in _FULL
                if is_full and time.monotonic() - looked >= patience.silent_s:
                    looked = time.monotonic()
                    patience.saw((await self._look(attempt)).progress, has_attempt=False)

            self._warn(start, f"{call}: {reason}", problem)
            # With jitter: hundreds of clients that lost the same service must not return at once.
            pause = max(delay * random.uniform(0.5, 1.5), retry_after_s * random.uniform(1.0, 1.5))
            await asyncio.sleep(min(pause, max(0.0, patience.left_s)))
            delay = min(delay * 2, _MAX_BACKOFF_S)

        reason = reason or "no request was sent"
        if patience_s >= watchdog.LONG_S:
            watchdog.deadline_passed(
                f"{self.service} did not answer {call} within {patience_s:.0f} s: {reason}"
            )
        unreachable = Unreachable(
            f"{self.service} did not answer {call} in time: {reason}",
            field="url",
            value=self.base_url,
            remedy=f"look at the log of {self.service}",
            about={"service": self.service, "problem": problem},
        )
        unreachable.request = logs.request_id()
        raise unreachable

    async def _watch_attempt(
        self, attempt: str, call: str, patience: _Patience, start: float
    ) -> None:
        """Says that a call waits, and ends its attempt when the service does not work on it: the
        request or its answer was lost, or the connection leads nowhere. While the service gets on
        with it, its time does not run out.
        """
        say_at = start + _SAY_AFTER_S
        lost = 0
        while True:
            works, got_to = await self._look(attempt)
            now = time.monotonic()
            if works is not False:
                patience.saw(got_to, has_attempt=True)
            # While bytes move the request has not arrived as a whole, and the service does not know
            # it yet.
            if works is False and now - patience.moved_at >= patience.silent_s:
                lost += 1
                self._warn(start, f"{call}, on which it does not work: trying another connection")
                if lost > 1:  # not a request that was just on its way
                    patience.end_attempt()
                    return
            else:
                lost = 0
            if works is None and now >= say_at:
                self._warn(start, f"{call}; its connection is silent")
                say_at = now + (now - start)
            await asyncio.sleep(patience.silent_s)

    async def _look(self, attempt: str) -> Look:
        """Asks the service, over another connection, whether it works on an attempt and gets on."""
        try:
            answer = await self.get("/health", {ASKED_ATTEMPT: attempt})
        except _NETWORK_ERRORS:
            return Look()
        said = answer.headers.get(ASKED_ATTEMPT)
        got_to = answer.headers.get(PROGRESS, "")
        return Look(
            works=None if said is None else said == WORKING,
            progress=int(got_to) if got_to.isdecimal() else None,
        )

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        """Asks the service once, or another one if `path` is a URL. Raises httpx.TransportError, or
        TimeoutError when there is no answer within 5 s.
        """
        url = path if "://" in path else self.base_url.rstrip("/") + path
        sent = Sent(
            "GET",
            url,
            {**self._default_headers, **logs.sent_headers(), **(headers or {})},
            b"",
            connect_s=_LOOK_S,
            moved=lambda _: None,
            receive=None,
        )
        async with asyncio.timeout(_LOOK_S):
            return await exchange(self._transport, sent)

    def _warn(self, start: float, text: str, problem: Problem = "silent") -> None:
        """Logs that a call has waited since `start`: one line for all calls that wait."""
        now = time.monotonic()
        if now - max(start, self._last_warning) > _WARN_EVERY_S:
            waited_s = round(now - start)
            waited = f"waited {waited_s} s so far for {self.service} to answer {text}"
            facts = logs.event("waiting", service=self.service, problem=problem, seconds=waited_s)
            log.log(self.severity, "%s", waited, extra=facts)
            self._last_warning = now

    async def _exchange(
        self,
        method: str,
        path: str,
        attempt: str,
        *,
        patience: _Patience,
        arguments: Json,
    ) -> Reply:
        """Sends a request once, with `content` or `json`, `params` and `headers`; a text is JSON.

        Raises RuntimeError when this client is closed.
        """
        if self.http.is_closed:
            raise RuntimeError(f"the client of {self.service} is closed")
        headers = {
            **self._default_headers,
            **logs.sent_headers(),
            **arguments.get("headers", {}),
            ATTEMPT: attempt,
        }
        if self._store_mark is not None:
            headers[STORE_HEADER] = str(self._store_mark)
        content = arguments.get("content", b"")
        if "json" in arguments:
            # Refuses numbers that are not finite.
            content = json.dumps(
                arguments["json"], ensure_ascii=False, separators=(",", ":"), allow_nan=False
            )
        if isinstance(content, str):
            headers["content-type"] = "application/json"
            content = content.encode()
        if content:
            headers["content-length"] = str(len(content))  # it may be sent in pieces
        url = self.base_url.rstrip("/") + path
        if "params" in arguments:
            url = f"{url}?{httpx.QueryParams(arguments['params'])}"
        answer = await exchange(
            self._transport,
            Sent(
                method,
                url,
                headers,
                content,
                # Its socket may then be silent as long as the attempt.
                connect_s=min(patience.left_s, 10),
                moved=patience.moved,
                receive=self._receiver(path),
            ),
        )
        if STORE_HEADER in answer.headers:
            self._see_store(StoreMark.parse(answer.headers[STORE_HEADER]))
        return answer

    def _receiver(self, path: str) -> Receive | None:
        """Returns what receives the body of a successful answer to this call into a file, if
        anything.
        """
        return None

    def _see_store(self, mark: StoreMark | None) -> None:
        """Remembers how far the service's store is, and logs a warning when it is another one."""
        if mark is None:
            return
        known = self._store_mark
        if known is not None and known.identity != mark.identity:
            log.warning(
                "warning: %s has a new store, without what the one before held: that one was "
                "removed or replaced",
                self.service,
            )
        elif known is not None and known.changes > mark.changes:  # answers overtake one another
            return
        self._store_mark = mark

    def _check_trust(self, error: BaseException | None) -> None:
        """Raises ServiceError for an untrusted certificate, which no retry can fix."""
        while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
            error = error.__cause__ or error.__context__
        if error is not None:
            why = getattr(getattr(error, "certificate_error", error), "verify_message", "") or error
            raise ServiceError(
                f"the certificate of {self.service} is not trusted: {why}",
                code="certificate",
                field="TLS_CA",
                value=self.base_url,
                remedy="set TLS_CA to the authority that signed TLS_CERT, the same in every task "
                "(SECURITY.md)",
            ) from None

    def _is_retryable(self, response: Reply) -> bool:
        """Whether a retry may succeed."""
        return response.status_code in _RETRIED_STATUSES

    def _error(self, response: Reply) -> ServiceError:
        detail = _detail(response)
        status = response.status_code
        message = detail.pop("message")
        if "code" not in detail:
            message = f"HTTP {status}: {message}"
            if status == Unauthorized.status:
                detail = {
                    "code": Unauthorized.code,
                    "remedy": "set the same API_TOKEN in every task",
                }
        detail["about"] = {"service": self.service}
        if detail.get("code") == ServiceLost.code:
            return ServiceLost(f"{self.service}: {message}", **detail)
        error = ServiceError(f"{self.service}: {message}", status=status, **detail)
        error.request = logs.request_id()
        return error

    async def json(self, method: str, path: str, answer: type[_T], **arguments: Any) -> _T:
        """Sends a request and parses the JSON response as `answer`. Raises ServiceError when it has
        another type.
        """
        response = await self.request(method, path, **arguments)
        try:
            adapter: TypeAdapter[_T] = _adapter(answer)
            return adapter.validate_json(response.content)
        except ValidationError as error:
            first = error.errors()[0]
            raise ServiceError(
                f"{self.service}: unexpected answer to {path}: {first['msg']}",
                field=".".join(map(str, first["loc"])) or None,
                value=first["input"],
                remedy="run the same version in every task",
            ) from None

    async def unhealthy_reason(self) -> str | None:
        """Asks `/health` once.

        Returns None for 200, else the reason. Raises ServiceError for a wrong token or certificate,
        and ServiceLost when the service says that it will never be healthy.
        """
        self.progress = 0
        try:
            response = await self.get("/health")
        except _NETWORK_ERRORS as error:
            self._check_trust(error)
            self.problem = problem_of(error)
            return str(error) or type(error).__name__
        if response.is_success:
            return None
        if response.status_code == Unauthorized.status:
            raise self._error(response)
        self.problem = problem_of_status(response.status_code)
        try:
            said = _Unhealthy.model_validate_json(response.content)
        except ValidationError:
            return f"HTTP {response.status_code}"
        self.progress = said.progress
        if said.lost:
            raise ServiceLost(f"{self.service}: {said.reason}", about={"service": self.service})
        return said.reason

    async def flush(self, deadline_s: float | None = None) -> None:
        """Asks the service to make everything durable; returns when that is done."""
        await self.request("POST", "/flush", deadline_s=deadline_s)


def _begin(
    watch: Callable[[], Coroutine[Any, Any, None]], watching: list[asyncio.Task[None]]
) -> None:
    """Begins to watch an attempt that has been silent for long. Most calls are over before, and
    would pay for a task of their own.
    """
    watching.append(asyncio.create_task(watch()))


def _detail(response: Reply) -> Json:
    """Returns message, field, value, remedy and code of an error; only a message when the body has
    another shape, such as SGLang's.
    """
    try:
        body = response.json()
        error = body.get("error")
        if isinstance(error, dict):
            return {name: error.get(name) for name in ("field", "value", "remedy", "code")} | {
                "message": error["message"]
            }
        said = body.get("message") or body.get("error_message")
    except (ValueError, KeyError, AttributeError):
        said = None
    return {"message": shorten(str(said or response.text))}


def _retry_reason(response: Reply) -> str:
    """Returns why a request is repeated: the status and what the service said."""
    detail = _detail(response)
    parts = [detail.get(name) for name in ("message", "value", "remedy")]
    said = " · ".join(str(part) for part in parts if part)
    return f"HTTP {response.status_code}: {shorten(said, 600)}"


def parse_retry_after(response: Reply | httpx.Response) -> float:
    """Returns the seconds of Retry-After; 0 when it is absent or a date."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0


async def wait_healthy(
    clients: Sequence[Client],
    limit_s: float,
    say: Callable[[str], None] = log.info,
    every_s: float = 10.0,
) -> None:
    """Waits until every service is healthy. Reports the others after `every_s` seconds, then ever
    less often.

    A service may take as long as it makes progress (`/health`). Raises Unreachable, naming the
    unhealthy services, after `limit_s` seconds without, and ServiceError at once for a wrong token
    and for a service that will never be healthy.
    """
    waits = {client: Progress(client.service, limit_s, counts=False) for client in clients}
    last_report = time.monotonic()
    while True:
        reasons = await asyncio.gather(*(client.unhealthy_reason() for client in waits))
        unhealthy = dict[Client, str]()
        for client, reason in zip(list(waits), reasons, strict=True):
            if reason is None:
                del waits[client]
            else:
                unhealthy[client] = reason
                if waits[client].saw(client.progress):
                    progress.others_moved()
        if not waits:
            return

        text = "; ".join(
            f"{client.service} at {client.base_url} ({why})" for client, why in unhealthy.items()
        )
        if any(wait.is_stuck for wait in waits.values()):
            message = f"not healthy after {limit_s:g} s without progress: {text}"
            if limit_s >= watchdog.LONG_S:
                watchdog.deadline_passed(message)
            first = next(iter(unhealthy))
            raise Unreachable(
                message,
                remedy="look at the logs of these tasks",
                about={"service": first.service, "problem": first.problem},
            )

        now = time.monotonic()
        waited_s = max(wait.waited_s for wait in waits.values())
        if now - last_report > every_s:
            say(f"waited {waited_s:.0f} s so far for {text}")
            last_report = now
            every_s = min(60.0, 2 * every_s)
        await asyncio.sleep(min(0.25, limit_s / 8))
