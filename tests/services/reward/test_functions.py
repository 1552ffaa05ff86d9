"""Reward functions, called as in a user's script."""

import math
import re
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from common.errors import ConfigError, InvalidInput
from services.reward.functions import (
    CompositeRewardFunction,
    FormatRewardFunction,
    LengthPenaltyFunction,
    MathRewardFunction,
    RepetitionPenaltyFunction,
    RewardFunction,
)
from services.reward.functions.base import WrongScores
from tests.support.errors import raises
from tests.support.services.own_rewards import KeywordReward, Moody, TooFew


def chats(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def test_a_script_may_give_texts_instead_of_chats() -> None:
    texts: Any = ["<answer>18</answer>", "18"]
    function = FormatRewardFunction(required=[r"<answer>.*</answer>"])
    assert function(texts) == function(chats(*texts)) == [1.0, 0.0]


@pytest.mark.integration
def test_math_in_a_script_is_exact_and_hangs_on_nothing() -> None:
    function = MathRewardFunction(timeout_s=1)
    texts = chats(
        "\\boxed{\\frac{1}{2}}",
        "#### 1,080",
        "\\boxed{x+1}",
        "\\boxed{\\sum_{i=1}^{1000000000} \\frac{1}{i}}",
        "\\boxed{inf}",
        "none",
        "\\boxed{}",
    )
    golds = ["0.5", "1080", "1+x", "x", "5", "18", "18"]
    try:
        rewards = function(texts, ground_truth=golds)
        assert rewards[:3] == [1.0, 1.0, 1.0]
        assert math.isnan(rewards[3]), "an error is not a zero"
        assert rewards[4:] == [0.0, 0.0, 0.0]
        plain: Any = ["\\boxed{18}", "\\boxed{17}"]
        assert function(plain, ground_truth=["18", "18"]) == [1.0, 0.0]
        scores = function.scores(texts, ground_truth=golds)
        assert [score.status for score in scores] == [
            "ok",
            "ok",
            "ok",
            "timeout",
            "ok",
            "unparsable",
            "unparsable",
        ]
        assert [score.answer for score in scores][:2] == ["\\frac{1}{2}", "1,080"]
    finally:
        function.close()
    assert function(texts[:1], ground_truth=golds[:1]) == [1.0], "it starts again"
    function.close()


@pytest.mark.integration
def test_math_names_what_is_missing() -> None:
    function = MathRewardFunction()
    try:
        for columns in (
            {},
            {"ground_truth": "5"},
            {"ground_truth": ["5", "6"]},
            {"ground_truth": [" "]},
            {"ground_truth": [["5", "6"]]},
            {"ground_truth": ["['5', '6']"]},
        ):
            with pytest.raises(InvalidInput, match="ground_truth"):
                function(chats("5"), **columns)
        golds = [["5"], [5], "['5']"]
        assert function(chats("5", "5", "5"), ground_truth=golds) == [1.0, 1.0, 1.0]
    finally:
        function.close()
    with raises(ConfigError, field="workers, timeout_s"):
        MathRewardFunction(timeout_s=0)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("<think>\nfirst\n\nsecond\n</think>\n\\boxed{5}", True),
        ("<think>one line</think> 5", True),
        ("<think></think> 5", False),
        ("<think>\n</think>\n", False),
        ("5", False),
        ("5 <think>too late</think> 6", False),
        ("<think>never closed", False),
    ],
)
def test_format_finds_thoughts_of_many_lines(text: str, fits: bool) -> None:
    thinking = r"\A\s*<think>.*?\S.*?</think>.*\S"
    assert FormatRewardFunction([thinking])(chats(text)) == [float(fits)]


