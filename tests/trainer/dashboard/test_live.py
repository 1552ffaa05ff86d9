"""The page of a running trainer, while real services and a real rollout node die."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from common.process.metrics import Metrics
from common.process.topology import DATA, REPLAY, REWARD, ROLLOUT, TRAINER, LocalHost, Topology
from tests.support.browser.browser import Page
from tests.support.engines.engines import write_model
from tests.support.engines.rollout_nodes import GROUP, Node, environment, names
from tests.support.processes.ports import free_port
from tests.support.processes.reward_process import reward_server
from tests.support.runs.run_files import make_run
from tests.support.services.apps import make, tiny
from trainer.backends.server import BackgroundServer, create_trainer_app
from trainer.diagnosis.health import Health
from trainer.weights.board import WeightBoard
from trainer.weights.versions import write_version

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        sys.platform != "linux", reason="every node gets a loopback address of its own"
    ),
]


@dataclass
class Group:
    """The running parts, and the URL of the page."""

    url: str
    reward: int
    node: Node
    trainer: BackgroundServer


@contextmanager
def running(run_dir: Path, base_model: Path, tmp_path: Path) -> Iterator[Group]:
    """Runs a rollout node, the services, and the trainer's app over this run directory, with
    weights of step 30."""
    config, port = tiny(base_model, tmp_path), free_port()
    board = WeightBoard(run_dir / "weights")
    model = write_model(tmp_path / "model", 0)
    static = [model / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json")]
    board.announce(
        write_version(
            load_file(model / "model.safetensors").items(), static, board.directory, "run", 30
        )
    )
    with ExitStack() as stack:
        process = stack.enter_context(reward_server(port, tmp_path))
        data, replay = (
            stack.enter_context(BackgroundServer(make(name, config), "127.0.0.1", 0))
            for name in ("data", "replay")
        )
        places = {DATA: data.port - 8000, REPLAY: replay.port - 8003, REWARD: port - 8002}
        hosts = names(1) | {
            f"{task}-0.{GROUP}": LocalHost("127.0.0.1", shift) for task, shift in places.items()
        }
        topology = replace(Topology.from_env(environment(0, 1, tmp_path, model)), local_hosts=hosts)
        health = Health(config, topology, board.num_nodes, lambda: 30)
        app = create_trainer_app(board, Metrics("ppo_trainer"), health)
        trainer = stack.enter_context(BackgroundServer(app, *topology.bind(TRAINER, 8004)))
        stack.callback(board.close)
        node = Node(0, 1, tmp_path, model)
        stack.callback(node.end)
        yield Group(f"{topology.url(TRAINER, 8004)}/dashboard/", process.pid, node, trainer)


@pytest.fixture
def group(base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    for name in ("PATIENCE_S", "_ENGINE_PATIENCE_S"):  # what is killed refuses at once
        monkeypatch.setattr(f"trainer.diagnosis.health.{name}", 60.0)
    with running(make_run(tmp_path / "run", 30), base_model, tmp_path) as found:
        yield found


@pytest.mark.slow
def test_a_dead_service_and_a_dead_node_are_red_and_so_is_a_dead_trainer(
    page: Page, group: Group
) -> None:
    page.open(group.url)
    every = {TRAINER, f"{ROLLOUT}-0", "router", DATA, REWARD, REPLAY}
    page.until(lambda: page.count(".services .healthy") == len(every), "all are healthy")
    assert {
        line.get_attribute("data-name")
        for line in page.driver.find_elements("css selector", ".services li")
    } == every
    node = page.text(f"[data-name={ROLLOUT}-0]")
    assert "weights 30" in node
    assert "in work 0" in node
    page.until(
        lambda: "tokens/s 0" in page.text(f"[data-name={ROLLOUT}-0]"),
        "a rate, from the second look on",
    )
    assert "sends to 1 of 1 engines" in page.text("[data-name=router]")
    page.until(lambda: page.text("#alarms") == "", "no alarm")
    green = page.run(_DOT, REWARD)
    assert page.errors() == []

    os.kill(group.reward, signal.SIGKILL)
    page.until(lambda: page.count(f".services .dead[data-name={REWARD}]"), "reward-server is dead")
    assert page.run(_DOT, REWARD) != green
    page.until(
        lambda: "reward-server is dead for " in page.text("#alarms [role=alert]"), "since when"
    )
    page.until(lambda: page.count(".services .dead") == 1, "nothing else is dead")
    group.node.engine().kill()
    page.until(lambda: page.count(f".services .dead[data-name={ROLLOUT}-0]"), "the engine is dead")
    os.killpg(group.node.process.pid, signal.SIGKILL)
    page.until(lambda: page.count(".services .dead") == 3, "the whole node is dead, and its router")
    assert page.errors() == []

    group.trainer.__exit__()
    page.until(
        lambda: "does not answer since" in page.text("#alarms [role=alert]"), "the trainer is dead"
    )
    assert page.count(".chart canvas") > 3, "what was there is still to be seen"


_DOT = "return getComputedStyle(document.querySelector(`[data-name=${arguments[0]}] .dot`)).backgroundColor"
