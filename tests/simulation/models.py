"""What data-server and replay-buffer promise, checked against every answer that they give.

The models see requests and answers alone. A call that changes everything (`/seek`, `/reset_fresh`)
begins another era of a store; an answer to a request from an earlier era says nothing.
"""

from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import orjson

Answered = Callable[[httpx.Response], None]


class Broken(AssertionError):
    """A service broke a promise."""


def expect(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


def _mark(headers: httpx.Headers) -> tuple[str, int]:
    """Returns the identity of a store, and its changes."""
    identity, _, changes = headers.get("x-store-mark", "").partition("-")
    return identity, int(changes or 0)


class Model:
    """The state of a store that its answers imply."""

    changes = frozenset[str]()
    """Calls that are refused once another run has begun."""

    def __init__(self) -> None:
        self._era = 0
        self._begun: set[str] = set()
        """Ids of the calls that began an era and were answered."""
        self._ended: set[str] = set()
        """Runs that others have followed."""
        self._run = ""

    def forget(self) -> None:
        """Another volume has taken the place of the store."""
        self.__init__()  # type: ignore[misc]

    def asked(self, request: httpx.Request) -> Answered:
        """Sees a request; returns what sees its answer, if it is a success."""
        era = self._era
        run = request.headers.get("x-run-id", "")
        call = f"{request.method} {request.url.path}"

        seen = _mark(request.headers)

        def answered(response: httpx.Response) -> None:
            store, changes = _mark(response.headers)
            went_back = store == seen[0] and changes < seen[1]
            expect(not went_back, f"{call} was answered by a store that had gone back")
            is_late = call in self.changes and run in self._ended
            expect(not is_late, f"{call} of {run} was accepted after it had ended")
            if era == self._era:
                self._see(call, request, response)

        return answered

    def _begin(self, key: str, run: str) -> Answered:
        """Returns what sees the answer to a call that begins an era, unless it is a copy."""
        if key in self._begun:
            return lambda _: None
        self._era += 1

        def answered(_: httpx.Response) -> None:
            self._era += 1
            self._begun.add(key)
            if run != self._run:
                self._ended.add(self._run)
                self._run = run
            self._clear()

        return answered

    def _clear(self) -> None:
        """Forgets what an era knew."""

    def _see(self, call: str, request: httpx.Request, response: httpx.Response) -> None:
        """Checks an answer."""


class DataModel(Model):
    """Within an era each position belongs to one request, which gets the same answer always."""

    changes = frozenset({"GET /prompts", "POST /pass_rates"})

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, str] = {}
        self._answers: dict[str, Any] = {}

    def _clear(self) -> None:
        self._owners.clear()
        self._answers.clear()

    def asked(self, request: httpx.Request) -> Answered:
        if request.url.path == "/seek":
            body = orjson.loads(request.content)
            return self._begin(body["request_id"], request.headers.get("x-run-id", ""))
        return super().asked(request)

    def _see(self, call: str, request: httpx.Request, response: httpx.Response) -> None:
        if call != "GET /prompts":
            return
        name = request.url.params["request_id"]
        answer = orjson.loads(response.content)
        known = self._answers.setdefault(name, answer)
        expect(known == answer, f"{name} got {answer['position']} after {known['position']}")
        start = answer["position"]
        for position in range(start, start + len(answer["prompts"])):
            owner = self._owners.setdefault(position, name)
            expect(owner == name, f"position {position} was given to {owner} and to {name}")


class ReplayModel(Model):
    """A group is leased to one request, until it is acknowledged, and then never again."""

    changes = frozenset(
        {"POST /groups", "POST /groups/take", "POST /groups/ack", "POST /groups/priorities"}
    )

    def __init__(self) -> None:
        super().__init__()
        self._leases: dict[str, str] = {}
        self._answers: dict[str, list[str]] = {}
        self.consumed: set[str] = set()
        self._added: set[str] = set()

    def _clear(self) -> None:
        self._leases.clear()
        self._answers.clear()
        self._added.clear()

    def asked(self, request: httpx.Request) -> Answered:
        if request.url.path == "/groups/reset_fresh":
            run = request.url.params["run_id"]
            if "from_position" in request.url.params:
                self.consumed.clear()
            return self._begin(run, run)
        return super().asked(request)

    def _see(self, call: str, request: httpx.Request, response: httpx.Response) -> None:
        if call == "POST /groups":
            groups = msgspec.msgpack.decode(request.content)["groups"]
            ids = {group["id"] for group in groups}
            again = len(ids & self._added)
            added = orjson.loads(response.content)["added"]
            expect(added <= len(ids) - again, f"{added} of {ids} were added, {again} a second time")
            self._added |= ids
        elif call == "POST /groups/take":
            taken = msgspec.msgpack.decode(response.content)["ids"]
            self._take(orjson.loads(request.content), taken)
        elif call == "POST /groups/ack":
            self.consumed |= set(orjson.loads(request.content)["ids"])

    def _take(self, asked: dict[str, Any], ids: list[str]) -> None:
        name = asked["request_id"]
        known = self._answers.setdefault(name, ids)
        # Once they are acknowledged, a late copy gets none.
        expect(ids in (known, []), f"{name} got {ids} after {known}")
        expect(len(ids) in (0, asked["count"]), f"{name} got {len(ids)} of {asked['count']} groups")
        for group in ids:
            owner = self._leases.setdefault(group, name)
            expect(owner == name, f"{group} is leased to {owner} and to {name}")
            expect(group not in self.consumed, f"{group} is leased after its acknowledgement")


class RewardModel(Model):
    """Every answer gets the reward that its text has, or none and the reason."""

    def __init__(self, reward_of: Callable[[str], float]) -> None:
        super().__init__()
        self._reward_of = reward_of

    def _see(self, call: str, request: httpx.Request, response: httpx.Response) -> None:
        if call != "POST /batch_reward":
            return
        items = orjson.loads(request.content)["items"]
        results = orjson.loads(response.content)["rewards"]
        expect(len(results) == len(items), f"{len(items)} answers got {len(results)} results")
        for item, result in zip(items, results, strict=True):
            right = self._reward_of(item["response"]) if result["status"] == "ok" else None
            got = result["reward"]
            expect(got == right, f"an answer got {got}, not {right}, with {result['status']}")