OWN = "<think>.+</think>"
"""The pattern of the documentation."""
STRICT = r"\A\s*<think>.*?\S.*?</think>.*\S"
R1 = r"<think>.+</think>\s*<answer>.+</answer>"


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        # Thoughts that the answer opens.
        (OWN, "<think>2+3</think> \\boxed{5}", True),
        (OWN, "<think>\n2+3\n\n= 5\n</think>\n\n\\boxed{5}", True),
        (OWN, "Well. <think>2+3</think> 5", True),
        (OWN, "<think>never closed", False),
        (OWN, "5", False),
        (OWN, "", False),
        (OWN, "<think></think> 5", False),
        (OWN, "</think> 5 <think>", False),
        # Thoughts that the chat template opened in the prompt.
        (OWN, "2+3</think> \\boxed{5}", True),
        (OWN, "\n2+3\n= 5\n</think>\n\n\\boxed{5}", True),
        (STRICT, "2+3</think> 5", True),
        (STRICT, "\n</think>\n5", False),
        (OWN, "</think> 5", False),
        (OWN, "2+3, and then the length was reached", False),
        (R1, "2+3</think>\n<answer>5</answer>", True),
        (R1, "2+3</think>\n<answer>5", False),
        (r"<thinking>.+</thinking>", "2+3</thinking> 5", True),
        (r"<thinking>.+</thinking>", "2+3</think> 5", False),
        (r"^<think>\n.+\n</think>\n", "2+3\n</think>\n5", True),
        (r"^<think>\n.+\n</think>\n", "\n2+3\n</think>\n5", True),
        # Thoughts that begin more than once.
        (OWN, "<think><think>2+3</think> 5", False),
        (OWN, "<think>2</think><think>3</think> 5", False),
        (OWN, "<think>2</think> 5 <think>Check.</think> 5", False),
        (OWN, "2+3</think> 5 <think>Check.</think> 5", False),
        (OWN, "<think>2+3</think> 5 <think>", False),
        (R1, "<think>2</think><think>3</think><answer>5</answer>", False),
        (r"<think>.+</think>.+<think>.+</think>", "<think>2</think> a <think>3</think> 5", True),
        ("<think>", "<think>a<think>b", False),
        # What is no mark, and patterns without one.
        (OWN, "<think>The tag is `<think>`.</think> 5", True),
        (OWN, '<think>He wrote "<think>".</think> 5', True),
        (OWN, "<think>2+3</think> 5 </think>", True),
        ("boxed", "<think>a<think>b</think> \\boxed{5}", True),
        ("<step>.+</step>", "<step>2</step><step>3</step>", True),
        (r"\A<answer>", "2+3</think><answer>5</answer>", False),
    ],
)
def test_thoughts_begin_once_in_the_answer_or_in_its_prompt(
    pattern: str, text: str, fits: bool
) -> None:
    assert FormatRewardFunction([pattern])(chats(text)) == [float(fits)]


def test_format_wants_every_required_and_no_forbidden_pattern() -> None:
    function = FormatRewardFunction(["a", "^b$"], ["c.d"])
    assert function(chats("a\nb\n", "a", "a\nb\nc\nd", "a\nb\nc")) == [1.0, 0.0, 0.0, 1.0]
    with raises(ConfigError, field="reward.functions.format.required", value="("):
        FormatRewardFunction(["("])
    with raises(ConfigError, field="reward.functions.format.required", value="<think>"):
        FormatRewardFunction("<think>")
    with raises(ConfigError, field="required"):
        FormatRewardFunction()


def test_length_falls_linearly_between_its_limits() -> None:
    function = LengthPenaltyFunction(soft_chars=10, hard_chars=20)
    assert function(chats("", "x" * 10, "x" * 15, "x" * 20, "x" * 1000)) == [
        0.0,
        0.0,
        -0.5,
        -1.0,
        -1.0,
    ]
    with pytest.raises(ConfigError):
        LengthPenaltyFunction(20, 20)


def test_repetition_is_the_share_of_repeated_ngrams() -> None:
    function = RepetitionPenaltyFunction(ngram=2)
    assert function(chats("", "a", "a b c d", "a b a b a")) == [0.0, 0.0, 0.0, -0.5]
    assert function(chats("a " * 1000))[0] < -0.99
    with pytest.raises(ConfigError):
        RepetitionPenaltyFunction(0)


@pytest.mark.parametrize(
    "text", ["哈" * 500, "我们再算一遍。" * 50, "abcdefgh" * 60, "そうです" * 60, "ไม่ใช่" * 50]
)
def test_repetition_is_seen_in_text_without_spaces(text: str) -> None:
    assert RepetitionPenaltyFunction()(chats(text))[0] < -0.7


def test_text_without_repetition_has_no_penalty() -> None:
    characters = "".join(chr(0x4E00 + i) for i in range(500))
    words = " ".join(f"word{i}" for i in range(500))
    formulas = " ".join(
        ["so \\frac{a+b}{c}"] + [f"step {i}" for i in range(30)] + ["and \\frac{a+b}{c}"]
    )
    assert RepetitionPenaltyFunction()(chats(characters, words, formulas)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "pattern",
    ["a.*b.*c.*d.*e.*f", "(a*)*b", "(a|a)*b", "<think>.*</think>.*<answer>.*</answer>.*<x>"],
)
def test_a_pattern_that_takes_too_long_fails_its_completion_alone(pattern: str) -> None:
    hostile = {
        "a": "a" * 5000 + "c",
        "<": "<think></think><answer></answer>" * 1500,
        "(": "a" * 5000 + "c",
    }[pattern[0]]
    hostile = "abcde" * 10_000 if pattern.startswith("a.") else hostile
    before = time.process_time()
    first, second = FormatRewardFunction([pattern]).scores(chats("no", hostile))
    assert time.process_time() - before < 10
    assert first.value == 0.0
    assert second.value == 0.0 or (
        second.status == "timeout" and "takes more than 1 CPU s" in second.reason
    )


class Fixed(RewardFunction):
    """Returns the values passed to its constructor."""

    def __init__(self, name: str, *values: float) -> None:
        self._name, self._values = name, list(values)

    @property
    def name(self) -> str:
        return self._name

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return self._values


