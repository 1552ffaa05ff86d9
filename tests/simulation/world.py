"""Simulated runs of a trainer that crashes and resumes, with data-server, replay-buffer, engines and
graders.
"""

import asyncio
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from common.clients.base import Client
from common.clients.data import DataClient
from common.clients.replay import ReplayClient
from common.clients.reward import RewardClient
from common.clients.rollout import RolloutClient
from common.errors import ServiceError
from common.process import logs
from common.prompts.prompter import Prompter, PromptStyle, TokenisedPrompt
from common.settings.config import Config, load
from common.wire.schemas import Completion, Group, Prompt
from services.data.app import create_data_app
from services.data.stream import permutation
from services.replay.app import create_replay_app
from services.reward.app import create_reward_app
from tests.simulation.models import DataModel, ReplayModel, RewardModel
from tests.simulation.network import Node
from tests.simulation.scene import Crash, Scene, Violation, ask_json
from tests.simulation.stand_ins import (
    FUNCTIONS,
    GRADER_LIMIT_S,
    Engines,
    Graders,
    Loop,
    Spans,
    graded_by,
    reward_of,
)
from tests.simulation.virtual_time import VirtualLoop
from tests.support.paths import ROOT
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.policy.scorer import load_tokenizer
from trainer.rollouts.drops import Drops
from trainer.rollouts.ground_truths import GroundTruthCheck
from trainer.rollouts.prompt_cursor import PromptProgress
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.services import RolloutContext, Services
from trainer.timing import StageClock
from trainer.weights.board import PublishFailed

STEPS = 4
BATCH = 2
PROMPTS = 6
_GROUP_SIZE = 2
_UPDATE_S = 1.0
_FAULTS_S = 6.0
"""Faults begin within so many seconds: most runs take no longer."""
_LIMIT_S = 20_000.0
_AGAIN_S = 5.0
_TRIES = 3
"""Failures after which a prompt is skipped."""
_MAX_FAILURES = 3
"""How often the job group starts the trainer again (`max_restarts_on_errors`)."""


@lru_cache
def _tokenizer() -> Any:
    return load_tokenizer(load(["--model.name", str(ROOT / ".cache" / "tiny-base")], {}).model)


_tokenised = dict[str, TokenisedPrompt]()


class _Prompter(Prompter):
    """Tokenises a prompt once for all runs, which have the same prompts."""

    def tokenised(self, prompts: Sequence[Prompt]) -> list[TokenisedPrompt]:
        new = [prompt for prompt in prompts if prompt.prompt not in _tokenised]
        if new:
            texts = [prompt.prompt for prompt in new]
            _tokenised.update(zip(texts, super().tokenised(new), strict=True))
        return [_tokenised[prompt.prompt] for prompt in prompts]


@lru_cache
def _prompts() -> list[Prompt]:
    return [
        Prompt(id=f"p{i}", prompt=f"{i} + 1 =", ground_truth=str(i + 1)) for i in range(PROMPTS)
    ]


@lru_cache
def _order(seed: int, epoch: int) -> list[int]:
    """Returns the places of the prompts of an epoch."""
    order: list[int] = permutation(seed, epoch, PROMPTS).tolist()
    return order


@lru_cache
def _config(
    staleness: int, when_stale: str, *, reuse: float, capacity: int, more: tuple[Any, ...]
) -> Config:
    """Returns the settings of a run; they are read alone."""
    settings = {
        "model.name": ROOT / ".cache" / "tiny-base",
        "state_dir": "/nonexistent",
        "trainer.batch_size": BATCH,
        "trainer.max_steps": STEPS,
        "trainer.max_staleness": staleness,
        "trainer.when_stale": when_stale,
        "replay.reuse_ratio": reuse,
        "replay.capacity": capacity,
        "reward.functions": FUNCTIONS,
        "reward.function_timeout_s": GRADER_LIMIT_S,
        "sampling.group_size": _GROUP_SIZE,
        "sampling.max_new_tokens": 8,
        "rollout.engine": "embedded",
        "rollout.max_context_tokens": 256,
        # An agent is down for up to 20 s, and a group of it fails within 10 ms.
        "limits.max_failed_groups": 10_000,
        "limits.service_timeout_s": 240,
        **dict(more),
    }
    words = []
    for field_name, value in settings.items():
        words += [f"--{field_name}", str(value)]
    return load(words, {})


