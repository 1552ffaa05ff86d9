"""The operations of runs, each applied once and in the order of their numbers.

A run's state is its last snapshot and the operations since: an operation is on disk before it is
answered, and its result before the client gets it. After a crash, or when an idle run comes back to
memory, the snapshot is loaded and the operations since are applied again; their answers must be the
same to the bit.
"""

import asyncio
import json
import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import Conflict, InvalidInput, NotFound, ServiceError, error_text
from common.process.storage import StorageFailed
from services.http.one_thread import OneThread
from trainer.tinker import requests
from trainer.tinker.messages import read_pass, write_outputs
from trainer.tinker.records import (
    Checkpoint,
    Record,
    Sampler,
    TinkerOperation,
    TinkerResult,
    TinkerRun,
)
from trainer.tinker.state import State, remove_files
from trainer.tinker.store import Journal, TinkerStore

if TYPE_CHECKING:
    from trainer.tinker.learner import RunLearner

log = logging.getLogger(__name__)
_CHANGING = ("create_model", "forward_backward", "optim_step")
"""Operations that are applied again. Loading weights changes a run too, and is followed by a
snapshot."""
_SAVED_AS = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
"""Kinds of checkpoints, by the operations that make them."""
SNAPSHOT_S = 30.0
"""Seconds of computing that a crash may cost a run: then its state is saved."""
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class NotReproduced(ServiceError):
    """An operation that was applied again gave another answer (500)."""

    code = "not_reproduced"


@dataclass
class _Line:
    """The operations of a run that wait. The client may send later ones first."""

    run: TinkerRun
    following: int
    """The number that is applied next."""
    waiting: set[int] = field(default_factory=set)
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class Applied:
    """The outcome of an operation."""

    content: bytes
    is_json: bool = True
    records: tuple[Record, ...] = ()
    """What the operation made."""


def failure(error: Exception) -> TinkerResult:
    """Returns the result of an operation that failed, as the SDK reads it."""
    if not isinstance(error, ServiceError):
        error = ServiceError(error_text(error), remedy="see the log of the server")
    category = "user" if error.status < 500 else "server"
    content = json.dumps({"error": str(error), "category": category}).encode()
    return TinkerResult(ok=False, content=content, is_json=True)


