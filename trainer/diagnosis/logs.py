"""Reads the ends of a run's log files: those of the services and ranks, and those that
`jobgroup.local` makes of the output of every node.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from common.process.logs import SEPARATOR
from trainer.diagnosis.facts import LogLine

_READ_BYTES = 400_000
"""Bytes that are read of the end of every file."""
_MAX_CHARS = 1500
"""Characters that are kept of a message, whose beginning says what it is about."""
_KEPT = 50
"""Messages of one file that are kept from its beginning, and from its end."""
_TEXT = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (?P<level>[A-Z]+) (?P<logger>[^ :\[]+)"
    r"(?: \[[^\]]*\])?: (?P<text>.*)",
    re.DOTALL,
)
_SERIOUS = ("WARNING", "ERROR", "CRITICAL")
STARTED = "started"
"""Code of the first line of a process."""
_RAW = re.compile(
    r"(?:error: |rank \d+: error: |[\w.]*(?:Error|Exception|Interrupt)\b"
    r"|interrupted|Killed|Fatal Python error|terminate called)"
)
"""Output that is no line of a log and says why a program ended: our errors, and the words of
Python, the shell and C++."""


def log_files(folders: list[Path]) -> list[Path]:
    """Returns the log files in these folders."""
    found = [path.resolve() for folder in folders for path in sorted(folder.glob("*.log"))]
    return list(dict.fromkeys(found))  # two folders may be one


def read_log(path: Path, since: float) -> list[LogLine]:
    """Returns the warnings, errors and last words in a log file since that time, and since the
    newest start of its process.
    """
    found: list[LogLine] = []
    # Output that is no line of a log has the time of the line before it.
    last: float | None = None
    changed = path.stat().st_mtime if path.exists() else None
    for text in _messages(_end(path)):
        line = _parse(path.stem, text)
        line.time = line.time or last or changed
        last = line.time
        if line.code == STARTED:
            found = []
        if line.time is not None and line.time < since:
            continue
        if line.level in _SERIOUS or (not line.logger and _RAW.match(line.text)):
            found.append(line)
    return found if len(found) <= 2 * _KEPT else [*found[:_KEPT], *found[-_KEPT:]]


def last_start(path: Path) -> float | None:
    """Returns when the process of this log started last; None when it does not say."""
    lines = (_parse(path.stem, text) for text in _messages(_end(path)))
    starts = [line.time for line in lines if line.code == STARTED]
    return starts[-1] if starts else None


def _end(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _READ_BYTES))
            data = file.read()
    except OSError:
        return ""
    if size > _READ_BYTES:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace")


def _messages(text: str) -> Iterator[str]:
    """Yields the messages of a log: a line, with those below it that are indented or belong to a
    report.
    """
    message: list[str] = []
    for line in text.splitlines():
        begins = _TEXT.match(line) or line.startswith('{"time"') or _RAW.match(line)
        if begins and message:
            yield "\n".join(message)
            message = []
        message.append(line)
    if message:
        yield "\n".join(message)


def _parse(source: str, text: str) -> LogLine:
    """Returns the line of a message as JSON or as text; other output has neither time nor level."""
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        if text.startswith("{"):
            entry = json.loads(text.partition("\n")[0])
            at = datetime.fromisoformat(entry["time"]).timestamp()
            line = _line(source, at, entry["message"], level=entry["level"], logger=entry["logger"])
            line.code = str(entry.get("code", ""))
            fields = entry.get("fields", {})
            line.fields |= {name: str(value) for name, value in fields.items()}
            return line
        match = _TEXT.match(text)
        if match is not None:
            at = datetime.strptime(match["time"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            return _line(source, at, match["text"], level=match["level"], logger=match["logger"])
    return _line(source, None, text)


def _line(
    source: str, time: float | None, text: str, *, level: str = "", logger: str = ""
) -> LogLine:
    """Returns a line with the code and fields that its text ends with: `… · field: url · value:
    http://… · code: unreachable · service: router`.
    """
    first, newline, rest = text.partition("\n")
    fields = dict(part.partition(": ")[::2] for part in first.split(SEPARATOR)[1:])
    text = f"{first.partition(f'{SEPARATOR}code: ')[0]}{newline}{rest}"
    return LogLine(
        source=source,
        time=time,
        level=level,
        logger=logger,
        text=text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}…",
        code=fields.pop("code", ""),
        fields=fields,
    )
