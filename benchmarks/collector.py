"""Measures the cost of collecting on the trainer's node.

    python -m benchmarks.collector [--in-flight 4096] [--completions 40000]

The real collector and the real clients use real sockets, with thousands of completions in flight.
Light stand-ins, one process each, replace the data-server, reward-server and replay-buffer. One
endpoint replaces the router and 64 engines: it answers a group after a second or two, in SGLang's
format, with about 500 tokens and log-probabilities per completion. Stored groups free their slots
at once. Measured are completions per second, this process's CPU seconds per 1,000 completions
(split into parsing SGLang's JSON and the rest), and the resident memory over time. For comparison,
as many requests in flight are sent by aiohttp alone, and their answers parsed by orjson: what any
client of this endpoint does at least.
"""

import asyncio
import gc
import logging
import os
import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
from aiohttp import web

from benchmarks.command import command_parser, setting_words
from benchmarks.processes import ROOT, calling, free_port, processes
from common.clients.data import DataClient
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient, read_completions
from common.process import garbage
from common.process.cli import positive
from common.process.loop_thread import LoopThread
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config, load
from common.wire.codec import decode_groups
from trainer.policy.scorer import load_tokenizer
from trainer.rollouts.collector import Collector
from trainer.rollouts.ground_truths import GroundTruthCheck
from trainer.rollouts.prompt_cursor import PromptCursor, PromptProgress
from trainer.rollouts.services import RolloutContext, Services
from trainer.timing import StageClock

COMPLETIONS = 8
TOKENS = 500
POOL = 16


