"""The base of the services' files: what is remembered of requests, and that a new file stays."""

import os
import random
from pathlib import Path

import pytest

from services.http import sqlite_store
from services.http.sqlite_store import TABLES, SqliteStore


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
