"""Logs are read as they were written: random lines of both formats, with output between them."""

import json
import logging
import random
from pathlib import Path

import pytest

from common.process.logs import JsonFormatter, TextFormatter, event
from trainer.diagnosis import logs
from trainer.diagnosis.facts import LogLine
from trainer.diagnosis.logs import last_start, log_files, read_log

BEGIN = 1.8e9


def record(line: LogLine) -> logging.LogRecord:
    """Returns the record from which a process makes this line."""
    level = logging.getLevelNamesMapping()[line.level]
    made = logging.LogRecord(line.logger, level, "", 0, line.text, (), None)
    assert line.time is not None
    made.created = line.time
    made.msecs = line.time % 1 * 1000
    if line.code:
        for name, value in event(line.code, **line.fields).items():
            setattr(made, name, value)
    return made


def random_line(draw: random.Random, at: float) -> LogLine:
    code = draw.choice(["", "", "group_dropped", "started"])
    return LogLine(
        source="reward-server",
        time=at,
        level=draw.choice(["INFO", "WARNING", "ERROR", "CRITICAL"]),
        logger=draw.choice(["run", "trainer.rollouts.collector"]),
        text=draw.choice(["cannot", "a: b", "one\n  two\n  three", "x" * 1700]),
        code=code,
        fields=draw.choice([{}, {"reason": "a: b", "service": "http://x:1"}]) if code else {},
    )


OUTPUT = {
    "error: the port is taken": True,
    "rank 3: error: it is lost": True,
    "ValueError: no": True,
    "torch.OutOfMemoryError: much": True,
    "Killed": True,
    "terminate called without an exception": True,
    "interrupted": True,
    "loading the model": False,
    "  an indented line": False,
}
"""What a process may print, and whether it says why one ends."""


@pytest.mark.parametrize("json_lines", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_what_matters_of_a_log_comes_back(tmp_path: Path, seed: int, json_lines: bool) -> None:
    draw = random.Random(seed)
    formatter = JsonFormatter(service="reward-server") if json_lines else TextFormatter()
    path = tmp_path / "reward-server.log"
    since = BEGIN + draw.randint(0, 30)
    expected: list[LogLine] = []
    starts: list[float] = []
    written = []
    at = 0.0
    # Output that is no line belongs to the message before it.
    last: LogLine | None = None
    for number in range(draw.randint(1, 60)):
        if draw.random() < 0.25 and number:
            text = draw.choice(list(OUTPUT))
            written.append(text)
            if OUTPUT[text]:
                last = LogLine(source="reward-server", time=at, text=text)
                if at >= since:
                    expected.append(last)
            elif last is not None and not (json_lines and last.logger):
                last.text += f"\n{text}"
            continue
        at = BEGIN + number + draw.choice([0.0, 0.25])
        last = random_line(draw, at)
        written.append(formatter.format(record(last)))
        if last.code == "started":
            starts.append(at)
            expected = []
        if at >= since and last.level in ("WARNING", "ERROR", "CRITICAL"):
            expected.append(last)
    path.write_text("".join(f"{text}\n" for text in written), encoding="utf-8")

    for line in expected:
        if len(line.text) > 1500:
            line.text = f"{line.text[:1500]}…"
    found = read_log(path, since)
    if len(expected) > 100:
        expected = [*expected[:50], *expected[-50:]]
    assert [line.model_dump() for line in found] == [
        {**line.model_dump(), "time": pytest.approx(line.time, abs=1e-3)} for line in expected
    ]
    assert last_start(path) == (pytest.approx(starts[-1], abs=1e-3) if starts else None)


@pytest.mark.parametrize("count", [3, 99, 100, 101, 170])
def test_of_many_messages_the_first_and_the_last_are_kept(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"error: number {number}\n" for number in range(count)))
    numbers = [int(line.text.split()[-1]) for line in read_log(path, 0.0)]
    kept = range(count) if count <= 100 else [*range(50), *range(count - 50, count)]
    assert numbers == list(kept)


def test_output_without_a_line_has_the_time_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("error: no\n")
    [line] = read_log(path, 0.0)
    assert line.time == path.stat().st_mtime
    assert (line.level, line.logger, line.source) == ("", "", "a")
    assert read_log(tmp_path / "none.log", 0.0) == []
    assert last_start(path) is None


def test_only_the_end_of_a_long_log_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_READ_BYTES", 100)
    path = tmp_path / "a.log"
    lines = [f"error: number {number:04d}" for number in range(40)]  # 19 bytes each, with the end
    path.write_text("".join(f"{line}\n" for line in lines))
    assert [line.text for line in read_log(path, 0.0)] == lines[-5:]
    path.write_bytes(b"error: \xff\n")
    assert [line.text for line in read_log(path, 0.0)] == ["error: \N{REPLACEMENT CHARACTER}"]


def test_a_line_that_only_looks_like_json_is_output(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    whole = {"time": "2026-01-01T00:00:00+00:00", "message": "m", "level": "ERROR", "logger": "l"}
    damaged = [json.dumps({**whole, name: None}) for name in ("time", "message")]
    path.write_text("\n".join([json.dumps(whole), *damaged, '{"time": 1', "[]"]) + "\n")
    assert [line.text for line in read_log(path, 0.0)] == ["m"]


def test_a_file_in_two_folders_is_read_once(tmp_path: Path) -> None:
    first = tmp_path / "a"
    second = tmp_path / "b"
    first.mkdir()
    second.symlink_to(first)
    for name in ("y.log", "x.log", "z.txt"):
        (first / name).touch()
    assert log_files([first, second, tmp_path / "none"]) == [first / "x.log", first / "y.log"]
