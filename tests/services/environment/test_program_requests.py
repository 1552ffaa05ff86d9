"""Which requests of a program lack an answer when its episode ends: a table, written by hand, and the
middleware that sees them come and go."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from common.errors import Overloaded
from services.environment.program_requests import FollowedRequest, FollowedRequests, Following
from services.environment.session import session_closed
from services.http.connections import BoundedConnection
from services.http.delivery import Delivery

CALL = "/sessions/s/v1/messages"
Step = tuple[str, str, bool | None]
"""What is asked, what becomes of it, and whether its client says that it asks again."""


def asked(text: str, is_retry: bool | None = None) -> FollowedRequest:
    """Returns a request for "a" or "b", whose bodies are as long; "a?" is one for "a" that was not
    read, and "longer" has another length.
    """
    path = "/sessions/s/reward" if text == "reward" else CALL
    return FollowedRequest(
        path,
        length=b"%d" % len(text.removesuffix("?")),
        is_retry=is_retry,
        refused_before=BoundedConnection.refused,
        key="" if text.endswith("?") else text,
    )


def answer(requests: FollowedRequests, request: FollowedRequest, kind: str) -> None:
    if kind == "waits":
        return
    request.was_left = kind == "left"
    if kind in ("taken", "unread", "being read"):
        taken = {"taken": True, "unread": False}.get(kind)
        request.delivery = Delivery(lambda: taken)
    if kind == "failed":
        request.error = Overloaded("too much", remedy="wait")
    requests.end(request, {"failed": 503, "told": 422, "left": 499}.get(kind, 200))


TABLE: dict[str, tuple[list[Step], bool]] = {
    "nothing was asked": ([], False),
    "an answer was taken": ([("a", "taken", None)], False),
    "an answer is being read": ([("a", "being read", None)], False),
    "the program was told what is wrong": ([("a", "told", None)], False),
    "an answer was left unread": ([("a", "unread", None)], True),
    "no answer was sent": ([("a", "waits", None)], True),
    "the client left": ([("a", "left", None)], True),
    "the server failed": ([("a", "failed", None)], True),
    "another call was answered": ([("a", "failed", None), ("b", "taken", None)], True),
    "another call was answered before": ([("b", "taken", None), ("a", "failed", None)], True),
    "it was answered later": ([("a", "failed", None), ("a", "taken", None)], False),
    "it was answered earlier": ([("a", "taken", None), ("a", "failed", None)], True),
    "it was asked anew": ([("a", "failed", False), ("a", "taken", False)], True),
    "it was asked again": ([("a", "failed", False), ("a", "taken", True)], False),
    "it was asked again in vain": ([("a", "failed", False), ("a", "failed", True)], True),
    "it was asked a third time": (
        [("a", "failed", False), ("a", "left", True), ("a", "told", True)],
        False,
    ),
    "one of two was asked again": (
        [("a", "failed", False), ("a", "failed", False), ("a", "taken", True)],
        True,
    ),
    "both were asked again": (
        [
            ("a", "failed", False),
            ("a", "failed", False),
            ("a", "taken", True),
            ("a", "taken", True),
        ],
        False,
    ),
    "an unread one came again": ([("a?", "left", None), ("a", "taken", None)], False),
    "an unread one came again unread": (
        [("a?", "left", None), ("a?", "failed", None), ("a", "taken", None)],
        False,
    ),
    "one came again unread, then another": (
        [("a", "left", None), ("a?", "failed", None), ("b", "taken", None)],
        True,
    ),
    "a longer one came": ([("a?", "left", None), ("longer", "taken", None)], True),
    "a reward came": ([("a", "failed", None), ("reward", "told", None)], True),
    "the first one waits while it comes again": (
        [("a", "waits", None), ("a", "taken", None)],
        False,
    ),
    "a reward was not answered": ([("reward", "failed", None)], True),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_a_program_did_not_get_is_a_fault(name: str) -> None:
    steps, is_fault = TABLE[name]
    requests = FollowedRequests()
    for text, kind, is_retry in steps:
        request = asked(text, is_retry)
        requests.begin(request)
        answer(requests, request, kind)
    found = requests.fault(is_graded=False)
    assert bool(found) == is_fault
    if is_fault:
        failed = requests.open[0].error is not None
        assert found.startswith("a call was not answered") == failed
        assert ("too much" in found) == failed
    rewards = all(text == "reward" for text, _, _ in steps)
    assert bool(requests.fault(is_graded=True)) == (is_fault and not rewards)


def test_only_what_may_lack_an_answer_is_kept() -> None:
    requests = FollowedRequests()
    for kind in ("taken", "told", "plain"):
        request = asked(kind)
        requests.begin(request)
        answer(requests, request, kind)
    last = asked("a")
    requests.begin(last)
    assert requests.open == [last]


def test_an_answer_after_the_end_comes_too_late() -> None:
    requests = FollowedRequests()
    request = asked("a")
    requests.begin(request)
    requests.close()
    answer(requests, request, "taken")
    request.was_left = True
    assert requests.fault(is_graded=True)


def test_a_connection_that_was_refused_may_have_been_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BoundedConnection, "refused", 7)
    requests = FollowedRequests()
    early = asked("a")
    requests.begin(early)
    answer(requests, early, "taken")
    assert not requests.fault(is_graded=True)
    waiting = asked("b")
    requests.begin(waiting)
    BoundedConnection.refused += 1
    answer(requests, waiting, "taken")
    assert "ulimit -n" in requests.fault(is_graded=True), "it came before"
    for text in ("reward", "b"):
        request = asked(text)
        requests.begin(request)
        answer(requests, request, "told")
        assert bool(requests.fault(is_graded=True)) == (text == "reward")


class Connection:
    """A connection whose client may have left."""

    def __init__(self, is_lost: bool) -> None:
        self.is_lost = is_lost

    def deliver(self) -> Delivery:
        return Delivery(lambda: None)


@pytest.mark.parametrize("leaves", ["never", "before", "meanwhile"])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("path", [CALL, "/sessions/s/reward", "/sessions/gone/v1/x", "/episodes"])
def test_requests_are_followed_from_their_first_line(path: str, closed: bool, leaves: str) -> None:
    session: Any = SimpleNamespace(closed=closed, requests=FollowedRequests())
    connection = Connection(leaves == "before")
    seen: list[FollowedRequest] = []
    sent: list[Message] = []

    def find(name: str) -> Any:
        if name != "s":
            raise session_closed(name)
        return session

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if "followed" in scope:
            seen.append(scope["followed"])
            assert seen[0].status == 0
        connection.is_lost |= leaves == "meanwhile"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    headers = [(b"content-length", b"5"), (b"x-stainless-retry-count", b"2")]
    extensions = {"rlhf": {"connection": connection}}
    scope = {"type": "http", "path": path, "headers": headers, "extensions": extensions}
    asyncio.run(Following(app, find)(scope, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    if "/s/" not in path:
        assert not seen
        return
    (request,) = seen
    assert (request.path, request.length, request.is_retry) == (path, b"5", True)
    assert request.status == 200
    is_call = path == CALL
    assert (request.delivery is not None) == is_call
    is_lost = leaves == "before" or (leaves == "meanwhile" and not closed)
    assert bool(session.requests.fault(is_graded=False)) == is_lost


@pytest.mark.parametrize(("sent", "is_retry"), [(None, None), (b"0", False), (b"1", True)])
def test_a_client_may_say_whether_it_asks_again(sent: bytes | None, is_retry: bool | None) -> None:
    session: Any = SimpleNamespace(closed=False, requests=FollowedRequests())

    async def app(scope: Scope, *_: Any) -> None:
        assert scope["followed"].is_retry is is_retry

    headers = [] if sent is None else [(b"x-stainless-retry-count", sent)]
    scope = {"type": "http", "path": CALL, "headers": headers}
    call: Any = Following(app, lambda _: session)
    asyncio.run(call(scope, None, None))
    (request,) = session.requests.open
    assert request.length == b""
    assert session.requests.fault(is_graded=False), "it ended without an answer"
