"""What the loops of an agent share."""

import asyncio
import contextlib
import logging
import time

log = logging.getLogger(__name__)
_WARN_EVERY_S = 60.0


async def wait_event(event: asyncio.Event, timeout_s: float) -> None:
    """Waits for the event, at most `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


class RateLimitedWarnings:
    """Logs repeated warnings at most once a minute per topic and level."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, int], float] = {}

    def warn(self, topic: str, text: str, level: int = logging.WARNING) -> None:
        """Logs `text` unless this topic was logged at this level in the last minute."""
        now = time.monotonic()
        last = self._logged.get((topic, level))
        if last is None or now - last >= _WARN_EVERY_S:
            self._logged[topic, level] = now
            log.log(level, "%s", text)
