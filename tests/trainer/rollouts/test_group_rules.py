"""What a group holds, by its definition: random completions, episodes, grades and faults of services
that stand in for the real ones.
"""

import asyncio
import math
import random
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from common.errors import ServiceError, ServiceLost
from common.settings.config import Config
from common.wire.schemas import (
    Completion,
    Episode,
    EpisodeRequest,
    EpisodeSequence,
    FinishReason,
    Group,
    Prompt,
    RewardItem,
    RewardResult,
    Turn,
)
from trainer.rollouts import group_maker
from trainer.rollouts.drops import Drops, GroupFailed
from trainer.rollouts.episodes import episode_request, play
from trainer.rollouts.group_maker import GroupMaker
from trainer.rollouts.prompt_cursor import DrawnPrompt
from trainer.rollouts.requests import (
    GeneratedAnswer,
    reward_items,
    row_of,
    sampling_seed,
)
from trainer.timing import StageClock

ENDS: list[FinishReason] = ["stop", "length"]


def ids(draw: random.Random, count: int) -> Any:
    return np.array([draw.randrange(50) for _ in range(count)], np.int32)


def completion(draw: random.Random) -> Completion:
    length = draw.randint(1, 4)
    return Completion(
        token_ids=ids(draw, length),
        logprobs=np.array([-draw.random() for _ in range(length)], np.float32),
        text=f"text {draw.random()}",
        finish_reason=draw.choice(ENDS),
        weight_versions=[(3, 0, length)],
    )


def sequence(draw: random.Random) -> EpisodeSequence:
    length = draw.randint(1, 4)
    turns = [Turn(0, length, draw.choice([None, draw.random()])) for _ in range(draw.randint(1, 2))]
    return EpisodeSequence(
        prompt_ids=ids(draw, 2),
        token_ids=ids(draw, length),
        mask=np.array([draw.randint(0, 1) for _ in range(length)], np.int32),
        logprobs=np.array([-draw.random() for _ in range(length)], np.float32),
        weight_versions=[(draw.randrange(9), 0, length)],
        turns=turns,
        finish_reason=draw.choice(ENDS),
        text=f"text {draw.random()}",
    )


