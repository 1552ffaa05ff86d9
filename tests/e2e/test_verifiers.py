"""A real verifiers environment in its own Python environment: episodes are recorded, failures
named, models trained."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_environments import python_of
from tests.support.agent_training import train_on
from tests.support.environments import request_for, served
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def environment(identifier: str, directory: Path) -> str:
    """Returns the name of an environment whose interpreter finds the packages of the tests."""
    python = directory / "python"
    packages = ROOT / "tests" / "support" / "verifiers_environments"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {python_of("verifiers")} "$@"\n')
    python.chmod(0o755)
    return f"verifiers:{python} {identifier}"


EPISODES: dict[str, tuple[str, dict[str, Any], str, float | None, str]] = {
    "a task": ("apple-counting", {"index": 2}, "ok", 2.375, ""),
    "no index": ("apple-counting", {}, "error", None, "column index is None"),
    "no such task": (
        "apple-counting",
        {"index": 800},
        "error",
        None,
        "the taskset has no task 800",
    ),
    "no such environment": (
        "pear-counting",
        {"index": 2},
        "error",
        None,
        "taskset 'pear-counting' not found",
    ),
}


@pytest.mark.parametrize("kind", EPISODES)
async def test_an_episode_is_a_task_of_the_taskset(kind: str, tmp_path: Path) -> None:
    identifier, columns, status, reward, detail = EPISODES[kind]
    name = environment(identifier, tmp_path)
    async with served(name, lambda _: "3") as server:
        request = request_for(name)
        request.task.columns = columns
        (episode,) = await server.client.episodes(request)
        assert (episode.status, episode.reward) == (status, reward)
        assert detail in episode.detail
        if status == "ok":
            (sequence,) = episode.sequences
            assert len(sequence.turns) == 2
            assert "Are you sure?" in sequence.text


def test_a_verifiers_environment_is_trained(base_model: Path, tmp_path: Path) -> None:
    train_on(environment("apple-counting", tmp_path), base_model, tmp_path)
