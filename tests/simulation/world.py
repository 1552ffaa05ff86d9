"""One simulated run: data-server, replay-buffer, engines, graders, and a trainer that crashes and
resumes.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from common.clients.base import Client
from common.clients.data import DataClient
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient
from common.process import logs
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config, load
from common.wire.schemas import Group, Prompt
from services.data.app import create_data_app
from services.replay.app import create_replay_app
from tests.simulation.network import Chance, Node, Story, Wire
from tests.simulation.stand_ins import Engines, Graders, reward_of
from tests.simulation.virtual_time import VirtualLoop, simulated
from tests.support.paths import ROOT
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.policy.scorer import load_tokenizer
from trainer.rollouts.context import RolloutContext
from trainer.rollouts.ground_truths import GroundTruthCheck
from trainer.rollouts.prompt_cursor import PromptProgress
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.services import Services
from trainer.timing import StageClock

_T = TypeVar("_T")
STEPS = 4
BATCH = 2
PROMPTS = 24
_UPDATE_S = 1.0
_LIMIT_S = 50_000.0
"""Longest run, in virtual time."""


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
        settings = {
            "model.name": ROOT / ".cache" / "tiny-base",
            "state_dir": directory / "unused",
            "trainer.batch_size": BATCH,
            "trainer.max_steps": STEPS,
            "trainer.max_staleness": staleness,
            "sampling.group_size": 2,
            "sampling.max_new_tokens": 8,
            "rollout.engine": "embedded",
            "rollout.max_context_tokens": 256,
            "limits.max_failed_groups": 1000,
        }
        words = []
        for name, value in settings.items():
            words += [f"--{name}", str(value)]
        self.config: Config = load(words, {})
        self.engines = Engines(self.rng, asyncio.sleep)
        self.graders = Graders(self.rng)
        self.engines.failing = self.rng.choice((0.0, 0.0, 0.1))
        self.graders.failing = self.rng.choice((0.0, 0.0, 0.1))
        self.nodes = {
            "data-server": self._node("data-server", self._data_app),
            "replay-buffer": self._node("replay-buffer", self._replay_app),
            "router": self._node("router", self.engines.app),
            "reward-server": self._node("reward-server", self.graders.app),
        }
        self.saved = Checkpoint()
        self._wires: list[Wire] = []
        self.attempts = 0
        self.is_up = False
        """Whether the trainer's process runs."""
        self.trained: list[tuple[int, Group]] = []
        """(step, group) of what was trained on, without what was lost with a crash."""

    def _node(self, name: str, make: Callable[[Path], Any]) -> Node:
        return Node(name, make, self._directory / name, self.story)

    def _data_app(self, disk: Path) -> Any:
        config = self.config.model_copy(update={"state_dir": disk})
        return create_data_app(config, _prompts(), [])

    def _replay_app(self, disk: Path) -> Any:
        return create_replay_app(self.config.replay, disk)

    # ------------------------------------------------------------ the run

    def run(self) -> None:
        """Runs attempts until one reaches the last step; raises Violation."""
        self.loop.call_later(_LIMIT_S, self._too_long)
        self._schedule_crashes()
        while True:
            self.attempts += 1
            own = Loop(self.loop)
            self.is_up = True
            try:
                self._attempt(own)
            except Crash:
                self.is_up = False
                self.story.fault("crash", "trainer")
                self._end_tasks_of_the_trainer()
                self._forget_lost_steps()
                self._sleep(self.rng.uniform(1.0, 20.0))
                continue
            break
        self.chance.on = False
        self._check_end()

    def _sleep(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def _too_long(self) -> None:
        raise KeyboardInterrupt(f"the run has not ended after {_LIMIT_S:.0f} s")

    def _schedule_crashes(self) -> None:
        names = list(self.nodes)
        for _ in range(self.rng.choice((0, 0, 1, 2, 4))):
            at = self.rng.uniform(0.1, 30.0)
            name = self.rng.choice([*names, "trainer"])
            self.loop.call_later(at, self._crash, name)

    def _crash(self, name: str) -> None:
        if name == "trainer":
            if self.is_up:
                raise Crash
            return
        node = self.nodes[name]
        if node.app is not None:
            node.crash()
            self.loop.call_later(self.rng.uniform(0.5, 60.0), node.start)

    def _end_tasks_of_the_trainer(self) -> None:
        """Cancels every task but those of other processes and of requests that are on their way."""
        others = {task for node in self.nodes.values() for task in node.tasks}
        others |= {task for wire in self._wires for task in wire.copies}
        mine = asyncio.all_tasks(self.loop) - others
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

    def _attempt(self, loop: Loop) -> None:
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
        step = self.saved.step
        self.engines.version = step
        total = rollouts.prepare(step, known=self.attempts > 1)
        with rollouts.collecting(step, total):
            while step < total:
                groups = rollouts.next(step)
                self._check_batch(groups, step)
                loop.sleep(self.rng.uniform(0.0, _UPDATE_S))
                batch = Batch.of(groups, self.config, step)
                batch.advantages = [np.zeros(length, np.float32) for length in batch.lengths]
                step += 1
                self.trained += [(step, item.group) for item in groups]
                self.story.say(f"step {step}: {[item.group.position for item in groups]}")
                finish = rollouts.start_acknowledging(batch)
                served = self._publish(loop, step)
                finish()
                rollouts.free_slots(batch, when=served)
                if self.rng.random() < 0.5:
                    self.saved = Checkpoint(step, rollouts.progress)
                    self.story.say(f"checkpoint after step {step}: {self.saved.progress}")

    def _publish(self, loop: Loop, step: int) -> Future[None]:
        """Publishes a version: at once, or beside the next step."""
        served: Future[None] = Future()

        def serve() -> None:
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
        if len(groups) != BATCH:
            raise Violation(f"a batch of {len(groups)} groups at step {step}")
        trained = {group.id for _, group in self.trained}
        for item in groups:
            group = item.group
            if group.id in trained:
                raise Violation(f"group {group.id} is trained on twice")
            trained.add(group.id)
            for completion in group.completions:
                version = self.engines.generated.get(tuple(completion.token_ids.tolist()))
                if version is None:
                    raise Violation(f"no engine sampled a completion of {group.id}")
                if any(span[0] != version for span in completion.weight_versions):
                    raise Violation(f"{group.id} says {completion.weight_versions}, not {version}")
                if version < step - self.config.trainer.max_staleness:
                    raise Violation(f"{group.id} of version {version} is trained on at step {step}")
                if completion.reward != reward_of(completion.text):
                    raise Violation(f"a completion of {group.id} has the reward of a fault")

    def _check_end(self) -> None:
        """Checks what was trained on, in all."""
        steps = Counter(step for step, _ in self.trained)
        if steps != Counter(dict.fromkeys(range(1, STEPS + 1), BATCH)):
            raise Violation(f"steps were trained on with {dict(steps)} groups")
        positions = Counter(group.position for _, group in self.trained)
        twice = [position for position, count in positions.items() if count > 1]
        if twice:
            raise Violation(f"the prompts at {twice} are trained on twice")
        for _, group in self.trained:
            expected = self._prompt_at(group.position)
            if group.prompt_id != expected:
                raise Violation(f"position {group.position} is {group.prompt_id}, not {expected}")

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
