"""The training loop's interface to rollouts: the next groups, their acknowledgement, the freeing
of their slots.

The collector owns the groups, in the event loop of the clients; the classes here are its side in
the training thread, which waits for batches.
"""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np

from common.process import progress, watchdog
from common.process.loop_thread import LoopThread
from common.process.progress import Progress
from common.wire.schemas import Group, TakeRequest
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.algorithms.spool import EXPERTS, spool
from trainer.rollouts.collector import CollectFailed, Collector
from trainer.rollouts.ground_truths import GroundTruthCheck
from trainer.rollouts.priorities import load_priority, reuse_request
from trainer.rollouts.prompt_cursor import PromptCursor, PromptProgress
from trainer.rollouts.services import RolloutContext
from trainer.rollouts.start import begin

log = logging.getLogger(__name__)
_SAY_EVERY_S = 30.0
_FIRST_TAKE_S = 1.0
"""How long the replay-buffer may wait for the groups that the update already has."""
# The caller of `free_slots` waits at most this long for the next requests.
_SEND_S = 0.02


class Rollouts:
    """The rollouts of a run, which continue from `progress`. Only rank 0 has them.

    `vocabulary` is the size of the model's vocabulary.
    """

    def __init__(
        self,
        context: RolloutContext,
        loop: LoopThread,
        *,
        progress: PromptProgress,
        ground_truths: GroundTruthCheck,
        vocabulary: int = 2**31,
    ) -> None:
        config = context.config
        self._context = context
        self._config = config
        self._services = context.services
        self._clock = context.clock
        self._loop = loop
        self._run_id = context.run_id
        self._vocabulary = vocabulary
        self._cursor = PromptCursor(progress)
        self._collector = Collector(context, self._cursor, ground_truths)
        self.drops = self._collector.drops
        self._priority = load_priority(config.replay.priority)
        batch_size = config.trainer.batch_size
        # The others are prioritised reuse.
        self._fresh_per_step = batch_size - int(batch_size * config.replay.reuse_ratio)
        self._total_steps = 1
        self._batches = 0
        self._requests = 0
        self._failure: BaseException | None = None  # raised by `next`
        self._confirm: Callable[[], object] = lambda: None
        """Returns when the replay-buffer has handed out the groups of `next`."""
        self._finish_acknowledging: Callable[[], None] = lambda: None

    @property
    def progress(self) -> PromptProgress:
        """The progress from which the run would resume now."""

        async def read() -> PromptProgress:
            return self._cursor.progress

        return self._loop.call(read())

    def prepare(self, step: int, known: bool) -> int:
        """Sets the services to the position where the run continues; returns its total steps.

        Args:
            step: the policy's step.
            known: whether the experience in the replay-buffer belongs to this run, from an earlier
                attempt.

        Raises ConfigError for too little data, for another run's experience that would be reused,
        and for a reward function that fails.
        """
        position = self._cursor.progress.position
        self._total_steps = self._loop.call(
            begin(self._context, self._fresh_per_step, step, position, known=known)
        )
        return self._total_steps

    def wait_until_idle(self) -> None:
        """Returns when nothing is generated for training until another slot is freed. Called from
        any thread; raises what stopped the collecting.
        """
        while not self._loop.call(self._collector.wait_until_idle(1.0)):
            if self._failure is not None:
                raise self._failure

    @contextmanager
    def collecting(self, step: int, total_steps: int) -> Iterator[None]:
        """Collects groups inside the block."""
        # Not more groups than the run can still train on.
        groups = (total_steps - step) * self._fresh_per_step
        slots = min(groups, (self._config.trainer.max_staleness + 1) * self._fresh_per_step)
        task = self._loop.start(self._collect(groups, slots))
        try:
            yield
        finally:
            self._loop.cancel(task)

    async def _collect(self, groups: int, slots: int) -> None:
        try:
            await self._collector.run(groups, slots)
        except BaseExceptionGroup as group:
            self._failure = self._failure or group.exceptions[0]
        except (SystemExit, KeyboardInterrupt) as ending:
            # Raised by a caller's function: without a failure, `next` would wait for groups.
            reason = f"collecting was ended by {type(ending).__name__}: {ending}"
            self._failure = self._failure or CollectFailed(reason, remedy="see the log above")

    def next(self, step: int) -> list[TrainingGroup]:
        """Returns the groups of the next batch: fresh ones, then reused ones
        (`replay.reuse_ratio`).

        Raises CollectFailed when collecting stopped or no group was graded for
        `limits.stuck_after_s`.
        """
        self._batches += 1
        settings = self._config.trainer
        # With `wait`, slots bound the age; a group that is older nevertheless was lost on its way.
        trains_stale = settings.when_stale == "train" and settings.max_staleness > 0
        min_version = 0 if trains_stale else max(0, step - settings.max_staleness)

        groups = [TrainingGroup(group) for group in self._fresh(min_version)]
        # The rest of the batch is prioritised reuse.
        if len(groups) < settings.batch_size:
            groups += self._reused(settings.batch_size - len(groups), step)
        for item in groups:
            self._check_tokens(item.group)
        return groups

    def _fresh(self, min_version: int) -> list[Group]:
        """Takes fresh groups; with dynamic sampling only ones of differing rewards (DAPO,
        arXiv:2503.14476, 3.2).
        """
        algorithm = self._config.algorithm
        count = self._fresh_per_step
        if self._config.trainer.max_staleness == 0 and not algorithm.dynamic_sampling:
            return self._take_ahead(count, min_version)
        groups = self._take(count, min_version)
        if not algorithm.dynamic_sampling:
            return groups

        rounds = algorithm.dynamic_sampling_rounds
        for left in reversed(range(rounds + 1)):
            # Equal rewards have advantages of 0: such a group teaches nothing.
            equal = [group for group in groups if group.zero_variance]
            if not equal:
                return groups
            if left:
                groups = [group for group in groups if not group.zero_variance]
                self._loop.call(self._collector.replace_equal(equal))
                groups += self._take(len(equal), min_version)
        raise CollectFailed(
            f"{rounds} rounds of dynamic sampling left groups of equal rewards in the batch",
            code="equal_rewards",
            field="algorithm.dynamic_sampling_rounds",
            value=rounds,
            remedy="the prompts are too easy or too hard for the model: use others, or turn "
            "algorithm.dynamic_sampling off",
        )

    def _take_ahead(self, count: int, min_version: int) -> list[Group]:
        """Returns the next `count` fresh groups as soon as they are graded. Without staleness they
        are the only groups in the slots, so that the replay-buffer will hand out the same. It
        stores them and hands them out while the update is computed; `start_acknowledging` waits
        for that, before anything else learns of the update.
        """
        graded = self._patiently(
            count, lambda wait_s: self._loop.call(self._collector.wait_for_graded(count, wait_s))
        )
        if any(group.weight_version < min_version for group in graded):
            return self._take(count, min_version)  # which drops them

        taken = self._begin_take(count, min_version, _FIRST_TAKE_S)
        # They are the same: `Collector.take` refuses all that are not graded and untaken.
        self._confirm = lambda: taken() or self._take(count, min_version)
        return graded

    def _take(self, count: int, min_version: int) -> list[Group]:
        """Takes the next `count` fresh groups, none older than `min_version`."""
        settings = self._config.trainer
        in_order = settings.max_staleness > 0 and settings.when_stale == "wait"

        def take(wait_s: float) -> list[Group]:
            if in_order and not self._loop.call(self._collector.wait_for_oldest(count, wait_s)):
                return []
            return self._begin_take(count, min_version, wait_s)()

        return self._patiently(count, take)

    def _begin_take(self, count: int, min_version: int, wait_s: float) -> Callable[[], list[Group]]:
        """Begins to take groups. Returns a function that waits for them: none if there are too
        few.
        """
        # A new id each time: evictions are reported once.
        self._requests += 1
        request = TakeRequest(
            count=count,
            min_version=min_version,
            wait_s=wait_s,
            request_id=f"{self._run_id}-take-{self._requests}",
            ids_only=True,
            run_id=self._run_id,
        )
        return self._loop.begin(self._collector.take(request))

    def _patiently(self, count: int, attempt: Callable[[float], list[Group]]) -> list[Group]:
        """Calls `attempt` until it returns `count` groups, and returns these in the order of their
        prompts. Each time `attempt` gets the seconds that it may wait. Raises CollectFailed when
        nothing makes progress.
        """
        limit_s = self._config.limits.stuck_after_s
        waits = Progress(f"a batch of {count} groups", limit_s)
        first = self._collector.stored_groups
        told = time.monotonic()
        while not waits.is_stuck:
            stored = self._collector.stored_groups - first
            # Engines and graders that get on with a group count, too: one may take longer.
            waits.saw(stored + progress.of_others(), f"{stored} groups were graded")
            now = time.monotonic()
            if now - told > _SAY_EVERY_S:
                log.warning(
                    "waiting for %.0f s for %d groups; active now: %s; %s",
                    waits.waited_s,
                    count,
                    self._clock.active(),
                    "; ".join(watchdog.awaited()) or "no call is in flight",
                )
                told = now
                self._loop.call(self._collector.store_lost())
            if self._failure is not None:
                raise self._failure
            groups = attempt(waits.pause_s)
            if groups:
                return sorted(groups, key=lambda group: group.position)

        message = f"no progress for {limit_s:g} s of waiting for {waits}"
        watchdog.deadline_passed(message)
        raise CollectFailed(
            message,
            code="no_batch",
            field="limits.stuck_after_s",
            value=limit_s,
            remedy="look at the logs of rollout-server and reward-server, or raise the limit",
        )

    def _reused(self, count: int, step: int) -> list[TrainingGroup]:
        """Samples up to `count` earlier groups by priority, with importance weights
        (arXiv:1511.05952).
        """
        request = reuse_request(
            self._config,
            count,
            step,
            total_steps=self._total_steps,
            request_id=f"{self._run_id}-sample-{self._batches}",
        )
        with self._clock.stage("replay"):
            sampled = self._loop.call(self._services.replay.sample(request))
        if self._config.trainer.routing_replay:
            for group in sampled.groups:
                spool(group, self._config.state_dir / EXPERTS)
        return [
            TrainingGroup(group, weight, reused=True)
            for group, weight in zip(sampled.groups, sampled.weights.tolist(), strict=True)
        ]

    def _check_tokens(self, group: Group) -> None:
        """Raises CollectFailed for tokens outside the vocabulary, which would cause an IndexError
        in the update.
        """
        lists = [group.prompt_token_ids]
        for completion in group.completions:
            lists += [completion.token_ids, completion.kept_tokens]
            if completion.prompt_ids is not None:
                lists.append(completion.prompt_ids)
        token_ids = np.concatenate(lists)
        unknown = token_ids[(token_ids < 0) | (token_ids >= self._vocabulary)]
        if len(unknown):
            raise CollectFailed(
                f"group {group.id} has a token that is not in the model's vocabulary of "
                f"{self._vocabulary}",
                field="token_ids",
                value=int(unknown[0]),
                remedy="find out who added that group: the engines serve another model, or another "
                "program uses the replay-buffer; a restarted run drops the groups that it has not "
                "trained on",
            )

    def start_acknowledging(self, batch: Batch) -> None:
        """Starts to acknowledge the groups of `batch`, to set their priorities for reuse, and to
        report pass rates to a curriculum. `free_slots` waits for the end.

        Raises what `next` raises when the replay-buffer does not hand out its groups.
        """
        self._confirm()
        self._confirm = lambda: None
        priorities = {
            item.group.id: self._priority(item.group, advantages)
            for item, advantages in zip(batch.groups, batch.mean_advantages(), strict=True)
            # Without reuse nothing is drawn by priority, and storing them is a further commit.
            if self._config.replay.reuse_ratio
        }
        self._finish_acknowledging = self._loop.begin(
            self._finish(batch, priorities, self._batches)
        )

    async def _finish(self, batch: Batch, priorities: dict[str, float], number: int) -> None:
        fresh = batch.fresh
        has_curriculum = self._config.data.curriculum != "none"
        if not has_curriculum:
            # The next prompts do not depend on this batch: they come while its groups are
            # acknowledged, which may take longer than the engines need for the new weights.
            self._collector.expect_slots(len(fresh))

        with self._clock.stage("replay"):
            await self._collector.acknowledge(fresh)
            if priorities:
                await self._services.replay.set_priorities(
                    priorities, f"{self._run_id}-batch-{number}"
                )

        if has_curriculum:
            await self._services.data.report_pass_rates(
                [group.prompt_id for group in fresh],
                batch.pass_rates[: len(fresh)],  # the fresh groups come first
                f"{self._run_id}-pass-rates-{number}",
            )
            self._collector.expect_slots(len(fresh))

    def free_slots(self, batch: Batch, *, when: "Future[None]") -> None:
        """Frees the slots of the batch's fresh groups as soon as `when` is done: when the engines
        serve the weights that the batch trained. Does not wait for `when`, whose failure stops the
        run. Raises ServiceError when the groups could not be acknowledged.
        """
        self._finish_acknowledging()
        when.add_done_callback(partial(self._free_slots, len(batch.fresh)))
        if when.done():
            # The engines wait for requests, and what the caller does next would take Python's lock
            # from the thread that sends them.
            self._loop.call(self._collector.wait_until_sent(_SEND_S))

    def _free_slots(self, count: int, served: "Future[None]") -> None:
        error = served.exception()
        if error is not None:
            self._failure = self._failure or error
            return
        with suppress(RuntimeError):  # the run has ended and closed its loop
            self._loop.loop.call_soon_threadsafe(self._collector.free_slots, count)
