"""Kills a Tinker server and its clients at random moments: is all that they compute what a run
without kills computes, to the bit?

    python -m checks.tinker_kills --python PYTHON              # a Python that has the SDK `tinker`
    python -m checks.tinker_kills --kills 20 --clients 1 --client \
        "PYTHON -m tinker_cookbook.recipes.rl_loop model_name=… log_path={log}" --name Qwen/Qwen3-8B

Clients train at once, each a run of its own. A loop that was killed is started again, as a person
would do, and goes on from its last checkpoint. Metrics of all steps, also of those that are made
twice, and the files of all checkpoints are compared. A client is any loop that writes
`metrics.jsonl` and `checkpoints.jsonl` as those of tinker-cookbook do.
"""

import argparse
import json
import multiprocessing
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks.faults.lab import ROOT
from common.weights.checksums import checksum
from trainer.tinker.records import Checkpoint
from trainer.tinker.state import State
from trainer.tinker.store import TinkerStore

_LOOP = f"{{python}} -W ignore {ROOT}/checks/tinker_loop.py {{name}} {{log}} 30 {{rate}}"
_LOOK_EVERY_S = 0.05
_STUCK_S = 900.0
"""Seconds without a kill after which clients must have ended."""
Seen = dict[str, set[str]]
"""What a client computed: the values of each metric and file; one of each, if all is well."""


def _serve(words: Sequence[str], log: Path) -> None:
    """Runs `rlhf tinker` in this process."""
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from trainer.start.program import run_rank
    from trainer.tinker.__main__ import main

    sys.argv = ["rlhf tinker", *words]
    run_rank(main)


class Server:
    """`rlhf tinker` on one machine.

    Its processes are forked off one that has imported torch and transformers: a start takes a
    second of a core and not ten.
    """

    def __init__(self, directory: Path, model: str, name: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.directory = directory / "server"
        self._log = directory / "server.log"
        self._words = ["--model", model, "--name", name, "--dir", str(self.directory)]
        self._words += ["--port", str(port), "--state_dir", str(directory / "state")]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["trainer.tinker.run"])
        self._process: Any = None

    def start(self) -> None:
        self._process = self._context.Process(target=_serve, args=(self._words, self._log))
        self._process.start()

    def kill(self) -> None:
        """Ends it as the kernel does when memory is short."""
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """Ends it with SIGTERM."""
        self._process.terminate()
        self._process.join()

    def check(self) -> None:
        """Raises RuntimeError when it has ended by itself."""
        if not self._process.is_alive():
            raise RuntimeError(f"the server ended: {self._log.read_text()[-2000:]}")


class Client:
    """A training loop in a process of its own."""

    def __init__(self, command: Sequence[str], log: Path, url: str) -> None:
        self.log = log
        self._command = command
        self._env = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local"}
        self._env.pop("PYTHONPATH", None)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.with_suffix(".out").open("ab") as out:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @property
    def runs(self) -> bool:
        """Whether it has not ended. Raises RuntimeError when it has failed."""
        assert self._process is not None
        status = self._process.poll()
        if status:
            said = self.log.with_suffix(".out").read_text()
            raise RuntimeError(f"a client ended with {status}: {said[-2000:]}")
        return status is None

    def seen(self, server: Path) -> Seen:
        """Returns what it has logged and saved; the server has ended."""
        found: Seen = defaultdict(set)
        for row in _rows(self.log / "metrics.jsonl"):
            for name, value in row.items():
                if not name.startswith("time"):
                    found[f"step {row['step']} {name}"].add(repr(value))
        store = TinkerStore(server / "tinker.sqlite")
        facts = {fact.id: fact for fact in store.facts()}
        store.close()
        state = State(server, most_runs=0)
        for row in _rows(self.log / "checkpoints.jsonl"):
            for path in (row["state_path"], row.get("sampler_path")):
                checkpoint = facts.get(path or "")
                if isinstance(checkpoint, Checkpoint):
                    for file in state.files(checkpoint).glob("*.safetensors"):
                        found[f"{row['name']} {checkpoint.kind} {file.name}"].add(checksum(file))
        return dict(found)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class Played:
    """What came of one run of the clients."""

    seen: list[Seen]
    server_kills: int = 0
    client_kills: int = 0
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        return self.server_kills + self.client_kills


