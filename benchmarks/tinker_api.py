"""Measures what Tinker's API costs: steps per second of a loop with Tinker's SDK against
`rlhf tinker`, and of the same loop that calls the learner in one process:
`OMP_NUM_THREADS=1 python -m benchmarks.tinker_api --client PYTHON`.

PYTHON is an interpreter with the package `tinker`. A step is a forward_backward of `--rows`
sequences of `--tokens` tokens and an optim_step of AdamW on a LoRA adapter of rank 32. Both sides
make a round in turn, so that what else the machine does meets both. The losses must be equal to the
bit.
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


def local_round(learner: RunLearner, name: str, args: Namespace) -> tuple[float, float]:
    """Returns the seconds of a round in this process, and its last loss."""
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
    for _ in range(args.steps):
        outputs = learner.forward_backward(name, data, "cross_entropy", {})
        learner.optim_step(name, adam)
    seconds = time.perf_counter() - began
    learner.unload(name)
    return seconds, outputs.metrics["loss:sum"]


@contextmanager
def served(model: Path, directory: Path) -> Iterator[str]:
    """Runs a server inside the context; yields its address."""
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
        yield url
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
    with TemporaryDirectory() as made, reproducible_numbers(wanted=True):
        learner = RunLearner(config, Ranks.alone(config))
        with served(args.model, Path(made) / "server") as url:
            command = [args.client, str(_CLIENT), url, _NAME, json.dumps(work)]
            client = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert client.stdin is not None
            assert client.stdout is not None
            for number in range(args.rounds):
                seconds, loss = local_round(learner, f"round {number}", args)
                here.append(seconds)
                client.stdin.write("\n")
                client.stdin.flush()
                _, seconds, their_loss = json.loads(client.stdout.readline())
                there.append(seconds)
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


if __name__ == "__main__":
    main()
