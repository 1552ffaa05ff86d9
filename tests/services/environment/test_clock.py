"""The clock of an episode stands still while the episode waits for others."""

import asyncio

import pytest

from services.environment.clock import EpisodeClock


async def episode(waits_s: float, own_s: float) -> None:
    """An episode of four turns, which may take 0.2 s of its own."""
    clock = EpisodeClock()
    async with clock.limit(0.2):
        for _ in range(4):
            with clock.stopped():
                await asyncio.sleep(waits_s)
            await asyncio.sleep(own_s)


async def test_only_the_episodes_own_time_counts() -> None:
    await episode(waits_s=0.1, own_s=0.0)
    with pytest.raises(TimeoutError):
        await episode(waits_s=0.01, own_s=0.1)


async def test_waits_may_overlap_and_limits_may_nest() -> None:
    clock = EpisodeClock()

    async def wait(seconds: float) -> None:
        with clock.stopped():
            await asyncio.sleep(seconds)

    async with clock.limit(60), clock.limit(None), clock.limit(0.1):
        await asyncio.gather(wait(0.1), wait(0.3))
    with pytest.raises(TimeoutError):
        async with clock.limit(60), clock.limit(0.1):
            await asyncio.sleep(5)


async def test_a_limit_that_begins_while_the_clock_stands_still_runs_later() -> None:
    clock = EpisodeClock()
    with clock.stopped():
        limit = clock.limit(0.05)
        await limit.__aenter__()
        await asyncio.sleep(0.1)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(5)
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
