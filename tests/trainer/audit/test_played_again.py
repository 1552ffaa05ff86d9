"""Episodes that are played again with the recorded answers, and answers that are graded again,
against rules that are written anew. The environment and the reward functions are stand-ins.
"""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, ServiceError, ServiceLost
from common.settings.config import from_mapping
from common.wire.schemas import Completion, Prompt, RewardItem, RewardResult, Turn
from services.environment.outcome import EpisodeRunner
from services.environment.service import session_seed
from trainer.audit import episodes, grading
from trainer.audit.comparison import StageOutcome
from trainer.audit.engine import Request
from trainer.audit.grading import GradedAnswer, graded_again
from trainer.rollouts.episodes import replacing_seed

ROW = Prompt(id="p", prompt="What is 1 + 1?", ground_truth="2")
STOP = 9
NAME = "python:module:Game"


def completion(
    turns: list[tuple[int, float | None]],
    tokens: list[int],
    *,
    prompt: int = 1,
    episode: int | None = None,
    reward: float = 1.0,
) -> Completion:
    """Returns a sequence with one turn for each length, which follow each other."""
    made = []
    start = 0
    for length, of_turn in turns:
        made.append(Turn(start=start, end=start + length, reward=of_turn))
        start += length
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=-np.array(tokens, np.float32),
        text="",
        finish_reason="stop",
        weight_versions=[(0, 0, len(tokens))],
        prompt_ids=np.array([prompt], np.int32),
        turns=made,
        episode=episode,
        reward=reward,
        components={"game": reward},
    )


_TURNS = st.lists(st.lists(st.sampled_from([3, 4, STOP]), min_size=1, max_size=3), min_size=1)


@given(_TURNS, st.integers(0, 3), st.integers(1, 4), st.booleans())
def test_a_call_gets_the_answer_that_the_run_recorded(
    turns: list[list[int]], wrong: int, limit: int, is_twice: bool
) -> None:
    tokens = [token for turn in turns for token in turn]
    recorded = completion([(len(turn), None) for turn in turns], tokens)
    rows = {5: recorded, 6: recorded} if is_twice else {5: recorded}
    answers = episodes._RecordedAnswers(rows, [STOP])
    total = len(rows) * len(turns)
    assert len(answers.waiting) == total
    expected = []
    read = [1]
    start = 0

    def ask(seed: int) -> Completion:
        return asyncio.run(answers.sample(np.array(read, np.int32), limit, seed, []))

    for number, turn in enumerate(turns):
        if number == wrong:
            unknown = [*read, 77]
            with pytest.raises(ServiceError):
                asyncio.run(answers.sample(np.array(unknown, np.int32), limit, 0, []))
            # After a call that the run did not make, none is answered.
            with pytest.raises(ServiceError):
                ask(0)
            assert answers.unknown == unknown, "the first such call is kept"
            break
        end = start + len(turn)
        for place, row in enumerate(rows):
            seed = 10 * number + place
            found = ask(seed)
            expected.append(Request(row=row, prompt=list(read), seed=seed, start=start, end=end))
            assert found.token_ids.tolist() == turn
            assert found.logprobs.tolist() == [-token for token in turn]
            is_stopped = turn[-1] == STOP or len(turn) < limit
            assert found.finish_reason == ("stop" if is_stopped else "length")
            assert found.weight_versions == [(0, 0, len(turn))]
        read += turn
        start = end
    else:
        assert answers.unknown is None
    assert answers.requests == expected
    assert len(answers.waiting) == total - len(expected)


class Runner(EpisodeRunner):
    """Plays an episode: asks for the answers to some calls, and then ends as it is told."""

    def __init__(self, calls: list[list[int]], outcome: Any) -> None:
        self.calls = calls
        self.outcome = outcome
        self.seeds: list[int] = []
        self.closed = 0

    async def run(self, task: Any, session: Any, limits: Any) -> Any:
        self.seeds.append(session.seed)
        for call in self.calls:
            try:
                await session.sample(np.array(call, np.int32), 9, 40, [])
            except ServiceError:
                break
        return self.outcome

    async def _play(self, *_: Any, **__: Any) -> None:
        raise AssertionError("`run` is another")

    async def close(self) -> None:
        self.closed += 1


