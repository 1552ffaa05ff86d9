"""Futures that nobody may wait for in the end."""

import asyncio
from typing import Any, TypeVar

_F = TypeVar("_F", bound="asyncio.Future[Any]")


def forgettable(future: _F) -> _F:
    """Returns the future or task. Its error may be forgotten: asyncio logs the others', if nobody
    has asked for them, whenever the garbage collector finds them.
    """
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
