"""The collector: prompts → completions → rewards → replay buffer, concurrently, with staleness bounded by slots.

    data-server ──prompt──► router ──n completions──► reward-server ──graded group──► replay-buffer ──batch──► trainer

At most (max_staleness + 1) × (fresh groups per step) groups are in flight or waiting to be trained on. A slot is taken before a
prompt is drawn and given back by `release` when the engines serve what its group trained: with staleness 0 nothing is
generated while the weights change; else a group begins at most max_staleness versions before the one that is updated on
it, and `take` evicts what other groups have overtaken for longer. A group that fails or is evicted is dropped and counted, and
its prompt is tried again in its slot, then another one; too many failures in a row stop the run with the reason.
"""

import asyncio
import logging
import math
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from common import logs, watchdog
from common.clients import Client, DataClient, ReplayClient, RewardClient
from common.config import Config
from common.critic_client import CriticClient
from common.errors import ServiceError
from common.rollout_client import RolloutClient
from common.schemas import Completion, Group, Prompt, SampledGroups, SampleRequest, TakeRequest
from services.reward.limits import MAX_BATCH_ITEMS
from trainer.background import LoopThread
from trainer.rollouts.mixing import mixed_in
from trainer.rollouts.priorities import PRIORITY_EXPONENT
from trainer.rollouts.prompts import Prompter, reward_items
from trainer.rollouts.request_batcher import Together
from trainer.timing import StageClock

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_SAY_EVERY_S = 30.0
_MAX_DRAW = 256
"""Prompts of one call to the data-server."""
_MAX_STORE = 32
"""Groups of one call to the replay-buffer."""
_REMEMBERED = 1024
"""Groups that were dropped since somebody asked for them."""
_TRIES = 3
"""Groups of one prompt that may fail or come too late until it is left out of the epoch."""


class CollectFailed(ServiceError):
    """Collecting cannot go on; the message is the reason."""

    code = "collect_failed"


