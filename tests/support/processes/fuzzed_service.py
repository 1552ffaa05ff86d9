"""Services as real processes, watched while they are fuzzed."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil

from tests.support.processes.forks import Forked
from tests.support.processes.ports import free_port
from tests.support.processes.waits import until

SECONDS = int(os.environ.get("FUZZ_SECONDS", "0"))
"""Seconds of fuzzing per service in the long form (`make fuzz`); 0: a fixed small number of
examples."""


class Service:
    """A service that answers on a free port."""

    def __init__(self, name: str, directory: Path, model: Path) -> None:
        self.name, self.port = name, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"{name}.log"
        words = (name, str(self.port), str(directory / name), str(model))
        self.process = Forked("tests.support.processes.served_app", *words, log=self.log)
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60)

    def ready(self) -> bool:
        """Returns whether it is healthy; an agent whose node is not started never is."""
        try:
            return self.http.get("/health").status_code == (503 if self.name == "agent" else 200)
        except httpx.TransportError:
            return False

    def wait(self) -> None:
        until(self.ready, self.log, self.process)

    def memory_mb(self) -> float:
        """Returns the resident memory of the process and its children."""
        main = psutil.Process(self.process.pid)
        size = main.memory_info().rss
        for process in main.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                size += process.memory_info().rss
        return float(size) / 1e6

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        try:
            self.process.wait(400)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextmanager
def served(name: str, directory: Path, model: Path) -> Iterator[Service]:
    """Starts the service `name` and waits until it is ready."""
    service = Service(name, directory, model)
    try:
        service.wait()
        yield service
    finally:
        service.close()
