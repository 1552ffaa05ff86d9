"""Small job groups that the real runner executes in their own processes."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.processes.local_run import LocalRun


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[[str], LocalRun]]:
    """Creates runs, each in its own folder, and kills what a failed test leaves behind."""
    runs: list[LocalRun] = []

    def make(name: str) -> LocalRun:
        folder = tmp_path / name
        folder.mkdir()
        runs.append(LocalRun(folder))
        return runs[-1]

    yield make
    for run in runs:
        for process in run.marked():
            with suppress(psutil.NoSuchProcess):  # the process has just ended
                process.kill()
        if run.process is not None:
            run.process.communicate()


@pytest.fixture
def local(make_run: Callable[[str], LocalRun]) -> LocalRun:
    """A single run."""
    return make_run("run")
