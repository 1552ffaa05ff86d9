"""The queue of the replay buffer: groups are stored once, handed out exactly once, leased,
acknowledged and evicted."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from fastapi import FastAPI

from common.clients.base import Unreachable
from common.clients.replay import ReplayClient
from common.errors import ServiceError
from common.process import logs
from common.settings.sections import ReplaySection
from common.wire.schemas import Group, SampleRequest, TakeRequest
from services.replay.buffer import ReplayBuffer, unpack_groups
from tests.support.batches.replay_groups import MakeGroup
from tests.support.errors import raises
from tests.support.processes.load import held


def take(count: int, request_id: str, **more: float | str) -> TakeRequest:
    return TakeRequest.model_validate({"count": count, "request_id": request_id, **more})


def ids(groups: list[Group]) -> list[str]:
    return [group.id for group in groups]


async def test_a_group_comes_back_as_it_was_stored(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    group = make_group("a", version=3, position=7, rewards=(0.5, -1.0), tokens=5)
    group.metadata = {"kind": "sum", "levels": [1, 2.5]}
    await client.add([group])
    taken = (await client.take(take(1, "r"))).groups[0]
    assert (taken.id, taken.prompt, taken.position, taken.metadata) == (
        "a",
        "1 + 1?",
        7,
        group.metadata,
    )
    for stored, got in zip(group.completions, taken.completions, strict=True):
        np.testing.assert_array_equal(got.token_ids, stored.token_ids)
        np.testing.assert_array_equal(got.logprobs, stored.logprobs)
        assert (got.reward, got.weight_versions, got.text) == (
            stored.reward,
            [(3, 0, 5)],
            stored.text,
        )


async def test_order_is_weight_version_then_position_then_id(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    places = {"d": (2, 0), "c": (1, 5), "b": (1, 4), "a": (1, 5)}
    await client.add(
        [make_group(name, version, position) for name, (version, position) in places.items()]
    )
    assert ids((await client.take(take(4, "r"))).groups) == ["b", "a", "c", "d"]


async def test_adding_an_id_again_changes_nothing_and_is_counted(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.add([make_group("a", rewards=(1.0, 1.0)), make_group("a")])
    await client.add([make_group("a", rewards=(0.0, 0.0))])
    stats = await client.stats()
    assert (stats["groups"], stats["added"], stats["duplicates"], stats["avg_reward"]) == (
        1,
        1,
        2,
        1.0,
    )
    assert len((await client.take(take(1, "r"))).groups) == 1
    await client.add([make_group("a")])
    assert (await client.take(take(1, "s"))).groups == []


async def test_take_is_all_or_nothing(client: ReplayClient, make_group: MakeGroup) -> None:
    await client.add([make_group("a"), make_group("b")])
    assert (await client.take(take(3, "r"))).groups == []
    assert (await client.stats())["fresh"] == 2
    await client.add([make_group("c")])
    assert len((await client.take(take(3, "s"))).groups) == 3


async def test_retry_with_the_same_request_id_gets_the_same_groups(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.add([make_group(name) for name in "abcd"])
    first = ids((await client.take(take(2, "r"))).groups)
    assert ids((await client.take(take(2, "r"))).groups) == first
    assert ids((await client.take(take(2, "s"))).groups) == ["c", "d"]


async def test_request_id_of_another_request_is_refused(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.add([make_group("a", version=1), make_group("b", version=1)])
    await client.take(take(2, "r"))
    with raises(ServiceError, status=422, field="request_id", value="r"):
        await client.take(take(1, "r"))
    with raises(ServiceError, status=422, field="request_id", value="r"):
        await client.take(take(2, "r", min_version=2))


async def test_every_group_goes_to_exactly_one_of_many_takers(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    async def taker(name: str) -> list[str]:
        got: list[str] = []
        for i in range(100):
            taken = (await client.take(take(1 + i % 3, f"{name}-{i}", wait_s=0.05))).groups
            if not taken and i > 20:
                break
            got += ids(taken)
        return got

    async def adder(start: int) -> None:
        for i in range(start, start + 30):
            await client.add([make_group(f"g{i}")])

    adding = asyncio.gather(adder(0), adder(30))
    takers = await asyncio.gather(*(taker(name) for name in "wxyz"))
    await adding
    everything = [name for got in takers for name in got] + ids(
        (await client.take(take(1, "last"))).groups
    )
    assert len(everything) == len(set(everything))
    stats = await client.stats()
    assert stats["leased"] == len(everything)
    assert stats["leased"] + stats["fresh"] == 60


async def test_a_waiting_take_gets_what_arrives(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    waiting = asyncio.create_task(client.take(take(2, "r", wait_s=60)))
    await client.add([make_group("a")])
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await client.add([make_group("b")])
    assert ids((await asyncio.wait_for(waiting, 30)).groups) == ["a", "b"]


async def test_old_groups_are_evicted_and_reported_once(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.add([make_group(f"g{version}", version) for version in range(5)])
    taken = await client.take(take(2, "r", min_version=3))
    assert (ids(taken.groups), taken.evicted) == (["g3", "g4"], 3)
    assert (await client.take(take(2, "r", min_version=3))).evicted == 3, (
        "a retry gets the same answer"
    )
    await client.add([make_group("new", 9)])
    assert (await client.take(take(1, "s", min_version=3))).evicted == 0
    stats = await client.stats()
    assert (stats["evicted"], stats["groups"]) == (3, 3)


async def test_failed_take_reports_evictions_only_to_its_retries(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.add([make_group("old", 0)])
    answers = [
        (await client.take(take(1, name, min_version=1))).evicted for name in ("r", "r", "s", "r")
    ]
    assert answers == [1, 1, 0, 1]


async def test_a_late_retry_does_not_bring_an_evicted_group_back(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.add([make_group("old", 0)])
    await client.take(take(1, "r", min_version=1))
    await client.add([make_group("old", 0)])
    stats = await client.stats()
    assert (stats["groups"], stats["duplicates"], stats["evicted"]) == (0, 1, 1)


class TestLease:
    @pytest.fixture
    def config(self) -> ReplaySection:
        return ReplaySection(capacity=100, lease_s=0.2)

    async def test_an_expired_lease_makes_the_groups_fresh_again(
        self, client: ReplayClient, make_group: MakeGroup
    ) -> None:
        await client.add([make_group("a"), make_group("b")])
        first = await client.take(take(2, "r"))
        again = await client.take(
            take(2, "s", wait_s=60)
        )  # nothing arrives: the expired lease itself wakes the call
        assert ids(again.groups) == ids(first.groups)

    async def test_a_run_has_its_groups_as_long_as_it_lasts(
        self, client: ReplayClient, make_group: MakeGroup
    ) -> None:
        """An update may take longer than a lease, and so may dynamic sampling."""
        await client.reset_fresh(run_id="run-1")
        await client.add([make_group("a"), make_group("b")])
        await client.take(take(1, "run-1-take-1", run_id="run-1"))
        await asyncio.sleep(0.3)
        assert (await client.stats())["leased"] == 1
        others = await client.take(take(1, "run-1-take-2", run_id="run-1"))
        assert ids(others.groups) == ["b"]
        await client.reset_fresh(run_id="run-2")
        assert (await client.stats())["leased"] == 0

    async def test_an_acknowledged_group_stays_consumed(
        self, client: ReplayClient, make_group: MakeGroup
    ) -> None:
        await client.add([make_group("a"), make_group("b")])
        await client.take(take(2, "r"))
        await client.ack(["a"])
        assert ids((await client.take(take(1, "s", wait_s=60))).groups) == ["b"]
        assert (await client.stats())["consumed"] == 1


async def test_reset_drops_groups_that_will_be_drawn_again(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    """A resumed trainer trains on these prompts again, so reuse must not find them twice."""
    await client.add([make_group(name, position=position) for position, name in enumerate("abcd")])
    await client.take(take(3, "r"))
    await client.ack(["a", "b", "c"])
    assert await client.reset_fresh(from_position=1) == 3
    sampled = await client.sample(SampleRequest(count=4, min_version=0, seed=0))
    assert ids(sampled.groups) == ["a"]
    await client.add([make_group("b", position=1)])
    await client.take(take(1, "s"))
    await client.ack(["b"])
    again = await client.sample(SampleRequest(count=4, min_version=0, seed=0))
    assert sorted(ids(again.groups)) == ["a", "b"]


async def test_draws_of_lost_steps_do_not_count(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.add([make_group(name, position=position) for position, name in enumerate("ab")])
    await client.take(take(2, "r"))
    await client.ack(["a", "b"])

    async def drawn(step: int | None, request_id: str, most: int) -> int:
        request = SampleRequest(count=2, max_times_sampled=most, request_id=request_id, step=step)
        return len((await client.sample(request)).groups)

    assert [await drawn(step, f"s{step}", 9) for step in (3, 4, 5, None)] == [2] * 4
    for _ in range(2):  # the first answer may be lost, so the call is repeated
        await client.reset_fresh(from_position=7, step=4)
        listed = (await client.request("GET", "/groups")).json()["groups"]
        assert [group["times_sampled"] for group in listed] == [2, 2], (
            "of step 3, and the one by hand"
        )
    assert await drawn(4, "s4", 2) == 0
    assert await drawn(4, "s4 again", 3) == 2, "the draws of the lost steps 5 and 6 are free again"
    await client.reset_fresh(from_position=7)
    assert await drawn(4, "by hand", 3) == 0


async def test_ack_is_idempotent_and_names_an_unknown_id(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.add([make_group("a"), make_group("b")])
    await client.take(take(2, "r"))
    await client.ack(["a"])
    await client.ack(["a", "a"])
    with raises(ServiceError, status=404, field="id", value="nobody"):
        await client.ack(["b", "nobody"])
    stats = await client.stats()
    assert (stats["consumed"], stats["leased"]) == (1, 1), (
        "an ack with an unknown id changes nothing"
    )


async def test_reset_drops_unacknowledged_groups(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.add([make_group(name) for name in "abc"])
    await client.take(take(2, "r"))
    await client.ack(["a"])
    assert await client.reset_fresh() == 2
    stats = await client.stats()
    assert (stats["fresh"], stats["leased"], stats["consumed"], stats["dropped"]) == (0, 0, 1, 2)
    await client.add([make_group("b")])
    assert ids((await client.take(take(1, "s"))).groups) == ["b"], "a dropped id may be added again"


async def test_draining_ends_a_wait_without_losing_groups(
    app: FastAPI, client: ReplayClient, make_group: MakeGroup
) -> None:
    waiting = asyncio.create_task(
        client.request(
            "POST", "/groups/take", json=take(1, "r", wait_s=60).model_dump(), deadline_s=5
        )
    )
    await asyncio.sleep(0.1)
    app.state.draining.set()
    with pytest.raises(Unreachable, match="stopping"):
        await asyncio.wait_for(waiting, 400)
    app.state.draining.clear()
    await client.add([make_group("a")])
    assert ids((await client.take(take(1, "s"))).groups) == ["a"]


class TestCapacity:
    @pytest.fixture
    def config(self) -> ReplaySection:
        return ReplaySection(capacity=6)

    async def consume(self, client: ReplayClient, group: Group) -> None:
        await client.add([group])
        await client.take(take(1, f"take {group.id}"))
        await client.ack([group.id])

    async def test_the_oldest_consumed_leave_first(
        self, client: ReplayClient, make_group: MakeGroup
    ) -> None:
        for name in "ab":
            await self.consume(client, make_group(name))
        await client.add([make_group("c")])
        await client.add([make_group("d")])
        listed = (await client.request("GET", "/groups")).json()["groups"]
        assert [(item["id"], item["state"]) for item in listed] == [
            ("b", "consumed"),
            ("c", "fresh"),
            ("d", "fresh"),
        ]
        assert (await client.stats())["removed"] == 1
        await client.ack(
            ["a"]
        )  # a late acknowledgement is no error: the group was trained on and removed
        await client.add([make_group("a")])
        assert (await client.stats())["groups"] == 3, "a late retry of an add brings nothing back"

    async def test_waiting_groups_push_back_and_nothing_is_lost(
        self, client: ReplayClient, make_group: MakeGroup
    ) -> None:
        await client.add([make_group(name) for name in "abc"])
        response = await client.http.post("/groups", json={"groups": [person(make_group("d"))]})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "full"
        assert "retry-after" in response.headers
        adding = asyncio.create_task(client.add([make_group("d")]))  # the client keeps retrying
        taken = await client.take(take(1, "r"))
        await client.ack(ids(taken.groups))
        await asyncio.wait_for(adding, 30)
        assert ids((await client.take(take(3, "s"))).groups) == ["b", "c", "d"]

    async def test_one_request_over_capacity_is_refused(
        self, client: ReplayClient, make_group: MakeGroup
    ) -> None:
        with raises(ServiceError, status=413, field="groups", value="8 completions"):
            await client.add([make_group(name) for name in "abcd"])
        with raises(ServiceError, status=422, field="count", value="7"):
            await client.take(take(7, "r"))
        assert (await client.stats())["size"] == 0


def person(group: Group) -> dict[str, object]:
    """Returns a group in the form a person would type."""
    completion = {
        "token_ids": [5, 6],
        "logprobs": [-0.5, -0.25],
        "text": "two",
        "finish_reason": "stop",
        "weight_versions": [[0, 0, 2]],
        "reward": 1,
    }
    body = {
        "id": group.id,
        "prompt_id": "p",
        "prompt": "1+1?",
        "ground_truth": "2",
        "prompt_token_ids": [1, 2],
    }
    return {**body, "completions": [completion]}


def test_lease_counts_from_process_start_whatever_the_clocks_say(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    """The new process's clock may be far behind the old one's, after a reboot or on another
    node."""
    path, now = tmp_path / "replay.db", 1e9
    config = ReplaySection(capacity=100, lease_s=600)
    buffer = ReplayBuffer(config, path, clock=lambda: now)
    buffer.add([make_group("a")])
    assert buffer.take(take(1, "r")) is not None
    buffer.close()
    now = 5.0
    buffer = ReplayBuffer(config, path, clock=lambda: now)
    assert (buffer.next_expiry_s(), buffer.take(take(1, "s"))) == (600.0, None)
    now = 604.9
    assert buffer.take(take(1, "s")) is None
    now = 605.1
    assert buffer.take(take(1, "s")) is not None
    buffer.close()


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("end", ["acknowledged", "expired", "empty", "reset", "cleared"])
def test_a_copy_of_a_take_that_arrives_after_its_end_leases_nothing(
    end: str, restart: bool, tmp_path: Path, make_group: MakeGroup
) -> None:
    now = 0.0
    path = tmp_path / "replay.db"
    buffer = ReplayBuffer(ReplaySection(), path, clock=lambda: now)
    buffer.add([make_group("old", version=0)])
    run_id = "" if end == "expired" else "run-1"  # a run has its groups as long as it lasts
    copied = take(2, "run-1-take-1", run_id=run_id, min_version=1)
    if end == "empty":
        assert buffer.take(copied) is None
        ended = buffer.take(copied, ends=True)
        assert ended is not None
        assert (ended.ids, ended.evicted) == ([], 1)
    else:
        buffer.add([make_group("a", 1), make_group("b", 1)])
        taken = buffer.take(copied)
        assert taken is not None
        assert ids(unpack_groups(taken.blobs)) == ["a", "b"]
    if end == "acknowledged":
        buffer.store.ack(["a", "b"])
    elif end == "expired":
        now = 601.0
    elif end == "reset":
        buffer.reset_fresh()
    elif end == "cleared":
        buffer.store.clear()
    buffer.add([make_group("c", 2), make_group("d", 2)])
    if restart:
        buffer.close()
        buffer = ReplayBuffer(ReplaySection(), path, clock=lambda: now)
        now = 10_000.0  # a restart begins the time of a lease again

    late = buffer.take(copied)

    assert late is not None
    assert (late.blobs, late.evicted) == ([], 1), "the answer without its groups"
    assert buffer.stats()["leased"] == 0
    buffer.close()


async def test_late_calls_of_a_run_that_has_ended_change_nothing(
    app: FastAPI, client: ReplayClient, make_group: MakeGroup
) -> None:
    """As from the buffers of a service that was stopped while the trainer was killed."""
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: client.add([make_group("late")]),
        lambda: client.take(take(1, "run-1-take-1", run_id="run-1")),
        lambda: client.ack(["a"]),
        lambda: client.sample(SampleRequest(count=1)),
        lambda: client.set_priorities({"a": 1.0}),
        lambda: client.reset_fresh(run_id="run-1"),
    ]
    for run in ("run-1", "run-2"):
        with logs.request("start", run):
            await client.reset_fresh(run_id=run)
    with logs.request("work", "run-2"):
        await client.add([make_group("a"), make_group("b")])
        await client.take(take(1, "run-2-take-1", run_id="run-2"))
    before = await client.stats()
    for call in calls:
        with (
            logs.request("late", "run-1"),
            raises(ServiceError, code="superseded", value="run-1") as error,
        ):
            await call()
        assert (error.value.status, error.value.code) == (409, "superseded")
    assert await client.stats() | {"load": None} == before | {"load": None}


@pytest.mark.parametrize("names_run", [True, False], ids=["in the body", "in a header"])
async def test_a_take_that_waits_while_another_run_begins_leases_none_of_its_groups(
    client: ReplayClient, make_group: MakeGroup, names_run: bool
) -> None:
    await client.reset_fresh(run_id="run-1")
    with logs.request("wait", "" if names_run else "run-1"):
        body = take(1, "run-1-take-1", run_id="run-1" if names_run else "", wait_s=60)
        waiting = asyncio.create_task(client.take(body))
    await held(client, "requests_in_progress", 1)
    await client.reset_fresh(run_id="run-2")
    await client.add([make_group("a")])
    with raises(ServiceError, code="superseded", value="run-1"):
        await waiting
    assert (await client.stats())["leased"] == 0


async def test_a_late_take_of_a_run_that_a_lost_store_knew_leases_nothing(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    """The store was emptied after run-1, and run-2 is the first that it knows."""
    await client.reset_fresh(run_id="run-2")
    await client.add([make_group("a")])
    with raises(ServiceError, code="superseded", value="run-1"):
        await client.take(take(1, "run-1-take-1", run_id="run-1"))
    assert (await client.stats())["leased"] == 0


async def test_copies_of_other_calls_that_arrive_late_change_nothing(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.reset_fresh(0, 0, run_id="run-1")
    await client.add([make_group("a"), make_group("b")])
    await client.ack(["a"])
    await client.set_priorities({"a": 1.0}, "first")
    await client.set_priorities({"a": 5.0}, "second")
    await client.set_priorities({"a": 1.0}, "first")
    assert await client.reset_fresh(0, 0, run_id="run-1") == 0
    listed = (await client.request("GET", "/groups")).json()["groups"]
    assert [(item["id"], item["priority"]) for item in listed] == [("a", 5.0), ("b", None)]


async def test_of_two_copies_that_wait_together_only_one_answer_leases(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    first = asyncio.create_task(client.take(take(1, "r", wait_s=60)))
    second = asyncio.create_task(client.take(take(1, "r", wait_s=60)))
    await held(client, "requests_in_progress", 2)
    await client.add([make_group("a"), make_group("b")])
    assert ids((await first).groups) == ids((await second).groups) == ["a"]
    assert (await client.stats())["leased"] == 1


def test_every_change_is_synced_to_the_disk(tmp_path: Path) -> None:
    """SQLite syncs its log after each transaction only at the level FULL (2); no test here can cut
    the power."""
    buffer = ReplayBuffer(ReplaySection(), tmp_path / "replay.db")
    assert buffer.store.db.execute("PRAGMA synchronous").fetchone() == (2,)
    buffer.close()


def test_the_wall_clock_plays_no_role(
    tmp_path: Path, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock may jump by a day when a node reaches its time server."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    buffer = ReplayBuffer(ReplaySection(capacity=100, lease_s=600), tmp_path / "replay.db")
    buffer.add([make_group("a")])
    assert buffer.take(take(1, "r")) is not None
    monkeypatch.setattr(time, "time", lambda: 1e10)
    assert buffer.take(take(1, "s")) is None
    assert abs(buffer.clock() - time.monotonic()) < 1e6
    buffer.close()


async def test_a_stray_lease_returns_to_the_run_that_takes(
    client: ReplayClient, make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    await client.add([make_group("a"), make_group("b", position=1), make_group("c", position=2)])
    own = (await client.take(take(1, "run-1-take-1", run_id="run-1"))).groups
    assert ids((await client.take(take(2, "a colleague's curl"))).groups) == ["b", "c"]
    assert ids((await client.take(take(2, "run-1-take-2", run_id="run-1"))).groups) == ["b", "c"]
    assert "a colleague's curl has leased 2 groups but does not belong to run run-1" in caplog.text
    assert ids(own) == ["a"]
    assert (await client.stats())["leased"] == 3, "the run's own leases stay"


async def test_foreign_calls_are_logged_with_their_caller(
    client: ReplayClient, make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with logs.request("work", "run-1"):
        await client.add([make_group("a"), make_group("b")])
        await client.take(take(1, "run-1-take-1"))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    with logs.request("strange-1"):
        await client.take(take(1, "other"))
        await client.reset_fresh()
        await client.request("POST", "/clear")
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for what, line in zip(
        ("1 groups were taken", "2 groups were dropped (reset_fresh)", "everything was forgotten"),
        told,
        strict=True,
    ):
        assert what in line
        assert "by 127.0.0.1:123, run " in line
        assert "request strange-1" in line


@pytest.mark.parametrize("kind", ["text/plain", "Text/Plain; charset=utf-8", ""])
async def test_groups_of_another_content_type_are_refused(client: ReplayClient, kind: str) -> None:
    value = "text/plain" if kind else ""
    with raises(ServiceError, field="content-type", value=value, status=415) as error:
        await client.request("POST", "/groups", content=b"x", headers={"content-type": kind})
    assert error.value.code == "unsupported_media_type"


async def test_groups_are_listed_by_their_state(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    await client.add([make_group(name, position=at) for at, name in enumerate("abcd")])
    await client.take(take(2, "r"))
    await client.ack(["a"])
    listed = {
        state: [group["id"] for group in await client.listing(state)]
        for state in ("fresh", "leased", "consumed")
    }
    assert listed == {"fresh": ["c", "d"], "leased": ["b"], "consumed": ["a"]}


async def test_a_call_of_another_run_is_louder_than_one_of_the_run_that_stores(
    client: ReplayClient, make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for run, name in (("run-1", "a"), ("", "b")):
        with logs.request("clears", "run-2"):
            await client.request("POST", "/clear")
        with logs.request("adds", run):
            await client.add([make_group(name)])
            answer = await client.request("POST", "/clear")
            assert answer.json() == {"status": "cleared"}
        with logs.request("clears", "run-2"):
            await client.request("POST", "/clear")
    assert await client.reset_fresh() == 0
    assert not [each for each in caplog.records if "(reset_fresh)" in each.getMessage()]
    levels = [each.levelname for each in caplog.records if "(clear)" in each.getMessage()]
    # Nobody stores yet; then run 1 does; then a client without a run.
    assert levels == ["INFO", "DEBUG", "WARNING", "WARNING", "DEBUG", "INFO"]


async def test_keys_of_dropped_groups_are_never_given_again(
    client: ReplayClient, make_group: MakeGroup
) -> None:
    async def consume(name: str, position: int) -> None:
        await client.add([make_group(name, position=position)])
        await client.take(take(1, name))
        await client.ack([name])

    await consume("a", 5)
    request = SampleRequest(count=1, request_id="s", step=3)
    assert ids((await client.sample(request)).groups) == ["a"]
    assert await client.reset_fresh(from_position=5) == 1
    await consume("b", 0)
    assert ids((await client.sample(request)).groups) == [], "a retry gets no other group"
    await client.reset_fresh(from_position=9, step=3)
    listed = (await client.request("GET", "/groups")).json()["groups"]
    assert [group["times_sampled"] for group in listed] == [0]
