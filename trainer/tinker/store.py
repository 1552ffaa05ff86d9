"""The file of the server: every operation before it is answered, and its result.

An operation is known by its line (a run or a sampler) and its number in it. What a client sends
again finds the same one. `Journal` writes what is due at the same time in one transaction.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, get_args

import msgspec

from common.errors import InvalidInput, NotFound, ServiceError
from common.process.storage import StorageFailed
from services.http.sqlite_store import TABLES, Damaged, SqliteStore, sealed, sum_of, unsealed
from trainer.tinker.records import Record, TinkerOperation, TinkerResult, TinkerRun

log = logging.getLogger(__name__)
_SCHEMA = (
    TABLES
    + """
CREATE TABLE records (name TEXT PRIMARY KEY NOT NULL, kind TEXT NOT NULL, document TEXT NOT NULL,
    seal INTEGER NOT NULL) STRICT;
CREATE TABLE operations (line TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
    body_sum INTEGER NOT NULL, seal INTEGER NOT NULL, body BLOB, PRIMARY KEY (line, seq)) STRICT;
CREATE TABLE results (finished INTEGER PRIMARY KEY AUTOINCREMENT, line TEXT NOT NULL,
    seq INTEGER NOT NULL, ok INTEGER NOT NULL, content BLOB NOT NULL, is_json INTEGER NOT NULL,
    weights TEXT NOT NULL, seal INTEGER NOT NULL, UNIQUE (line, seq)) STRICT;
CREATE INDEX by_end ON results (line, finished);
"""
)
_KINDS: dict[str, type[Record]] = {kind.__name__: kind for kind in get_args(Record)}
KEPT_RESULTS = 256
"""Results of a run's latest operations that a client can still ask for."""
AGAIN_S = 5.0
"""Between attempts to write to a full disk."""
_T = TypeVar("_T")


