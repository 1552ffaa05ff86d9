"""Plain functions as reward functions: arguments, async functions, None, duplicate names, and
logging."""

import functools
from typing import Any

import pytest

from common.settings.sections import RewardSection
from common.wire.schemas import RewardItem
from services.reward.functions.base import Message, Score, WrongScores
from services.reward.functions.composite import CompositeRewardFunction, combine
from services.reward.functions.plain import PlainFunction, name_of, numbered
from services.reward.service import RewardService

CHATS: list[list[Message]] = [[{"role": "assistant", "content": text}] for text in ("one", "three")]
COLUMNS: dict[str, Any] = {"prompt": ["a?", "b?"], "ground_truth": ["1", "2"], "level": [3, None]}


class Log:
    """Records metrics and rows that functions log."""

    def __init__(self) -> None:
        self.state, self.metrics, self.rows = object(), dict[str, float](), list[dict[str, Any]]()

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    def log_rows(self, rows: list[dict[str, Any]]) -> None:
        self.rows += rows


def values(scores: list[Score]) -> list[tuple[float | None, str]]:
    return [(score.value, score.status) for score in scores]


def test_a_function_gets_the_arguments_that_it_names() -> None:
    def exact(completions: list[str], prompts: list[str], level: list[int | None]) -> list[float]:
        assert (prompts, level) == (["a?", "b?"], [3, None])
        return [len(text) for text in completions]

    assert values(PlainFunction(exact).scores(CHATS, **COLUMNS)) == [(3, "ok"), (5, "ok")]
    PlainFunction(lambda completions, answer: [float(text) for text in answer]).scores(
        CHATS, **COLUMNS
    )  # of a loader
    seen: dict[str, Any] = {}
    PlainFunction(lambda **everything: seen.update(everything) or [0, 0]).scores(CHATS, **COLUMNS)
    assert seen == {**COLUMNS, "prompts": ["a?", "b?"], "completions": ["one", "three"]}


def test_completions_are_texts_or_chats_as_the_prompts_are() -> None:
    chat = [{"role": "user", "content": "b?"}]
    seen: list[Any] = []

    def looks(completions: Any, prompts: Any) -> list[float]:
        seen.extend([*completions, *prompts])
        return [0, 0]

    PlainFunction(looks).scores(CHATS, **COLUMNS, prompts=[None, chat])
    assert seen == ["one", CHATS[1], "a?", chat]


def test_none_says_that_a_function_does_not_apply() -> None:
    scores = PlainFunction(lambda completions: [None, 0.5]).scores(CHATS, **COLUMNS)
    assert values(scores) == [(None, "inapplicable"), (0.5, "ok")]
    whole = combine({"a": scores[0], "b": Score(2.0, correct=True)}, {"b": 3.0})
    assert (whole.value, whole.correct, whole.components) == (6.0, True, {"a": None, "b": 2.0})
    assert combine({"a": scores[0]}, {}).status == "inapplicable"
    assert combine({"a": scores[0], "b": Score(None, "error")}, {}).value is None


def test_async_functions_share_a_loop_of_their_own() -> None:
    import asyncio

    loops = []

    async def judge(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return [1.0 for _ in completions]

    function = PlainFunction(judge)
    for _ in range(2):
        assert values(function.scores(CHATS, **COLUMNS)) == [(1, "ok"), (1, "ok")]
    assert loops[0] is loops[1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda completions, solution: [],
            r"missing a required argument: 'solution'; there are completions, ground_truth, level",
        ),
        (lambda completions: [1.0], r"returned 1 scores for 2 completions"),
        (lambda completions: None, r"returned None"),
        (lambda completions: {"a": 1}, r"returned a dict"),
        (
            lambda completions, log_extra: log_extra("x", [1]) or [1, 1],
            r"gave log_extra 1 values of x for 2 completions",
        ),
    ],
)
def test_error_of_a_function_is_reported(function: Any, message: str) -> None:
    with pytest.raises(WrongScores, match=message):
        PlainFunction(function, "f", Log()).scores(CHATS, **COLUMNS)