class Sessions:
    """Stands for the session of an episode."""

    def __init__(
        self, name: str, template: Any, sample: Any, *, limits: Any, max_new_tokens: int, seed: int
    ) -> None:
        assert limits == "limits"
        assert max_new_tokens == 8
        self.sample = sample
        self.seed = seed

    def close(self) -> None:
        pass


def played(groups: list[Any], runner: Runner) -> episodes.PlayedAgain:
    config: Any = SimpleNamespace(
        sampling=SimpleNamespace(group_size=4, max_new_tokens=8),
        environment=SimpleNamespace(name=NAME),
    )

    def request(config: Any, row: Prompt, *, request_id: str, n: int, position: int) -> Any:
        assert (row, n) == (ROW, 4)
        task = SimpleNamespace(seed=100 + position)
        return SimpleNamespace(task=task, limits="limits")

    template: Any = SimpleNamespace(text=lambda ids: "-".join(map(str, ids)))
    recorded: Any = SimpleNamespace(groups=groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episodes, "Session", Sessions)
        patch.setattr(episodes, "episode_request", request)
        patch.setattr(episodes, "row_of", lambda group, rows: rows[group.prompt_id])
        player = episodes._Player(
            recorded, config, {"p": ROW}, template=template, runner=runner, stops=[STOP]
        )
        found = asyncio.run(player.play())
    assert runner.closed == 1
    return found


def group(name: str, rows: list[Completion], reused: bool = False, played: Any = None) -> Any:
    made = SimpleNamespace(
        id=name,
        prompt_id="p",
        position=3,
        completions=rows,
        metadata={"episodes": played} if played else {},
    )
    return SimpleNamespace(group=made, reused=reused)


def outcome(**changes: Any) -> Any:
    known: dict[str, Any] = {
        "status": "ok",
        "detail": "",
        "reward": 1.0,
        "components": {"game": 1.0},
        "turn_rewards": [],
        "answer": "it is 2",
    }
    return SimpleNamespace(**known | changes)


def test_every_episode_of_a_fresh_group_is_played_with_its_seed() -> None:
    rows = [completion([(1, None)], [3], episode=number) for number in (0, 0, 1)]
    tried_again = ["b-0.2", "other-1"]
    groups = [
        group("a", [completion([(1, None)], [3])]),
        group("reused", rows, reused=True),
        group("b", rows, played=tried_again),
    ]
    runner = Runner([[1]], outcome())
    found = played(groups, runner)
    # The first episode of the last group has two sequences, of which the environment asked for one.
    assert found.outcome.where == "episode 0 of group b"
    assert found.outcome.expected == "2 answers of the model"
    assert found.outcome.found == "the end, after 1 answers"
    assert runner.seeds == [session_seed(103, 0, 0), session_seed(103, 0, 2)]

    runner = Runner([[1], [1]], outcome())
    found = played(groups[2:], runner)
    assert runner.seeds == [
        session_seed(103, 0, 2),
        session_seed(replacing_seed(103, 3), 1, 0),
    ]
    assert (found.outcome.where, found.outcome.state) == (
        "episode 1 of group b, before answer 1, token 0",
        "differs",
    )

    runner = Runner([[1]], outcome())
    found = played([groups[1], group("c", rows[1:], played=tried_again)], runner)
    assert found.outcome == StageOutcome("episodes", "equal", f"2 episodes of {NAME} played again")
    assert [request.row for request in found.requests] == [3, 4], "rows of the whole batch"
    assert (found.given, found.wrong_reward, found.answers) == (2, None, [])


