"""Combining calls: which items share a call, which go alone, and who gets an error."""

import asyncio
import logging

import pytest

from common.clients.base import Unreachable
from common.errors import ServiceLost
from common.process import logs
from tests.simulation.virtual_time import simulated
from trainer.rollouts.request_batcher import RequestBatcher


async def test_simultaneous_items_share_one_call_and_each_gets_its_result() -> None:
    calls: list[list[int]] = []

    async def double(items: list[int]) -> list[int]:
        calls.append(items)
        return [2 * item for item in items]

    batched = RequestBatcher(double, max_size=10)
    assert await asyncio.gather(*map(batched, range(4))) == [0, 2, 4, 6]
    assert await batched(7) == 14
    assert calls == [[0, 1, 2, 3], [7]]


async def test_the_size_of_a_call_is_limited() -> None:
    calls: list[list[list[int]]] = []

    async def lengths(items: list[list[int]]) -> list[int]:
        calls.append(items)
        return list(map(len, items))

    batched = RequestBatcher(lengths, 5, len)
    sizes = [2, 2, 2, 9, 1]
    assert await asyncio.gather(*(batched([0] * size) for size in sizes)) == sizes
    assert [[len(item) for item in call] for call in calls] == [[2, 2], [2], [9], [1]]


async def test_calls_do_not_wait_for_each_other() -> None:
    slow = asyncio.Event()

    async def wait(items: list[asyncio.Event]) -> list[int]:
        await asyncio.gather(*(item.wait() for item in items))
        return [len(items)] * len(items)

    batched = RequestBatcher(wait, max_size=1)
    first = asyncio.create_task(batched(slow))
    set_already = asyncio.Event()
    set_already.set()
    assert await batched(set_already) == 1
    assert not first.done()
    slow.set()
    assert await first == 1


async def test_items_that_come_during_a_call_go_together_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.rollouts.request_batcher._BUSY_WAIT_S", 60.0)
    answered = asyncio.Event()
    calls: list[list[int]] = []

    async def wait(items: list[int]) -> list[int]:
        calls.append(items)
        await answered.wait()
        return items

    batched = RequestBatcher(wait, max_size=10)
    tasks = [asyncio.create_task(batched(0))]
    while not calls:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    for item in (1, 2):
        tasks.append(asyncio.create_task(batched(item)))
        await asyncio.sleep(0.004)  # longer than items wait while no call is under way
    assert calls == [[0]]
    answered.set()
    assert await asyncio.gather(*tasks) == [0, 1, 2]
    assert calls == [[0], [1, 2]]


async def test_the_last_item_does_not_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.rollouts.request_batcher._WAIT_S", 60.0)
    under_way = 3
    calls: list[list[int]] = []

    async def double(items: list[int]) -> list[int]:
        calls.append(items)
        return [2 * item for item in items]

    batched = RequestBatcher(double, max_size=10, may_follow=lambda: under_way > 0)

    async def item(number: int) -> int:
        nonlocal under_way
        under_way -= 1
        return await batched(number)

    assert await asyncio.gather(*map(item, range(3))) == [0, 2, 4]
    assert calls == [[0, 1, 2]]


async def test_the_last_item_does_not_wait_for_the_call_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.rollouts.request_batcher._BUSY_WAIT_S", 60.0)
    answered = asyncio.Event()
    calls: list[list[int]] = []

    async def wait(items: list[int]) -> list[int]:
        calls.append(items)
        if len(calls) == 2:
            answered.set()  # of both calls: the second does not wait for the first
        await answered.wait()
        return items

    more = True
    batched = RequestBatcher(wait, max_size=10, may_follow=lambda: more)
    first = asyncio.create_task(batched(0))
    while not calls:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    more = False
    assert await asyncio.wait_for(batched(1), 30) == 1
    assert await first == 0
    assert calls == [[0], [1]]


