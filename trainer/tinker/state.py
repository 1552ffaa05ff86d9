"""What the server knows in memory of what is on disk: sessions, runs, samplers, checkpoints; and
who may use it.
"""

import asyncio
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from common.errors import Conflict, NotFound, TooLarge
from trainer.tinker.records import Checkpoint, Record, Sampler, TinkerRun, TinkerSession
from trainer.tinker.store import Journal, TinkerStore

KEPT_UNNAMED = 16
"""Unnamed weights of a run for its samplers; older ones are removed."""
_F = TypeVar("_F", bound=TinkerSession | TinkerRun | Sampler | Checkpoint)


class State:
    """The records, by name. Only the event loop reads and changes them."""

    def __init__(self, directory: Path, most_runs: int) -> None:
        self._directory = directory
        self._most_runs = most_runs
        self._records: dict[str, Record] = {}

    def add(self, record: Record) -> Record | None:
        """Adds a record; returns the one of this name that it replaces."""
        replaced = self._records.get(record.id)
        self._records[record.id] = record
        return replaced

    def remove(self, record: Record) -> None:
        self._records.pop(record.id, None)

    def get(self, kind: type[_F], name: str) -> _F | None:
        """Returns a record, whoever it belongs to; None when there is none."""
        found = self._records.get(name)
        return found if isinstance(found, kind) else None

    def find(self, kind: type[_F], name: str, owner: str) -> _F:
        """Returns a record. Raises NotFound, also for one of another client."""
        found = self.get(kind, name)
        if found is None or found.owner != owner:
            word = kind.__name__.removeprefix("Tinker").lower()
            raise NotFound(
                f"there is no such {word}",
                field=word,
                value=name,
                remedy="use one that this server made for the same key; they last until they are "
                "deleted or expire",
            )
        return found

    def all(self, kind: type[_F]) -> Iterator[_F]:
        """Yields the records of a kind, the oldest first."""
        for record in tuple(self._records.values()):
            if isinstance(record, kind):
                yield record

    def owned(self, kind: type[_F], owner: str, **fields: object) -> list[_F]:
        """Returns the records of a kind that belong to a client and have these fields, the newest
        first.
        """
        wanted = {"owner": owner, **fields}.items()
        return [record for record in self.all(kind) if wanted <= vars(record).items()][::-1]

    def checkpoint(self, owner: str, run: str, kind: str, name: str) -> Checkpoint:
        """Returns a checkpoint by the parts of its path. Raises NotFound."""
        return self.find(Checkpoint, f"tinker://{run}/{kind}/{name}", owner)

    def session(self, name: str, owner: str) -> TinkerSession:
        """Returns an open session. Raises NotFound, or Conflict for a finished one."""
        session = self.find(TinkerSession, name, owner)
        if session.finished:
            raise Conflict(
                "this session is finished",
                field="session_id",
                value=name,
                remedy="make a new ServiceClient",
                status=410,
            )
        return session

    def check_quota(self, owner: str) -> None:
        """Raises TooLarge when a client has as many runs as it may."""
        runs = len(self.owned(TinkerRun, owner, failed=False))
        if runs >= self._most_runs:
            raise TooLarge(
                f"this client has {runs} runs",
                field="model_seq_id",
                value=runs,
                remedy="delete a run that is no longer needed (DELETE /api/v1/training_runs/ID), "
                "or start the server with a larger tinker.max_runs",
            )

    # ------------------------------------------------------------ files

    def folder(self, run: str) -> Path:
        """Returns the directory of a run's files."""
        return self._directory / "runs" / run.replace(":", "-")

    def files(self, checkpoint: Checkpoint) -> Path:
        """Returns the directory of a checkpoint's files."""
        return self.folder(checkpoint.run) / checkpoint.folder

    def snapshot(self, run: TinkerRun) -> Path:
        """Returns the directory of a run's last snapshot."""
        return self.folder(run.id) / f"state-{run.snapshot}"

    def outdated(self) -> list[Checkpoint]:
        """Returns checkpoints that have expired, and unnamed ones beyond a run's newest."""
        found = []
        newer: Counter[str] = Counter()  # unnamed ones of each run
        for each in reversed(list(self.all(Checkpoint))):
            newer[each.run] += each.unnamed
            is_old = each.unnamed and newer[each.run] > KEPT_UNNAMED
            if is_old or (each.expires and each.expires < time.time()):
                found.append(each)
        return found

    async def delete(self, checkpoint: Checkpoint, journal: Journal) -> None:
        """Forgets a checkpoint, with its sampler if it is unnamed; then removes its files."""
        gone: list[Record] = [checkpoint]
        if checkpoint.unnamed:
            gone += self.owned(Sampler, checkpoint.owner, path=checkpoint.path)
        await self.forget(gone, journal)
        await remove_files(self.files(checkpoint))

    async def forget(self, records: Sequence[Record], journal: Journal) -> None:
        """Forgets records with their operations."""

        def write(store: TinkerStore) -> None:
            for record in records:
                store.drop(record)

        await journal.run(write)
        for record in records:
            self.remove(record)

    def sweep(self) -> None:
        """Removes files that belong to no record: a killed process had begun or not yet removed
        them.
        """
        named = {self.files(each) for each in self.all(Checkpoint)}
        for run in self.all(TinkerRun):
            named.add(self.snapshot(run))
        for folder in self._directory.glob("runs/*/*"):
            if folder not in named:
                shutil.rmtree(folder, ignore_errors=True)


async def remove_files(folder: Path) -> None:
    """Removes a folder if it is there. Its name is free at once; a thread removes the files."""
    gone = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
    try:
        folder.rename(gone)  # noqa: ASYNC240
    except FileNotFoundError:
        return
    await asyncio.to_thread(shutil.rmtree, gone, ignore_errors=True)
