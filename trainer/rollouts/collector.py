"""The collector: prompts → completions → rewards → replay buffer, concurrently, with staleness
bounded by slots.

    data-server ──prompt──► router ──n completions──► reward-server ──graded group──►
    replay-buffer ──batch──► trainer

There are (max_staleness + 1) × (fresh groups per step) slots. A group holds its slot from the draw
of its prompt until the engines serve the weights that it trained:

| state of a slot | ends when | next state |
|---|---|---|
| free | the run wants another group | drawing |
| drawing | the data-server answered | generating |
| generating | the router answered; a failure drops the group | grading; drawing |
| grading | reward-server and teacher answered; a failure drops the group | storing; drawing |
| storing | the replay-buffer acknowledged the group | waiting |
| waiting | the trainer takes the group; with `drop`, a stale one is dropped | training; drawing |
| training | the engines serve the weights that the group trained (`free`) | free |

A dropped group is counted and its prompt is tried again in its slot (`PromptCursor`); too many
failures in a row stop the run. With max_staleness 0 nothing is generated while the weights change.
Otherwise, if groups are trained on in the order in which they got their slots (`oldest_stored`),
the weights that start a group are at most max_staleness versions older than those that are updated
on it: at most max_staleness × (fresh groups per step) others precede a new group.
"""

import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

from common.errors import ServiceError
from common.process import logs
from common.wire.schemas import Group, TakeRequest
from trainer.rollouts.context import RolloutContext
from trainer.rollouts.drops import Drops, GroupFailed
from trainer.rollouts.ground_truths import GroundTruthCheck
from trainer.rollouts.group_maker import GroupMaker
from trainer.rollouts.prompt_cursor import MAX_TRIES, Drawn, PromptCursor
from trainer.rollouts.request_batcher import RequestBatcher

log = logging.getLogger(__name__)
_MAX_DRAW = 256
"""Maximum number of prompts in one call to the data-server."""
_MAX_STORE = 32
"""Maximum number of groups in one call to the replay-buffer."""


class CollectFailed(ServiceError):
    """Collecting cannot continue; the message says why."""

    code = "collect_failed"


class WaitingGroup(NamedTuple):
    """A group that waits for the trainer, and where its prompt came from."""

    group: Group
    drawn: Drawn


