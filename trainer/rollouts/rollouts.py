"""The training loop's interface to rollouts: the next groups, their acknowledgement, the release of
their slots.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial

from common.errors import ConfigError, ServiceError
from common.process import watchdog
from common.process.logs import SHOWN
from common.process.loop_thread import LoopThread
from common.prompts.prompter import Prompter
from common.settings.config import Config
from common.settings.sections import RewardSection
from common.wire.codec import decode_groups, encode_groups
from common.wire.schemas import Group, TakeRequest
from learning.ranks import Ranks
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.rollouts.collector import MAX_STORE, CollectFailed, Collector, Drops
from trainer.rollouts.priorities import load_priority, reuse_request
from trainer.rollouts.prompt_cursor import PromptCursor, PromptProgress
from trainer.rollouts.requests import GeneratedAnswer, reward_items
from trainer.rollouts.services import Services
from trainer.timing import StageClock

log = logging.getLogger(__name__)
_SAY_EVERY_S = 30.0


class Rollouts:
    """The rollouts of a rank above 0: rank 0 does the work and shares the groups."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.drops = Drops()

    @property
    def progress(self) -> PromptProgress:
        """The progress from which the run would resume now; only rank 0 knows it."""
        return PromptProgress()

    def prepare(self, step: int, known: bool) -> int:
        """Sets the services to the position where the run continues; returns its total steps. A
        collective.

        Args:
            step: the policy's step.
            known: whether the experience in the replay buffer belongs to this run, from an earlier
            attempt.
        """
        return int(self._ranks.broadcast(b""))

    @contextmanager
    def collecting(self, step: int, total_steps: int) -> Iterator[None]:
        """Collects groups inside the block."""
        yield

    def next(self, step: int) -> list[TrainingGroup]:
        """Returns the groups of the next batch: fresh ones, then reused ones
        (`replay.reuse_ratio`). A collective.
        """
        return _decode(self._ranks.broadcast(b""))

    def start_ack(self, batch: Batch) -> Callable[[], None]:
        """Starts to acknowledge the groups of `batch`; the returned function waits for the end."""
        return lambda: None

    def release(self, batch: Batch, served: "Future[None]") -> None:
        """Frees the slots of the fresh groups once the new weights are `served`; a failure stops
        the run.
        """


