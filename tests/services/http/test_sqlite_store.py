"""The base of the services' files: what is remembered of requests, what a
transaction keeps, what a checksum notices, and that a new file stays."""

import os
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.process.storage import StorageFailed
from services.http import sqlite_store
from services.http.sqlite_store import TABLES, SqliteStore
from tests.support.errors import raises


class _Store(SqliteStore):
    name = "a file"
    layout = 1
    restore = "make a new one"

    def __init__(self, path: Path) -> None:
        super().__init__(path, TABLES)


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_forgotten_for_each_call_by_itself(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that comes often makes no answer to another one forgotten."""
    monkeypatch.setattr(sqlite_store, "REMEMBERED_REQUESTS", 5)
    monkeypatch.setattr(sqlite_store, "_FORGET_EVERY", 4)
    draw = random.Random(seed)
    store = _Store(tmp_path / "file.sqlite")
    sent: dict[str, list[int]] = {"often": [], "seldom": []}
    with store.transaction():
        for number in range(60):
            call = draw.choices(["often", "seldom"], weights=[9, 1])[0]
            sent[call].append(number)
            store.remember(call, str(number), {"number": number})
    for call, numbers in sent.items():
        for number in numbers[-5:]:
            assert store.answer_to(call, str(number)) == {"number": number}
    assert store.answer_to("often", str(sent["often"][0])) == {}, "it is far older"
    store.close()


def test_the_last_answer_to_a_request_counts(tmp_path: Path) -> None:
    store = _Store(tmp_path / "file.sqlite")
    with store.transaction():
        for number in range(3):
            store.remember("call", "same", {"number": number})
    assert store.answer_to("call", "same") == {"number": 2}
    store.close()


def test_a_new_file_has_its_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that loses power may lose the file, with all that was answered since."""
    synced: list[tuple[int, int]] = []
    sync = os.fsync

    def noting(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_dev, status.st_ino))
        assert (tmp_path / "state/file.sqlite").exists()
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    _Store(tmp_path / "state/file.sqlite").close()
    folder = (tmp_path / "state").stat()
    assert synced == [(folder.st_dev, folder.st_ino)]
    _Store(tmp_path / "state/file.sqlite").close()
    assert len(synced) == 1, "it was there"


