"""Logs and metrics, the same way in every process."""

import logging
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.errors import ConfigError
from common.logs import JsonFormatter, TextFormatter, level, log_uncaught, wants_json
from common.topology import Topology

_OWN = ("common", "services", "trainer")
"""Packages whose lines at DEBUG are shown: torch alone has hundreds for a checkpoint."""


class _LogFile(logging.FileHandler):
    """Goes on without the file while its disk is full, and says so once; standard error has every line."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            text = f"error: lines are missing in {self.baseFilename}: {sys.exc_info()[1]}"
            if isinstance(self.formatter, JsonFormatter):
                text = self.formatter.line(__name__, text, logging.ERROR)
            print(text, file=sys.stderr, flush=True)


def setup_logging(name: str, log_dir: Path | None = None, *, service: str = "", rank: int | None = None) -> logging.Logger:
    """Logs of this process go to stderr and, when `log_dir` is given, to `log_dir/name.log` too.

    SkyPilot deletes the logs of auxiliary tasks when a job group ends; a file on a volume outlives it. The level is
    `LOG_LEVEL` (INFO when unset), the form `LOG_FORMAT` (`text` when unset, or `json`: see docs/operations.md).

    Args:
        name: of the process, and its logger.
        log_dir: gets the file.
        service: in lines of JSON; `name` when empty.
        rank: of a process of several, in lines of JSON.

    Raises ConfigError when `log_dir` cannot be written or one of the variables cannot be used.
    """
    as_json, wanted_level = wants_json(), level()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if not as_json:
        handlers[0].addFilter(lambda record: not getattr(record, "shown", False))
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            handlers.append(_LogFile(log_dir / f"{name}.log", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"logs cannot be written: {error}", field="state_dir", value=str(log_dir), remedy="set another folder"
            ) from None
    node = Topology.from_env().node_rank
    formatter = JsonFormatter(service=service or name, node=node, rank=rank) if as_json else TextFormatter()
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


class Metrics:
    """Prometheus metrics of one service in a registry of its own (several services can share a process)."""

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = f"rlhf_{service}_"
        self.requests = self.counter("http_requests_total", "Requests by route and status", ["route", "status"])
        self.latency = self.histogram("http_request_seconds", "Seconds from request to response, by route", ["route"])
        self.in_work = self.gauge("in_work", "Requests, and bytes of their bodies, in work now", ["what"])
        self.limit = self.gauge("in_work_limit", "How much may be in work at once", ["what"])
        self.refused = self.counter("refused_total", "Requests refused because the limit was reached", ["what"])

    def counter(self, name: str, help_text: str, labels: list[str] | None = None) -> Counter:
        return Counter(self._prefix + name, help_text, labels or [], registry=self.registry)

    def gauge(self, name: str, help_text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(self._prefix + name, help_text, labels or [], registry=self.registry)

    def histogram(self, name: str, help_text: str, labels: list[str] | None = None) -> Histogram:
        return Histogram(self._prefix + name, help_text, labels or [], registry=self.registry)
