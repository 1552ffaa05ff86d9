"""Lines of a log: text for people, or with `LOG_FORMAT=json` an object for programs; and the request that a line is about.

A request id follows one piece of work through all services. Whoever begins it makes the id (`request`), clients send it as
`X-Request-Id`, servers take it over, and every line that is logged meanwhile has it.
"""

import json
import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from common.errors import ConfigError
from common.security import Hider

REQUEST_HEADER, RUN_HEADER = "x-request-id", "x-run-id"
SHOWN = {"shown": True}
"""`extra` of a line that a person has on the console already: as text it goes to the log file alone."""
_USABLE = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_TEXT = "%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"
_request: ContextVar[str] = ContextVar("request", default="")
_run: ContextVar[str] = ContextVar("run", default="")
_own_run = ""


def new_request_id() -> str:
    """16 characters that no other request has."""
    return secrets.token_hex(8)


def usable_id(text: str) -> bool:
    """Whether this may be an id: 1 to 128 letters, digits and `_ . : / + = @ -`, so that no line can be forged with one."""
    return _USABLE.fullmatch(text) is not None


def request_id() -> str:
    """Of the request that is in work here; empty outside of one."""
    return _request.get()


def run_id() -> str:
    """Of the run that is in work here; empty where it is not known."""
    return _run.get() or _own_run


def set_run(run: str) -> None:
    """This process works for this run from now on."""
    global _own_run
    _own_run = run


@contextmanager
def request(identifier: str, run: str = "") -> Iterator[None]:
    """Inside, lines and calls to services have this id, or a new one if it cannot be one; and this run, if it is not empty."""
    before = _request.set(identifier if usable_id(identifier) else new_request_id())
    before_run = _run.set(run if usable_id(run) else _run.get())
    try:
        yield
    finally:
        _request.reset(before)
        _run.reset(before_run)


def sent_headers() -> dict[str, str]:
    """What a client sends with a call: the id of the request in work, or a new one, and the run where it is known."""
    run = {RUN_HEADER: run_id()} if usable_id(run_id()) else {}
    return {REQUEST_HEADER: request_id() or new_request_id(), **run}


class TextFormatter(logging.Formatter):
    """Lines for people. Shows no secret of the environment, wherever a message or a traceback has it from."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def format(self, record: logging.LogRecord) -> str:
        record.request = f" [{identifier}]" if (identifier := request_id()) else ""
        return Hider().text(super().format(record))


class JsonFormatter(logging.Formatter):
    """Lines for programs: one JSON object each, secrets hidden as in `TextFormatter`.

    Args:
        who: what every line says of this process, as `service`, `node`, `rank`; what is None is left out.
    """

    def __init__(self, **who: str | int | None) -> None:
        super().__init__()
        self._who = {name: value for name, value in who.items() if value is not None}

    def format(self, record: logging.LogRecord) -> str:
        told = {"run": run_id(), "request": request_id()}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            told["stack"] = self.formatStack(record.stack_info)
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._who,
            **{name: text for name, text in told.items() if text},
        }
        hider = Hider()  # before the quoting, which could tear a secret apart
        entry = {name: hider.text(value) if isinstance(value, str) else value for name, value in entry.items()}
        return json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace").decode()

    def line(self, logger: str, text: str, level: int = logging.INFO) -> str:
        """A line that was not logged: the output of a child process, or the reason why nothing could be logged."""
        return self.format(logging.LogRecord(logger, level, "", 0, text, None, None))


def wants_json() -> bool:
    """What `LOG_FORMAT` says: `text` (when unset) or `json`. Raises ConfigError."""
    value = os.environ.get("LOG_FORMAT") or "text"
    if value not in ("text", "json"):
        raise ConfigError("there is no such format of logs", field="LOG_FORMAT", value=value, remedy="set text or json")
    return value == "json"


def level() -> str:
    """What `LOG_LEVEL` says; INFO when unset. Raises ConfigError."""
    value = os.environ.get("LOG_LEVEL") or "INFO"
    if value.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(
            "there is no such level of logs", field="LOG_LEVEL", value=value, remedy="set DEBUG, INFO, WARNING or ERROR"
        )
    return value.upper()


def to_stderr(service: str) -> None:
    """Warnings of a process that a service has started go to standard error, in the form of the service's own log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service=service) if wants_json() else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def structured() -> JsonFormatter | None:
    """The formatter of this process's lines, if they are JSON."""
    found = (handler.formatter for handler in logging.getLogger().handlers)
    return next((formatter for formatter in found if isinstance(formatter, JsonFormatter)), None)


def last_words(text: str) -> None:
    """Tells the person at standard error why the process ends, in the form of the log, and log files that there are."""
    handled, as_json = bool(logging.getLogger().handlers), structured()
    if handled:
        logging.getLogger("end").critical("%s", text, extra=SHOWN)
    if as_json is None:
        too_early = not handled and os.environ.get("LOG_FORMAT") == "json"
        print(JsonFormatter().line("end", text, logging.CRITICAL) if too_early else text, file=sys.stderr, flush=True)


def log_uncaught() -> None:
    """Errors that end the process or a thread, and warnings, become lines of the log instead of text of their own."""
    log = logging.getLogger("uncaught")

    def of_process(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        log.critical("the process ends: %s: %s", kind.__name__, error, exc_info=(kind, error, trace))

    def of_thread(ended: threading.ExceptHookArgs) -> None:
        name, error = ended.thread.name if ended.thread else "a thread", ended.exc_value
        if error is not None:  # else it was SystemExit or the interpreter is ending
            log.critical("the thread %s ended: %s", name, error, exc_info=(ended.exc_type, error, ended.exc_traceback))

    sys.excepthook, threading.excepthook = of_process, of_thread
    logging.captureWarnings(True)