def test_a_composite_weighs_its_parts_and_reports_them() -> None:
    function = CompositeRewardFunction(
        [Fixed("a", 1.0, 2.0), Fixed("b", 0.5, math.nan)], [2.0, -1.0]
    )
    rewards = function(chats("x", "y"))
    assert rewards[0] == 1.5
    assert math.isnan(rewards[1]), "an error in one is an error, not a zero"
    first, second = function.scores(chats("x", "y"))
    assert (first.value, first.components) == (1.5, {"a": 1.0, "b": 0.5})
    assert (second.value, second.status, second.components) == (
        None,
        "error",
        {"a": 2.0, "b": None},
    )
    outer = CompositeRewardFunction([function, Fixed("c", 1.0, 1.0)])
    assert outer.scores(chats("x", "y"))[0].components == {
        "composite": 1.5, "composite/a": 1.0, "composite/b": 0.5, "c": 1.0
    }  # fmt: skip


ODD: dict[str, tuple[Any, float | None]] = {
    "bool": (True, 1.0),
    "numpy": (np.float32(0.5), 0.5),
    "numpy array": (np.array(0.5), 0.5),
    "Decimal": (Decimal("0.5"), 0.5),
    "Fraction": (Fraction(1, 2), 0.5),
    "int": (10**30, 1e30),
    "infinite": (math.inf, None),
    "minus infinite": (-math.inf, None),
    "nan": (math.nan, None),
    "numpy nan": (np.float64("nan"), None),
    "huge": (1e308, None),
    "beyond float32": (1e39, None),
    "huge int": (10**400, None),
    "Decimal nan": (Decimal("sNaN"), None),
    "Decimal huge": (Decimal("1e999"), None),
    "none": (None, None),
    "text": ("1.0", None),
    "complex": (1j, None),
    "list": ([1.0], None),
    "object": (object(), None),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("weight", [1.0, -1e30])
def test_an_odd_value_is_an_error_of_its_item_alone(name: str, weight: float) -> None:
    value, number = ODD[name]
    first, second = CompositeRewardFunction([Fixed("a", value, 0.5)], [weight]).scores(
        chats("x", "y")
    )
    assert (second.value, second.status) == (0.5 * weight, "ok")
    assert first.components == {"a": number}
    expected = None if number is None or abs(number * weight) > 3e38 else number * weight
    assert (first.value, first.status) == (expected, "error" if expected is None else "ok")


def test_values_come_in_any_sequence() -> None:
    assert [score.value for score in FromGenerator().scores(chats("x", "y"))] == [1.0, 2.0]


class FromGenerator(RewardFunction):
    """Returns an iterator instead of a list."""

    name = "generator"

    def __call__(self, completions: list[list[dict[str, str]]], **kwargs: Any) -> Any:
        return (float(i + 1) for i in range(len(completions)))


def test_exception_in_a_part_is_raised_by_the_composite() -> None:
    with pytest.raises(ValueError, match=re.escape("no\nscore")):
        CompositeRewardFunction([Fixed("a", 1.0), Moody()])(chats("raise"))
    with raises(InvalidInput, field="too_few"):
        CompositeRewardFunction([TooFew()])(chats("x"))


def test_senseless_composite_is_refused() -> None:
    for functions, weights in (
        ([], None), ([Fixed("a")], [1.0, 2.0]), ([Fixed("a"), Fixed("a")], None), ([Fixed("a")], [math.inf])
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            CompositeRewardFunction(functions, weights)


def test_custom_functions_get_the_columns() -> None:
    assert KeywordReward()(
        chats("a cat", "a dog"), keyword=["cat", "cat"], ground_truth=["", ""]
    ) == [1.0, 0.0]


class Own(RewardFunction):
    """Returns the result of the given function."""

    name = "own"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, completions: list[Any], **_: Any) -> Any:
        return self.function(completions)


async def _coroutine(completions: list[Any]) -> list[float]:
    return [1.0 for _ in completions]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda completions: [1.0] * 5, "own returned 5 scores"),
        (lambda completions: [], "own returned 0 scores"),
        (lambda completions: None, "own returned None"),
        (lambda completions: 1.0, "own returned a float"),
        (lambda completions: "11", "own returned a str"),
        (_coroutine, "own is a coroutine: define it with def, not async def"),
    ],
)
def test_scores_that_are_not_numbers_are_refused_with_a_message(
    function: Callable[..., Any], told: str
) -> None:
    with pytest.raises(WrongScores) as caught:
        Own(function).scores([[{"role": "assistant", "content": "1"}]] * 2)
    assert told in caught.value.message
    assert "return a list with one number for each completion" in (caught.value.remedy or "")


def test_scores_may_be_of_any_kind_of_number_or_missing() -> None:
    scores = Own(lambda completions: np.array([1, 0], dtype=np.float32)).scores([[], []])
    assert [score.value for score in scores] == [1.0, 0.0]
    scores = Own(lambda completions: [True, None]).scores([[], []])
    assert [(score.value, score.reason) for score in scores] == [
        (1.0, ""),
        (None, "None is not a number"),
    ]
