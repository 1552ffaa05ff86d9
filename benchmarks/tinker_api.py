"""Measures what Tinker's API costs: steps per second of a loop with Tinker's SDK against
`rlhf tinker`, and of the same loop that calls the learner in one process:
`OMP_NUM_THREADS=1 python -m benchmarks.tinker_api --client PYTHON`.

PYTHON is an interpreter with the package `tinker`. A step is a forward_backward of `--rows`
sequences of `--tokens` tokens and an optim_step of AdamW on a LoRA adapter of rank 32. Both sides
make a round in turn, so that what else the machine does meets both. The losses must be equal to the
bit. Processor time says what the API adds on a machine that does other things too.
"""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import psutil
from rich.console import Console

from benchmarks.command import command_parser, figures_table
from benchmarks.processes import free_port
from common.settings.config import from_mapping
from learning.device import reproducible_numbers
from learning.ranks import Ranks
from trainer.tinker.interface import AdamParams, Datum, LoraSpec
from trainer.tinker.learner import RunLearner

_CLIENT = Path(__file__).with_name("tinker_client.py")
_NAME = "benchmark/base"


def local_round(learner: RunLearner, name: str, args: Namespace) -> tuple[float, float, float]:
    """Returns the seconds of a round in this process, those of its processor, and its last loss."""
    random = np.random.default_rng(0)
    data: list[Datum] = []
    for _ in range(args.rows):
        tokens = random.integers(3, 250, args.tokens + 1)
        weights = np.ones(args.tokens, np.float32)
        data.append(Datum(tokens[:-1].tolist(), {"target_tokens": tokens[1:], "weights": weights}))
    adam = AdamParams(learning_rate=1e-3)
    learner.create(name, LoraSpec(rank=32, seed=1))
    learner.forward_backward(name, data, "cross_entropy", {})
    learner.optim_step(name, adam)
    began = time.perf_counter()
    began_cpu = time.process_time()
    for _ in range(args.steps):
        outputs = learner.forward_backward(name, data, "cross_entropy", {})
        learner.optim_step(name, adam)
    seconds = time.perf_counter() - began
    cpu_s = time.process_time() - began_cpu
    learner.unload(name)
    return seconds, cpu_s, outputs.metrics["loss:sum"]


def cpu_seconds(process: int) -> float:
    """Returns the processor time that a process has taken."""
    times = psutil.Process(process).cpu_times()
    return times.user + times.system


@contextmanager
def served(model: Path, directory: Path) -> Iterator[tuple[str, int]]:
    """Runs a server inside the context; yields its address and the number of its process."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "trainer.tinker", "--model", str(model)]
    command += ["--dir", str(directory), "--name", _NAME, "--port", str(port)]
    with (directory.parent / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while True:
            assert server.poll() is None, (directory.parent / "server.log").read_text()
            try:
                if httpx.get(f"{url}/api/v1/healthz").is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield url, server.pid
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = command_parser("benchmarks.tinker_api", __doc__)
    parser.add_argument("--client", default=sys.executable)
    parser.add_argument("--model", type=Path, default=Path(".cache/tiny-base"))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = from_mapping({"model.name": str(args.model), "rollout.engine": "embedded"})
    work = {name: getattr(args, name) for name in ("rows", "tokens", "steps", "rounds")}

    here: list[float] = []
    there: list[float] = []
    cpu: dict[str, list[float]] = {"in one process": [], "of the server": [], "of the client": []}
    with TemporaryDirectory() as made, reproducible_numbers(wanted=True):
        learner = RunLearner(config, Ranks.alone(config))
        with served(args.model, Path(made) / "server") as (url, server):
            command = [args.client, str(_CLIENT), url, _NAME, json.dumps(work)]
            client = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert client.stdin is not None
            assert client.stdout is not None
            for number in range(args.rounds):
                seconds, cpu_s, loss = local_round(learner, f"round {number}", args)
                here.append(seconds)
                cpu["in one process"].append(cpu_s)
                before = cpu_seconds(server)
                client.stdin.write("\n")
                client.stdin.flush()
                cpu_s, seconds, their_loss = json.loads(client.stdout.readline())
                there.append(seconds)
                cpu["of the server"].append(cpu_seconds(server) - before)
                cpu["of the client"].append(cpu_s)
                assert loss == their_loss, f"{loss} here, {their_loss} there"
            client.wait()

    table = figures_table(
        f"{args.steps} steps of {args.rows} × {args.tokens} tokens, {args.rounds} rounds, "
        f"load {os.getloadavg()[0]:.0f}",
        ["loop", "steps per second", "ratio"],
    )
    ratio = median(mine / theirs for mine, theirs in zip(here, there, strict=True))
    table.add_row("in one process", f"{args.steps / median(here):.2f}", "1")
    table.add_row("with the SDK", f"{args.steps / median(there):.2f}", f"{ratio:.2f}")
    Console().print(table)
    for where, found in cpu.items():
        Console().print(f"processor, {where}: {1000 * median(found) / args.steps:.0f} ms a step")


if __name__ == "__main__":
    main()
