"""Programs as agents: real processes and servers, three ways to give a reward, unrewarded failures,
no leftovers."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from common.errors import ConfigError
from common.settings.sections import EnvironmentSection, RuntimeSection
from common.wire.schemas import Episode
from services.environment import program_runner
from services.environment.programs import Folders
from services.environment.runners import load_runner
from services.environment.runtimes.runtime import Container, Spec
from services.http.app import create_app, listen, serving
from tests.support.environments.environments import Served, request_for, served
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.processes.clocks import leap
from tests.support.processes.processes import alive
from tests.support.processes.waits import comes, until

PROGRAM = (
    f"{sys.executable} -I -S {ROOT / 'tests' / 'support' / 'environments' / 'agent_program.py'}"
)
NAME = f"agent:{PROGRAM}"
pytestmark = pytest.mark.integration


async def play(server: Served, mode: str, columns: Any = None, **limits: Any) -> Episode:
    request = request_for(server.service.runner.name, mode, **limits)
    request.task.columns = columns or {}
    request.request_id = f"r{len(server.service._requests)}"
    (episode,) = await server.client.episodes(request)
    return episode


REWARDS: dict[str, dict[str, float]] = {
    "file": {"right": 1.0, "short": 0.5},
    "number": {"reward": 1.0},
    "call": {"reward": 1.0},
    "bad call": {"reward": -1.0},
    "chatty": {"reward": 1.0},
    "killed with a reward": {"reward": 1.0},
    "variables": {"secrets": 0.0},
}


async def test_a_program_gives_its_reward_by_a_file_or_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "of-the-server")
    monkeypatch.setenv("MY_SECRET", "of-the-server")
    async with served(NAME, lambda _: "3") as server:
        for mode, parts in REWARDS.items():
            episode = await play(server, mode)
            assert (mode, episode.status, episode.detail) == (mode, "ok", "")
            assert episode.components == parts
            assert episode.reward == sum(parts.values())
            assert (episode.answer, episode.metrics["turns"], len(episode.sequences)) == ("3", 1, 1)


async def test_the_start_of_a_container_is_not_its_episodes_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod waits for room in its cluster, or for its image."""
    async with served(NAME, lambda _: "3") as server:
        runner: Any = server.service.runner
        start = runner._runtime.start

        async def start_late(spec: Spec, home: Path) -> Container:
            leap(100)
            container: Container = await start(spec, home)
            return container

        async def reward(*_: object) -> float:
            return 1.0

        monkeypatch.setattr(runner._runtime, "start", start_late)
        monkeypatch.setattr(runner, "_reward_of", reward)
        episode = await play(server, "number", deadline_s=60)
    assert episode.status != "timeout"


async def test_answer_without_a_reward_is_left_to_be_graded_unless_others_have_one() -> None:
    async with served(NAME, lambda _: "3") as server:
        episode = await play(server, "nothing")
        assert (episode.status, episode.reward, episode.answer) == ("ok", None, "3")
        assert (await play(server, "number")).reward == 1.0
        episode = await play(server, "nothing")
        assert (episode.status, episode.reward, episode.sequences) == ("error", None, [])
        assert "without a reward" in episode.detail
        assert server.service.stats()["episodes"] == {"ok": 2, "timeout": 0, "died": 0, "error": 1}


FAILURES = {
    "crash": ("error", "ended with status 1; the end of its output: Traceback"),
    "signal": ("died", "was killed by SIGKILL"),
    "killed while it writes": ("died", "was killed by SIGKILL"),
    "killed with a default": ("died", "was killed by SIGKILL"),
    "no JSON": ("error", "the reward file is not JSON: 'no JSON'"),
    "NaN": ("error", "the program's reward is nan, not a finite number"),
    "[]": ("error", "the program's reward is [], not a finite number"),
    "{}": ("error", "the program's reward is {}, not a finite number"),
    '""': ("error", "the program's reward is , not a finite number"),
    "forged": ("error", "the key is not this session's"),
    "large": ("error", "the first messages are too long for environment.context"),
}


async def test_a_program_that_fails_has_a_reason_and_no_reward() -> None:
    async with served(NAME, lambda _: "3") as server:
        for mode, (status, detail) in FAILURES.items():
            episode = await play(server, mode)
            assert (mode, episode.status, episode.reward, episode.sequences) == (
                mode,
                status,
                None,
                [],
            )
            assert detail in episode.detail
        server.engine.failures = 3
        episode = await play(server, "number")
        assert (episode.status, episode.reward) == ("died", None)
        assert "a call was not answered" in episode.detail