class TinkerStore(SqliteStore):
    """Operations and records on disk. Its methods run within a transaction."""

    name = "the file of the Tinker server"
    layout = 3
    restore = "restore it from a backup, or start in another directory"
    pragmas = ("locking_mode = EXCLUSIVE",)
    busy_s = 5

    def __init__(self, path: Path) -> None:
        super().__init__(path, _SCHEMA)
        # It counts on when the latest results have been dropped: clients have seen their numbers.
        counted = self.db.execute("SELECT MAX(seq) FROM sqlite_sequence WHERE name = 'results'")
        self._finished: int = counted.fetchone()[0] or 0

    # ------------------------------------------------------------ records

    def records(self) -> list[Record]:
        """Returns all sessions, runs, samplers and checkpoints."""
        found: list[Record] = []
        for row in self.db.execute("SELECT name, kind, document, seal FROM records"):
            _, kind, document = unsealed(row, f"the record {row[0]}")
            found.append(msgspec.json.decode(document, type=_KINDS[kind]))
        return found

    def put(self, record: Record) -> None:
        """Writes a record in the place of an earlier one of its name."""
        row = (record.id, type(record).__name__, msgspec.json.encode(record).decode())
        self.db.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", sealed(row))

    def drop(self, record: Record) -> None:
        """Forgets a record, with all operations if it is a run or a sampler."""
        self.db.execute("DELETE FROM records WHERE name = ?", (record.id,))
        self._drop("line = ?", [(record.id,)])

    # ------------------------------------------------------------ operations

    def accept(self, operation: TinkerOperation, first: int = 0) -> bool:
        """Writes a new operation; returns False for one that is there already.

        Raises InvalidInput when another one has its number, or a new one has a number below
        `first`: those were applied so long ago that they are forgotten.
        """
        key = (operation.line, operation.seq)
        row = (*key, operation.kind, sum_of(operation.body))
        if self._row("operations", *key) is not None:
            if self._accepted(*key)[:-1] != row:
                raise InvalidInput(
                    "another request has this sequence number",
                    field="seq_id",
                    value=operation.seq,
                    remedy="give every request of a run the next number, and send a repeated one "
                    "unchanged",
                )
            return False
        if operation.seq < first:
            raise InvalidInput(
                "the request with this sequence number was applied long ago",
                field="seq_id",
                value=operation.seq,
                remedy=f"go on with {first}",
            )
        values = (*sealed(row), operation.body)
        self.db.execute("INSERT INTO operations VALUES (?, ?, ?, ?, ?, ?)", values)
        return True

    def operation(self, line: str, seq: int) -> TinkerOperation:
        """Returns an operation that has not been applied for good. Raises Damaged, and NotFound
        for one that was dropped.
        """
        *_, kind, body_sum, body = self._accepted(line, seq)
        if sum_of(body) != body_sum:
            raise Damaged(f"the body of operation {seq} of {line} differs from its checksum")
        return TinkerOperation(line, seq, kind, body)

    def _accepted(self, line: str, seq: int) -> tuple[Any, ...]:
        """Returns line, number, kind, checksum of the body, and the body of an operation. Raises
        NotFound.
        """
        row = self._row("operations", line, seq)
        if row is None:
            raise NotFound(
                "there is no such request, or its result was fetched and dropped",
                field="request_id",
                value=f"{line}:op:{seq}",
                remedy="ask for a request of this server, soon after it was sent",
            )
        return *unsealed(row[:-1], f"operation {seq} of {line}"), row[-1]

    def _row(self, table: str, line: str, seq: int) -> Any:
        """Returns the row of an operation; None when there is none."""
        query = f"SELECT * FROM {table} WHERE line = ? AND seq = ?"  # noqa: S608
        return self.db.execute(query, (line, seq)).fetchone()

    def waiting(self) -> list[tuple[str, int]]:
        """Returns lines and numbers of the operations without a result, in order."""
        return self.db.execute(
            "SELECT line, seq FROM operations LEFT JOIN results USING (line, seq) "
            "WHERE ok IS NULL ORDER BY line, seq"
        ).fetchall()

    def applied(self) -> dict[str, int]:
        """Returns the number of the latest result of every line."""
        return dict(self.db.execute("SELECT line, MAX(seq) FROM results GROUP BY line").fetchall())

    def since(self, run: TinkerRun) -> list[tuple[TinkerOperation, TinkerResult]]:
        """Returns the operations since the run's snapshot that can be applied again, in order."""
        found = []
        for (seq,) in self.db.execute(
            "SELECT seq FROM operations JOIN results USING (line, seq) "
            "WHERE line = ? AND seq > ? AND body IS NOT NULL ORDER BY seq",
            (run.id, run.snapshot),
        ).fetchall():
            result = self.result(run.id, seq)
            assert result is not None
            found.append((self.operation(run.id, seq), result))
        return found

    # ------------------------------------------------------------ results

    def finish(self, line: str, seq: int, result: TinkerResult, *, repeatable: bool) -> None:
        """Writes the result of an operation, and keeps its body if it may be applied again. Does
        nothing if the operation was dropped while it was being applied, or has a result already.
        """
        if self._row("operations", line, seq) is None:
            return
        self._finished += 1
        if not repeatable:
            self._drop_bodies(line, range(seq, seq + 1))
        values = (self._finished, line, seq, int(result.ok), result.content, int(result.is_json))
        self.db.execute(
            "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            sealed((*values, result.weights)),
        )

    def result(self, line: str, seq: int) -> TinkerResult | None:
        """Returns a result; None when there is none yet.

        Raises NotFound for an operation that was never accepted, or whose result is gone.
        """
        row = self._row("results", line, seq)
        if row is None:
            self._accepted(line, seq)
            return None
        finished, _, _, ok, *rest = unsealed(row, f"result {seq} of {line}")
        content, is_json, weights = rest
        return TinkerResult(bool(ok), content, bool(is_json), finished=finished, weights=weights)

    def finished_after(self, line: str, block: range, after: int) -> list[tuple[int, int, int]]:
        """Returns (seq, finished, ok) of the results of a line's numbers in `block` that came after
        the result `after`, in order.
        """
        return self.db.execute(
            "SELECT seq, finished, ok FROM results WHERE line = ? AND finished > ? AND seq >= ? "
            "AND seq < ? ORDER BY finished LIMIT 1000",
            (line, after, block.start, block.stop),
        ).fetchall()

    def forget(self, line: str, seqs: Sequence[int]) -> None:
        """Drops operations whose results were fetched."""
        self._drop("line = ? AND seq = ?", [(line, seq) for seq in seqs])

    def put_run(self, run: TinkerRun) -> None:
        """Writes a run, and drops what its snapshot makes superfluous: bodies, and what is long
        before it.
        """
        self.put(run)
        self._drop_bodies(run.id, range(run.snapshot + 1))
        # Without its operation, a result that is gone is not taken for one that is to come.
        self._drop("line = ? AND seq <= ?", [(run.id, run.snapshot - KEPT_RESULTS)])

    def _drop(self, which: str, values: Sequence[tuple[object, ...]]) -> None:
        """Drops operations and their results."""
        for table in ("operations", "results"):
            self.db.executemany(f"DELETE FROM {table} WHERE {which}", values)  # noqa: S608

    def _drop_bodies(self, line: str, seqs: range) -> None:
        self.db.execute(
            "UPDATE operations SET body = NULL WHERE line = ? AND seq >= ? AND seq < ?",
            (line, seqs.start, seqs.stop),
        )


