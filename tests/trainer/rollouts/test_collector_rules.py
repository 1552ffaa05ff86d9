"""What the collector owes a run, over random services and trainers on a virtual clock: every prompt
once, bounded slots, nothing finished before it is acknowledged, and no group of anybody else.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.settings.config import Config
from common.wire.schemas import Prompt, TakenGroups, TakeRequest
from tests.simulation.virtual_time import simulated
from tests.support.errors import raises
from trainer.rollouts import collector as collector_module
from trainer.rollouts.collector import CollectFailed, Collector
from trainer.rollouts.drops import GroupFailed
from trainer.rollouts.prompt_cursor import MAX_TRIES, DrawnPrompt, PromptCursor, PromptProgress

EPOCH = 11
UNSOLVABLE = "p4"
LIMIT_S = 3000.0
"""Seconds of the virtual clock after which a wait counts as one without an end."""


class Data:
    """A data-server, whose cursor is set back now and then; a request that comes again gets the same
    prompts.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.position = 0
        self.answers: dict[str, Any] = {}
        self.seeks: list[int] = []
        self.disturbed = 0.0
        self.stubborn = False

    async def prompts(self, count: int, request_id: str) -> Any:
        await asyncio.sleep(self.draw.uniform(0, 0.5))
        if request_id in self.answers:
            assert self.answers[request_id][0] == count, "one id, two questions"
            return self.answers[request_id][1]
        is_first = not request_id.endswith("-again")
        if is_first and (self.draw.random() < self.disturbed or self.stubborn):
            self.position = self.draw.randint(0, self.position + 5)
        # A server may give fewer than were asked for.
        given = self.draw.randint(1, count)
        batch = SimpleNamespace(
            position=self.position,
            total_available=EPOCH,
            prompts=[
                Prompt(id=f"p{at % EPOCH}", prompt=f"{at}", ground_truth="1")
                for at in range(self.position, self.position + given)
            ],
        )
        self.position += given
        self.answers[request_id] = count, batch
        return batch

    async def seek(self, position: int, request_id: str) -> None:
        self.seeks.append(position)
        self.position = position
        if self.stubborn:
            self.position += 1


