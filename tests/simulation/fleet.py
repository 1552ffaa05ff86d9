"""Simulated runs of a trainer that publishes weights to rollout nodes: its board and publisher, the
agents of the nodes, and requests through the router, which no engine with older weights may answer.
"""

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from common.clients.network import Reply
from common.clients.rollout import BASE_VERSION, RolloutClient
from common.errors import ServiceError
from common.process import logs
from common.process.metrics import Metrics
from common.process.topology import ROLLOUT, TRAINER, Topology
from common.settings.config import Config, load
from common.wire.schemas import WorkerReport
from services.http.app import create_app
from services.rollout.app import create_agent_app
from services.rollout.first_node import FirstNodeAgent
from tests.simulation.engines import TENSOR, TROUBLES, Processes, started_by
from tests.simulation.network import Answered, App, Call, Model, Node, Story
from tests.simulation.scene import Crash, Scene, Violation, ask_json
from tests.simulation.stand_ins import Loop
from tests.simulation.virtual_time import VirtualLoop, process
from tests.support.paths import ROOT
from trainer.backends.server import add_nodes
from trainer.weights.board import WeightBoard
from trainer.weights.publisher import Publisher

_VERSIONS = 3
_MORE_VERSIONS = 6
"""More versions for a run in which calls hang: that ends a node's part for a while, and does so again."""
_FAULTS_S = 30.0
_FENCE_S = 60.0
_LIMIT_S = 2_000.0
_REACHED_S = 400.0
"""Longest time, without faults, until every node serves the newest weights."""
_WATCH_S = 0.2
_LEAVES_S = 15.0
"""Time in which a stale node must have left the router, while nothing else is wrong."""
_NOTICED_S = 45.0
"""Time in which an engine must have left it, or be current again, that a late copy of a call has
made older."""
_GOES_ON_S = 5.0
"""Time in which a trainer goes on once only nodes are behind that it has given up before."""
_EXPLAINED_S = 200.0
"""So long after a fault it may be the reason that nothing was served."""
_WAITS_S = 20.0
"""How long an agent that was stopped has no new weights yet."""
_RUN = 1000
"""Weights are numbered by the attempt times this, and the version."""


@lru_cache
def _config() -> Config:
    return load(
        [
            *("--model.name", str(ROOT / ".cache" / "tiny-base")),
            *("--state_dir", "/nonexistent"),
            *("--rollout.engine", "embedded"),
            *("--sampling.max_new_tokens", "8"),
            *("--rollout.stuck_after_s", "30"),
            *("--limits.fence_after_s", str(_FENCE_S)),
        ],
        {},
    )


