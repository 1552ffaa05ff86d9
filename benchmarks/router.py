"""Measures sglang-router and smg as an agent starts them: `OMP_NUM_THREADS=1 python -m
benchmarks.router [PART …]`.

`balance`: 256 concurrent groups over 2 and 4 workers, by policy; the figure is the requests of the
busiest worker over the mean. Prompts are all different, as in training, or share their first 600
tokens, as in a few-shot evaluation. `latency`: the latency the router adds to a request; 300
requests of each kind, one at a time, in turn. `recovery`: two embedded engines with 16 requests in
flight; one engine is killed (kill -9) and started again on its port 10 s later. Requests come from
a plain client, which never retries, and from RolloutClient. No agent removes the engine from the
router or adds it again, so this measures the router's own health checks.

The workers of the first two parts are processes that answer after a delay without computing. smg is
skipped if it is not installed.
"""

import argparse
import asyncio
import importlib.util
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.command import command_parser
from benchmarks.engine import build
from benchmarks.processes import engine_command, free_port, local_url, processes
from common.clients.rollout import RolloutClient
from common.errors import ServiceError
from common.process.topology import Topology
from common.settings.config import Config
from common.settings.sections import RolloutSection
from services.rollout.router import router_command

GROUPS = 256
ROUNDS = 300
IN_FLIGHT = 16
DOWN_S = 10.0
ROUTERS = ["sglang-router", *(["smg"] if importlib.util.find_spec("smg") else [])]
POLICIES = ("round_robin", "random", "cache_aware")
_ANSWER = {
    "text": "because " * 400,
    "output_ids": list(range(500)),
    "meta_info": {"finish_reason": {"type": "stop"}},
}


def work(port: int, seconds: float) -> None:
    """Runs a worker that answers every request after `seconds` and counts the requests."""
    asked = running = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal asked, running
        await request.read()
        asked += 1
        running += 1
        try:
            await asyncio.sleep(seconds)
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


