"""The collector: prompts → completions → rewards → replay buffer, concurrently, with staleness
bounded by slots.

    data-server ──prompt──► router ──n completions──► reward-server ──graded group──► replay-buffer
    ──batch──► trainer

There are (max_staleness + 1) × (fresh groups per step) slots. A group holds its slot from the draw
of its prompt until the engines serve the weights that it trained:

| state of a slot | ends when | next state |
|---|---|---|
| free | the run wants another group | drawing |
| drawing | the data-server answered | generating |
| generating | the router answered; a failure drops the group | grading; drawing |
| grading | the reward-server answered, and the teacher if there is one; a failure drops the group | storing; drawing |
| storing | the replay-buffer acknowledged the group | waiting |
| waiting | the trainer takes the group; with `drop`, one too stale is evicted and dropped | training; drawing |
| training | the engines serve the weights that the group trained (`free`) | free |

A dropped group is counted and its prompt is tried again in its slot (`PromptCursor`); too many
failures in a row stop the run. With max_staleness 0 nothing is generated while the weights change.
Otherwise, if groups are trained on in the order in which they got their slots (`oldest_stored`),
the weights that start a group are at most max_staleness versions
older than those that are updated on it: at most max_staleness × (fresh groups per step) others
precede a new group.
"""

import asyncio
import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.errors import ServiceError, ServiceLost
from common.process import logs
from common.prompts.prompter import Prompter
from common.settings.config import Config
from common.wire.schemas import Completion, Group, Prompt
from trainer.rollouts.episodes import answer_of, completions_of, episode_request, play
from trainer.rollouts.prompt_cursor import MAX_TRIES, Drawn, PromptCursor
from trainer.rollouts.request_batcher import RequestBatcher
from trainer.rollouts.requests import reward_items, sampling_seed
from trainer.rollouts.services import Services
from trainer.timing import StageClock

log = logging.getLogger(__name__)
_MAX_DRAW = 256
"""Maximum number of prompts in one call to the data-server."""
_MAX_GRADE = 1024
"""Maximum number of answers in one call to the reward-server, unless one group has more: JSON
bodies are limited."""
MAX_STORE = 32
"""Maximum number of groups in one call to the replay-buffer."""
_MAX_REMEMBERED = 1024
"""Maximum number of dropped groups that wait to be logged."""


class CollectFailed(ServiceError):
    """Collecting cannot continue; the message says why."""

    code = "collect_failed"


class DroppedGroup(NamedTuple):
    """A group that is not trained on, and why. It may lack completions, and its rewards may be
    NaN.
    """

    group: Group
    reason: str
    detail: str


@dataclass
class Drops:
    """The groups that were dropped."""

    counts: Counter[str] = field(default_factory=Counter)
    """Groups dropped since the run began, by reason."""
    in_a_row: int = 0
    """Failures since the last group that succeeded."""
    _recent: deque[DroppedGroup] = field(default_factory=lambda: deque(maxlen=_MAX_REMEMBERED))

    def add(self, groups: Sequence[Group], reason: str, detail: str) -> None:
        """Counts groups and remembers them for the log."""
        self.counts[reason] += len(groups)
        self._recent += [DroppedGroup(group, reason, detail) for group in groups]

    def recent(self) -> list[DroppedGroup]:
        """Returns the groups dropped since the last call."""
        return [self._recent.popleft() for _ in range(len(self._recent))]


