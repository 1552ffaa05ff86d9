"""The stream of training prompts: a deterministic order, endless epochs, and a cursor that survives
a kill.

The prompt at a position is a pure function of seed and position, so the cursor is the only state.
It is on disk before a batch is returned: no prompt is handed out twice in an epoch, however many
clients there are and whenever the process ends. A client whose response was lost gets the same
batch by repeating its `request_id`. With a curriculum (`services.data.curriculum`) prompts are
drawn, and the draws are stored with the cursor.
"""

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError, InvalidInput
from common.process import logs
from common.process.current_run import CurrentRun
from common.wire.schemas import Prompt, PromptBatch, Wire
from services.data.curriculum import SCHEMA, Curriculum, CurriculumStats, Difficulty
from services.http.sqlite_store import TABLES, Damaged, SqliteStore, sealed, unsealed

_SHUFFLED = "shuffled"
_ORDERED = "ordered"
# Stands in a remembered answer in the place of the stream: it is one to `POST /seek`.
_SEEK = "seek"
# The call under which answers are remembered: one for prompts and seeks, so that an id of the one
# that is used again for the other is refused.
_CALL = "stream"
_SCHEMA = """
CREATE TABLE identity (
    seed TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    curriculum TEXT NOT NULL,
    seal INTEGER NOT NULL
) STRICT;
CREATE TABLE cursors (
    stream TEXT PRIMARY KEY,
    position INTEGER NOT NULL,
    served INTEGER NOT NULL,
    seal INTEGER NOT NULL
) STRICT;
"""


class StreamStats(Wire):
    """State of the shuffled stream."""

    position: int
    """Prompts taken, over all epochs."""
    epoch: int
    prompts_served: int
    """Prompts handed out by both streams since the state directory was created; repeated responses
    count once."""
    run: str
    """The run that has begun last; empty before the first."""
    curriculum: CurriculumStats | None = None
    """Absent without a curriculum."""


def permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Returns the order of an epoch: [size] indices.

    It uses the raw stream of PCG64, which numpy never changes, so a cursor stays valid with other
    versions of numpy.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.argsort(bits.random_raw(size), kind="stable")


