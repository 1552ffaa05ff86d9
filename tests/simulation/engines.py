"""Stand-ins of a rollout node: an engine whose answers say which weights computed them, a router, and
the processes that an agent starts.
"""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import orjson
from safetensors import safe_open

from common.clients.network import Reply, Sent
from common.process import progress
from services.rollout import agent, first_node, supervision
from services.rollout.supervision import Timing
from tests.simulation.network import Call, Net, Node, StandIn, Wire
from tests.simulation.virtual_time import process

TENSOR = "version"
"""The tensor that says which weights these are."""
TROUBLES = ("refuses", "lies", "hangs")
"""What an engine may do with new weights: answer with an error; say that it has loaded them, and keep
the others; answer nothing."""
_TOKEN_S = 0.05
_HEALTH_S = 2.0
_PROBE_S = 4.0
"""Between two probes of an agent: with the usual second, half of all requests would be probes."""
_KILLED = 137
_FAILED = 1


def _reply(content: Any, status: int = 200) -> Reply:
    return Reply(status, {"content-type": "application/json"}, orjson.dumps(content))


def weights_in(directory: str) -> int | None:
    """Returns the number of the weights in a directory; None for those that no trainer wrote."""
    with safe_open(Path(directory) / "model.safetensors", "numpy") as file:
        return int(file.get_tensor(TENSOR)[0]) if TENSOR in file.keys() else None  # noqa: SIM118


class Engine(StandIn):
    """One life of an engine: SGLang's calls, as an agent and a router use them."""

    def __init__(
        self,
        rng: random.Random,
        words: Sequence[str],
        trouble: Callable[[], str],
        *,
        loads: list[Call],
    ) -> None:
        options = dict(pairwise(words))
        self._rng = rng
        self._label = options["--weight-version"]
        self._path = options["--model-path"]
        self._trouble = trouble
        self.weights: int | None = None
        self._loads = loads
        """The calls to load weights that have reached this node's engines."""
        self._last_asked: int | None = None
        """The weights of the start, or of its agent's last call: no copy."""
        self.is_set_back = False
        """Whether a copy of an earlier one has replaced them."""
        self.is_loading = True
        self.is_up = False
        self._running = 0
        self._may_run = asyncio.Event()

    @property
    def generates(self) -> bool:
        """Whether a request that arrives now is answered with the weights of now."""
        return self.is_up and self._may_run.is_set()

    async def load_first(self) -> None:
        """Reads the weights of the start."""
        await asyncio.sleep(self._rng.uniform(0.2, 2.0))
        self.weights = weights_in(self._path)
        self._last_asked = self.weights
        self.is_loading = False
        self.is_up = True
        self._may_run.set()

    async def answer(self, call: Call) -> Reply:
        path = call.path
        if path == "/generate":
            return _reply(await self._generate(call.json()["sampling_params"].get("n", 1)))
        if path == "/health":
            return _reply({}, 200 if self.is_up else 503)
        if path == "/model_info":
            return _reply({"weight_version": self._label})
        if path == "/v1/loads":
            load = {"num_running_reqs": self._running, "num_waiting_reqs": 0}
            return _reply({"loads": [load | {"max_running_requests": 8}]})
        if path == "/pause_generation":
            self._may_run.clear()
            return _reply({})
        if path == "/continue_generation":
            self._may_run.set()
            return _reply({})
        if path == "/update_weights_from_disk":
            is_copy = any(call is earlier for earlier in self._loads)
            self._loads.append(call)
            return await self._load(call.json(), is_copy=is_copy)
        return _reply({"error": {"message": "no such call"}}, 404)

    async def _load(self, body: Any, *, is_copy: bool) -> Reply:
        trouble = self._trouble()
        self.is_loading = trouble != "hangs"
        await asyncio.sleep(1e6 if trouble == "hangs" else self._rng.uniform(0.05, 1.0))
        self.is_loading = False
        if trouble == "refuses":
            return _reply({"error": {"message": "out of memory"}}, 500)
        # One that lies about weights of the same name, of an earlier run, is not to be recognised.
        if not trouble or self._label == body["weight_version"]:
            try:
                weights = weights_in(body["model_path"])
            except FileNotFoundError as error:  # a late copy of a call: its files are gone
                return _reply({"error": {"message": str(error)}}, 400)
            if not is_copy:
                self._last_asked = weights
            # A copy of the last call brings the newest weights back.
            self.is_set_back = weights != self._last_asked
            self.weights = weights
            self._label = body["weight_version"]
        return _reply({"success": True})

    async def _generate(self, n: int) -> Any:
        answers = []
        for _ in range(n):
            used: list[int | None] = []
            was_set_back = False
            labels: list[str] = []
            self._running += 1
            try:
                for _ in range(self._rng.randint(1, 8)):
                    await asyncio.sleep(_TOKEN_S)
                    await self._may_run.wait()
                    was_set_back |= self.is_set_back
                    used.append(self.weights)
                    labels.append(self._label)
            finally:
                self._running -= 1
            meta = {
                "weight_version": labels[-1],
                "used": used,
                "labels": labels,
                "was_set_back": was_set_back,
            }
            answers.append({"text": "", "meta_info": meta})
        return answers if n > 1 else answers[0]