class Collector:
    """Owns the groups of a run, from the draw of a prompt to the acknowledgement of its group.

    All methods run in the event loop of the clients.
    """

    def __init__(
        self, context: RolloutContext, cursor: PromptCursor, ground_truths: GroundTruthCheck
    ) -> None:
        self._config = context.config
        self._services = context.services
        self._prompter = context.prompter
        self._clock = context.clock
        self._run_id = context.run_id
        self._cursor = cursor
        self._ground_truths = ground_truths
        self.drops = Drops()
        self.waiting: dict[int, WaitingGroup] = {}
        """Groups that are stored or being stored and that the trainer has not taken yet, by
        position."""
        self.is_stored: dict[int, bool] = {}
        """Whether the group is stored, by position not yet taken by the trainer, in the order of
        their slots."""
        self._held: set[str] = set()  # groups that were taken but not acknowledged yet
        self._stored = asyncio.Event()
        self._slots = asyncio.Semaphore(0)
        # Groups to draw in total, and drawn so far; a retry and a replacement raise both.
        self._wanted = 0
        self._drawn = 0
        self._maker = GroupMaker(context)
        self._store_batched = RequestBatcher(self._store, _MAX_STORE)

    async def run(self, groups: int, slots: int) -> None:
        """Collects `groups` groups in total, each in its own task. Never returns; raises whatever
        stops the run.
        """
        self._wanted = groups
        self.free(slots)
        async with asyncio.TaskGroup() as tasks:
            if not self._config.environment.grades_itself:
                tasks.create_task(self._ground_truths.run())
            while True:
                count = await self._acquire_slots()
                if self._drawn >= self._wanted:
                    continue  # the slot is not needed: `_collect_more` brings its own
                self._drawn += count
                drawn = await self._draw(count)
                token_ids = self._prompter.all_token_ids([each.prompt for each in drawn])
                for each, prompt_ids in zip(drawn, token_ids, strict=True):
                    self.is_stored[each.position] = False
                    tasks.create_task(self._collect(each, prompt_ids))

    async def _acquire_slots(self) -> int:
        """Waits for a free slot and takes it, with the others that are free and wanted; returns
        their number.
        """
        await self._slots.acquire()
        count = 1
        most = min(_MAX_DRAW, self._wanted - self._drawn)
        while count < most and not self._slots.locked():
            await self._slots.acquire()
            count += 1
        return count

    def free(self, count: int) -> None:
        """Frees the slots of groups that were trained on."""
        for _ in range(count):
            self._slots.release()

    def forget(self, position: int) -> None:
        """Forgets a group that no longer waits for the trainer."""
        self.waiting.pop(position, None)
        self.is_stored.pop(position, None)

    async def oldest_stored(self, count: int, wait_s: float) -> bool:
        """Waits up to `wait_s` until the `count` groups that got their slots first are stored;
        returns whether they are.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._are_oldest_stored(count):
                    self._stored.clear()
                    enough = sum(self.is_stored.values()) >= count
                    with self._clock.stage("stragglers") if enough else nullcontext():
                        await self._stored.wait()
                return True
        return False

    def _are_oldest_stored(self, count: int) -> bool:
        oldest = list(self.is_stored.values())[:count]
        return len(oldest) == count and all(oldest)

    async def take(self, request: TakeRequest) -> list[Group]:
        """Takes groups from the replay buffer for the trainer; returns none if there are too few.

        Groups that the buffer evicted as too old are dropped, and others are collected in their
        slots. Raises CollectFailed when a group comes a second time.
        """
        taken = await self._services.replay.take(request)
        for group in taken.groups:
            if group.id in self._held:
                raise CollectFailed(
                    "a group was delivered twice: its lease ended before it was trained on",
                    field="replay.lease_s",
                    value=self._config.replay.lease_s,
                    remedy="raise it above the longest time from the delivery of a batch to the "
                    "end of its update",
                )
            self._held.add(group.id)
            self.forget(group.position)
        if taken.evicted:
            self._drop_stale(request.min_version, taken.evicted)
        return taken.groups

    def _drop_stale(self, min_version: int, evicted: int) -> None:
        """Drops the groups that are older than `min_version`, of which the replay buffer evicted
        `evicted`.
        """
        stale = [
            waiting
            for waiting in self.waiting.values()
            if waiting.group.weight_version < min_version
        ]
        self.drops.add(
            [waiting.group for waiting in stale],
            "stale",
            f"its weights are older than version {min_version}",
        )
        self.drops.counts["stale"] += evicted - len(stale)
        log.warning(
            "dropping the stale groups at %s of the prompt stream",
            [waiting.drawn.position for waiting in stale],
        )
        for waiting in stale:
            self._retry(waiting.drawn)
        self._collect_more(evicted)

    async def replace_equal(self, groups: Sequence[Group]) -> None:
        """Drops groups of equal rewards, which were taken, and collects groups of other prompts."""
        self.drops.add(groups, "zero_variance", "all its rewards are equal")
        await self.acknowledge(groups)
        self._collect_more(len(groups))

    async def acknowledge(self, groups: Sequence[Group]) -> None:
        """Tells the replay buffer that groups are finished, whose prompts are never drawn again."""
        ids = [group.id for group in groups]
        await self._services.replay.ack(ids)
        self._held.difference_update(ids)
        self._cursor.finish([group.position for group in groups])

    async def store_lost(self) -> None:
        """Stores groups again that the replay-buffer lost before they were trained on.

        Raises CollectFailed when another client acknowledged some: the replay-buffer considers
        these trained on.
        """
        groups = [waiting.group for waiting in self.waiting.values()]
        if await self._unacknowledged() >= len(groups):
            return

        added = 0
        for begin in range(0, len(groups), _MAX_STORE):
            added += await self._services.replay.add(groups[begin : begin + _MAX_STORE])
        if added:
            log.warning(
                "%d groups were dropped from the replay-buffer, by the calls in its log: they are "
                "stored again",
                added,
            )

        lost = len(groups) - await self._unacknowledged()
        if lost > 0:
            raise CollectFailed(
                f"{lost} groups were acknowledged in the replay-buffer by another client before "
                "they were trained on",
                field="/groups/ack",
                value=lost,
                remedy="the log of replay-buffer names the client: stop it and restart the run to "
                "collect them again",
            )

    async def _unacknowledged(self) -> int:
        stats = await self._services.replay.stats()
        return int(stats["fresh"] + stats["leased"])

    async def _draw(self, count: int) -> list[Drawn]:
        """Returns `count` prompts: retries first, then the next ones of the stream."""
        data = self._services.data
        drawn = self._cursor.take_retries(count)
        while (missing := count - len(drawn)) > 0:
            position = self._cursor.next
            request_id = f"{self._run_id}-{position}-{missing}"
            batch = await data.prompts(missing, request_id)
            if batch.position != position:
                # Its cursor was lost with its disk, or another client drew from the stream.
                log.warning(
                    "setting the data-server back from position %d to %d", batch.position, position
                )
                await data.seek(position)
                batch = await data.prompts(missing, f"{request_id}-again")
            if batch.position != position:
                raise CollectFailed(
                    f"the data-server gave prompt {batch.position} instead of {position}: another "
                    "client draws from it",
                    field="prompts",
                    value=batch.position,
                    remedy="stop the other client, or give it another data-server; then start "
                    "again",
                )
            new = self._cursor.draw(batch.prompts, batch.total_available)
            drawn += [each for each in new if not self._skip_unsolvable(each)]
        return drawn

    def _skip_unsolvable(self, drawn: Drawn) -> bool:
        """Finishes a problem that no answer solves, and counts it; returns whether it is one."""
        if drawn.prompt.id not in self._ground_truths.unsolvable:
            return False
        self._cursor.finish([drawn.position])
        self.drops.counts["ground_truth"] += 1
        return True

    async def _collect(self, drawn: Drawn, prompt_ids: list[int]) -> None:
        """Collects one group, from prompt to replay buffer; when it fails, another group takes its
        slot.
        """
        position = drawn.position
        # The random part tells the tries of a position apart.
        group_id = f"{self._run_id}-{position}-{secrets.token_hex(4)}"
        group = self._maker.empty(drawn, prompt_ids, group_id)
        with logs.request(group.id):  # every service adds this id to its log lines about the group
            try:
                await self._maker.fill(group, drawn.prompt)
                self.waiting[position] = WaitingGroup(group, drawn)
                with self._clock.stage("replay"):
                    await self._store_batched(group)
            except GroupFailed as error:
                self._drop(error, group)
                self._retry(drawn)
                self._collect_more(1)
            else:
                # The trainer may have taken it before the replay buffer's answer came.
                if position in self.is_stored:
                    self.is_stored[position] = True
                self._stored.set()
                self.drops.in_a_row = 0

    async def _store(self, groups: list[Group]) -> list[None]:
        await self._services.replay.add(groups)
        return [None] * len(groups)

    def _drop(self, error: GroupFailed, group: Group) -> None:
        self.drops.add([group], error.reason, error.detail)
        self.drops.in_a_row += 1
        log.warning("dropped the group of prompt %s: %s", group.prompt_id, error)
        if self.drops.in_a_row >= self._config.trainer.max_failed_groups:
            raise CollectFailed(
                f"{self.drops.in_a_row} groups in a row were dropped, the last one because of "
                f"{error}",
                field="trainer.max_failed_groups",
                value=self._config.trainer.max_failed_groups,
                remedy="look at the log of the service in that error",
            )

    def _retry(self, drawn: Drawn) -> None:
        """Schedules the prompt of a dropped group to be drawn again, before new ones, unless it
        failed too often.
        """
        self.forget(drawn.position)
        if not self._cursor.retry(drawn):
            log.warning(
                "prompt %s at %d is skipped after %d tries",
                drawn.prompt.id,
                drawn.position,
                MAX_TRIES,
            )

    def _collect_more(self, count: int) -> None:
        """Collects `count` more groups, in the slots of groups that will not be trained on."""
        self._wanted += count
        self.free(count)
