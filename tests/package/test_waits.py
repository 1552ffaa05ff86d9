"""Waits of the tests themselves: they end when a condition holds or cannot hold any more, and say why."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes.waits import comes, until


class Process:
    """Ends at the `end`-th look, and makes `holds` true then if it `succeeds`."""

    def __init__(self, end: int, *, succeeds: bool) -> None:
        self.looks_left = end
        self.succeeds = succeeds
        self.holds = False

    def poll(self) -> int | None:
        self.looks_left -= 1
        if self.looks_left > 0:
            return None
        self.holds = self.succeeds
        return 7


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_text("early " * 2000 + "the reason")
    return path


def test_a_wait_ends_when_its_condition_holds() -> None:
    looks = iter([False, False, True])
    until(lambda: next(looks))
    assert list(looks) == []


def test_what_a_process_did_before_its_end_counts() -> None:
    process = Process(2, succeeds=True)
    until(lambda: process.holds, "a file", process)


def test_a_process_that_has_ended_is_not_waited_for(log: Path) -> None:
    process = Process(3, succeeds=False)
    with pytest.raises(AssertionError, match=r"^\[7\]: (?s:.*)the reason") as error:
        until(lambda: process.holds, log, process, limit_s=3600)
    assert len(str(error.value)) < 7000


@pytest.mark.parametrize("said", ["the reason", lambda: "the reason"])
async def test_what_never_comes_is_said(said: str | Callable[[], str]) -> None:
    with pytest.raises(AssertionError, match="never: the reason"):
        until(lambda: False, said, limit_s=0.0)
    with pytest.raises(AssertionError, match="never: the reason"):
        await comes(lambda: False, said, limit_s=0.0)


def test_a_process_without_a_log_is_named_too(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no log"):
        until(lambda: False, tmp_path / "none", Process(1, succeeds=False))
