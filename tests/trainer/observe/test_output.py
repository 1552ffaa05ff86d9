"""What a run says on standard output costs it only its lines, never its life."""

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from trainer.observe.run_dir import console, progress_bar, tell


@contextmanager
def standard_output(stream: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces standard output inside the block."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        try:
            yield
        finally:
            with suppress(OSError, AttributeError):
                stream.close()


def unread() -> Any:
    """Returns a pipe whose reader is gone, as after `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    return os.fdopen(writing, "w")


def full() -> Any:
    return Path("/dev/full").open("w")


def closed() -> Any:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (unread, "Broken pipe"),
        (full, "No space left on device"),
        (closed, "closed file"),
        (lambda: None, "NoneType"),
    ],
    ids=["no reader", "full disk", "closed", "none"],
)
def test_a_standard_output_that_takes_nothing_is_said_once(
    stream: Any, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    with standard_output(stream(), monkeypatch):
        shown = console()
        for _ in range(3):
            tell(shown, "step 1")
        with progress_bar("training", shown, hidden=False) as bar:
            bar.add_task("training", total=2)
    (line,) = caplog.messages
    assert said in line
    assert "the run goes on without it" in line


def test_a_character_that_the_encoding_lacks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    with standard_output(io.TextIOWrapper(written, encoding="ascii"), monkeypatch):
        tell(console(), "mean |Δ logprob| 0.1")
        sys.stdout.flush()
        assert written.getvalue() == b"mean |? logprob| 0.1\n"


def test_a_progress_bar_and_lines_share_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich puts itself in the place of standard output while it shows a bar."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setenv("TERM", "xterm")
        shown = console()
        with progress_bar("training", shown, hidden=False) as bar:
            task = bar.add_task("training", total=1)
            tell(shown, "step 1 of 1")
            print("a script's own line")
            bar.update(task, completed=1)
    assert "step 1 of 1" in terminal.getvalue()
    assert "a script's own line" in terminal.getvalue()
    assert "1/1" in terminal.getvalue()
