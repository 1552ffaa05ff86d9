"""Grading on a busy machine and beside hostile requests: turns, spare workers, and limits in CPU
time."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.settings.rewards import MathReward
from common.settings.sections import RewardSection
from common.wire.schemas import RewardItem
from services.reward.fair_slots import FairSlots
from services.reward.functions.base import Message, RewardFunction
from services.reward.hosts import ThreadHost
from services.reward.pool import WorkerPool, WorkerSpec
from services.reward.service import RewardService
from tests.support.services.sandbox import code_function

BOMB = "\\sum_{i=1}^{1000000000} \\frac{1}{i}"


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def served(slots: FairSlots, waves: list[list[str]]) -> list[str]:
    """Returns the order in which calls get their slots; each call names its batch, and waves arrive
    in succession."""
    order: list[str] = []

    async def call(batch: str) -> None:
        async with slots.slot(batch):
            order.append(batch)
            await _settled()
            await _settled()

    tasks = []
    for wave in waves:
        tasks += [asyncio.create_task(call(batch)) for batch in wave]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return order


async def test_a_later_request_takes_turns_with_a_large_one() -> None:
    order = await served(FairSlots(1), [["a"] * 40, ["b"] * 5])
    assert max(i for i, batch in enumerate(order) if batch == "b") <= 12
    assert order.count("a") == 40


async def test_a_later_request_does_not_wait_behind_many_small_ones() -> None:
    order = await served(FairSlots(1), [[f"a{i}" for i in range(40)], ["b"]])
    assert order.index("b") <= 3
    assert order[:20].count("b") == 1
    assert sorted(order) == sorted([f"a{i}" for i in range(40)] + ["b"])


async def test_three_requests_get_equal_shares() -> None:
    order = await served(FairSlots(2), [["a"] * 30, ["b"] * 30, ["c"] * 30])
    for batch in "abc":
        assert 8 <= order[:30].count(batch) <= 12


async def test_cancelled_calls_give_their_places_back() -> None:
    slots = FairSlots(2)
    batches = ["a", "b", "a", "c"]
    started: list[int] = []

    async def call(i: int) -> None:
        async with slots.slot(batches[i % 4]):
            started.append(i)
            await asyncio.sleep(1000)

    for cancelled_first in (True, False):
        tasks = [asyncio.create_task(call(i)) for i in range(12)]
        await _settled()
        for task in tasks[::2] if cancelled_first else tasks[::-1]:
            task.cancel()
            if not cancelled_first:
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await served(slots, [["x", "y", "z"]]) == ["x", "y", "z"]


class Recording(RewardFunction):
    """Records the order of its calls."""

    name = "recording"
    bounds_itself = True

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, completions: list[list[Message]], **kwargs: object) -> list[float]:
        self.seen += [completion[0]["content"] for completion in completions]
        return [1.0] * len(completions)


async def test_items_of_two_requests_take_turns_in_threads_too() -> None:
    function = Recording()
    host = ThreadHost(function, None, 1, call_items=1)
    requests = [
        [RewardItem(response=name, ground_truth="") for _ in range(count)]
        for name, count in (("a", 40), ("b", 3))
    ]
    await asyncio.gather(*map(host.score, requests))
    assert max(i for i, name in enumerate(function.seen) if name == "b") <= 10


def item(answer: str, gold: str) -> RewardItem:
    return RewardItem(response=f"\\boxed{{{answer}}}", ground_truth=gold)


def hard(i: int) -> RewardItem:
    """Returns a right answer that only a worker can compare."""
    return item(
        f"\\sqrt{{{i + 2}}} + \\frac{{x+{i}}}{{2}}", f"\\frac{{x}}{{2}} + {i}/2 + ({i + 2})^{{1/2}}"
    )


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    command = ["/bin/sh", "-c", "while :; do :; done"]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


@pytest.fixture
async def grader() -> AsyncIterator[RewardService]:
    async with RewardService(
        RewardSection(workers=2, functions=[MathReward(timeout_s=0.5)])
    ) as started:
        await started.ready()
        yield started


@pytest.mark.slow
@pytest.mark.integration
async def test_no_honest_answer_is_lost_beside_hostile_ones_on_a_busy_machine(
    grader: RewardService,
) -> None:
    items = [hard(i) for i in range(40)]
    for i in range(10):
        items.insert(5 * i, item(BOMB, "x"))
    with busy_loops(2):
        results = await grader.score(items)
    bombs = [result for result, one in zip(results, items, strict=True) if BOMB in one.response]
    assert [result.status for result in bombs] == ["timeout"] * 10
    assert sum(result.correct for result in results) == 40, [result.status for result in results]


@pytest.mark.integration
@pytest.mark.slow
async def test_the_bombs_of_one_caller_do_not_hold_up_another(grader: RewardService) -> None:
    """Twenty bombs arrive in one request or in twenty: another caller gets its answers while most
    bombs still wait."""
    for requests in (1, 20):
        bombs = [
            asyncio.create_task(grader.score([item(BOMB, "x")] * (20 // requests)))
            for _ in range(requests)
        ]
        await _settled()
        answers = await grader.score([hard(i) for i in range(3)])
        assert all(answer.correct for answer in answers)
        assert grader.stats()["unfinished"] >= 8, "most bombs wait"
        for bomb in bombs:
            bomb.cancel()
        await asyncio.gather(*bombs, return_exceptions=True)


@pytest.mark.integration
async def test_a_spare_worker_takes_the_place_of_a_killed_one(grader: RewardService) -> None:
    pool = grader._pools.copy().pop()
    for _ in range(40_000):
        if pool._idle.qsize() == 4:
            break
        await asyncio.sleep(0.01)
    assert pool._idle.qsize() == 4, "two and their spares"
    await grader.score([item(BOMB, "x")])
    before = pool._idle.qsize()
    assert before >= 3, "three that have never worked"
    assert (await grader.score([hard(1)]))[0].correct


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.integration
async def test_start_cancelled_at_any_point_leaves_no_socket() -> None:
    spec = WorkerSpec("services.reward.functions.handler", {"functions": []})
    async with WorkerPool(spec, 1, 1.0) as pool:
        await pool.ready()
        await _settled()
        before = open_files()
        for steps in range(12):
            task = asyncio.create_task(pool._spawn())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            try:
                worker = await task
            except asyncio.CancelledError:
                continue
            worker.kill()
        while open_files() != before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.integration
@pytest.mark.slow
def test_a_busy_machine_fails_no_program() -> None:
    """Twenty-one processes share one processor, so a program gets a twentieth of a second in each
    second."""
    cases = [{"input": "", "output": "1"}]
    burn = "import time\nwhile time.process_time() < {}: pass\nprint(1)"
    allowed = os.sched_getaffinity(0)
    short, tiny = code_function(timeout_s=1.5), code_function(timeout_s=0.2, slots=1)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        with busy_loops(20):
            assert [result.status for result in short.results(burn.format(0.15), cases)] == [
                "passed"
            ]
            text = f"```python\n{burn.format(100)}\n```"
            [score] = tiny.scores([[{"role": "assistant", "content": text}]], test_cases=[cases])
            assert (score.value, score.status, score.answer) == (None, "timeout", "starved")
            assert score.reason == "the machine was too busy to run the program"
    finally:
        os.sched_setaffinity(0, allowed)
    assert [result.status for result in tiny.results(burn.format(100), cases)] == ["timeout"]
    assert [result.status for result in tiny.results("import time\ntime.sleep(100)", cases)] == [
        "timeout"
    ]
