"""The collector: prompts → completions → rewards → replay-buffer, concurrently. Slots bound the
staleness.

    data-server ──prompt──► router ──n completions──► reward-server ──graded group──►
    replay-buffer ──batch──► trainer

There are (max_staleness + 1) × (fresh groups per step) slots. A group holds its slot from the draw
of its prompt until the engines serve the weights that it trained:

| state of a slot | ends when | next state |
|---|---|---|
| free | the run wants another group, and the data-server gave its prompt | generating |
| generating | router, reward-server and teacher answered; a failure drops it | storing; free |
| storing | the replay-buffer acknowledged the group | waiting |
| waiting | the trainer takes the group; with `drop`, a stale one is dropped | training; free |
| training | the engines serve the weights that the group trained (`free_slots`) | free |

Without staleness the update begins when all groups are graded (`wait_for_graded`): they are stored
and taken meanwhile.

A dropped group is counted and its prompt is tried again in its slot (`PromptCursor`); too many
failures in a row stop the run.

For example, three groups in two slots (max_staleness 0, two groups per step), where the answers to
prompt 1 fail once:

| what happens | group 0 | group 1 | group 2 | free slots |
|---|---|---|---|---|
| `run(groups=3, slots=2)` | | | | 2 |
| the data-server gives two prompts | generating | generating | | 0 |
| 0 is graded, 1 is dropped | storing | | | 1 |
| 0 is stored, 1 is tried again | waiting | generating | | 0 |
| 1 is stored too: `wait_until_idle` returns | waiting | waiting | | 0 |
| the trainer takes both | training | training | | 0 |
| both are being acknowledged: the data-server gives the last prompt (`expect_slots`) | | | | 0 |
| the engines serve the new weights | | | generating | 1 |

With max_staleness 0 nothing is generated while the weights change. Otherwise, if groups are trained
on in the order in which they got their slots (`wait_for_oldest`), the weights that start a group
are at most max_staleness versions older than those that are updated on it: at most max_staleness ×
(fresh groups per step) others precede a new group.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import numpy as np
from msgspec.structs import replace

from common.errors import ServiceError
from common.process import logs
from common.prompts.prompter import TokenisedPrompt
from common.wire.schemas import Group, TakeRequest, UInt8
from trainer.rollouts.drops import Drops, GroupFailed
from trainer.rollouts.ground_truths import GroundTruthCheck
from trainer.rollouts.group_maker import GroupMaker
from trainer.rollouts.prompt_cursor import MAX_TRIES, DrawnPrompt, PromptCursor
from trainer.rollouts.request_batcher import RequestBatcher
from trainer.rollouts.services import RolloutContext

log = logging.getLogger(__name__)
_MAX_DRAW = 256
"""Maximum number of prompts in one call to the data-server."""
_MAX_STORE = 32
"""Maximum number of groups in one call to the replay-buffer."""
_STORED_BYTES = 64 << 20
"""Size of the arrays in such a call, unless one group is larger."""
_REMEDIES = {
    "generation": "look at the log of rollout-server, or of this process if it generates itself",
    "reward": "correct the reward function; reward.function_timeout_s limits a call of it",
    "episode": "correct the environment",
    "teacher": "look at the log of the teacher's server",
}
"""What to do when groups fail, by the reason."""


_Drawn = tuple[DrawnPrompt, TokenisedPrompt]


class CollectFailed(ServiceError):
    """Collecting cannot continue; the message says why."""

    code = "collect_failed"


def _not_ours(group_id: str, problem: str) -> CollectFailed:
    """Returns the error for a group that the replay-buffer should not have handed out."""
    return CollectFailed(
        f"the replay-buffer handed out group {group_id}, {problem}",
        field="id",
        value=group_id,
        remedy="look into the log of replay-buffer for other clients and for a store that was set "
        "back; run the same version of the program in every task; then start the run again: it "
        "resumes from its checkpoint and drops what it has not trained on",
    )


def _weight(group: Group) -> int:
    """Returns how many groups of usual size a group counts as, for `_MAX_STORE`."""
    size = sum(each.logprobs.nbytes + each.routed_experts.nbytes for each in group.completions)
    return max(1, size * _MAX_STORE // _STORED_BYTES)


class GroupState(Enum):
    """The state of a group that the trainer has not taken; the table above says when it ends."""

    DROPPED = auto()
    """Its prompt is tried again, and keeps its place in the order (`reproducible`)."""
    GENERATING = auto()
    STORING = auto()
    WAITING = auto()


@dataclass(slots=True)
class UntakenGroup:
    """What is known of a group from the draw of its prompt until the trainer takes it."""

    drawn: DrawnPrompt
    state: GroupState = GroupState.GENERATING
    graded: Group | None = None
    """The group itself, once it has its rewards."""

    @property
    def is_stored(self) -> bool:
        """Whether the replay-buffer answered that it is stored."""
        return self.state is GroupState.WAITING


class Collector:
    """Owns the groups of a run, from the draw of a prompt to the acknowledgement of its group.

    All methods run in the event loop of the clients. `Rollouts` uses it so, here with two groups in
    each of three steps:

        collecting = create_task(collector.run(groups=6, slots=2))   # in the background
        groups = await collector.take(TakeRequest(count=2, …))       # [g0, g1]; 4 to draw, 0 slots
        …                                                            # the update, the new weights
        await collector.acknowledge(groups)                          # prompts 0 and 1 are finished
        collector.free_slots(2)                                      # prompts 2 and 3 are drawn
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
        self.untaken: dict[int, UntakenGroup] = {}
        """By position, in the order in which the groups got their slots."""
        self._held: set[str] = set()
        """Ids of the groups that the trainer took and did not acknowledge yet."""
        self._changed = asyncio.Event()
        """Set when a slot is freed, or a group is graded or stored."""
        self.stored_groups = 0
        """Groups that were graded and stored since the start, of all updates."""
        self._free_slots = 0
        self._to_draw = 0
        """Groups that the run still wants; a retry or a replacement adds one."""
        self._expected_slots = 0
        self._ahead: list[_Drawn] = []
        """Prompts that were drawn for slots which are not free yet."""
        self._maker = GroupMaker(context, self.drops)
        # Groups that are ready at the same time are stored by one call.
        self._store_batched = RequestBatcher(
            self._store,
            _MAX_STORE,
            _weight,
            may_follow=partial(self._clock.is_active, "generation", "reward"),
        )

    async def run(self, groups: int, slots: int) -> None:
        """Collects `groups` groups in total, each in its own task, at most `slots` at once. Never
        returns; raises whatever stops the run.
        """
        self._to_draw = groups
        self.free_slots(slots)
        async with asyncio.TaskGroup() as tasks:
            if not self._config.environment.grades_itself:
                tasks.create_task(self._ground_truths.run())
            while True:
                await self._until(lambda: self._can_draw() or self._expected_slots > 0)
                if not self._can_draw():
                    # No slot is free yet: the prompts wait in `_ahead`. Nothing is drawn if enough
                    # are there.
                    count = min(self._expected_slots, self._to_draw, _MAX_DRAW) - len(self._ahead)
                    self._expected_slots = 0
                    self._ahead += await self._draw_next(count)
                    continue
                count = min(self._free_slots, self._to_draw, _MAX_DRAW)
                drawn = await self._draw(count)
                # Not before: during a draw `_can_draw` stays true, so that `_is_idle` is false.
                self._free_slots -= count
                self._to_draw -= count
                for each, tokenised in drawn:
                    untaken = UntakenGroup(each)
                    self.untaken[each.position] = untaken
                    tasks.create_task(self._collect(untaken, tokenised))
                self._changed.set()

    def free_slots(self, count: int) -> None:
        """Frees the slots of groups that were trained on."""
        self._free_slots += count
        self._changed.set()

    def expect_slots(self, count: int) -> None:
        """Draws the prompts for `count` slots that will soon be free, so that the data-server
        answers while the engines take new weights and not while they wait for requests.
        """
        self._expected_slots = count
        self._changed.set()

    async def _draw(self, count: int) -> list[_Drawn]:
        """Returns `count` prompts: retries first, then what was drawn ahead, then the next ones of
        the stream.
        """
        retries = self._tokenised(self._cursor.take_retries(count))
        ahead = self._ahead[: count - len(retries)]
        del self._ahead[: len(ahead)]
        return [*retries, *ahead, *await self._draw_next(count - len(retries) - len(ahead))]

    def _tokenised(self, drawn: Sequence[DrawnPrompt]) -> list[_Drawn]:
        if not drawn:
            return []
        tokenised = self._prompter.tokenised([each.prompt for each in drawn])
        return list(zip(drawn, tokenised, strict=True))

    async def _draw_next(self, count: int) -> list[_Drawn]:
        """Returns the next `count` prompts of the stream."""
        data = self._services.data
        drawn: list[DrawnPrompt] = []
        while (missing := count - len(drawn)) > 0:
            position = self._cursor.next
            # The data-server answers a repeated request with the same prompts.
            request_id = f"{self._run_id}-{position}-{missing}"
            batch = await data.prompts(missing, request_id)
            if batch.position != position:
                # Its cursor was lost with its disk, or another client drew from the stream.
                log.warning(
                    "setting the data-server back from position %d to %d", batch.position, position
                )
                await data.seek(position, f"{self._run_id}-back-{secrets.token_hex(4)}")
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
            for each in self._cursor.draw(batch.prompts, batch.total_available):
                if each.prompt.id in self._ground_truths.unsolvable:  # no answer is right
                    self._cursor.finish([each.position])
                    self.drops.counts["ground_truth"] += 1
                else:
                    drawn.append(each)
        return self._tokenised(drawn)

    async def _collect(self, untaken: UntakenGroup, tokenised: TokenisedPrompt) -> None:
        """Collects one group, from prompt to replay-buffer; when it fails, another group takes its
        slot.
        """
        drawn = untaken.drawn
        # The random part tells the tries of a position apart.
        group_id = f"{self._run_id}-{drawn.position}-{secrets.token_hex(4)}"
        group = self._maker.empty(drawn, tokenised.token_ids, group_id)
        with logs.request(group.id):  # every service adds this id to its log lines about the group
            try:
                await self._maker.fill(group, drawn.prompt, tokenised.answer_start)
                untaken.graded = group
                untaken.state = GroupState.STORING
                self._changed.set()
                with self._clock.stage("replay"):
                    await self._store_batched(group)
            except GroupFailed as error:
                self._drop(error, group)
                self._retry(drawn)
                self._collect_more(1)
            else:
                untaken.state = GroupState.WAITING
                self.stored_groups += 1
                self.drops.in_a_row = 0
                self._changed.set()

    async def _store(self, groups: list[Group]) -> list[None]:
        """Stores groups; returns one None for each, as `RequestBatcher` expects."""
        await self._services.replay.add([self._stored_form(group) for group in groups])
        return [None] * len(groups)

    def _stored_form(self, group: Group) -> Group:
        """Returns the group as it is stored: without the experts of its tokens, its largest part,
        unless groups are reused. A group's first use takes it from this process, not from the
        buffer.
        """
        if self._config.replay.reuse_ratio > 0 or not len(group.prompt_routed_experts):
            return group
        none: UInt8 = np.zeros(0, np.uint8)
        completions = [replace(each, routed_experts=none) for each in group.completions]
        return replace(group, prompt_routed_experts=none, completions=completions)

    def _drop(self, error: GroupFailed, group: Group) -> None:
        """Counts and logs a failed group. Raises CollectFailed after too many in a row."""
        self.drops.add([group], error.reason, error.detail)
        self.drops.in_a_row += 1
        facts = error.event()
        dropped = logs.event("group_dropped", prompt=group.prompt_id, **facts)
        log.warning("dropped the group of prompt %s: %s", group.prompt_id, error, extra=dropped)
        if self.drops.in_a_row >= self._config.limits.max_failed_groups:
            raise CollectFailed(
                f"{self.drops.in_a_row} groups in a row were dropped, the last one because of "
                f"{error}",
                field="limits.max_failed_groups",
                value=self._config.limits.max_failed_groups,
                remedy=_REMEDIES.get(error.reason, "look at the log above"),
                code="groups_dropped",
                about=facts,
            )

    def _retry(self, drawn: DrawnPrompt) -> None:
        """Schedules the prompt of a dropped group to be drawn again, before new ones, unless it
        failed too often.
        """
        is_tried_again = self._cursor.retry(drawn)
        if is_tried_again and self._config.reproducible:
            # It keeps its place: the time at which it failed does not decide its batch.
            self.untaken[drawn.position] = UntakenGroup(drawn, GroupState.DROPPED)
        else:
            self.untaken.pop(drawn.position, None)
        if not is_tried_again:
            log.warning(
                "prompt %s at %d is skipped after %d tries",
                drawn.prompt.id,
                drawn.position,
                MAX_TRIES,
            )

    def _collect_more(self, count: int) -> None:
        """Collects `count` more groups, in the slots of groups that will not be trained on."""
        self._to_draw += count
        self.free_slots(count)

    async def wait_for_oldest(self, count: int, wait_s: float) -> bool:
        """Waits up to `wait_s` until the oldest `count` groups are stored: of those that the
        trainer has not taken, the ones that got their slots first. Returns whether they are.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    self._changed.clear()
                    stored = [each.is_stored for each in self.untaken.values()]
                    if len(stored) >= count and all(stored[:count]):
                        return True
                    # Enough are stored for a batch, but one of the oldest is not.
                    waits_for_old = sum(stored) >= count
                    with self._clock.stage("stragglers") if waits_for_old else nullcontext():
                        await self._changed.wait()
        return False

    async def wait_for_graded(self, count: int, wait_s: float) -> list[Group]:
        """Waits up to `wait_s` until `count` groups are graded and none is on its way; returns
        them, or none.
        """
        is_known = await self._until(
            lambda: len(self._graded()) == len(self.untaken) == count, wait_s
        )
        return self._graded() if is_known else []

    async def wait_until_idle(self, wait_s: float) -> bool:
        """Waits up to `wait_s` until every group that has a slot is stored; returns whether they
        are. Nothing is generated then until another slot is free.
        """
        return await self._until(self._is_idle, wait_s)

    async def wait_until_sent(self, wait_s: float) -> None:
        """Waits up to `wait_s` until every free slot has a group whose request is on its way."""
        await self._until(lambda: not self._can_draw(), wait_s)
        # The tasks of these groups have begun; the client sends in tasks of its own.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _can_draw(self) -> bool:
        return self._free_slots > 0 and self._to_draw > 0

    def _is_idle(self) -> bool:
        return not self._can_draw() and all(
            each.state not in (GroupState.GENERATING, GroupState.STORING)
            for each in self.untaken.values()
        )

    async def _until(self, condition: Callable[[], bool], wait_s: float | None = None) -> bool:
        """Waits, up to `wait_s` seconds, until a change of a slot or a group makes the condition
        true; returns whether it is.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
                return True
        return False

    async def take(self, request: TakeRequest) -> list[Group]:
        """Takes groups for the trainer, in the order in which the replay-buffer hands them out;
        returns none if there are too few. The groups themselves are those that were stored.

        Groups that the buffer evicted as too old are dropped, and others are collected in their
        slots. Raises CollectFailed when a group comes a second time, was not stored by this run, or
        is too old.
        """
        taken = await self._services.replay.take(request)
        waiting = {group.id: group for group in self._graded()}
        groups: list[Group] = []
        # The buffer hands each group out once; these checks notice a store that was set back.
        for group_id in taken.ids:
            if group_id in self._held:
                raise _not_ours(group_id, "which it had handed out before")
            group = waiting.get(group_id)
            if group is None:
                raise _not_ours(
                    group_id,
                    "which does not wait to be trained on: this run has trained on it already, or "
                    "another program stored it",
                )
            if group.weight_version < request.min_version:
                raise _not_ours(
                    group_id,
                    f"whose weight version {group.weight_version} is older than version "
                    f"{request.min_version}",
                )
            groups.append(group)
            self._held.add(group_id)
            del self.untaken[group.position]
        if taken.evicted:
            self._drop_stale(request.min_version)
        return groups

    def _drop_stale(self, min_version: int) -> None:
        """Drops the groups that are older than `min_version`, which the replay-buffer evicts. The
        buffer's own count of evictions would be wrong here: a group that is still being stored is
        evicted later, and a late copy of a trained group is evicted too.
        """
        stale = [group for group in self._graded() if group.weight_version < min_version]
        self.drops.add(stale, "stale", f"its weights are older than version {min_version}")
        log.warning(
            "dropping the stale groups at the positions %s of the prompt stream",
            [group.position for group in stale],
        )
        for group in stale:
            self._retry(self.untaken[group.position].drawn)
        self._collect_more(len(stale))

    async def replace_equal(self, groups: Sequence[Group]) -> None:
        """Drops groups that were taken and have equal rewards; collects groups of other prompts."""
        self.drops.add(groups, "zero_variance", "all its rewards are equal")
        # First, so that they are not reused: what is acknowledged without a priority has the
        # largest.
        await self._services.replay.set_priorities({group.id: 0.0 for group in groups})
        await self.acknowledge(groups)
        self._collect_more(len(groups))

    async def acknowledge(self, groups: Sequence[Group]) -> None:
        """Tells the replay-buffer that groups are finished. Their prompts are never drawn again."""
        ids = [group.id for group in groups]
        await self._services.replay.ack(ids)
        self._held.difference_update(ids)
        self._cursor.finish([group.position for group in groups])

    async def store_lost(self) -> None:
        """Stores groups again that the replay-buffer lost before the trainer took them.

        Raises CollectFailed for groups that it would not take again because another client
        acknowledged them, and for lost ones that the trainer has taken: they could not be
        acknowledged.
        """
        groups = self._graded()
        # Dynamic sampling holds groups while it waits for others; the replay-buffer counts both.
        expected = len(groups) + len(self._held)
        if await self._unacknowledged() >= expected:
            return

        added = 0
        at_once = max(1, _MAX_STORE // max(map(_weight, groups), default=1))
        for begin in range(0, len(groups), at_once):
            added += await self._services.replay.add(
                [self._stored_form(each) for each in groups[begin : begin + at_once]]
            )
        if added:
            log.warning(
                "calls in the replay-buffer's log dropped %d groups: they are stored again",
                added,
            )

        lost = expected - await self._unacknowledged()
        if lost <= 0:
            return
        held = len(self._held) - (await self._services.replay.stats())["leased"]
        if held > 0:
            raise CollectFailed(
                f"the replay-buffer no longer has {held} groups that the trainer has taken: it "
                "lost its volume, or another client acknowledged or dropped them",
                field="leased",
                value=held,
                remedy="its log says which; start the run again, which collects them again",
            )
        raise CollectFailed(
            f"{lost} groups were acknowledged or dropped in the replay-buffer by another "
            "client before they were trained on",
            field="/groups/ack",
            value=lost,
            remedy="the log of replay-buffer names the client: stop it and restart the run to "
            "collect them again",
        )

    def _graded(self) -> list[Group]:
        """Returns the groups that are stored or being stored and that the trainer has not taken."""
        return [each.graded for each in self.untaken.values() if each.graded is not None]

    async def _unacknowledged(self) -> int:
        stats = await self._services.replay.stats()
        return int(stats["fresh"] + stats["leased"])