class Journal:
    """Runs work on the store in a thread; work that waits at the same time shares a transaction.

    Work that raises a ServiceError must not have changed anything yet.
    """

    def __init__(self, store: TinkerStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinker-store")
        self._due: SimpleQueue[tuple[Callable[[TinkerStore], Any], Future[Any]]] = SimpleQueue()
        self.waits_for: str | None = None
        """What results wait for before they are written, if so."""

    async def run(self, work: Callable[[TinkerStore], _T]) -> _T:
        """Returns what `work` returns, once it is on disk."""
        done: Future[_T] = Future()
        self._due.put((work, done))
        # What else is due in this turn of the loop is written with it.
        asyncio.get_running_loop().call_soon(self._thread.submit, self._write)
        # A caller that is cancelled does not undo what is written with it.
        return await asyncio.shield(asyncio.wrap_future(done))

    async def settle(self, work: Callable[[TinkerStore], None]) -> None:
        """Has `work` written as `run` does, and waits while the disk is full: what was computed is
        not lost, nor computed twice.
        """
        while True:
            try:
                await self.run(work)
                self.waits_for = None
                return
            except StorageFailed as error:
                if error.code != "disk_full":
                    raise
                self.waits_for = str(error)
            log.warning("results wait: %s", self.waits_for)
            await asyncio.sleep(AGAIN_S)

    async def close(self) -> None:
        """Waits until all work is on disk, and closes the file."""
        await self.run(lambda _: None)
        await asyncio.to_thread(self._thread.shutdown)
        self._store.close()

    def _write(self) -> None:
        # An earlier call may have done it already.
        batch = [self._due.get() for _ in range(self._due.qsize())]
        outcomes = self._outcomes([work for work, _ in batch])
        for (_, done), outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)

    def _outcomes(self, works: Sequence[Callable[[TinkerStore], Any]]) -> list[Any]:
        """Runs several pieces of work in one transaction; returns what each returns or raises."""
        outcomes: list[Any] = []
        try:
            with self._store.transaction():
                for work in works:
                    try:
                        outcomes.append(work(self._store))
                    except ServiceError as error:
                        outcomes.append(error)
            return outcomes
        except Exception as error:
            if len(works) == 1:
                return [error]
        # One of them breaks, and nothing is written: the others are not to fail with it.
        return [self._outcomes([work])[0] for work in works]