class _Failed(Exception):
    """This group cannot be trained on."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class Collector:
    """Fills the replay buffer. All methods run in the event loop of the clients. Group ids begin
    with `run_id`.
    """

    def __init__(
        self,
        config: Config,
        services: Services,
        prompter: Prompter,
        clock: StageClock,
        run_id: str,
        cursor: PromptCursor,
    ) -> None:
        self._config, self._services, self._prompter = config, services, prompter
        self._clock, self._run_id, self._cursor = clock, run_id, cursor
        self.drops = Drops()
        self.waiting: dict[int, tuple[Group, Drawn]] = {}
        """Groups that are stored or being stored and that the trainer has not taken yet, by
        position."""
        self.turns: dict[int, bool] = {}
        """Whether the group is stored, by position not yet taken by the trainer, in the order of
        their slots."""
        self._stored = asyncio.Event()
        self._slots = asyncio.Semaphore(0)
        self._wanted = self._drawn = 0
        self._grade_batched = RequestBatcher(services.reward.grade_all, _MAX_GRADE, len)
        self._store_batched = RequestBatcher(self._store, MAX_STORE)

    async def run(self, groups: int, slots: int) -> None:
        """Collects `groups` groups in total, each in its own task. Never returns; raises whatever
        stops the run.
        """
        self._wanted = groups
        self.free(slots)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._slots.acquire()
                count = 1
                while (
                    count < min(_MAX_DRAW, self._wanted - self._drawn) and not self._slots.locked()
                ):
                    await self._slots.acquire()
                    count += 1
                if self._drawn >= self._wanted:
                    continue
                self._drawn += count
                drawn = await self._draw(count)
                ids = self._prompter.all_token_ids([each.prompt for each in drawn])
                for each, prompt_ids in zip(drawn, ids, strict=True):
                    self.turns[each.position] = False
                    tasks.create_task(self._collect(each, prompt_ids))

    def free(self, count: int) -> None:
        """Frees the slots of groups that were trained on."""
        for _ in range(count):
            self._slots.release()

    def replace(self, count: int) -> None:
        """Collects `count` more groups, in the slots of groups that will not be trained on."""
        self._wanted += count
        self.free(count)

    def taken(self, position: int) -> None:
        """Forgets a group that no longer waits."""
        self.waiting.pop(position, None)
        self.turns.pop(position, None)

    async def oldest_stored(self, count: int, wait_s: float) -> bool:
        """Waits up to `wait_s` until the `count` groups that got their slots first are stored;
        returns whether they are.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not all((turns := list(self.turns.values()))[:count]) or len(turns) < count:
                    self._stored.clear()
                    with self._clock.stage("stragglers") if sum(turns) >= count else nullcontext():
                        await self._stored.wait()
                return True
        return False

    def retry(self, drawn: Sequence[Drawn]) -> None:
        """Schedules the prompts of dropped groups to be drawn again, before new ones, unless they
        failed too often.
        """
        for each in drawn:
            self.taken(each.position)
            if not self._cursor.retry(each):
                log.warning(
                    "prompt %s at %d is skipped after %d tries",
                    each.prompt.id,
                    each.position,
                    MAX_TRIES,
                )

    async def _draw(self, count: int) -> list[Drawn]:
        """Returns `count` prompts: retries first, then the next ones of the stream."""
        drawn, data = self._cursor.take_retries(count), self._services.data
        while (left := count - len(drawn)) > 0:
            position = self._cursor.next
            request_id = f"{self._run_id}-{position}-{left}"
            batch = await data.prompts(left, request_id)
            if (
                batch.position != position
            ):  # its cursor was lost with its disk, or another client drew from the stream
                log.warning(
                    "setting the data-server back from position %d to %d", batch.position, position
                )
                await data.seek(position)
                batch = await data.prompts(left, f"{request_id}-again")
                if batch.position != position:
                    raise CollectFailed(
                        f"the data-server gave prompt {batch.position} instead of {position}: another client draws from it",
                        field="prompts",
                        value=batch.position,
                        remedy="stop the other client, or give it another data-server; then start again",
                    )
            drawn += self._cursor.draw(batch.prompts, batch.total_available)
        return drawn

    async def _collect(self, drawn: Drawn, prompt_ids: list[int]) -> None:
        """Collects one group, from prompt to replay buffer; when it fails, another group takes its
        slot.
        """
        position, prompt, epoch = drawn
        group = Group(
            # a position may be tried more than once
            id=f"{self._run_id}-{position}-{secrets.token_hex(4)}",
            prompt_id=prompt.id,
            prompt=prompt.prompt,
            ground_truth=prompt.ground_truth,
            prompt_token_ids=np.array(prompt_ids, np.int32),
            completions=[],
            epoch=epoch,
            position=position,
        )
        if (least := self._config.sampling.min_new_tokens) and not self._config.sampling.cuts():
            group.min_new_tokens, group.barred = (
                least,
                np.array(self._prompter.stop_token_ids, np.int32),
            )
        with logs.request(group.id):  # every service adds this id to its log lines about the group
            try:
                if self._services.environment is None:
                    group.completions = await self._generate(prompt_ids, position)
                    for completion in group.completions:
                        completion.text = self._prompter.style.prefill + completion.text
                    await self._grade(prompt, group.completions)
                    await self._ask_teacher(group)
                else:
                    await self._play(prompt, group)
                group.created_at = time.time()
                self.waiting[position] = group, drawn
                with self._clock.stage("replay"):
                    await self._store_batched(group)
                self.turns[position] = True
                self._stored.set()
                self.drops.in_a_row = 0
            except _Failed as error:
                self._drop(error, group)
                self.retry([drawn])
                self.replace(1)

    async def _generate(self, prompt_ids: list[int], position: int) -> list[Completion]:
        sampling = self._config.sampling
        try:
            with self._clock.stage("generation"):
                return await self._services.rollout.generate(
                    prompt_ids,
                    n=sampling.group_size,
                    max_new_tokens=sampling.max_new_tokens,
                    temperature=sampling.temperature,
                    stop_token_ids=self._prompter.stop_token_ids,
                    sampling_seed=sampling_seed(self._config.seed, position),
                    shape=sampling.bounded_cuts() | sampling.ends(),
                    pace=self._prompter.pace(sampling),
                    deadline_s=sampling.request_timeout_s,
                )
        except ServiceLost:
            raise
        except ServiceError as error:
            raise _Failed("generation", str(error)) from error

    async def _play(self, prompt: Prompt, group: Group) -> None:
        """Fills a group with the episodes of its prompt. A lost or failed episode has no reward, so
        the group fails.
        """
        config = self._config
        request = episode_request(
            config, prompt, group.id, config.sampling.group_size, group.position
        )
        try:
            with self._clock.stage("generation"):
                episodes = await play(self._services, request)
        except ServiceLost:
            raise
        except ServiceError as error:
            raise _Failed("generation", str(error)) from error
        for episode in episodes:
            if episode.status != "ok":
                raise _Failed(
                    "episode", f"{episode.status}: {episode.detail or episode.stop_reason}"
                )
        answers = [answer_of(episode) for episode in episodes]
        ungraded = [i for i, episode in enumerate(episodes) if episode.reward is None]
        await self._grade(prompt, [answers[i] for i in ungraded])
        group.prompt_token_ids = episodes[0].sequences[0].prompt_ids
        group.completions = [
            each
            for i, episode in enumerate(episodes)
            for each in completions_of(episode, answers[i], i)
        ]

    async def _grade(self, prompt: Prompt, completions: list[Completion]) -> None:
        if not completions:
            return
        try:
            with self._clock.stage("reward"):
                results = await self._grade_batched(
                    reward_items(prompt, completions, self._services.reward.gets_tokens)
                )
        except ServiceLost:
            raise
        except ServiceError as error:
            for completion in completions:
                completion.reward = math.nan
            raise _Failed("reward", str(error)) from error
        for completion, result in zip(completions, results, strict=True):
            completion.reward, completion.correct = (
                math.nan if result.reward is None else result.reward,
                result.correct,
            )
            completion.status, completion.extracted_answer = result.status, result.extracted_answer
            completion.verified = result.verified
            completion.components = result.components
        for result in results:
            if result.reward is None:
                raise _Failed(
                    "reward", f"an answer could not be graded: {result.reason or result.status}"
                )

    async def _ask_teacher(self, group: Group) -> None:
        if (teacher := self._services.teacher) is None:
            return
        try:
            with self._clock.stage("reward"):
                tokens = [completion.token_ids for completion in group.completions]
                scores = await teacher.score(group.prompt_token_ids.tolist(), tokens)
        except ServiceError as error:
            raise _Failed("teacher", str(error)) from error
        for completion, logprobs in zip(group.completions, scores, strict=True):
            completion.teacher_logprobs = logprobs

    async def _store(self, groups: list[Group]) -> list[None]:
        await self._services.replay.add(groups)
        return [None] * len(groups)

    def _drop(self, error: _Failed, group: Group) -> None:
        self.drops.add([group], error.reason, error.detail)
        self.drops.in_a_row += 1
        log.warning("dropped the group of prompt %s: %s", group.prompt_id, error)
        if self.drops.in_a_row >= self._config.trainer.max_failed_groups:
            raise CollectFailed(
                f"{self.drops.in_a_row} groups in a row were dropped, the last one because of {error}",
                field="trainer.max_failed_groups",
                value=self._config.trainer.max_failed_groups,
                remedy="look at the log of the service in that error",
            )