class Dropped(Exception):
    """This group cannot be trained on."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class DroppedGroup(NamedTuple):
    """A group that nobody trains on, and why; as far as it came: it may have no completions, and rewards that are NaN."""

    group: Group
    reason: str
    detail: str


@dataclass
class Services:
    """The clients of one run."""

    data: DataClient
    rollout: RolloutClient
    reward: RewardClient
    replay: ReplayClient
    critic: CriticClient | None = None
    """Where the critic is a task of its own."""

    def stateful(self) -> list[Client]:
        """Those that can make something durable: all but the router."""
        return [self.data, self.reward, self.replay, *([self.critic] if self.critic else [])]

    def all(self) -> list[Client]:
        return [*self.stateful(), self.rollout]


class Drawn(NamedTuple):
    """A prompt at its place in the stream."""

    position: int
    prompt: Prompt
    epoch: int


@dataclass(frozen=True)
class Progress:
    """Where a run is in the prompt stream: what it has trained on or dropped, and never draws again."""

    position: int = 0
    """Everything before it is done."""
    finished: list[int] = field(default_factory=list)
    """Positions after it that are done too, ascending: with max_staleness, groups overtake one another."""


@dataclass
class Counts:
    """Since the run began."""

    dropped: Counter[str] = field(default_factory=Counter)
    """Groups that were not trained on, by reason."""
    in_a_row: int = 0
    """Failures since the last group that succeeded."""


class Collector:
    """Fills the replay buffer in the background and hands out batches.

    Args:
        config: of the run.
        services: clients; used only in this collector's event loop.
        prompter: tokenises prompts.
        clock: told which stage is active.
        loop: event loop that runs in another thread.
        run_id: makes request ids unique to this run.
        progress: of the run, from its checkpoint.
    """

    def __init__(
        self,
        config: Config,
        services: Services,
        prompter: Prompter,
        clock: StageClock,
        loop: LoopThread,
        run_id: str,
        progress: Progress,
    ) -> None:
        self.config, self.services, self.counts = config, services, Counts()
        self._prompter, self._clock, self._loop, self._run_id = prompter, clock, loop, run_id
        self._slots = asyncio.Semaphore(0)  # one per group that may be in flight
        self._wanted = 0
        self._drawn = 0
        self._next = 0
        self._takes = self._asked = 0
        self._held: set[str] = set()  # groups that were taken and are not acknowledged
        self._position, self._finished = progress.position, set(progress.finished)
        self._waiting: dict[int, tuple[Group, Drawn]] = {}  # groups to be trained on, by position
        self._unseen: deque[DroppedGroup] = deque(maxlen=_REMEMBERED)
        self._dropped: list[Drawn] = []  # their groups were dropped: they come before other prompts
        self._tries: Counter[int] = Counter()  # groups that were dropped, by position
        self._failure: BaseException | None = None
        self._grade_all = Together(services.reward.grade_all, MAX_BATCH_ITEMS, len)
        self._store_all = Together(self._add, _MAX_STORE)

    @contextmanager
    def running(self, groups: int) -> Iterator[None]:
        """Collects `groups` groups in all while inside."""
        slots = min(groups, (self.config.trainer.max_staleness + 1) * fresh_groups(self.config))
        self._wanted, self._next = groups, self._position
        task = self._loop.start(self._run(slots))
        try:
            yield
        finally:
            self._loop.cancel(task)

    def progress(self) -> Progress:
        """Where a run goes on that resumes from here."""

        async def read() -> Progress:
            return Progress(self._position, sorted(self._finished))

        return self._loop.call(read())

    def fail(self, error: BaseException) -> None:
        """The run cannot go on: `take` raises this from now on."""
        self._failure = self._failure or error

    def check(self) -> None:
        """Raises why the run cannot go on, if so."""
        if self._failure is not None:
            raise self._failure

    def take(self, count: int, min_version: int) -> list[Group]:
        """The next `count` fresh groups, none older than `min_version`, in the order of their prompts.

        Raises CollectFailed with the reason when collecting stopped, or when nothing came for `trainer.wait_timeout_s`.
        """
        self._takes += 1
        start = said = time.monotonic()
        while (now := time.monotonic()) - start < self.config.trainer.wait_timeout_s:
            if now - said > _SAY_EVERY_S:
                calls = "; ".join(watchdog.awaited()) or "no call is under way"
                active = self._clock.active()
                log.warning("waiting since %.0f s for %d groups; active now: %s; %s", now - start, count, active, calls)
                said = now
            self.check()
            self._asked += 1
            request_id = f"{self._run_id}-take-{self._asked}"  # a new one each time: what it tells counts once
            request = TakeRequest(count=count, min_version=min_version, wait_s=1.0, request_id=request_id)
            if groups := self._loop.call(self._take(request)):
                return sorted(groups, key=lambda group: group.position)
        watchdog.deadline_passed(f"no batch of {count} groups within {self.config.trainer.wait_timeout_s:.0f} s")
        raise CollectFailed(
            f"no batch of {count} groups within {self.config.trainer.wait_timeout_s:.0f} s",
            field="trainer.wait_timeout_s",
            remedy="look at the logs of rollout-server and reward-server, or raise the limit",
        )

    def sample(self, count: int, min_version: int, importance_exponent: float, seed: int) -> SampledGroups:
        """Prioritised reuse: up to `count` groups that were trained on before, with importance weights."""
        settings = self.config.replay
        request = SampleRequest(
            count=count,
            min_version=min_version,
            priority_exponent=PRIORITY_EXPONENT,
            importance_exponent=importance_exponent,
            max_times_sampled=settings.max_times_sampled,
            seed=seed,
            request_id=f"{self._run_id}-sample-{self._takes}",
            recency_half_life=settings.recency_half_life if settings.priority == "recency" else None,
        )
        with self._clock.stage("replay"):
            return self._loop.call(self.services.replay.sample(request))

    def successes(self, prompt_ids: list[str], min_version: int) -> list[Group]:
        """Earlier groups of these prompts with nothing but their verified right answers (`replay.mix_successes` of each)."""
        with self._clock.stage("replay"):
            return self._loop.call(self.services.replay.successes(prompt_ids, self.config.replay.mix_successes, min_version))

    def begin_trained(self, fresh: list[Group], priorities: dict[str, float]) -> Callable[[], None]:
        """These groups were trained on: acknowledges the fresh ones and sets everybody's priority for reuse.

        The function returned waits for it.
        """
        return self._loop.begin(self._trained(fresh, priorities))

    async def _trained(self, fresh: list[Group], priorities: dict[str, float]) -> None:
        with self._clock.stage("replay"):
            await self._acknowledge(fresh)
            await self.services.replay.set_priorities(priorities)
        await self._finish([group.position for group in fresh])

    async def _acknowledge(self, groups: list[Group]) -> None:
        ids = [group.id for group in groups]
        await self.services.replay.ack(ids)
        self._held.difference_update(ids)

    def report_pass_rates(self, fresh: list[Group]) -> None:
        """Tells a curriculum how often these prompts were solved; does nothing without a curriculum."""
        if self.config.data.curriculum == "none":
            return
        prompt_ids, request_id = [group.prompt_id for group in fresh], f"{self._run_id}-pass-rates-{self._takes}"
        self._loop.call(self.services.data.report_pass_rates(prompt_ids, [*map(pass_rate, fresh)], request_id))

    def replace(self, groups: list[Group]) -> None:
        """Puts groups that a batch has no use for aside and draws as many other prompts instead."""
        self.counts.dropped["equal_rewards"] += len(groups)
        self._unseen += [DroppedGroup(group, "equal_rewards", "all its rewards are equal") for group in groups]
        self._loop.call(self._acknowledge(groups))
        self._loop.call(self._finish([group.position for group in groups]))
        self._loop.call(self._again(len(groups)))

    def dropped(self) -> list[DroppedGroup]:
        """What was dropped since this was last asked."""
        return [self._unseen.popleft() for _ in range(len(self._unseen))]

    def release(self, count: int) -> None:
        """Frees the slots of `count` groups, after the weights that they trained were published."""
        self._loop.call(self._free(count))

    async def _take(self, request: TakeRequest) -> list[Group]:
        taken = await self.services.replay.take(request)
        for group in taken.groups:
            if group.id in self._held:
                raise CollectFailed(
                    "a group came a second time: its lease ended before it was trained on",
                    field="replay.lease_s",
                    value=self.config.replay.lease_s,
                    remedy="raise it above the longest time from a batch to the end of its update",
                )
            self._held.add(group.id)
            self._waiting.pop(group.position, None)
        if taken.evicted:
            self.counts.dropped["stale"] += taken.evicted
            oldest = request.min_version
            tardy = [(group, drawn) for group, drawn in self._waiting.values() if group.weight_version < oldest]
            late = [drawn for _, drawn in tardy]
            detail = f"its weights are older than version {oldest}"
            self._unseen += [DroppedGroup(group, "stale", detail) for group, _ in tardy]
            log.warning("the groups at %s of the prompt stream came too late", [drawn.position for drawn in late])
            await self._try_again(late)
            await self._again(taken.evicted)
        return taken.groups

    async def _finish(self, positions: list[int]) -> None:
        for position in positions:
            self._waiting.pop(position, None)
            self._tries.pop(position, None)
            self._finished.add(position)
        while self._position in self._finished:
            self._finished.remove(self._position)
            self._position += 1

    async def _free(self, count: int) -> None:
        for _ in range(count):
            self._slots.release()

    async def _again(self, count: int) -> None:
        self._wanted += count
        await self._free(count)

    async def _try_again(self, dropped: Sequence[Drawn]) -> None:
        """Their groups were dropped: the prompts are the next that are drawn, if they were not tried too often."""
        for drawn in dropped:
            self._waiting.pop(drawn.position, None)
            self._tries[drawn.position] += 1
            if self._tries[drawn.position] < _TRIES:
                self._dropped.append(drawn)
            else:
                log.warning("prompt %s at %d is left out after %d tries", drawn.prompt.id, drawn.position, _TRIES)
                await self._finish([drawn.position])

    async def _run(self, slots: int) -> None:
        """Draws prompts as slots become free; every group is a task of its own."""
        try:
            await self._free(slots)
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._slots.acquire()
                    count = 1
                    while count < min(_MAX_DRAW, self._wanted - self._drawn) and not self._slots.locked():
                        await self._slots.acquire()
                        count += 1
                    if self._drawn >= self._wanted:
                        continue
                    self._drawn += count
                    drawn = await self._draw(count)
                    ids = self._prompter.all_token_ids([each.prompt for each in drawn])
                    for each, prompt_ids in zip(drawn, ids, strict=True):
                        tasks.create_task(self._collect(each, prompt_ids))
        except BaseExceptionGroup as group:
            self._failure = group.exceptions[0]

    async def _draw(self, count: int) -> list[Drawn]:
        """`count` prompts: those to be tried again, and the next that are not done yet."""
        drawn, self._dropped = self._dropped[:count], self._dropped[count:]
        while (left := count - len(drawn)) > 0:
            request_id = f"{self._run_id}-{self._next}-{left}"
            batch = await self.services.data.prompts(left, request_id)
            if batch.position != self._next:  # its cursor died with its disk, or somebody else drew from the stream
                log.warning("the data-server is at position %d instead of %d: it is set back", batch.position, self._next)
                await self.services.data.seek(self._next)
                batch = await self.services.data.prompts(left, f"{request_id}-again")
            for position, prompt in enumerate(batch.prompts, self._next):
                if position >= self._position and position not in self._finished:
                    drawn.append(Drawn(position, prompt, position // batch.total_available))
            self._next += left
        return drawn

    async def _collect(self, drawn: Drawn, prompt_ids: list[int]) -> None:
        """One group, from prompt to the replay buffer; on failure its slot tries again, then draws another prompt."""
        group_id = str(uuid.uuid4())
        with logs.request(group_id):  # what any service logs about the group has its id
            await self._collect_group(group_id, drawn, prompt_ids)

    async def _collect_group(self, group_id: str, drawn: Drawn, prompt_ids: list[int]) -> None:
        position, prompt, epoch = drawn
        group = Group(
            id=group_id,
            prompt_id=prompt.id,
            prompt=prompt.prompt,
            ground_truth=prompt.ground_truth,
            prompt_token_ids=np.array(prompt_ids, np.int32),
            completions=[],
            epoch=epoch,
            position=position,
        )
        try:
            group.completions = await self._generate(prompt_ids, position)
            await self._grade(prompt, group.completions)
            group.created_at = time.time()
            self._waiting[position] = group, drawn
            with self._clock.stage("replay"):
                await self._store_all(group)
            self.counts.in_a_row = 0
        except Dropped as error:
            self._drop(error, group)
            await self._try_again([drawn])
            await self._again(1)

    async def _generate(self, prompt_ids: list[int], position: int) -> list[Completion]:
        sampling = self.config.sampling
        try:
            with self._clock.stage("generation"):
                return await self.services.rollout.generate(
                    prompt_ids,
                    n=sampling.group_size,
                    max_new_tokens=sampling.max_new_tokens,
                    temperature=sampling.temperature,
                    stop_token_ids=self._prompter.stop_token_ids,
                    sampling_seed=sampling_seed(self.config.seed, position),
                    deadline_s=sampling.request_timeout_s,
                )
        except ServiceError as error:
            raise Dropped("generation", str(error)) from error

    async def _add(self, groups: list[Group]) -> list[None]:
        await self.services.replay.add(groups)
        return [None] * len(groups)

    async def _grade(self, prompt: Prompt, completions: list[Completion]) -> None:
        try:
            with self._clock.stage("reward"):
                results = await self._grade_all(reward_items(prompt, completions))
        except ServiceError as error:
            for completion in completions:
                completion.reward = math.nan
            raise Dropped("reward", str(error)) from error
        for completion, result in zip(completions, results, strict=True):
            completion.reward, completion.correct = math.nan if result.reward is None else result.reward, result.correct
            completion.status, completion.extracted_answer = result.status, result.extracted_answer
            completion.components = result.components
        for result in results:
            if result.reward is None:
                raise Dropped("reward", f"an answer could not be graded: {result.status}")

    def _drop(self, error: Dropped, group: Group) -> None:
        self.counts.dropped[error.reason] += 1
        self.counts.in_a_row += 1
        self._unseen.append(DroppedGroup(group, error.reason, error.detail))
        log.warning("dropped the group of prompt %s: %s", group.prompt_id, error)
        if self.counts.in_a_row >= self.config.trainer.max_failed_groups:
            raise CollectFailed(
                f"{self.counts.in_a_row} groups in a row were dropped, the last one because of {error}",
                field="trainer.max_failed_groups",
                remedy="look at the log of the service that is named",
            )


def pass_rate(group: Group) -> float:
    """Share of right answers among the completions that were sampled for this group."""
    own = group.completions[: len(group.completions) - mixed_in(group)]
    return sum(completion.correct for completion in own) / len(own)


def fresh_groups(config: Config) -> int:
    """Groups of a batch that are generated for it; the others are reused."""
    return config.trainer.batch_size - int(config.trainer.batch_size * config.replay.reuse_ratio)


def sampling_seed(seed: int, position: int) -> int:
    """Seed of the group at `position` of the stream, different for every run seed; fits in 31 bits."""
    return (seed * 0x9E3779B1 + position * 0x85EBCA6B + 1) & 0x7FFFFFFF
