"""Measures what sglang-router and smg cost, and how evenly they spread groups:
`OMP_NUM_THREADS=1 python -m benchmarks.router`.

Cost: the seconds until a router lists two workers, what it adds to a request that a worker answers
at once (300 pairs in a row), and its memory after 1,024 groups. Balance: 256 concurrent groups over
2 and 4 workers, by policy; the figure is the requests of the busiest worker over the mean. Prompts
are all different, as in training, or share their first 600 tokens, as in a few-shot evaluation. The
router runs as an agent starts it. The workers are processes that answer a group after a second
without computing. smg is skipped if it is not installed.
"""

import asyncio
import importlib.util
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import aiohttp
import psutil
from aiohttp import web

from benchmarks.command import command_parser
from benchmarks.processes import calling, free_port, local_url, processes
from common.process.topology import Topology
from common.settings.config import Config
from common.settings.sections import RolloutSection
from services.rollout.router import router_command

GROUPS = 256
ROUTERS = ["sglang-router", *(["smg"] if importlib.util.find_spec("smg") else [])]
POLICIES = ("round_robin", "random", "cache_aware")
REQUESTS = 300
GROUP_SIZE = 8
WORK_S = 1.0
_ANSWER = {
    "text": "because " * 400,
    "output_ids": list(range(500)),
    "meta_info": {"finish_reason": {"type": "stop"}},
}


def work(port: int) -> None:
    """Runs a worker that answers a group after WORK_S and a single completion at once, and counts
    the requests.
    """
    asked = running = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal asked, running
        n = (await request.json())["sampling_params"]["n"]
        asked += 1
        running += 1
        try:
            await asyncio.sleep(WORK_S if n > 1 else 0)
        finally:
            running -= 1
        return web.json_response(_ANSWER)

    async def info(_: web.Request) -> web.Response:
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": 0,
            "num_total_reqs": running,
        }
        said = {"asked": asked, "model_path": "/m", "served_model_name": "m", "is_generation": True}
        return web.json_response(
            {**said, "timestamp": time.time(), "version": "1", "loads": [load], "aggregate": load}
        )

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", generate)
    for path in ("/health", "/server_info", "/model_info", "/v1/loads"):
        app.router.add_get(path, info)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


async def answer_json(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(url) as answer:
        return dict(await answer.json())


def start_workers(stack: ExitStack, count: int) -> list[str]:
    """Starts workers that end with `stack`; returns their URLs."""
    urls = [local_url() for _ in range(count)]
    ports = [int(url.rpartition(":")[2]) for url in urls]
    commands = [calling(work, port) for port in ports]
    stack.enter_context(processes(commands, urls, disposable=True))
    return urls


async def start_router(
    stack: ExitStack, http: aiohttp.ClientSession, settings: dict[str, str], workers: Sequence[str]
) -> tuple[str, int]:
    """Starts a router and returns its URL and process once it lists all workers as healthy."""
    ports = {"router_port": free_port(), "router_metrics_port": free_port()}
    section = RolloutSection.model_validate({**settings, **ports})
    url = f"http://127.0.0.1:{section.router_port}"
    command = router_command(Config(rollout=section), Topology())[1:]
    (process,) = stack.enter_context(processes([command], [url], disposable=True))
    for worker in workers:
        await http.post(f"{url}/workers", json={"url": worker})
    healthy = 0
    while healthy < len(workers):
        await asyncio.sleep(0.05)
        listed = (await answer_json(http, f"{url}/workers"))["workers"]
        healthy = sum(worker["is_healthy"] for worker in listed)
    return url, process.pid


async def ask(http: aiohttp.ClientSession, url: str, prompt: list[int], n: int = GROUP_SIZE) -> int:
    """Requests n completions and returns the status."""
    sampling = {"n": n, "max_new_tokens": 24, "temperature": 1.0}
    body = {"input_ids": prompt, "sampling_params": sampling}
    async with http.post(f"{url}/generate", json=body) as answer:
        await answer.read()
        return answer.status


async def balance(
    http: aiohttp.ClientSession, url: str, workers: Sequence[str], prefix: list[int]
) -> float:
    """Returns the requests of the busiest worker over the mean."""
    rng = random.Random(0)
    before = [(await answer_json(http, f"{each}/server_info"))["asked"] for each in workers]
    prompts = [[*prefix, *(rng.randrange(1000) for _ in range(80))] for _ in range(GROUPS)]
    statuses = Counter(await asyncio.gather(*(ask(http, url, prompt) for prompt in prompts)))
    assert set(statuses) == {200}, statuses
    after = [(await answer_json(http, f"{each}/server_info"))["asked"] for each in workers]
    asked = [new - old for new, old in zip(after, before, strict=True)]
    return float(max(asked) / statistics.mean(asked))


async def added_ms(http: aiohttp.ClientSession, routed: str, direct: str) -> list[float]:
    """Returns the sorted milliseconds by which a request takes longer through the router, for pairs
    of requests in a row.
    """
    added = []
    for _ in range(REQUESTS):
        taken = []
        for url in (direct, routed):
            begin = time.perf_counter()
            status = await ask(http, url, list(range(200)), n=1)
            taken.append(1000 * (time.perf_counter() - begin))
            assert status == 200, status
        added.append(taken[1] - taken[0])
    return sorted(added)


async def cost(http: aiohttp.ClientSession, name: str) -> str:
    """Returns what a router costs, in words."""
    with ExitStack() as stack:
        workers = start_workers(stack, 2)
        begin = time.perf_counter()
        url, pid = await start_router(stack, http, {"router": name}, workers)
        start_s = time.perf_counter() - begin

        added = await added_ms(http, url, workers[0])
        for _ in range(4):
            await balance(http, url, workers, [])
        router = psutil.Process(pid)
        memory = sum(each.memory_info().rss for each in [router, *router.children(recursive=True)])
    return (
        f"ready after {start_s:.1f} s, adds {statistics.median(added):.2f} ms to a request (95th "
        f"percentile {added[int(0.95 * REQUESTS)]:.2f}), holds {memory / 2**20:.0f} MiB"
    )


async def spread(http: aiohttp.ClientSession, name: str, policy: str, shots: list[int]) -> str:
    """Returns how evenly a router spreads groups, in words."""
    cells = []
    for count in (2, 4):
        with ExitStack() as stack:
            workers = start_workers(stack, count)
            settings = {"router": name, "router_policy": policy}
            url, _ = await start_router(stack, http, settings, workers)
            different = await balance(http, url, workers, [])
            common = await balance(http, url, workers, shots)
        cells.append(f"{count} workers {different:.2f} / {common:.2f}")
    return "   ".join(cells)


async def measure() -> None:
    rng = random.Random(1)
    shots = [rng.randrange(1000) for _ in range(600)]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        print("cost")
        for name in ROUTERS:
            print(f"  {name:14} {await cost(http, name)}", flush=True)
        print(
            f"busiest worker over the mean, {GROUPS} groups at once "
            "(different prompts / a common prefix)"
        )
        for name in ROUTERS:
            for policy in POLICIES:
                cells = await spread(http, name, policy, shots)
                print(f"  {name:14} {policy:12} {cells}", flush=True)


def main() -> None:
    command_parser("benchmarks.router", __doc__).parse_args()
    asyncio.run(measure())


if __name__ == "__main__":
    main()
