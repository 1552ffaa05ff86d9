"""Configured functions of the reward-server: per task, weighted, and in workers that can be
killed."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio

from common.errors import ConfigError, InvalidInput
from common.settings.config import load
from common.settings.rewards import FormatReward, LengthReward, MathReward
from common.settings.sections import RewardSection
from common.wire.schemas import RewardItem, RewardResult
from services.reward.app import create_reward_app
from services.reward.functions import (
    CompositeRewardFunction,
    FormatRewardFunction,
    MathRewardFunction,
    RewardFunction,
)
from services.reward.functions.handler import prepare
from services.reward.service import RewardService
from tests.support.errors import raises

pytestmark = pytest.mark.integration

MOODY = "tests.support.services.own_rewards:Moody"
KEYWORD = "tests.support.services.own_rewards:KeywordReward"


def item(response: str, ground_truth: str = "5", task: str = "", **columns: Any) -> RewardItem:
    return RewardItem(response=response, ground_truth=ground_truth, task=task, columns=columns)


def outcome(result: RewardResult) -> tuple[float | None, str]:
    return result.reward, result.status


async def test_functions_are_weighed_and_reported_by_name() -> None:
    config = RewardSection(
        functions=[
            "math",
            {"name": "format", "required": ["<think>.*</think>"], "weight": 0.5},
            {"name": KEYWORD, "weight": -0.25},
        ]
    )
    async with RewardService(config) as scorer:
        await scorer.ready()
        thought, bare = await scorer.score(
            [
                item("<think>\n\n</think>\\boxed{5} cat", keyword="cat"),
                item("\\boxed{6}", keyword="cat"),
            ]
        )
    assert thought.components == {"math": 1.0, "format": 1.0, "keyword": 1.0}
    assert (thought.reward, thought.correct, thought.extracted_answer) == (1.25, True, "5")
    assert bare.components == {"math": 0.0, "format": 0.0, "keyword": 0.0}
    assert (bare.reward, bare.correct) == (0.0, False)


async def test_a_task_has_its_own_functions() -> None:
    config = RewardSection(
        functions=[
            {"name": "math", "tasks": ["", "both"]},
            {"name": KEYWORD, "tasks": ["words", "both"]},
        ]
    )
    async with RewardService(config) as scorer:
        results = await scorer.score(
            [
                item("5"),
                item("a cat", "", "words", keyword="cat"),
                item("5 cats", "5", "both", keyword="cat"),
            ]
        )
        assert [sorted(result.components) for result in results] == [
            ["math"],
            ["keyword"],
            ["keyword", "math"],
        ]
        assert [result.reward for result in results] == [1.0, 1.0, 2.0]
        assert [result.correct for result in results] == [True, False, True]  # no verdict on words
        with raises(InvalidInput, field="items[1].task", value="wrods") as caught:
            await scorer.score([item("5"), item("5", task="wrods")])
        assert caught.value.field == "items[1].task"
        with raises(InvalidInput, field="items[0].columns.completions"):
            await scorer.score([item("5", "5", "both", completions="x", keyword="cat")])
        with raises(InvalidInput, field="items[0].ground_truth"):
            await scorer.score([item("5", " ", "both", keyword="cat")])


async def test_a_task_is_ignored_where_no_task_is_named() -> None:
    async with RewardService(RewardSection()) as scorer:
        [result] = await scorer.score([item("5", task="algebra")])
    assert result.reward == 1.0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def moody() -> AsyncIterator[RewardService]:
    async with RewardService(
        RewardSection(functions=[MOODY, "math"], function_timeout_s=1, workers=2)
    ) as scorer:
        yield scorer


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("bad", ["raise", "hang", "die", "nan", "inf"])
async def test_one_bad_item_never_harms_the_others(bad: str, moody: RewardService) -> None:
    results = await moody.score([item("5"), item(bad), item("5"), item("6")])
    status = {"hang": "timeout", "die": "died"}.get(bad, "error")
    assert [outcome(result) for result in results] == [
        (1.5, "ok"),
        (None, status),
        (1.5, "ok"),
        (0.5, "ok"),
    ]
    assert results[1].components["moody"] is None
    assert not results[1].correct


@pytest.mark.asyncio(loop_scope="module")
async def test_a_hang_is_bounded_and_large_batches_are_spread(
    moody: RewardService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.reward.hosts.CALL_ITEMS", 2)
    results = await moody.score([item("hang"), *[item("fine")] * 99])
    assert [result.reward for result in results] == [None, *[0.5] * 99]


@pytest.mark.asyncio(loop_scope="module")
async def test_custom_functions_may_read_standard_input_and_print(moody: RewardService) -> None:
    [result] = await moody.score([item("fine", read=True)])
    assert result.status == "error", "there is nothing to read: EOFError, not a hang"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no.such.module:Thing", "cannot be imported"),
        ("tests.support.services.own_rewards:Nothing", "cannot be imported"),
        ("tests.support.services.own_rewards:NeedsArguments", "cannot be created"),
        (
            "tests.support.services.own_rewards:NotAFunction",
            "neither a RewardFunction nor a function",
        ),
    ],
)
def test_a_function_that_does_not_work_is_refused(path: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as caught:
        prepare({"functions": [{"target": path, "arguments": {}}]})()
    assert path in str(caught.value)


def test_a_function_that_does_not_work_is_refused_at_the_start() -> None:
    """A separate process tries it; `prepare` runs there."""
    path = "tests.support.services.own_rewards:NeedsArguments"
    with pytest.raises(ConfigError, match="cannot be created") as caught:
        create_reward_app(RewardSection(functions=[path]))
    assert caught.value.field == "reward.functions"
    assert path in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ("nothing", "there is no nothing"),
        ("[]", "at least 1 item"),
        ("[5]", "neither the name of a function .* value: 5"),
        ("format", "give it `required` or `forbidden`"),
        ("math,math", "reward.functions has math twice"),
        ('{"name": "math", "tasks": []}', "reward.functions.math.tasks"),
        ('{"name": "math", "weight": "x"}', "reward.functions.math.weight · value: x"),
        ('{"name": "length", "soft_chars": 9000}', "soft_chars 9000"),
        (
            '{"name": "code", "timeout": 2}',
            "no setting reward.functions.code.timeout .*reward.functions.code.timeout_s",
        ),
        ('{"name": "a.b:C", "timeout": 2}', "no setting reward.functions.own.timeout"),
        ('{"weight": 2}', "a mapping with its name"),
    ],
)
def test_unfit_functions_are_refused(functions: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(["--reward.functions", functions], {})


def test_a_pattern_that_is_no_regular_expression_is_refused_by_the_name_of_its_setting() -> None:
    with raises(ConfigError, field="reward.functions.format.forbidden", value="(") as caught:
        create_reward_app(RewardSection(functions=[FormatReward(forbidden=["("])]))
    assert (caught.value.field, caught.value.value) == (
        "reward.functions.format.forbidden",
        "(",
    )


def test_settings_come_from_the_environment_too() -> None:
    env = {
        "RLHF_REWARD__FUNCTIONS": '["math", {"name": "length", "weight": 0.1, "tasks": ["code"]}]'
    }
    reward = load([], env).reward
    assert reward.functions == [MathReward(), LengthReward(weight=0.1, tasks=["code"])]
    assert reward.weights == {"math": 1.0, "length": 0.1}


class Closure(RewardFunction):
    """Cannot be pickled: it holds a lock and a local function."""

    name = "closure"

    def __init__(self, bonus: float) -> None:
        self.lock, self.threads, self.given_up = threading.Lock(), set[str](), threading.Event()
        self.score: Callable[[str], float] = lambda text: bonus + len(text)

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        with self.lock:
            self.threads.add(threading.current_thread().name)
            if any(completion[0]["content"] == "hang" for completion in completions):
                self.given_up.wait(400)
            return [self.score(completion[0]["content"]) for completion in completions]


@pytest.fixture
async def maths() -> AsyncIterator[MathRewardFunction]:
    function = MathRewardFunction()
    yield function
    function.close()


async def test_callers_own_objects_score_every_item_in_a_thread(maths: MathRewardFunction) -> None:
    own = Closure(0.25)
    both = CompositeRewardFunction(
        [maths, FormatRewardFunction(["boxed"])], [1.0, 0.5], name="both"
    )
    app = create_reward_app(RewardSection(function_timeout_s=5), functions=[own, both])
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://reward") as http,
    ):
        assert (await http.get("/health")).status_code == 200
        good = {"response": "\\boxed{5}", "ground_truth": "5"}
        answer = (
            await http.post(
                "/batch_reward", json={"items": [good, {**good, "response": "5", "task": "any"}]}
            )
        ).json()
        assert [result["reward"] for result in answer["rewards"]] == [
            0.25 + 9 + 1.5,
            0.25 + 1 + 1.0,
        ]
        assert answer["rewards"][0]["components"] == {
            "closure": 9.25,
            "both": 1.5,
            "both/math": 1.0,
            "both/format": 1.0,
        }
        assert [result["correct"] for result in answer["rewards"]] == [True, True], (
            "of the function that verifies"
        )
        assert own.threads == {"reward-function"}
        try:
            late = (await http.post("/reward", json={**good, "response": "hang"})).json()
        finally:
            own.given_up.set()
        assert (late["reward"], late["status"]) == (None, "timeout")
        assert (await http.get("/stats")).json()["functions"] == ["closure", "both"]


async def test_without_a_verifying_function_nothing_is_called_correct() -> None:
    async with RewardService(RewardSection(), functions=[Closure(0.0)]) as scorer:
        results = await scorer.score([item("x"), item("")])
    assert [(result.correct, result.verified) for result in results] == [(False, False)] * 2


async def test_an_answer_cut_off_earns_nothing_from_any_function_when_stopping_is_required() -> (
    None
):
    async with RewardService(RewardSection(require_stop=True), functions=[Closure(1.0)]) as scorer:
        cut = RewardItem(response="x", ground_truth="", finish_reason="length")
        [result] = await scorer.score([cut])
    assert (result.reward, result.correct, result.components) == (0.0, False, {"closure": 2.0})


async def test_a_cancelled_request_leaves_nothing_unfinished() -> None:
    async with RewardService(RewardSection(functions=[MOODY], function_timeout_s=100)) as scorer:
        await scorer.ready()
        task = asyncio.create_task(scorer.score([item("hang")] * 3))
        while scorer.stats()["unfinished"] < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert scorer.stats()["unfinished"] == 0
        assert [outcome(result) for result in await scorer.score([item("fine")])] == [(0.5, "ok")]