def answers(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Returns a group in SGLang's format, with 400 to 600 tokens per completion."""
    found = []
    for _ in range(COMPLETIONS):
        size = int(rng.integers(TOKENS - 100, TOKENS + 101))
        ids = rng.integers(0, 150_000, size).tolist()
        logprobs = (-rng.exponential(0.5, size)).tolist()
        pairs = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
        meta = {
            "id": "0123456789abcdef0123456789abcdef",
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": 100,
            "completion_tokens": size,
            "cached_tokens": 0,
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": size}],
            "input_token_logprobs": [],
            "output_token_logprobs": pairs,
            "output_token_logprobs_length": size,
            "e2e_latency": 12.3,
        }
        found.append(
            {"text": "because " * (size // 2) + "#### 12", "output_ids": ids, "meta_info": meta}
        )
    return found


def serve_rollout(port: int) -> None:
    """Stands in for the router and the engines behind it."""
    rng = np.random.default_rng(0)
    pool = [orjson.dumps(answers(rng)) for _ in range(POOL)]
    waits = rng.uniform(1, 2, 1 << 16)
    calls = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal calls
        await request.read()
        calls += 1
        await asyncio.sleep(waits[calls % len(waits)])
        return web.Response(body=pool[calls % POOL], content_type="application/json")

    app = web.Application()
    app.router.add_post("/generate", generate)
    web.run_app(app, host="127.0.0.1", port=port, print=None, backlog=4096)


def serve_services(port: int) -> None:
    """Stubs for data, reward and replay, which only answer in the right form."""
    position = stored = 0

    async def prompts(request: web.Request) -> web.Response:
        nonlocal position
        count = int(request.query["batch_size"])
        rows = [
            {"id": f"p{i}", "prompt": "How many apples has Tom? " * 8, "ground_truth": "12"}
            for i in range(count)
        ]
        body = {"prompts": rows, "total_available": 1 << 40, "epoch": 0, "position": position}
        position += count
        return web.json_response(body)

    async def listed(_: web.Request) -> web.Response:
        """Lists no prompts: there are no ground truths to check."""
        return web.json_response({"prompts": [], "total_available": 0})

    async def reward(request: web.Request) -> web.Response:
        items = orjson.loads(await request.read())["items"]
        result = {
            "reward": 1.0,
            "extracted_answer": "12",
            "ground_truth": "12",
            "correct": True,
            "status": "ok",
        }
        result["components"] = {"math": 1.0}
        body = {"rewards": [result] * len(items), "mean_reward": 1.0, "accuracy": 1.0}
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    async def add(request: web.Request) -> web.Response:
        nonlocal stored
        body = await request.read()
        if stored == 0:  # check once that the body has the form a real buffer accepts
            assert len(decode_groups(body)[0].completions) == COMPLETIONS
        stored += 1
        return web.json_response({"added": 1, "duplicates": 0})

    app = web.Application(client_max_size=1 << 30)
    app.router.add_get("/prompts", prompts)
    for page in ("/train_prompts", "/eval_prompts"):
        app.router.add_get(page, listed)
    app.router.add_post("/batch_reward", reward)
    app.router.add_post("/groups", add)
    web.run_app(app, host="127.0.0.1", port=port, print=None, backlog=4096)


class FreeingReplay(ReplayClient):
    """Counts stored groups and frees their slots, as the trainer does after training."""

    collector: Collector
    stored = 0

    async def add(self, groups: list[Any]) -> int:
        added = await super().add(groups)
        self.stored += len(groups)
        for group in groups:
            self.collector.untaken.pop(group.position, None)
        self.collector.free_slots(len(groups))
        return added


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def parse_seconds() -> tuple[float, float]:
    """Returns CPU seconds per 1,000 completions: for orjson alone, which makes an object of every
    number, and for making completions from the same bodies.
    """
    body = orjson.dumps(answers(np.random.default_rng(0)))
    rounds = 1000 // COMPLETIONS
    gc.disable()
    start = time.process_time()
    for _ in range(rounds):
        orjson.loads(body)
    middle = time.process_time()
    for _ in range(rounds):
        read_completions([body], None, n=COMPLETIONS, truncated=False, routed=False)
    gc.enable()
    return middle - start, time.process_time() - middle


async def least_seconds(url: str, in_flight: int, completions: int) -> float:
    """Returns the CPU seconds per 1,000 completions of sending requests and parsing the answers,
    and of nothing else; the first `in_flight` ones do not count.
    """
    sampling = {"n": COMPLETIONS, "max_new_tokens": 1024, "temperature": 1.0}
    request = {"input_ids": [1] * 100, "sampling_params": sampling, "return_logprob": True}
    body = orjson.dumps(request)
    done = 0
    used = 0.0

    async def slot(http: aiohttp.ClientSession) -> None:
        nonlocal done, used
        while done < completions:
            async with http.post(f"{url}/generate", data=body) as answer:
                content = await answer.read()
            gc.disable()
            orjson.loads(content)
            gc.enable()
            done += COMPLETIONS
            if done == in_flight:
                used = time.process_time()

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20) as http:
        await asyncio.gather(*(slot(http) for _ in range(in_flight // COMPLETIONS)))
    return 1000 * (time.process_time() - used) / (done - in_flight)


def measure(
    config: Config,
    url: str,
    *,
    in_flight: int,
    completions: int,
) -> None:
    with LoopThread() as loop:

        async def connect() -> Services:
            replay = FreeingReplay("replay-buffer", f"http://127.0.0.1:{config.replay.port}")
            data = DataClient("data-server", f"http://127.0.0.1:{config.data.port}")
            reward = RewardClient("reward-server", f"http://127.0.0.1:{config.reward.port}")
            return Services(data, RolloutClient("rollout-server", url), reward, replay)

        services = loop.call(connect())
        replay = services.replay
        assert isinstance(replay, FreeingReplay)
        prompter = Prompter(
            load_tokenizer(config.model), PromptStyle(system_prompt="Think step by step."), [2]
        )
        cursor = PromptCursor(PromptProgress())
        context = RolloutContext(config, services, prompter, clock=StageClock(), run_id="collector")
        collector = Collector(context, cursor, GroundTruthCheck(services, Path(os.devnull)))
        replay.collector = collector

        garbage.collect_less_often(garbage.OF_TRAINER)  # as before its first batch
        task = loop.start(collector.run(1 << 40, in_flight // COMPLETIONS))
        marks = [in_flight, *range((in_flight // 10_000 + 1) * 10_000, completions, 10_000)]
        marks.append(completions)
        begin = 0.0
        used = 0.0
        for mark in marks:
            while replay.stored * COMPLETIONS < mark:
                time.sleep(0.02)
                if task.done():
                    task.result()
            if mark == in_flight:
                first = replay.stored
                begin = time.perf_counter()
                used = time.process_time()
            done = replay.stored * COMPLETIONS
            print(f"{done:>7,} completions: resident memory {resident_mb():.0f} MB", flush=True)
        done = (replay.stored - first) * COMPLETIONS
        wall = time.perf_counter() - begin
        cpu = time.process_time() - used
        loop.cancel(task)
        dropped = dict(collector.drops.counts)
        for client in services.all():
            loop.call(client.close())
        least = loop.call(least_seconds(url, in_flight, completions))
    parse, make = parse_seconds()
    per_thousand = cpu / done * 1000
    print(
        f"{done / wall:,.0f} completions/s; coordinator {cpu / wall:.2f} cores; "
        f"dropped {dropped or 'nothing'}"
    )
    print(
        f"CPU for 1,000 completions: {per_thousand:.3f} s, of which making them of the answers "
        f"{make:.3f} s, the rest {per_thousand - make:.3f} s; orjson alone would parse the same "
        f"answers in {parse:.3f} s"
    )
    print(
        f"aiohttp and orjson alone, with as many in flight: {least:.3f} s; the coordinator takes "
        f"{per_thousand / least:.2f} times as much"
    )


def main() -> None:
    parser = command_parser("benchmarks.collector", __doc__)
    parser.add_argument(
        "--in-flight", type=positive, default=4096, help="completions in flight, a multiple of 8"
    )
    parser.add_argument(
        "--completions", type=positive, default=40_000, help="completions in all (default 40000)"
    )
    arguments = parser.parse_args()
    if arguments.completions < 2 * arguments.in_flight:
        # The measurement begins when as many completions have been stored as are in flight.
        parser.error(
            f"argument --completions: {arguments.completions} are less than twice --in-flight "
            f"({arguments.in_flight}): raise it"
        )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    engines = free_port()
    services = free_port()
    settings = {
        "model.name": ROOT / ".cache/tiny-base",
        "trainer.batch_size": arguments.in_flight // COMPLETIONS,
        "sampling.group_size": COMPLETIONS,
        "sampling.max_new_tokens": 1024,
        "data.port": services,
        "reward.port": services,
        "replay.port": services,
    }
    with processes([calling(serve_rollout, engines), calling(serve_services, services)]):
        measure(
            load(setting_words(settings), {}),
            f"http://127.0.0.1:{engines}",
            in_flight=arguments.in_flight,
            completions=arguments.completions,
        )


if __name__ == "__main__":
    main()
