"""The clock of an episode stands still while the episode waits for others."""

import asyncio

import pytest

from services.environment.clock import EpisodeClock
from tests.support.processes.clocks import leap


async def pass_time(seconds: float) -> None:
    """As a long sleep: what is due by then is done."""
    leap(seconds)
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def episode(waits_s: float, own_s: float) -> None:
    """An episode of four turns, which may take 200 s of its own."""
    clock = EpisodeClock()
    async with clock.limit(200):
        for _ in range(4):
            with clock.stopped():
                await pass_time(waits_s)
            await pass_time(own_s)


async def test_only_the_episodes_own_time_counts() -> None:
    await episode(waits_s=100, own_s=0)
    with pytest.raises(TimeoutError):
        await episode(waits_s=10, own_s=100)


async def test_waits_may_overlap_and_limits_may_nest() -> None:
    clock = EpisodeClock()

    async def wait(times: int) -> None:
        with clock.stopped():
            for _ in range(times):
                await pass_time(100)

    async with clock.limit(60_000), clock.limit(None), clock.limit(100):
        await asyncio.gather(wait(1), wait(3))
    with pytest.raises(TimeoutError):  # noqa: PT012
        async with clock.limit(60_000), clock.limit(100):
            leap(150)
            await asyncio.Event().wait()


async def test_a_limit_that_begins_while_the_clock_stands_still_runs_later() -> None:
    clock = EpisodeClock()
    with clock.stopped():
        limit = clock.limit(100)
        await limit.__aenter__()
        await pass_time(200)
    leap(150)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
