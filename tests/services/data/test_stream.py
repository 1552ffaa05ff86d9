"""The order of prompts is a pure function of seed and position, and the cursor survives
everything."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from common.errors import ConfigError, Conflict, InvalidInput
from common.process import logs
from common.process.storage import StorageFailed
from common.wire.schemas import Prompt
from services.data.stream import PromptStream, permutation
from services.http.sqlite_store import REMEMBERED_REQUESTS
from tests.support.errors import raises

GOLDEN_0 = [6, 3, 1, 4, 5, 2, 7, 0]
GOLDEN_1 = [0, 6, 7, 2, 1, 4, 3, 5]


def prompts(count: int = 50) -> list[Prompt]:
    return [Prompt(id=f"p{n}", prompt=f"problem {n}", ground_truth=str(n)) for n in range(count)]


def ids(
    stream: PromptStream, count: int, shuffle: bool = True, request_id: str | None = None
) -> list[str]:
    return [prompt.id for prompt in stream.take(count, shuffle, request_id).prompts]


def test_an_epoch_has_every_prompt_once_and_epochs_differ(tmp_path: Path) -> None:
    stream = PromptStream(prompts(), 0, tmp_path)
    first, second = ids(stream, 50), ids(stream, 50)
    assert sorted(first) == sorted(second) == sorted(prompt.id for prompt in prompts())
    assert first != second
    assert first != [prompt.id for prompt in prompts()]


def test_a_seed_gives_one_order(tmp_path: Path) -> None:
    orders = [
        ids(PromptStream(prompts(), seed, tmp_path / str(n)), 120)
        for n, seed in enumerate((3, 3, 4))
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_the_order_never_changes_between_versions() -> None:
    """A cursor on disk stays valid only while the order stays the same."""
    assert permutation(0, 0, 8).tolist() == GOLDEN_0
    assert permutation(2**40, 3, 8).tolist() == GOLDEN_1


def test_a_batch_crosses_the_border_of_epochs(tmp_path: Path) -> None:
    stream = PromptStream(prompts(5), 0, tmp_path)
    taken = [stream.take(3) for _ in range(5)]
    assert [(batch.position, batch.epoch) for batch in taken] == [
        (0, 0),
        (3, 0),
        (6, 1),
        (9, 1),
        (12, 2),
    ]
    together = [prompt.id for batch in taken for prompt in batch.prompts]
    for epoch in range(3):
        assert sorted(together[5 * epoch : 5 * epoch + 5]) == [f"p{n}" for n in range(5)]
    assert len(ids(PromptStream(prompts(3), 0, tmp_path / "small"), 256)) == 256


def test_the_ordered_stream_has_a_cursor_of_its_own(tmp_path: Path) -> None:
    stream = PromptStream(prompts(4), 0, tmp_path)
    assert ids(stream, 3, shuffle=False) == ["p0", "p1", "p2"]
    assert stream.take(2).position == 0
    assert ids(stream, 3, shuffle=False) == ["p3", "p0", "p1"]


def test_every_step_is_synced_to_disk_before_it_is_answered(tmp_path: Path) -> None:
    db = PromptStream(prompts(), 0, tmp_path).db
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL: a commit waits for the disk


def test_cursor_survives_a_restart(tmp_path: Path) -> None:
    whole = ids(PromptStream(prompts(), 0, tmp_path / "whole"), 30)
    first = ids(PromptStream(prompts(), 0, tmp_path / "cut"), 12)  # not closed, as after a kill
    assert first + ids(PromptStream(prompts(), 0, tmp_path / "cut"), 18) == whole


def test_threads_and_two_processes_of_one_state_never_share_a_prompt(tmp_path: Path) -> None:
    streams = [PromptStream(prompts(400), 0, tmp_path) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(lambda n: ids(streams[n % 2], 5), range(80)))
    assert sorted(item for batch in batches for item in batch) == sorted(
        prompt.id for prompt in prompts(400)
    )


def test_a_repeated_request_gets_the_same_batch(tmp_path: Path) -> None:
    stream = PromptStream(prompts(), 0, tmp_path)
    first = stream.take(4, request_id="a")
    assert stream.take(4, request_id="a") == first
    again = PromptStream(prompts(), 0, tmp_path)
    assert again.take(4, request_id="a") == first
    assert again.take(4, request_id="b").position == 4
    assert again.stats().prompts_served == 8
    for count, shuffle in ((5, True), (4, False)):
        with raises(InvalidInput, field="request_id", value="a"):
            again.take(count, shuffle, "a")
    assert again.stats().position == 8


def test_concurrent_repeats_of_one_request_are_one_batch(tmp_path: Path) -> None:
    stream = PromptStream(prompts(), 0, tmp_path)
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(lambda _: stream.take(3, request_id="same"), range(32)))
    assert batches == [batches[0]] * 32
    assert stream.stats().position == 3


def test_old_requests_are_forgotten_and_recent_ones_kept(tmp_path: Path) -> None:
    stream = PromptStream(prompts(), 0, tmp_path)
    stream.db.execute("PRAGMA synchronous = OFF")  # only to speed up many requests
    for n in range(REMEMBERED_REQUESTS + 200):
        stream.take(1, request_id=f"r{n}")
    assert stream.take(1, request_id="r200").position == 200
    assert stream.take(1, request_id="r4").position == REMEMBERED_REQUESTS + 200


def test_seek_goes_back_and_draws_anew(tmp_path: Path) -> None:
    stream = PromptStream(prompts(), 0, tmp_path)
    stream.take(4, request_id="kept")
    first = ids(stream, 8, request_id="undone")
    stream.seek(4)
    assert ids(stream, 8, request_id="new") == first
    assert stream.take(8, request_id="undone").position == 12
    assert stream.take(4, request_id="kept").position == 0
    stream.seek(1000)
    assert stream.stats().epoch == 20
    assert ids(stream, 50) == [f"p{n}" for n in permutation(0, 20, 50)]


def test_calls_of_a_run_that_has_ended_move_nothing_after_a_restart(tmp_path: Path) -> None:
    """As from the buffers of a proxy that outlived the service."""
    stream = PromptStream(prompts(), 0, tmp_path)
    for run, before in (("run-1", ""), ("run-2", "run-1")):
        with logs.request("start", run):
            stream.seek(4, request_id=f"{run}-seek", replaces=before)
    stream.close()
    stream = PromptStream(prompts(), 0, tmp_path)
    with logs.request("late", "run-1"):
        for call in (partial(stream.take, 2), partial(stream.seek, 0)):
            with raises(Conflict, code="superseded", value="run-1"):
                call()
    with logs.request("work", "run-2"):
        stream.seek(0, request_id="run-2-seek")  # repeated
        assert stream.take(2).position == 4


def test_a_run_ends_the_one_that_its_trainer_knew_and_no_other(tmp_path: Path) -> None:
    """The call with which it begins may be late: meanwhile a later run has begun."""
    stream = PromptStream(prompts(), 0, tmp_path)
    with logs.request("start", "run-1"):
        stream.seek(2, request_id="run-1-start", replaces=stream.stats().run)
    assert stream.stats().run == "run-1"
    with logs.request("start", "run-3"):
        stream.seek(4, request_id="run-3-start", replaces="run-1")
    with logs.request("late", "run-2"):
        for replaces in ("", "run-1"):
            with raises(Conflict, code="superseded", value="run-2"):
                stream.seek(0, request_id="run-2-start", replaces=replaces)
    with logs.request("work", "run-3"):
        stream.seek(6, request_id="run-3-back")  # its own run goes on
        assert stream.take(2).position == 6
    stream.seek(1)  # by hand, without a run
    assert (stream.stats().run, stream.stats().position) == ("run-3", 1)


def test_reset_starts_both_streams_over(tmp_path: Path) -> None:
    stream = PromptStream(prompts(), 0, tmp_path)
    first, ordered = ids(stream, 5, request_id="a"), ids(stream, 5, shuffle=False)
    ids(stream, 5)
    stream.reset()
    assert ids(stream, 5, shuffle=False) == ordered
    assert ids(stream, 5) == first
    assert stream.take(5, request_id="a").position == 5


def test_another_seed_or_other_data_are_refused(tmp_path: Path) -> None:
    PromptStream(prompts(), 0, tmp_path).close()
    edited = [*prompts()[:-1], Prompt(id="p49", prompt="problem 49", ground_truth="changed")]
    for other, seed, cause in (
        (prompts(), 1, "belongs to seed 0, not 1"),
        (prompts(49), 0, "belongs to other training problems"),
        (list(reversed(prompts())), 0, "belongs to other training problems"),
        (edited, 0, "belongs to other training problems"),
    ):
        with pytest.raises(ConfigError, match=cause) as caught:
            PromptStream(other, seed, tmp_path)
        assert str(tmp_path) in str(caught.value)
        assert "set another state_dir" in str(caught.value)
    assert ids(PromptStream(prompts(), 0, tmp_path), 1)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    stream = PromptStream(prompts(), 0, tmp_path)
    for n in range(500):
        stream.take(1, request_id=f"request {n}")
    stream.flush()
    stream.close()
    whole = stream.path.read_bytes()
    for damaged in (
        b"not a database at all" * 100,
        whole[: len(whole) // 2],
        whole[:4096] + b"\xff" * (len(whole) - 4096),
    ):
        stream.path.write_bytes(damaged)
        with pytest.raises(ConfigError) as caught:
            PromptStream(prompts(), 0, tmp_path)
        assert (caught.value.code, caught.value.value) == ("damaged", str(stream.path))
        assert "remove the file" in str(caught.value.remedy)
        assert caught.value.message.isprintable(), "one line"


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file", encoding="utf-8")
    with raises(ConfigError, field="state_dir"):
        PromptStream(prompts(), 0, tmp_path)


def test_a_cursor_that_cannot_be_stored_hands_out_nothing(tmp_path: Path) -> None:
    stream = PromptStream(prompts(), 0, tmp_path)
    before = ids(stream, 5)
    stream.db.execute("PRAGMA query_only = ON")  # like a disk that refuses writes
    with raises(StorageFailed, field="state_dir", value=str(stream.path)):
        stream.take(5)
    stream.db.execute("PRAGMA query_only = OFF")
    assert set(ids(stream, 45)).isdisjoint(before)


def test_flush_leaves_everything_in_the_main_file(tmp_path: Path) -> None:
    stream = PromptStream(prompts(), 0, tmp_path)
    stream.take(7)
    stream.flush()
    copy = tmp_path / "copy.db"
    copy.write_bytes(stream.path.read_bytes())
    with sqlite3.connect(copy) as db:
        assert db.execute("SELECT position FROM cursors WHERE stream = 'shuffled'").fetchone() == (
            7,
        )
    db.close()
