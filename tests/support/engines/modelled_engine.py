"""An engine with slots, a queue and a speed, that answers as SGLang does over real sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from benchmarks.true_size.stand_in.sglang.launch_server import Engine, Speed

STEP_S = 0.02


def speed(slots: int, step_s: float = STEP_S, shortest: float = 1.0) -> Speed:
    """Returns the model of an engine that decodes so many completions at once, a token of each in
    `step_s` seconds."""
    return Speed(
        slots=slots,
        kv_tokens=1 << 30,
        weights_s=step_s,
        kv_s=0.0,
        load_s=0.0,
        clock=1.0,
        vocabulary=1000,
        shortest=shortest,
        layers=0,
        top_k=0,
    )


@dataclass
class Modelled:
    """A served engine."""

    url: str
    engine: Engine

    def hang(self) -> None:
        """Stops the scheduler; the server goes on to answer."""
        self.engine._runs.clear()


@asynccontextmanager
async def modelled(
    slots: int, step_s: float = STEP_S, shortest: float = 1.0
) -> AsyncIterator[Modelled]:
    """Serves an engine."""
    engine = Engine(speed(slots, step_s, shortest), "1")
    runner = web.AppRunner(engine.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    try:
        yield Modelled(f"http://127.0.0.1:{runner.addresses[0][1]}", engine)
    finally:
        await runner.cleanup()