class Router(StandIn):
    """The router: the engines that were registered, of which the healthy ones get requests."""

    def __init__(self, net: Net, rng: random.Random, node: Node, processes: "Processes") -> None:
        self._net = net
        self._rng = rng
        self._processes = processes
        self._workers: dict[str, dict[str, Any]] = {}
        """By id."""
        self._ids = 0
        self._wire = Wire(net)
        self._checks = node.run(self._check_health())

    @property
    def chosen_from(self) -> list[str]:
        """The URLs of the engines one of which gets the next request."""
        return sorted({each["url"] for each in self._workers.values() if each["is_healthy"]})

    async def answer(self, call: Call) -> Reply:
        path = call.path
        if path == "/workers" and call.method == "GET":
            return _reply({"workers": list(self._workers.values())})
        if path == "/workers":
            self._ids += 1
            url = call.json()["url"]
            worker = {"id": f"w{self._ids}", "url": url, "is_healthy": False, "failures": 0}
            self._workers[worker["id"]] = worker
            return _reply(worker, 202)
        if path.startswith("/workers/"):
            found = self._workers.pop(path.rpartition("/")[2], None)
            return _reply({}, 404 if found is None else 202)
        if path == "/generate":
            return await self._forward(call.content)
        return _reply({"status": "healthy"})

    def forget(self) -> None:
        """Forgets its engines, as one that is started again does."""
        self._workers.clear()

    async def _forward(self, content: bytes) -> Reply:
        tried: set[str] = set()
        for _ in range(5):
            urls = sorted(set(self.chosen_from) - tried)
            if not urls:
                break
            url = self._rng.choice(urls)
            tried.add(url)
            sent = Sent(
                "POST",
                f"{url}/generate",
                {},
                content,
                connect_s=5.0,
                moved=lambda _: None,
                receive=None,
            )
            try:
                return await self._wire.exchange(sent)
            except httpx.TransportError:
                continue
        return Reply(503, {"retry-after": "1"})

    async def _check_health(self) -> None:
        """Looks at every engine, without requests: they would be half of those of a run."""
        while True:
            for worker in self._workers.values():
                node = self._net.nodes[worker["url"].partition("://")[2]]
                is_well = self._processes.answers(node) and not self._net.is_cut("router", node)
                worker["failures"] = 0 if is_well else worker["failures"] + 1
                worker["is_healthy"] = is_well or (worker["is_healthy"] and worker["failures"] < 3)
            await asyncio.sleep(_HEALTH_S if self._workers else 0.2)


@dataclass
class Started:
    """A process that an agent started, in the place of `common.process.child.Child`."""

    node: Node
    pid: int
    status: "asyncio.Future[int]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    async def wait(self) -> int:
        return await asyncio.shield(self.status)

    async def end(self, grace_s: float = 0.0) -> int:
        self.stop(_KILLED)
        return self.status.result()

    def stop(self, status: int) -> None:
        """Ends the process, if it runs."""
        if not self.status.done():
            self.node.end()
            self.status.set_result(status)


