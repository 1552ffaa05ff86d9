"""The replay buffer: a queue of fresh groups and prioritised reuse of consumed groups, backed by
the durable store.

    add ──► fresh ──take──► leased ──ack──► consumed ──sample──► (again and again, by priority)
              ▲ ▲               │
      evicted │ └─lease expired─┘          the oldest consumed are removed when capacity is reached

Groups are sent as the msgpack bytes that are stored. All methods are synchronous and must run in
one thread (`services.replay.worker`).
"""

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import Raw
from pydantic import Field

from common import Json
from common.errors import InvalidInput, TooLarge
from common.process.current_run import CurrentRun
from common.process.storage import StorageFailed
from common.settings.sections import ReplaySection
from common.wire import codec
from common.wire.schemas import (
    FLOAT32_MAX,
    Float32,
    Group,
    PriorityUpdate,
    SampleRequest,
    TakeRequest,
    Text,
    Wire,
)
from services.http.sqlite_store import sum_of
from services.replay import sampling
from services.replay.database import GroupRecord
from services.replay.store import Lease, Store

log = logging.getLogger(__name__)


class Experience(Wire):
    """One completion without tokens: for reading, never for training."""

    prompt: Text
    response: Text
    reward: float = Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX)
    ground_truth: Text | None = None


@dataclass(frozen=True, slots=True)
class SampledBlobs:
    """Encoded groups and the importance weight of each."""

    blobs: list[bytes]
    weights: Float32


_AS_LONG_AS_THE_RUN_S = 1e12
"""A lease of this many seconds does not end by time."""


def join(blobs: list[bytes], **extra: object) -> bytes:
    """Returns a msgpack document with the encoded groups, which are not decoded, and the extra
    fields.
    """
    return codec.encode({"groups": [Raw(blob) for blob in blobs], **extra})


def unpack_groups(blobs: list[bytes]) -> list[Group]:
    """Decodes stored groups."""
    return codec.decode_groups(join(blobs))


