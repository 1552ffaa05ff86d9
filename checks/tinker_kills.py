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
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.process.topology import LocalHost, parse_hosts
from common.weights.checksums import checksum
from tests.chaos.group import Group
from tests.chaos.targets import healthy, send
from trainer.tinker.records import Checkpoint
from trainer.tinker.state import State
from trainer.tinker.store import TinkerStore

ROOT = Path(__file__).parents[1]
_LOOP = f"{{python}} -W ignore {ROOT}/checks/tinker_loop.py {{name}} {{log}} 30 {{rate}}"
_LOOK_EVERY_S = 0.1
_YAML = ROOT / "jobgroup" / "rlhf-math-tinker-jobgroup.yaml"
_KINDS = {
    "rank": "trainer.tinker",
    "engine": "services.engine",
    "agent": "services.rollout",
}
"""What is killed in a job group, by the module that it runs."""
_GAVE_UP = "APIConnectionError"
_STUCK_S = 900.0
"""Seconds without a kill after which clients must have ended."""
Seen = dict[str, set[str]]
"""What a client computed: the values of each metric and file; one of each, if all is well."""


def _serve(words: Sequence[str], log: Path) -> None:
    """Runs `rlhf tinker` in this process."""
    os.setsid()
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

    def kill(self) -> str:
        """Ends it as the kernel does when memory is short; returns what was killed."""
        self._process.kill()
        self._process.join()
        return "server"

    def stop(self) -> None:
        """Ends it with SIGTERM."""
        self._process.terminate()
        self._process.join()

    @property
    def answers(self) -> bool:
        """Whether it has started. Raises RuntimeError when it has ended by itself."""
        if not self._process.is_alive():
            raise RuntimeError(f"the server ended: {self._log.read_text()[-2000:]}")
        return healthy(f"{self.url}/health")


class JobGroup:
    """The job group of Tinker's API on this machine: two ranks, and a rollout node with its engine.

    Its runner starts again what was killed, as SkyPilot does.
    """

    def __init__(self, directory: Path, model: str, name: str, chance: random.Random) -> None:
        folder = directory / "group"
        folder.mkdir()
        settings = {
            "MODEL_NAME": str(Path(model).absolute()),
            "RLHF_ROLLOUT__ENGINE": "embedded",
            "RLHF_REPRODUCIBLE": "true",
            "RLHF_TINKER__NAME": name,
        }
        self._group = _Group(folder, settings)
        self._chance = chance
        self._running = ExitStack()
        self.directory = self._group.run_dir
        self._running.enter_context(self._group.running())
        while not (hosts := self._hosts()):
            time.sleep(_LOOK_EVERY_S)
        place = next(place for host, place in hosts.items() if host.startswith("tinker-server-0."))
        self.url = f"http://{place.address}:{8007 + place.port_shift}"

    def _hosts(self) -> Mapping[str, LocalHost]:
        texts = [process.env.get("JOBGROUP_HOSTS", "") for process in self._group.processes()]
        return parse_hosts(next(filter(None, texts), ""))

    def start(self) -> None:
        """Does nothing: the runner starts it."""

    def kill(self) -> str:
        """Kills a rank, the engine or its agent; returns which."""
        while True:
            kind = self._chance.choice(list(_KINDS))
            found = [process for process in self._group.processes() if _KINDS[kind] in process.argv]
            if found and send(self._chance.choice(found).pid, signal.SIGKILL):
                return kind

    def stop(self) -> None:
        self._running.close()

    @property
    def answers(self) -> bool:
        """Whether rank 0 has started."""
        assert self._group.process is not None
        if self._group.process.poll() is not None:
            raise RuntimeError(f"the job group ended: {self._group.output()[-2000:]}")
        return healthy(f"{self.url}/health")


class _Group(Group):
    def _command(self) -> list[str]:
        command = super()._command()
        text = _YAML.read_text()
        text = text.replace("max_restarts_on_errors: 3", "max_restarts_on_errors: 1000")
        (self.folder / "jobgroup.yaml").write_text(text)
        return [*command, "--num-nodes", "rollout-server=1", "--num-nodes", "tinker-server=2"]


