"""What a service makes of the outcomes of episodes: statuses, rewards, tries and counts, for random
outcomes and by rules that are written anew.
"""

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from common.errors import InvalidInput, Overloaded, ServiceError, ServiceLost
from common.process.metrics import Metrics
from common.settings.sections import EnvironmentSection
from common.wire.schemas import Completion, EpisodeLimits, EpisodeTask
from services.environment import service as module
from services.environment.environments import Environment
from services.environment.messages import user_message
from services.environment.outcome import EnvironmentLost, EpisodeFailed, Outcome
from services.environment.program_requests import FollowedRequest
from services.environment.service import EpisodeService, session_seed
from services.environment.session import Session
from services.environment.template import Template
from tests.support.environments.environments import Calculator, request_for
from tests.support.errors import raises
from tests.support.models.trap_models import letters, trap_tokenizer

TOKENIZER = trap_tokenizer()
TEMPLATE = Template(TOKENIZER, [TOKENIZER.eos_token_id])
ENVIRONMENT = Environment.of(Calculator, "calculator")
STATUSES = ("ok", "error", "timeout", "died")


class Router:
    """Engines that answer every call with `ok`."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, tokens: Any, **asked: Any) -> list[Completion]:
        self.asked.append(asked)
        ids = np.array(letters(TOKENIZER, "ok"), np.int32)
        return [
            Completion(
                token_ids=ids,
                logprobs=np.zeros(len(ids), np.float32),
                text="",
                finish_reason="stop",
                weight_versions=[(0, 0, len(ids))],
            )
        ]


def made() -> tuple[EpisodeService, Any, Metrics]:
    metrics = Metrics("environment-server")
    router: Any = Router()
    service = EpisodeService(
        EnvironmentSection(name="python"),
        TEMPLATE,
        router,
        stop_token_ids=[TOKENIZER.eos_token_id],
        metrics=metrics,
        environment=ENVIRONMENT,
    )
    return service, router, metrics


def values(metrics: Metrics) -> dict[str, float]:
    """Returns the samples of the metrics, without the labels that all have."""
    found = {}
    for line in generate_latest(metrics.registry).decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.removeprefix("rlhf_").rpartition(" ")
            found[re.sub(r'service="[^"]*",?', "", name).replace("{}", "")] = float(value)
    return found


PLAYS = st.lists(
    st.fixed_dictionaries(
        {
            "raised": st.sampled_from([None, None, EpisodeFailed, EnvironmentLost, TimeoutError]),
            "reward": st.sampled_from([None, 0.5, 1.0]),
            "calls": st.integers(0, 2),
            "tool_calls": st.integers(0, 2),
            "errors": st.integers(0, 2),
            "stop": st.sampled_from([None, None, "turns", "context"]),
            "refused": st.integers(0, 2),
        }
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=50)
@given(PLAYS, st.integers(1, 3))
def test_the_episodes_of_a_request(plays: list[dict[str, Any]], n: int) -> None:
    """The tries of all episodes take the plays in their order, over and over."""
    service, router, metrics = made()
    played: list[tuple[int, dict[str, Any]]] = []

    async def play(
        task: EpisodeTask, session: Session, limits: EpisodeLimits, *, outcome: Outcome
    ) -> None:
        plan = plays[len(played) % len(plays)]
        played.append((session._seed, plan))
        for number in range(plan["calls"]):
            await session.call([user_message(str(number))], [], str(number))
        for number in range(plan["refused"]):
            error = InvalidInput("wrong", field=f"tools[{number}]", value=1, remedy="mend it")
            service.refuse(session, error)
        outcome.reward = plan["reward"]
        outcome.components = {} if outcome.reward is None else {"part\ud800": outcome.reward}
        outcome.answer = "an \ud800answer"
        outcome.tool_calls = plan["tool_calls"]
        outcome.tool_errors = plan["errors"]
        outcome.tool_seconds = 0.25
        session.stop_reason = plan["stop"]
        if plan["raised"] is not None:
            raise plan["raised"]("x" * 20_000)

    service.runner._play = play  # type: ignore[method-assign]
    service.runner.tools = {"tool": {}}
    # Otherwise an episode without a reward fails before any other had one.
    service._gives_rewards = None
    request = request_for("calculator", n=n, deadline_s=3.0)
    request.task.seed = 7
    request.sampling.temperature = 0.7

    async def all_episodes() -> Any:
        # One episode after another: which play is whose is then known.
        episodes = [await service._run(request, index) for index in range(n)]
        service._fail_without_reward(episodes)
        return episodes

    episodes = asyncio.run(all_episodes())

    at = 0
    tries = []
    for index in range(n):
        for attempt in range(3):
            seed, plan = played[at]
            at += 1
            assert seed == session_seed(7, index, attempt)
            if plan["raised"] is not EnvironmentLost:
                break
        tries.append((attempt, plan))
    assert at == len(played)
    statuses = []
    for _, plan in tries:
        status = {EpisodeFailed: "error", EnvironmentLost: "died", TimeoutError: "timeout"}.get(
            plan["raised"], "ok" if plan["calls"] else "error"
        )
        statuses.append(status)
    rewards = [
        plan["reward"] if status == "ok" else None
        for status, (_, plan) in zip(statuses, tries, strict=True)
    ]
    gives_rewards = any(reward is not None for reward in rewards)
    for index, episode in enumerate(episodes):
        attempt, plan = tries[index]
        status = statuses[index]
        reward = rewards[index]
        stop = "deadline" if plan["raised"] is TimeoutError else "done"
        if plan["raised"] is None:
            stop = plan["stop"] or "done"
        if status == "ok" and reward is None and gives_rewards:
            is_no_work = plan["tool_calls"] == plan["errors"]
            if plan["stop"] or is_no_work:
                reward = 0.0
                assert episode.components == {"reward": 0.0}
            else:
                status = "error"
                assert episode.detail == (
                    f"it ended ({stop}) without a reward, although other episodes of this "
                    "environment have one"
                )
        elif plan["reward"] is not None:
            assert episode.components == {"part?": plan["reward"]}
        assert episode.id == f"r1-{index}" + (f".{attempt}" if attempt else "")
        assert (episode.status, episode.stop_reason) == (status, stop)
        assert episode.reward == reward
        assert episode.answer == "an ?answer"
        assert len(episode.sequences) == (plan["calls"] if status == "ok" else 0)
        assert len(episode.detail) <= 10_000
        if plan["raised"] in (EpisodeFailed, EnvironmentLost):
            assert episode.detail == "x" * 10_000
        elif plan["raised"] is None and not plan["calls"]:
            is_long = plan["stop"] == "context"
            assert ("environment.context" in episode.detail) == is_long
            assert "nothing to train on" in episode.detail
        elif plan["refused"] and episode.status == "ok":
            first = "tools[0]: wrong; mend it"
            assert episode.detail == f"{plan['refused']} calls refused, the first: {first}"
        assert episode.refusal == ("tools[0]: wrong; mend it" if plan["refused"] else "")
        sampled = plan["calls"] * len(letters(TOKENIZER, "ok"))
        known = {name: value for name, value in episode.metrics.items() if name != "seconds"}
        assert known == {
            "turns": plan["calls"],
            "sampled_tokens": sampled,
            "tool_calls": plan["tool_calls"],
            "tool_errors": plan["errors"],
            "tool_seconds": 0.25,
            "refused_calls": plan["refused"],
        }
        assert episode.metrics["seconds"] >= 0.0
    found = values(metrics)
    retried = sum(attempt for attempt, _ in tries)
    assert found["environment_episodes_retried_total"] == retried
    assert found["environment_episode_duration_seconds_count"] == len(played)
    refused = sum(plan["refused"] for _, plan in played)
    assert found.get('environment_calls_refused_total{field="tools"}', 0) == refused
    assert service.stats()["sessions"] == 0
    for asked in router.asked:
        assert asked.pop("sampling_seed") >= 0
        assert asked == {
            "adapter": None,
            "n": 1,
            "max_new_tokens": 300,
            "temperature": 0.7,
            "stop_token_ids": [TOKENIZER.eos_token_id],
            "parameters": {},
        }


@settings(max_examples=30)
@given(st.lists(st.sampled_from(STATUSES), min_size=1, max_size=6))
def test_every_episode_is_counted_by_its_status(statuses: list[Any]) -> None:
    service, _, metrics = made()

    async def run(request: Any, index: int) -> Any:
        return SimpleNamespace(status=statuses[index], reward=None)

    async def play() -> None:
        service._run = run  # type: ignore[method-assign]
        service._fail_without_reward = lambda episodes: None  # type: ignore[method-assign]
        request = request_for("calculator", n=len(statuses))
        first = asyncio.create_task(service.episodes(request))
        await asyncio.sleep(0)
        assert values(metrics)["environment_episodes_running"] == len(statuses)
        again = await service.episodes(request)
        assert await first is again, "the same request is played once"
        assert [episode.status for episode in again] == statuses
        await service.close()

    asyncio.run(play())
    stats = service.stats()
    counted = {status: statuses.count(status) for status in STATUSES}
    assert {name: stats["episodes"][name] for name in STATUSES} == counted
    assert sum(stats["episodes"].values()) == len(statuses)
    found = values(metrics)
    for status, count in counted.items():
        name = f'environment_episodes_total{{status="{status}"}}'
        assert found.get(name, 0) == count
    assert (stats["running"], stats["sessions"]) == (0, 0)
    limits = (stats["running_limit"], stats["hung_calls"], stats["hung_calls_limit"])
    assert limits == (4096, 0, 1024)
    assert found["environment_episodes_running_limit"] == 4096
    assert found["environment_episodes_running"] == 0
    assert found["environment_hung_calls"] == 0
    assert found["environment_hung_calls_limit"] == 1024


def test_the_server_runs_no_more_episodes_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EPISODES", 3)
    service, _, _ = made()

    async def ask() -> None:
        service._running = 1
        service._check(request_for("calculator", n=2))
        with raises(Overloaded, field="n", value="3"):
            service._check(request_for("calculator", n=3))
        with raises(InvalidInput, field="task.env", value="another"):
            service._check(request_for("another"))

    asyncio.run(ask())


@given(st.integers(0, 9), st.integers(0, 9))
def test_no_two_tries_have_one_seed(first: int, second: int) -> None:
    seeds = {
        session_seed(task, index, attempt)
        for task in {first, second}
        for index in (0, 1, 4095)
        for attempt in range(3)
    }
    assert len(seeds) == len({first, second}) * 3 * 3


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_service_that_is_lost_ends_the_request_and_another_failure_does_not(
    is_lost: bool,
) -> None:
    """Whatever a program makes of the call that was not answered."""
    service, _, _ = made()
    error = (ServiceLost if is_lost else ServiceError)("the router has gone")

    async def play(
        task: EpisodeTask, session: Session, limits: EpisodeLimits, *, outcome: Outcome
    ) -> None:
        asked = FollowedRequest("/v1/messages", b"1", None, 0, error=error)
        session.requests.begin(asked)
        session.requests.end(asked, 500)
        outcome.reward = 1.0

    service.runner._play = play  # type: ignore[method-assign]
    running = service._run(request_for("calculator", n=1), 0)
    if is_lost:
        with raises(ServiceLost):
            await running
    else:
        assert (await running).status in STATUSES, "the run goes on"