class PromptStream(SqliteStore):
    """Two streams over the same prompts, one shuffled and one in the order of the data set, each
    with its own cursor.

    Thread-safe; several processes on one state directory share the cursors. With `difficulty` a
    curriculum draws the shuffled stream. Raises ConfigError when the state directory cannot be
    used, is damaged, or belongs to another seed, data set or kind of stream.
    """

    name = "the cursor of the prompts"
    layout = 4
    restore = "remove the file: the stream then starts over"

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
        # A batch at the border of two epochs needs both.
        self._order = lru_cache(maxsize=2)(partial(permutation, seed, size=len(prompts)))
        self._places = {prompt.id: place for place, prompt in enumerate(prompts)}
        self._curriculum: Curriculum | None = None
        if difficulty:
            self._curriculum = Curriculum(len(prompts), seed, difficulty, plain=self._place_at)
        super().__init__(state_dir / "data" / "stream.db", TABLES + _SCHEMA + SCHEMA)
        self._runs = CurrentRun(self.runs())

    def take(self, count: int, shuffle: bool = True, request_id: str | None = None) -> PromptBatch:
        """Returns the next `count` prompts; a batch may cross into the next epoch.

        Repeating a recent `request_id` returns the same batch and moves nothing. Raises
        InvalidInput when the id was used for another request, and NotReady when the cursor cannot
        be stored; nothing was handed out then.
        """
        stream = _SHUFFLED if shuffle else _ORDERED
        with self.transaction() as db:
            self._runs.check(logs.run_id())
            position = None
            if request_id is not None:
                position = self._repeated(request_id, stream, count)
            if position is None:
                position, served = self._cursor(db, stream)
                self._set_cursor(db, stream, position + count, served + count)
                if shuffle and self._curriculum:
                    self._curriculum.draw(db, position, count)
                if request_id is not None:
                    drawn = {"stream": stream, "position": position, "count": count}
                    self.remember(_CALL, request_id, drawn)

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

    @staticmethod
    def _cursor(db: sqlite3.Connection, stream: str) -> tuple[int, int]:
        """Returns the position of a stream, and how many prompts it has handed out."""
        query = "SELECT stream, position, served, seal FROM cursors WHERE stream = ?"
        row = db.execute(query, (stream,)).fetchone()
        _, position, served = unsealed(row, f"the cursor of the {stream} stream")
        return position, served

    @staticmethod
    def _set_cursor(db: sqlite3.Connection, stream: str, position: int, served: int) -> None:
        db.execute("REPLACE INTO cursors VALUES (?, ?, ?, ?)", sealed((stream, position, served)))

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
        with self.transaction() as db:
            self._runs.check(logs.run_id())
            position, _ = self._cursor(db, _SHUFFLED)
            self._curriculum.report(db, request_id, by_place, position)

    def seek(self, position: int, request_id: str | None = None, replaces: str = "") -> None:
        """Continues the shuffled stream at `position`, counted in prompts from its beginning. A
        repeated `request_id` moves nothing.

        Forgets remembered batches that reach beyond it, since their prompts are drawn again. A
        curriculum returns to its state at that position. The caller's run begins: calls of the
        runs before it raise Conflict. So does this one when another run than `replaces` is the
        current one.
        """
        run_id = logs.run_id()
        # The lock, so that runs are known here in the order in which they are stored.
        with self._lock:
            with self.transaction() as db:
                self._runs.check_begin(run_id, replaces)
                if request_id is not None:
                    if self._repeated(request_id, _SEEK, count=0) is not None:
                        return
                    moved = {"stream": _SEEK, "position": position, "count": 0}
                    self.remember(_CALL, request_id, moved)
                _, served = self._cursor(db, _SHUFFLED)
                self._set_cursor(db, _SHUFFLED, position, served)
                db.execute(
                    "DELETE FROM answers WHERE json_extract(answer, '$.stream') = ? AND "
                    "json_extract(answer, '$.position') + json_extract(answer, '$.count') > ?",
                    (_SHUFFLED, position),
                )
                if self._curriculum:
                    self._curriculum.rewind(db, position)
                if run_id not in self.runs():
                    self.begin_run(run_id)
            self._runs.begin(run_id)

    def reset(self) -> None:
        """Restarts both streams and forgets remembered requests and pass rates."""
        with self.transaction() as db:
            for stream in (_SHUFFLED, _ORDERED):
                _, served = self._cursor(db, stream)
                self._set_cursor(db, stream, 0, served)
            db.execute("DELETE FROM answers")
            if self._curriculum:
                self._curriculum.rewind(db, -1)  # before every draw and every report

    def stats(self) -> StreamStats:
        with self.transaction() as db:
            position, shuffled = self._cursor(db, _SHUFFLED)
            _, ordered = self._cursor(db, _ORDERED)
            curriculum = self._curriculum.stats(db) if self._curriculum else None
        return StreamStats(
            position=position,
            epoch=position // len(self.prompts),
            prompts_served=shuffled + ordered,
            run=self._runs.current,
            curriculum=curriculum,
        )

    def _place_at(self, index: int) -> int:
        """Returns the index of the prompt at a position of the plain shuffled stream."""
        epoch, place = divmod(index, len(self.prompts))
        return int(self._order(epoch)[place])

    def _repeated(self, request_id: str, stream: str, count: int) -> int | None:
        """Returns the position that a request got before; None when it is new."""
        answer = self.answer_to(_CALL, request_id)
        if not answer:
            return None
        if (answer["stream"], answer["count"]) != (stream, count):
            raise InvalidInput(
                f"the request_id was used for batch_size={answer['count']}, "
                f"shuffle={str(answer['stream'] == _SHUFFLED).lower()}",
                field="request_id",
                value=request_id,
                remedy="repeat that request unchanged, or use a new request_id",
            )
        return int(answer["position"])

    # ------------------------------------------------------------ the file

    def fill(self, db: sqlite3.Connection) -> None:
        """Stores the identity of the stream, and cursors at its beginning."""
        db.execute("INSERT INTO identity VALUES (?, ?, ?, ?)", sealed(self._kind()))
        for stream in (_SHUFFLED, _ORDERED):
            self._set_cursor(db, stream, position=0, served=0)

    def check_content(self) -> None:
        """Raises Damaged for a cursor that differs from its checksum, and ConfigError for one of
        another stream.
        """
        for stream in (_SHUFFLED, _ORDERED):
            self._cursor(self.db, stream)
        found = unsealed(
            self.db.execute("SELECT * FROM identity").fetchone(), "the identity of the stream"
        )
        if found == self._kind():
            return
        seed, fingerprint, curriculum = found
        if seed != str(self.seed):
            changed = f"seed {seed}, not {self.seed}"
        elif fingerprint != _fingerprint(self.prompts):
            changed = "other training problems, or to these in another order"
        else:
            changed = f"a stream with the curriculum {curriculum}"
        raise ConfigError(
            f"the cursor in {self.path} belongs to {changed}",
            field="state_dir",
            value=str(self.path.parents[1]),
            remedy="restore the seed and the data settings, remove the file to start over, or set "
            "another state_dir",
        )

    def _kind(self) -> tuple[str, str, str]:
        """Returns what a cursor is only valid with: seed, prompts and kind of curriculum."""
        return (
            str(self.seed),
            _fingerprint(self.prompts),
            "difficulty" if self._curriculum else "none",
        )

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Runs a transaction; when it fails, the curriculum forgets what it has read in it."""
        with self._lock:
            try:
                with super().transaction() as db:
                    yield db
            except BaseException:
                if self._curriculum:
                    self._curriculum.forget()
                raise


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        for text in (prompt.id, prompt.prompt, prompt.ground_truth):
            data = text.encode()
            digest.update(b"%d:" % len(data))
            digest.update(data)
    return digest.hexdigest()