class Client:
    """A training loop in a process of its own."""

    def __init__(self, command: Sequence[str], log: Path, url: str) -> None:
        self.log = log
        self._command = command
        key = f"tml-{os.environ.get('API_TOKEN', 'local')}"
        self._env = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": key}
        self._env.pop("PYTHONPATH", None)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.with_suffix(".out").open("ab") as out:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
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
        if not status:
            return status is None
        said = self.log.with_suffix(".out").read_text()[-2000:]
        # The SDK tries to begin a session for a few seconds only.
        if _GAVE_UP not in said.splitlines()[-1]:
            raise RuntimeError(f"a client ended with {status}: {said}")
        self.start()
        return True

    def seen(self, server: Path) -> Seen:
        """Returns what it has logged and saved; the server has ended."""
        found: Seen = defaultdict(set)
        for row in _rows(self.log / "metrics.jsonl"):
            for name, value in row.items():
                if not name.startswith("time"):
                    found[f"step {row['step']} {name}"].add(repr(value))
        store = TinkerStore(server / "tinker.sqlite")
        records = {record.id: record for record in store.records()}
        store.close()
        state = State(server, most_runs=0)
        for row in _rows(self.log / "checkpoints.jsonl"):
            for path in (row["state_path"], row.get("sampler_path")):
                checkpoint = records.get(path or "")
                if isinstance(checkpoint, Checkpoint):
                    for file in state.files(checkpoint).glob("*.safetensors"):
                        found[f"{row['name']} {checkpoint.kind} {file.name}"].add(checksum(file))
        return dict(found)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class Played:
    """What came of one run of the clients."""

    seen: list[Seen] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    """By what was killed."""
    seconds: float = 0.0


def play(arguments: argparse.Namespace, directory: Path, *, kills: int, seed: int) -> Played:
    """Runs the clients to their end, with at most this many kills. Raises RuntimeError when one of
    the processes fails, or they do not end.
    """
    directory.mkdir()
    chance = random.Random(seed)
    server: Server | JobGroup
    if arguments.group:
        server = JobGroup(directory, arguments.model, arguments.name, chance)
    else:
        server = Server(directory, arguments.model, arguments.name)
    clients = []
    for number in range(arguments.clients):
        log = directory / f"client-{number}"
        rate = 3e-4 * (number + 1)
        values = {"python": arguments.python, "name": arguments.name, "log": log, "rate": rate}
        words = shlex.split(arguments.client.format(**values))
        clients.append(Client(words, log, server.url))
    played = Played()
    begun = time.monotonic()
    server.start()
    for client in clients:
        client.start()
    try:
        _kill(arguments, chance, kills, clients=clients, server=server, killed=played.kills)
        played.seconds = time.monotonic() - begun
    finally:
        for client in clients:
            client.kill()
        server.stop()
    played.seen = [client.seen(server.directory) for client in clients]
    return played


def _kill(
    arguments: argparse.Namespace,
    chance: random.Random,
    kills: int,
    *,
    clients: Sequence[Client],
    server: Server | JobGroup,
    killed: Counter[str],
) -> None:
    """Kills until the clients have ended, and counts what was killed."""
    start_s = 1.0
    while running := [client for client in clients if client.runs]:
        # Some kills come while it starts, and continues what it had accepted.
        if chance.random() > arguments.early:
            begun = time.monotonic()
            while not server.answers:
                time.sleep(_LOOK_EVERY_S)
            # The first start also unpacks and waits for all tasks: the loops are shorter than that.
            if killed:
                start_s = max(start_s / 2, time.monotonic() - begun)
        is_last = killed.total() >= kills
        wait_s = _STUCK_S if is_last else chance.uniform(0, arguments.pause * start_s)
        if not _all_run_for(wait_s, running):
            continue
        if is_last:
            raise RuntimeError(f"the clients have not ended after {wait_s:.0f} s")
        if chance.random() < arguments.of_clients:
            victim = chance.choice(running)
            victim.kill()
            victim.start()
            killed["client"] += 1
        else:
            killed[server.kill()] += 1
            server.start()


def _all_run_for(seconds: float, clients: Sequence[Client]) -> bool:
    """Waits; returns False as soon as one of the clients has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
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
    add("--early", type=float, default=0.2, help="share of kills that do not wait for a start")
    add("--pause", type=float, default=4.0, help="most time to a kill, in starts of the server")
    add("--group", action="store_true", help="the job group with two ranks")
    add("--seed", type=int, default=0, help="draws who is killed and when")
    add("--dir", type=Path, help="where to work (default: a new directory)")
    return made


def main(argv: list[str] | None = None) -> None:
    """Prints a line for each time that the clients ran to their end; exits with 1 when what they
    computed differs.
    """
    arguments = parser().parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.group:
        os.environ.setdefault("API_TOKEN", secrets.token_hex(16))
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
            f"seed {seed}: {played.kills.total()} kills {dict(played.kills)}, "
            f"{played.seconds:.0f} s, {len(different)} differences",
            flush=True,
        )
        print("\n".join(different[:5]), end="\n" if different else "", flush=True)
        failed = failed or bool(different)
        left -= played.kills.total()
        seed += 1
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