class Bench:
    """Routers and workers that end together."""

    def __init__(self, stack: ExitStack, http: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.http = http

    async def workers(self, count: int, seconds: float) -> list[str]:
        """Starts this many workers and returns their URLs."""
        urls = [local_url() for _ in range(count)]
        for url in urls:
            port = url.rpartition(":")[2]
            worker = ["--worker", port, "--seconds", str(seconds)]
            await self._start(["-m", "benchmarks.router", *worker], url)
        return urls

    async def engine(self, model: Path, url: str) -> "subprocess.Popen[bytes]":
        return await self._start(engine_command(model, url, weight_version=1), url)

    async def _start(self, words: Sequence[str], url: str) -> "subprocess.Popen[bytes]":
        """Starts a process without output; requests in flight go on until it is healthy."""
        (running,) = await asyncio.to_thread(
            self.stack.enter_context, processes([words], [url], disposable=True)
        )
        return running

    async def router(self, name: str, policy: str, workers: Sequence[str]) -> str:
        """Starts a router and returns its URL once it lists all workers as healthy."""
        settings = {
            "router": name,
            "router_policy": policy,
            "router_port": free_port(),
            "router_metrics_port": free_port(),
        }
        section = RolloutSection.model_validate(settings)
        url = f"http://127.0.0.1:{section.router_port}"
        await self._start(router_command(Config(rollout=section), Topology())[1:], url)
        for worker in workers:
            await self.http.post(f"{url}/workers", json={"url": worker})
        while len(await self.healthy(url)) < len(workers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return url

    async def healthy(self, url: str) -> list[str]:
        listed = (await self.json(f"{url}/workers"))["workers"]
        return [worker["url"] for worker in listed if worker["is_healthy"]]

    async def json(self, url: str) -> dict[str, Any]:
        async with self.http.get(url) as answer:
            return dict(await answer.json())

    async def ask(self, url: str, prompt: list[int], n: int = 8) -> str:
        """Requests one group with a plain client and returns the outcome."""
        sampling = {"n": n, "max_new_tokens": 24, "temperature": 1.0}
        try:
            async with self.http.post(
                f"{url}/generate", json={"input_ids": prompt, "sampling_params": sampling}
            ) as answer:
                await answer.read()
                return str(answer.status)
        except aiohttp.ClientError as error:
            return type(error).__name__


async def balance(bench: Bench) -> None:
    rng = random.Random(0)
    shots = [rng.randrange(1000) for _ in range(600)]
    print(
        f"balance: busiest worker over the mean, {GROUPS} groups at once "
        "(different prompts / a common prefix)"
    )
    for name in ROUTERS:
        for policy in POLICIES:
            cells = []
            for count in (2, 4):
                workers = await bench.workers(count, 1.0)
                url = await bench.router(name, policy, workers)
                before = [0] * count
                for prefix in ([], shots):
                    prompts = [
                        [*prefix, *(rng.randrange(1000) for _ in range(80))] for _ in range(GROUPS)
                    ]
                    failed = Counter(
                        await asyncio.gather(*(bench.ask(url, prompt) for prompt in prompts))
                    )
                    assert set(failed) == {"200"}, failed
                    now = [
                        (await bench.json(f"{worker}/server_info"))["asked"] for worker in workers
                    ]
                    asked = [new - old for new, old in zip(now, before, strict=True)]
                    before = now
                    cells.append(f"{max(asked) / statistics.mean(asked):.2f}")
            two = f"2 workers {cells[0]} / {cells[1]}"
            four = f"4 workers {cells[2]} / {cells[3]}"
            print(f"  {name:14} {policy:12} {two}   {four}", flush=True)


async def latency(bench: Bench) -> None:
    print(f"latency: milliseconds added to a request, median of {ROUNDS} (and the 95th percentile)")
    (worker,) = await bench.workers(1, 0.0)
    for name in ROUTERS:
        url = await bench.router(name, "round_robin", [worker])
        seconds: dict[str, list[float]] = {url: [], worker: []}
        for _ in range(ROUNDS):
            for target, taken in seconds.items():
                began = time.perf_counter()
                await bench.ask(target, list(range(200)))
                taken.append(time.perf_counter() - began)
        added = [
            1000 * (through - direct)
            for through, direct in zip(seconds[url], seconds[worker], strict=True)
        ]
        median = statistics.median(added)
        tail = statistics.quantiles(added, n=20)[-1]
        direct = 1000 * statistics.median(seconds[worker])
        print(f"  {name:14} {median:.2f} ({tail:.2f}); directly {direct:.2f}", flush=True)


async def recovery(bench: Bench) -> None:
    print(
        f"recovery: an engine of two is killed and started again after {DOWN_S:.0f} s, "
        f"{IN_FLIGHT} requests in flight"
    )
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        prompts = build(model)
        for name in ROUTERS:
            urls = [local_url(), local_url()]
            engines = [await bench.engine(model, each) for each in urls]
            url = await bench.router(name, "round_robin", urls)
            over = asyncio.Event()
            async with RolloutClient("router", url) as client:
                half = IN_FLIGHT // 2
                plain = [
                    asyncio.create_task(_plain(bench, url, prompts, over)) for _ in range(half)
                ]
                ours = [asyncio.create_task(_ours(client, prompts, over)) for _ in range(half)]
                await asyncio.sleep(3)
                engines[1].send_signal(signal.SIGKILL)
                await asyncio.sleep(DOWN_S)
                await bench.engine(model, urls[1])
                began = time.perf_counter()
                while await _idle(bench, urls[1]):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                back = time.perf_counter() - began
                over.set()
                seen = [
                    dict(sum(await asyncio.gather(*tasks), Counter())) for tasks in (plain, ours)
                ]
            first = f"first request {back:.1f} s after the engine is up"
            print(f"  {name:14} {first}; plain {seen[0]}, ours {seen[1]}", flush=True)


async def _plain(
    bench: Bench, url: str, prompts: list[list[int]], over: asyncio.Event
) -> Counter[str]:
    """Sends requests until `over` is set; returns the number of answers by status."""
    seen: Counter[str] = Counter()
    while not over.is_set():
        seen[await bench.ask(url, random.choice(prompts))] += 1
    return seen


async def _ours(
    client: RolloutClient, prompts: list[list[int]], over: asyncio.Event
) -> Counter[str]:
    seen: Counter[str] = Counter()
    while not over.is_set():
        prompt = random.choice(prompts)
        try:
            await client.generate(
                prompt, n=8, max_new_tokens=24, temperature=1.0, stop_token_ids=[]
            )
            seen["200"] += 1
        except ServiceError as error:
            seen[str(error.status)] += 1
    return seen


async def _idle(bench: Bench, url: str) -> bool:
    """Returns whether the engine has received no request yet."""
    async with bench.http.get(f"{url}/metrics") as answer:
        return 'http_requests_total{route="/generate"' not in await answer.text()


async def main(parts: Sequence[str]) -> None:
    for part in (balance, latency, recovery):
        if not parts or part.__name__ in parts:
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=120)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
                with ExitStack() as stack:
                    await part(Bench(stack, http))


if __name__ == "__main__":
    parser = command_parser("router", __doc__)
    parser.add_argument("parts", nargs="*", help="balance, latency, recovery; all if none is named")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.seconds)
    else:
        asyncio.run(main(arguments.parts))