def play(arguments: argparse.Namespace, directory: Path, *, kills: int, seed: int) -> Played:
    """Runs the clients to their end, with at most this many kills. Raises RuntimeError when one of
    the processes fails, or they do not end.
    """
    directory.mkdir()
    chance = random.Random(seed)
    played = Played([])
    server = Server(directory, arguments.model, arguments.name)
    clients = []
    for number in range(arguments.clients):
        log = directory / f"client-{number}"
        rate = 3e-4 * (number + 1)
        values = {"python": arguments.python, "name": arguments.name, "log": log, "rate": rate}
        words = shlex.split(arguments.client.format(**values))
        clients.append(Client(words, log, server.url))
    begun = time.monotonic()
    server.start()
    for client in clients:
        client.start()
    try:
        while running := [client for client in clients if client.runs]:
            wait_s = chance.uniform(0, arguments.pause) if played.kills < kills else _STUCK_S
            if not _all_run_for(wait_s, running, server):
                continue
            if played.kills >= kills:
                raise RuntimeError(f"the clients have not ended after {wait_s:.0f} s")
            if chance.random() < arguments.of_clients:
                victim = chance.choice(running)
                victim.kill()
                victim.start()
                played.client_kills += 1
            else:
                server.kill()
                server.start()
                played.server_kills += 1
        played.seconds = time.monotonic() - begun
    finally:
        for client in clients:
            client.kill()
        server.stop()
    played.seen = [client.seen(server.directory) for client in clients]
    return played


def _all_run_for(seconds: float, clients: Sequence[Client], server: Server) -> bool:
    """Waits; returns False as soon as one of the clients has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        server.check()
        if not all(client.runs for client in clients):
            return False
    return True


def differences(expected: Sequence[Seen], found: Sequence[Seen]) -> list[str]:
    """Returns the names of what is not the same, the first ones first."""
    different = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        for name in {**one, **other}:
            if one.get(name) != other.get(name):
                values = f"{one.get(name)} and not {other.get(name)}"
                different.append(f"client {number} {name}: {values}")
    return different


def parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    made = argparse.ArgumentParser(description=__doc__)
    add = made.add_argument
    add("--model", default=str(ROOT / ".cache/tiny-base"), help="directory of the base model")
    add("--name", default="tiny/base", help="its name for clients")
    add("--python", default=sys.executable, help="a Python that has the SDK")
    add("--client", default=_LOOP, help="command of a client: {python}, {name}, {log}, {rate}")
    add("--clients", type=int, default=2, help="clients at once")
    add("--kills", type=int, default=200, help="kills in all")
    add("--of-clients", type=float, default=0.2, help="share of kills that are of clients")
    add("--pause", type=float, default=4.0, help="most seconds between two kills")
    add("--seed", type=int, default=0, help="draws who is killed and when")
    add("--dir", type=Path, help="where to work (default: a new directory)")
    return made


def main(argv: list[str] | None = None) -> None:
    """Prints a line for each time that the clients ran to their end; exits with 1 when what they
    computed differs.
    """
    arguments = parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    directory = arguments.dir or Path(tempfile.mkdtemp(prefix="tinker-kills-"))
    directory.mkdir(exist_ok=True)
    whole = play(arguments, directory / "whole", kills=0, seed=0)
    print(f"nothing killed: {len(whole.seen[0])} values each, {whole.seconds:.0f} s", flush=True)
    left = arguments.kills
    seed = arguments.seed
    failed = False
    while left > 0:
        played = play(arguments, directory / f"seed-{seed}", kills=left, seed=seed)
        different = differences(whole.seen, played.seen)
        print(
            f"seed {seed}: {played.server_kills} kills of the server, {played.client_kills} of "
            f"clients, {played.seconds:.0f} s, {len(different)} differences",
            flush=True,
        )
        print("\n".join(different[:5]), end="\n" if different else "", flush=True)
        failed = failed or bool(different)
        left -= played.kills
        seed += 1
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
