"""An episode of a command, from its folder to the removal of both: the container, its start and its grader
are stand-ins. However it ends, nothing of it is left."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError
from common.settings.sections import RuntimeSection
from common.wire.schemas import EpisodeLimits, EpisodeTask
from services.environment import program_runner
from services.environment.clock import EpisodeClock
from services.environment.harbor import HarborTask
from services.environment.outcome import EnvironmentLost, Outcome
from services.environment.program_runner import ProgramRunner
from services.environment.runtimes.runtime import Spec
from tests.support.errors import raises

TASK = EpisodeTask(env="e", prompt="p", columns={"task": "t1"})
LIMITS = EpisodeLimits(deadline_s=5000.0)


class Played:
    """A runtime and its one container, which note what is done with them."""

    gateway = "http://gateway"

    def __init__(self, fails_at: str = "") -> None:
        self.done: list[str] = []
        self.spec: Spec | None = None
        self.home = Path()
        self._fails_at = fails_at
        self.session: Any = SimpleNamespace(
            id="s",
            clock=EpisodeClock(),
            graded=asyncio.Event(),
            reward=None,
            tree=SimpleNamespace(nodes=[]),
        )

    def note(self, what: str) -> None:
        self.done.append(what)
        if what == self._fails_at:
            raise EnvironmentLost(f"{what} failed")

    async def start(self, spec: Spec, home: Path) -> Any:
        assert home.is_dir()  # noqa: ASYNC240
        self.spec = spec
        self.home = home
        self.note("start")
        return self

    async def kill(self) -> None:
        assert self.home.is_dir(), "its files are in the folder"
        await asyncio.sleep(0)
        self.note("kill")

    async def reward(self, container: Any, content: Any, session: Any) -> float:
        assert container is self
        assert (content["prompt"], session) == ("p", self.session)
        self.note("reward")
        return 0.25

    async def grade(
        self, task: Any, container: Any, runtime: Any, *, clean: Spec, home: Path
    ) -> Any:
        assert (container, runtime, home) == (self, self, self.home)
        assert self.spec is not None
        assert dataclasses.replace(clean, network="gateway") == self.spec
        self.note(f"grade, {clean.network}")
        return {"tests": 1.0}


@contextlib.contextmanager
def runner(played: Played, plays_tasks: bool = False, **section: Any) -> Iterator[ProgramRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_runner, "load_runtime", lambda *_: played)
        patch.setattr(program_runner, "grade", played.grade)
        made = ProgramRunner(
            "agent:true",
            "true",
            slots=1,
            gateway="http://gateway",
            section=RuntimeSection.model_validate(section),
            plays_tasks=plays_tasks,
        )
        patch.setattr(made, "_reward_of", played.reward)
        yield made
        made._folders.close()


async def play(made: ProgramRunner, played: Played) -> Outcome:
    outcome = Outcome()
    await made._play(TASK, played.session, LIMITS, outcome=outcome)
    return outcome


async def test_the_reward_of_a_command_is_that_of_its_episode() -> None:
    played = Played()
    with runner(played, image="python:3") as made:
        outcome = await play(made, played)
        assert (outcome.reward, outcome.components) == (0.25, {"reward": 0.25})
        assert played.done == ["start", "reward", "kill"]
        assert played.spec == Spec(lifetime_s=91_400.0, image="python:3")
        assert not played.home.exists()
        assert made.has_reward is None


async def test_what_a_program_sends_counts_before_what_it_writes() -> None:
    played = Played()
    played.session.graded.set()
    played.session.reward = {"sent": 2.0}
    with runner(played) as made:
        assert (await play(made, played)).reward == 2.0


@pytest.mark.parametrize("opens", [False, True])
async def test_a_task_of_harbor_is_graded_by_its_tests_alone(
    opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played()
    played.session.graded.set()
    played.session.reward = 9.0
    read: list[Any] = []
    agent = SimpleNamespace(timeout_sec=700.0)
    limits: list[float | None] = []

    def of_columns(columns: Any) -> Any:
        read.append(columns)
        settings = SimpleNamespace(agent=agent)
        return SimpleNamespace(
            settings=settings, spec=lambda spec: dataclasses.replace(spec, workdir="/w")
        )

    clock = played.session.clock
    limit = clock.limit

    def noted(limit_s: float | None) -> Any:
        limits.append(limit_s)
        return limit(limit_s)

    monkeypatch.setattr(clock, "limit", noted)
    monkeypatch.setattr(HarborTask, "read", of_columns)
    with runner(played, plays_tasks=True, grader_network=opens) as made:
        assert made.has_reward is True
        outcome = await play(made, played)
    assert (outcome.reward, outcome.components) == (1.0, {"tests": 1.0})
    network = "open" if opens else "none"
    assert played.done == ["start", "reward", f"grade, {network}", "kill"]
    assert played.spec is not None
    assert played.spec.workdir == "/w"
    assert (read, limits) == ([{"task": "t1"}], [5000.0, 700.0])


@pytest.mark.parametrize("fails_at", ["start", "reward", "kill"])
async def test_an_episode_that_fails_leaves_nothing(fails_at: str) -> None:
    played = Played(fails_at)
    with runner(played) as made:
        with pytest.raises(EnvironmentLost, match=f"{fails_at} failed"):
            await play(made, played)
        assert played.done == {"start": ["start"]}.get(fails_at, ["start", "reward", "kill"])
        assert not played.home.exists()
        # The slot is free again.
        other = Played()
        made._runtime = other  # type: ignore[assignment]
        made._reward_of = other.reward  # type: ignore[method-assign]
        assert (await play(made, other)).reward == 0.25


async def test_a_container_that_never_starts_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never(Played):
        async def start(self, spec: Spec, home: Path) -> Any:
            await super().start(spec, home)
            await asyncio.Event().wait()

    monkeypatch.setattr(program_runner, "_START_S", 0.01)
    played = Never()
    with runner(played) as made, pytest.raises(EnvironmentLost):
        await play(made, played)
    assert played.done == ["start"]
    assert not played.home.exists()


async def test_an_episode_that_is_cancelled_leaves_nothing() -> None:
    played = Played()
    waits = asyncio.Event()
    asked = asyncio.Event()

    async def wait(*_: Any) -> Any:
        asked.set()
        await waits.wait()

    with runner(played) as made:
        made._reward_of = wait  # type: ignore[method-assign, assignment]
        playing = asyncio.create_task(play(made, played))
        await asked.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert played.done == ["start", "kill"]
        assert not played.home.exists()


async def test_no_more_programs_run_than_there_are_slots() -> None:
    played = Played()
    with runner(played) as made:
        await made._slots.acquire()
        playing = asyncio.create_task(play(made, played))
        for _ in range(10):
            await asyncio.sleep(0)
        assert played.done == []
        made._slots.release()
        assert (await playing).reward == 0.25


@pytest.mark.parametrize("kind", ["local", "docker", "kubernetes"])
def test_a_command_of_a_container_is_not_looked_for_here(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(program_runner, "load_runtime", lambda *these: given.append(these))
    section = RuntimeSection.model_validate({"kind": kind})
    more: dict[str, Any] = {"slots": 1, "gateway": "http://g", "section": section}
    if kind == "local":
        with raises(ConfigError, field="environment.name", value="no-such-program 'a b'"):
            ProgramRunner("agent:x", "no-such-program 'a b'", **more)
        return
    made = ProgramRunner("agent:x", "no-such-program 'a b'", **more)
    assert made._words == ["no-such-program", "a b"]
    assert given == [(section, "http://g")]
