"""Collects episodes of programs that catch every error, under seeded faults, for a comparison of what was
stored with what the programs and the engine saw."""

import asyncio
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.collector import FreeingReplay
from common.clients.data import DataClient
from common.clients.environment import EnvironmentClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config, load
from common.wire.schemas import Prompt
from services.data.app import create_data_app
from services.replay.app import create_replay_app
from services.reward.app import create_reward_app
from tests.chaos.episodes.invariants import Evidence
from tests.chaos.episodes.parts import LOG, ORDERS, serve_engine, serve_environment
from tests.chaos.invariants import read_groups
from tests.chaos.targets import cut_connections
from tests.support.paths import ROOT
from tests.support.processes.ports import free_port
from trainer.policy.scorer import load_tokenizer
from trainer.rollouts.collector import Collector
from trainer.rollouts.ground_truths import GroundTruthCheck
from trainer.rollouts.prompt_cursor import PromptCursor, PromptProgress
from trainer.rollouts.services import RolloutContext, Services
from trainer.timing import StageClock

BASE = "http://in-process"
SWALLOWS = ROOT / "tests" / "chaos" / "episodes" / "swallows.py"
GROUP_SIZE = 4
SLOTS = 4
GROUPS_PER_FAULT = 3
DEADLINE_S = 10
DISK_BYTES = 4 << 20
ENGINE = ("engine-kill", "engine-500", "engine-half", "engine-hang", "engine-slow", "router-503")
SERVER = ("environment-kill", "cut", "disk-full")
FAULTS: dict[str, tuple[str, ...]] = {
    "agent": (*ENGINE, *SERVER, "program-kill", "reward-twice"),
    "server": (*ENGINE, *SERVER, "program-kill", "program-stop"),
    "class": (*ENGINE, *SERVER, "tool-hangs", "tool-cancelled", "tool-surrogate"),
}
"""The faults of each kind of program."""


def environment_of(kind: str, folder: Path) -> str:
    """Returns `environment.name` for a kind of program; its files are in `folder`."""
    log = folder / "programs.jsonl"
    program = f"{sys.executable} -I -S {SWALLOWS} {log} {folder / 'orders'}"
    if kind == "agent":
        return f"agent:{program}"
    if kind == "server":
        return f"agent:{program} {{port}}"
    return "python:tests.chaos.episodes.parts:Swallows"


class Kept:
    """A process that is started again when it has ended, as the local runner does."""

    def __init__(self, function: Callable[..., None], *arguments: Any, **variables: str) -> None:
        call = (
            "import importlib, json, sys; module, name, arguments = json.loads(sys.argv[1]); "
            "getattr(importlib.import_module(module), name)(*arguments)"
        )
        what = json.dumps([function.__module__, function.__name__, arguments])
        self._command = [sys.executable, "-c", call, what]
        self._env = {**os.environ, "LOG_LEVEL": "WARNING", "PYTHONPATH": str(ROOT), **variables}
        self._over = threading.Event()
        self.starts = 0
        self._start()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self._process.terminate()
        self._process.wait()

    def _start(self) -> None:
        self.starts += 1
        self._process = subprocess.Popen(self._command, cwd=ROOT, env=self._env)

    def _keep(self) -> None:
        while not self._over.wait(0.2):
            if self._process.poll() is not None:
                self._start()


