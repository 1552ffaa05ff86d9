"""Does training overlap with generation? `python -m benchmarks.overlap [--seconds 0.8] [--steps 24]
[--staleness 0 1 2]`.

The loop, collector, weight sync and clients are real and use real sockets; data-server,
reward-server and replay-buffer are processes. The update and the engine are simulated. The update
sleeps. The engine is a process with the real HTTP
API that decodes in real time: a bounded number of rows, log-normal lengths; running requests pause
while weights load and continue with the new ones. `--when-stale` sets `trainer.when_stale`. Beside
each figure is the time of an ideal schedule of the same slots, rows and lengths (`ideal`); any
excess is due to this code or to other work on the machine.

A row of the table is a ratio of generation to training. `generation` is the engine's time for one
batch with all rows busy, including weight loading; `training` is the update. The larger of the two
is the bound. Figures are medians over the steps. Needs the tokenizer of the tiny base model (`make
demo` creates it).
"""

import asyncio
import heapq
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from aiohttp import web
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.command import command_parser, setting_words
from benchmarks.processes import ROOT, calling, free_port, processes
from common.clients.data import DataClient
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient
from common.process.loop_thread import LoopThread
from common.process.run_lock import RunLock
from common.settings.config import Config, load
from learning.ranks import Ranks
from services.rollout.engine_client import EngineClient
from trainer.algorithms.batch import Batch
from trainer.backends.backend import Backend, BackendContext
from trainer.build import build_run
from trainer.loop import train
from trainer.observe.run_dir import read_lines
from trainer.policy.policy import Policy, PolicyUpdate
from trainer.policy.update_metrics import Sums
from trainer.rollouts.services import Services
from trainer.weights.sync import WeightPublisher
from trainer.weights.versions import Weights, version_name, write_version

GROUPS = 16
COMPLETIONS = 4
ROWS = 32
TOKENS = 60.0
"""Mean length."""
SIGMA = 0.8
"""Spread of its logarithm."""
LONGEST = 400
"""The length at which a completion is cut."""
LOAD_SHARE = 0.04
"""Time to load weights, as a share of the bound."""
WARM_UP = 4
"""First steps, not counted."""


def lengths(seed: int) -> list[int]:
    """Returns the length in tokens of each completion of a group."""
    drawn = np.random.default_rng(seed).lognormal(
        math.log(TOKENS) - SIGMA**2 / 2, SIGMA, COMPLETIONS
    )
    return [int(value) for value in np.clip(drawn, 1, LONGEST)]


MEAN_TOKENS = float(np.mean([lengths(seed) for seed in range(5000)]))


def ideal(
    generation_s: float, training_s: float, *, staleness: int, steps: int, when_stale: str
) -> tuple[float, float]:
    """Returns the median and mean step if only decoding, loading weights and the update take time.

    `wait` takes the groups in the order of their slots; the other two take those that are ready
    first. None is dropped.
    """
    load_s, token_s = costs(generation_s, training_s)
    rows = [0.0] * ROWS
    done: dict[int, float] = {}
    trained = [0.0]
    taken = 0
    for step in range(steps):
        begin = trained[-1] + load_s if step else 0.0
        # Loading weights stops all rows; busy rows continue afterwards.
        rows = [row + load_s if row > trained[-1] else begin for row in rows] if step else rows
        done = {group: at + load_s if at > trained[-1] else at for group, at in done.items()}
        for group in range(taken + len(done), (step + staleness + 1) * GROUPS):
            ends = []
            for tokens in lengths(group):
                ends.append(heapq.heappop(rows) + tokens * token_s)
                heapq.heappush(rows, ends[-1])
            done[group] = max(ends)
        in_order = sorted(done) if when_stale == "wait" else sorted(done, key=done.__getitem__)
        batch = in_order[:GROUPS]
        trained.append(max(trained[-1], *(done.pop(group) for group in batch)) + training_s)
        taken += len(batch)
    seconds = np.diff(trained)[WARM_UP:]
    return float(np.median(seconds)), float(np.mean(seconds))


def costs(generation_s: float, training_s: float) -> tuple[float, float]:
    """Returns the seconds to load weights and the seconds per token."""
    load_s = LOAD_SHARE * max(generation_s, training_s)
    return load_s, (generation_s - load_s) * ROWS / (GROUPS * COMPLETIONS * MEAN_TOKENS)


