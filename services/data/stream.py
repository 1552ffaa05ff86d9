"""The stream of training prompts: a deterministic order, endless epochs, and a cursor that survives
a kill.

The prompt at a position is a pure function of seed and position, so the cursor is the only state.
It is on disk before
a batch is returned: no prompt is handed out twice in an epoch, however many clients there are and
whenever the process ends. A client whose response was lost gets the same batch by repeating its
`request_id`. With a curriculum (`services.data.curriculum`) prompts are drawn, and the draws are
stored with the cursor. SQLite has no checksum of its pages, so every row has one (`seal`), which is
compared when the row is read.
"""

import hashlib
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, InvalidInput, NotReady
from common.process import logs
from common.process.current_run import CurrentRun
from common.process.storage import (
    Damaged,
    OpenedFile,
    StorageFailed,
    has_declarations,
    is_damage,
    sqlite_damage,
    sqlite_remedy,
    sum_of,
)
from common.wire.schemas import Prompt, PromptBatch, Wire
from common.wire.store_mark import StoreMark
from services.data.curriculum import SCHEMA, Curriculum, CurriculumStats, Difficulty

REMEMBERED_REQUESTS = 10_000
_VERSION = 2  # of the schema below
_SHUFFLED = "shuffled"
_ORDERED = "ordered"
_SEEK = "seek"
"""In the place of a stream: an answer to `POST /seek`."""
_REMEDY = "remove the file: the stream then starts over"
_SCHEMA = """
CREATE TABLE identity (
    seed TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    seal INTEGER NOT NULL
) STRICT;
CREATE TABLE cursors (
    stream TEXT PRIMARY KEY,
    position INTEGER NOT NULL,
    served INTEGER NOT NULL,
    seal INTEGER NOT NULL
) STRICT;
CREATE TABLE answers (
    serial INTEGER PRIMARY KEY,
    request_id TEXT NOT NULL UNIQUE,
    stream TEXT NOT NULL,
    position INTEGER NOT NULL,
    count INTEGER NOT NULL,
    seal INTEGER NOT NULL
) STRICT;
CREATE TABLE life (identity INTEGER NOT NULL, changes INTEGER NOT NULL, seal INTEGER NOT NULL)
    STRICT;
PRAGMA user_version = 2;
"""


class StreamStats(Wire):
    """State of the shuffled stream."""

    position: int
    """Prompts taken, over all epochs."""
    epoch: int
    prompts_served: int
    """Prompts handed out by both streams since the state directory was created; repeated responses
    count once."""
    curriculum: CurriculumStats | None = None
    """Absent without a curriculum."""


def permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Returns the order of an epoch: [size] indices.

    It uses the raw stream of PCG64, which numpy never changes, so a cursor stays valid with other
    versions of numpy.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.argsort(bits.random_raw(size), kind="stable")


