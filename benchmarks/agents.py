"""Measures the cost of the environment-server: `OMP_NUM_THREADS=1 python -m benchmarks.agents [PART
…]`.

`calls`: 256 sessions of a program that calls the model over HTTP, one turn after the other, with an
engine that takes two seconds per turn. Measures the latency that a call adds to a call of the
engine itself, which the same programs make first, and the CPU time per 1,000 turns of each process;
that of the server also for episodes whose turns it plays itself. For comparison, the programs call
the engine as often through a bare proxy of the same stack, and the server for nothing, as often and
all at once. `tools`: an engine that runs 32 sequences at a time,
and tools that sleep for 1 to 30 seconds. Measures the engine's throughput with enough episodes in
flight to keep it busy, relative to episodes without tools. `verifiers`: the CPU time of an episode
of a verifiers environment whose harness asks twice, with the interpreter of `.venv-verifiers`.

Server, proxy and engine are separate processes, except for `verifiers`; the engine computes
nothing.
"""

import asyncio
import itertools
import os
import random
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
import uvicorn
from aiohttp import web
from starlette.types import Receive, Scope, Send

from benchmarks.command import command_parser
from benchmarks.processes import calling, free_port, processes
from common.clients.environment import EnvironmentClient
from common.clients.rollout import RolloutClient
from common.process.metrics import Metrics
from common.settings.sections import EnvironmentSection
from common.wire.schemas import EpisodeLimits, EpisodeRequest, EpisodeSampling, EpisodeTask
from services.environment.app import create_environment_app
from services.environment.service import EpisodeService
from services.environment.template import Template
from services.http.app import serve
from tests.support.environments.environments import request_for, served
from tests.support.models.trap_models import letters, trap_tokenizer
from tests.support.paths import ROOT

SESSIONS = 256
TURNS = 8
ANSWER_TOKENS = 128
TURN_S = 2.0
SLOTS = 32
TOOL_S = (1.0, 30.0)
IN_FLIGHT = 512
WINDOW_S = 90.0
VERIFIERS_EPISODES = 128
_CALL = '<tool_call>\n{"name": "look", "arguments": {"what": "a"}}\n</tool_call>'


class Talks:
    """An environment of eight turns without tools."""

    def reset(self, prompt: str) -> None:
        """Begins."""
        self.turns = 0

    async def step(self, messages: list[dict[str, Any]]) -> str | None:
        """Continues until all turns are played."""
        self.turns += 1
        return "And then? Tell me more about it." if self.turns < TURNS else None

    def get_reward(self) -> float:
        """Gives every episode the same reward."""
        return 1.0


class Slow(Talks):
    """Adds a slow tool between two turns; the tool is not a coroutine, so it holds a thread."""

    def look(self, what: str) -> str:
        """Looks something up.

        Args:
            what: To be looked up.
        """
        time.sleep(random.uniform(*TOOL_S))
        return "And then? Tell me more about it."


def serve_environment(name: str, port: int, engine: int) -> None:
    """Serves one of these environments; `engine` is the engine's port."""
    tokenizer = trap_tokenizer()
    stop = tokenizer.eos_token_id
    router = RolloutClient("rollout-server", f"http://127.0.0.1:{engine}")
    metrics = Metrics("environment-server")
    section = EnvironmentSection(name=f"python:benchmarks.agents:{name}")
    template = Template(tokenizer, [stop])
    service = EpisodeService(section, template, router, stop_token_ids=[stop], metrics=metrics)
    task = EpisodeTask(env=section.name)
    sampling = EpisodeSampling(max_new_tokens=ANSWER_TOKENS)
    for i in range(SESSIONS):  # of programs that others started
        request = EpisodeRequest(
            request_id="r", task=task, sampling=sampling, limits=EpisodeLimits(turns=TURNS)
        )
        service._sessions[f"session-{i}"] = service.open_session(request)
    serve(create_environment_app(service, 256 << 20, metrics), "127.0.0.1", port)


def serve_engine(port: int, tools: bool) -> None:
    """Serves an engine that answers after TURN_S; with tools, it runs SLOTS requests at a time."""
    tokenizer = trap_tokenizer()
    slots = asyncio.Semaphore(SLOTS if tools else SESSIONS)
    text = "x" * (ANSWER_TOKENS - 1 - len(_CALL))
    done = 0

    def answer(turns: int) -> bytes:
        ids = letters(tokenizer, text + (_CALL if tools and turns < TURNS else "y" * len(_CALL)))
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "1",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta}).body  # type: ignore[return-value]

    calling = answer(0)
    ending = answer(TURNS)
    end = tokenizer.eos_token_id

    async def generate(request: web.Request) -> web.Response:
        nonlocal done
        asked = (await request.json())["input_ids"].count(end)
        async with slots:
            await asyncio.sleep(TURN_S)
        done += 1
        return web.Response(
            body=calling if asked <= 2 * (TURNS - 1) else ending, content_type="application/json"
        )

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"turns": done})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", generate)
    app.router.add_get("/health", health)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def serve_proxy(port: int, engine: int) -> None:
    """Serves what any gateway of this stack does at least: uvicorn and aiohttp pass the bytes on
    that they get, and look at none of them.
    """
    http: aiohttp.ClientSession | None = None

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal http
        if http is None:
            http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body = b""
        is_whole = False
        while not is_whole:
            message = await receive()
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)

        url = f"http://127.0.0.1:{engine}{scope['path']}"
        kind = {"content-type": "application/json"}
        async with http.request(scope["method"], url, data=body or None, headers=kind) as answer:
            content = await answer.read()
        length = (b"content-length", b"%d" % len(content))
        headers = [(b"content-type", b"application/json"), length]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    uvicorn.run(
        forward,
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=30,
    )