@dataclass
class Run:
    """The processes and files of the run of one kind under the faults of one seed."""

    kind: str
    folder: Path
    disk: Path | None
    """The small file system of the environment-server; None where none can be mounted."""
    engine_port: int = field(default_factory=free_port)
    port: int = field(default_factory=free_port)
    injected: int = 0
    engine: Kept = field(init=False)
    server: Kept = field(init=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        (self.folder / "orders").mkdir()
        temporary = self.disk or self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        engine_log = str(self.folder / "engine.jsonl")
        self.engine = Kept(serve_engine, self.engine_port, engine_log)
        self.server = Kept(
            serve_environment,
            environment_of(self.kind, self.folder),
            self.port,
            self.engine_port,
            TMPDIR=str(temporary),
            **{
                LOG: str(self.folder / "programs.jsonl"),
                ORDERS: str(self.folder / "orders"),
            },
        )
        try:
            await self._healthy(self.engine_port)
            await self._healthy(self.port)
            yield
        finally:
            await asyncio.to_thread(self.server.end)
            await asyncio.to_thread(self.engine.end)

    async def inject(self, fault: str, rng: random.Random) -> None:
        """Injects a fault, if there is what it can meet."""
        self.injected += 1
        part, _, what = fault.partition("-")
        # The process may have just been killed by another fault: its successor is what is met.
        if part in ("engine", "router"):
            await self._healthy(self.engine_port)
        elif fault in ("environment-kill", "cut"):
            await self._healthy(self.port)

        if fault == "engine-kill":
            os.kill(self.engine.pid, signal.SIGKILL)
        elif part in ("engine", "router"):
            order = {"kind": what, "count": rng.randint(2, 8)}
            async with httpx.AsyncClient() as http:
                await http.post(f"http://127.0.0.1:{self.engine_port}/fault", json=order)
        elif fault == "environment-kill":
            os.kill(self.server.pid, signal.SIGKILL)
        elif fault == "cut":
            await asyncio.to_thread(cut_connections, self.server.pid)
        elif fault == "disk-full":
            await self._fill_disk()
        elif fault in ("program-kill", "program-stop"):
            number = signal.SIGSTOP if what == "stop" else signal.SIGKILL
            await self._signal_program(number, rng)
        else:
            (self.folder / "orders" / f"{fault}-{self.injected}").touch()

    async def _signal_program(self, number: signal.Signals, rng: random.Random) -> None:
        for _ in range(200):  # until one runs
            found = []
            with suppress(psutil.Error):
                for process in psutil.Process(self.server.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        words = process.cmdline()
                        wraps = any(each.endswith("child.py") for each in words)
                        if not wraps and any(SWALLOWS.name in each for each in words):
                            found.append(process.pid)
            if found:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(found), number)
                    return
            await asyncio.sleep(0.02)

    async def _fill_disk(self) -> None:
        if self.disk is None:
            return
        filler = self.disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        await asyncio.sleep(2)
        filler.unlink()

    async def _healthy(self, port: int) -> None:
        async with httpx.AsyncClient() as http:
            for _ in range(3000):
                with suppress(httpx.TransportError):
                    if (await http.get(f"http://127.0.0.1:{port}/health")).is_success:
                        return
                await asyncio.sleep(0.05)
        raise TimeoutError(f"port {port} is not healthy")


def settings(kind: str, folder: Path) -> Config:
    words = {
        "model.name": ROOT / ".cache" / "tiny-base",
        "state_dir": folder / "state",
        "environment.name": environment_of(kind, folder),
        "environment.deadline_s": DEADLINE_S,
        "sampling.group_size": GROUP_SIZE,
        "sampling.max_new_tokens": 256,
        "trainer.batch_size": SLOTS,
        "limits.max_failed_groups": 10_000,
    }
    return load([text for name, value in words.items() for text in (f"--{name}", str(value))], {})


async def collect(run: Run, config: Config, faults: Sequence[str], rng: random.Random) -> Evidence:
    """Collects groups under the faults, and returns what was stored and seen."""
    wanted = GROUPS_PER_FAULT * (len(faults) + 2)
    prompts = [
        Prompt(id=f"p{i}", prompt=f"Talk about {i}.", ground_truth=str(i), columns={"index": i})
        for i in range(10_000)
    ]
    data = create_data_app(config, prompts, [])
    reward = create_reward_app(config.reward)
    replay = create_replay_app(config.replay, config.state_dir)
    async with AsyncExitStack() as stack:
        for app in (data, reward, replay):
            await stack.enter_async_context(app.router.lifespan_context(app))
        store = FreeingReplay("replay-buffer", BASE, transport=httpx.ASGITransport(replay))
        services = Services(
            data=DataClient("data-server", BASE, transport=httpx.ASGITransport(data)),
            rollout=RolloutClient("rollout-server", f"http://127.0.0.1:{run.engine_port}"),
            reward=RewardClient("reward-server", BASE, transport=httpx.ASGITransport(reward)),
            replay=store,
            environment=EnvironmentClient("environment-server", f"http://127.0.0.1:{run.port}"),
        )
        for client in services.all():
            await stack.enter_async_context(client)
        prompter = Prompter(load_tokenizer(config.model), PromptStyle(), [2])
        cursor = PromptCursor(PromptProgress())
        context = RolloutContext(config, services, prompter, clock=StageClock(), run_id="chaos")
        collector = Collector(context, cursor, GroundTruthCheck(services, run.folder / "truths"))
        store.collector = collector
        collecting = asyncio.create_task(collector.run(wanted, SLOTS))

        async def stored(count: int) -> None:
            while store.stored < count:
                if collecting.done():
                    collecting.result()
                await asyncio.sleep(0.02)

        for number, fault in enumerate(faults):
            await stored(1 + number * GROUPS_PER_FAULT)
            await asyncio.sleep(rng.uniform(0, 0.5))
            await run.inject(fault, rng)
        await stored(wanted)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        await store.flush()

    return Evidence(
        kind=run.kind,
        group_size=GROUP_SIZE,
        wanted=wanted,
        drawn=cursor.next,
        left_out=set(cursor.progress.finished) | set(range(cursor.progress.position)),
        groups=list(read_groups(config.state_dir / "replay" / "replay.db").values()),
        engine=read_lines(run.folder / "engine.jsonl"),
        programs=read_lines(run.folder / "programs.jsonl"),
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@asynccontextmanager
async def small_disk(folder: Path) -> AsyncIterator[Path | None]:
    """Mounts a small file system where that is allowed."""
    disk = folder / "disk"
    disk.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={DISK_BYTES}".encode()
    if libc.mount(b"tmpfs", str(disk).encode(), b"tmpfs", 0, options):
        yield None
        return
    try:
        yield disk
    finally:
        libc.umount2(str(disk).encode(), 2)  # even if a file is still open


async def chaos(kind: str, seed: int, count: int, folder: Path) -> Evidence:
    """Runs a kind under so many faults of a seed."""
    rng = random.Random(f"{kind} {seed}")
    choices = list(FAULTS[kind])
    rng.shuffle(choices)
    faults = [choices[i % len(choices)] for i in range(count)]
    async with small_disk(folder) as disk:
        run = Run(kind, folder, disk)
        async with run.running():
            evidence = await collect(run, settings(kind, folder), faults, rng)
        if disk is not None:
            # An empty folder may be that of a server that starts: it is removed later.
            evidence.left_in_disk = sorted(str(path) for path in disk.glob("*/*"))
    return evidence