class SimulatedEngine:
    """Decodes in real time: at most ROWS rows at once, `token_s` per token of a row.

    A pause stops all rows in place, like `retract` but without a second prefill.
    """

    def __init__(self, token_s: float, load_s: float) -> None:
        self.token_s = token_s
        self.load_s = load_s
        self.version = "0"
        self._rows = asyncio.Semaphore(ROWS)
        self._paused = asyncio.Event()
        self._runs = asyncio.Event()
        self._runs.set()

    async def _complete(self, tokens: int) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        async with self._rows:
            done = 0
            while done < tokens:
                await self._runs.wait()
                version = self.version
                start = time.monotonic()
                try:
                    await asyncio.wait_for(self._paused.wait(), (tokens - done) * self.token_s)
                    more = min(tokens - done, int((time.monotonic() - start) / self.token_s))
                except TimeoutError:
                    more = tokens - done
                if more:
                    spans.append({"version": version, "start": done, "end": done + more})
                done += more
        pairs = [[-0.5, 5, None]] * tokens
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": pairs,
            "weight_version": self.version,
        }
        return {
            "text": "#### 1",
            "output_ids": [5] * tokens,
            "meta_info": meta | {"weight_versions": spans},
        }

    async def generate(self, request: web.Request) -> web.Response:
        sampling = (await request.json())["sampling_params"]
        return web.json_response(
            await asyncio.gather(*map(self._complete, lengths(sampling["sampling_seed"])))
        )

    async def pause(self, _: web.Request) -> web.Response:
        self._runs.clear()
        self._paused.set()
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.load_s)
        self.version = (await request.json())["weight_version"]
        return web.json_response({"success": True})

    async def go_on(self, _: web.Request) -> web.Response:
        self._paused.clear()
        self._runs.set()
        return web.json_response({})

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/pause_generation", self.pause)
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_post("/continue_generation", self.go_on)
        app.router.add_get("/model_info", self.info)
        app.router.add_get("/health", self.info)
        return app


def serve_engine(port: int, token_s: float, load_s: float) -> None:
    web.run_app(SimulatedEngine(token_s, load_s).app(), host="127.0.0.1", port=port, print=None)


