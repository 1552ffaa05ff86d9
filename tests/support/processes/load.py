"""The metrics of a service, read over HTTP."""

import asyncio

from common.clients.base import Client


async def metric(client: Client, name: str) -> float:
    """Returns the value of a metric of a service's HTTP server."""
    page = (await client.http.get("/metrics", timeout=60)).text
    return next(
        float(line.rpartition(" ")[2])
        for line in page.splitlines()
        if line.startswith(f"rlhf_http_{name} ")
    )


async def held(client: Client, name: str, count: float) -> None:
    """Waits until a metric of a service's HTTP server has this value."""
    async with asyncio.timeout(400):
        while await metric(client, name) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
