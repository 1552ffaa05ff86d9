"""`benchmarks.processes`: a benchmark never waits for a process that has ended."""

import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.processes import calling, free_port, processes, run
from benchmarks.router import work
from common.errors import ConfigError


@pytest.mark.integration
def test_processes_are_awaited_and_ended(tmp_path: Path) -> None:
    (tmp_path / "health").touch()
    port = free_port()
    command = ["-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with processes([command], [f"http://127.0.0.1:{port}"], disposable=True) as (server,):
        assert server.poll() is None
    assert server.poll() is not None


@pytest.mark.integration
def test_a_function_is_called_in_a_process_of_its_own() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with processes([calling(work, port)], [url], disposable=True):
        assert httpx.get(f"{url}/server_info", trust_env=False).json()["asked"] == 0


@pytest.mark.integration
def test_a_process_that_ends_is_not_awaited() -> None:
    command = ["-c", "raise SystemExit(3)"]
    with (
        pytest.raises(RuntimeError, match="ended with status 3"),
        processes([command], [f"http://127.0.0.1:{free_port()}"]),
    ):
        pass


@pytest.mark.integration
def test_a_run_that_fails_says_its_last_lines(tmp_path: Path) -> None:
    run(
        tmp_path / "log" / "good.txt",
        sys.executable,
        "-c",
        "import os; print(os.environ['A'])",
        A="1",
    )
    assert (tmp_path / "log" / "good.txt").read_text() == "1\n"
    with pytest.raises(ConfigError, match="ValueError: of the run"):
        run(tmp_path / "bad.txt", sys.executable, "-c", "raise ValueError('of the run')")