@dataclass
class Checkpoint:
    """What is on the trainer's disk."""

    step: int = 0
    progress: PromptProgress = field(default_factory=PromptProgress)


class World(Scene):
    """A run of single completions."""

    def __init__(self, seed: int, directory: Path, loop: VirtualLoop) -> None:
        super().__init__(seed, directory, loop)
        staleness = self.rng.choice((0, 1, 2))
        self.when_stale = self.rng.choice(("wait", "train", "drop")) if staleness else "wait"
        reuse = self.rng.choice((0.0, 0.0, 0.5))
        self.fresh = BATCH - int(BATCH * reuse)
        """Fresh groups of a step."""
        self.slots = (staleness + 1) * self.fresh
        capacity = self.rng.choice((100_000, (staleness + 1) * BATCH * _GROUP_SIZE))
        more = tuple(self.more_settings().items())
        self.config = _config(staleness, self.when_stale, reuse=reuse, capacity=capacity, more=more)
        self.engines = self.make_engines()
        if self.config.algorithm.dynamic_sampling:
            self.engines.equal = 0.3
        self.graders = Graders(self.rng)
        self.engines.failing = self.rng.choice((0.0, 0.0, 0.1))
        self._grader_faults = self.rng.choice((0.0, 0.0, 0.1))
        self.replay = ReplayModel(loop.time)
        self._data_node = self.node("data-server", self._data_app, model=DataModel())
        self._replay_node = self.node("replay-buffer", self._replay_app, model=self.replay)
        self.node("router", self.engines.app)
        self._reward_node = self.node(
            "reward-server", self._reward_app, model=RewardModel(reward_of)
        )
        if seed % 30 == 10 and self.when_stale == "drop":
            # What a take has evicted is known from its answer alone.
            self.net.comes_again_s = lambda call: _AGAIN_S * (str(call) == "POST /groups/take")
        self.saved = Checkpoint()
        self.attempts = 0
        self.drops: list[Drops] = []
        """What each attempt dropped."""
        self.lost_data = False
        """Whether a volume was put back to an earlier state, or replaced by an empty one."""
        self.failures: list[ServiceError] = []
        """The errors with which attempts ended."""
        self.trained: list[tuple[int, Group]] = []
        """(step, group) of what was trained on, without what was lost with a crash."""

    def more_settings(self) -> dict[str, Any]:
        """Returns the settings of a scene."""
        # Of some seeds: the others stay what they are.
        return {"algorithm.dynamic_sampling": True} if self.seed % 7 == 5 else {}

    def make_engines(self) -> Engines:
        return Engines(self.rng, asyncio.sleep)

    def stand_ins(self, stack: ExitStack) -> None:
        super().stand_ins(stack)
        stack.enter_context(graded_by(self.graders))

    def _data_app(self, disk: Path) -> Any:
        config = self.config.model_copy(update={"state_dir": disk})
        return create_data_app(config, _prompts(), [])

    def _replay_app(self, disk: Path) -> Any:
        return create_replay_app(self.config.replay, disk)

    def _reward_app(self, _: Path) -> Any:
        app = create_reward_app(self.config.reward)
        self._reward_node.live(app)
        return app

    # ------------------------------------------------------------ the run

    def run(self) -> None:
        """Runs attempts until one reaches the last step; raises Violation."""
        for node in self.nodes:
            node.start()
        self.limit(_LIMIT_S)
        self.schedule(self.faults(), self.rng.choice((0, 1, 1, 2, 4)), _FAULTS_S)
        progress = self.attempt_until_the_end(Loop(self.loop))
        self.is_up = False
        self.chance.on = False
        copies = self.net.copies()
        if copies:
            self.loop.run_until_complete(asyncio.wait(copies))
        self.check_end(progress)

    def attempt_until_the_end(self, loop: Loop) -> PromptProgress:
        """Starts the trainer again, as the job group does, until it reaches the last step."""
        while True:
            self.attempts += 1
            self.is_up = True
            try:
                return self.attempt(loop)
            except Crash:
                self.story.fault("crash", "trainer")
            except ServiceError as error:
                # It says why it cannot go on.
                self.story.say(f"the trainer ends: {error}".replace(str(self._directory), ""))
                self.failures.append(error)
                self.check_failure(error)
            self.end_attempt()
            self.trained = [item for item in self.trained if item[0] <= self.saved.step]
            loop.sleep(self.rng.uniform(1.0, 20.0))

    def end_attempt(self) -> None:
        """Ends the trainer's process."""
        self.is_up = False
        # Their ends run at this moment, and reach nobody.
        self.net.lives += 1
        for task in self.loop.tasks_of(""):
            task.cancel()

    def check_failure(self, error: ServiceError) -> None:
        """Raises Violation for an error that no fault explains."""
        self.check_nodes()
        never = error.code == "no_batch" or error.field == "/groups/ack"
        explained = not never and (self.lost_data or self.story.faults["failing disk"])
        if not explained or len(self.failures) > _MAX_FAILURES:
            raise Violation(f"the run ended: {error}") from error

    def faults(self) -> dict[str, Callable[[], None]]:
        """Returns the faults that may strike."""
        return {
            "crash": self.crash,
            "crash in a write": self._crash_in_a_write,
            "trainer": self.crash_trainer,
            "trainer again": self.crash_trainer,
            "partition": self.partition,
            "full disk": self._fill_disk,
            "failing disk": self._fail_a_write,
            "set back": self._set_back,
            "emptied": self._empty,
            "clock": self.move_clock,
        }

    def _a_store(self) -> Node:
        return self.rng.choice((self._data_node, self._replay_node))

    def _at_a_write(self, node: Node, action: Callable[[], None]) -> None:
        """Does something before one of the next statements of a node."""
        left = self.rng.randrange(1, 60)

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0 and node.app is not None:
                self.strike(action)

        node.disk.at_statement = count

    def _crash_in_a_write(self) -> None:
        node = self._a_store()
        self._at_a_write(node, lambda: self.end(node, "in a write"))

    def _fill_disk(self) -> None:
        """Fills a disk for a while, from one of the next statements on."""
        node = self._a_store()

        def free() -> None:
            node.disk.problem = None

        def fill() -> None:
            node.disk.problem = sqlite3.SQLITE_FULL
            self.story.fault("full disk", node.name)
            self.loop.call_later(self.down_s(), free)

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
                self.end(node)
            node.disk.restart_from(copy)
            node.model.forget()
            self.lost_data = True
            self.story.fault("set back", node.name)

        self.loop.call_later(self.rng.uniform(0.5, 10.0), self.strike, restore)

    def _empty(self) -> None:
        """Gives a store a new, empty volume."""
        node = self._a_store()
        if node.app is None:
            return
        self.end(node)
        node.disk.restart_empty()
        node.model.forget()
        self.lost_data = True
        self.story.fault("emptied", node.name)

    def services(self) -> Services:
        """Returns the clients of an attempt."""

        def client(kind: type[Client], name: str) -> Any:
            limit = self.config.limits.service_timeout_s
            return kind(name, f"http://{name}", deadline_s=limit)

        return Services(
            data=client(DataClient, "data-server"),
            rollout=client(RolloutClient, "router"),
            reward=client(RewardClient, "reward-server"),
            replay=client(ReplayClient, "replay-buffer"),
        )

    def set_run(self, run_id: str) -> None:
        """Sets the run of the trainer's process."""
        logs.set_run(run_id)

    def attempt(self, loop: Loop) -> PromptProgress:
        """Runs the trainer from its checkpoint; returns the progress at its end."""
        attempt = self.attempts
        run_id = f"run-{attempt}"
        self.set_run(run_id)
        self.story.say(f"attempt {self.attempts} begins after step {self.saved.step}")
        services = self.services()
        style = PromptStyle.of(self.config)
        context = RolloutContext(
            self.config,
            services,
            _Prompter(_tokenizer(), style, [2]),
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
        self.check_lock()
        total = rollouts.prepare(step, known=attempt > 1)
        # Not before: a run does not begin with a function that fails for a made-up answer.
        self.graders.failing = self._grader_faults
        with rollouts.collecting(step, total):
            while step < total:
                self.check_lock()
                groups = rollouts.next(step)
                if attempt == self.attempts:
                    self._check_batch(groups, step)
                loop.sleep(self.rng.uniform(0.0, _UPDATE_S))
                batch = Batch.of(groups, self.config, step)
                batch.advantages = [np.zeros(length, np.float32) for length in batch.lengths]
                step += 1
                if attempt == self.attempts:
                    self.trained += [(step, item.group) for item in groups if not item.reused]
                self.story.say(f"step {step}: {[item.group.position for item in groups]}")
                rollouts.start_acknowledging(batch)
                served = self._publish(loop, step, attempt)
                rollouts.free_slots(batch, when=served)
                if self.rng.random() < 0.5:
                    self.save(Checkpoint(step, rollouts.progress), attempt)
            return rollouts.progress

    def check_lock(self) -> None:
        """Stands for the looks at the lock of the run directory before a step, and before the run
        begins at the services.
        """

    def save(self, saved: Checkpoint, attempt: int) -> None:
        """Writes a checkpoint."""
        if attempt != self.attempts:
            # In the place of `RunLock.check`, which comes before it is written.
            raise ServiceError("another run has the directory", code="run_taken_over")
        self.saved = saved
        self.story.say(f"checkpoint after step {saved.step}: {saved.progress}")

    def _allowed(self, drops: Drops, first_step: int) -> int:
        """Returns how many groups an attempt may have begun by now."""
        over = drops.counts.total() + (self.engines.version - first_step) * self.fresh
        return self.slots + over

    def _publish(self, loop: Loop, step: int, attempt: int) -> Future[None]:
        """Publishes a version: at once, or beside the next step."""
        served: Future[None] = Future()

        def serve() -> None:
            if attempt != self.attempts:
                # The engines follow the trainer that began last.
                error = PublishFailed("no rollout node serves the weights")
                limit_s = self.config.limits.fence_after_s
                self.loop.call_later(limit_s, served.set_exception, error)
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
        self.check_nodes()
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
            staleness = self.config.trainer.max_staleness
            for completion in group.completions:
                spans = self.spans_of(completion)
                if spans is None:
                    raise Violation(f"no engine sampled a completion of {group.id}")
                if completion.weight_versions != spans:
                    raise Violation(f"{group.id} says {completion.weight_versions}, not {spans}")
                if not staleness and len(spans) > 1:
                    raise Violation(f"{group.id} is of several versions: {spans}")
                version = min(span[0] for span in spans)
                is_bound = not item.reused and self.when_stale != "train"
                if is_bound and version < step - staleness:
                    raise Violation(f"{group.id} of version {version} is trained on at step {step}")
                if completion.reward != self.reward_of(completion):
                    raise Violation(f"a completion of {group.id} has the reward of a fault")

    def spans_of(self, completion: Completion) -> Spans | None:
        """Returns the versions that sampled a completion; None when no engine has."""
        return self.engines.generated.get(tuple(completion.token_ids.tolist()))

    def reward_of(self, completion: Completion) -> float:
        """Returns the reward that a completion has when no fault befalls it."""
        return reward_of(completion.text)

    def _check_drops(self) -> None:
        """Checks that no fault has become a reward, also where it cost the group."""
        for dropped in self.drops[-1].recent():
            for completion in dropped.group.completions:
                is_graded = not math.isnan(completion.reward)
                if is_graded and completion.reward != self.reward_of(completion):
                    raise Violation(f"a completion of {dropped.group.id} has the reward of a fault")

    def check_end(self, progress: PromptProgress) -> None:
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
        self.check_nodes()
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
        # Dynamic sampling replaces a group of equal rewards by one of another prompt.
        equal = sum(drops.counts["zero_variance"] for drops in self.drops)
        if (len(skipped) - equal) * _TRIES > dropped - equal:
            raise Violation(f"{skipped} are skipped after {dropped} drops in all")
        left = set(range(max(trained))) - finished
        if left:
            raise Violation(f"{left} were passed over")

    def _check_store(self) -> None:
        """Checks that the replay-buffer's counts add up."""
        stats = ask_json(self, self._replay_node, "/stats")
        stored = stats["fresh"] + stats["leased"] + stats["consumed"]
        if stats["added"] - stats["evicted"] - stats["removed"] - stats["dropped"] != stored:
            raise Violation(f"the counts of the replay-buffer do not add up: {stats}")
        if self.lost_data:
            return
        if stats["leased"]:
            raise Violation(f"groups are leased at the end: {stats}")
        path = "/groups?state=consumed&limit=1000"
        listed = ask_json(self, self._replay_node, path)["groups"]
        lost = self.replay.consumed - {group["id"] for group in listed}
        if len(lost) > stats["removed"]:
            raise Violation(f"{lost} were acknowledged and are gone")

    def _prompt_at(self, position: int) -> str:
        """Returns the prompt at a position: the order of the data-server, which depends on the seed
        of the run alone.
        """
        epoch, place = divmod(position, PROMPTS)
        return _prompts()[_order(self.config.seed, epoch)[place]].id
