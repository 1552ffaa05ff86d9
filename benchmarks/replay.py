"""What the replay buffer moves and how fast it samples: `python -m benchmarks.replay [--rounds N]`.

Adds and takes 256 completions × 1,024 tokens a request over HTTP to a real service process, the msgpack path beside the
JSON path in the same run, every add synced to disk before it is acknowledged; then draws 64 of 100,000 groups from the
index by priority.
"""

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import orjson

from common import wire
from common.clients import ReplayClient, wait_healthy
from common.schemas import Completion, Group, Groups, TakeRequest
from services.replay import sampling

GROUPS, COMPLETIONS, TOKENS = 32, 8, 1024
MEGABYTE = 1e6


def make_groups(name: str, rng: np.random.Generator) -> list[Group]:
    """32 groups of 8 completions of 1,024 tokens."""
    groups = []
    for i in range(GROUPS):
        completions = [
            Completion(
                token_ids=rng.integers(0, 150_000, TOKENS, dtype=np.int32),
                logprobs=-rng.random(TOKENS, np.float32),
                text="word " * TOKENS,
                finish_reason="stop",
                weight_versions=[(0, 0, TOKENS)],
                reward=float(rng.integers(0, 2)),
            )
            for _ in range(COMPLETIONS)
        ]
        groups.append(Group(f"{name}-{i}", "p", "a prompt", "42", np.arange(64, dtype=np.int32), completions))
    return groups


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await call()
    return time.perf_counter() - start


async def over_http(client: ReplayClient, rounds: int) -> dict[str, tuple[float, float]]:
    """(median seconds, megabytes) of one request by path; the two encodings take turns."""
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {"msgpack add": [], "JSON add": [], "msgpack take": [], "JSON take": []}
    sizes: dict[str, float] = {}
    json_headers = {"content-type": "application/json", "accept": "application/json"}

    async def add_json(groups: list[Group]) -> None:
        body = orjson.dumps({"groups": [wire.group_json(group) for group in groups]})
        sizes["JSON add"] = sizes["JSON take"] = len(body) / MEGABYTE
        await client.request("POST", "/groups", content=body, headers=json_headers)

    async def take_json(request: TakeRequest) -> None:
        answer = await client.request("POST", "/groups/take", json=request.model_dump(), headers={"accept": "application/json"})
        assert len(wire.decode_json(answer.content, Groups).groups) == GROUPS

    for i in range(rounds):
        first, second = make_groups(f"m{i}", rng), make_groups(f"j{i}", rng)
        sizes["msgpack add"] = sizes["msgpack take"] = len(wire.encode_groups(first)) / MEGABYTE
        take_first, take_second = (TakeRequest(count=GROUPS, request_id=f"{kind}{i}") for kind in "mj")
        seconds["msgpack add"].append(await timed(lambda groups=first: client.add(groups)))  # type: ignore[misc]
        seconds["msgpack take"].append(await timed(lambda request=take_first: client.take(request)))  # type: ignore[misc]
        seconds["JSON add"].append(await timed(lambda groups=second: add_json(groups)))  # type: ignore[misc]
        seconds["JSON take"].append(await timed(lambda request=take_second: take_json(request)))  # type: ignore[misc]
    return {name: (statistics.median(values), sizes[name]) for name, values in seconds.items()}


def sampling_seconds(groups: int, count: int, rounds: int) -> float:
    """Median seconds to draw `count` of `groups` by priority with importance weights, nothing cached."""
    rng = np.random.default_rng(0)
    rows = [(i + 1, i // 100, float(priority), 0) for i, priority in enumerate(rng.random(groups))]
    index, seconds = sampling.ReuseIndex(rows), []
    for seed in range(rounds):
        start = time.perf_counter()
        eligible = index.eligible(0, 4)
        included = sampling.inclusion(sampling.probabilities(index.rows["priority"][eligible], 0.6), count)
        chosen = sampling.draw(included, np.random.default_rng(seed))
        sampling.importance_weights(included, chosen, 0.4)
        seconds.append(time.perf_counter() - start)
        assert len(chosen) == count
    return statistics.median(seconds)


async def measure(port: int, rounds: int) -> dict[str, tuple[float, float]]:
    async with ReplayClient("replay-buffer", f"http://127.0.0.1:{port}") as client:
        await wait_healthy([client], 60)
        return await over_http(client, rounds)


def with_service(rounds: int) -> dict[str, tuple[float, float]]:
    """`over_http` against a service process of its own."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with tempfile.TemporaryDirectory() as state:
        command = [sys.executable, "-m", "services.replay", "--state_dir", state, "--replay.port", str(port)]
        root = Path(__file__).resolve().parents[1]
        process = subprocess.Popen(command, cwd=root, env={**os.environ, "LOG_LEVEL": "WARNING"})
        try:
            return asyncio.run(measure(port, rounds))
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    results = with_service(rounds)
    print(f"{GROUPS} groups × {COMPLETIONS} completions × {TOKENS} tokens a request, median of {rounds}")
    for name, (seconds, size) in results.items():
        print(
            f"{name:13} {seconds * 1e3:8.1f} ms  {GROUPS / seconds:8.0f} groups/s  {size / seconds:7.1f} MB/s  ({size:.1f} MB)"
        )
    for kind in ("add", "take"):
        print(f"msgpack is {results[f'JSON {kind}'][0] / results[f'msgpack {kind}'][0]:.1f} × as fast as JSON to {kind}")
    print(f"sampling 64 of 100,000 by priority: {sampling_seconds(100_000, 64, 50) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
