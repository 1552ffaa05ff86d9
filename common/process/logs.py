"""Log lines as text, or as JSON objects with `LOG_FORMAT=json`, and the request id that connects
them.

A request id follows one piece of work through all services: the first service creates it
(`request`), clients send it as `X-Request-Id`, servers adopt it, and every line logged meanwhile
carries it.
"""

import json
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path

from common import Json
from common.errors import ConfigError, ServiceError, shorten
from common.process.security import SecretRedactor
from common.process.topology import Topology

REQUEST_HEADER = "x-request-id"
RUN_HEADER = "x-run-id"
SHOWN = {"shown": True}
"""`extra` for a line that is already on the console: in text format it goes only to the log
file."""
# Packages whose DEBUG lines are shown: torch alone writes hundreds for a checkpoint.
_OWN = ("common", "learning", "services", "trainer", "jobgroup")
_USABLE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_TEXT = "%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"
SEPARATOR = " · "
"""Between the parts of an error's text (`common.errors`)."""
SERVED = "served"
"""Code of the line about a request that a service answered without an error."""
_request: ContextVar[str] = ContextVar("request", default="")
_run: ContextVar[str] = ContextVar("run", default="")
_own_run = ""


def new_request_id() -> str:
    """Returns a unique id of 16 characters."""
    return secrets.token_hex(8)


def usable_id(text: str) -> bool:
    """Whether `text` is 1 to 128 letters, digits and `_ . : / + = @ -`, so that no id can forge a
    line.
    """
    return _USABLE.fullmatch(text) is not None


def request_id() -> str:
    """Returns the id of the current request; empty outside of one."""
    return _request.get()


def run_id() -> str:
    """Returns the id of the current run; empty when unknown."""
    return _run.get() or _own_run


def set_run(run: str) -> None:
    """Sets the run that this process works for."""
    global _own_run
    _own_run = run


class request:
    """Sets the request id (a new one if this is unusable) and, if given, the run for log lines and
    calls inside.
    """

    def __init__(self, identifier: str, run: str = "") -> None:
        self._id = identifier if usable_id(identifier) else new_request_id()
        self._run = run if run and usable_id(run) else _run.get()

    def __enter__(self) -> None:
        self._before = _request.set(self._id)
        self._run_before = _run.set(self._run)

    def __exit__(self, *_: object) -> None:
        _request.reset(self._before)
        _run.reset(self._run_before)


def sent_headers() -> dict[str, str]:
    """Returns the headers that a client sends: the current request id or a new one, and the run if
    known.
    """
    run = {RUN_HEADER: run_id()} if usable_id(run_id()) else {}
    return {REQUEST_HEADER: request_id() or new_request_id(), **run}


def event(code: str, **fields: object) -> Json:
    """Returns the `extra` that gives a log line a code and fields, by which programs recognise it.
    A line whose arguments include a ServiceError gets the error's code and fields by itself.
    """
    return {"event": {"code": code, **fields}}


def code_of(line: bytes) -> str:
    """Returns the code of a log line, in text or JSON; empty for a line without one."""
    if line.startswith(b'{"time"'):
        with suppress(ValueError):
            return str(json.loads(line).get("code", ""))
    # The last one: what a client sent may stand before it, in the error's text.
    _, found, facts = line.decode("utf-8", "replace").rpartition(f"{SEPARATOR}code: ")
    return facts.partition(SEPARATOR)[0] if found else ""


def _event_of(record: logging.LogRecord) -> Mapping[str, object]:
    """Returns the code and the fields of what a line reports; empty without any."""
    given: Mapping[str, object] = getattr(record, "event", {})
    arguments = record.args if isinstance(record.args, tuple) else ()
    trace = record.exc_info or ()
    errors = [each for each in (*arguments, *trace) if isinstance(each, ServiceError)]
    return {**errors[0].event(), **given} if errors else given


def _in_text(facts: Mapping[str, object]) -> str:
    """Returns the code, and the fields that an error's own text does not have, for the end of a
    text line.
    """
    found = {
        name: " ".join(shorten(value).split()).replace(SEPARATOR, ", ")
        for name, value in facts.items()
        if name not in ("field", "value", "remedy")
    }
    return "".join(f"{SEPARATOR}{name}: {value}" for name, value in found.items())


class TextFormatter(logging.Formatter):
    """Formats lines as text, with the secrets of the environment redacted, tracebacks included. A
    line with a code ends with it: `… · code: unreachable · service: reward-server`.
    """

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def format(self, record: logging.LogRecord) -> str:
        identifier = request_id()
        record.request = f" [{identifier}]" if identifier else ""
        line, newline, rest = super().format(record).partition("\n")
        return SecretRedactor().redact(f"{line}{_in_text(_event_of(record))}{newline}{rest}")


class JsonFormatter(logging.Formatter):
    """Formats lines as JSON objects with these labels (`service`, `node`, `rank`; None is left
    out), with secrets redacted.
    """

    def __init__(self, **labels: str | int | None) -> None:
        super().__init__()
        self._labels = {name: value for name, value in labels.items() if value is not None}

    def format(self, record: logging.LogRecord) -> str:
        context = {"run": run_id(), "request": request_id()}
        time_of_day = datetime.fromtimestamp(record.created).astimezone()
        if record.exc_info:
            context["exception"] = self.formatException(record.exc_info)
        entry: Json = {
            "time": time_of_day.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._labels,
            **{name: text for name, text in context.items() if text},
        }

        # Before JSON quoting, which could split a secret.
        redactor = SecretRedactor()
        for name, value in entry.items():
            if isinstance(value, str):
                entry[name] = redactor.redact(value)
        fields = {name: redactor.redact(shorten(each)) for name, each in _event_of(record).items()}
        if fields:
            entry |= {"code": fields.pop("code"), "fields": fields}
        return json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace").decode()

    def line(
        self, logger: str, text: str, level: int = logging.INFO, **extra: Mapping[str, object]
    ) -> str:
        """Formats a line that did not come from logging: output of a child process, or why nothing
        could be logged. `extra` as for a logger (`event`).
        """
        record = logging.LogRecord(
            logger, level, pathname="", lineno=0, msg=text, args=None, exc_info=None
        )
        record.__dict__.update(extra)
        return self.format(record)