class Training:
    """Applies the operations of all runs in one thread, taking turns.

    Args:
        learner: the models.
        resident: the most runs in memory; those that were used longest ago give way.
        spawn: begins a task, which ends with the server.
        finished: called with line and number when a result is on disk.
    """

    def __init__(
        self,
        learner: "RunLearner",
        state: State,
        journal: Journal,
        *,
        resident: int,
        spawn: Spawn,
        finished: Callable[[str, int], None],
    ) -> None:
        self._learner = learner
        self._state = state
        self._journal = journal
        self._most_resident = resident
        self._spawn = spawn
        self._finished = finished
        self._thread = OneThread("tinker-learner")
        self._resident: dict[str, float] = {}
        """Seconds of computing since the snapshot, by run; the run that was used last is last."""
        self._lines: dict[str, _Line] = {}
        # Whoever waits longest for a lock has it next. One run of a client at a time waits for the
        # learner: a client waits for one operation of each other client, whatever these have sent.
        self._turn = asyncio.Lock()
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By client."""

    def start(self, run: TinkerRun, applied: int) -> None:
        """Adds a run whose operations up to number `applied` have results."""
        self._lines[run.id] = _Line(run, applied + 1)

    def add(self, name: str, number: int) -> None:
        """Applies an operation of a run when all before it are applied."""
        line = self._lines.get(name)
        if line is None:  # the run was deleted
            return
        line.waiting.add(number)
        if line.task is None or line.task.done():
            line.task = self._spawn(self._work(line))

    def queue(self, name: str) -> tuple[int, int]:
        """Returns how many operations of a run wait, and the number of the one that is next."""
        line = self._lines.get(name)
        return (len(line.waiting), line.following) if line else (0, 0)

    def missing(self, name: str) -> int | None:
        """Returns the number that all waiting operations of a run wait for; None if it is here."""
        line = self._lines.get(name)
        if line is None or not line.waiting or line.following in line.waiting:
            return None
        return line.following

    async def _work(self, line: _Line) -> None:
        """Applies what waits, in order."""
        while line.following in line.waiting:
            async with self._turns[line.run.owner], self._turn:
                number = line.following
                if number not in line.waiting:  # the run was deleted
                    return
                find = partial(TinkerStore.operation, line=line.run.id, seq=number)
                records, outdated = await self._apply(line.run, await self._journal.run(find))
                line.waiting.remove(number)
                line.following += 1
                await self._clean(records, outdated)
            self._finished(line.run.id, number)

    async def forget(self, run: TinkerRun) -> None:
        """Removes a run from memory, with what waits for it; its files stay."""
        # The operation that is being applied writes the run when it ends.
        async with self._turn:
            line = self._lines.pop(run.id, None)
            if line is not None:  # as when an earlier attempt could not be written
                line.waiting.clear()
            await self._lose(run)

    async def close(self) -> None:
        """Waits for the operation that is being applied."""
        await self._thread.close()

    async def _apply(
        self, run: TinkerRun, operation: TinkerOperation
    ) -> tuple[Sequence[Record], Path | None]:
        """Applies an operation and writes its result, with the snapshot that is due; returns what
        is on disk now, and the folder of the snapshot before.
        """
        run.used = time.time()
        records: Sequence[Record] = ()
        outdated = None
        try:
            await self._bring_back(run, operation)
            started = time.monotonic()
            outcome = await self._thread.call(self._outcome, run, operation)
            unsaved = self._resident.pop(run.id, 0.0) + time.monotonic() - started
            self._resident[run.id] = unsaved
            result = TinkerResult(ok=True, content=outcome.content, is_json=outcome.is_json)
            if operation.kind == "optim_step":
                run.copies = 0
            if operation.kind == "load_weights":
                outdated = await self._save(run, operation.seq)
            elif unsaved > SNAPSHOT_S:
                # Without it, the run comes back from an earlier one.
                with suppress(StorageFailed):
                    outdated = await self._save(run, operation.seq)
            records = outcome.records
        except Exception as error:
            # A refusal has changed nothing. What any other error has changed is not known: the run
            # comes back from its snapshot.
            if not isinstance(error, ServiceError) or error.status >= 500:
                log.error("operation %s failed", operation.request_id, exc_info=error)
                await self._lose(run)
            result = failure(error)
            if operation.seq == 0:
                run.failed = True

        repeatable = result.ok and operation.kind in _CHANGING

        def write(store: TinkerStore) -> None:
            store.finish(run.id, operation.seq, result, repeatable=repeatable)
            for record in records:
                store.put(record)
            store.put_run(run)

        await self._journal.settle(write)
        return records, outdated

    async def _clean(self, records: Sequence[Record], outdated: Path | None) -> None:
        """Adds the records that are on disk now to the state, and removes superfluous files."""
        for record in records:
            replaced = self._state.add(record)
            if isinstance(replaced, Checkpoint) and replaced is not record:
                await remove_files(self._state.files(replaced))
        if outdated is not None:
            await remove_files(outdated)
        with suppress(StorageFailed):  # what is left is removed after the next operation
            for checkpoint in self._state.outdated():
                await self._state.delete(checkpoint, self._journal)

    # ------------------------------------------------------------ memory

    async def _bring_back(self, run: TinkerRun, operation: TinkerOperation) -> None:
        """Makes a run resident: its snapshot, and what was applied since."""
        if run.id in self._resident:
            return
        while len(self._resident) >= self._most_resident:
            await self._put_away(next(iter(self._resident)))
        if operation.seq == 0:  # which creates it
            return
        if run.failed:
            raise NotFound(
                "this run could not be created",
                field="model_id",
                value=run.id,
                remedy="see the error of its first operation, and create another run",
            )
        since = await self._journal.run(lambda store: store.since(run))
        snapshot = self._state.snapshot(run)
        started = time.monotonic()
        await self._thread.call(repeat, self._learner, run, snapshot, since=since)
        self._resident[run.id] = time.monotonic() - started

    async def _put_away(self, name: str) -> None:
        """Frees the memory of an idle run, after a snapshot of what is not saved."""
        line = self._lines[name]
        run = line.run
        if self._resident[name]:
            # Without a snapshot, the run comes back from an earlier one.
            with suppress(StorageFailed):
                outdated = await self._save(run, line.following - 1)
                await self._journal.settle(lambda store: store.put_run(run))
                if outdated is not None:
                    await remove_files(outdated)
        await self._lose(run)

    async def _lose(self, run: TinkerRun) -> None:
        self._resident.pop(run.id, None)
        await self._thread.call(self._learner.unload, run.id)

    async def _save(self, run: TinkerRun, number: int) -> Path | None:
        """Saves a run as it is after operation `number`; returns the folder of the snapshot before,
        which is needed until the new one is noted.
        """
        outdated = self._state.snapshot(run)
        saved = outdated.with_name(f"state-{number}")
        if saved == outdated:
            return None
        await self._thread.call(self._learner.save, run.id, _fresh(saved))
        run.snapshot = number
        self._resident[run.id] = 0.0
        return outdated

    # ------------------------------------------------------------ in the learner's thread

    def _outcome(self, run: TinkerRun, operation: TinkerOperation) -> Applied:
        kind = operation.kind
        if kind in (*_CHANGING, "forward"):
            return compute(self._learner, run, operation)
        if kind == "load_weights":
            return self._load(run, operation)
        return self._export(run, operation)

    def _load(self, run: TinkerRun, operation: TinkerOperation) -> Applied:
        body = requests.parse(requests.LoadWeights, operation.body)
        checkpoint = self._state.find(Checkpoint, body.path, run.owner)
        if checkpoint.kind != "weights":
            raise InvalidInput(
                "these weights are for sampling",
                field="path",
                value=body.path,
                remedy="load what save_state has saved: tinker://RUN/weights/NAME",
            )
        self._learner.load(run.id, self._state.files(checkpoint), optimizer=body.optimizer)
        run.copies = checkpoint.copies
        return _json(path=body.path, model_id=run.id, type="load_weights")

    def _export(self, run: TinkerRun, operation: TinkerOperation) -> Applied:
        """Saves weights: for training, for samplers, or for downloads."""
        kind = _SAVED_AS[operation.kind]
        body: Any = requests.parse(requests.OPERATIONS[operation.kind], operation.body)
        name = body.path or f"operation-{operation.seq}"
        path = f"tinker://{run.id}/{kind}/{name}"
        if self._state.get(Checkpoint, path) and not getattr(body, "overwrite", False):
            raise Conflict(
                "weights with this name exist already",
                field="path",
                value=path,
                remedy="use another name, delete them, or save_state(…, overwrite=True)",
            )
        folder = f"{kind}-{operation.seq}"
        files = _fresh(self._state.folder(run.id) / folder)
        checksum = ""
        if kind == "weights":
            self._learner.save(run.id, files)
        else:
            checksum = self._learner.export_adapter(run.id, files)

        now = time.time()
        checkpoint = Checkpoint(
            path=path,
            run=run.id,
            owner=run.owner,
            kind=kind,
            name=name,
            folder=folder,
            created=now,
            size=sum(file.stat().st_size for file in files.iterdir()),
            checksum=checksum,
            expires=body.ttl_seconds and now + body.ttl_seconds,
            about=getattr(body, "user_metadata", None),
            unnamed=body.path is None,
            copies=run.copies,
        )
        if kind == "sampler_weights":
            run.copies += 1
        if kind != "sampler_weights" or not checkpoint.unnamed:
            return _json(checkpoint, path=path, type=operation.kind)
        sampler = Sampler(f"{run.id}:sample:{operation.seq}", run.session, run.owner, path)
        return _json(
            checkpoint, sampler, path=path, sampling_session_id=sampler.id, type=operation.kind
        )


def compute(learner: "RunLearner", run: TinkerRun, operation: TinkerOperation) -> Applied:
    """Applies one of `_CHANGING`, or a pass without gradients."""
    kind = operation.kind
    if kind == "create_model":
        learner.create(run.id, run.lora)
        return _json(model_id=run.id, type=kind)
    if kind == "optim_step":
        adam = requests.parse(requests.OptimStep, operation.body).adam_params
        return _json(metrics=learner.optim_step(run.id, adam))
    score = learner.forward if kind == "forward" else learner.forward_backward
    outputs = score(run.id, *read_pass(operation.body))
    return Applied(write_outputs(outputs), is_json=False)


def repeat(
    learner: "RunLearner",
    run: TinkerRun,
    snapshot: Path,
    *,
    since: Sequence[tuple[TinkerOperation, TinkerResult]],
    before: Callable[[int], None] = lambda _: None,
) -> None:
    """Loads the snapshot of a run, if it has one, and applies again what was applied since; calls
    `before` with the number of each operation. Raises NotReproduced.
    """
    if run.snapshot >= 0:
        learner.load(run.id, snapshot, optimizer=True)
    for operation, result in since:
        before(operation.seq)
        if compute(learner, run, operation).content != result.content:
            raise NotReproduced(
                f"operation {operation.request_id} gave another answer when it was applied again",
                field="operation",
                value=operation.request_id,
                remedy="compute with the same hardware, libraries and number of threads as "
                "before, or create a run from the last saved weights",
            )


def _json(*records: Record, **answer: object) -> Applied:
    return Applied(json.dumps(answer).encode(), records=records)


def _fresh(folder: Path) -> Path:
    """Returns a folder that does not exist: what a killed process has left there is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return folder
