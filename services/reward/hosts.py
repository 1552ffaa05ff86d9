"""Hosts call the reward functions of the reward-server: in its threads, or in worker processes that
can be killed.

Both limit the time of a call, split large batches, share the workers fairly between the batches of
several requests, and repeat a failed call for each item separately, so that one bad item never
affects the others.
"""

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Any

from common.errors import InvalidInput, Overloaded
from common.process import progress
from common.process.daemon_threads import in_daemon_thread
from common.process.logs import event
from common.process.main_thread import in_main_thread, needs_main_thread
from common.wire.schemas import MAX_BATCH_ITEMS, RewardItem
from services.reward.fair_slots import FairSlots
from services.reward.functions.base import (
    Columns,
    Completions,
    RewardFunction,
    Score,
    Scores,
    WrongScores,
    own_copy,
    reason_of,
)
from services.reward.pool import CallFailed, WorkerPool

log = logging.getLogger(__name__)
# Maximum answers waiting for one function.
QUEUE_LIMIT = 4 * MAX_BATCH_ITEMS
# Completions per call of a function; larger batches are spread over the workers.
CALL_ITEMS = 64
# Distinct reasons of failed calls that are logged.
_REASONS = 20
_RESERVED = frozenset(("self", "completions"))


class Host(ABC):
    """One reward function of the server, which is called with several completions at once.

    Args:
        name: name of its component.
        gives_verdicts: its scores say which answers are right.
    """

    verifies_answers = False
    """Whether it compares a final answer with the ground truth."""
    call_items = CALL_ITEMS
    """Completions per call."""

    def __init__(self, name: str, gives_verdicts: bool = False) -> None:
        self.name = name
        self.gives_verdicts = gives_verdicts
        self.unfinished = 0
        """Items that are waiting or being scored."""
        self._reasons: set[str] = set()

    def check(self, item: RewardItem, where: str) -> None:
        """Raises InvalidInput naming a field under the prefix `where`."""
        for name in _RESERVED.intersection(item.columns):
            raise InvalidInput(
                "reward functions already have an argument of this name",
                field=f"{where}columns.{name}",
                value=name,
                remedy="rename the column",
            )

    async def score(self, items: Sequence[RewardItem]) -> Scores:
        """Returns the scores of a batch, in order. Cancelling the call frees the workers.

        Raises InvalidInput for an item that cannot be scored, Overloaded when too many items wait
        already.
        """
        self.unfinished += len(items)
        try:
            return await self._score(items)
        finally:
            self.unfinished -= len(items)

    def _check_room(self, waiting: int, count: int) -> None:
        """Raises Overloaded when `count` items are too many in addition to the waiting ones."""
        if count and waiting + count > QUEUE_LIMIT:
            raise Overloaded(
                f"{waiting} answers are already waiting for the reward function {self.name}",
                field="items",
                value=count,
                remedy="try again later, or raise reward.workers",
            )

    async def _score(self, items: Sequence[RewardItem]) -> Scores:
        self._check_room(self.unfinished - len(items), len(items))
        return await self._score_in_chunks(items, self.call_items, batch=object())

    async def _score_in_chunks(
        self, items: Sequence[RewardItem], size: int, batch: object
    ) -> Scores:
        chunks = [items[i : i + size] for i in range(0, len(items), size)]
        found = await asyncio.gather(*(self._score_chunk(chunk, batch) for chunk in chunks))
        return list(chain.from_iterable(found))

    async def _score_chunk(self, items: Sequence[RewardItem], batch: object) -> Scores:
        try:
            scores = await self.call(items, batch)
            progress.moved()
            return scores
        except CallFailed as error:
            # One bad completion fails the whole call: repeated alone, the others get their scores.
            if len(items) == 1 or error.always:
                self._report(f"has no score: {error}")
                return [Score(None, error.status, reason=str(error))] * len(items)
            self._report(f"failed for {len(items)} answers, now one by one: {error}")
        return await self._score_in_chunks(items, 1, batch)

    def _report(self, failure: str) -> None:
        """Logs a failure only once, because a function often fails in the same way for many
        answers.
        """
        if failure not in self._reasons and len(self._reasons) < _REASONS:
            self._reasons.add(failure)
            log.warning(
                "the reward function %s %s",
                self.name,
                failure,
                extra=event("reward_function_failed", function=self.name),
            )

    @abstractmethod
    async def call(self, items: Sequence[RewardItem], batch: object = None) -> Scores:
        """Calls the function exactly once, when `batch` gets a slot. Raises CallFailed."""