class PromptStream:
    """Two streams over the same prompts, one shuffled and one in the order of the data set, each
    with its own cursor.

    Thread-safe; several processes on one state directory share the cursors. With `difficulty` a
    curriculum draws the shuffled stream. Raises ConfigError when the state directory cannot be
    used, is damaged, or belongs to another seed, data set or kind of stream.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        seed: int,
        state_dir: Path,
        difficulty: Difficulty | None = None,
    ) -> None:
        assert prompts
        self.prompts = prompts
        self.seed = seed
        self.path = state_dir / "data" / "stream.db"
        self.mark: StoreMark
        """After the last transaction of this process."""
        self._lock = threading.Lock()
        # In memory: a late call waits in a connection, which a restart of this process closes.
        self._runs = CurrentRun()
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._places = {prompt.id: place for place, prompt in enumerate(prompts)}
        self._curriculum: Curriculum | None = None
        if difficulty:
            self._curriculum = Curriculum(len(prompts), seed, difficulty, plain=self._place_at)
        self._db = self._open()

    def take(self, count: int, shuffle: bool = True, request_id: str | None = None) -> PromptBatch:
        """Returns the next `count` prompts; a batch may cross into the next epoch.

        Repeating a recent `request_id` returns the same batch and moves nothing. Raises
        InvalidInput when the id was used for another request, and NotReady when the cursor cannot
        be stored; nothing was handed out then.
        """
        stream = _SHUFFLED if shuffle else _ORDERED
        with self._transaction() as db:
            self._runs.check(logs.run_id())
            position = None
            if request_id is not None:
                position = self._repeated(db, request_id, stream, count)
            if position is None:
                position = self._advance(db, stream, count)
                if request_id is not None:
                    self._remember(db, request_id, stream, position=position, count=count)

            if not shuffle:
                places = [i % len(self.prompts) for i in range(position, position + count)]
            elif self._curriculum:
                places = self._curriculum.places(db, position, count)
                if len(places) != count:
                    raise Damaged(f"{count - len(places)} draws from position {position} are gone")
            else:
                places = [self._place_at(i) for i in range(position, position + count)]
        return PromptBatch(
            prompts=[self.prompts[place] for place in places],
            total_available=len(self.prompts),
            epoch=position // len(self.prompts),
            position=position,
        )

    def _advance(self, db: sqlite3.Connection, stream: str, count: int) -> int:
        """Moves a cursor on by `count` prompts. Returns where it was."""
        position, served = self._cursor(db, stream)
        self._set_cursor(db, stream, position + count, served + count)
        if stream == _SHUFFLED and self._curriculum:
            self._curriculum.draw(db, position, count)
        return position

    @staticmethod
    def _cursor(db: sqlite3.Connection, stream: str) -> tuple[int, int]:
        """Returns the position of a stream, and how many prompts it has handed out."""
        query = "SELECT position, served, seal FROM cursors WHERE stream = ?"
        position, served, seal = db.execute(query, (stream,)).fetchone() or (0, 0, None)
        if seal != sum_of((stream, position, served)):
            raise Damaged(f"the cursor of the {stream} stream differs from its checksum")
        return position, served

    @staticmethod
    def _set_cursor(db: sqlite3.Connection, stream: str, position: int, served: int) -> None:
        cursor = (stream, position, served)
        db.execute("REPLACE INTO cursors VALUES (?, ?, ?, ?)", (*cursor, sum_of(cursor)))

    def report(self, pass_rates: Sequence[tuple[str, float]], request_id: str) -> None:
        """Reports (prompt id, pass rate) pairs to the curriculum; repeating a `request_id` changes
        nothing.

        Raises InvalidInput without a curriculum, for a prompt that is not in the training split,
        and when the `request_id` was used for other pass rates; NotReady when they cannot be
        stored.
        """
        if self._curriculum is None:
            raise InvalidInput(
                "this data-server has no curriculum, so it does not use pass rates",
                field="data.curriculum",
                value="none",
                remedy="set data.curriculum difficulty",
            )
        unknown = next((name for name, _ in pass_rates if name not in self._places), None)
        if unknown is not None:
            raise InvalidInput(
                "there is no such prompt in the training split",
                field="prompt_ids",
                value=unknown,
                remedy=f"ids are like {self.prompts[0].id}",
            )
        by_place = [(self._places[name], rate) for name, rate in pass_rates]
        with self._transaction() as db:
            self._runs.check(logs.run_id())
            position, _ = self._cursor(db, _SHUFFLED)
            self._curriculum.report(db, request_id, by_place, position)

    def read_mark(self) -> StoreMark:
        """Returns the mark now, with the changes of other processes."""
        with self._transaction():
            pass
        return self.mark

    @staticmethod
    def _stored_mark(db: sqlite3.Connection) -> StoreMark:
        query = "SELECT identity, changes, seal FROM life"
        *found, seal = db.execute(query).fetchone() or (None,)
        if seal != sum_of(tuple(found)):
            raise Damaged("the count of changes differs from its checksum")
        return StoreMark(*found)

    @staticmethod
    def _set_mark(db: sqlite3.Connection, mark: StoreMark) -> None:
        db.execute("DELETE FROM life")
        db.execute("INSERT INTO life VALUES (?, ?, ?)", (*mark, sum_of(tuple(mark))))

    def seek(self, position: int, request_id: str | None = None) -> None:
        """Continues the shuffled stream at `position`, counted in prompts from its beginning. A
        repeated `request_id` moves nothing.

        Forgets remembered batches that reach beyond it, since their prompts are drawn again. A
        curriculum returns to its state at that position. The caller's run begins: calls of the
        runs before it raise Conflict.
        """
        with self._transaction() as db:
            self._runs.check(logs.run_id())
            if request_id is not None:
                if self._repeated(db, request_id, _SEEK, count=0) is not None:
                    return
                self._remember(db, request_id, _SEEK, position=position, count=0)
            _, served = self._cursor(db, _SHUFFLED)
            self._set_cursor(db, _SHUFFLED, position, served)
            db.execute(
                "DELETE FROM answers WHERE stream = ? AND position + count > ?",
                (_SHUFFLED, position),
            )
            if self._curriculum:
                self._curriculum.rewind(db, position)
        self._runs.begin(logs.run_id())

    def reset(self) -> None:
        """Restarts both streams and forgets remembered requests and pass rates."""
        with self._transaction() as db:
            for stream in (_SHUFFLED, _ORDERED):
                _, served = self._cursor(db, stream)
                self._set_cursor(db, stream, 0, served)
            db.execute("DELETE FROM answers")
            if self._curriculum:
                self._curriculum.rewind(db, -1)  # before every draw and every report

    def stats(self) -> StreamStats:
        with self._transaction() as db:
            position, shuffled = self._cursor(db, _SHUFFLED)
            _, ordered = self._cursor(db, _ORDERED)
            curriculum = self._curriculum.stats(db) if self._curriculum else None
        epoch = position // len(self.prompts)
        return StreamStats(
            position=position,
            epoch=epoch,
            prompts_served=shuffled + ordered,
            curriculum=curriculum,
        )

    def flush(self) -> None:
        """Moves the write-ahead log into the database file. Every answer is durable without it."""
        with self._lock, self._named_errors():
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _place_at(self, index: int) -> int:
        """Returns the index of the prompt at a position of the plain shuffled stream."""
        epoch, place = divmod(index, len(self.prompts))
        if epoch not in self._orders:
            if len(self._orders) >= 2:  # a batch at the border of two epochs needs both
                self._orders.pop(min(self._orders))
            self._orders[epoch] = permutation(self.seed, epoch, len(self.prompts))
        return int(self._orders[epoch][place])

    @staticmethod
    def _repeated(db: sqlite3.Connection, request_id: str, stream: str, count: int) -> int | None:
        row = db.execute(
            "SELECT stream, position, count, seal FROM answers WHERE request_id = ?", (request_id,)
        ).fetchone()
        if row is None:
            return None
        if row[3] != sum_of((request_id, *row[:3])):
            raise Damaged(f"the answer to {request_id} differs from its checksum")
        if row[0] != stream or row[2] != count:
            raise InvalidInput(
                f"the request_id was used for batch_size={row[2]}, "
                f"shuffle={str(row[0] == _SHUFFLED).lower()}",
                field="request_id",
                value=request_id,
                remedy="repeat that request unchanged, or use a new request_id",
            )
        return int(row[1])

    @staticmethod
    def _remember(
        db: sqlite3.Connection, request_id: str, stream: str, *, position: int, count: int
    ) -> None:
        new = (
            "INSERT INTO answers (request_id, stream, position, count, seal) VALUES (?, ?, ?, ?, ?)"
        )
        answer = (request_id, stream, position, count)
        db.execute(new, (*answer, sum_of(answer)))
        db.execute(
            "DELETE FROM answers WHERE serial <= last_insert_rowid() - ?", (REMEMBERED_REQUESTS,)
        )

    # ------------------------------------------------------------ the file

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Transactions are explicit; `_lock` makes one connection safe for all threads.
            db = sqlite3.connect(
                self.path, timeout=30, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error, "set state_dir to a writable folder") from None
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.execute("BEGIN IMMEDIATE")
            self._check_or_create(db)
            self.mark = self._stored_mark(db)
            db.execute("COMMIT")
            self._opened = OpenedFile(self.path)
        except (sqlite3.Error, UnicodeError, ConfigError) as error:
            db.close()
            if isinstance(error, ConfigError):
                raise
            remedy = sqlite_remedy(str(error), _REMEDY)
            raise self._unusable(error, remedy) from None
        return db

    def _check_or_create(self, db: sqlite3.Connection) -> None:
        ((version,),) = db.execute("PRAGMA user_version")
        identity = (str(self.seed), _fingerprint(self.prompts))
        if version == 0:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
            db.execute("INSERT INTO identity VALUES (?, ?, ?)", (*identity, sum_of(identity)))
            for stream in (_SHUFFLED, _ORDERED):
                self._set_cursor(db, stream, position=0, served=0)
            self._set_mark(db, StoreMark(secrets.randbits(52), 0))
            if self._curriculum:
                self._curriculum.create(db)
            return
        problem = sqlite_damage(db, "integrity_check")
        if problem:
            raise sqlite3.DatabaseError(problem)
        if version != _VERSION:
            raise sqlite3.DatabaseError(f"its version is {version}, not {_VERSION}")
        schema = _SCHEMA + (SCHEMA if Curriculum.exists(db) else "")
        if not has_declarations(db, schema):
            raise Damaged("the declarations of its tables are damaged")
        for stream in (_SHUFFLED, _ORDERED):
            self._cursor(db, stream)
        self._check_identity(db, identity)

    def _check_identity(self, db: sqlite3.Connection, identity: tuple[str, str]) -> None:
        """Raises ConfigError when the cursor belongs to another stream."""
        *found, seal = db.execute("SELECT seed, fingerprint, seal FROM identity").fetchone()
        stored = tuple(found)
        if seal != sum_of(stored):
            raise Damaged("the identity of the stream differs from its checksum")
        drawn = Curriculum.exists(db)
        if stored != identity or drawn != (self._curriculum is not None):
            changed = f"a stream {'with' if drawn else 'without'} a curriculum"
            if stored[0] != identity[0]:
                changed = f"seed {stored[0]}, not {self.seed}"
            elif stored != identity:
                changed = "other training problems, or to these in another order"
            raise ConfigError(
                f"the cursor in {self.path} belongs to {changed}",
                field="state_dir",
                value=str(self.path.parents[1]),
                remedy="restore the seed and the data settings, remove the file to start over, or "
                "set another state_dir",
            )

    def _unusable(self, error: Exception, remedy: str) -> ConfigError:
        return ConfigError(
            f"the cursor of the prompts cannot be used: {error}",
            field="state_dir",
            value=str(self.path),
            remedy=remedy,
        )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._named_errors():
            self._check_place()
            self._db.execute("BEGIN IMMEDIATE")
            try:
                before = self._db.total_changes
                yield self._db
                mark = self._stored_mark(self._db)
                if self._db.total_changes != before:
                    mark = mark._replace(changes=mark.changes + 1)
                    self._set_mark(self._db, mark)
                self._db.execute("COMMIT")
                self.mark = mark
            except BaseException:
                if self._curriculum:
                    self._curriculum.forget()
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _check_place(self) -> None:
        """Raises StorageFailed when another program has replaced the file under this process, whose
        changes would be lost when it ends.
        """
        if self._opened.is_replaced():
            raise StorageFailed(
                "the cursor of the prompts was removed or replaced while this service had it open",
                field="state_dir",
                value=str(self.path),
                remedy="stop the run, put the directory into the state that is wanted, and start "
                "the run again: it resumes from its checkpoint",
                code="replaced",
            )

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:
            if is_damage(error):
                raise StorageFailed(
                    f"the cursor of the prompts is damaged: {error}",
                    field="state_dir",
                    value=str(self.path),
                    remedy=f"check the disk; {_REMEDY}",
                    code="damaged",
                ) from None
            raise NotReady(
                f"the cursor of the prompts cannot be stored: {error}",
                field="state_dir",
                value=str(self.path),
                remedy="check that the disk has space and works; no prompt was handed out",
            ) from None


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        for text in (prompt.id, prompt.prompt, prompt.ground_truth):
            data = text.encode()
            digest.update(b"%d:" % len(data))
            digest.update(data)
    return digest.hexdigest()
