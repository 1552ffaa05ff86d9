"""The replay buffer: a queue of fresh groups and prioritised reuse of consumed ones, over the durable store.

    add ──► fresh ──take──► leased ──ack──► consumed ──sample──► (again and again, by priority)
              ▲ ▲               │
      evicted │ └─lease expired─┘          the oldest consumed leave when capacity is reached

Groups travel as the msgpack bytes they are stored as. Everything here is synchronous and belongs to one thread
(`services.replay.worker`).
"""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Raw

from common import wire
from common.errors import InvalidInput, TooLarge
from common.schemas import Float32, Group, PriorityUpdate, SampleRequest, TakeRequest
from common.sections import ReplaySection
from common.storing import StorageFailed
from services.replay import sampling
from services.replay.store import Added, GroupRow, Store, Taken

log = logging.getLogger(__name__)
MAX_REWARD = float(np.finfo(np.float32).max)
"""Rewards are float32 from here on; a sum of any number of them is finite."""
_LOWEST_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Experience:
    """One answer without tokens, as the ancestor's clients know it: for reading, never for training."""

    prompt: str
    response: str
    reward: float
    ground_truth: str | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Groups as they were stored, and the importance weight of each."""

    blobs: list[bytes]
    weights: Float32


def pack_group(group: Group) -> bytes:
    """One group as its own msgpack document; `join` puts several into one answer without decoding them."""
    return wire.encode(group)


def join(blobs: list[bytes], **extra: object) -> bytes:
    """What `wire.encode_groups(groups, **extra)` gives, from packed groups."""
    return wire.encode({"groups": [Raw(blob) for blob in blobs], **extra})


def unpack_groups(blobs: list[bytes]) -> list[Group]:
    return wire.decode_groups(join(blobs))


class ReplayBuffer:
    """The buffer over the file `path`.

    Args:
        config: capacity and length of leases.
        path: of the file.
        clock: seconds that never jump, from any beginning.

    Raises ConfigError when the file cannot be used.
    """

    def __init__(self, config: ReplaySection, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity, self.lease_s, self.clock = config.capacity, config.lease_s, clock
        self.store = Store(path)
        # Seconds of another process mean nothing here, and the wall clock may jump: who held a lease has all of it again.
        self.store.renew_leases(self.clock() + self.lease_s)
        self._index = sampling.ReuseIndex(self.store.consumed_rows())

    def close(self) -> None:
        """Writes everything into the one file and closes it; what has no room there stays in the log beside it."""
        try:
            self.store.checkpoint()
        except StorageFailed as error:
            log.error("nothing is lost, keep both files: %s", error)
        finally:
            self.store.close()

    def flush(self) -> None:
        self.store.checkpoint()

    # ------------------------------------------------------------ the queue

    def add(self, groups: list[Group]) -> Added:
        """Stores groups; durable when this returns. A known id changes nothing and is counted.

        Raises InvalidInput for what cannot be stored, TooLarge for more than capacity, Full when there is no room now.
        """
        if not groups:
            raise InvalidInput("there are no groups", field="groups", value="[]", remedy="send at least one")
        self._check_size(sum(len(group.completions) for group in groups), "groups")
        rows = [_row(group, f"groups[{i}]") for i, group in enumerate(groups)]
        added = self.store.add(rows, self.capacity)
        self._index.drop_until(added.removed_until)
        return added

    def take(self, request: TakeRequest) -> Taken | None:
        """`count` fresh groups by (weight version, position, id), leased for `lease_s`; None when fewer are there.

        A retry with the same request id gets the same groups. Fresh groups older than `min_version` are evicted.
        """
        if request.count > self.capacity:
            raise InvalidInput(
                f"the buffer holds {self.capacity} completions, so it never has this many groups",
                field="count",
                value=request.count,
                remedy="take fewer at once, or raise replay.capacity",
            )
        return self.store.take(request, self.clock(), self.lease_s)

    def end_take(self, request_id: str) -> Taken:
        """The answer to a request that waited in vain."""
        return Taken([], self.store.evicted_for(request_id))

    def next_expiry_s(self) -> float | None:
        """Seconds until the first lease ends."""
        until = self.store.next_expiry()
        return None if until is None else max(0.0, until - self.clock())

    def ack(self, ids: list[str]) -> int:
        """These were trained on; they enter the reuse side with the largest priority seen. Returns how many are new there.

        Raises NotFound naming an unknown id.
        """
        consumed = self.store.ack(ids)
        self._index.append(consumed)
        return len(consumed)

    def reset_fresh(self, from_position: int | None = None) -> int:
        """Drops every group that is not consumed, and every one from `from_position` of the prompt stream on; how many."""
        dropped = self.store.reset_fresh(from_position)
        self._index = sampling.ReuseIndex(self.store.consumed_rows())
        return dropped

    # ------------------------------------------------------------ reuse

    def sample(self, request: SampleRequest) -> Sampled:
        """Different consumed groups by priority (`services.replay.sampling`), each with its importance weight.

        Fewer than `count`, possibly none, when fewer may be reused. A retry with the same request id gets the same groups.
        """
        if request.request_id is not None and (before := self.store.reused_for(request.request_id)) is not None:
            return Sampled(before[0], np.array(before[1], np.float32))
        eligible = self._index.eligible(request.min_version, request.max_times_sampled)
        chances = sampling.probabilities(self._index.rows["priority"][eligible], request.priority_exponent)
        included = sampling.inclusion(chances, request.count)
        chosen = sampling.draw(included, np.random.default_rng(request.seed))
        if len(chosen) == 0:
            return Sampled([], np.zeros(0, np.float32))
        weights = sampling.importance_weights(included, chosen, request.importance_exponent).astype(np.float32)
        slots = eligible[chosen]
        blobs = self.store.reuse(self._index.rows["order"][slots].tolist(), weights.tolist(), request.request_id)
        self._index.rows["times_sampled"][slots] += 1
        return Sampled(blobs, weights)

    def set_priorities(self, update: PriorityUpdate) -> int:
        """Sets priorities by id; ids that are not here are skipped. Returns how many groups may now be sampled by them."""
        if len(update.ids) != len(update.priorities):
            raise InvalidInput(
                f"{len(update.ids)} ids need as many priorities",
                field="priorities",
                value=len(update.priorities),
                remedy="send one priority for each id",
            )
        changed = self.store.set_priorities(list(zip(update.ids, update.priorities, strict=True)))
        self._index.set_priorities(changed)
        return len(changed)

    # ------------------------------------------------------------ people and lone experiences

    def group(self, group_id: str) -> Group:
        """Raises NotFound."""
        return unpack_groups([self.store.blob(group_id)])[0]

    def listing(self, limit: int, offset: int, state: str | None = None) -> list[dict[str, Any]]:
        return self.store.listing(limit, offset, state)

    def stats(self) -> dict[str, Any]:
        self.store.expire(self.clock())
        return {"capacity": self.capacity, **self.store.stats()}

    def clear(self) -> None:
        """Forgets all groups and experiences; the counters stay."""
        self.store.clear()
        self._index = sampling.ReuseIndex([])

    def add_experiences(self, experiences: list[Experience]) -> int:
        """Stores lone experiences; returns the size of the buffer."""
        self._check_size(len(experiences), "experiences")
        rows = [(item.prompt, item.response, item.reward, item.ground_truth) for item in experiences]
        self._index.drop_until(self.store.add_experiences(rows, self.capacity))
        return sum(completions for _, completions in self.store.totals().values())

    def sample_experiences(self, count: int, prioritized: bool, seed: int | None) -> list[Experience]:
        """Up to `count` different answers out of all stored ones, the completions of groups included.

        `prioritized` draws higher rewards more often: the weight of an answer rises linearly from 0.1 at the lowest
        reward to 1.1 at the highest.
        """
        groups, lone = self.store.rewards()
        per_group = [np.frombuffer(rewards, "<f4").astype(np.float64) for _, rewards in groups]
        rewards = np.concatenate([*per_group, np.array([reward for _, reward in lone])])
        span = float(np.ptp(rewards)) if len(rewards) else 0.0
        weights = (rewards - rewards.min()) / span + _LOWEST_WEIGHT if prioritized and span else np.ones_like(rewards)
        included = sampling.inclusion(sampling.probabilities(weights, 1.0), count)
        starts = np.cumsum([0, *(len(item) for item in per_group)])
        found = []
        for slot in sampling.draw(included, np.random.default_rng(seed)).tolist():
            if slot >= starts[-1]:
                found.append(Experience(*self.store.experience_at(lone[slot - starts[-1]][0])))
                continue
            place = int(np.searchsorted(starts, slot, side="right")) - 1
            group = unpack_groups([self.store.blob_at(groups[place][0])])[0]
            answer = group.completions[slot - starts[place]]
            found.append(Experience(group.prompt, answer.text, answer.reward, group.ground_truth))
        return found

    def _check_size(self, completions: int, field: str) -> None:
        if completions > self.capacity:
            raise TooLarge(
                f"the buffer holds {self.capacity} completions",
                field=field,
                value=f"{completions} completions",
                remedy="send fewer at once, or raise replay.capacity",
            )


def _row(group: Group, where: str) -> GroupRow:
    """Raises InvalidInput for what cannot be stored or shown again."""
    for i, completion in enumerate(group.completions):
        if abs(completion.reward) > MAX_REWARD:
            raise InvalidInput(
                "the reward does not fit in float32",
                field=f"{where}.completions[{i}].reward",
                value=completion.reward,
                remedy="send rewards of a usual size",
            )
    try:
        json.dumps(group.metadata, allow_nan=False)  # it must be showable by GET /groups/{id}
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"the metadata cannot be shown as JSON: {error}",
            field=f"{where}.metadata",
            value=group.metadata,
            remedy="use texts, finite numbers, lists and mappings",
        ) from None
    try:
        data = pack_group(group)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(
            f"the group cannot be stored: {error}", field=where, value=group.id, remedy="send texts that are valid UTF-8"
        ) from None
    rewards = group.rewards
    return GroupRow(
        id=group.id,
        prompt_id=group.prompt_id,
        version=group.weight_version,
        position=group.position,
        completions=len(group.completions),
        rewards=rewards.astype("<f4").tobytes(),
        reward_sum=float(rewards.sum(dtype=np.float64)),
        positive=int((rewards > 0).sum()),
        correct=sum(completion.correct for completion in group.completions),
        created=group.created_at,
        data=data,
    )