class ThreadHost(Host):
    """A function in threads of this process: the caller's own objects, and those that limit their
    own time.

    Args:
        function: the function; unless `bounds_itself`, it is never called concurrently.
        timeout_s: seconds until a call is abandoned, for a function that does not limit its own
            time. Its thread cannot be killed and continues.
        calls: concurrent calls of a function that limits its own time.
        call_items: completions per call.
    """

    def __init__(
        self,
        function: RewardFunction,
        timeout_s: float | None,
        calls: int,
        call_items: int = CALL_ITEMS,
    ) -> None:
        super().__init__(function.name, function.gives_verdicts)
        self._function = function
        self.verifies_answers = function.verifies_answers
        self._timeout_s = None if function.bounds_itself else timeout_s
        self._slots = FairSlots(calls if function.bounds_itself else 1)
        self._needs_main_thread = False
        self.call_items = call_items

    async def call(self, items: Sequence[RewardItem], batch: object = None) -> Scores:
        """Calls the function in a thread. Raises CallFailed."""
        async with self._slots.slot(batch):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._scores(*arguments(items))
            except TimeoutError as error:
                raise CallFailed(
                    "timeout", f"no answer within {self._timeout_s} s {error}"
                ) from None
            except Exception as error:
                raise CallFailed(
                    "error", reason_of(error), always=isinstance(error, WrongScores)
                ) from error

    async def _scores(self, completions: Completions, columns: Columns) -> Scores:
        """Calls the function in a new thread, or in the main thread if it sets signal handlers, as
        a limit of time by `signal.alarm` does.
        """

        def scores() -> Scores:
            return self._function.scores(own_copy(completions), **own_copy(columns))

        if not self._needs_main_thread:
            try:
                thread = in_daemon_thread(scores, "reward-function")
                return await asyncio.wrap_future(thread)
            except Exception as error:
                if not needs_main_thread(error):
                    raise
                self._needs_main_thread = True
        return await asyncio.wrap_future(in_main_thread(scores))


class ProcessHost(Host):
    """A function in the workers of a pool, which several functions may share.

    Args:
        name: name of its component.
        pool: the workers; the owner enters and exits it.
        index: index of the function in the pool's specification.
        gives_verdicts: its scores say which answers are right.
    """

    def __init__(
        self,
        name: str,
        pool: WorkerPool,
        index: int = 0,
        gives_verdicts: bool = False,
    ) -> None:
        super().__init__(name, gives_verdicts)
        self.pool = pool
        self._index = index

    async def call(self, items: Sequence[RewardItem], batch: object = None) -> Scores:
        """Calls the function in a worker. Raises CallFailed."""
        completions, columns = arguments(items)
        message = {"function": self._index, "completions": completions, "columns": columns}
        content = json.loads(await self.pool.call(json.dumps(message).encode(), batch))
        if "error" in content:
            raise CallFailed("error", content["error"], always=content["always"])
        return [Score(**score) for score in content["scores"]]


def arguments(items: Sequence[RewardItem]) -> tuple[Completions, Columns]:
    """Returns the arguments of a reward function: chats, and a list for every column of any
    item. A response is a text, or the messages of an episode.
    """
    names = set(chain.from_iterable(item.columns for item in items))
    columns: Columns = {
        **{name: [item.columns.get(name) for item in items] for name in names},
        "prompt": [item.prompt for item in items],
        "ground_truth": [item.ground_truth for item in items],
    }

    completions: Completions = []
    for item in items:
        response: Any = item.response  # that of an episode does not come over the wire
        is_text = isinstance(response, str)
        completions.append([{"role": "assistant", "content": response}] if is_text else response)
    return completions, columns
