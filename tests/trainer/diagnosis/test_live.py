"""A run whose services are asked: real processes that are stopped and killed, and one with another token."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from common.process import watchdog
from common.process.metrics import Metrics
from common.process.run_lock import RunLock
from common.process.topology import Topology
from common.settings.config import Config
from services.http.app import create_app
from tests.support.paths import ROOT
from tests.support.processes.ports import free_port
from tests.support.processes.reward_process import reward_server
from tests.support.runs.run_files import make_run, write
from tests.support.services.apps import make, tiny
from trainer.backends.server import BackgroundServer, create_trainer_app
from trainer.diagnosis.facts import Facts
from trainer.diagnosis.find import find
from trainer.diagnosis.live import collect
from trainer.diagnosis.run_files import write_topology
from trainer.observe import catalogue
from trainer.weights.board import WeightBoard

pytestmark = pytest.mark.integration


class LivingRun:
    """A run directory that this process holds, with a trainer's server and services; no rollout node answers."""

    def __init__(self, config: Config, directory: Path, stack: ExitStack) -> None:
        self.directory = make_run(directory, 3)
        board = WeightBoard(directory / "weights")
        app = create_trainer_app(board, Metrics("ppo-trainer"))
        trainer = stack.enter_context(BackgroundServer(app, "127.0.0.1", 0))
        stack.callback(board.close)
        data = stack.enter_context(BackgroundServer(make("data", config), "127.0.0.1", 0))
        self.reward_port = free_port()
        config.trainer.port = trainer.port
        config.data.port = data.port
        config.reward.port = self.reward_port
        config.rollout.agent_port = config.rollout.router_port = free_port()
        (directory / "config.json").write_text(config.model_dump_json())
        stack.enter_context(RunLock(directory, "group-1"))
        write_topology(directory, Topology(), world_size=1)
        for name in ("metrics.jsonl", "attempts.jsonl"):
            path = directory / name
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            write(path, [line | {"time": time.time()} for line in lines])

    def until(self, name: str, *, there: bool = True) -> Facts:
        """Diagnoses the run until this finding is there, or no longer, and what lives for the whole
        test answers, rank 0 and the data-server: on a busy machine they may take longer than the few
        seconds of a diagnosis.
        """
        limit = time.monotonic() + 400
        while time.monotonic() < limit:
            facts = collect(self.directory)
            is_there = any(finding.name == name for finding in find(facts))
            state = {service.name: service.state for service in facts.services}
            if is_there == there and facts.ranks and state["data-server"] != "dead":
                return facts
        raise AssertionError(f"{name}: {facts.trainer_problem}, {find(facts)}")


@pytest.fixture
def run(base_model: Path, tmp_path: Path) -> Iterator[LivingRun]:
    with ExitStack() as stack:
        yield LivingRun(tiny(base_model, tmp_path / "services"), tmp_path / "run", stack)


def test_a_service_is_found_that_is_stopped_and_then_killed(run: LivingRun, tmp_path: Path) -> None:
    with reward_server(run.reward_port, tmp_path) as process:
        facts = run.until(catalogue.REWARD_DIES, there=False)  # it has started
        assert facts.state == "running"
        (rank,) = facts.ranks
        assert (rank.rank, rank.answered) == (0, True)
        data = next(service for service in facts.services if service.name == "data-server")
        assert (data.state, data.release) == ("healthy", facts.versions["rlhf-math"])

        process.send_signal(signal.SIGSTOP)
        found = find(run.until(catalogue.SERVICE_HANGS))
        stopped = next(each for each in found if each.name == catalogue.SERVICE_HANGS)
        assert stopped.what.startswith("reward-server: no answer")
        assert "kill -CONT" in stopped.remedy

        process.send_signal(signal.SIGCONT)
        run.until(catalogue.SERVICE_HANGS, there=False)
        process.kill()
        run.until(catalogue.REWARD_DIES)


def test_a_service_with_another_token_is_named(
    run: LivingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_TOKEN", "another-token-of-20-characters")
    with BackgroundServer(create_app("reward-server"), "127.0.0.1", run.reward_port):
        monkeypatch.delenv("API_TOKEN")
        found = find(run.until(catalogue.WRONG_TOKEN))
    assert next(each for each in found if each.name == catalogue.WRONG_TOKEN).what.startswith(
        "reward-server"
    )


def test_the_command_says_it_in_five_lines_without_torch(run: LivingRun) -> None:
    """As a user starts it; nobody answers at the port of the reward-server."""
    command = [sys.executable, "-X", "importtime", "-m", "trainer.diagnose", str(run.directory)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    said = done.stdout.splitlines()
    assert (done.returncode, len(said)) == (1, 5), done.stdout + done.stderr
    assert [line.partition(" ")[0] for line in said[1:]] == ["since", "evidence", "remedy", "more"]
    assert catalogue.REWARD_DIES in done.stdout
    assert "| torch\n" not in done.stderr

    report: dict[str, Any] = {"ranks": []}
    while not report["ranks"]:  # on a busy machine rank 0 may take longer than a diagnosis waits
        as_json = subprocess.run(
            [*command[:1], *command[3:], "--json"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        report = json.loads(as_json.stdout)
    assert report["first_line"] == said[0]
    assert report["ranks"][0]["place"] == ""
    assert watchdog.where().pid == os.getpid()


def test_a_directory_that_is_none_is_refused_with_its_name(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.diagnose", str(tmp_path / "none")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "there is no such run directory" in done.stderr
