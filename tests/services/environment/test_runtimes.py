"""Coding agents in containers: Harbor tasks in the sandbox, in Docker and in Kubernetes.

Docker and Kubernetes are a program that notes our calls and runs them in bubblewrap, unless
$DOCKER_TEST_IMAGE or $KUBERNETES_TEST_IMAGE names an image with Python that the real ones have.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.settings.sections import RuntimeSection
from common.wire.schemas import Episode
from examples.coding_agent.tasks import DOCKERFILE, Repair, write
from tests.support import fake_containers
from tests.support.environments import Served, request_for, served
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration
AGENT = ROOT / "tests" / "support" / "coding_agent.py"
NAME = f"harbor:/usr/bin/python3 -I -S {AGENT}"
REPAIR = Repair("area", "multiplies", "+")
RIGHT = REPAIR.command("*")
KINDS = ("sandbox", "docker", "kubernetes", "real docker", "real kubernetes")
IMAGES = {
    "real docker": os.environ.get("DOCKER_TEST_IMAGE"),
    "real kubernetes": os.environ.get("KUBERNETES_TEST_IMAGE"),
}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder of the programs that stand for Docker and Kubernetes."""
    fake_containers.install(tmp_path)
    (tmp_path / "state" / "images").mkdir(parents=True)
    (tmp_path / "state" / "calls").touch()
    return tmp_path / "state"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    write(REPAIR, tmp_path / "tasks" / "area")
    return tmp_path / "tasks" / "area"


@pytest.fixture
def section(
    state: Path, task: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RuntimeSection]:
    """Makes the settings of a kind of `KINDS`."""

    def make(kind: str, **settings: Any) -> RuntimeSection:
        if kind in ("docker", "kubernetes"):
            monkeypatch.setenv("PATH", str(state.parent), prepend=os.pathsep)
            monkeypatch.setenv("FAKE_CONTAINERS", str(state))
        elif kind in IMAGES and not IMAGES[kind]:
            pytest.skip(f"no image for {kind} is named")
        if kind == "kubernetes":  # a cluster builds no images
            settings |= {"image": "registry.example/{task}:1", "gateway": "of the test"}
            shutil.copytree(task / "environment", state / "images" / "registry.example_area:1")
        elif kind == "real kubernetes":
            settings |= {"image": IMAGES[kind], "gateway": "of the test"}
        elif kind == "real docker":
            dockerfile = DOCKERFILE.replace("python:3.11-slim", IMAGES[kind] or "")
            (task / "environment" / "Dockerfile").write_text(dockerfile)
        name = kind.rpartition(" ")[2]
        return RuntimeSection.model_validate(
            {"kind": name, "tools": [str(AGENT.parent)], **settings}
        )

    return make


def saying(*answers: str) -> Callable[[str], str]:
    """Returns a model that gives these answers one after another in every episode."""
    return lambda prompt: [*answers, "done"][prompt.count("<|im_start|>assistant") - 1]


async def play(server: Served, folder: Path, **limits: Any) -> Episode:
    request = request_for(server.service.environment.name, REPAIR.instruction, **limits)
    request.request_id = f"r{len(server.service._requests)}"
    request.task.columns = {"harbor_task": str(folder)}
    (episode,) = await server.client.episodes(request)
    return episode


@pytest.mark.parametrize("kind", KINDS)
async def test_a_repair_is_graded_by_tests_that_the_agent_never_sees(
    kind: str, section: Callable[..., RuntimeSection], state: Path, task: Path
) -> None:
    runtime = section(kind)
    async with served(NAME, saying("ls /tests /logs; cat lib/*", RIGHT), runtime=runtime) as server:
        episode = await play(server, task)
        assert (episode.status, episode.reward, episode.detail) == ("ok", 1.0, "")
        asked = server.engine.tokenizer.decode(server.engine.asked[1]["input_ids"])
        assert "return a + b" in asked
        assert "cannot access '/tests'" in asked
        assert (episode.metrics["turns"], len(episode.sequences)) == (3, 1)
    async with served(NAME, saying(REPAIR.command("-")), runtime=runtime) as server:
        episode = await play(server, task)
        assert (episode.status, episode.reward) == ("ok", 0.0)
    assert fake_containers.running(state) == []