class SleepingPolicy:
    """A policy with a few weights, whose update sleeps for `seconds`."""

    def __init__(self, seconds: float, config: Config) -> None:
        self.seconds = seconds
        self.config = config
        self.ranks = Ranks()
        self.step = 0
        self.seed = 0
        self.kl_coef = 0.0
        self._weights = {f"w{i}": torch.zeros(1024, 256) for i in range(4)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights.items()

    def logprobs(self, batch: Batch) -> None: ...

    def update(self, batch: Batch) -> PolicyUpdate:
        time.sleep(self.seconds)
        return PolicyUpdate(Sums().metrics([], 0.0, 0.0, skipped=0, stopped=False))


class DirectPublisher:
    """Writes a version and has the engine load it, like an agent but without the download."""

    def __init__(self, directory: Path, engine: EngineClient, loop: LoopThread) -> None:
        self._directory = directory
        self._engine = engine
        self._loop = loop

    def sleep(self) -> None:
        """Is not called: nothing shares a GPU here."""

    def wake(self) -> None:
        """Is not called."""

    def publish(self, weights: Weights, version: int) -> None:
        write_version(weights, [], self._directory, "overlap", version)
        self._loop.call(
            self._engine.load(self._directory / version_name(version), str(version), 60)
        )


class Sockets(Backend):
    """A `Backend` that connects to the services and the engine in other processes."""

    def __init__(self, engine_url: str) -> None:
        self.console = Console(quiet=True)
        self._engine_url = engine_url

    def start(self, context: BackendContext) -> tuple[Services, WeightPublisher]:
        config = context.config
        loop = context.loop
        services = Services(
            DataClient("data-server", f"http://127.0.0.1:{config.data.port}"),
            RolloutClient("engine", self._engine_url),
            RewardClient("reward-server", f"http://127.0.0.1:{config.reward.port}"),
            ReplayClient("replay-buffer", f"http://127.0.0.1:{config.replay.port}"),
        )
        engine = EngineClient("engine", self._engine_url)

        async def close() -> None:
            for client in (*services.all(), engine):
                await client.close()

        context.stack.callback(lambda: loop.call(close()))
        return services, DirectPublisher(context.run_dir / "weights", engine, loop)

    @property
    def engine_kind(self) -> Literal["embedded", "sglang"]:
        return "sglang"

    @property
    def engine_gpus(self) -> int | None:
        return None


def run(config: Config, training_s: float, engine_url: str) -> list[dict[str, Any]]:
    """Makes a run and returns the lines of its `metrics.jsonl`."""
    assert config.trainer.run_dir is not None
    run_dir = config.trainer.run_dir
    with RunLock.of_new_run(run_dir, "overlap") as lock, ExitStack() as stack:
        parts = build_run(
            config,
            Ranks(),
            run_dir,
            lock=lock,
            backend=Sockets(engine_url),
            stack=stack,
        )
        parts.policy = cast(Policy, SleepingPolicy(training_s, config))
        train(parts)
    return read_lines(config.trainer.run_dir / "metrics.jsonl")


@dataclass(frozen=True)
class Measured:
    """The figures of a run with one ratio and staleness."""

    median_s: float
    mean_s: float
    age: float
    """Mean age of the completions in weight versions."""
    dropped: float
    """Share of groups dropped as too old."""
    stages: dict[str, float]
    """Mean seconds per step by stage."""


def measure(
    generation_s: float, training_s: float, *, staleness: int, steps: int, when_stale: str
) -> Measured:
    """Runs the loop and returns its figures, without the first `WARM_UP` steps."""
    engine_port = free_port()
    load_s, token_s = costs(generation_s, training_s)
    with tempfile.TemporaryDirectory() as directory:
        settings: dict[str, object] = {
            "model.name": ROOT / ".cache/tiny-base",
            "data.source": "tiny",
            "state_dir": f"{directory}/state",
            "data.port": free_port(),
            "reward.port": free_port(),
            "replay.port": free_port(),
            "reward.workers": 1,
            "trainer.run_dir": f"{directory}/run",
            "trainer.max_steps": steps,
            "trainer.batch_size": GROUPS,
            "sampling.group_size": COMPLETIONS,
            "trainer.num_epochs": 100,
            "sampling.max_new_tokens": LONGEST,
            "trainer.max_staleness": staleness,
            "evaluation.samples": 0,
            "checkpoint.every": 0,
        }
        if staleness:
            settings["trainer.when_stale"] = when_stale
        words = setting_words(settings)
        services = [["-m", f"services.{name}", *words] for name in ("data", "reward", "replay")]
        engine = calling(serve_engine, engine_port, token_s, load_s)
        with processes([*services, engine]):
            lines = run(load(words, {}), training_s, f"http://127.0.0.1:{engine_port}")[WARM_UP:]
    seconds = [sum(line["seconds"].values()) for line in lines]
    stale = lines[-1]["dropped"].get("stale", 0)
    stages = {}
    for name in lines[0]["seconds"]:
        stages[name] = statistics.mean(line["seconds"][name] for line in lines)
    return Measured(
        median_s=statistics.median(seconds),
        mean_s=statistics.mean(seconds),
        age=statistics.mean(line["staleness"] for line in lines),
        dropped=stale / (stale + steps * GROUPS),
        stages=stages,
    )


def main() -> None:
    parser = command_parser("benchmarks.overlap", __doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.8,
        help="seconds of the larger of generation and training",
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--when-stale", choices=["wait", "train", "drop"], default="wait", help="trainer.when_stale"
    )
    parser.add_argument(
        "--ratios",
        nargs="+",
        default=["1:3", "1:2", "1:1", "2:1", "3:1"],
        help="generation:training",
    )
    arguments = parser.parse_args()
    for name in ("httpx", "trainer.rollouts.collector", "common.clients.base"):
        logging.getLogger(name).setLevel(logging.ERROR)
    title = (
        "median step (and mean) as a multiple of the larger of generation and training "
        f"({arguments.steps} steps)"
    )
    columns = [f"staleness {staleness}" for staleness in arguments.staleness]
    table = Table("generation : training", "seconds", *columns, title=title)
    for ratio in arguments.ratios:
        generation, training = (float(part) for part in ratio.split(":"))
        scale = arguments.seconds / max(generation, training)
        cells = []
        for staleness in arguments.staleness:
            found = measure(
                generation * scale,
                training * scale,
                staleness=staleness,
                steps=arguments.steps,
                when_stale=arguments.when_stale,
            )
            ideal_median_s, ideal_mean_s = ideal(
                generation * scale,
                training * scale,
                staleness=staleness,
                steps=2000,
                when_stale=arguments.when_stale,
            )
            bound = arguments.seconds
            cells.append(
                f"{found.median_s / bound:.2f} × (mean {found.mean_s / bound:.2f}; "
                f"ideal {ideal_median_s / bound:.2f} ({ideal_mean_s / bound:.2f})), "
                f"age {found.age:.1f}, dropped {found.dropped:.0%}"
            )
            where = ", ".join(
                f"{name} {value:.3f}" for name, value in found.stages.items() if value > 5e-4
            )
            print(f"{ratio} staleness {staleness}: {cells[-1]} ({where})", flush=True)
        table.add_row(ratio, f"{generation * scale:.2f} : {training * scale:.2f}", *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
