"""Sets up logs and metrics in the same way for every process."""

import logging
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from math import nan
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from common.errors import ConfigError
from common.process.logs import JsonFormatter, TextFormatter, level, log_uncaught, wants_json
from common.process.topology import Topology

PREFIX = "rlhf_"
DURATIONS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)
"""Upper bucket bounds of all histograms, in seconds."""
_OWN = ("common", "learning", "services", "trainer", "jobgroup")
"""Packages whose DEBUG lines are shown: torch alone writes hundreds for a checkpoint."""


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
                f"logs cannot be written: {error}",
                field="state_dir",
                value=str(log_dir),
                remedy="set another folder",
            ) from None
    node = Topology.from_env().node_rank
    formatter = (
        JsonFormatter(service=service or name, node=node, rank=rank) if as_json else TextFormatter()
    )
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
    """Prometheus metrics of one service, in a separate registry because several services can share
    a process.

    All names begin with `rlhf_`, except the process metrics (`process_…`) of every Prometheus
    client.
    """

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self.labels: dict[str, list[str]] = {}
        """Label names by metric, for metrics with labels."""
        ProcessCollector(registry=self.registry)
        build = self.gauge("build_info", "1; which code this is", ["service", "version", "python"])
        build.labels(service, _version(), platform.python_version()).set(1)
        self.healthy = self.gauge("healthy", "1 when /health answers 200")
        self.requests = self.counter(
            "http_requests_total", "Requests by route and status", ["route", "status"]
        )
        self.latency = self.histogram(
            "http_request_duration_seconds", "From request to response, by route", ["route"]
        )
        self.in_progress = self.gauge("http_requests_in_progress", "Requests in work now")
        self.in_progress_limit = self.gauge(
            "http_requests_in_progress_limit", "Requests that may be in work at once"
        )
        self.bodies = self.gauge("http_request_bodies_bytes", "Bodies of requests in work now")
        self.bodies_limit = self.gauge("http_request_bodies_limit_bytes", "Limit on these bytes")
        self.refused = self.counter(
            "http_requests_refused_total",
            "Requests answered 503 because a limit was reached",
            ["limit"],
        )

    def counter(self, name: str, help_text: str, labels: list[str] | None = None) -> Counter:
        return Counter(*self._named(name, help_text, labels), registry=self.registry)

    def gauge(self, name: str, help_text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(*self._named(name, help_text, labels), registry=self.registry)

    def newest(self, name: str, help_text: str) -> Gauge:
        """Adds a gauge for the newest measurement; NaN before the first."""
        made = self.gauge(name, help_text)
        made.set(nan)
        return made

    def histogram(self, name: str, help_text: str, labels: list[str] | None = None) -> Histogram:
        """Adds a histogram of durations in seconds, from a millisecond (health check) to half an
        hour (generation).
        """
        return Histogram(
            *self._named(name, help_text, labels), registry=self.registry, buckets=DURATIONS
        )

    def _named(
        self, name: str, help_text: str, labels: list[str] | None
    ) -> tuple[str, str, list[str]]:
        if labels:
            self.labels[f"{PREFIX}{name}"] = labels
        return f"{PREFIX}{name}", help_text, labels or []


def _version() -> str:
    try:
        return version("rlhf-math")
    except PackageNotFoundError:
        return "not installed"


def critic_gauges(metrics: Metrics, owner: str) -> dict[str, Gauge]:
    """Adds gauges for the newest update's `CriticMetrics` and returns them by field; NaN before the
    first update.
    """
    names = {
        "value_loss": ("value_loss", "mean value loss"),
        "grad_norm": ("gradient_norm", "gradient norm before clipping"),
        "clip_fraction": ("clip_ratio", "share of tokens that were clipped"),
        "explained_variance": (
            "explained_variance_ratio",
            "1 - Var(returns - values) / Var(returns)",
        ),
        "value_mean": ("value_mean", "mean value before it"),
        "return_mean": ("return_mean", "mean return"),
    }
    return {
        field: metrics.newest(f"{owner}_{name}", f"Newest update of the critic: {text}")
        for field, (name, text) in names.items()
    }