class ReplayBuffer:
    """The buffer stored in the file `path`.

    Args:
        config: capacity and lease length.
        path: the SQLite file.
        clock: monotonic clock in seconds.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(
        self, config: ReplaySection, path: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.capacity = config.capacity
        self.lease_s = config.lease_s
        self.store = Store(path)
        # The monotonic clock does not survive a restart, so it is shifted to give every stored
        # lease its full length again. Rewriting the leases instead would fail on a full disk.
        first = self.store.next_expiry()
        has_end = first is not None and first < _AS_LONG_AS_THE_RUN_S
        ahead = first - self.lease_s - clock() if first is not None and has_end else 0.0
        self.clock: Callable[[], float] = lambda: clock() + ahead
        self.runs = CurrentRun(self.store.runs())

    def close(self) -> None:
        """Moves everything into one file and closes it; on a full disk the rest stays in the log
        beside it.
        """
        try:
            self.store.flush()
        except StorageFailed as error:
            log.error("nothing is lost, keep both files: %s", error)
        finally:
            self.store.close()

    # ------------------------------------------------------------ the queue

    def add(self, groups: list[Group]) -> dict[str, int]:
        """Stores groups; they are durable when this returns. A known id is only counted. Returns
        how many were `added`, and the `duplicates`.

        Raises:
            InvalidInput: there are no groups, or the metadata of one cannot be returned as JSON.
            TooLarge: the completions exceed the capacity.
            Full: there is no room now.
        """
        if not groups:
            raise InvalidInput(
                "the request has no groups",
                field="groups",
                value="[]",
                remedy="send at least one group",
            )
        self._check_size(sum(len(group.completions) for group in groups), "groups")
        rows = [_row(group, f"groups[{i}]") for i, group in enumerate(groups)]
        return self.store.add(rows, self.capacity)

    def take(self, request: TakeRequest, *, ends: bool = False) -> Lease | None:
        """Leases the first `count` fresh groups, ordered by (weight version, position, id): to a
        run for as long as it is the current one, to other clients for `lease_s` seconds.

        Returns None when there are fewer, or an empty lease when the request `ends`. A retry with
        the same request id gets the same groups as long as they are leased to it, and none after
        that.
        Fresh groups older than `min_version` are evicted. Raises Conflict when the run has ended.
        """
        self.runs.check_current(request.run_id)
        if request.count > self.capacity:
            raise InvalidInput(
                f"the buffer holds at most {self.capacity} completions, so it can never have this "
                "many groups",
                field="count",
                value=request.count,
                remedy="take fewer groups at once, or raise replay.capacity",
            )
        # How long an update takes, or dynamic sampling looks for further groups, is no matter of
        # time; the groups of a run that ended are given back when the next one begins.
        lease_s = _AS_LONG_AS_THE_RUN_S if request.run_id else self.lease_s
        return self.store.take(request, self.clock(), lease_s, ends=ends)

    def next_expiry_s(self) -> float | None:
        """Returns the seconds until the first lease ends; None without leases."""
        until = self.store.next_expiry()
        return None if until is None else max(0.0, until - self.clock())

    def reset_fresh(
        self, from_position: int | None = None, step: int | None = None, run_id: str = ""
    ) -> int:
        """Drops all unconsumed groups, and all groups from `from_position` in the prompt stream on;
        returns how many.

        Reuse draws from `step` on no longer count. With `run_id` that run begins, which it does
        only once, and the ones before it have ended.
        """
        self.runs.check(run_id)
        dropped = self.store.reset_fresh(from_position, step, run_id)
        self.runs.begin(run_id)
        return dropped

    # ------------------------------------------------------------ reuse

    def sample(self, request: SampleRequest) -> SampledBlobs:
        """Draws distinct consumed groups by priority (`services.replay.sampling`), each with its
        importance weight.

        Returns fewer than `count`, possibly none, when fewer may be reused. A retry with the same
        request id gets the same groups.
        """
        drawn = self.store.draw_of(request.request_id)
        if drawn is None:
            drawn = self._draw(request)
            if drawn[0]:
                self.store.count_draw(*drawn, request.request_id, request.step)
        blobs = list[bytes]()
        weights = list[float]()
        for key, weight in zip(*drawn, strict=True):
            blob = self.store.blob_at(key)
            if blob is not None:  # else it was removed after an earlier attempt
                blobs.append(blob)
                weights.append(weight)
        return SampledBlobs(blobs, np.array(weights, np.float32))

    def _draw(self, request: SampleRequest) -> tuple[list[int], list[float]]:
        """Returns the keys and importance weights of a new draw."""
        rows = self.store.reusable(request.min_version, request.max_times_sampled)
        keys = np.array([key for key, _ in rows], np.int64)
        priorities = np.array([priority for _, priority in rows], np.float64)
        chances = sampling.probabilities(priorities, request.priority_exponent)
        included = sampling.inclusion(chances, request.count)
        sample = sampling.draw(included, np.random.default_rng(request.seed))
        if not len(sample):
            return [], []
        weights = sampling.importance_weights(included, sample, request.importance_exponent)
        return keys[sample].tolist(), weights.tolist()

    def set_priorities(self, update: PriorityUpdate) -> int:
        """Sets priorities by id; unknown ids are skipped. Returns how many consumed groups
        changed.
        """
        if len(update.ids) != len(update.priorities):
            raise InvalidInput(
                f"{len(update.ids)} ids need as many priorities",
                field="priorities",
                value=len(update.priorities),
                remedy="send one priority for each id",
            )
        priorities = list(zip(update.ids, update.priorities, strict=True))
        return self.store.set_priorities(priorities, update.request_id)

    # ------------------------------------------------------------ inspection and experiences

    def group(self, group_id: str) -> Group:
        """Returns one group. Raises NotFound."""
        return unpack_groups([self.store.blob(group_id)])[0]

    def stats(self) -> Json:
        # On a full disk leases cannot expire, but everything can be read.
        with suppress(StorageFailed), self.store.transaction():
            self.store.expire(self.clock())
        return {"capacity": self.capacity, **self.store.stats()}

    def add_experiences(self, experiences: list[Experience]) -> int:
        """Stores experiences. Returns the size of the buffer."""
        self._check_size(len(experiences), "experiences")
        rows = [
            (item.prompt, item.response, item.reward, item.ground_truth) for item in experiences
        ]
        self.store.add_experiences(rows, self.capacity)
        return sum(completions for _, completions in self.store.totals().values())

    def sample_experiences(
        self, count: int, prioritized: bool, seed: int | None
    ) -> list[Experience]:
        """Returns up to `count` distinct completions, those of groups included
        (`sampling.draw_by_reward`).
        """
        rows = self.store.rewards()
        rewards = np.frombuffer(b"".join(blob for _, blob in rows), "<f4")
        starts = np.cumsum([0, *(len(blob) // rewards.itemsize for _, blob in rows)])
        rng = np.random.default_rng(seed)
        slots = sampling.draw_by_reward(rewards, count, prioritized, rng)
        places = np.searchsorted(starts, slots, side="right") - 1
        return [
            self._experience(rows[place][0], int(slot - starts[place]))
            for place, slot in zip(places.tolist(), slots, strict=True)
        ]

    def _experience(self, key: int, number: int) -> Experience:
        """Returns a completion of a group, or a lone one, whose key is negative."""
        if key < 0:
            return Experience(**self.store.experience_at(-key))
        data = self.store.blob_at(key)
        assert data is not None
        group = unpack_groups([data])[0]
        answer = group.completions[number]
        return Experience.model_construct(
            prompt=group.prompt,
            response=answer.text,
            reward=answer.reward,
            ground_truth=group.ground_truth,
        )

    def _check_size(self, completions: int, field: str) -> None:
        if completions > self.capacity:
            raise TooLarge(
                f"the buffer holds at most {self.capacity} completions",
                field=field,
                value=f"{completions} completions",
                remedy="send fewer at once, or raise replay.capacity",
            )


def _row(group: Group, where: str) -> tuple[GroupRecord, bytes]:
    """Returns the record of a group, and the group as msgpack. Raises InvalidInput when the group
    cannot be returned as JSON.
    """
    try:
        json.dumps(group.metadata, allow_nan=False)  # GET /groups/{id} must be able to return it
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"the metadata cannot be encoded as JSON: {error}",
            field=f"{where}.metadata",
            value=group.metadata,
            remedy="use text, finite numbers, lists and mappings",
        ) from None
    rewards = group.rewards
    correct = -1  # unknown
    if all(completion.verified for completion in group.completions):
        correct = sum(completion.correct for completion in group.completions)
    data = codec.encode(group)
    record = GroupRecord(
        id=group.id,
        prompt_id=group.prompt_id,
        version=group.weight_version,
        position=group.position,
        completions=len(group.completions),
        rewards=rewards.astype("<f4").tobytes(),
        reward_sum=float(rewards.sum(dtype=np.float64)),
        positive=int((rewards > 0).sum()),
        correct=correct,
        created=group.created_at,
        data_sum=sum_of(data),
    )
    return record, data