async def test_a_fault_of_the_engines_is_no_reward_even_if_the_program_makes_one_of_it(
    tmp_path: Path,
) -> None:
    columns = {"begun": str(tmp_path / "begun"), "left": str(tmp_path / "left")}
    release = threading.Event()

    def stuck() -> None:
        Path(columns["begun"]).touch()
        release.wait(60)

    async with served(NAME, lambda _: "3") as server:
        assert (await play(server, "swallows")).reward == 0.0
        server.engine.failures = 3
        episode = await play(server, "swallows")
        assert (episode.status, episode.reward, episode.sequences) == ("died", None, [])
        assert "a call was not answered: " in episode.detail
        server.engine.waits = stuck
        episode = await play(server, "gives up", columns)
        release.set()
        assert (episode.status, episode.reward) == ("died", None)
        assert "a call had no answer" in episode.detail


async def test_a_client_that_left_before_its_answer_has_none_even_if_the_server_was_busy(
    tmp_path: Path,
) -> None:
    begun = tmp_path / "begun"
    left = tmp_path / "left"

    def busy(_: str) -> str:
        begun.touch()
        # Blocks the server, which does not see the client leave.
        until(left.exists, "the client leaves")
        return "3"

    async with served(NAME, busy) as server:
        columns = {"begun": str(begun), "left": str(left)}
        episode = await play(server, "gives up", columns)
        assert (episode.status, episode.reward, episode.sequences) == ("died", None, [])
        assert "a call had no answer" in episode.detail


@pytest.mark.parametrize("mode", ["leaves its answer", "leaves its stream"])
async def test_a_client_that_left_an_answer_unread_has_none_although_it_was_sent(mode: str) -> None:
    async with served(NAME, lambda _: "3") as server:
        episode = await play(server, mode)
        assert (episode.status, episode.reward, episode.sequences) == ("died", None, [])
        assert "a call had no answer" in episode.detail


async def test_an_answer_that_was_left_unread_is_sent_again_to_who_asks_again() -> None:
    async with served(NAME, lambda _: "3") as server:
        episode = await play(server, "leaves and asks again")
        assert (episode.status, episode.reward) == ("ok", 1.0)
        assert (episode.metrics["turns"], len(episode.sequences)) == (1, 1)


async def test_an_episode_without_a_folder_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))
    async with served(NAME, lambda _: "3") as server:
        episode = await play(server, "number")
        assert (episode.status, episode.reward) == ("died", None)
        assert "no folder for an episode can be made: No such file or directory" in episode.detail


async def test_a_refused_call_is_told_and_counted() -> None:
    async with served(NAME, lambda _: "3") as server:
        episode = await play(server, "two answers")
        assert (episode.status, episode.reward) == ("ok", 1.0)
        assert "1 calls refused, the first: n: a call returns exactly one answer" in episode.detail
        assert episode.metrics["refused_calls"] == 1
        assert episode.refusal.startswith("n: a call returns exactly one answer; make one call")
        (refused,) = server.service._refused.collect()
        assert (refused.samples[0].labels["field"], refused.samples[0].value) == ("n", 1)


async def test_limit_is_a_stop_reason_even_if_it_makes_the_program_fail() -> None:
    async with served(NAME, lambda _: "3") as server:
        episode = await play(server, "limits", turns=3)
        assert (episode.status, episode.stop_reason, episode.metrics["turns"]) == ("ok", "turns", 3)
        assert {sequence.finish_reason for sequence in episode.sequences} == {"length"}
    async with served(NAME, lambda _: "3" * 400) as server:
        episode = await play(server, "crash")
        assert (episode.status, episode.stop_reason, episode.reward) == ("ok", "length", None), (
            "its answer was cut"
        )


def noted(pids: Path) -> list[int]:
    return [int(line) for line in pids.read_text().split()] if pids.exists() else []


async def gone(pids: Path, count: int) -> None:
    """Waits until `count` noted processes have ended."""
    found = noted(pids)
    assert len(found) == count
    await comes(lambda: not any(alive(pid) for pid in found))