def wants_json() -> bool:
    """Whether `LOG_FORMAT` is `json`; it is `text` when unset. Raises ConfigError."""
    value = os.environ.get("LOG_FORMAT") or "text"
    if value not in ("text", "json"):
        raise ConfigError(
            "there is no such log format",
            field="LOG_FORMAT",
            value=value,
            remedy="set text or json",
        )
    return value == "json"


def level() -> str:
    """Returns `LOG_LEVEL`; INFO when unset. Raises ConfigError."""
    value = os.environ.get("LOG_LEVEL") or "INFO"
    if value.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(
            "there is no such log level",
            field="LOG_LEVEL",
            value=value,
            remedy="set DEBUG, INFO, WARNING or ERROR",
        )
    return value.upper()


class _LogFile(logging.FileHandler):
    """A log file that drops lines while its disk is full, and reports that once; standard error has
    every line.
    """

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            text = f"error: lines are missing in {self.baseFilename}: {sys.exc_info()[1]}"
            if isinstance(self.formatter, JsonFormatter):
                text = self.formatter.line(__name__, text, logging.ERROR)
            print(text, file=sys.stderr, flush=True)


def setup_logging(
    name: str, log_dir: Path | None = None, *, service: str = "", rank: int | None = None
) -> logging.Logger:
    """Logs to stderr and, when `log_dir` is given, to `log_dir/name.log`, which on a volume
    outlives SkyPilot's logs.

    The level is `LOG_LEVEL` (default INFO), the format `LOG_FORMAT` (`text` by default, or `json`:
    docs/how-to/operations.md). `service` (`name` when empty) and `rank` label JSON lines. Raises
    ConfigError when `log_dir` is not writable or one of the variables is invalid.
    """
    as_json = wants_json()
    wanted_level = level()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if not as_json:
        handlers[0].addFilter(lambda record: not getattr(record, "shown", False))
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            handlers.append(_LogFile(log_dir / f"{name}.log", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"logs cannot be written: {error}",
                field="state_dir",
                value=str(log_dir),
                remedy="set another folder",
            ) from None

    node = Topology.from_env().node_rank
    formatter: logging.Formatter = TextFormatter()
    if as_json:
        formatter = JsonFormatter(service=service or name, node=node, rank=rank)
    for handler in handlers:
        handler.setFormatter(formatter)

    debug = wanted_level == "DEBUG"
    logging.basicConfig(level="INFO" if debug else wanted_level, handlers=handlers, force=True)
    for own in _OWN:
        logging.getLogger(own).setLevel(logging.DEBUG if debug else logging.NOTSET)
    if as_json:
        log_uncaught()
    for noisy in ("httpx", "httpcore", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return logging.getLogger(name)


def is_set_up() -> bool:
    """Whether `setup_logging` made the log handlers. They leave out lines marked `SHOWN`, which a
    person has seen already; handlers of a user's own script would repeat them.
    """
    return any(
        isinstance(handler.formatter, TextFormatter | JsonFormatter)
        for handler in logging.getLogger().handlers
    )


def to_stderr(service: str) -> None:
    """Logs warnings of a process that a service started to standard error, in the format of the
    service's own log.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service=service) if wants_json() else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def structured() -> JsonFormatter | None:
    """Returns the formatter of this process if it logs JSON, else None."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            return handler.formatter
    return None


def log_exit_reason(text: str, code: str, **fields: object) -> None:
    """Writes why the process ends to standard error and the log files, in the log's format."""
    facts = event(code, **fields)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    handled = bool(logging.getLogger().handlers)
    if path:  # torchrun repeats it after the other ranks' output
        Path(path).write_text(
            json.dumps({"message": text, "timestamp": int(time.time())}), encoding="utf-8"
        )
    if handled:
        logging.getLogger("end").critical("%s", text, extra=SHOWN | facts)
    if structured() is None:
        too_early = not handled and os.environ.get("LOG_FORMAT") == "json"
        if too_early:
            text = JsonFormatter().line("end", text, logging.CRITICAL, **facts)
        elif path and not handled:  # no log file has the code of this rank, its node's log may
            text = f"{text}{_in_text(facts['event'])}"
        print(text, file=sys.stderr, flush=True)


def log_uncaught() -> None:
    """Logs errors that end the process or a thread, and warnings, instead of printing them."""
    log = logging.getLogger("uncaught")

    def ended(what: str, error: BaseException | None) -> None:
        if error is not None:  # None: SystemExit, or the interpreter is shutting down
            log.critical("%s: %s: %s", what, type(error).__name__, error, exc_info=error)

    sys.excepthook = lambda _kind, error, _trace: ended("the process ends", error)
    threading.excepthook = lambda end: ended(
        f"the thread {end.thread.name if end.thread else ''} ended", end.exc_value
    )
    logging.captureWarnings(True)