class Served(NamedTuple):
    """The URLs of server, proxy and engine, and their processes."""

    url: str
    proxy_url: str
    engine_url: str
    server: psutil.Process
    proxy: psutil.Process
    engine: psutil.Process


@asynccontextmanager
async def serving(environment: str) -> AsyncIterator[Served]:
    """Starts the processes."""
    ports = [free_port() for _ in range(3)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    port, proxy_port, engine_port = ports
    commands = [
        calling(serve_environment, environment, port, engine_port),
        calling(serve_proxy, proxy_port, engine_port),
        calling(serve_engine, engine_port, environment == "Slow"),
    ]
    with processes(commands, urls) as (server, proxy, engine):
        yield Served(
            url=urls[0],
            proxy_url=urls[1],
            engine_url=urls[2],
            server=psutil.Process(server.pid),
            proxy=psutil.Process(proxy.pid),
            engine=psutil.Process(engine.pid),
        )


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


class Spent:
    """The CPU time of each process since this was made, in core-seconds for 1,000 turns."""

    def __init__(self, served: Served) -> None:
        self._processes = {
            "server": served.server,
            "proxy": served.proxy,
            "engine": served.engine,
            "programs": psutil.Process(),
        }
        self._before = {name: cpu(process) for name, process in self._processes.items()}

    def of(self, name: str) -> float:
        """Returns the core-seconds of a process for 1,000 turns."""
        spent = cpu(self._processes[name]) - self._before[name]
        return 1000 * spent / (SESSIONS * TURNS)

    def __str__(self) -> str:
        parts = [f"{name} {self.of(name):.2f}" for name in self._processes]
        return f"core-seconds for 1,000 turns: {', '.join(parts)}"


async def all_programs(program: Callable[[int], Awaitable[list[float]]]) -> list[float]:
    """Runs the programs, spread out as in training, and returns the sorted times of all calls."""

    async def started(number: int) -> list[float]:
        await asyncio.sleep(TURN_S * number / SESSIONS)
        return await program(number)

    times = await asyncio.gather(*(started(number) for number in range(SESSIONS)))
    return sorted(itertools.chain.from_iterable(times))


def over_the_sleep(times: list[float]) -> str:
    """Returns how much longer than TURN_S the calls took."""
    parts = []
    for share in (0.05, 0.5, 0.95):
        place = int(share * len(times))
        parts.append(f"{1000 * (times[place] - TURN_S):.1f} ms for {share:.0%}")
    return f"at most {', '.join(parts)}"


async def calls() -> None:
    """Prints the cost of program calls and of turns the server plays."""
    tokenizer = trap_tokenizer()
    connector = aiohttp.TCPConnector(limit=0)
    async with serving("Talks") as served, aiohttp.ClientSession(connector=connector) as http:
        url = served.url

        async def timed(place: str, key: str, body: dict[str, Any]) -> tuple[Any, float]:
            headers = {"authorization": f"Bearer {key}"}
            began = time.perf_counter()
            async with http.post(place, json=body, headers=headers) as response:
                answer = await response.json()
            return answer, time.perf_counter() - began

        async def engine_program(number: int, place: str) -> list[float]:
            times = []
            tokens = letters(tokenizer, f"Tell me the story of number {number}. " * 8)
            for _ in range(TURNS):
                body = {"input_ids": tokens, "sampling_params": {"n": 1}}
                answer, seconds = await timed(f"{place}/generate", "none", body)
                times.append(seconds)
                tokens = tokens + answer["output_ids"]
            return times

        async def program(number: int) -> list[float]:
            times = []
            chat: list[dict[str, Any]] = [
                {"role": "user", "content": f"Tell me the story of number {number}. " * 8}
            ]
            key = f"session-{number}"
            place = f"{url}/sessions/{key}/v1/chat/completions"
            for _ in range(TURNS):
                answer, seconds = await timed(place, key, {"model": "m", "messages": chat})
                times.append(seconds)
                chat += [
                    answer["choices"][0]["message"],
                    {"role": "user", "content": "And then? Tell me more about it."},
                ]
            return times

        spent = Spent(served)
        direct = await all_programs(lambda number: engine_program(number, served.engine_url))
        middle = len(direct) // 2
        print(f"calls of the engine: over its {TURN_S:g} s {over_the_sleep(direct)}")
        print(f"  {spent}")
        spent = Spent(served)
        times = await all_programs(lambda number: engine_program(number, served.proxy_url))
        bare = spent.of("proxy")
        print(f"calls of a bare proxy: over the engine's {TURN_S:g} s {over_the_sleep(times)}")
        print(f"  {spent}")
        print(f"  a call adds {1000 * (times[middle] - direct[middle]):.1f} ms in the median")
        spent = Spent(served)
        times = await all_programs(program)
        gateway = spent.of("server")
        print(f"calls of the gateway: over the engine's {TURN_S:g} s {over_the_sleep(times)}")
        print(f"  {spent}")
        print(f"  a call adds {1000 * (times[middle] - direct[middle]):.1f} ms in the median")
        print(f"  and costs {gateway / bare:.2f} times what it costs a bare proxy")

        spent = Spent(served)
        async with EnvironmentClient("environment-server", url) as client:
            await asyncio.gather(
                *(client.episodes(episodes("Talks", i, 8)) for i in range(SESSIONS // 8))
            )
        print(f"turns of the server's own: {spent}")

        async def nothing(pause_s: float) -> list[float]:
            for _ in range(TURNS):
                await asyncio.sleep(pause_s)
                async with http.get(f"{url}/environments") as answer:
                    await answer.read()
            return []

        spent = Spent(served)
        await all_programs(lambda _: nothing(TURN_S))
        print(f"requests that do nothing, as often: {spent}")
        spent = Spent(served)
        await asyncio.gather(*(nothing(0.0) for _ in range(SESSIONS)))
        print(f"requests that do nothing, all at once: {spent}")


def episodes(environment: str, number: int, n: int) -> EpisodeRequest:
    prompt = f"Tell me the story of number {number}. " * 8
    return EpisodeRequest(
        request_id=f"{environment}-{number}",
        n=n,
        task=EpisodeTask(env=f"python:benchmarks.agents:{environment}", prompt=prompt),
        sampling=EpisodeSampling(max_new_tokens=ANSWER_TOKENS),
    )


async def rate(environment: str, flight: int) -> float:
    """Returns the engine turns per second with this many episodes in flight, once they have spread
    out.
    """
    async with serving(environment) as served, aiohttp.ClientSession() as http:

        async def turns() -> int:
            async with http.get(f"{served.engine_url}/health") as answer:
                return int((await answer.json())["turns"])

        async with EnvironmentClient("environment-server", served.url) as client:
            numbers = iter(range(1 << 30))

            async def slot() -> None:
                while True:
                    await client.episodes(episodes(environment, next(numbers), 1))

            running = [asyncio.create_task(slot()) for _ in range(flight)]
            await asyncio.sleep(WINDOW_S / 2)
            before = await turns()
            began = time.monotonic()
            await asyncio.sleep(WINDOW_S)
            found = (await turns() - before) / (time.monotonic() - began)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            return found


async def tools() -> None:
    """Prints the ratio of the engine's throughput with and without slow tools."""
    without = SLOTS / TURN_S
    slow = await rate("Slow", IN_FLIGHT)
    print(
        f"tools of {TOOL_S[0]:g} to {TOOL_S[1]:g} s, {IN_FLIGHT} episodes in flight: "
        f"{slow:.1f} turns a second of an engine that"
    )
    print(f"  makes {without:.1f} at its {SLOTS} sequences, {slow / without:.0%}")


async def verifiers() -> None:
    """Prints the CPU time of an episode of verifiers in its own processes."""
    python = ROOT / ".venv-verifiers" / "bin" / "python"
    packages = ROOT / "tests" / "support" / "environments" / "verifiers_environments"
    with tempfile.TemporaryDirectory() as folder:
        interpreter = Path(folder) / "python"
        interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {python} "$@"\n')
        interpreter.chmod(0o755)
        server_file = ROOT / "examples" / "verifiers" / "server.py"
        name = f"agent:{interpreter} {server_file} apple-counting {{port}}"
        async with served(name, lambda _: "3") as server:
            for n in (1, VERIFIERS_EPISODES):  # the first one starts the process
                request = request_for(name, n=n)
                request.request_id = f"verifiers-{n}"
                request.task.columns = {"index": 2}
                before = children_cpu()
                played = await server.client.episodes(request)
                spent = children_cpu() - before
                assert {episode.status for episode in played} == {"ok"}
    print(f"episodes of verifiers: {spent / VERIFIERS_EPISODES:.3f} core-seconds each")


def children_cpu() -> float:
    """Returns the CPU seconds of all processes below this one, ended ones included."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime + ended.ru_stime
    for process in psutil.Process().children(recursive=True):
        seconds += sum(process.cpu_times()[:4])  # with its own ended children
    return seconds


PARTS = {"calls": calls, "tools": tools, "verifiers": verifiers}


def main() -> None:
    """Runs the named parts, or all of them."""
    parser = command_parser("benchmarks.agents", __doc__)
    parser.add_argument("parts", nargs="*", help="calls, tools, verifiers")
    options = parser.parse_args()
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name, part in PARTS.items():
        if not options.parts or name in options.parts:
            asyncio.run(part())


if __name__ == "__main__":
    main()
