"""What a run does before its first step, and what it asks of the services then, by tables of all
cases: the number of steps, experience of others, a trial of the rewards, the ground truths.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError, ServiceError
from common.settings.config import Config
from common.wire.schemas import (
    BatchRewardResult,
    GroundTruthProblem,
    GroundTruthProblems,
    Prompt,
    RewardItem,
    RewardResult,
    RewardStatus,
)
from tests.simulation.virtual_time import simulated
from tests.support.errors import raises
from trainer.rollouts import ground_truths, trial
from trainer.rollouts.ground_truths import MAX_SHARE, PAGE, GroundTruthCheck
from trainer.rollouts.services import Services, flush_all
from trainer.rollouts.start import begin
from trainer.rollouts.trial import TRIAL_S, try_rewards

PROMPT = Prompt(id="p", prompt="2 + 2?", ground_truth="4", task="maths", columns={"a": 1})


class World:
    """The services of a run that begins, and what they are asked for."""

    def __init__(self) -> None:
        self.config = Config()
        self.asked: list[Any] = []
        self.prompts = 40
        self.added = 1000
        self.groups = 0
        self.services: Any = SimpleNamespace(
            data=SimpleNamespace(stats=self.of_data, seek=self.seek, train_prompts=self.listed),
            replay=SimpleNamespace(stats=self.of_replay, reset_fresh=self.reset_fresh),
            reward=SimpleNamespace(),
            rewards_tried=False,
        )

    async def of_data(self) -> Any:
        return {"total_available": self.prompts, "run": "before"}

    async def of_replay(self) -> Any:
        return {"added": self.added, "groups": self.groups}

    async def seek(self, *given: Any) -> None:
        self.asked.append(("seek", *given))

    async def listed(self, limit: int, offset: int) -> list[Prompt]:
        assert (limit, offset) == (1, 0)
        return [PROMPT]

    async def reset_fresh(self, *given: Any, **named: Any) -> int:
        self.asked.append(("reset_fresh", *given, named))
        return 3

    def begun(self, *, step: int = 2, known: bool = True, per_step: int = 4) -> int:
        context: Any = SimpleNamespace(config=self.config, services=self.services, run_id="run")
        return asyncio.run(begin(context, per_step, step, position=9, known=known))


@pytest.mark.parametrize(("prompts", "epochs"), [(40, 1), (43, 3), (4, 1)])
def test_a_run_has_as_many_steps_as_its_prompts_fill_or_its_setting_says(
    prompts: int, epochs: int
) -> None:
    world = World()
    world.prompts = prompts
    world.config.trainer.num_epochs = epochs
    assert world.begun() == prompts * epochs // 4
    world.config.trainer.max_steps = 7
    assert world.begun() == 7
    assert (
        world.asked
        == [
            ("reset_fresh", {"run_id": "run"}),
            ("seek", 9, "run-start", "before"),
        ]
        * 2
    )


def test_too_few_prompts_are_refused() -> None:
    world = World()
    world.prompts = 3
    world.config.trainer.num_epochs = 1
    world.config.trainer.batch_size = 4
    with raises(ConfigError, field="trainer.batch_size", value="4") as error:
        world.begun()
    assert error.value.message.startswith("3 prompts")
    assert world.asked == []


@pytest.mark.parametrize("added", [7, 8])
@pytest.mark.parametrize("reuse", [0.0, 0.25])
def test_a_buffer_that_has_stored_less_than_was_trained_on_is_named(
    added: int, reuse: float, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    world.added = added
    world.config.replay.reuse_ratio = reuse
    world.begun(step=2)
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == (added < 8)
    for text in warned:
        assert "stored 7 groups" in text
        assert "trained on 8" in text
        assert str(world.config.state_dir / "replay") in text
        assert text.endswith("empty buffer") == (reuse > 0)


@pytest.mark.parametrize(
    ("reuse", "groups", "known"), [*itertools.product([0.0, 0.25], [0, 5], [False, True])]
)
def test_the_experience_of_another_run_is_not_reused(
    reuse: float, groups: int, known: bool
) -> None:
    world = World()
    world.groups = groups
    world.config.replay.reuse_ratio = reuse
    world.services.rewards_tried = True
    if reuse and groups and not known:
        state = str(world.config.state_dir)
        with raises(ConfigError, field="state_dir", value=state) as error:
            world.begun(known=known)
        assert "holds 5 groups" in error.value.message
        assert world.asked == []
        return
    world.begun(known=known)
    wanted = ("reset_fresh", 9, 2, "run", {}) if reuse else ("reset_fresh", {"run_id": "run"})
    assert world.asked[0] == wanted


@pytest.mark.parametrize(
    ("environment", "known", "tried"),
    [*itertools.product(["", "python", "agent:x"], [False, True], [False, True])],
)
def test_rewards_are_tried_once_and_before_the_run_begins_at_the_data_server(
    environment: str, known: bool, tried: bool
) -> None:
    world = World()
    world.config.environment.name = environment
    world.services.rewards_tried = tried

    async def grade(items: list[RewardItem]) -> BatchRewardResult:
        world.asked.append("trial")
        return graded("ok", 1.0)

    world.services.reward = SimpleNamespace(batch_reward=grade, gets_tokens=False)
    world.begun(known=known)
    is_tried = not known and not tried and not world.config.environment.grades_itself
    names = [each if each == "trial" else each[0] for each in world.asked]
    assert names == ["reset_fresh", *["trial"] * is_tried, "seek"]


def graded(status: RewardStatus, *rewards: float | None, reason: str = "") -> BatchRewardResult:
    results = [
        RewardResult(
            reward=reward,
            extracted_answer=None,
            ground_truth="4",
            correct=False,
            status=status,
            reason=reason if reward is None else "",
        )
        for reward in rewards
    ]
    return BatchRewardResult(rewards=results, mean_reward=0.0, accuracy=0.0)


@pytest.mark.parametrize(
    ("status", "rewards", "reason", "outcome"),
    [
        ("ok", [1.0, 0.0], "", "nothing"),
        ("error", [None, None], "line 3", "stops"),
        ("error", [1.0, None], "line 3", "nothing"),
        ("error", [None, 1.0], "line 3", "nothing"),
        ("error", [None, None], "", "nothing"),
        ("inapplicable", [None, None], "none", "nothing"),
        ("timeout", [None, None], "30 s", "warns"),
    ],
)
def test_a_reward_function_that_fails_for_every_answer_stops_the_run(
    status: RewardStatus,
    rewards: list[float | None],
    reason: str,
    outcome: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[list[RewardItem]] = []

    async def grade(items: list[RewardItem]) -> BatchRewardResult:
        seen.append(items)
        return graded(status, *rewards, reason=reason)

    reward: Any = SimpleNamespace(batch_reward=grade, gets_tokens=True)
    if outcome == "stops":
        with raises(ConfigError, field="reward.functions") as error:
            asyncio.run(try_rewards(reward, PROMPT))
        assert reason in error.value.message
    else:
        asyncio.run(try_rewards(reward, PROMPT))
    assert len(caplog.records) == (outcome == "warns")
    assert all(reason in each.getMessage() for each in caplog.records)
    [[first, second]] = seen
    assert first == second
    assert (first.response, first.ground_truth, first.prompt) == ("4", "4", "2 + 2?")
    assert (first.finish_reason, first.task) == ("stop", "maths")
    assert first.columns == {"a": 1, "completion_ids": [0]}


def test_an_answer_is_made_up_where_the_ground_truth_is_empty() -> None:
    [item, _] = trial.made_up(Prompt(id="p", prompt="?", ground_truth=""), with_tokens=False)
    assert item.response == "0"
    assert item.columns == {}


@pytest.mark.parametrize("fault", ["slow", "error"])
def test_a_trial_without_an_answer_is_only_said(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def grade(items: list[RewardItem]) -> BatchRewardResult:
        if fault == "error":
            raise ServiceError("no such column")
        await asyncio.sleep(1000.0)
        return graded("ok", 1.0)

    reward: Any = SimpleNamespace(batch_reward=grade, gets_tokens=False)
    with simulated(0) as loop:
        loop.run_until_complete(try_rewards(reward, PROMPT))
        assert loop.now == (0.0 if fault == "error" else TRIAL_S)
    [record] = caplog.records
    words = "no such column" if fault == "error" else f"no answer within {TRIAL_S:.0f} s"
    assert words in record.getMessage()


class Splits:
    """Two splits of problems, and a reward-server that cannot solve those whose truth is bad."""

    def __init__(self, train: int, evaluation: int, bad: Callable[[int], bool]) -> None:
        self.splits = {
            name: [
                Prompt(
                    id=f"{name}{at}",
                    prompt="?",
                    ground_truth="x" * 100 if bad(at) else f"{at}",
                    task="t",
                    columns={"at": at},
                )
                for at in range(count)
            ]
            for name, count in (("train", train), ("eval", evaluation))
        }
        self.pages: list[tuple[str, int, int]] = []
        self.fails_at = -1
        self.repaired = 0
        self.seen: list[RewardItem] = []
        self.services: Any = SimpleNamespace(
            data=SimpleNamespace(
                train_prompts=self.lister("train"), eval_prompts=self.lister("eval")
            ),
            reward=SimpleNamespace(check_ground_truths=self.check),
        )

    def lister(self, name: str) -> Any:
        async def listed(limit: int, offset: int) -> list[Prompt]:
            self.pages.append((name, limit, offset))
            if (name, offset) == ("train", self.fails_at):
                raise ServiceError("the disk is full")
            return self.splits[name][offset : offset + limit]

        return listed

    async def check(self, items: list[RewardItem]) -> GroundTruthProblems:
        self.seen += items
        problems = [
            GroundTruthProblem(index=at, reason="r" * 500)
            for at, item in enumerate(items)
            if item.ground_truth.startswith("x")
        ]
        return GroundTruthProblems(problems=problems, repaired=self.repaired)

    def run(self, path: Path) -> dict[str, str]:
        check = GroundTruthCheck(self.services, path)
        try:
            asyncio.run(check.run())
        finally:
            self.found = check.unsolvable
        return check.unsolvable


@pytest.mark.parametrize("train", [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 3])
def test_every_problem_of_both_splits_is_checked_once(
    train: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    splits = Splits(train, 3, lambda at: at == 17)
    splits.repaired = 2
    path = tmp_path / "found.json"
    bad = ["train17"] if train > 17 else []
    found = splits.run(path)
    assert [*found] == bad
    for reason in found.values():
        # 60 characters of the problem, and 120 of the reason.
        assert reason == f"'{'x' * 59}: {'r' * 120}"
    every = [*splits.splits["train"], *splits.splits["eval"]]
    assert [each.ground_truth for each in splits.seen] == [each.ground_truth for each in every]
    assert [each.columns for each in splits.seen] == [each.columns for each in every]
    assert all((each.response, each.task) == ("", "t") for each in splits.seen)
    full = train // PAGE
    pages = [("train", PAGE, PAGE * number) for number in range(full + 1)]
    assert splits.pages == [*pages, ("eval", PAGE, 0)]
    checks = -(-train // PAGE) + 1
    assert json.loads(path.read_text()) == {
        "checked": train + 3,
        "repaired": 2 * checks,
        "unsolvable": found,
    }
    texts = [(each.levelno, each.getMessage()) for each in caplog.records]
    assert (logging.WARNING, ground_truths.REPAIRED % f"{2 * checks}") in texts
    summaries = [text for _, text in texts if "graded" in text]
    assert len(summaries) == 1
    assert summaries[0].startswith(f"{train + 3:,} ground truths")
    assert ("all can be graded" in summaries[0]) == (not bad)


@pytest.mark.parametrize(
    ("train", "evaluation", "bad", "stops"),
    [(20, 20, 2, False), (20, 20, 3, True), (200, 20, 3, True), (200, 0, 20, False)],
)
def test_a_split_of_which_too_many_cannot_be_solved_stops_the_run(
    train: int, evaluation: int, bad: int, stops: bool, tmp_path: Path
) -> None:
    assert MAX_SHARE == 0.1
    splits = Splits(train, evaluation, lambda at: at < bad)
    path = tmp_path / "found.json"
    count = bad * (1 + (evaluation > 0))
    if stops:
        value = f"{count} of {train + evaluation}"
        with raises(ConfigError, field="data.answer_field", value=value) as error:
            splits.run(path)
        assert f"{count} cannot be graded" in error.value.message
    else:
        splits.run(path)
    assert len(splits.found) == count
    assert len(json.loads(path.read_text())["unsolvable"]) == count


def test_what_cannot_be_checked_is_said_and_the_rest_is_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    splits = Splits(PAGE + 5, 30, lambda at: at == 1)
    splits.fails_at = PAGE
    path = tmp_path / "found.json"
    assert [*splits.run(path)] == ["train1", "eval1"]
    assert json.loads(path.read_text())["checked"] == PAGE + 30
    [text] = [each.getMessage() for each in caplog.records if "disk is full" in each.getMessage()]
    assert f"after {PAGE}" in text


@pytest.mark.parametrize("count", [1, 5, 6])
def test_a_summary_names_the_first_problems(count: int) -> None:
    unsolvable = {f"p{number}": f"why {number}" for number in range(count)}
    text = ground_truths.summary(1234, unsolvable)
    assert text.startswith(f"1,234 ground truths; {count} cannot be graded: p0 (why 0)")
    assert [number for number in range(count) if f"p{number} (why {number})" in text] == [
        *range(min(5, count))
    ]
    assert text.endswith(", …") == (count == 6)


@pytest.mark.parametrize("has_environment", [False, True])
def test_all_services_are_flushed_at_once_and_a_fault_is_only_said(
    has_environment: bool, caplog: pytest.LogCaptureFixture
) -> None:
    flushed: list[tuple[str, float]] = []

    def client(name: str) -> Any:
        async def flush(deadline_s: float) -> None:
            await asyncio.sleep(2.0)
            flushed.append((name, deadline_s))
            if name == "reward":
                raise ServiceError("it restarts")

        return SimpleNamespace(flush=flush, service=f"{name}-server")

    services = Services(
        data=client("data"),
        rollout=client("rollout"),
        reward=client("reward"),
        replay=client("replay"),
        environment=client("environment") if has_environment else None,
        teacher=client("teacher"),
    )
    with simulated(0) as loop:
        loop.run_until_complete(flush_all(services.all(), 9.0))
        loop.run_until_complete(flush_all(services.stateful()))
        assert loop.now == 4.0
    of_run = ["data", "reward", "replay", "rollout", *["environment"] * has_environment]
    assert sorted(flushed[: len(of_run)]) == sorted((name, 9.0) for name in of_run)
    assert sorted(flushed[len(of_run) :]) == [("data", 60.0), ("replay", 60.0), ("reward", 60.0)]
    texts = [each.getMessage() for each in caplog.records]
    assert len(texts) == 2
    assert all("reward-server" in text and "it restarts" in text for text in texts)
