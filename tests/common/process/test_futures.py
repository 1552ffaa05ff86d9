"""What nobody waits for any more says nothing when it fails."""

import asyncio
import gc

import pytest

from common.process.futures import forgettable
from common.process.progress import Progress, Stuck, bounded


async def fail() -> None:
    raise ValueError("refused")


@pytest.mark.parametrize("may_be_forgotten", [True, False])
async def test_only_a_forgettable_error_is_not_logged(
    may_be_forgotten: bool, caplog: pytest.LogCaptureFixture
) -> None:
    task = asyncio.create_task(fail())
    if may_be_forgotten:
        assert forgettable(task) is task
    await asyncio.wait({task})
    del task
    gc.collect()
    assert ("never retrieved" in caplog.text) == (not may_be_forgotten)


async def test_a_cancelled_future_stays_cancelled() -> None:
    future = forgettable(asyncio.get_running_loop().create_future())
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await future


async def test_work_that_is_stuck_may_fail_when_it_is_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
            raise ValueError("its connection is gone")

    with pytest.raises(Stuck):
        await bounded(hang(), Progress("an answer", 0.05), lambda: 7)
    await ended.wait()
    await asyncio.sleep(0)
    gc.collect()
    assert "never retrieved" not in caplog.text
