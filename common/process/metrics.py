"""Prometheus metrics of a service, named in the same way everywhere."""

import platform
from collections.abc import Sequence
from math import nan

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from common import VERSION

PREFIX = "rlhf_"
DURATIONS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)
"""Upper bucket bounds of all histograms, in seconds."""


class Metrics:
    """Prometheus metrics of one service, in a separate registry because several services can share
    a process.

    All names begin with `rlhf_`, except the process metrics (`process_…`) of every Prometheus
    client.
    """

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self.labels: dict[str, Sequence[str]] = {}
        """Label names by metric, for metrics with labels."""
        ProcessCollector(registry=self.registry)
        build = self.gauge("build_info", "1; which code this is", ["service", "version", "python"])
        build.labels(service, VERSION, platform.python_version()).set(1)
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

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(*self._named(name, help_text, labels), registry=self.registry)

    def gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(*self._named(name, help_text, labels), registry=self.registry)

    def newest(self, name: str, help_text: str) -> Gauge:
        """Adds a gauge for the newest measurement; NaN before the first."""
        made = self.gauge(name, help_text)
        made.set(nan)
        return made

    def histogram(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Histogram:
        """Adds a histogram of durations in seconds, from a millisecond (health check) to half an
        hour (generation).
        """
        return Histogram(
            *self._named(name, help_text, labels), registry=self.registry, buckets=DURATIONS
        )

    def _named(
        self, name: str, help_text: str, labels: Sequence[str]
    ) -> tuple[str, str, Sequence[str]]:
        if labels:
            self.labels[f"{PREFIX}{name}"] = labels
        return f"{PREFIX}{name}", help_text, labels
