"""Measures the replay buffer's throughput and sampling speed: `python -m benchmarks.replay
[--rounds N] [--sizes N …]`.

The first part adds and takes 256 completions × 1,024 tokens per request over HTTP, in a real
service process, by msgpack and by JSON in the same run; every add is synced to disk before it is
acknowledged. The second part measures each call on stores of `--sizes` groups of 8 answers, in this
process. `--rounds 0` skips the requests.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import numpy as np
import orjson

from benchmarks.command import command_parser, seconds_of, setting_words
from benchmarks.processes import local_url, processes
from common.clients.replay import ReplayClient
from common.settings.sections import ReplaySection
from common.wire import codec
from common.wire.schemas import Completion, Group, Groups, SampleRequest, TakeRequest
from services.replay.buffer import ReplayBuffer

GROUPS = 32
COMPLETIONS = 8
PER_VERSION = 128
"""Groups of one weight version in the second part."""
TOKENS = 1024
MEGABYTE = 1e6


def make_groups(name: str, rng: np.random.Generator) -> list[Group]:
    """Returns 32 groups of 8 completions of 1,024 tokens."""
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
        groups.append(
            Group(f"{name}-{i}", "p", "a prompt", "42", np.arange(64, dtype=np.int32), completions)
        )
    return groups


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await call()
    return time.perf_counter() - start


async def over_http(client: ReplayClient, rounds: int) -> dict[str, tuple[float, float]]:
    """Returns (median seconds, megabytes) of one request by path; the two encodings alternate."""
    rng = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {
        "msgpack add": [],
        "JSON add": [],
        "msgpack take": [],
        "JSON take": [],
    }
    sizes: dict[str, float] = {}
    json_headers = {"content-type": "application/json", "accept": "application/json"}

    async def add_json(groups: list[Group]) -> None:
        body = orjson.dumps({"groups": [codec.group_json(group) for group in groups]})
        sizes["JSON add"] = sizes["JSON take"] = len(body) / MEGABYTE
        await client.request("POST", "/groups", content=body, headers=json_headers)

    async def take_json(request: TakeRequest) -> None:
        answer = await client.request(
            "POST",
            "/groups/take",
            json=request.model_dump(),
            headers={"accept": "application/json"},
        )
        assert len(codec.decode_json(answer.content, Groups).groups) == GROUPS

    for i in range(rounds):
        first = make_groups(f"m{i}", rng)
        second = make_groups(f"j{i}", rng)
        sizes["msgpack add"] = sizes["msgpack take"] = len(codec.encode_groups(first)) / MEGABYTE
        take_first = TakeRequest(count=GROUPS, request_id=f"m{i}")
        take_second = TakeRequest(count=GROUPS, request_id=f"j{i}")
        seconds["msgpack add"].append(await timed(partial(client.add, first)))
        seconds["msgpack take"].append(await timed(partial(client.take, take_first)))
        seconds["JSON add"].append(await timed(partial(add_json, second)))
        seconds["JSON take"].append(await timed(partial(take_json, take_second)))
    return {name: (statistics.median(values), sizes[name]) for name, values in seconds.items()}


def at_size(path: Path, groups: int, rounds: int = 30) -> list[str]:
    """Returns a row of the table: the cost of a store with `groups` small groups, half of them
    consumed.

    The columns are: adding and taking 32 groups (which are then acknowledged), drawing 64 by
    priority from all and from those of the last eight versions, drawing 64 answers, opening the
    store, and megabytes on disk.
    """
    ids = np.arange(4, dtype=np.int32)
    config = ReplaySection(capacity=8 * (groups + (rounds + 1) * GROUPS))

    def completions(version: int) -> list[Completion]:
        return [
            Completion(ids, -ids.astype(np.float32), "a", "stop", [(version, 0, 4)], reward=i / 8)
            for i in range(8)
        ]

    def made(first: int, count: int) -> list[Group]:
        return [
            Group(f"g-{i}", "p", "a prompt", "42", ids, completions(i // PER_VERSION), position=i)
            for i in range(first, first + count)
        ]

    buffer = ReplayBuffer(config, path)
    for first in range(0, groups, 5_000):
        buffer.add(made(first, 5_000))
        if first < groups // 2:
            buffer.ack([f"g-{i}" for i in range(first, first + 5_000)])
    buffer.close()
    start = time.perf_counter()
    buffer = ReplayBuffer(config, path)
    opened = time.perf_counter() - start
    add = []
    take = []
    sample = []
    sample_new = []
    answers = []
    for i in range(rounds):
        fresh = made(groups + i * GROUPS, GROUPS)
        take_request = TakeRequest(count=GROUPS, request_id=f"take-{i}")
        sample_request = SampleRequest(count=64, seed=i)
        newest = SampleRequest(count=64, seed=i, min_version=groups // 2 // PER_VERSION - 8)
        draw = partial(buffer.sample_experiences, 64, prioritized=True, seed=i)
        add.append(seconds_of(partial(buffer.add, fresh)))
        take.append(seconds_of(partial(buffer.take, take_request)))
        sample.append(seconds_of(partial(buffer.sample, sample_request)))
        sample_new.append(seconds_of(partial(buffer.sample, newest)))
        answers.append(seconds_of(draw))
    size = buffer.store.size()
    buffer.close()
    measured = (add, take, sample, sample_new, answers)
    times = [statistics.median(values) * 1e3 for values in measured]
    return [f"{groups:,}", *(f"{each:.1f}" for each in times), f"{opened:.2f}", f"{size / 1e6:.0f}"]


async def measure(url: str, rounds: int) -> dict[str, tuple[float, float]]:
    async with ReplayClient("replay-buffer", url) as client:
        return await over_http(client, rounds)


def with_service(rounds: int) -> dict[str, tuple[float, float]]:
    """Runs `over_http` against a separate service process."""
    url = local_url()
    with tempfile.TemporaryDirectory() as state:
        settings = {"replay.port": url.rpartition(":")[2], "state_dir": state}
        command = ["-m", "services.replay", *setting_words(settings)]
        with processes([command], [url]):
            return asyncio.run(measure(url, rounds))


def over_sockets(rounds: int) -> None:
    """Prints the cost of adding and taking over HTTP."""
    results = with_service(rounds)
    request = f"{GROUPS} groups × {COMPLETIONS} completions × {TOKENS} tokens a request"
    print(f"{request}, median of {rounds}")
    for name, (seconds, size) in results.items():
        print(
            f"{name:13} {seconds * 1e3:8.1f} ms  {GROUPS / seconds:8.0f} groups/s  "
            f"{size / seconds:7.1f} MB/s  ({size:.1f} MB)"
        )
    for kind in ("add", "take"):
        json_s, _ = results[f"JSON {kind}"]
        msgpack_s, _ = results[f"msgpack {kind}"]
        print(f"msgpack is {json_s / msgpack_s:.1f} × as fast as JSON to {kind}")


def main() -> None:
    parser = command_parser("replay", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[10_000, 100_000],
        help="groups of the stores in the last table",
    )
    arguments = parser.parse_args()
    rounds = arguments.rounds
    if rounds:
        over_sockets(rounds)
    print(
        "groups; add 32, take 32, sample 64 of all and of the last 8 versions, 64 answers (ms); "
        "open (s); file (MB)"
    )
    for groups in arguments.sizes:
        with tempfile.TemporaryDirectory() as state:
            print(*at_size(Path(state) / "replay.db", groups), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