@pytest.mark.parametrize("asked", [[1, 3, 7, 5], [1, 3], [1, 8]])
def test_what_the_environment_said_otherwise_is_shown(asked: list[int]) -> None:
    rows = [completion([(1, None), (1, None)], [3, 4])]
    found = played([group("a", rows)], Runner([[1], asked], outcome())).outcome
    if asked == [1, 3]:
        assert found.state == "equal"
        return
    at = 2 if asked[1] == 3 else 1
    assert (found.stage, found.state) == ("episodes", "differs")
    assert found.where == f"episode 0 of group a, before answer 1, token {at}"
    shown = "-".join(map(str, [1, 3][at:]))
    assert found.expected == f"the environment's text {shown!r}"
    assert found.found == repr("-".join(map(str, asked[at:])))


def test_an_episode_that_fails_differs_and_the_rest_is_not_played() -> None:
    rows = [completion([(1, None)], [3], episode=number) for number in (0, 1)]
    runner = Runner([[1]], outcome(status="error", detail="broken"))
    found = played([group("a", rows)], runner).outcome
    assert (found.where, found.found) == ("episode 0 of group a", "error: broken")
    assert found.expected == "an episode that ends"
    assert len(runner.seeds) == 1


@given(
    reward=st.sampled_from([None, 1.0, 2.0]),
    component=st.sampled_from([1.0, 2.0]),
    recorded=st.lists(st.sampled_from([None, 0.0, 0.5]), min_size=1, max_size=2),
    again=st.sampled_from([None, 0.5]),
)
def test_a_reward_of_the_environment_is_compared_with_its_parts(
    reward: float | None, component: float, recorded: list[float | None], again: float | None
) -> None:
    tokens = [3] * len(recorded)
    rows = [
        completion([(1, each) for each in recorded], tokens, episode=number) for number in (0, 1)
    ]
    calls = [[1, *tokens[:n]] for n in range(len(recorded))]
    turn_rewards = [] if again is None else [again] * len(recorded)
    ended = outcome(reward=reward, components={"game": component}, turn_rewards=turn_rewards)
    found = played([group("a", rows)], Runner(calls, ended))
    assert found.outcome.state == "equal"
    was = [each or 0.0 for each in recorded]
    if reward is None:
        assert (found.given, found.wrong_reward) == (0, None)
        assert [(each.name, each.of_turns) for each in found.answers] == [
            (f"episode {number} of group a", sum(was)) for number in (0, 1)
        ]
        assert [each.completion for each in found.answers] == rows
        assert found.answers[0].item.response == "it is 2"
        return
    assert (found.given, found.answers) == (2, [])
    is_now = turn_rewards or [0.0] * len(recorded)
    if (reward, component) == (1.0, 1.0) and was == is_now:
        assert found.wrong_reward is None
        return
    wrong = found.wrong_reward
    assert wrong is not None
    assert (wrong.stage, wrong.state, wrong.where) == ("rewards", "differs", "episode 0 of group a")
    assert wrong.expected == f"1.0 ({ {'game': 1.0} }), turns {was}"
    assert wrong.found == f"{reward!r} ({ {'game': component} }), turns {is_now}"


def test_episodes_that_cannot_be_played_again_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_mapping({"environment.name": "python"})

    def start(*given: str) -> Any:
        return SimpleNamespace(start=SimpleNamespace(given=list(given)))

    def why(recorded: Any, config: Any, rows: Any) -> str:
        found = episodes.play_again(recorded, config, rows, [STOP]).outcome
        assert (found.stage, found.state) == ("episodes", "not compared")
        return found.detail

    rows = {"p": ROW}
    assert "gave the environment" in why(start("environment"), config, rows)
    assert "were not kept" in why(start(), config, {})
    agent = from_mapping({"environment.name": "agent:/bin/true"})
    assert "programs play the episodes (agent:/bin/true)" in why(start(), agent, rows)

    def fails(*asked: object) -> None:
        assert asked == (config.environment, "", config.runtime)
        raise ConfigError("there is none", field="environment.name", value="", remedy="")

    monkeypatch.setattr(episodes, "load_runner", fails)
    assert "the environment does not load: there is none" in why(start(), config, rows)