class LeaderRollouts(Rollouts):
    """Rank 0's rollouts, which use the services and continue from `progress`.

    `run_id` makes request ids unique to this attempt; `vocabulary` is the size of the model's
    vocabulary.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        services: Services,
        prompter: Prompter,
        clock: StageClock,
        loop: LoopThread,
        run_id: str,
        progress: PromptProgress,
        vocabulary: int = 2**31,
    ) -> None:
        super().__init__(ranks)
        self._config, self._services, self._clock, self._loop, self._run_id = (
            config,
            services,
            clock,
            loop,
            run_id,
        )
        self._cursor, self._vocabulary = PromptCursor(progress), vocabulary
        self._collector = Collector(config, services, prompter, clock, run_id, self._cursor)
        self.drops = self._collector.drops
        self._priority = load_priority(config.replay.priority)
        self._fresh_per_step = config.trainer.batch_size - int(
            config.trainer.batch_size * config.replay.reuse_ratio
        )
        self._total_steps = 1
        self._batches = self._requests = 0
        self._held: set[str] = set()  # groups that were taken but not acknowledged yet
        self._failure: BaseException | None = None  # raised by `next`

    @property
    def progress(self) -> PromptProgress:
        async def read() -> PromptProgress:
            return self._cursor.progress

        return self._loop.call(read())

    def prepare(self, step: int, known: bool) -> int:
        """See `Rollouts`. Raises ConfigError for too little data, or when another run's experience
        would be reused.
        """
        settings, replay = self._config.trainer, self._services.replay
        prompts = self._loop.call(self._services.data.total()) * settings.num_epochs
        self._total_steps = settings.max_steps or prompts // self._fresh_per_step
        if self._total_steps == 0:
            raise ConfigError(
                f"{prompts} prompts over all epochs are too few for one batch",
                field="trainer.batch_size",
                value=settings.batch_size,
                remedy="lower it, raise trainer.num_epochs, or set trainer.max_steps",
            )
        reuses, position = self._config.replay.reuse_ratio > 0, self._cursor.progress.position
        stats = self._loop.call(replay.stats())
        stored = 0 if known else stats["groups"]
        if stats["added"] < step * self._fresh_per_step:
            log.warning(
                "warning: the replay-buffer has stored %d groups since it was made, and this run trained on %d: %s was removed "
                "or replaced; training continues%s",
                stats["added"],
                step * self._fresh_per_step,
                self._config.state_dir / "replay",
                ", and reuse starts with an empty buffer"
                if reuses
                else ", and nothing that is still needed is lost",
                extra=SHOWN,
            )
        if stored and reuses:
            raise ConfigError(
                f"the replay-buffer holds {stored} groups of another run, which this run would reuse",
                field="state_dir",
                value=str(self._config.state_dir),
                remedy="empty it with POST /clear, give this run its own state_dir, or set replay.reuse_ratio 0",
            )
        # Steps after the checkpoint are lost: reuse would see their prompts twice, and experience
        # of lost weights.
        dropped = self._loop.call(replay.reset_fresh(*((position, step) if reuses else ())))
        if dropped:
            log.info(
                "dropped %d groups of an earlier attempt; their prompts are drawn again", dropped
            )
        if not known:
            self._loop.call(self._try_rewards())
        self._loop.call(self._services.data.seek(position))
        return int(self._ranks.broadcast(str(self._total_steps).encode()))

    async def _try_rewards(self) -> None:
        """Grades made-up answers to one problem. Raises ConfigError when a reward function fails
        for all of them.

        Otherwise a broken function would fail for every group, long after the start. A missing
        reward without a reason is not the function's fault: a judge cannot be reached, or a sandbox
        is busy. Nor is a problem that no function grades.
        """
        prompt = (await self._services.data.prompts(1, f"{self._run_id}-trial")).prompts[0]
        answers = [GeneratedAnswer(prompt.ground_truth or "0", "stop", None, [0])] * 2
        reward = self._services.reward
        try:
            results = (
                await reward.batch_reward(reward_items(prompt, answers, reward.gets_tokens))
            ).rewards
        except (
            ServiceError
        ) as error:  # it concerns this problem only, whose group will be dropped and counted
            log.warning("the reward functions could not be tried: %s", error)
            return
        failed = (
            result.reward is None and result.reason and result.status != "inapplicable"
            for result in results
        )
        if all(failed):
            raise no_reward(results[0].reason, self._config.reward)

    @contextmanager
    def collecting(self, step: int, total_steps: int) -> Iterator[None]:
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
        except (
            SystemExit,
            KeyboardInterrupt,
        ) as ending:  # of a caller's function: `next` would wait for groups
            reason = f"collecting was ended by {type(ending).__name__}: {ending}"
            self._failure = self._failure or CollectFailed(reason, remedy="see the log above")

    def next(self, step: int) -> list[TrainingGroup]:
        """See `Rollouts`. Raises CollectFailed when collecting stopped or no batch came in
        `trainer.wait_timeout_s`.
        """
        self._batches += 1
        settings = self._config.trainer
        drops = settings.when_stale == "drop" or not settings.max_staleness
        groups = [
            TrainingGroup(group)
            for group in self._fresh(max(0, step - settings.max_staleness) if drops else 0)
        ]
        if reuse := self._config.trainer.batch_size - len(groups):
            groups += self._reused(reuse, step)
        for item in groups:
            self._check_tokens(item.group)
        if self._ranks.world_size > 1:
            self._ranks.broadcast(_encode(groups))
        return groups

    def _check_tokens(self, group: Group) -> None:
        """Raises CollectFailed for tokens outside the vocabulary, which would cause an IndexError
        in the update.
        """
        lists = {"prompt_token_ids": group.prompt_token_ids}
        for i, completion in enumerate(group.completions):
            lists |= {
                f"completions[{i}].{name}": getattr(completion, name)
                for name in ("token_ids", "kept_tokens")
            }
            if completion.prompt_ids is not None:
                lists[f"completions[{i}].prompt_ids"] = completion.prompt_ids
        for name, ids in lists.items():
            if (
                len(ids)
                and not 0
                <= (wrong := int(ids.min() if ids.min() < 0 else ids.max()))
                < self._vocabulary
            ):
                raise CollectFailed(
                    f"group {group.id} has a token that is not in the model's vocabulary of {self._vocabulary}",
                    field=name,
                    value=wrong,
                    remedy="find out who added that group: the engines serve another model, or another program uses the "
                    "replay-buffer; a restarted run drops the groups that it has not trained on",
                )

    def _fresh(self, min_version: int) -> list[Group]:
        """Takes fresh groups; with dynamic sampling only ones of differing rewards (DAPO,
        arXiv:2503.14476, 3.2).
        """
        algorithm, count = self._config.algorithm, self._fresh_per_step
        groups = self._take(count, min_version)
        if not algorithm.dynamic_sampling:
            return groups
        for _ in range(algorithm.dynamic_sampling_rounds):
            groups, equal = (
                [g for g in groups if not g.zero_variance],
                [g for g in groups if g.zero_variance],
            )
            if not equal:
                return groups
            self._loop.call(self._replace(equal))
            groups += self._take(len(equal), min_version)
        raise CollectFailed(
            f"{algorithm.dynamic_sampling_rounds} rounds of dynamic sampling left groups of equal rewards in the batch",
            field="algorithm.dynamic_sampling_rounds",
            value=algorithm.dynamic_sampling_rounds,
            remedy="the prompts are too easy or too hard for the model: use others, or turn algorithm.dynamic_sampling off",
        )

    def _take(self, count: int, min_version: int) -> list[Group]:
        """Takes the next `count` fresh groups, none older than `min_version`, in the order of their
        prompts.
        """
        settings = self._config.trainer
        limit, in_order = (
            settings.wait_timeout_s,
            settings.max_staleness > 0 and settings.when_stale == "wait",
        )
        start = said = time.monotonic()
        while (now := time.monotonic()) - start < limit:
            if now - said > _SAY_EVERY_S:
                calls, active = (
                    "; ".join(watchdog.awaited()) or "no call is in flight",
                    self._clock.active(),
                )
                log.warning(
                    "waiting for %.0f s for %d groups; active now: %s; %s",
                    now - start,
                    count,
                    active,
                    calls,
                )
                said = now
                self._loop.call(self._store_lost())
            if self._failure is not None:
                raise self._failure
            if in_order and not self._loop.call(self._collector.oldest_stored(count, 1.0)):
                continue
            self._requests += 1
            # a new one each time: evictions are reported once
            request_id = f"{self._run_id}-take-{self._requests}"
            request = TakeRequest(
                count=count,
                min_version=min_version,
                wait_s=1.0,
                request_id=request_id,
                run_id=self._run_id,
            )
            if groups := self._loop.call(self._take_now(request)):
                return sorted(groups, key=lambda group: group.position)
        message = f"no batch of {count} groups within {limit:.0f} s"
        watchdog.deadline_passed(message)
        raise CollectFailed(
            message,
            field="trainer.wait_timeout_s",
            value=limit,
            remedy="look at the logs of rollout-server and reward-server, or raise the limit",
        )

    async def _store_lost(self) -> None:
        """Stores groups again that the replay-buffer lost before they were trained on.

        Raises CollectFailed when another client acknowledged some: the replay-buffer considers
        these trained on.
        """
        replay, waiting = (
            self._services.replay,
            [group for group, _ in self._collector.waiting.values()],
        )
        if await self._unacknowledged() >= len(waiting):
            return
        added = 0
        for begin in range(0, len(waiting), MAX_STORE):
            added += await replay.add(waiting[begin : begin + MAX_STORE])
        if added:
            log.warning(
                "%d groups were dropped from the replay-buffer, by the calls in its log: they are stored again",
                added,
            )
        if lost := max(0, len(waiting) - await self._unacknowledged()):
            raise CollectFailed(
                f"{lost} groups were acknowledged in the replay-buffer by another client before they were trained on",
                field="/groups/ack",
                value=lost,
                remedy="the log of replay-buffer names the client: stop it and restart the run to collect them again",
            )

    async def _unacknowledged(self) -> int:
        stats = await self._services.replay.stats()
        return int(stats["fresh"] + stats["leased"])

    async def _take_now(self, request: TakeRequest) -> list[Group]:
        taken = await self._services.replay.take(request)
        waiting = self._collector.waiting
        for group in taken.groups:
            if group.id in self._held:
                raise CollectFailed(
                    "a group was delivered twice: its lease ended before it was trained on",
                    field="replay.lease_s",
                    value=self._config.replay.lease_s,
                    remedy="raise it above the longest time from the delivery of a batch to the end of its update",
                )
            self._held.add(group.id)
            self._collector.taken(group.position)
        if taken.evicted:
            stale = [
                (group, drawn)
                for group, drawn in waiting.values()
                if group.weight_version < request.min_version
            ]
            self.drops.add(
                [group for group, _ in stale],
                "stale",
                f"its weights are older than version {request.min_version}",
            )
            self.drops.counts["stale"] += taken.evicted - len(stale)
            log.warning(
                "dropping the stale groups at %s of the prompt stream",
                [drawn.position for _, drawn in stale],
            )
            self._collector.retry([drawn for _, drawn in stale])
            self._collector.replace(taken.evicted)
        return taken.groups

    async def _replace(self, groups: list[Group]) -> None:
        """Drops groups of equal rewards, and replaces them by groups of other prompts."""
        self.drops.add(groups, "zero_variance", "all its rewards are equal")
        await self._acknowledge(groups)
        self._collector.replace(len(groups))

    async def _acknowledge(self, groups: Sequence[Group]) -> None:
        ids = [group.id for group in groups]
        await self._services.replay.ack(ids)
        self._held.difference_update(ids)
        self._cursor.finish([group.position for group in groups])

    def _reused(self, count: int, step: int) -> list[TrainingGroup]:
        """Samples up to `count` earlier groups by priority, with importance weights
        (arXiv:1511.05952).
        """
        request_id = f"{self._run_id}-sample-{self._batches}"
        request = reuse_request(self._config, count, step, self._total_steps, request_id)
        with self._clock.stage("replay"):
            sampled = self._loop.call(self._services.replay.sample(request))
        weights = (
            sampled.weights.tolist()
            if self._config.replay.corrected
            else [1.0] * len(sampled.groups)
        )
        return [
            TrainingGroup(group, weight, reused=True)
            for group, weight in zip(sampled.groups, weights, strict=True)
        ]

    def start_ack(self, batch: Batch) -> Callable[[], None]:
        """See `Rollouts`. Also sets the priorities for reuse, and reports pass rates to a
        curriculum.
        """
        columns = zip(batch.groups, batch.mean_advantages(), strict=True)
        priorities = {item.group.id: self._priority(item.group, means) for item, means in columns}
        return self._loop.begin(
            self._finish(batch.fresh, priorities, f"{self._run_id}-pass-rates-{self._batches}")
        )

    async def _finish(
        self, fresh: list[Group], priorities: dict[str, float], request_id: str
    ) -> None:
        with self._clock.stage("replay"):
            await self._acknowledge(fresh)
            await self._services.replay.set_priorities(priorities)
        if self._config.data.curriculum != "none":
            rates = [
                sum(answer.correct for answer in group.answers) / len(group.answers)
                for group in fresh
            ]
            await self._services.data.report_pass_rates(
                [group.prompt_id for group in fresh], rates, request_id
            )

    def release(self, batch: Batch, served: "Future[None]") -> None:
        served.add_done_callback(partial(self._released, len(batch.fresh)))

    def _released(self, count: int, served: "Future[None]") -> None:
        if (error := served.exception()) is not None:
            self._failure = self._failure or error
            return
        with suppress(RuntimeError):  # the run has ended and closed its loop
            self._loop.loop.call_soon_threadsafe(self._collector.free, count)


def no_reward(reason: str, settings: RewardSection) -> ConfigError:
    """Returns the error for reward functions that fail for a first answer; `reason` names function
    and failure.
    """
    if "no answer within" not in reason:
        message = f"the reward functions gave no reward for a first answer: {reason}"
        return ConfigError(
            message, field="reward.functions", remedy="correct the function, and test it by itself"
        )
    if reason.startswith("reward_model: ") and settings.reward_model_name:
        field, value = "reward.reward_model_max_tokens", str(settings.reward_model_max_tokens)
        remedy = "give the reward-server a GPU or a smaller reward.reward_model_name, or lower this setting"
    else:
        field, value = "reward.function_timeout_s", str(settings.function_timeout_s)
        remedy = "make it faster, or raise this setting (in the Python API an item of TrainerConfig.settings)"
    return ConfigError(reason, field=field, value=value, remedy=remedy)


def _encode(groups: Sequence[TrainingGroup]) -> bytes:
    head = json.dumps([[item.weight, item.reused] for item in groups]).encode()
    return len(head).to_bytes(8, "little") + head + encode_groups([item.group for item in groups])


def _decode(body: bytes) -> list[TrainingGroup]:
    size = 8 + int.from_bytes(body[:8], "little")
    columns = zip(decode_groups(body[size:]), json.loads(body[8:size]), strict=True)
    return [TrainingGroup(group, *about) for group, about in columns]