async def test_program_leaves_no_process_or_session_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_runner, "GRACE_S", 0.1)
    async with served(NAME, lambda _: "3") as server:
        for mode, status, count, deadline_s in (
            ("leaves", "ok", 2, 60),
            ("escapes", "ok", 1, 60),
            ("lingers", "ok", 1, 60),
            ("hangs", "timeout", 2, 8),
        ):
            request = request_for(NAME, mode, deadline_s=deadline_s)
            request.request_id = mode
            pids = tmp_path / mode
            request.task.columns = {"pids": str(pids)}
            (episode,) = await server.client.episodes(request)
            assert (mode, episode.status, episode.reward) == (
                mode,
                status,
                1.0 if status == "ok" else None,
            )
            await gone(pids, count)
        request.request_id = "deleted"
        request.limits.deadline_s = 600
        pids = tmp_path / "deleted"
        request.task.columns = {"pids": str(pids)}
        running = asyncio.create_task(server.client.episodes(request))
        await comes(lambda: len(noted(pids)) == 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await gone(pids, 2)
        await comes(lambda: server.service.stats()["sessions"] == 0)


def test_folders_that_a_killed_server_left_are_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lives = Folders()
    kept = lives.make()
    killed = "import sys, os; from services.environment.programs import Folders; "
    killed += "Folders().make(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed], env=os.environ | {"TMPDIR": str(tmp_path)})
    empty = tmp_path / "rlhf-episodes-empty"
    empty.mkdir()
    os.utime(empty, (0, 0))
    assert len(list(tmp_path.iterdir())) == 3
    Folders().close()
    assert list(tmp_path.iterdir()) == [kept.parent]
    lives.close()
    assert not list(tmp_path.iterdir())


async def test_the_prompt_may_be_an_argument(tmp_path: Path) -> None:
    async with served(
        f"agent:sh -c 'printf %s \"$0\" >{tmp_path}/told' {{prompt}}", lambda _: "3"
    ) as server:
        episode = await play(server, "what; is $(it)?")
        assert (episode.status, episode.detail) == (
            "error",
            "the model was not asked: nothing to train on",
        )
        assert (tmp_path / "told").read_text() == "what; is $(it)?"
        for prompt in ("nothing\0else", "x" * 200_000):
            episode = await play(server, prompt)
            assert (episode.status, episode.reward) == ("error", None)
            assert "sh could not be started: " in episode.detail


def agent_app(told: list[dict[str, Any]], release: asyncio.Event) -> FastAPI:
    app = create_app("agent")

    @app.post("/{mode}")
    async def run(mode: str, request: Request) -> Response:
        task = await request.json()
        told.append(task)
        if mode == "hangs":
            await release.wait()
        session = task["session"]
        async with httpx.AsyncClient(
            headers={"x-api-key": session["api_key"]}, timeout=400
        ) as client:
            body = {"messages": task["messages"]}
            (
                await client.post(f"{session['anthropic_base_url']}/v1/messages", json=body)
            ).raise_for_status()
        answers = {
            "ok": (200, b'{"right": 1}'),
            "nothing": (204, b""),
            "fails": (503, b"busy"),
            "refuses": (404, b"no"),
        }
        status, content = answers.get(mode, (200, b"<html>"))
        return Response(content, status)

    return app


ANSWERS = {
    "ok": ("ok", 1.0, ""),
    "nothing": ("error", None, "without a reward"),
    "fails": ("died", None, "answered 503: busy"),
    "refuses": ("error", None, "answered 404: no"),
    "page": ("error", None, "is not JSON: '<html>'"),
    "hangs": ("timeout", None, "it took longer than"),
}


async def test_an_agent_behind_a_url() -> None:
    told: list[dict[str, Any]] = []
    release = asyncio.Event()
    sock = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with (
        served(f"agent:{url}/ok", lambda _: "3") as server,
        serving(agent_app(told, release), sock),
    ):
        kind: Any = server.service.runner
        for mode, (status, reward, detail) in ANSWERS.items():
            kind._server._fixed_url = f"{url}/{mode}"
            episode = await play(server, "number", deadline_s=2 if mode == "hangs" else 100)
            assert (mode, episode.status, episode.reward) == (mode, status, reward)
            assert detail in episode.detail
        assert told[0]["ground_truth"] == "3"
        kind._server._fixed_url = "http://127.0.0.1:1/away"
        episode = await play(server, "number")
        assert (episode.status, episode.reward) == ("died", None)
        assert "did not answer: ConnectError" in episode.detail
        release.set()


WRONG = ("", "no-such-program --flag", "sh -c 'open", "http://", "http://[")


@pytest.mark.parametrize("command", WRONG)
def test_a_command_that_cannot_be_run_is_refused_at_the_start(command: str) -> None:
    section = EnvironmentSection.model_construct(name=f"agent:{command}", workers=1)
    with raises(ConfigError, field="environment.name", value=command):
        load_runner(section, "", RuntimeSection())