class _Model:
    """What a store has promised to keep: its runs, its answers, and how often it changed."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.answers: dict[tuple[str, str], dict[str, int]] = {}
        self.changes = 0

    def copy(self) -> "_Model":
        made = _Model()
        made.runs = list(self.runs)
        made.answers = dict(self.answers)
        made.changes = self.changes
        return made


@pytest.mark.parametrize("seed", range(8))
def test_a_transaction_is_kept_whole_or_not_at_all(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    path = tmp_path / "new/file.sqlite"
    store = _Store(path)
    identity = store.mark.identity
    model = _Model()
    for number in range(60):
        before = model.copy()
        deed = draw.choice(["work", "work", "fail", "look", "reopen", "flush"])
        if deed in ("work", "fail"):
            changes = draw.randint(0, 2)
            fails = deed == "fail"
            try:
                with store.transaction():
                    for step in range(changes):
                        call, request = draw.choice("ab"), draw.choice("xyz")
                        model.answers[call, request] = {"number": number, "step": step}
                        store.remember(call, request, model.answers[call, request])
                    run = draw.choice(["", f"run-{number}"])
                    store.begin_run(run)
                    model.runs += [run] if run else []
                    assert store.mark.changes == before.changes, "not before it is on the disk"
                    if fails:
                        raise RuntimeError("of the caller")
            except RuntimeError:
                assert fails
                model = before
            else:
                model.changes += bool(changes or run)
        elif deed == "reopen":
            store.close()
            store = _Store(path)
        elif deed == "flush":
            store.flush()
            assert not store.wal_path.exists() or not store.wal_path.stat().st_size
        else:
            assert store.read_mark() == store.mark
        assert store.mark == (identity, model.changes)
        assert store.runs() == model.runs
        for call in "ab":
            for request in "xyz":
                expected = model.answers.get((call, request), {})
                assert store.answer_to(call, request) == expected
        assert not store.is_set_back()
    store.close()
    other = _Store(tmp_path / "other.sqlite")
    assert other.mark.identity != identity
    other.close()


@pytest.mark.parametrize("seed", range(30))
def test_no_changed_field_is_taken_for_what_was_written(tmp_path: Path, seed: int) -> None:
    """Every value that a row may have differs from every other one, also 1 from 1.0 and "1"."""
    draw = random.Random(seed)
    kinds = [1, 1.0, "1", b"1", None, "", b"", 0, -1, "None", 2**52, 0.1, "a, b", "('a',)"]
    fields = draw.choices(kinds, k=draw.randint(1, 4))
    row = sqlite_store.sealed(fields)
    assert row[:-1] == tuple(fields)
    assert 0 <= row[-1] < 2**63
    assert sqlite_store.unsealed(row, "it") == tuple(fields)
    for place in range(len(fields)):
        for other in kinds:
            changed = [*fields[:place], other, *fields[place + 1 :]]
            if repr(changed) != repr(fields):
                with pytest.raises(sqlite_store.Damaged, match="it differs from its checksum"):
                    sqlite_store.unsealed([*changed, row[-1]], "it")
    shorter = [*fields[:-1], row[-1]]
    for wrong in (shorter, [*fields, None, row[-1]], None, []):
        with pytest.raises(sqlite_store.Damaged):
            sqlite_store.unsealed(wrong, "it")


def _error(name: str) -> sqlite3.Error:
    error = sqlite3.OperationalError(name)
    error.sqlite_errorname = name
    error.sqlite_errorcode = getattr(sqlite3, name.removesuffix("_VTAB"))
    return error


@pytest.mark.parametrize(
    ("error", "code", "status", "remedy"),
    [
        (_error("SQLITE_FULL"), "disk_full", 507, "free disk space"),
        (_error("SQLITE_BUSY"), "storage_failed", 503, "end the other process"),
        (_error("SQLITE_LOCKED"), "storage_failed", 500, "end the other process"),
        (_error("SQLITE_READONLY"), "storage_failed", 500, "let this user write"),
        (_error("SQLITE_CANTOPEN"), "storage_failed", 500, "let this user write"),
        (_error("SQLITE_IOERR"), "storage_failed", 500, "check the disk and the log"),
        (_error("SQLITE_CORRUPT"), "damaged", 500, "make a new one"),
        (_error("SQLITE_NOTADB"), "damaged", 500, "make a new one"),
        (OSError(28, "No space"), "storage_failed", 500, "free disk space"),
        (PermissionError(13, "No"), "storage_failed", 500, "let this user write"),
        (sqlite3.OperationalError("Could not decode to UTF-8"), "damaged", 500, "make a new one"),
    ],
    ids=repr,
)
def test_an_error_of_the_disk_says_what_to_do(
    tmp_path: Path, error: Exception, code: str, status: int, remedy: str
) -> None:
    store = _Store(tmp_path / "file.sqlite")
    with (
        raises(StorageFailed, field="state_dir", value=str(store.path)) as failed,
        store.errors(),
    ):
        raise error
    found = failed.value
    assert found.message.startswith("a file ")
    assert remedy in str(found.remedy)
    assert found.status == status
    assert found.code == code
    store.close()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_is_gone_gets_no_more_changes(tmp_path: Path, how: str) -> None:
    path = tmp_path / "file.sqlite"
    store = _Store(path)
    path.rename(tmp_path / "away")
    if how == "replaced":
        (tmp_path / "other.sqlite").touch()
        (tmp_path / "other.sqlite").rename(path)
    assert store.is_set_back()
    before = store.mark
    with raises(StorageFailed, code="replaced"), store.transaction():
        store.begin_run("run")
    assert (store.runs(), store.mark) == ([], before)
    store.close()
    if how == "removed":
        (tmp_path / "away").rename(path)
        path.with_name("file.sqlite-wal").touch()
        path.unlink()
        with raises(ConfigError, code="damaged", field="state_dir"):
            _Store(path)


def test_a_file_of_another_program_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "file.sqlite"
    _Store(path).close()

    class Newer(_Store):
        layout = 2

    with raises(ConfigError, code="damaged") as error:
        Newer(path)
    assert "its layout is 1, this program reads 2" in error.value.message
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE more (key INTEGER)")
    db.close()
    with raises(ConfigError, code="damaged"):
        _Store(path)
    path.write_bytes(b"no database" * 1000)
    with raises(ConfigError, code="damaged"):
        _Store(path)


def test_what_the_disk_refuses_at_the_end_is_not_counted(tmp_path: Path) -> None:
    store = _Store(tmp_path / "file.sqlite")
    db = store.db

    class Full:
        """A connection whose disk is full when a transaction ends."""

        def __getattr__(self, name: str) -> Any:
            return getattr(db, name)

        def execute(self, words: str, *given: Any) -> Any:
            if words == "COMMIT":
                raise _error("SQLITE_FULL")
            return db.execute(words, *given)

    before = store.mark
    store.db = Full()  # type: ignore[assignment]
    with raises(StorageFailed, code="disk_full"), store.transaction():
        store.begin_run("run")
    assert (store.mark, store.runs()) == (before, [])
    store.db = db
    with store.transaction():
        store.begin_run("run")
    assert store.mark.changes == before.changes + 1
    store.close()