class Replay:
    """A replay buffer: groups by id, and their states."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.fresh: dict[str, Any] = {}
        self.leased: dict[str, Any] = {}
        self.acknowledged: list[str] = []
        self.priorities: dict[str, float] = {}
        self.cursor: PromptCursor
        self.calls: list[str] = []
        self.store_s = 0.0
        """How long it takes to store groups, unless that is drawn."""

    async def add(self, groups: list[Any]) -> int:
        assert len(groups) <= 32
        await asyncio.sleep(self.store_s or self.draw.uniform(0, 0.5))
        known = {*self.fresh, *self.leased, *self.acknowledged}
        new = {group.id: group for group in groups if group.id not in known}
        self.fresh |= new
        return len(new)

    async def take(self, request: TakeRequest) -> TakenGroups:
        old = [
            each for each, group in self.fresh.items() if group.weight_version < request.min_version
        ]
        for each in old:
            del self.fresh[each]
        ids: list[str] = []
        if len(self.fresh) >= request.count:
            ids = sorted(self.fresh, key=lambda each: self.fresh[each].position)[: request.count]
        for each in ids:
            self.leased[each] = self.fresh.pop(each)
        return TakenGroups(groups=[], ids=ids, evicted=len(old))

    async def ack(self, ids: list[str]) -> None:
        progress = self.cursor.progress
        for each in ids:
            position = self.leased[each].position
            is_finished = position < progress.position or position in progress.finished
            assert not is_finished, "a cursor that is saved now would skip the group"
        await asyncio.sleep(0.01)
        self.calls.append("ack")
        for each in ids:
            del self.leased[each]
        self.acknowledged += ids

    async def set_priorities(self, priorities: dict[str, float]) -> None:
        assert priorities.keys() <= self.leased.keys(), "before they are acknowledged"
        self.calls.append("priorities")
        self.priorities |= priorities

    async def stats(self) -> dict[str, int]:
        return {"fresh": len(self.fresh), "leased": len(self.leased), "consumed": 99}


class Maker:
    """Stands for what fills groups: takes its time, and fails now and then."""

    def __init__(self, world: "World") -> None:
        self.world = world

    def empty(self, drawn: DrawnPrompt, tokens: Any, group_id: str) -> Any:
        assert tokens == f"tokens of {drawn.prompt.id}"
        world = self.world
        world.tries.append(drawn.position)
        assert drawn.prompt.id == f"p{drawn.position % EPOCH}"
        assert drawn.epoch == drawn.position // EPOCH
        return SimpleNamespace(
            id=group_id,
            position=drawn.position,
            prompt_id=drawn.prompt.id,
            weight_version=world.version,
            completions=[],
            prompt_routed_experts=[],
        )

    async def fill(self, group: Any, prompt: Prompt, answer_start: Any) -> None:
        world = self.world
        assert answer_start == f"start of {prompt.id}"
        world.generating += 1
        world.check_slots()
        await asyncio.create_task(world.send())
        await asyncio.sleep(world.draw.choice([0.1, 1.0, world.draw.uniform(0, 9)]))
        world.generating -= 1
        world.fails_left -= 1
        if world.fails_left >= 0 or world.draw.random() < world.fails:
            world.failures[group.position] += 1
            raise GroupFailed("reward", "no reward")


class World:
    """A run: its collector and what it needs."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.draw = random.Random(seed)
        self.fails = 0.0
        self.fails_left = settings.get("fails_left", 0)
        self.version = 0
        self.generating = 0
        self.sent = 0
        """Requests that have left, each from a task of its own."""
        self.slots = 0
        self.taken = 0
        self.stages = Counter[str]()
        """How often each stage is active now."""
        self.tries: list[int] = []
        self.failures = Counter[int]()
        self.data = Data(self.draw)
        self.replay = Replay(self.draw)
        config = Config()
        config.limits.max_failed_groups = settings.get("max_failed_groups", 10**6)
        config.reproducible = settings.get("reproducible", False)
        services = SimpleNamespace(data=self.data, replay=self.replay)
        prompter = SimpleNamespace(
            tokenised=lambda prompts: [
                SimpleNamespace(
                    token_ids=f"tokens of {each.id}", answer_start=f"start of {each.id}"
                )
                for each in prompts
            ]
        )
        clock = SimpleNamespace(stage=self.stage, is_active=lambda *given: self.generating > 0)
        context: Any = SimpleNamespace(
            config=config, services=services, prompter=prompter, clock=clock, run_id="run"
        )
        patch.setattr(collector_module, "GroupMaker", lambda context, drops: Maker(self))
        self.cursor = PromptCursor(PromptProgress())
        self.replay.cursor = self.cursor
        truths: Any = SimpleNamespace(unsolvable={UNSOLVABLE: "no"}, run=self.nothing)
        self.collector = Collector(context, self.cursor, truths)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.stages[name] += 1
        try:
            yield
        finally:
            self.stages[name] -= 1

    async def nothing(self) -> None:
        pass

    async def send(self) -> None:
        self.sent += 1

    def check_slots(self) -> None:
        untaken = self.collector.untaken.values()
        held = sum(each.state.name != "DROPPED" for each in untaken) + self.taken
        assert held <= self.slots
        assert self.generating <= self.slots

    async def take(self, count: int, min_version: int = 0) -> list[Any]:
        number = len(self.replay.acknowledged) + len(self.replay.leased)
        request = TakeRequest(
            count=count, min_version=min_version, request_id=f"take-{number}", run_id="run"
        )
        groups = await self.collector.take(request)
        self.taken += len(groups)
        return groups


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_run_collects_every_prompt_once_and_no_more_than_its_slots(
    seed: int, reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        world = World(seed, monkeypatch, reproducible=reproducible)
        draw = world.draw
        collector = world.collector
        size = draw.randint(1, 4)
        world.slots = size * draw.randint(1, 3)
        world.fails = draw.choice([0.0, 0.2, 0.4])
        world.data.disturbed = draw.choice([0.0, 0.3])
        total = size * 6
        running = asyncio.create_task(collector.run(total, world.slots))
        positions: list[int] = []
        equal = 0
        stale = 0
        oldest = 0
        for step in range(6):
            groups: list[Any] = []
            while len(groups) < size:
                if running.done():
                    running.result()
                await collector.wait_for_oldest(size, draw.choice([0.01, 5.0]))
                collector.drops.recent()
                if draw.random() < 0.3:
                    oldest = max(0, world.version - 1)
                found = await world.take(size - len(groups), oldest)
                old = [each for each in collector.drops.recent() if each.reason == "stale"]
                assert all(each.group.weight_version < oldest for each in old)
                stale += len(old)
                if found and draw.random() < 0.2:
                    await collector.replace_equal(found)
                    for group in found:
                        assert world.replay.priorities[group.id] == 0.0
                    assert world.replay.calls[-2:] == ["priorities", "ack"]
                    world.taken -= len(found)
                    equal += len(found)
                    positions += [group.position for group in found]
                else:
                    groups += found
                await asyncio.sleep(draw.uniform(0, 3))
            collector.expect_slots(size)
            await collector.store_lost()
            await collector.acknowledge(groups)
            positions += [group.position for group in groups]
            world.version = step + 1
            world.taken -= size
            collector.free_slots(size)
            await asyncio.sleep(draw.uniform(0, 2))
            world.check_slots()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

        assert len(positions) == len(set(positions)), "each is trained on once"
        progress = world.cursor.progress
        assert progress.position not in progress.finished, "no gap where there is none"
        finished = {*range(progress.position), *progress.finished}
        given_up = {at for at, count in world.failures.items() if count >= MAX_TRIES}
        unsolvable = {at for at in finished if f"p{at % EPOCH}" == UNSOLVABLE}
        assert {*positions} <= finished
        left = finished - {*positions} - unsolvable
        assert all(world.tries.count(at) == MAX_TRIES for at in left), "skipped after three tries"
        assert given_up <= finished
        assert not {at for at in world.tries if f"p{at % EPOCH}" == UNSOLVABLE}
        assert collector.drops.counts["ground_truth"] == len(unsolvable)
        reasons = {"ground_truth", "zero_variance", "stale", "reward"}
        assert {*collector.drops.counts} <= reasons
        assert collector.drops.counts["zero_variance"] == equal
        assert collector.drops.counts["stale"] == stale
        assert collector.drops.counts["reward"] == world.failures.total()
        if world.data.disturbed == 0.0 and not world.failures and not stale:
            assert world.tries == sorted(set(world.tries)), "in the order of the stream"
        assert max(Counter(world.tries).values()) <= MAX_TRIES

    with simulated(seed) as loop:
        loop.run_until_complete(asyncio.wait_for(play(), LIMIT_S))


def played(seed: int, play: Any, **settings: Any) -> None:
    """Runs a coroutine with a world on the virtual clock."""

    async def main(patch: pytest.MonkeyPatch) -> None:
        world = World(seed, patch, **settings)
        world.slots = 4
        running = asyncio.create_task(world.collector.run(40, 4))
        try:
            await asyncio.wait_for(play(world, running), LIMIT_S)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    with simulated(seed) as loop, pytest.MonkeyPatch.context() as patch:
        loop.run_until_complete(main(patch))


def failure_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_so_many_failures_in_a_row_stop_the_run(limit: int) -> None:
    async def play(world: World, running: asyncio.Task[None]) -> None:
        await world.collector.wait_for_oldest(4, 60.0)
        world.fails = 1.0
        await world.take(4)
        await world.collector.acknowledge([*world.replay.leased.values()])
        world.taken = 0
        world.collector.free_slots(4)
        [error] = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(error, BaseException)
        found = failure_of(error)
        assert isinstance(found, CollectFailed)
        assert (found.code, found.field, found.value) == (
            "groups_dropped",
            "limits.max_failed_groups",
            str(limit),
        )
        assert found.about["reason"] == "reward"
        assert "reward function" in str(found.remedy)
        assert world.failures.total() >= limit

    played(1, play, max_failed_groups=limit)


def test_a_success_ends_a_row_of_failures() -> None:
    async def play(world: World, running: asyncio.Task[None]) -> None:
        for turn in range(4):
            world.fails_left = 5
            await world.collector.wait_until_idle(60.0)
            groups = await world.take(4)
            await world.collector.acknowledge(groups)
            world.taken = 0
            world.collector.free_slots(4)
            assert world.failures.total() == 5 * (1 + turn)
        assert not running.done()

    played(2, play, max_failed_groups=8)


@pytest.mark.parametrize("fault", ["twice", "foreign", "trained", "too old"])
def test_a_group_that_is_not_the_runs_to_train_on_stops_it(fault: str) -> None:
    async def play(world: World, running: asyncio.Task[None]) -> None:
        assert await world.collector.wait_until_idle(60.0)
        replay = world.replay
        [first] = await world.take(1)
        if fault == "trained":
            await world.collector.acknowledge([first])
        wanted = next(iter(replay.fresh))
        ids = {"twice": first.id, "foreign": "other-1", "trained": first.id, "too old": wanted}

        async def take(request: TakeRequest) -> TakenGroups:
            return TakenGroups(groups=[], ids=[ids[fault]], evicted=0)

        replay.take = take  # type: ignore[method-assign]
        with raises(CollectFailed, field="id", value=ids[fault]) as error:
            await world.take(1, min_version=1 if fault == "too old" else 0)
        words = {
            "twice": "handed out before",
            "foreign": "does not wait",
            "trained": "does not wait",
            "too old": "weight version 0 is older than version 1",
        }
        assert words[fault] in error.value.message

    played(3, play)


@pytest.mark.parametrize("lost", ["none", "fresh", "leased", "kept for good"])
def test_what_the_buffer_lost_is_stored_again_or_named(lost: str) -> None:
    async def play(world: World, running: asyncio.Task[None]) -> None:
        assert await world.collector.wait_until_idle(60.0)
        replay = world.replay
        await world.take(2)
        waiting = dict(replay.fresh)
        assert len(waiting) == 2
        if lost == "fresh":
            replay.fresh.clear()
        elif lost == "leased":
            replay.leased.popitem()
        elif lost == "kept for good":
            name, _ = replay.fresh.popitem()
            replay.acknowledged.append(name)
        if lost in ("none", "fresh"):
            await world.collector.store_lost()
            assert replay.fresh == waiting
        else:
            field = "leased" if lost == "leased" else "/groups/ack"
            with raises(CollectFailed, field=field, value="1"):
                await world.collector.store_lost()

    played(4, play)


def test_a_data_server_that_another_client_draws_from_is_named() -> None:
    async def play(world: World, running: asyncio.Task[None]) -> None:
        world.data.stubborn = True
        world.data.position = 7
        [error] = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(error, BaseException)
        found = failure_of(error)
        assert isinstance(found, CollectFailed)
        assert found.field == "prompts"
        assert world.data.seeks == [0]

    played(5, play)


def test_groups_are_known_as_soon_as_all_are_graded() -> None:
    async def play(world: World, running: asyncio.Task[None]) -> None:
        collector = world.collector
        for step in range(4):
            assert await collector.wait_for_graded(3, 60.0) == [], "one more is on its way"
            assert await collector.wait_for_graded(5, 60.0) == []
            world.replay.store_s = 30.0
            if step:
                await collector.acknowledge(await world.take(4))
                world.taken = 0
                collector.free_slots(4)
            early = await collector.wait_for_graded(4, 0.05)
            assert len(early) == (0 if step else 4)
            graded = await collector.wait_for_graded(4, 60.0)
            assert [each.position for each in graded] == [*collector.untaken]
            is_stored = [each.is_stored for each in collector.untaken.values()]
            assert any(is_stored) == (step == 0), "not after they are stored"
            assert await collector.wait_until_idle(60.0)
            assert collector.stored_groups == 4 * (step + 1)

    played(7, play)


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_group_that_is_tried_again_keeps_its_place_where_runs_are_to_be_the_same(
    reproducible: bool,
) -> None:
    async def play(world: World, running: asyncio.Task[None]) -> None:
        assert await world.collector.wait_until_idle(60.0)
        positions = [*world.collector.untaken]
        [failed] = world.failures
        others = [at for at in (0, 1, 2, 3) if at != failed]
        assert failed != 3
        assert positions == ([0, 1, 2, 3] if reproducible else [*others, failed])

    played(9, play, reproducible=reproducible, fails_left=1)


def test_a_wait_for_the_oldest_group_alone_is_one_for_stragglers() -> None:
    async def play(world: World, running: asyncio.Task[None]) -> None:
        collector = world.collector
        waiting = asyncio.create_task(collector.wait_for_oldest(2, 600.0))
        seen: set[tuple[int, bool]] = set()
        while not waiting.done():
            await asyncio.sleep(0.01)
            stored = [each.is_stored for each in collector.untaken.values()]
            assert (world.stages["stragglers"] == 1) == (sum(stored) >= 2 and not waiting.done())
            seen.add((sum(stored), waiting.done()))
        assert (2, False) in seen, "two are stored, and not the oldest"
        assert (4, True) not in seen, "the others may take longer"
        assert await waiting
        assert world.stages["stragglers"] == 0

    played(11, play)


def test_prompts_are_drawn_before_their_slots_are_free_and_used_once() -> None:
    async def play(world: World, running: asyncio.Task[None]) -> None:
        for _ in range(5):
            assert await world.collector.wait_until_idle(60.0)
            groups = await world.take(4)
            before = world.data.position
            world.collector.expect_slots(4)
            await asyncio.sleep(5.0)
            assert world.data.position >= before + 4, "drawn ahead"
            drawn = world.data.position
            assert len(world.tries) == len(set(world.tries))
            await world.collector.acknowledge(groups)
            world.taken = 0
            world.collector.expect_slots(4)
            await asyncio.sleep(5.0)
            assert world.data.position == drawn, "enough are there"
            world.collector.free_slots(4)
            sent = world.sent
            await world.collector.wait_until_sent(60.0)
            assert world.generating == 4
            assert world.sent == sent + 4
            assert world.data.position == drawn
        assert world.tries == [at for at in range(world.tries[-1] + 1) if at % EPOCH != 4]

    played(6, play)


@pytest.mark.parametrize(("size", "weight"), [(0, 1), (1, 1), (4, 2), (6, 3), (64, 32), (200, 100)])
def test_a_large_group_counts_as_several_in_one_call(size: int, weight: int) -> None:
    """64 MB go into a call, or 32 groups."""
    half = np.zeros(size << 19, np.uint8)
    completion: Any = SimpleNamespace(logprobs=half, routed_experts=half)
    group: Any = SimpleNamespace(completions=[completion])
    assert collector_module._weight(group) == weight
    group.completions = [completion] * 2
    assert collector_module._weight(group) == max(1, size)
