"""The server's parts together: accepts operations and keeps their futures."""

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from common.clients.rollout import RolloutClient
from common.errors import InvalidInput, Overloaded, ServiceLost
from common.process.futures import cancel
from services.http.sqlite_store import sum_of
from trainer.tinker import requests
from trainer.tinker.interface import WITHOUT_STABLE_REINFORCE, LoraSpec
from trainer.tinker.messages import MESSAGES
from trainer.tinker.records import (
    Checkpoint,
    Record,
    Sampler,
    TinkerOperation,
    TinkerResult,
    TinkerRun,
    TinkerSession,
)
from trainer.tinker.sampling import Adapters, Sampling
from trainer.tinker.state import State, remove_files
from trainer.tinker.store import Journal, TinkerStore
from trainer.tinker.training import Training

if TYPE_CHECKING:
    from trainer.tinker.learner import RunLearner

MAX_WAITING = 4096
"""Operations of a run, or requests of a sampler, that may wait."""
POLL_S = 20.0
"""How long a question for a result waits for it. The SDK gives up after 45 seconds."""
_ANY = -2
_T = TypeVar("_T")
_F = TypeVar("_F", TinkerSession, Sampler, Checkpoint)
_CLONE = 1_000_000_000
"""Numbers of each copy of a sampling client."""


def too_many(waiting: int, field: str, value: object) -> Overloaded:
    """Returns the error for a request of a client that has many; the SDK sends it again later."""
    return Overloaded(
        f"{waiting} requests of this client wait already",
        field=field,
        value=value,
        remedy="wait for answers before you send more",
        status=429,
    )


