"""`python -m tests.chaos.episodes.run` collects episodes of programs that catch every error, under seeded
faults, and compares what was stored with what the programs and the engine saw.

Options are `--seeds 0,1,2 --faults 30 --kinds agent,server,class,openenv,verifiers --json FILE`. The
faults of a seed are shared among the kinds. `openenv` and `verifiers` need their packages in
`.venv-NAME`, and are left out without. The exit status is 1 if an invariant was violated.
"""

import argparse
import asyncio
import ctypes
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

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
from tests.chaos.episodes.invariants import Evidence, violations
from tests.chaos.episodes.parts import LOG, ORDERS, serve_engine, serve_environment
from tests.chaos.invariants import read_groups
from tests.chaos.targets import cut_connections
from tests.support.paths import ROOT
from tests.support.processes.ports import free_port
from trainer.policy.scorer import load_tokenizer
from trainer.rollouts.collector import Collector
from trainer.rollouts.context import RolloutContext
from trainer.rollouts.ground_truths import GroundTruthCheck
from trainer.rollouts.prompt_cursor import PromptCursor, PromptProgress
from trainer.rollouts.services import Services
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
    "openenv": (*ENGINE, *SERVER, "program-kill", "program-stop"),
    "verifiers": (*ENGINE, *SERVER, "program-kill", "program-stop", "harness-kill"),
}
"""The faults of each kind of program."""
SHARES = {"agent": 8, "server": 6, "class": 6, "openenv": 5, "verifiers": 5}
"""How the faults of a seed are shared."""
PROGRAMS = {
    "agent": "swallows.py",
    "server": "swallows.py",
    "openenv": "uvicorn",
    "verifiers": "examples/verifiers/server.py",
}
"""A word in the command line of the processes that `program-kill` and `program-stop` hit."""


def python_of(name: str) -> Path:
    """Returns the interpreter of `.venv-NAME`, or of NAME in $AGENT_VENVS."""
    folders = os.environ.get("AGENT_VENVS")
    folder = Path(folders) / name if folders else ROOT / f".venv-{name}"
    return folder / "bin" / "python"


def environment_of(kind: str, folder: Path) -> str:
    """Returns `environment.name` for a kind of program; its files are in `folder`."""
    log = folder / "programs.jsonl"
    program = f"{sys.executable} -I -S {SWALLOWS} {log} {folder / 'orders'}"
    if kind == "agent":
        return f"agent:{program}"
    if kind == "server":
        return f"agent:{program} {{port}}"
    if kind == "class":
        return "python:tests.chaos.episodes.parts:Swallows"
    if kind == "openenv":
        app = "tests.chaos.episodes.openenv_app:app --port PORT --log-level error"
        command = f"env PYTHONPATH={ROOT} {LOG}={log} {python_of(kind)} -m uvicorn {app}"
        return f"agent:{sys.executable} {ROOT}/examples/openenv/server.py '{command}' {{port}}"
    packages = f"{ROOT}:{SWALLOWS.with_name('packages')}"
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n{LOG}={log} PYTHONPATH={packages} exec {python_of(kind)} "$@"\n')
    python.chmod(0o755)
    return f"agent:{python} {ROOT}/examples/verifiers/server.py swallowing {{port}}"


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
    injected: list[dict[str, Any]] = field(default_factory=list)
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
        """Injects a fault and notes whether it met something."""
        hit = await self._strike(fault, rng)
        self.injected.append({"fault": fault, "at": time.time(), "hit": hit})

    async def _strike(self, fault: str, rng: random.Random) -> bool:
        part, _, what = fault.partition("-")
        if fault == "engine-kill":
            os.kill(self.engine.pid, signal.SIGKILL)
        elif part in ("engine", "router"):
            order = {"kind": what, "count": rng.randint(2, 8)}
            await self._healthy(self.engine_port)  # it may have just been killed
            async with httpx.AsyncClient() as http:
                await http.post(f"http://127.0.0.1:{self.engine_port}/fault", json=order)
        elif fault == "environment-kill":
            os.kill(self.server.pid, signal.SIGKILL)
        elif fault == "cut":
            return await asyncio.to_thread(cut_connections, self.server.pid) > 0
        elif fault == "disk-full":
            return await self._fill_disk()
        elif fault in ("program-kill", "program-stop", "harness-kill"):
            word = "converse" if part == "harness" else PROGRAMS[self.kind]
            number = signal.SIGSTOP if what == "stop" else signal.SIGKILL
            return await self._signal_program(word, number, rng)
        else:
            (self.folder / "orders" / f"{fault}-{len(self.injected)}").touch()
        return True

    async def _signal_program(self, word: str, number: signal.Signals, rng: random.Random) -> bool:
        for _ in range(200):  # until one runs
            found = []
            with suppress(psutil.Error):
                for process in psutil.Process(self.server.pid).children(recursive=True):
                    with suppress(psutil.Error):
                        words = process.cmdline()
                        wraps = any(each.endswith("child.py") for each in words)
                        if not wraps and any(word in each for each in words):
                            found.append(process.pid)
            if found:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(found), number)
                    return True
            await asyncio.sleep(0.02)
        return False

    async def _fill_disk(self) -> bool:
        if self.disk is None:
            return False
        filler = self.disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        await asyncio.sleep(2)
        filler.unlink()
        return True

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
        dropped=dict(collector.drops.counts),
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


