"""The event loop beside the training loop: whatever ends a task or the loop, nobody waits for
it."""

import asyncio
import sys

import pytest

from common.errors import ServiceError
from common.process.loop_thread import LoopThread
from tests.support.errors import raises


async def exits() -> None:
    sys.exit("out of here")


async def answers() -> int:
    await asyncio.sleep(0)
    return 7


def test_an_exit_in_a_task_reaches_its_caller_and_leaves_the_loop_running() -> None:
    with LoopThread() as loop:
        with pytest.raises(SystemExit, match="out of here"):
            loop.call(exits())
        assert loop.call(answers()) == 7


def test_a_call_into_a_loop_whose_thread_has_died_fails() -> None:
    with LoopThread() as loop:

        async def waits_for_ever() -> None:
            asyncio.get_running_loop().stop()
            await asyncio.Event().wait()

        waiting = loop.begin(waits_for_ever())
        with raises(ServiceError, code="clients_died"):
            waiting()
        loop._thread.join()