class TinkerServer:
    """Sessions, runs and samplers of one base model.

    Args:
        base_model: name of the model for clients.
        most_runs: the most runs of a client.
        resident: the most runs in memory.
        seed: with the number of a run in its session, the seed of adapters for which clients give
            none.
        stable_reinforce: the loss that is used in the place of Tinker's `stable_reinforce`, which
            needs no record of samples; if empty, that is refused.
    """

    def __init__(  # noqa: PLR0913
        self,
        directory: Path,
        learner: "RunLearner",
        client: RolloutClient,
        adapters: Adapters,
        *,
        base_model: str,
        max_context_tokens: int,
        most_runs: int = 1000,
        resident: int = 8,
        seed: int = 0,
        stable_reinforce: str = "",
    ) -> None:
        self.base_model = base_model
        self.max_context_tokens = max_context_tokens
        self.state = State(directory, most_runs)
        self._seed = seed
        self._stable_reinforce = stable_reinforce
        self.failure: ServiceLost | None = None
        """Why operations are no longer applied, if so."""
        self._store = TinkerStore(directory / "tinker.sqlite")
        self._journal = Journal(self._store)
        self._waiters: dict[tuple[str, int], asyncio.Event] = {}
        """Set when an operation, or any of a line (`_ANY`), has finished."""
        self._tasks: set[asyncio.Task[None]] = set()
        # A run counts when it is written: of requests at once, one after the other is.
        self._creating = asyncio.Lock()
        self._training = Training(
            learner,
            self.state,
            self._journal,
            resident=resident,
            spawn=self._spawn,
            finished=self._note_finished,
        )
        self._sampling = Sampling(
            client,
            adapters,
            self.state,
            self._journal,
            max_context_tokens=max_context_tokens,
            spawn=self._spawn,
            finished=self._note_finished,
        )

    @property
    def not_ready(self) -> str | ServiceLost | None:
        """Returns why results do not come at present, or None."""
        return self.failure or self._journal.waits_for

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Continues what was accepted before, and works inside the context."""
        records, applied, waiting = await self._journal.run(
            lambda store: (store.records(), store.applied(), store.waiting())
        )
        for record in records:
            self.state.add(record)
        await asyncio.to_thread(self.state.sweep)
        for run in self.state.all(TinkerRun):
            self._training.start(run, applied.get(run.id, -1))
        for line, number in waiting:
            self._of(line).add(line, number)
        try:
            yield
        finally:
            await cancel(self._tasks)
            await self._training.close()
            await self._journal.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():
            self.failure = ServiceLost(
                f"operations are no longer applied: {task.exception()!r}",
                remedy="see the log of this server, mend the reason and start it again: it "
                "continues with what was accepted",
            )

    # ------------------------------------------------------------ sessions, runs, samplers

    async def create_session(self, owner: str, body: requests.CreateSession) -> TinkerSession:
        session = TinkerSession(secrets.token_hex(8), owner, body.model_dump(exclude_none=True))
        return await self._put(session)

    async def finish_session(self, owner: str, name: str) -> None:
        """Ends a session; its runs and their weights stay, samples are dropped."""
        session = self.state.find(TinkerSession, name, owner)
        session.finished = True
        samplers = self.state.owned(Sampler, owner, session=name)
        await self._put(session)
        await self.state.forget(samplers, self._journal)

    async def create_sampler(self, owner: str, body: requests.CreateSampler) -> Sampler:
        """Returns the sampler with this number; makes it when there is none."""
        session = self.state.session(body.session_id, owner)
        name = f"{session.id}:sample:{body.sampling_session_seq_id}"
        known = self.state.get(Sampler, name)
        if known is not None:
            if known.path != body.model_path:
                raise InvalidInput(
                    "there is a sampler with this number and other weights, and the weights of "
                    "a sampler never change",
                    field="sampling_session_seq_id",
                    value=body.sampling_session_seq_id,
                    remedy="give every sampler of a session a new number, and send a repeated "
                    "request unchanged",
                )
            return known
        if body.model_path is None:
            self.check_model(body.base_model)
        elif self.state.find(Checkpoint, body.model_path, owner).kind != "sampler_weights":
            raise InvalidInput(
                "these weights are not for sampling",
                field="model_path",
                value=body.model_path,
                remedy="use what save_weights_for_sampler returns",
            )
        same = self.state.owned(Sampler, owner, session=session.id, path=body.model_path)
        return await self._put(Sampler(name, session.id, owner, body.model_path, len(same)))

    async def join_sampler(self, owner: str, name: str) -> int:
        """Returns a number for a copy of a sampler's client."""
        sampler = self.state.find(Sampler, name, owner)
        sampler.clones += 1
        number = sampler.clones
        await self._put(sampler)
        return number

    def check_model(self, name: str | None) -> None:
        """Raises InvalidInput for another base model."""
        if name != self.base_model:
            raise InvalidInput(
                "this server has another base model",
                field="base_model",
                value=name,
                remedy=f"use {self.base_model}, or start the server with --name {name}",
            )

    async def delete_checkpoint(self, owner: str, run: str, kind: str, name: str) -> None:
        """Removes saved weights."""
        await self.state.delete(self.state.checkpoint(owner, run, kind, name), self._journal)

    async def set_ttl(self, owner: str, run: str, kind: str, name: str, body: requests.Ttl) -> None:
        """Changes when saved weights expire."""
        checkpoint = self.state.checkpoint(owner, run, kind, name)
        checkpoint.expires = body.ttl_seconds and time.time() + body.ttl_seconds
        await self._put(checkpoint)

    async def delete_run(self, owner: str, name: str) -> None:
        """Removes a run, its operations and all its weights."""
        run = self.state.find(TinkerRun, name, owner)
        await self._training.forget(run)
        gone: list[Record] = [run, *self.state.owned(Checkpoint, owner, run=name)]
        samplers = self.state.owned(Sampler, owner)  # those of weights without a name go with it
        gone += [sampler for sampler in samplers if sampler.id.startswith(f"{name}:")]
        await self.state.forget(gone, self._journal)
        await remove_files(self.state.folder(name))

    async def _put(self, record: _F) -> _F:
        self.state.add(record)
        await self._journal.run(lambda store: store.put(record))
        return record

    # ------------------------------------------------------------ operations

    async def create_run(self, owner: str, body: requests.CreateModel) -> TinkerOperation:
        """Accepts a new run."""
        self.check_model(body.base_model)
        lora = body.lora_config
        if lora.seed is None:
            lora = replace(lora, seed=sum_of((self._seed, body.model_seq_id)))
        return await self._begin(owner, "create_model", lora, body)

    async def load(self, owner: str, body: Any) -> TinkerOperation:
        """Accepts weights for a run, or as a new run."""
        if isinstance(body, dict) and body.get("model_id") is not None:
            return await self.accept(owner, "load_weights", body)
        given = requests.validated(requests.LoadRun, body)
        if given.base_model is not None:
            self.check_model(given.base_model)
        saved = self.state.find(Checkpoint, given.path, owner)
        lora = self.state.find(TinkerRun, saved.run, owner).lora
        return await self._begin(owner, "load_weights", lora, given)

    async def _begin(
        self,
        owner: str,
        kind: str,
        lora: LoraSpec,
        body: requests.CreateModel | requests.LoadRun,
    ) -> TinkerOperation:
        """Accepts the run with this number of a session, which may exist (for a retry)."""
        session = self.state.session(body.session_id, owner).id
        name = f"{session}:train:{body.model_seq_id}"
        async with self._creating:
            run = self.state.get(TinkerRun, name)
            if run is None:
                self.state.check_quota(owner)
                about = body.user_metadata
                run = TinkerRun(name, session, owner, lora, used=time.time(), about=about)
            return await self._accept(TinkerOperation(name, 0, kind, body.stored()), run)

    async def accept_pass(self, owner: str, body: bytes) -> TinkerOperation:
        """Accepts a pass in protobuf: a loss, and its gradient unless it says forward only."""
        found = await asyncio.to_thread(MESSAGES.decode, "Place", body)
        given = {"model_id": found["run"], "seq_id": found["seq"]}
        place = requests.validated(requests.Place, given)
        run = self.state.find(TinkerRun, place.model_id, owner)
        kind = "forward" if found["forward_only"] else "forward_backward"
        return await self._accept(TinkerOperation(run.id, place.seq_id, kind, body))

    async def accept(self, owner: str, kind: str, body: Any) -> TinkerOperation:
        """Accepts an operation of a run.

        Its content is checked only when it is applied: the client has given the operation a number,
        and goes on with the next one even if this operation fails.
        """
        place = requests.validated(requests.Place, body)
        run = self.state.find(TinkerRun, place.model_id, owner)
        operation = TinkerOperation(run.id, place.seq_id, kind, requests.stored(body))
        return await self._accept(operation)

    async def accept_sample(self, owner: str, body: requests.Sample) -> TinkerOperation:
        """Accepts a request of a sampler."""
        if body.record_stability_info and not self._stable_reinforce:
            raise InvalidInput(
                "nothing is recorded for stable_reinforce, which this server does not compute",
                field="record_stability_info",
                value=True,
                remedy=WITHOUT_STABLE_REINFORCE,
            )
        sampler = self.state.find(Sampler, body.sampling_session_id, owner)
        return await self._accept(TinkerOperation(sampler.id, body.seq_id, "sample", body.stored()))

    async def _accept(
        self, operation: TinkerOperation, run: TinkerRun | None = None
    ) -> TinkerOperation:
        """Writes an operation, with its run if that is new, and queues it."""
        work = self._of(operation.line)
        waiting, first = work.queue(operation.line)
        if waiting >= MAX_WAITING:
            raise too_many(waiting, "seq_id", operation.seq)

        def write(store: TinkerStore) -> bool:
            is_new = store.accept(operation, first)
            if is_new and run is not None:
                store.put(run)
            return is_new

        if not await self._journal.run(write):
            return operation
        if run is not None:
            self.state.add(run)
            self._training.start(run, -1)
        work.add(operation.line, operation.seq)
        return operation

    def _of(self, line: str) -> Training | Sampling:
        """Returns who works on the operations of a run or a sampler."""
        return self._sampling if ":sample:" in line else self._training

    # ------------------------------------------------------------ futures

    def _note_finished(self, line: str, number: int) -> None:
        for key in ((line, number), (line, _ANY)):
            if key in self._waiters:
                self._waiters.pop(key).set()

    async def result(self, owner: str, request_id: str) -> TinkerResult | None:
        """Returns a result as soon as it is there; None when it is not within `POLL_S`."""
        key = self._parse(owner, request_id)
        return await self._awaited(key, lambda store: store.result(*key), POLL_S)

    def missing(self, request_id: str) -> int | None:
        """Returns the number of the request that this one waits for and that has not arrived."""
        return self._training.missing(request_id.rpartition(":op:")[0])

    async def news(self, owner: str, body: requests.RetrieveMany) -> tuple[list[Any], int]:
        """Returns (seq, finished, ok) of what a sampler has finished since the cursor, as soon as
        there is any, and the next cursor. Drops what the client has fetched.
        """
        target = body.target
        sampler = self.state.find(Sampler, target.sampling_session_id, owner)
        start = target.cloned_sampler_id * _CLONE
        block = range(start, start + _CLONE)
        asked = [self._parse(owner, each) for each in body.retrieved_request_ids]
        fetched = [number for line, number in asked if line == sampler.id]

        def look(store: TinkerStore) -> list[tuple[int, int, int]]:
            store.forget(sampler.id, fetched)
            return store.finished_after(sampler.id, block, body.prev_cursor)

        wait_s = POLL_S if body.timeout is None else min(body.timeout, POLL_S)
        found = await self._awaited((sampler.id, _ANY), look, wait_s)
        return found, max([body.prev_cursor, *(finished for _, finished, _ in found)])

    async def _awaited(
        self, key: tuple[str, int], look: Callable[[TinkerStore], _T], wait_s: float
    ) -> _T:
        """Returns what is found at once, or when an operation has finished within the time."""
        deadline = time.monotonic() + wait_s
        try:
            while True:
                event = self._waiters.setdefault(key, asyncio.Event())
                found = await self._journal.run(look)
                left_s = deadline - time.monotonic()
                if found or left_s <= 0:
                    return found
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), left_s)
        finally:
            self._waiters.pop(key, asyncio.Event()).set()  # whoever else waits for it looks again

    async def cancel(self, owner: str, body: requests.Retrieve) -> None:
        """Ends a request of a sampler that nobody waits for."""
        line, number = self._parse(owner, body.request_id)
        await self._sampling.cancel(line, number)

    def _parse(self, owner: str, request_id: str) -> tuple[str, int]:
        line, _, number = request_id.rpartition(":op:")
        if ":sample:" in line:
            self.state.find(Sampler, line, owner)
        else:
            self.state.find(TinkerRun, line, owner)
        return line, int(number) if re.fullmatch("[0-9]{1,18}", number) else -1
