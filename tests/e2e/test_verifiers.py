"""A real verifiers environment in its own Python environment: episodes are recorded, failures
named, models trained."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.errors import ServiceLost
from common.wire.schemas import Episode
from tests.support.environments.agent_environments import python_of
from tests.support.environments.agent_training import train_on
from tests.support.environments.environments import Served, request_for, served
from tests.support.paths import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SERVER = ROOT / "examples" / "verifiers" / "server.py"


def environment(identifier: str, directory: Path) -> str:
    """Returns the name of an environment whose interpreter finds the packages of the tests."""
    python = directory / "python"
    packages = ROOT / "tests" / "support" / "environments" / "verifiers_environments"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {python_of("verifiers")} "$@"\n')
    python.chmod(0o755)
    return f"agent:{python} {SERVER} {identifier} {{port}}"


async def play(
    server: Served, request_id: str, n: int = 1, index: Any = 2, **limits: Any
) -> list[Episode]:
    request = request_for(server.service.runner.name, n=n, **limits)
    request.request_id = request_id
    request.task.columns = {} if index is None else {"index": index}
    return await server.client.episodes(request)


def first_prompt(server: Served) -> str:
    return str(server.engine.tokenizer.decode(server.engine.asked[0]["input_ids"]))


def process_of(server: Served) -> int:
    runner: Any = server.service.runner
    (process,) = psutil.Process(runner._server._program._process.pid).children()
    return process.pid


async def test_one_process_plays_all_tasks_of_the_taskset(tmp_path: Path) -> None:
    name = environment("apple-counting", tmp_path)
    says = "3"
    async with served(name, lambda _: says) as server:
        for episode in await play(server, "r", n=4):
            assert (episode.status, episode.reward) == ("ok", 2.375)
            (sequence,) = episode.sequences
            assert len(sequence.turns) == 2
            assert "Are you sure?" in sequence.text
        assert "How many apples are 2 and 1?" in first_prompt(server)
        process = process_of(server)

        (episode,) = await play(server, "no-index", index=None)
        assert (episode.status, episode.reward) == ("error", None)
        assert "column index is None" in episode.detail
        (episode,) = await play(server, "beyond", index=800)
        assert (episode.status, episode.reward) == ("error", None)
        assert "the taskset has no task 800" in episode.detail

        # Every retry of a call fails, and each of the three tries of the episode.
        server.engine.failures = 1000
        (episode,) = await play(server, "engine")
        assert (episode.status, episode.reward) == ("died", None)
        assert "a call was not answered" in episode.detail
        server.engine.failures = 0

        says = "Wait."
        (episode,) = await play(server, "late", deadline_s=3)
        assert (episode.status, episode.reward) == ("timeout", None)
        says = "3"
        while psutil.Process(process).children():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # until its harness is ended
        assert process_of(server) == process

        os.kill(process, signal.SIGKILL)
        for episode in await play(server, "killed", n=2):
            assert (episode.status, episode.reward) == ("ok", 2.375)
        assert process_of(server) != process


async def test_a_file_configures_taskset_and_harness(tmp_path: Path) -> None:
    file = tmp_path / "apples.toml"
    file.write_text(
        """
        [env.taskset]
        id = "apple-counting"
        fruit = "pears"

        [env.agent.harness]
        id = "apple-counting"
        times = 3
        """
    )
    async with served(environment(str(file), tmp_path), lambda _: "3") as server:
        (episode,) = await play(server, "r")
        assert (episode.status, episode.reward, episode.metrics["turns"]) == ("ok", 2.375, 3)
        assert "How many pears are 2 and 1?" in first_prompt(server)


APPLES = '[env.taskset]\nid = "apple-counting"\n'
WRONG = {
    "pear-counting": "taskset 'pear-counting' not found",
    APPLES + 'fruits = "pears"': "fruits",
    APPLES + "[env.retries]\nmax_retries = 2": "would train on abandoned tries",
    APPLES + "[env.agent.retries]\nmax_retries = 2": "would train on abandoned tries",
    APPLES + '[env.agent.runtime]\ntype = "submarine"': "submarine",
    APPLES + "[sampling]\ntemperature = 0": "has sampling beside [env]; remove it",
}


def target_of(wrong: str, directory: Path) -> str:
    if not wrong.startswith("["):
        return wrong
    file = directory / "wrong.toml"
    file.write_text(wrong)
    return str(file)


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_configuration_ends_the_run_with_the_reason(
    wrong: str, tmp_path: Path
) -> None:
    async with served(environment(target_of(wrong, tmp_path), tmp_path), lambda _: "3") as server:
        with pytest.raises(ServiceLost, match=re.escape(WRONG[wrong])):
            await play(server, "r")


@pytest.mark.parametrize("version", ["0.5.1", None])
async def test_another_version_of_verifiers_is_refused(version: str | None, tmp_path: Path) -> None:
    if version:
        info = tmp_path / "verifiers-0.5.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: verifiers\nVersion: 0.5.1\n")
    python = tmp_path / "python"
    # This project's interpreter has aiohttp, and no verifiers.
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = rf"only 0\.4\.\* is supported, and .* has {version or 'none'}: install verifiers==0\.4"
    name = f"agent:{python} {SERVER} apple-counting {{port}}"
    async with served(name, lambda _: "3") as server:
        with pytest.raises(ServiceLost, match=found):
            await play(server, "r")


def test_a_verifiers_environment_is_trained(base_model: Path, tmp_path: Path) -> None:
    train_on(environment("apple-counting", tmp_path), base_model, tmp_path)
