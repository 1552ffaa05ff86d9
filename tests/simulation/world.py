"""One simulated run: data-server, replay-buffer, engines, graders, and a trainer that crashes and
resumes.
"""

import asyncio
import logging
import math
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np

from common.clients.base import Client
from common.clients.data import DataClient
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient
from common.errors import ServiceError
from common.process import logs
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config, load
from common.wire.schemas import Group, Prompt
from services.data.app import create_data_app
from services.replay.app import create_replay_app
from services.reward.app import create_reward_app
from tests.simulation.disk import Disk, watched
from tests.simulation.models import DataModel, Model, ReplayModel, RewardModel
from tests.simulation.network import Chance, Node, Story, Wire
from tests.simulation.stand_ins import (
    FUNCTIONS,
    GRADER_LIMIT_S,
    Engines,
    Graders,
    graded_by,
    reward_of,
)
from tests.simulation.virtual_time import VirtualLoop, simulated
from tests.support.paths import ROOT
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.policy.scorer import load_tokenizer
from trainer.rollouts.context import RolloutContext
from trainer.rollouts.drops import Drops
from trainer.rollouts.ground_truths import GroundTruthCheck
from trainer.rollouts.prompt_cursor import PromptProgress
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.services import Services
from trainer.timing import StageClock

_T = TypeVar("_T")
STEPS = 4
BATCH = 2
PROMPTS = 6
_GROUP_SIZE = 2
_UPDATE_S = 1.0
_FAULTS_S = 6.0
"""Faults begin within so many seconds: most runs take no longer."""
_DOWN_S = 20.0
"""Longest time for which a process, a disk or a connection is down."""
_LIMIT_S = 50_000.0
"""Longest run, in virtual time."""
_TRIES = 3
"""Failures after which a prompt is skipped."""
_MAX_FAILURES = 3
"""How often the job group starts the trainer again (`max_restarts_on_errors`)."""


class Crash(KeyboardInterrupt):
    """The trainer's process ends at this moment. Only such an exception leaves an event loop."""


class Violation(AssertionError):
    """An invariant is broken."""


@lru_cache
def _tokenizer() -> Any:
    return load_tokenizer(load(["--model.name", str(ROOT / ".cache" / "tiny-base")], {}).model)


@lru_cache
def _prompts() -> list[Prompt]:
    return [
        Prompt(id=f"p{i}", prompt=f"{i} + 1 =", ground_truth=str(i + 1)) for i in range(PROMPTS)
    ]


class Loop:
    """The trainer's event loop thread: the trainer itself drives the virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.tasks: set[asyncio.Task[Any]] = set()

    def begin(self, coroutine: Coroutine[Any, Any, _T]) -> Callable[[], _T]:
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)
        return lambda: self.loop.run_until_complete(task)

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return self.begin(coroutine)()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(coroutine)
        self.tasks.add(task)
        return task

    def cancel(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self.loop.run_until_complete(asyncio.wait({task}))

    def sleep(self, seconds: float) -> None:
        self.call(asyncio.sleep(seconds))


@dataclass
class Checkpoint:
    """What is on the trainer's disk."""

    step: int = 0
    progress: PromptProgress = field(default_factory=PromptProgress)