class Condition:
    """A lock of one thread; whoever waits lets the virtual time pass."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        """Nobody else holds it."""

    def __exit__(self, *_: object) -> None:
        """Nobody waits for it."""

    def notify_all(self) -> None:
        """Whoever waits looks again soon by itself."""

    def wait(self, timeout: float) -> None:
        self._loop.run_until_complete(asyncio.sleep(timeout))


class Reports(Model):
    """Tells in the story what nodes report, and knows which of them the trainer has given up."""

    def __init__(self, story: Story, now: Callable[[], float]) -> None:
        self._story = story
        self._now = now
        self._said: dict[str, str] = {}
        self.given_up: set[str] = set()
        """Nodes without which the trainer goes on, until it says that they may serve again."""
        self.ready: dict[str, tuple[int, float]] = {}
        """The version that a node has said to serve last, and when it said so first."""

    def asked(self, call: Call) -> Answered:
        if call.method == "POST":
            report = call.json()
            said = f"{report['state']} with {report['run_id']} v{report['version']}"
            said = f"{said} {report['detail']}".strip()
            if self._said.get(report["name"]) != said:
                self._said[report["name"]] = said
                self._story.say(f"{report['name']} is {said}")
            return partial(self._noted, report)
        return super().asked(call)

    def _noted(self, report: dict[str, Any], reply: Reply) -> None:
        name = report["name"]
        if reply.json()["may_serve"]:
            self.given_up.discard(name)
        if report["state"] == "ready":
            version, _ = self.ready.get(name, (None, 0.0))
            if version != report["version"]:
                self.ready[name] = report["version"], self._now()
        else:
            self.ready.pop(name, None)

    def waited_s(self, version: int, given_up: set[str], names: set[str]) -> float:
        """Returns for how long the trainer has waited since all nodes serve a version but those that
        were and are given up; 0 when there are none, or others do not serve it either.
        """
        left = given_up & self.given_up
        if not left or self.given_up != left:
            return 0.0
        ready = [self.ready.get(name, (None, 0.0)) for name in names - left]
        if not ready or any(served != version for served, _ in ready):
            return 0.0
        return self._now() - max(since for _, since in ready)


class Fleet(Scene):
    """A run with one to three rollout nodes."""

    fault_rates = (0.0, 0.0, 0.02, 0.1)

    def __init__(self, seed: int, directory: Path, loop: VirtualLoop) -> None:
        super().__init__(seed, directory, loop)
        self._count = self.rng.choice((1, 2, 2, 3))
        self._shared = self.rng.random() < 0.3
        self.attempts = 0
        self.published = 0
        """The newest version that a trainer has kept; it goes on from there."""
        self.floor: int | None = None
        """The number of the weights that every engine in traffic must have by now: a trainer has
        published them, and stopped the traffic to the others. None while there is no such trainer.
        """
        self.newest = 0
        """The number of the newest weights that a trainer began to publish."""
        self._found: list[Violation] = []
        self._failures = 0
        self._versions = _VERSIONS
        self._last_fault = -1e9
        self._trainer_stops_until = 0.0
        self.processes = Processes(self.rng, self.net)
        self._board: WeightBoard | None = None
        self._static = directory / "config.json"
        directory.mkdir(exist_ok=True)
        self._static.write_text("{}")
        self._config = _config()
        rollout = self._config.rollout
        trainer = self._topology(0).url(TRAINER, self._config.trainer.port)
        self._reports = Reports(self.story, loop.time)
        self._trainer = self.node(
            "trainer",
            self._trainer_app,
            host=_host(trainer),
            machine="trainer",
            model=self._reports,
        )
        self._agents: list[Node] = []
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._working: dict[str, FirstNodeAgent] = {}
        self._stale_since: dict[str, float] = {}
        """When a node began not to get to the newest weights, by the name of its engine."""
        for rank in range(self._count):
            url = partial(self._topology(rank).url, ROLLOUT, node=rank)
            make = partial(self._agent_app, rank)
            machine = f"machine-{rank}"
            host = _host(url(rollout.agent_port))
            self._agents.append(self.node(f"agent-{rank}", make, host=host, machine=machine))
            host = _host(url(rollout.engine_port))
            self.node(f"engine-{rank}", _not_started, host=host, machine=machine)
        router = self._topology(0).url(ROLLOUT, rollout.router_port)
        self.node("router", _not_started, host=_host(router), machine="machine-0")
        self._router_url = router

    def stand_ins(self, stack: ExitStack) -> None:
        super().stand_ins(stack)
        stack.enter_context(started_by(self.processes, self._agent_failed))
        condition = partial(Condition, self.loop)
        stack.enter_context(patch.object(threading, "Condition", condition))

    def _topology(self, rank: int) -> Topology:
        ips = tuple(f"10.0.0.{number}" for number in range(self._count))
        return Topology(group="g", node_rank=rank, num_nodes=self._count, node_ips=ips)

    def _trainer_app(self, _: Path) -> App:
        assert self._board is not None
        app = create_app("ppo-trainer")
        add_nodes(app, self._board)
        return app

    def _agent_app(self, rank: int, disk: Path) -> App:
        config = self._config.model_copy(update={"state_dir": disk})
        agent = FirstNodeAgent(config, self._topology(rank), Metrics("rollout-server"))
        app = create_agent_app(agent, Metrics("rollout-server"))
        self._lives[f"agent-{rank}"] = self._agents[rank].live(app)
        self._working[f"agent-{rank}"] = agent
        return app

    def _agent_failed(self, _: int) -> None:
        """Ends an agent that gives up; the job group starts it again."""
        name = process.get()
        node = self.net.named(name)
        assert node is not None
        self.story.say(f"{name} gives up: {self._working[name].fatal}")
        self._lives[name].cancel()
        self.loop.call_later(5.0, self._end_machine, node.machine)

    # ------------------------------------------------------------ the run

    def run(self) -> None:
        """Publishes versions while faults strike, and checks what is served at the end."""
        self.limit(_LIMIT_S)
        self._watch()
        for node in self._agents:
            self.loop.call_later(self.rng.uniform(0.0, 2.0), node.start)
        self.schedule(self._faults(), self.rng.choice((0, 1, 2, 4, 6)), _FAULTS_S)
        if self.seed % 4 == 3:
            # More that befalls the router. Drawn apart: the other seeds stay what they are.
            drawn = random.Random(self.seed)
            fault = drawn.choice((partial(self._stop, "router"), self._forget_engines))
            self.loop.call_later(drawn.uniform(5.0, _FAULTS_S), self.strike, fault)
        elif self.seed % 4 == 2:
            self._schedule_calls(random.Random(self.seed))
        elif self.seed % 4 == 1:
            # The more versions there are, the longer it may take until a copy of a call arrives.
            drawn = random.Random(self.seed)
            for _ in range(2):
                self.loop.call_later(drawn.uniform(5.0, 60.0), self.strike, self._load_again)
        while self.published < self._versions:
            self.attempts += 1
            self.is_up = True
            try:
                self._attempt()
            except Crash:
                self.fault("crash", "trainer")
                self._end_trainer()
            except ServiceError as error:
                self.story.say(f"the trainer ends: {error}")
                self._failures += 1
                if self.loop.now - self._last_fault > _EXPLAINED_S or self._failures > 3:
                    raise Violation(f"the run ended: {error}") from error
                self._end_trainer()

    def _end_trainer(self) -> None:
        self.is_up = False
        self.net.lives += 1
        self.loop.go_on("")
        self._trainer.end()
        for task in self.loop.tasks_of(""):
            task.cancel()
        self.floor = None
        self.sleep(self.rng.uniform(1.0, 20.0))

    def _attempt(self) -> None:
        """Runs a trainer until its last version is served."""
        run_id = f"run-{self.attempts}"
        logs.set_run(run_id)
        self.story.say(f"attempt {self.attempts} begins after version {self.published}")
        loop = Loop(self.loop)
        self._board = WeightBoard(self._directory / f"weights-{self.attempts}")
        self._trainer.start()
        self._reports.given_up.clear()
        self._reports.ready.clear()
        rollout = RolloutClient("rollout-server", self._router_url, deadline_s=_FENCE_S)

        def fence(worker: WorkerReport) -> None:
            self.story.say(f"the trainer fences {worker.name}")
            self._reports.given_up.add(worker.name)
            loop.call(rollout.remove_worker(worker.url))

        publisher = Publisher(
            self._board,
            [self._static],
            run_id,
            limit_s=_FENCE_S,
            fence=fence,
            say=lambda _: None,
            shared=self._shared,
        )
        traffic = loop.start(self._keep_asking(rollout))
        for version in range(self.published, self._versions + 1):
            weights = self.attempts * _RUN + version
            self.newest = weights
            given_up = set(self._reports.given_up)
            publisher.publish([(TENSOR, torch.tensor([weights], dtype=torch.int32))], version)
            self.floor = weights
            self.story.say(f"weights {weights} are served")
            names = {f"{ROLLOUT}-{rank}" for rank in range(self._count)}
            waited_s = self._reports.waited_s(version, given_up, names)
            if min(waited_s, self.loop.now - self._trainer_stops_until) > _GOES_ON_S:
                raise Violation(f"the trainer has waited {waited_s:.0f} s for {given_up}")
            loop.sleep(self.rng.uniform(0.0, self.rng.choice((5.0, 5.0, 40.0))))
            self._check(traffic)
            if self.rng.random() < 0.7:
                self.published = version
        self._check_end(loop, rollout, lambda: self._check(traffic))
        self.published = self._versions
        loop.cancel(traffic)

    def _watch(self) -> None:
        """Looks all the time at the engines among which the router chooses."""
        self._note_stale()
        try:
            for name, used in self.processes.served().items():
                if self.floor is not None and not self._is_set_back(name):
                    self._check_weights(name, used, self.floor)
                limit_s = _LEAVES_S
                if self._is_set_back(name):
                    limit_s = _NOTICED_S
                if self.loop.now - self._stale_since.get(name, self.loop.now) > limit_s:
                    raise Violation(f"{name} is stale and keeps its traffic")
        except Violation as found:
            self._found.append(found)
        self.loop.call_later(_WATCH_S, self._watch)

    def _is_up(self, node: Node) -> bool:
        return node.app is not None and not self.loop.is_stopped(node.name)

    def _is_set_back(self, engine: str) -> bool:
        found = self.processes.engines.get(engine)
        return found is not None and found.is_set_back

    def _note_stale(self) -> None:
        router = self.net.nodes[_host(self._router_url)]
        for node in self._agents:
            engine = node.name.replace("agent", "engine")
            state = ""
            if self._is_up(node) and self._is_up(router) and not self.net.is_cut(node.name, router):
                state = self._working[node.name].state.worker_state
            if state == "stale" or (state == "ready" and self._is_set_back(engine)):
                self._stale_since.setdefault(engine, self.loop.now)
            elif state != "updating":
                self._stale_since.pop(engine, None)

    def _check_weights(self, name: str, used: int | None, floor: int) -> None:
        if used is None or not floor <= used <= self.newest:
            raise Violation(f"{name} generates with weights {used} after {floor} were served")

    async def _keep_asking(self, rollout: RolloutClient) -> None:
        """Sends requests to the engines, and checks each answer against the weights that were
        served when it was asked for.
        """
        while True:
            await asyncio.sleep(self.rng.uniform(0.2, 4.0))
            if self.floor is not None:
                await self._ask(rollout)

    async def _ask(self, rollout: RolloutClient) -> bool:
        """Returns whether an engine answers."""
        floor = self.floor
        assert floor is not None
        body = {"input_ids": [5], "sampling_params": {"n": 1}}
        try:
            answer = await rollout.request("POST", "/generate", json=body, deadline_s=_FENCE_S)
        except ServiceError as error:
            self.story.say(f"no answer: {error}")
            return False
        meta = answer.json()["meta_info"]
        if BASE_VERSION in meta["labels"]:
            # The network held the request back until its engine had been started again. The
            # collector refuses such an answer, whose version is no number.
            self.story.say("an answer of the base model is refused")
            return False
        for used, label in zip(meta["used"], meta["labels"], strict=True):
            # What a late copy has loaded is old until the agent notices; the answer says so.
            if not meta["was_set_back"]:
                self._check_weights("an engine", used, floor)
            if label != str(used % _RUN):
                raise Violation(f"weights {used} were called {label}")
        return True

    def _check(self, traffic: "asyncio.Task[None]") -> None:
        """Raises what was found."""
        self.check_nodes()
        if traffic.done():
            traffic.result()
        if self._found:
            raise self._found[0]

    # ------------------------------------------------------------ faults

    def _faults(self) -> dict[str, Callable[[], None]]:
        return {
            "machine": self._crash_machine,
            "agent stops": self._stop_agent,
            "trainer stops": partial(self._stop, "", "trainer"),
            "router hangs": self._hang_router,
            "engine stops": self._stop_engine,
            "engine ends": self._kill_engine,
            "trouble": self._trouble,
            "trouble again": self._trouble,
            "router ends": self._kill_router,
            "trainer": self.crash_trainer,
            "from all": self._cut_from("*"),
            "from the trainer": self._cut_from("trainer"),
            "from the router": self._cut_from("machine-0"),
            "damage": self._damage,
            "clock": self.move_clock,
        }

    def fault(self, kind: str, text: str) -> None:
        self._last_fault = max(self._last_fault, self.loop.now)
        self.story.fault(kind, text)

    def _an_agent(self) -> Node:
        return self.rng.choice(self._agents)

    def _end_machine(self, machine: str) -> None:
        for node in self.nodes:
            if node.machine == machine:
                node.end()
        self.processes.stop(machine)
        agent = self._agents[int(machine.rpartition("-")[2])]
        self.loop.call_later(self.down_s(), agent.start)

    def _crash_machine(self) -> None:
        node = self._an_agent()
        if node.app is not None:
            self.fault("crash", node.machine)
            node.disk.fail()
            self._end_machine(node.machine)

    def _kill_engine(self) -> None:
        status = self.rng.choice((1, 137))
        name = f"engine-{self.rng.randrange(self._count)}"
        self.fault("engine ends", f"{name} with {status}")
        if name in self.processes.running:
            self.processes.running[name].stop(status)

    def _stop(self, *names: str) -> None:
        """Stops processes for a while."""
        seconds = self._long_s()
        self.fault("stopped", f"{' and '.join(names).strip() or 'trainer'} for {seconds:.0f} s")
        for name in names:
            if not name:
                self._trainer_stops_until = self.loop.now + seconds
            self._halt(name)
            self.loop.call_later(seconds, self.loop.go_on, name)

    def _halt(self, name: str) -> None:
        node = self.net.named(name)
        if node is None or node.app is not None:
            self.loop.halt(name)

    def _hang_router(self) -> None:
        """Stops the router until its agent notices."""
        self.fault("stopped", "router")
        self._halt("router")

    def _stop_agent(self) -> None:
        self._stop(self._an_agent().name)

    def _stop_engine(self) -> None:
        self._stop(f"engine-{self.rng.randrange(self._count)}")

    def _trouble(self) -> None:
        """Lets an engine not load new weights for a while."""
        name = f"engine-{self.rng.randrange(self._count)}"
        trouble = self.rng.choice(TROUBLES)
        seconds = self.rng.choice((1.0, 4.0)) * self.down_s()
        self.fault("trouble", f"{name} {trouble} for {seconds:.0f} s")
        self.processes.troubles[name] = trouble
        self.loop.call_later(seconds, self.processes.troubles.pop, name, "")

    def _kill_router(self) -> None:
        self.fault("router ends", "")
        if "router" in self.processes.running:
            self.processes.running["router"].stop(137)

    def _forget_engines(self) -> None:
        """Lets the router's list be empty."""
        if self.processes.router is not None:
            self.fault("router forgets", "its engines")
            self.processes.router.forget()

    def _cut_from(self, other: str) -> Callable[[], None]:
        """Returns the fault that a node does not reach a machine, or any, for a while."""
        return lambda: self.net.cut(self._an_agent().machine, other, self._long_s())

    def _long_s(self) -> float:
        """Returns how long a fault lasts that others have to notice."""
        seconds = self.rng.choice((1.0, 4.0)) * self.down_s()
        self._last_fault = max(self._last_fault, self.loop.now + seconds)
        return seconds

    # ------------------------------------------------------------ faults of single calls

    def _schedule_calls(self, drawn: random.Random) -> None:
        """Lets single calls of one agent go wrong, while all others work. Drawn apart, as above."""
        self._versions = _MORE_VERSIONS
        agent = drawn.choice(self._agents)
        kinds = ("hang", "hang", "stop", "damage")
        # The run ends with the reason when its only node gets no weights.
        kind = drawn.choice(kinds if self._count > 1 else kinds[2:])
        begin_s = drawn.uniform(2.0, _FAULTS_S)
        for _ in range(3):
            if kind == "hang":
                # For the newest version, or for its files; reports get through.
                path = drawn.choice(("/weights/latest", "/files/"))
                seconds = drawn.uniform(_FENCE_S, 2.0 * _FENCE_S)
                fault = partial(self._hang_calls, agent, path, seconds)
            elif kind == "stop":
                call = drawn.choice((f"POST /workers/{agent.name}", "GET /workers"))
                is_answer = drawn.random() < 0.5
                seconds = drawn.uniform(_FENCE_S / 2.0, _FENCE_S)
                fault = partial(self._stop_in_a_call, agent, call, seconds, is_answer=is_answer)
            else:
                seconds = drawn.uniform(2.0, 20.0)
                fault = partial(self._damage_a_retry, agent, seconds)
            self.loop.call_later(begin_s, self.strike, fault)
            begin_s += seconds + drawn.uniform(5.0, 20.0)

    def _begin_fault(self, kind: str, text: str, seconds: float) -> None:
        self.fault(kind, f"{text} for {seconds:.0f} s")
        self._last_fault = max(self._last_fault, self.loop.now + seconds)

    def _hang_calls(self, agent: Node, path: str, seconds: float) -> None:
        """Lets the calls of an agent with a path have no answer, as a proxy does that is half dead."""
        self._begin_fault("calls hang", f"{path} of {agent.name}", seconds)
        self.net.holds = lambda owner, call, _: owner == agent.name and path in call.path

        def end() -> None:
            self.net.holds = lambda *_: False

        self.loop.call_later(seconds, end)

    def _stop_in_a_call(self, agent: Node, call: str, seconds: float, *, is_answer: bool) -> None:
        """Stops an agent when it next makes a call, or gets the answer to it. When it goes on, it has
        to wait for new weights, as for those of a large model.
        """

        def holds(owner: str, made: Call, is_answered: bool) -> bool:
            if owner == agent.name and str(made).startswith(call) and is_answered == is_answer:
                self.fault("stopped", f"{agent.name} in {made} for {seconds:.0f} s")
                self._halt(agent.name)
                self.loop.call_later(seconds, self.loop.go_on, agent.name)
                self._hang_calls(agent, "/weights/", seconds + _WAITS_S)
            return False

        self.net.holds = holds

    def _damage_a_retry(self, agent: Node, seconds: float) -> None:
        """Lets an engine refuse new weights, and changes a byte of them before it gets them again."""
        name = agent.name.replace("agent", "engine")
        self._begin_fault("trouble", f"{name} refuses", seconds)
        self.processes.troubles[name] = "refuses"
        self.loop.call_later(seconds / 2.0, self._damage_files, agent)
        self.loop.call_later(seconds, self.processes.troubles.pop, name, "")

    def _load_again(self) -> None:
        """Lets a copy of an earlier call to load weights arrive at an engine."""
        name = f"engine-{self.rng.randrange(self._count)}"
        loads = self.processes.loads.get(name, [])
        node = self.net.named(name)
        if len(loads) > 1 and node is not None:
            self.fault("late load", name)
            self.net.deliver_later(node, loads[-2], 0.0)

    def _damage(self) -> None:
        """Changes a byte of the newest weights on a node's disk, and ends its engine."""
        node = self._an_agent()
        self._damage_files(node)
        name = node.name.replace("agent", "engine")
        if name in self.processes.running:
            self.processes.running[name].stop(137)

    def _damage_files(self, node: Node) -> None:
        files = sorted(node.disk.path.glob("**/model.safetensors"))
        if files:
            content = bytearray(files[-1].read_bytes())
            content[-1] ^= 1
            # A new file: others may be the same one by a hard link.
            files[-1].unlink()
            files[-1].write_bytes(content)
            self.fault("damage", str(files[-1].relative_to(node.disk.path)))

    # ------------------------------------------------------------ the end

    def _check_end(self, loop: Loop, rollout: RolloutClient, check: Callable[[], None]) -> None:
        """Checks that the router sends requests to every node and that all serve the newest weights,
        some time after the last fault.
        """
        self.chance.on = False
        copies = self.net.copies()
        if copies:
            # A copy of a question that waits for news may wait for ever.
            self.loop.run_until_complete(asyncio.wait(copies, timeout=_REACHED_S))
        deadline = max(self.loop.now, self._last_fault) + _REACHED_S
        assert self._board is not None
        wanted = self._board.latest()
        assert wanted is not None
        while True:
            check()
            statuses = [ask_json(self, node, "/status") for node in self._agents]
            is_known = self._board.count("ready") == self._count
            behind = [each for each in statuses if not _is_current(each, wanted.version)]
            set_back = [name for name in self.processes.engines if self._is_set_back(name)]
            served = self.processes.served()
            # Who is cut off still answers this question.
            is_over = self.loop.now > self._last_fault
            is_whole = len(served) == self._count and not set_back
            if is_known and not behind and is_over and is_whole:
                break
            if self.loop.now > deadline:
                raise Violation(
                    f"these nodes do not serve weights {wanted.version}: {behind}; these engines "
                    f"get requests: {served}, these are set back: {set_back}"
                )
            self.sleep(4.0)
        for _ in range(2 * self._count):
            if not loop.call(self._ask(rollout)):
                raise Violation("the router does not answer")


def _is_current(status: Any, version: int) -> bool:
    report = status["report"]
    return bool(
        status["registered"] and report["state"] == "ready" and report["version"] == version
    )


def _host(url: str) -> str:
    return url.partition("://")[2]


def _not_started(_: Path) -> App:
    raise AssertionError("an agent starts it")