class World:
    """The services of one run; what they are asked for, and what they answer."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.config = Config()
        self.config.seed = self.draw.randrange(100)
        self.config.sampling.group_size = self.draw.randint(1, 4)
        self.config.environment.name = "python"
        self.config.sampling.max_new_tokens = 17
        self.config.sampling.temperature = 0.7
        self.asked: list[Any] = []
        self.graded: list[list[RewardItem]] = []
        self.played: list[EpisodeRequest] = []
        self.entered: list[int] = []
        self.stages: list[str] = []
        self.fault: dict[str, ServiceError] = {}
        self.ungraded = 0.0
        self.lost = 0.0
        self.clock = StageClock(lambda stage, seconds: self.stages.append(stage))
        self.reward = SimpleNamespace(grade_all=self.grade_all, gets_tokens=False)
        self.services: Any = SimpleNamespace(
            rollout=SimpleNamespace(generate=self.generate, engines=None, adapter=None),
            reward=self.reward,
            environment=None,
            environment_gives_verdicts=False,
            teacher=None,
        )
        self.context: Any = SimpleNamespace(
            config=self.config,
            services=self.services,
            prompter=SimpleNamespace(stop_token_ids=[2, 5]),
            clock=self.clock,
        )
        self.drops = Drops()
        self.results: list[RewardResult] = []
        self.answers: list[Completion] = []
        self.episodes: list[Episode] = []

    def fails(self, where: str) -> None:
        if where in self.fault:
            raise self.fault[where]

    async def generate(self, input_ids: Any, **options: Any) -> list[Completion]:
        assert self.clock.active() == "generation 1"
        self.asked.append((input_ids, options))
        self.fails("generation")
        self.answers = [completion(self.draw) for _ in range(options["n"])]
        return [*self.answers]

    async def grade_all(self, batches: list[list[RewardItem]]) -> list[list[RewardResult]]:
        assert self.clock.active() == "reward 1"
        [items] = batches
        self.graded.append(items)
        self.fails("reward")
        self.results = [self.result() for _ in items]
        return [self.results]

    def result(self) -> RewardResult:
        draw = self.draw
        is_missing = draw.random() < self.ungraded
        return RewardResult(
            reward=None if is_missing else draw.choice([0.0, draw.random()]),
            extracted_answer=draw.choice([None, "x"]),
            ground_truth="4",
            correct=draw.random() < 0.5,
            status="timeout" if is_missing else "ok",
            components={"a": draw.random()},
            verified=draw.random() < 0.5,
            reason=draw.choice(["", "line 3"]) if is_missing else "",
        )

    async def score(self, prompt_ids: Any, tokens: Any) -> Any:
        assert self.clock.active() == "reward 1"
        self.asked.append((prompt_ids, [each.tolist() for each in tokens]))
        self.fails("teacher")
        return [np.full(len(each), number, np.float32) for number, each in enumerate(tokens)]

    async def play(self, request: EpisodeRequest) -> list[Episode]:
        assert self.clock.active() == "generation 1"
        self.played.append(request)
        self.fails("generation")
        self.episodes = [
            self.episode(f"{request.request_id}-{number}") for number in range(request.n)
        ]
        return self.episodes

    def episode(self, name: str) -> Episode:
        draw = self.draw
        is_lost = draw.random() < self.lost
        return Episode(
            id=name,
            status=draw.choice(["timeout", "died", "error"]) if is_lost else "ok",
            stop_reason="deadline" if is_lost else "done",
            reward=None if is_lost else draw.choice([None, 0.0, 1.0, 0.5]),
            answer=f"answer of {name}",
            sequences=[] if is_lost else [sequence(draw) for _ in range(draw.randint(1, 2))],
            components={"a": 0.5},
            metrics={"refused_calls": 2.0},
            detail=draw.choice(["", "it fell"]) if is_lost else "",
            refusal=draw.choice(["", f"refused {name}"]),
        )

    @asynccontextmanager
    async def enter(self, count: int) -> Any:
        self.entered.append(count)
        yield

    def filled(
        self, prompt: Prompt, patch: pytest.MonkeyPatch, answer_start: str = ""
    ) -> tuple[Group, BaseException | None]:
        """Returns the group of a prompt, and why it failed."""
        patch.setattr(group_maker, "EngineRoom", lambda engines: SimpleNamespace(enter=self.enter))
        maker = GroupMaker(self.context, self.drops)
        drawn = DrawnPrompt(self.draw.randrange(1000), prompt, self.draw.randrange(9))
        group = maker.empty(drawn, [7, 8], "the-group")
        assert (group.id, group.prompt_id, group.prompt) == ("the-group", prompt.id, prompt.prompt)
        assert group.ground_truth == prompt.ground_truth
        assert (group.position, group.epoch) == (drawn.position, drawn.epoch)
        assert group.prompt_token_ids.tolist() == [7, 8]
        assert group.prompt_token_ids.dtype == np.int32
        failure: BaseException | None = None
        try:
            asyncio.run(maker.fill(group, prompt, answer_start))
        except (GroupFailed, ServiceError) as error:
            failure = error
        else:
            assert group.created_at > 0
        assert self.clock.active() == "nothing"
        return group, failure


def prompt_of(draw: random.Random) -> Prompt:
    return Prompt(id="p", prompt="2 + 2?", ground_truth="4", task="maths", columns={"level": 3})


def same(found: Any, wanted: Any) -> bool:
    return bool(np.array_equal(found, wanted, equal_nan=True))


@pytest.mark.parametrize("seed", range(24))
def test_a_group_of_single_completions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(seed)
    draw = world.draw
    world.ungraded = draw.choice([0.0, 0.0, 0.3])
    world.reward.gets_tokens = draw.random() < 0.5
    sampling = world.config.sampling
    parameters: dict[str, Any] = {}
    if draw.random() < 0.5:
        sampling.top_p = 0.9
        parameters |= {"top_k": 4096, "top_p": 0.9}
    if draw.random() < 0.5:
        sampling.min_new_tokens = 3
        parameters["min_new_tokens"] = 3
    if draw.random() < 0.5:
        world.services.teacher = SimpleNamespace(score=world.score)
    prompt = prompt_of(draw)
    group, failure = world.filled(prompt, monkeypatch, answer_start="<think>")

    n = sampling.group_size
    assert world.entered == [n]
    [options] = [given for tokens, given in world.asked if isinstance(given, dict)]
    assert options == {
        "n": n,
        "max_new_tokens": 17,
        "temperature": 0.7,
        "stop_token_ids": [2, 5],
        "sampling_seed": sampling_seed(world.config.seed, group.position),
        "parameters": parameters,
        "routed_experts": False,
    }
    assert all(tokens == [7, 8] for tokens, _ in world.asked)
    is_barred = sampling.min_new_tokens > 0 and sampling.top_p == 1.0
    assert group.min_new_tokens == (3 if is_barred else 0)
    assert group.barred.tolist() == ([2, 5] if is_barred else [])

    missing = [each for each in world.results if each.reward is None]
    if missing:
        assert isinstance(failure, GroupFailed)
        assert failure.reason == "reward"
        reason = missing[0].reason or "timeout"
        assert failure.detail == f"an answer could not be graded: {reason}"
    else:
        assert failure is None
    [items] = world.graded
    assert len(group.completions) == len(items) == n
    for number, each in enumerate(group.completions):
        result = world.results[number]
        item = items[number]
        assert each.text.startswith("<think>text ")
        assert item.response == each.text
        assert (item.prompt, item.ground_truth, item.task) == ("2 + 2?", "4", "maths")
        assert item.finish_reason == each.finish_reason
        tokens = {"completion_ids": each.token_ids.tolist()} if world.reward.gets_tokens else {}
        assert item.columns == {"level": 3} | tokens
        assert same(each.reward, math.nan if result.reward is None else result.reward)
        assert each.correct == result.correct
        assert each.verified == result.verified
        assert each.status == result.status
        assert each.extracted_answer == result.extracted_answer
        assert each.components == result.components
        scores = each.teacher_logprobs
        if world.services.teacher is None or missing:
            assert scores is None
        else:
            assert same(scores, np.full(len(each.token_ids), number))
    is_scored = world.services.teacher is not None and not missing
    assert world.stages == ["generation", "reward", *["reward"] * is_scored]


@pytest.mark.parametrize("where", ["generation", "reward", "teacher"])
@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("plays", [False, True])
def test_an_error_of_a_service_costs_the_group_or_the_run(
    where: str, is_lost: bool, plays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(3)
    fault = ServiceLost("gone") if is_lost else ServiceError("down", code="down", about={"a": 1})
    world.fault[where] = fault
    world.services.teacher = SimpleNamespace(score=world.score)
    if plays:
        world.services.environment = SimpleNamespace(episodes=world.play)
        world.config.sampling.group_size = 9
    group, failure = world.filled(prompt_of(world.draw), monkeypatch)
    if plays and where == "teacher":  # it scores single completions only
        assert failure is None
    elif is_lost:
        assert failure is fault
    else:
        assert isinstance(failure, GroupFailed)
        assert failure.event() == {"reason": where, "cause": "down", "a": 1}
        assert failure.detail == "down"
        assert str(failure) == f"{where}: down"
    if where == "reward" and not plays:
        assert np.isnan([each.reward for each in group.completions]).all()


def test_the_experts_of_a_group_are_kept_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(4)
    world.config.trainer.routing_replay = True
    done: list[Any] = []
    monkeypatch.setattr(group_maker, "split_routing", lambda group: done.append(group))
    monkeypatch.setattr(group_maker, "spool", lambda group, path: done.append((group, path)))
    group, failure = world.filled(prompt_of(world.draw), monkeypatch)
    assert failure is None
    assert world.asked[0][1]["routed_experts"] is True
    assert done == [group, (group, world.config.state_dir / "experts")]


@pytest.mark.parametrize("seed", range(50))
def test_a_group_of_episodes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(seed)
    draw = world.draw
    world.lost = draw.choice([0.0, 0.3, 0.3, 0.8])
    world.ungraded = draw.choice([0.0, 0.0, 0.2])
    gives_verdicts = draw.random() < 0.5
    world.services.environment_gives_verdicts = gives_verdicts
    size = draw.randint(2, 5)
    world.config.sampling.group_size = size
    fewest = draw.choice([None, 2, size])
    world.config.environment.min_episodes = fewest
    every: list[list[Episode]] = []

    async def episodes(request: EpisodeRequest) -> list[Episode]:
        every.append(await world.play(request))
        return every[-1]

    world.services.environment = SimpleNamespace(episodes=episodes)
    prompt = prompt_of(draw)
    group, failure = world.filled(prompt, monkeypatch)

    first = every[0]
    whole = [each for each in first if each.status == "ok"]
    gone = [each for each in first if each.status != "ok"]
    wanted = fewest or size
    assert world.played[0].request_id == "the-group"
    assert world.played[0].task.seed == sampling_seed(world.config.seed, group.position)
    assert world.entered[0] == world.played[0].n == size
    is_repeated = 0 < len(whole) < wanted
    assert len(every) == 1 + is_repeated
    if is_repeated:
        again = world.played[1]
        assert again.request_id == "the-group-again"
        assert world.entered[1] == again.n == len(gone)
        seed_of_others = sampling_seed(world.played[0].task.seed, group.position)
        assert again.task.seed == seed_of_others != world.played[0].task.seed
        whole += [each for each in every[1] if each.status == "ok"]
        gone = [each for each in every[1] if each.status != "ok"]
    played = [each for some in every for each in some]
    for status in ("timeout", "died", "error"):
        assert world.drops.lost_episodes[status] == sum(each.status == status for each in played)
    refused = [each.refusal for each in played if each.refusal]
    assert world.drops.refused_calls == 2 * len(refused)
    assert world.drops.refusal == (refused[-1] if refused else "")

    why = [f"{each.status}: {each.detail or 'deadline'}" for each in gone]
    if len(whole) < wanted:
        assert isinstance(failure, GroupFailed)
        assert (failure.reason, failure.detail) == ("episode", why[0])
        return
    assert group.lost_episodes == why
    names = [each.id for each in whole]
    usual = [f"the-group-{number}" for number in range(size)]
    assert group.metadata == ({} if names == usual else {"episodes": names})

    ungraded = [each for each in whole if each.reward is None]
    assert [item.response for items in world.graded for item in items] == [
        each.answer for each in ungraded
    ]
    missing = [each for each in world.results if each.reward is None]
    if missing:
        assert isinstance(failure, GroupFailed)
        assert failure.reason == "reward"
        return
    assert failure is None
    assert same(group.prompt_token_ids, whole[0].sequences[0].prompt_ids)
    results = iter(world.results)
    rest = iter(group.completions)
    for number, episode in enumerate(whole):
        result = next(results) if episode.reward is None else None
        turns = sum(turn.reward or 0.0 for each in episode.sequences for turn in each.turns)
        for each in episode.sequences:
            found = next(rest)
            assert found.episode == number
            for name in ("token_ids", "logprobs", "mask", "prompt_ids"):
                assert same(getattr(found, name), getattr(each, name)), name
            for name in ("text", "finish_reason", "weight_versions", "turns"):
                assert getattr(found, name) == getattr(each, name), name
            if result is None:
                assert found.reward == episode.reward
                assert found.correct == (gives_verdicts and episode.reward == 1)
                assert found.verified == gives_verdicts
                assert found.components == episode.components
                assert found.extracted_answer == episode.answer
            else:
                assert result.reward is not None
                assert found.reward == pytest.approx(result.reward + turns)
                assert found.correct == result.correct
                assert found.verified == result.verified
                assert found.components == result.components
                assert found.extracted_answer == result.extracted_answer
    assert next(rest, None) is None


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("temperature", [None, 0.0])
def test_what_episodes_are_asked_for(embedded: bool, temperature: float | None) -> None:
    config = Config()
    config.seed = 5
    config.environment.name = "python"
    config.environment.turns = 3
    config.environment.context = 900
    config.environment.deadline_s = 77.0
    config.environment.tool_timeout_s = 6.0
    config.sampling.max_new_tokens = 40
    config.sampling.temperature = 0.6
    config.sampling.system_prompt = "Be brief."
    config.rollout.engine = "embedded" if embedded else "sglang"
    config.rollout.max_context_tokens = 700
    prompt = prompt_of(random.Random(0))
    request = episode_request(
        config, prompt, request_id="r", n=4, position=9, temperature=temperature
    )
    assert request.model_dump(exclude={"policy"}) == {
        "request_id": "r",
        "n": 4,
        "task": {
            "env": "python",
            "prompt": "2 + 2?",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "2 + 2?"},
            ],
            "ground_truth": "4",
            "columns": {"level": 3},
            "seed": sampling_seed(5, 9),
        },
        "sampling": {"max_new_tokens": 40, "temperature": 0.6 if temperature is None else 0.0},
        "limits": {
            "turns": 3,
            "sampled_tokens": 120,
            "context": 700 if embedded else 900,
            "tool_calls": 24,
            "deadline_s": 77.0,
            "tool_timeout_s": 6.0,
        },
    }


@pytest.mark.parametrize("adapter", [None, ("policy-3", 3)])
def test_episodes_are_played_by_the_policy_of_now(adapter: tuple[str, int] | None) -> None:
    world = World(6)
    world.services.rollout.adapter = adapter
    policies: list[tuple[str, int]] = []

    async def episodes(request: EpisodeRequest) -> list[Episode]:
        policies.append((request.policy.adapter, request.policy.version))
        return []

    world.services.environment = SimpleNamespace(episodes=episodes)
    request = episode_request(world.config, prompt_of(world.draw), request_id="r", n=1, position=0)
    assert asyncio.run(play(world.services, request)) == []
    assert policies == [adapter or ("", 0)]


def test_seeds_of_sampling_are_different_and_fit_in_31_bits() -> None:
    places = [(seed, position) for seed in range(60) for position in range(60)]
    seeds = {place: sampling_seed(*place) for place in places}
    assert len(set(seeds.values())) == len(places)
    assert all(0 <= seed < 2**31 for seed in seeds.values())
    assert max(seeds.values()) >= 2**30
    # Recorded runs are sampled again with these.
    assert seeds[0, 0] == 1
    assert seeds[3, 4] == (3 * 2654435761 + 4 * 2246822507 + 1) % 2**31


def test_the_row_of_a_group_is_what_the_run_recorded() -> None:
    asked = SimpleNamespace(prompt_id="p", prompt="then", ground_truth="8")
    known = Prompt(id="p", prompt="now", ground_truth="9", task="t", columns={"a": 1})
    assert row_of(asked, {"p": known}) == Prompt(
        id="p", prompt="then", ground_truth="8", task="t", columns={"a": 1}
    )
    assert row_of(asked, {"q": known}) == Prompt(id="p", prompt="then", ground_truth="8")


def test_tokens_that_nobody_knows_are_no_column() -> None:
    prompt = prompt_of(random.Random(0))
    answers = [
        GeneratedAnswer("a", "stop", tokens=None),
        GeneratedAnswer("b", "stop", tokens=2, token_ids=[np.int32(4), 5]),  # type: ignore[list-item]
    ]
    columns = [item.columns for item in reward_items(prompt, answers, with_tokens=True)]
    assert columns == [{"level": 3}, {"level": 3, "completion_ids": [4, 5]}]
    assert [item.columns for item in reward_items(prompt, answers)] == [{"level": 3}] * 2
    assert prompt.columns == {"level": 3}