def test_value_that_is_not_a_number_is_no_score() -> None:
    found = PlainFunction(lambda completions: ["1", float("nan")]).scores(CHATS, **COLUMNS)
    assert values(found) == [(None, "error"), (None, "error")]


def test_functions_log() -> None:
    def logs(
        completions: list[str], trainer_state: Any, log_metric: Any, log_extra: Any, **_: Any
    ) -> list[float]:
        assert trainer_state is log.state
        log_metric("mean", 4)
        log_extra("length", [len(text) for text in completions])
        return [1, 2]

    log = Log()
    PlainFunction(logs, log=log).scores(CHATS, **COLUMNS)
    assert log.metrics == {"mean": 4}
    assert log.rows[1] == {"function": "logs", "prompt": "b?", "completion": "three", "length": 5}


def test_names() -> None:
    class Judge:
        def __call__(self, completions: Any) -> Any: ...

    def length(completions: Any) -> Any: ...

    assert [name_of(each) for each in (length, functools.partial(length), Judge(), lambda: 0)] == [
        *("length", "length", "Judge", "lambda")
    ]
    assert numbered(["a", "b", "a", "a"]) == ["a", "b", "a_2", "a_3"]


@pytest.mark.integration
async def test_a_plain_function_by_its_import_path_grades_on_a_cluster() -> None:
    async with RewardService(
        RewardSection(functions=["tests.support.services.own_rewards:plain_length"], workers=1)
    ) as scorer:
        found = await scorer.score(
            [RewardItem(response=text, ground_truth="") for text in ("four", "")]
        )
    assert [(result.reward, result.status) for result in found] == [
        (4.0, "ok"),
        (None, "inapplicable"),
    ]
    assert found[0].components == {"plain_length": 4.0}


async def test_a_call_that_fails_once_is_repeated_one_by_one_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No score is missing in the end, and yet somebody has to know why grading was slow."""

    def length(completions: list[str]) -> list[float]:
        if len(completions) > 1:
            raise ConnectionError("the cache is away")
        return [float(len(text)) for text in completions]

    items = [RewardItem(response=text, ground_truth="") for text in ("four", "three")]
    async with RewardService(RewardSection(), functions=[PlainFunction(length)]) as scorer:
        found = await scorer.score(items)
    assert [result.reward for result in found] == [4.0, 5.0]
    assert (
        "length failed for 2 answers, now one by one: ConnectionError: the cache is away"
        in caplog.text
    )


async def test_a_function_that_changes_its_arguments_changes_nothing_for_others() -> None:
    """A list that is popped or a chat that is stripped in place would falsify the scores of the
    next function, of the next call, and of the other answers to the problem."""

    def last_step(completions: list[Any], steps: list[list[str]]) -> list[float]:
        scores = []
        for chat, each in zip(completions, steps, strict=True):
            chat[-1]["content"] = chat[-1]["content"].strip()
            scores.append(float(chat[-1]["content"] == each.pop()))
        if len(completions) > 1:
            raise ConnectionError("the cache is away")  # every answer is scored again
        return scores

    def as_written(completions: list[Any], steps: list[list[str]]) -> list[float]:
        return [
            float(chat[-1]["content"] == " 5 " and each == ["2+3", "5"])
            for chat, each in zip(completions, steps, strict=True)
        ]

    columns = {"steps": ["2+3", "5"], "prompts": [{"role": "user", "content": "2+3?"}]}
    item = RewardItem(prompt="2+3?", response=" 5 ", ground_truth="5", columns=columns)
    apart = [PlainFunction(last_step), PlainFunction(as_written)]
    together = [CompositeRewardFunction([PlainFunction(last_step), PlainFunction(as_written)])]
    for functions in (apart, together):
        async with RewardService(RewardSection(), functions=functions) as scorer:
            found = [await scorer.score([item, item]) for _ in range(2)]
        assert [result.reward for results in found for result in results] == [2.0] * 4
    assert columns["steps"] == ["2+3", "5"]