class Service:
    """Stands for the reward functions: each answer's grades, one after another."""

    grades: dict[str, list[RewardResult]]
    asked: list[int]

    def __init__(self, section: Any) -> None:
        pass

    async def __aenter__(self) -> "Service":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def score(self, items: list[RewardItem]) -> list[RewardResult]:
        self.asked.append(len(items))
        return [self.grades[item.response].pop(0) for item in items]


def result(
    reward: float | None, correct: bool, verified: bool, reason: str, **parts: float
) -> RewardResult:
    return RewardResult(
        reward=reward,
        correct=correct,
        verified=verified,
        status="ok",
        reason=reason,
        components=dict(parts),
        extracted_answer=None,
        ground_truth="2",
    )


_GRADES = st.builds(
    result,
    reward=st.sampled_from([None, 1.0, 1.0, 0.5]),
    correct=st.booleans(),
    verified=st.booleans(),
    reason=st.sampled_from(["", "too long"]),
    math=st.sampled_from([1.0, 1.0, 0.0]),
)


@given(
    st.lists(st.tuples(_GRADES, _GRADES, st.sampled_from([0.0, 0.25])), max_size=4),
    st.integers(1, 3),
)
def test_the_first_answer_with_another_grade_is_named(
    drawn: list[tuple[RewardResult, RewardResult, float]], most: int
) -> None:
    answers = []
    grades = {}
    for number, (first, second, of_turns) in enumerate(drawn):
        recorded = completion([], [3], reward=1.0 + of_turns)
        recorded.correct = True
        recorded.components = {"math": 1.0}
        item = RewardItem(prompt="1 + 1?", response=str(number), ground_truth="2")
        answers.append(GradedAnswer(f"answer {number}", item, recorded, of_turns))
        grades[str(number)] = [first, second]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grading, "RewardService", Service)
        patch.setattr(grading, "_MAX_GRADE", most)
        patch.setattr(Service, "grades", grades, raising=False)
        patch.setattr(Service, "asked", [], raising=False)
        found = graded_again(from_mapping({}), answers)
        asked = list(Service.asked)
    pieces = [min(most, len(drawn) - start) for start in range(0, len(drawn), most)]
    detail = f"{len(drawn)} answers graded again by math"
    for number, (first, second, _) in enumerate(drawn):
        has_verdict = first.verified
        if (
            first.reward == 1.0
            and (first.correct or not has_verdict)
            and first.components == {"math": 1.0}
        ):
            continue
        assert asked == [*pieces, 1], "that answer alone is graded twice"
        assert (found.stage, found.state, found.where) == ("rewards", "differs", f"answer {number}")
        assert found.expected == f"{answers[number].completion.reward!r} (math 1.0)"
        shown = "none" if first.reward is None else repr(first.reward)
        reason = f": {first.reason}" if first.reason else ""
        assert found.found == f"{shown} (math {first.components['math']}){reason}"
        who = "math" if first.components != second.components else "the reward"
        is_steady = first.components == second.components and first.reward == second.reward
        said = "" if is_steady else f"; {who} is not deterministic: two calls, two scores"
        assert found.detail == detail + said
        return
    assert (found, asked) == (StageOutcome("rewards", "equal", detail), pieces)


def test_reward_functions_that_do_not_grade_are_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(self: object, items: object) -> None:
        raise ServiceLost("no sandbox", field="", value="", remedy="")

    monkeypatch.setattr(grading, "RewardService", Service)
    monkeypatch.setattr(Service, "score", fails)
    item = RewardItem(prompt="", response="", ground_truth="2")
    answers = [GradedAnswer("the answer", item, completion([], [3]))]
    found = graded_again(from_mapping({}), answers)
    assert (found.stage, found.state) == ("rewards", "not compared")
    assert found.detail.startswith("the reward functions do not grade: no sandbox")
    assert grading._shown(math.nan, {}) == grading._shown(None, {}) == "none"
