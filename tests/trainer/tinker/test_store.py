"""The file of operations."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from common.errors import ConfigError, InvalidInput, NotFound
from common.process.storage import StorageFailed
from trainer.tinker.interface import LoraSpec
from trainer.tinker.records import TinkerOperation, TinkerResult, TinkerRun, TinkerSession
from trainer.tinker.store import Journal, TinkerStore

_RUN = TinkerRun(
    id="s:train:0",
    session="s",
    owner="anyone",
    lora=LoraSpec(rank=4, seed=0),
    used=1.0,
    snapshot=2,
)
_DONE = TinkerResult(ok=True, content=b"{}", is_json=True)


def _operation(seq: int, body: bytes = b"x", kind: str = "optim_step") -> TinkerOperation:
    return TinkerOperation(_RUN.id, seq, kind, body)


def _store(tmp_path: Path) -> TinkerStore:
    return TinkerStore(tmp_path / "tinker.sqlite")


def test_an_operation_is_accepted_once(tmp_path: Path) -> None:
    store = _store(tmp_path)
    with store.transaction():
        assert store.accept(_operation(1))
        assert not store.accept(_operation(1))
        for other in (_operation(1, b"y"), _operation(1, kind="forward")):
            with pytest.raises(InvalidInput) as raised:
                store.accept(other)
            assert raised.value.field == "seq_id"


def test_what_is_written_is_there_after_a_restart(tmp_path: Path) -> None:
    store = _store(tmp_path)
    session = TinkerSession("s", "anyone", {"tags": []})
    with store.transaction():
        store.put(session)
        store.put(_RUN)
        for seq in (1, 2, 3):
            store.accept(_operation(seq, b"%d" % seq))
        store.finish(_RUN.id, 1, _DONE, repeatable=True)
    store.close()

    store = _store(tmp_path)
    with store.transaction():
        assert store.records() == [session, _RUN]
        assert store.waiting() == [(_RUN.id, 2), (_RUN.id, 3)]
        assert store.applied() == {_RUN.id: 1}
        assert store.operation(_RUN.id, 3).body == b"3"
        found = store.result(_RUN.id, 1)
        assert found is not None
        assert (found.content, found.finished) == (b"{}", 1)
        store.finish(_RUN.id, 2, _DONE, repeatable=True)
        assert [seq for seq, *_ in store.finished_after(_RUN.id, range(10), 1)] == [2]


def test_a_snapshot_makes_bodies_superfluous(tmp_path: Path) -> None:
    store = _store(tmp_path)
    with store.transaction():
        for seq in (1, 2, 3, 4):
            store.accept(_operation(seq, kind="forward" if seq == 4 else "optim_step"))
            store.finish(_RUN.id, seq, _DONE, repeatable=seq != 4)
        store.put_run(_RUN)
        assert [each.seq for each, _ in store.since(_RUN)] == [3]
        (bodies,) = store.db.execute("SELECT COUNT(body) FROM operations").fetchone()
        assert bodies == 1
        assert store.result(_RUN.id, 1) is not None


def test_what_is_long_before_a_snapshot_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.tinker.store.KEPT_RESULTS", 1)
    store = _store(tmp_path)
    with store.transaction():
        for seq in (1, 2):
            store.accept(_operation(seq))
            store.finish(_RUN.id, seq, _DONE, repeatable=True)
        store.put_run(_RUN)
        assert store.waiting() == []
        assert store.result(_RUN.id, 2) is not None
        with pytest.raises(NotFound):
            store.result(_RUN.id, 1)
        with pytest.raises(InvalidInput) as raised:
            store.accept(_operation(1), first=3)
        assert raised.value.field == "seq_id"
        assert not store.accept(_operation(2), first=3)


def test_results_are_counted_on_when_the_latest_are_dropped(tmp_path: Path) -> None:
    store = _store(tmp_path)
    with store.transaction():
        for seq in (1, 2):
            store.accept(_operation(seq))
        store.finish(_RUN.id, 1, _DONE, repeatable=False)
        store.forget(_RUN.id, [1])
    store.close()
    store = _store(tmp_path)
    with store.transaction():
        store.finish(_RUN.id, 2, _DONE, repeatable=False)
        assert [seq for seq, *_ in store.finished_after(_RUN.id, range(10), after=1)] == [2]


def test_nothing_is_written_of_an_operation_that_was_dropped(tmp_path: Path) -> None:
    store = _store(tmp_path)
    with store.transaction():
        store.accept(_operation(1))
        store.drop(_RUN)
        store.finish(_RUN.id, 1, _DONE, repeatable=False)
        assert store.applied() == {}
        with pytest.raises(NotFound):
            store.operation(_RUN.id, 1)


def test_results_that_were_fetched_are_dropped(tmp_path: Path) -> None:
    store = _store(tmp_path)
    with store.transaction():
        store.accept(_operation(1))
        store.finish(_RUN.id, 1, _DONE, repeatable=False)
        assert store.result(_RUN.id, 1) is not None
        store.forget(_RUN.id, [1])
        with pytest.raises(NotFound):
            store.result(_RUN.id, 1)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE operations SET body = x'00'",
        "UPDATE operations SET kind = 'forward'",
        "UPDATE operations SET body_sum = 7",
    ],
)
def test_damage_is_noticed(tmp_path: Path, damage: str) -> None:
    store = _store(tmp_path)
    with store.transaction() as db:
        store.accept(_operation(1))
        db.execute(damage)
    with pytest.raises(StorageFailed) as raised, store.transaction():
        store.operation(_RUN.id, 1)
    assert raised.value.code == "damaged"


def test_a_second_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinkerStore, "busy_s", 0.1)
    store = _store(tmp_path)
    with store.transaction():
        pass
    with pytest.raises(ConfigError):
        _store(tmp_path)
    store.close()


async def test_work_that_breaks_breaks_alone(tmp_path: Path) -> None:
    """What others have sent in the same moment is written."""
    journal = Journal(_store(tmp_path))
    outcomes = await asyncio.gather(
        journal.run(lambda store: store.accept(_operation(1))),
        journal.run(lambda store: store.accept(_operation(1 << 64))),
        journal.run(lambda store: store.db.execute("nonsense")),
        journal.run(lambda store: store.accept(_operation(2))),
        return_exceptions=True,
    )
    assert [type(each) for each in outcomes] == [bool, OverflowError, StorageFailed, bool]
    assert await journal.run(lambda store: store.waiting()) == [(_RUN.id, 1), (_RUN.id, 2)]
    await journal.close()


async def test_work_that_is_due_together_is_one_transaction(tmp_path: Path) -> None:
    store = _store(tmp_path)
    journal = Journal(store)
    before = store.mark.changes
    await journal.run(lambda store: store.accept(_operation(0)))
    outcomes = await asyncio.gather(
        *(journal.run(lambda store, seq=seq: store.accept(_operation(seq))) for seq in range(5)),  # type: ignore[misc]
        journal.run(lambda store: store.result("nobody", 1)),
        return_exceptions=True,
    )
    assert outcomes[:5] == [False, True, True, True, True]
    assert isinstance(outcomes[5], NotFound)
    assert store.mark.changes == before + 2
    await journal.close()
    with sqlite3.connect(tmp_path / "tinker.sqlite") as db:
        assert db.execute("SELECT COUNT(*) FROM operations").fetchone() == (5,)
