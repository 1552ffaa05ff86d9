"""What became of the requests of a session's program, each followed from its first line on.

A program that gets no answer may take that for a failure of the model, and grade it. So nothing
that happens to a request before a handler sees it goes unnoticed:

    what happened                                              the program
    its client left before it was read, or answered            lacks an answer
    it was refused (503): too many requests or bytes at once   lacks an answer
    the engines, or this server, failed (500)                  lacks an answer
    it was answered, or told what is wrong with it (4xx)       has one, unless its client left first
    it came again, and that was answered                       has one

A connection that is refused unread may have been a request of any session.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import ServiceError
from services.http.connections import BoundedConnection, connection_of
from services.http.delivery import Delivery

if TYPE_CHECKING:  # a session follows its requests
    from services.environment.session import Session

REWARD = "/reward"
"""The end of the path to which a program posts its reward."""
_RETRIES = b"x-stainless-retry-count"
"""OpenAI's and Anthropic's libraries say so whether they send a call again."""
_NO_ANSWER = 499
"""The lowest status that is no answer: the client left, or this server failed."""
_UNANSWERED = (
    "a call had no answer when the program ended or stopped waiting: the engines or this "
    "server may be slow; give its client a longer time-out, and let it read every answer to its end"
)
_REFUSED = (
    "the environment-server refused connections, which may have been calls of this program: raise "
    "the limit on its open files (ulimit -n)"
)


@dataclass(eq=False)
class FollowedRequest:
    """A request of a program, and what is known of its answer."""

    path: str
    length: bytes
    """Its Content-Length: one that is sent again has the same."""
    is_retry: bool | None
    """Whether its client says that it sends this request again; None when it does not say."""
    refused_before: int
    """How many connections had been refused unread when it came."""
    key: str = ""
    """What it asks for; empty when its body was not read."""
    status: int = 0
    """That of its answer; 0 before."""
    error: ServiceError | None = None
    was_left: bool = False
    """Whether its client left before it was answered, or its session ended."""
    delivery: Delivery | None = None

    def has_answer(self) -> bool | None:
        """Returns whether its client has an answer; None when it may be reading it."""
        if self.was_left or not 0 < self.status < _NO_ANSWER:
            return False
        # Nothing tells about the answer to a reward, or to a client in this process.
        return self.delivery is None or self.delivery.taken()

    def lacks_answer(self) -> bool:
        """Returns whether its client has no answer, or does not have it yet."""
        return self.has_answer() is False

    def is_repeated_by(self, other: "FollowedRequest") -> bool:
        """Returns whether a later request asks for the same."""
        has_same_body = self.length == other.length and "" in (self.key, other.key)
        return self.path == other.path and (has_same_body or self.key == other.key != "")


@dataclass
class FollowedRequests:
    """The requests of a session that may lack an answer, the first one first."""

    open: list[FollowedRequest] = field(default_factory=list)
    _refused: int = field(default_factory=lambda: BoundedConnection.refused)
    """How many connections had been refused unread before the last call that was answered."""

    def begin(self, request: FollowedRequest) -> None:
        """Follows a request that has arrived."""
        self.open = [each for each in self.open if not each.has_answer()]
        self.open.append(request)

    def end(self, request: FollowedRequest, status: int) -> None:
        """Records how a request was answered: it counts in place of an earlier one that asked for
        the same.
        """
        request.status = status
        if request not in self.open:
            return
        if not request.lacks_answer() and not request.path.endswith(REWARD):
            self._refused = max(self._refused, request.refused_before)
        # A client that says that it asks anew does not ask again.
        earlier = [] if request.is_retry is False else self.open[: self.open.index(request)]
        for each in earlier:
            if each.is_repeated_by(request) and each.lacks_answer():
                request.key = request.key or each.key
                self.open.remove(each)
                break

    def close(self) -> None:
        """Records that the session has ended: what is not answered now had no answer."""
        for request in self.open:
            request.was_left |= not request.status

    def fault(self, is_graded: bool) -> str:
        """Returns why the program may have missed an answer; empty if it has them all.

        Whether a reward was answered does not matter once it is there.
        """
        for request in self.open:
            is_settled = is_graded and request.path.endswith(REWARD)
            if is_settled or not request.lacks_answer():
                continue
            if request.error is not None and request.status > _NO_ANSWER:
                return f"a call was not answered: {request.error}"
            return _UNANSWERED
        return _REFUSED if BoundedConnection.refused > self._refused else ""


class Following:
    """The outermost middleware: follows the requests below `/sessions/ID/`.

    Args:
        app: gets these requests, with the `FollowedRequest` as `scope["followed"]`.
        session: returns a session by its name. Raises ServiceError.
    """

    def __init__(self, app: ASGIApp, session: "Callable[[str], Session]") -> None:
        self._app = app
        self._session = session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        try:
            session = self._session(path.split("/")[2])
        except (IndexError, ServiceError):
            await self._app(scope, receive, send)
            return

        headers = dict(scope["headers"])
        retries = headers.get(_RETRIES)
        request = FollowedRequest(
            path,
            length=headers.get(b"content-length", b""),
            is_retry=None if retries is None else retries != b"0",
            refused_before=BoundedConnection.refused,
        )
        scope["followed"] = request
        connection = connection_of(scope)
        request.was_left = connection is not None and connection.is_lost
        # After the end, only one whose client did not wait for it came before the end.
        if request.was_left or not session.closed:
            session.requests.begin(request)

        async def followed(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.error = scope.get("error")
                if connection is not None:
                    request.was_left |= connection.is_lost
                    if not path.endswith(REWARD):
                        request.delivery = connection.deliver()
                session.requests.end(request, message["status"])
            await send(message)

        await self._app(scope, receive, followed)
