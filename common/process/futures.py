"""The ends of tasks: those that are cancelled, and those that nobody may wait for in the end."""

import asyncio
from collections.abc import Collection
from typing import Any, TypeVar

_F = TypeVar("_F", bound="asyncio.Future[Any]")


def forgettable(future: _F) -> _F:
    """Returns the future or task, and marks its error as seen: asyncio logs an error that nobody
    has asked for when the garbage collector finds it.
    """
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


async def cancel(tasks: "Collection[asyncio.Task[Any]]") -> None:
    """Cancels tasks and waits for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
