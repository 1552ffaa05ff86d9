"""Rules of files, tasks and progress that one case does not show."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from common.process.child import ChildOutput
from common.process.futures import cancel
from common.process.storage import StorageFailed, storing
from common.process.work_meter import News


async def test_cancelled_tasks_have_ended_however_many_turns_that_takes() -> None:
    ended: list[int] = []

    async def work(turns: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(turns):
                await asyncio.sleep(0)
            ended.append(turns)

    tasks = [asyncio.create_task(work(turns)) for turns in (0, 1, 5, 20)]
    await asyncio.sleep(0)
    await cancel(tasks)
    assert sorted(ended) == [0, 1, 5, 20]
    assert all(task.cancelled() for task in tasks)


class _NearlyFull:
    """A file that takes at most three bytes at once."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, data: bytes) -> int:
        self.content += data[:3]
        return len(data[:3])

    def __enter__(self) -> "_NearlyFull":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("size", [1, 4, 7, 1000])
async def test_a_log_is_whole_although_the_disk_takes_parts(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"first line\n\nthird\rwith a bar\nwithout an end"
    lines: list[bytes] = []
    losses: list[str] = []
    output = ChildOutput(tmp_path / "log", lines.extend, on_loss=losses.append)
    output._file.close()
    file = _NearlyFull()
    monkeypatch.setattr(output, "_file", file)
    stream = asyncio.StreamReader()
    for start in range(0, len(content), size):
        stream.feed_data(content[start : start + size])
    stream.feed_eof()
    await output.copy(stream)
    assert file.content == content
    assert lines == content.split(b"\n")
    assert losses == []


@pytest.mark.parametrize(
    ("said", "count"),
    [
        (["1/4", "1/4", "2/4", "1/4", "2/4"], 2),
        (["10%", "10 %", "11%"], 2),
        (["loads 1/4", "saves 1/4", "loads 1/4", "saves 2/4"], 3),
        (["waited 5 s", "waited 6 s"], 1),
    ],
)
def test_a_share_that_is_said_again_is_no_news(said: list[str], count: int) -> None:
    news = News()
    for line in said:
        news.feed(f"{line}\n")
    assert news.count == count


@pytest.mark.parametrize(
    ("number", "is_full"),
    [
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EFBIG, True),
        (errno.EIO, False),
        (errno.EACCES, False),
    ],
)
def test_a_disk_without_room_for_this_user_is_full(
    tmp_path: Path, number: int, is_full: bool
) -> None:
    """Also if it has room for others: then freeing some helps, and results wait for it."""
    about: dict[str, Any] = {"field": "state_dir", "remedy": "go on"}
    with (
        pytest.raises(StorageFailed) as caught,
        storing("a file", tmp_path, **about),
    ):
        raise OSError(number, "no")
    assert (caught.value.code, caught.value.status) == (
        ("disk_full", 507) if is_full else ("storage_failed", 500)
    )