class World:
    """The simulated run of one seed."""

    def __init__(self, seed: int, directory: Path, loop: VirtualLoop) -> None:
        self.rng = random.Random(seed)
        self.loop = loop
        self.story = Story(loop.time)
        self._directory = directory
        self.chance = Chance(self.rng, self.rng.choice((0.0, 0.02, 0.1, 0.3)))
        staleness = self.rng.choice((0, 1, 2))
        self.when_stale = self.rng.choice(("wait", "train", "drop")) if staleness else "wait"
        reuse = self.rng.choice((0.0, 0.0, 0.5))
        self.fresh = BATCH - int(BATCH * reuse)
        """Fresh groups of a step."""
        self.slots = (staleness + 1) * self.fresh
        settings = {
            "model.name": ROOT / ".cache" / "tiny-base",
            "state_dir": directory / "unused",
            "trainer.batch_size": BATCH,
            "trainer.max_steps": STEPS,
            "trainer.max_staleness": staleness,
            "trainer.when_stale": self.when_stale,
            "replay.reuse_ratio": reuse,
            "replay.capacity": self.rng.choice((100_000, (staleness + 1) * BATCH * _GROUP_SIZE)),
            "reward.functions": FUNCTIONS,
            "reward.function_timeout_s": GRADER_LIMIT_S,
            "sampling.group_size": _GROUP_SIZE,
            "sampling.max_new_tokens": 8,
            "rollout.engine": "embedded",
            "rollout.max_context_tokens": 256,
            "limits.max_failed_groups": 1000,
            "limits.service_timeout_s": 240,
        }
        words = []
        for name, value in settings.items():
            words += [f"--{name}", str(value)]
        self.config: Config = load(words, {})
        self.engines = Engines(self.rng, asyncio.sleep)
        self.graders = Graders(self.rng)
        self.engines.failing = self.rng.choice((0.0, 0.0, 0.1))
        self._grader_faults = self.rng.choice((0.0, 0.0, 0.1))
        self.disks: dict[str, Disk] = {}
        self.replay = ReplayModel()
        self.nodes = {
            "data-server": self._node("data-server", self._data_app, DataModel()),
            "replay-buffer": self._node("replay-buffer", self._replay_app, self.replay),
            "router": self._node("router", self.engines.app, Model()),
            "reward-server": self._node("reward-server", self._reward_app, RewardModel(reward_of)),
        }
        self.saved = Checkpoint()
        self._wires: list[Wire] = []
        self.attempts = 0
        self.is_up = False
        """Whether the trainer's process runs."""
        self.drops: list[Drops] = []
        """What each attempt dropped."""
        self.lost_data = False
        """Whether a volume was put back to an earlier state, or replaced by an empty one."""
        self.failures: list[ServiceError] = []
        """The errors with which attempts ended."""
        self.trained: list[tuple[int, Group]] = []
        """(step, group) of what was trained on, without what was lost with a crash."""

    def _node(self, name: str, make: Callable[[Path], Any], model: Model) -> Node:
        self.disks[name] = Disk(self._directory / name, lambda size: self.rng.randrange(size + 1))
        return Node(
            name, make, loop=self.loop, disk=self.disks[name], story=self.story, model=model
        )

    def disk_of(self, path: Path) -> Disk | None:
        """Returns the disk on which a file is; None for those of earlier lives."""
        return next((d for d in self.disks.values() if path.is_relative_to(d.path)), None)

    def _data_app(self, disk: Path) -> Any:
        config = self.config.model_copy(update={"state_dir": disk})
        return create_data_app(config, _prompts(), [])

    def _replay_app(self, disk: Path) -> Any:
        return create_replay_app(self.config.replay, disk)

    def _reward_app(self, _: Path) -> Any:
        app = create_reward_app(self.config.reward)

        async def live() -> None:
            async with app.router.lifespan_context(app):
                await asyncio.Event().wait()

        self.nodes["reward-server"].run(live())
        return app

    # ------------------------------------------------------------ the run

    def run(self) -> None:
        """Runs attempts until one reaches the last step; raises Violation."""
        for node in self.nodes.values():
            node.start()
        self.loop.call_later(_LIMIT_S, self._too_long)
        self._schedule_faults()
        while True:
            self.attempts += 1
            own = Loop(self.loop)
            self.is_up = True
            try:
                progress = self._attempt(own)
            except Crash:
                self.is_up = False
                self.story.fault("crash", "trainer")
                self._end_tasks_of_the_trainer()
                self._forget_lost_steps()
                self._sleep(self.rng.uniform(1.0, 20.0))
                continue
            except ServiceError as error:
                # It says why it cannot go on, and the job group starts it again.
                self.story.say(f"the trainer ends: {error}")
                self.failures.append(error)
                self._after_a_failure(error)
                self._end_tasks_of_the_trainer()
                self._forget_lost_steps()
                self._sleep(self.rng.uniform(1.0, 20.0))
                continue
            break
        self.is_up = False
        self.chance.on = False
        copies = {task for wire in self._wires for task in wire.copies}
        if copies:
            self.loop.run_until_complete(asyncio.wait(copies))
        self._check_end(progress)

    def _after_a_failure(self, error: ServiceError) -> None:
        """Raises Violation for an error that no fault explains."""
        self.is_up = False
        never = error.code == "no_batch" or error.field == "/groups/ack"
        explained = not never and (self.lost_data or self.story.faults["failing disk"])
        if not explained or len(self.failures) > _MAX_FAILURES:
            raise Violation(f"the run ended: {error}") from error

    def _sleep(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def _too_long(self) -> None:
        raise KeyboardInterrupt(f"the run has not ended after {_LIMIT_S:.0f} s")

    def _schedule_faults(self) -> None:
        kinds: dict[str, Callable[[], None]] = {
            "crash": self._crash,
            "crash in a write": self._crash_in_a_write,
            "trainer": self._crash_trainer,
            "trainer again": self._crash_trainer,
            "partition": self._partition,
            "full disk": self._fill_disk,
            "failing disk": self._fail_a_write,
            "set back": self._set_back,
            "emptied": self._empty,
            "clock": self._move_clock,
        }
        for _ in range(self.rng.choice((0, 1, 1, 2, 4))):
            kind = self.rng.choice(list(kinds))
            self.loop.call_later(self.rng.uniform(0.1, _FAULTS_S), self._strike, kinds[kind])

    def _strike(self, fault: Callable[[], None]) -> None:
        if self.chance.on:  # not while the end is checked
            fault()

    def _a_node(self) -> Node:
        return self.nodes[self.rng.choice(list(self.nodes))]

    def _a_store(self) -> Node:
        return self.nodes[self.rng.choice(("data-server", "replay-buffer"))]

    def _crash_trainer(self) -> None:
        if self.is_up:
            raise Crash

    def _crash(self) -> None:
        node = self._a_node()
        if node.app is not None:
            self._end(node)

    def _end(self, node: Node, text: str = "") -> None:
        node.crash(text)
        self.loop.call_later(self.rng.uniform(0.5, _DOWN_S), node.start)

    def _at_a_write(self, node: Node, action: Callable[[], None]) -> None:
        """Does something before one of the next statements of a node."""
        left = self.rng.randrange(1, 60)

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0 and node.app is not None:
                self._strike(action)

        node.disk.at_statement = count

    def _crash_in_a_write(self) -> None:
        node = self._a_store()
        self._at_a_write(node, lambda: self._end(node, "in a write"))

    def _partition(self) -> None:
        """Cuts a node off for a while."""
        node = self._a_node()
        node.is_cut_off = True
        self.story.fault("partition", node.name)

        def heal() -> None:
            node.is_cut_off = False
            self.story.say(f"{node.name} is reachable again")

        self.loop.call_later(self.rng.uniform(1.0, _DOWN_S), heal)

    def _fill_disk(self) -> None:
        """Fills a disk for a while, from one of the next statements on."""
        node = self._a_store()

        def free() -> None:
            node.disk.problem = None

        def fill() -> None:
            node.disk.problem = sqlite3.SQLITE_FULL
            self.story.fault("full disk", node.name)
            self.loop.call_later(self.rng.uniform(1.0, _DOWN_S), free)

        self._at_a_write(node, fill)

    def _fail_a_write(self) -> None:
        """Lets the writes of a disk fail for a moment, from one of the next statements on."""
        node = self._a_store()

        def end() -> None:
            node.disk.problem = None

        def begin() -> None:
            node.disk.problem = sqlite3.SQLITE_IOERR
            self.story.fault("failing disk", node.name)
            self.loop.call_later(self.rng.uniform(0.0, 0.1), end)

        self._at_a_write(node, begin)

    def _set_back(self) -> None:
        """Puts the volume of a store back to an earlier state, as a restored snapshot does."""
        node = self._a_store()
        if node.app is None:
            return
        copy = node.disk.snapshot()
        self.story.say(f"snapshot of {node.name}")

        def restore() -> None:
            if node.app is not None:
                self._end(node)
            node.disk.restart_from(copy)
            node.model.forget()
            self.lost_data = True
            self.story.fault("set back", node.name)

        self.loop.call_later(self.rng.uniform(0.5, 10.0), self._strike, restore)

    def _empty(self) -> None:
        """Gives a store a new, empty volume."""
        node = self._a_store()
        if node.app is None:
            return
        self._end(node)
        node.disk.restart_empty()
        node.model.forget()
        self.lost_data = True
        self.story.fault("emptied", node.name)

    def _move_clock(self) -> None:
        self.loop.wall_offset_s += self.rng.uniform(-3600.0, 3600.0)
        self.story.fault("clock", f"{self.loop.wall_offset_s:.0f} s off")

    def _end_tasks_of_the_trainer(self) -> None:
        """Cancels every task but those of other processes and of requests that are on their way."""
        copies = {task for wire in self._wires for task in wire.copies}
        mine = [task for task in self.loop.tasks_of("") if task not in copies]
        for task in mine:
            task.cancel()
        # Their ends run at this moment, and reach nobody.
        for wire in self._wires:
            wire.is_cut = True

    def _forget_lost_steps(self) -> None:
        """The steps after the checkpoint are lost with the trainer's memory."""
        self.trained = [item for item in self.trained if item[0] <= self.saved.step]

    def _services(self) -> Services:
        def client(kind: type[Client], name: str) -> Any:
            limit = self.config.limits.service_timeout_s
            wire = Wire(self.nodes[name], self.chance, self.story)
            self._wires.append(wire)
            return kind(name, f"http://{name}", transport=wire, deadline_s=limit)

        return Services(
            data=client(DataClient, "data-server"),
            rollout=client(RolloutClient, "router"),
            reward=client(RewardClient, "reward-server"),
            replay=client(ReplayClient, "replay-buffer"),
        )

    def _attempt(self, loop: Loop) -> PromptProgress:
        """Runs the trainer from its checkpoint; returns the progress at its end."""
        run_id = f"run-{self.attempts}"
        logs.set_run(run_id)
        self.story.say(f"attempt {self.attempts} begins after step {self.saved.step}")
        services = self._services()
        style = PromptStyle.of(self.config)
        context = RolloutContext(
            self.config,
            services,
            Prompter(_tokenizer(), style, [2]),
            clock=StageClock(),
            run_id=run_id,
        )
        rollouts = Rollouts(
            context,
            loop,  # type: ignore[arg-type]
            progress=self.saved.progress,
            ground_truths=GroundTruthCheck(services, self._directory / "ground_truths.json"),
        )
        self.drops.append(rollouts.drops)
        step = self.saved.step
        self.engines.version = step
        self.engines.run = run_id
        self.engines.groups.clear()
        self.engines.allowed = partial(self._allowed, rollouts.drops, step)
        total = rollouts.prepare(step, known=self.attempts > 1)
        # Not before: a run does not begin with a function that fails for a made-up answer.
        self.graders.failing = self._grader_faults
        with rollouts.collecting(step, total):
            while step < total:
                groups = rollouts.next(step)
                self._check_batch(groups, step)
                loop.sleep(self.rng.uniform(0.0, _UPDATE_S))
                batch = Batch.of(groups, self.config, step)
                batch.advantages = [np.zeros(length, np.float32) for length in batch.lengths]
                step += 1
                self.trained += [(step, item.group) for item in groups if not item.reused]
                self.story.say(f"step {step}: {[item.group.position for item in groups]}")
                rollouts.start_acknowledging(batch)
                served = self._publish(loop, step)
                rollouts.free_slots(batch, when=served)
                if self.rng.random() < 0.5:
                    self.saved = Checkpoint(step, rollouts.progress)
                    self.story.say(f"checkpoint after step {step}: {self.saved.progress}")
            return rollouts.progress

    def _allowed(self, drops: Drops, first_step: int) -> int:
        """Returns how many groups an attempt may have begun by now."""
        over = drops.counts.total() + (self.engines.version - first_step) * self.fresh
        return self.slots + over

    def _publish(self, loop: Loop, step: int) -> Future[None]:
        """Publishes a version: at once, or beside the next step."""
        served: Future[None] = Future()
        attempt = self.attempts

        def serve() -> None:
            if attempt != self.attempts:
                return
            self.engines.version = max(self.engines.version, step)
            served.set_result(None)

        delay = self.rng.uniform(0.0, _UPDATE_S)
        if self.config.trainer.max_staleness == 0:
            loop.sleep(delay)
            serve()
        else:
            self.loop.call_later(delay, serve)
        return served

    # ------------------------------------------------------------ the invariants

    def _check_batch(self, groups: list[TrainingGroup], step: int) -> None:
        """Checks a batch against what engines and graders did."""
        self._check_services()
        self._check_drops()
        fresh = [item for item in groups if not item.reused]
        if len(fresh) != self.fresh or len(groups) > BATCH:
            raise Violation(f"{len(fresh)} of {len(groups)} groups are fresh at step {step}")
        trained = {group.id for _, group in self.trained}
        for item in groups:
            group = item.group
            if (group.id in trained) != item.reused:
                raise Violation(f"group {group.id} is trained on twice, or reused before it was")
            trained.add(group.id)
            for completion in group.completions:
                version = self.engines.generated.get(tuple(completion.token_ids.tolist()))
                if version is None:
                    raise Violation(f"no engine sampled a completion of {group.id}")
                if any(span[0] != version for span in completion.weight_versions):
                    raise Violation(f"{group.id} says {completion.weight_versions}, not {version}")
                is_bound = not item.reused and self.when_stale != "train"
                if is_bound and version < step - self.config.trainer.max_staleness:
                    raise Violation(f"{group.id} of version {version} is trained on at step {step}")
                if completion.reward != reward_of(completion.text):
                    raise Violation(f"a completion of {group.id} has the reward of a fault")

    def _check_drops(self) -> None:
        """Checks that no fault has become a reward, also where it cost the group."""
        for dropped in self.drops[-1].recent():
            for completion in dropped.group.completions:
                is_graded = not math.isnan(completion.reward)
                if is_graded and completion.reward != reward_of(completion.text):
                    raise Violation(f"a completion of {dropped.group.id} has the reward of a fault")

    def _check_services(self) -> None:
        for node in self.nodes.values():
            if node.errors:
                raise Violation(f"{node.name}: {node.errors[0]}") from node.errors[0]

    def _check_end(self, progress: PromptProgress) -> None:
        """Checks what was trained on, in all, and what the services have at the end."""
        steps = Counter(step for step, _ in self.trained)
        if steps != Counter(dict.fromkeys(range(1, STEPS + 1), self.fresh)):
            raise Violation(f"steps were trained on with {dict(steps)} groups")
        positions = Counter(group.position for _, group in self.trained)
        twice = [position for position, count in positions.items() if count > 1]
        if twice:
            raise Violation(f"the prompts at {twice} are trained on twice")
        for _, group in self.trained:
            expected = self._prompt_at(group.position)
            if group.prompt_id != expected:
                raise Violation(f"position {group.position} is {group.prompt_id}, not {expected}")
        self._check_services()
        self._check_drops()
        self._check_skipped(set(positions), progress)
        self._check_store()

    def _check_skipped(self, trained: set[int], progress: PromptProgress) -> None:
        """Checks that a prompt is skipped only when its group has failed as often as the docs
        say, and that every prompt that was drawn is trained on or skipped.
        """
        finished = set(range(progress.position)) | set(progress.finished)
        if trained - finished:
            raise Violation(f"{trained - finished} are trained on and may be drawn again")
        skipped = finished - trained
        dropped = sum(sum(drops.counts.values()) for drops in self.drops)
        if len(skipped) * _TRIES > dropped:
            raise Violation(f"{skipped} are skipped after {dropped} drops in all")
        left = set(range(max(trained))) - finished
        if left:
            raise Violation(f"{left} were passed over")

    def _check_store(self) -> None:
        """Checks that the replay-buffer's counts add up."""
        node = self.nodes["replay-buffer"]
        if node.app is None:
            node.start()
        request = httpx.Request("GET", "http://replay-buffer/stats")
        stats = self.loop.run_until_complete(node.answer(request)).json()
        stored = stats["fresh"] + stats["leased"] + stats["consumed"]
        if stats["added"] - stats["evicted"] - stats["removed"] - stats["dropped"] != stored:
            raise Violation(f"the counts of the replay-buffer do not add up: {stats}")
        if self.lost_data:
            return
        if stats["leased"]:
            raise Violation(f"groups are leased at the end: {stats}")
        request = httpx.Request("GET", "http://replay-buffer/groups?state=consumed&limit=1000")
        listed = self.loop.run_until_complete(node.answer(request)).json()["groups"]
        lost = self.replay.consumed - {group["id"] for group in listed}
        if len(lost) > stats["removed"]:
            raise Violation(f"{lost} were acknowledged and are gone")

    def _prompt_at(self, position: int) -> str:
        """Returns the prompt at a position: the order of the data-server, which depends on the seed
        of the run alone.
        """
        from services.data.stream import permutation

        epoch, place = divmod(position, PROMPTS)
        return _prompts()[int(permutation(self.config.seed, epoch, PROMPTS)[place])].id


def simulate(seed: int, directory: Path) -> World:
    """Runs the world of one seed. Raises Violation, or whatever ends the run, with the story in its
    notes.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with simulated(seed) as loop:
            world = World(seed, directory, loop)
            try:
                with watched(world.disk_of), graded_by(world.graders):
                    world.run()
            except BaseException as error:
                error.add_note("\n".join([*world.story.lines, f"seed {seed}"]))
                raise
            finally:
                _end(loop)
            return world
    finally:
        logging.disable(disabled)


def _end(loop: VirtualLoop) -> None:
    """Ends every task that still waits."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
