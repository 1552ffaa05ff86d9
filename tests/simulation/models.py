"""What data-server and replay-buffer promise, checked against every answer that they give.

The models see requests and answers alone. A call that changes everything (`/seek`, `/reset_fresh`)
begins another era of a store; an answer to a request from an earlier era says nothing.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from common.clients.network import Reply
from tests.simulation.network import Answered, Broken, Call, Model

_WAKES_S = 0.2
"""Time in which a take gets groups that are there, of which its calls of a thread need the most."""


def expect(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


def _mark(headers: Mapping[str, str]) -> tuple[str, int]:
    """Returns the identity of a store, and its changes."""
    identity, _, changes = headers.get("x-store-mark", "").partition("-")
    return identity, int(changes or 0)


class StoreModel(Model):
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
        self.__init__()  # type: ignore[misc]

    def asked(self, call: Call) -> Answered:
        """Sees a request; returns what sees its answer, if it is a success."""
        era = self._era
        run = call.headers.get("x-run-id", "")
        name = str(call)
        seen = _mark(call.headers)

        def answered(reply: Reply) -> None:
            store, changes = _mark(reply.headers)
            went_back = store == seen[0] and changes < seen[1]
            expect(not went_back, f"{name} was answered by a store that had gone back")
            is_late = name in self.changes and run in self._ended
            expect(not is_late, f"{name} of {run} was accepted after it had ended")
            if era == self._era:
                self._see(name, call, reply)

        return answered

    def _begin(self, key: str, run: str) -> Answered:
        """Returns what sees the answer to a call that begins an era, unless it is a copy."""
        if key in self._begun:
            return lambda _: None
        self._era += 1

        def answered(_: Reply) -> None:
            self._era += 1
            self._begun.add(key)
            if run != self._run:
                self._ended.add(self._run)
                self._run = run
            self._clear()

        return answered

    def _clear(self) -> None:
        """Forgets what an era knew."""

    def _see(self, call: str, asked: Call, reply: Reply) -> None:
        """Checks an answer."""


class DataModel(StoreModel):
    """Within an era each position belongs to one request, which gets the same answer always."""

    changes = frozenset({"GET /prompts", "POST /pass_rates"})

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[int, str] = {}
        self._answers: dict[str, Any] = {}

    def _clear(self) -> None:
        self._owners.clear()
        self._answers.clear()

    def asked(self, call: Call) -> Answered:
        if call.path == "/seek":
            body = call.json()
            return self._begin(body["request_id"], call.headers.get("x-run-id", ""))
        return super().asked(call)

    def _see(self, call: str, asked: Call, reply: Reply) -> None:
        if call != "GET /prompts":
            return
        name = asked.params["request_id"]
        answer = reply.json()
        known = self._answers.setdefault(name, answer)
        expect(known == answer, f"{name} got {answer['position']} after {known['position']}")
        start = answer["position"]
        for position in range(start, start + len(answer["prompts"])):
            owner = self._owners.setdefault(position, name)
            expect(owner == name, f"position {position} was given to {owner} and to {name}")


class ReplayModel(StoreModel):
    """A group is leased to one request, until it is acknowledged, and then never again."""

    changes = frozenset(
        {"POST /groups", "POST /groups/take", "POST /groups/ack", "POST /groups/priorities"}
    )

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now
        self._leases: dict[str, str] = {}
        self._answers: dict[str, list[str]] = {}
        self.consumed: set[str] = set()
        self._added: set[str] = set()
        self._versions: dict[str, int] = {}
        """By id, the versions of the groups that were sent, whether they were stored or not."""
        self._evicted: dict[str, int] = {}
        """By request, how many groups were too old for it."""
        self._oldest = 0
        """The oldest version that a call has asked for."""
        self._added_at = -math.inf
        """When the last groups were stored."""
        self._changes = 0
        """How many changes of the store an answer has told of."""
        self._knows_run = True
        """Whether a run has begun since the volume was replaced: until then the store cannot tell the
        runs apart, and may have groups that this model has forgotten."""

    def _clear(self) -> None:
        self._leases.clear()
        self._answers.clear()
        self._added.clear()
        self._versions.clear()
        self._evicted.clear()
        self._oldest = 0
        self._knows_run = True

    def forget(self) -> None:
        self.__init__(self._now)  # type: ignore[misc]
        self._knows_run = False

    def asked(self, call: Call) -> Answered:
        if str(call) == "POST /groups":
            for group in msgspec.msgpack.decode(call.content)["groups"]:
                self._versions[group["id"]] = _version(group)
        if call.path == "/groups/reset_fresh":
            run = call.params["run_id"]
            if "from_position" in call.params:
                self.consumed.clear()
            return self._begin(run, run)
        seen = super().asked(call)
        came = self._now()
        changes_then = self._changes

        def answered(reply: Reply) -> None:
            seen(reply)
            _, changes = _mark(reply.headers)
            if str(call) == "POST /groups":
                has_moved = not reply.json()["added"] or changes > changes_then
                expect(has_moved, f"groups were added, and the store's mark is still {changes}")
                self._added_at = self._now()
            elif str(call) == "POST /groups/take" and msgspec.msgpack.decode(reply.content)["ids"]:
                waited_s = self._now() - max(came, self._added_at)
                expect(waited_s < _WAKES_S, f"groups that were there waited {waited_s:.1f} s")
            self._changes = max(self._changes, changes)

        return answered

    def _see(self, call: str, asked: Call, reply: Reply) -> None:
        if call == "POST /groups":
            groups = msgspec.msgpack.decode(asked.content)["groups"]
            ids = {group["id"] for group in groups}
            again = len(ids & self._added)
            added = reply.json()["added"]
            expect(added <= len(ids) - again, f"{added} of {ids} were added, {again} a second time")
            self._added |= ids
        elif call == "POST /groups/take":
            taken = msgspec.msgpack.decode(reply.content)
            self._take(asked.json(), taken["ids"])
            self._evict(asked.json(), taken["evicted"])
        elif call == "POST /groups/ack":
            self.consumed |= set(asked.json()["ids"])

    def _take(self, asked: dict[str, Any], ids: list[str]) -> None:
        name = asked["request_id"]
        known = self._answers.setdefault(name, ids)
        # Once they are acknowledged, a late copy gets none.
        expect(ids in (known, []), f"{name} got {ids} after {known}")
        expect(len(ids) in (0, asked["count"]), f"{name} got {len(ids)} of {asked['count']} groups")
        for group in ids:
            owner = self._leases.setdefault(group, name)
            # Of two trainers each gets back what the other one leased, and refuses it.
            is_other_run = not self._knows_run and _run_of(owner) != _run_of(name)
            expect(owner == name or is_other_run, f"{group} is leased to {owner} and to {name}")
            expect(group not in self.consumed, f"{group} is leased after its acknowledgement")

    def _evict(self, asked: dict[str, Any], count: int) -> None:
        name = asked["request_id"]
        known = self._evicted.setdefault(name, count)
        expect(count == known, f"{known} groups were evicted for {name}, and later {count}")
        evicted = sum(self._evicted.values())
        # A copy of an earlier call may come now.
        self._oldest = max(self._oldest, asked["min_version"])
        old = [group for group, version in self._versions.items() if version < self._oldest]
        left = len(set(old) - set(self._leases))
        is_possible = evicted <= left or not self._knows_run
        expect(
            is_possible, f"{evicted} groups were evicted, the last for {name}; {left} are too old"
        )


def _run_of(request_id: str) -> str:
    return request_id.partition("-take-")[0]


def _version(group: dict[str, Any]) -> int:
    """Returns the oldest version that sampled a token of a group."""
    versions = (span[0] for each in group["completions"] for span in each["weight_versions"])
    return int(min(versions))


class RewardModel(StoreModel):
    """Every answer gets the reward that its text has, or none and the reason."""

    def __init__(self, reward_of: Callable[[str], float]) -> None:
        super().__init__()
        self._reward_of = reward_of

    def _see(self, call: str, asked: Call, reply: Reply) -> None:
        if call != "POST /batch_reward":
            return
        items = asked.json()["items"]
        results = reply.json()["rewards"]
        expect(len(results) == len(items), f"{len(items)} answers got {len(results)} results")
        for item, result in zip(items, results, strict=True):
            right = self._reward_of(item["response"]) if result["status"] == "ok" else None
            got = result["reward"]
            expect(got == right, f"an answer got {got}, not {right}, with {result['status']}")