async def test_an_error_reaches_only_the_item_that_causes_it() -> None:
    async def invert(items: list[int]) -> list[float]:
        return [1 / item for item in items]

    batched = RequestBatcher(invert, max_size=10)
    results = await asyncio.gather(*map(batched, [1, 0, 2]), return_exceptions=True)
    assert [results[0], results[2]] == [1.0, 0.5]
    assert isinstance(results[1], ZeroDivisionError)


async def test_a_call_that_timed_out_is_not_repeated_for_each_item() -> None:
    calls: list[list[int]] = []

    async def unanswered(items: list[int]) -> list[int]:
        calls.append(items)
        raise Unreachable("no answer within 600 s")

    batched = RequestBatcher(unanswered, max_size=10)
    results = await asyncio.gather(*map(batched, [1, 2, 3]), return_exceptions=True)
    assert calls == [[1, 2, 3]]
    assert all(isinstance(result, Unreachable) for result in results)


@pytest.mark.parametrize("error", [ServiceLost("it has died"), asyncio.CancelledError()])
async def test_a_call_that_no_other_could_replace_fails_for_every_item(
    error: BaseException,
) -> None:
    calls = 0

    async def call(items: list[int]) -> list[int]:
        nonlocal calls
        calls += 1
        raise error

    batched = RequestBatcher(call, max_size=10)
    found = await asyncio.gather(batched(1), batched(2), return_exceptions=True)
    assert [type(each) for each in found] == [type(error)] * 2
    assert calls == 1


async def test_a_single_call_has_the_id_of_its_item_and_a_shared_one_logs_the_ids(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[tuple[str, list[int]]] = []

    async def invert(items: list[int]) -> list[float]:
        calls.append((logs.request_id(), items))
        return [1 / item for item in items]

    caplog.set_level(logging.DEBUG, "trainer.rollouts.request_batcher")
    batched = RequestBatcher(invert, max_size=10)

    async def of(item: int) -> float:
        with logs.request(f"item-{item}"):
            return await batched(item)

    await of(5)
    await asyncio.gather(of(0), of(1), of(2), return_exceptions=True)
    alone, several, *again = calls
    assert alone == ("item-5", [5])
    assert several[1] == [0, 1, 2]
    assert not several[0].startswith("item")
    assert sorted(again) == [("item-0", [0]), ("item-1", [1]), ("item-2", [2])]
    assert caplog.messages == ["one call for item-0, item-1, item-2"]


async def test_a_cancelled_item_does_not_disturb_the_others() -> None:
    async def same(items: list[int]) -> list[int]:
        return items

    batched = RequestBatcher(same, max_size=10)
    gone, stays = asyncio.create_task(batched(1)), asyncio.create_task(batched(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == 2
    with pytest.raises(asyncio.CancelledError):
        await gone


def test_the_example_of_the_page() -> None:
    began: list[tuple[int, str]] = []

    async def play() -> None:
        loop = asyncio.get_running_loop()

        async def call(items: list[str]) -> list[str]:
            began.append((round(1000 * loop.time()), "".join(items)))
            await asyncio.sleep(0.010)
            return [item.upper() for item in items]

        store = RequestBatcher(call, max_size=3)

        async def stored(item: str, at_ms: int) -> str:
            await asyncio.sleep(at_ms / 1000)
            return await store(item)

        times = {"a": 0, "b": 1, "c": 4, "d": 14, "e": 14, "f": 14, "g": 15}
        found = await asyncio.gather(*(stored(item, at) for item, at in times.items()))
        assert found == [*"ABCDEFG"]

    with simulated(0) as loop:
        loop.run_until_complete(play())
    assert began == [(3, "ab"), (13, "c"), (15, "def"), (25, "g")]


def test_a_service_that_answers_too_little_leaves_nobody_waiting() -> None:
    async def play() -> list[int | BaseException]:
        async def call(items: list[int]) -> list[int]:
            return items[:-1]

        store = RequestBatcher(call, max_size=3)
        calls = asyncio.gather(*map(store, [7, 8]), return_exceptions=True)
        return await asyncio.wait_for(calls, 60.0)

    with simulated(0) as loop:
        first, second = loop.run_until_complete(play())
    assert first == 7
    assert isinstance(second, ValueError)