async def chaos(kind: str, seed: int, count: int, folder: Path) -> dict[str, Any]:
    """Runs a kind under the faults of a seed; returns the figures."""
    rng = random.Random(f"{kind} {seed}")
    choices = list(FAULTS[kind])
    rng.shuffle(choices)
    faults = [choices[i % len(choices)] for i in range(count)]
    began = time.monotonic()
    async with small_disk(folder) as disk:
        run = Run(kind, folder, disk)
        config = settings(kind, folder)
        async with run.running():
            evidence = await collect(run, config, faults, rng)
        if disk is not None:
            # An empty folder may be that of a server that starts: it is removed later.
            evidence.left_in_disk = sorted(str(path) for path in disk.glob("*/*"))
    return {
        "kind": kind,
        "seed": seed,
        "faults": run.injected,
        "groups": len(evidence.groups),
        "episodes": len(evidence.groups) * GROUP_SIZE,
        "dropped": evidence.dropped,
        "left_out": evidence.drawn - len(evidence.groups),
        "swallowed": evidence.swallowed(),
        "answers": len(evidence.engine),
        "seconds": round(time.monotonic() - began, 1),
        "violations": violations(evidence),
    }


def report(outcomes: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="chaos of episodes")
    columns = ("kind", "seed", "faults", "missed", "groups", "episodes", "swallowed faults")
    for name in (*columns, "dropped", "left out", "violations", "seconds"):
        table.add_column(name)
    for each in outcomes:
        hit = sum(fault["hit"] for fault in each["faults"])
        values = (
            each["kind"],
            each["seed"],
            hit,
            len(each["faults"]) - hit,
            each["groups"],
            each["episodes"],
            each["swallowed"],
            sum(each["dropped"].values()),
            each["left_out"],
            len(each["violations"]),
            each["seconds"],
        )
        table.add_row(*map(str, values))
    console.print(table)
    kinds = Counter(fault["fault"] for each in outcomes for fault in each["faults"] if fault["hit"])
    console.print(f"faults: {dict(sorted(kinds.items()))}")
    for each in outcomes:
        for problem in each["violations"]:
            console.print(f"{each['kind']} {each['seed']}: {problem}", style="red", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.episodes.run")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--faults", type=int, default=30, help="faults per seed")
    parser.add_argument("--kinds", default=",".join(SHARES))
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--keep", type=Path, help="keep all folders here (default: failed runs')")
    options = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing stays behind
    console = Console(width=150, highlight=False)
    kinds = options.kinds.split(",")
    for kind in ("openenv", "verifiers"):
        if kind in kinds and not python_of(kind).exists():
            console.print(f"{kind} is left out: there is no {python_of(kind)}")
            kinds.remove(kind)

    outcomes = []
    for seed in map(int, options.seeds.split(",")):
        for kind in kinds:
            share = max(1, round(options.faults * SHARES[kind] / sum(SHARES[k] for k in kinds)))
            folder = Path(tempfile.mkdtemp(prefix=f"chaos-{kind}-{seed}-", dir=options.keep))
            outcomes.append(asyncio.run(chaos(kind, seed, share, folder)))
            report(outcomes[-1:], console)
            if options.keep is None and not outcomes[-1]["violations"]:
                shutil.rmtree(folder)
            if options.json:
                options.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    report(outcomes, console)
    return int(any(each["violations"] for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