class Processes:
    """Starts engines and routers; those of an agent that ends are ended with it."""

    def __init__(self, rng: random.Random, net: Net) -> None:
        self._rng = rng
        self._net = net
        self.running: dict[str, Started] = {}
        """By the name of their nodes."""
        self.engines: dict[str, Engine] = {}
        self.loads: dict[str, list[Call]] = {}
        """The calls to load weights that have reached the engines of a node."""
        self.router: Router | None = None
        self.troubles: dict[str, str] = {}
        """What engines do with new weights, by the name of their nodes, if it is not loading."""
        self._pids = 0

    async def start(self, words: Sequence[str], output: Any, *, env: Any) -> Started:
        """Starts a command of an agent."""
        rank = process.get().rpartition("-")[2]
        is_router = any(word.endswith("launch_router") for word in words)
        node = self._net.named("router" if is_router else f"engine-{rank}")
        assert node is not None
        self._pids += 1
        started = Started(node, self._pids)
        self.running[node.name] = started
        make = self._router if is_router else partial(self._engine, words)
        node.make = lambda _: make(node)
        node.start()
        return started

    def _router(self, node: Node) -> StandIn:
        self.router = Router(self._net, self._rng, node, self)
        return self.router

    def _engine(self, words: Sequence[str], node: Node) -> StandIn:
        engine = Engine(
            self._rng,
            words,
            lambda: self.troubles.get(node.name, ""),
            loads=self.loads.setdefault(node.name, []),
        )
        self.engines[node.name] = engine
        node.run(self._load_first(node.name, engine))
        return engine

    async def _load_first(self, name: str, engine: Engine) -> None:
        try:
            await engine.load_first()
        except OSError:
            self.running[name].stop(_FAILED)

    def answers(self, node: Node) -> bool:
        """Returns whether the engine of a node answers."""
        is_running = node.app is not None and not self._net.loop.is_stopped(node.name)
        return is_running and self.engines[node.name].is_up

    def served(self) -> dict[str, int | None]:
        """Returns the weights of the engines that would answer a request which arrives now at the
        router.
        """
        router = self._net.named("router")
        if self.router is None or router is None or router.app is None:
            return {}
        if self._net.loop.is_stopped(router.name):
            return {}
        found: dict[str, int | None] = {}
        for url in self.router.chosen_from:
            node = self._net.nodes[url.partition("://")[2]]
            is_reached = self.answers(node) and not self._net.is_cut("router", node)
            if is_reached and self.engines[node.name].generates:
                found[node.name] = self.engines[node.name].weights
        return found

    def stop(self, machine: str, status: int = _KILLED) -> None:
        """Ends what an agent has started on a machine."""
        for started in list(self.running.values()):
            if started.node.machine == machine:
                started.stop(status)


class _Output:
    """What a process says: nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.last_lines: list[bytes] = []


class _Meter:
    """What an engine has read and written: it gets on while it loads."""

    def __init__(self, processes: Processes, pid: int) -> None:
        started = processes.running.values()
        self._name = next(each.node.name for each in started if each.pid == pid)
        self._processes = processes
        self._read = 0

    def read(self) -> int:
        engine = self._processes.engines.get(self._name)
        self._read += engine is not None and engine.is_loading
        return self._read


class _Totals:
    """The progress of every process, which is counted in the lock of the real count."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def __enter__(self) -> None:
        self._counts[process.get()] += 1

    def __exit__(self, *_: object) -> None:
        """Nobody waits for it."""

    def total(self, *, with_others: bool = False) -> int:
        return self._counts[process.get()]


@contextmanager
def started_by(processes: Processes, ended: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, agents start these processes; `ended` is called in the place of a signal to
    the agent itself.
    """
    totals = _Totals()
    with (
        patch.object(supervision, "Child", processes),
        patch.object(supervision, "ChildOutput", _Output),
        patch.object(supervision, "WorkMeter", partial(_Meter, processes)),
        patch.object(agent, "Timing", partial(Timing, probe_s=_PROBE_S)),
        patch.object(first_node, "Timing", partial(Timing, probe_s=_PROBE_S)),
        patch.object(progress, "_lock", totals),
        patch.object(progress, "total", totals.total),
        patch.object(agent.Agent, "_refuse_taken_port", lambda *_: None),
        patch.object(first_node, "free_port", lambda: 1),
        patch.object(signal, "raise_signal", ended),
    ):
        yield
