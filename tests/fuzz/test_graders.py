"""Any text gets a verdict in linear time; a decorated answer matches itself and never the next
number."""

import time
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.prompts.answer_text import without_thoughts
from common.prompts.stated_answers import MAX_ANSWER_CHARS, clean
from services.reward.answers.exact import quantity, same_answer
from services.reward.answers.extract import extract_answer, gold_answer
from services.reward.functions.answers import MathRewardFunction
from services.reward.functions.programs import MAX_SOURCE_CHARS, extract_program
from services.reward.functions.text import (
    FormatRewardFunction,
    LengthPenaltyFunction,
    RepetitionPenaltyFunction,
)
from tests.support.processes.fuzzed_service import SECONDS

pytestmark = pytest.mark.integration

EXAMPLES = 200 if not SECONDS else 200 * SECONDS
pieces = st.sampled_from(
    [
        *(
            "\\boxed{",
            "\\fbox {",
            "{",
            "}",
            "\\}",
            "\\\\",
            "####",
            "#",
            "<think>",
            "</think>",
            "$",
            "\\(",
            "\\)",
            "1",
            "-3",
            "x",
        ),
        *(
            "1,000",
            ".5",
            "1e9",
            "50%",
            "\\%",
            "```python\n",
            "```",
            "~~~",
            "\n",
            " ",
            "\t",
            "x",
            "\\text{cm}",
            "−",
            "٣",
        ),
        *(
            "1/3",
            "0.\\overline{3}",
            "2^{10}",
            "=",
            ",",
            "**",
            "_",
            "3 1/2",
            "1010_2",
            "\u2028",
            "\x00",
            "\\frac{1}{2}",
        ),
    ]
)
texts = st.lists(pieces | st.text(st.characters(codec="utf-8"), max_size=8), max_size=40).map(
    "".join
)
numbers = st.integers(-(10**12), 10**12)


@settings(max_examples=EXAMPLES, deadline=None)
@given(texts)
def test_any_text_has_an_answer_or_none_and_a_program_or_none(text: str) -> None:
    answer = extract_answer(text)
    assert answer is None or 0 < len(answer) <= MAX_ANSWER_CHARS
    gold = gold_answer(text)
    assert gold is None or 0 < len(gold) <= MAX_ANSWER_CHARS
    assert extract_answer(without_thoughts(text).replace("</think>", "")) == extract_answer(
        without_thoughts(text)
    )
    program = extract_program(text)
    assert program is None or 0 < len(program) <= MAX_SOURCE_CHARS
    assert clean(clean(text)) is not None


@settings(max_examples=EXAMPLES, deadline=None)
@given(texts, texts)
def test_numbers_are_compared_the_same_both_ways(gold: str, answer: str) -> None:
    a, b = clean(gold), clean(answer)
    if all(number and number[1] is None for number in map(quantity, (a, b))):
        assert {same_answer(a, b), same_answer(b, a)} != {True, False}
    if a:
        assert same_answer(a, a) is True


WAYS = [
    "{}",
    " {} ",
    "${}$",
    "\\({}\\)",
    "\\[{}\\]",
    "**{}**",
    "{}.",
    "\\${}",
    "{}.0",
    "+{}",
    "\\;{}\\,",
    "€{}",
    "`{}`",
    "{}%",
]


@settings(max_examples=EXAMPLES, deadline=None)
@given(numbers, st.sampled_from(WAYS))
def test_a_number_is_right_however_it_is_written_and_the_next_one_is_wrong(
    number: int, way: str
) -> None:
    shown = way.format(number)
    if way == "+{}" and number < 0:
        return
    for response in (f"So it is \\boxed{{{shown}}}", f"<think>7</think> So\n#### {shown}"):
        answer = extract_answer(response)
        assert answer is not None
        assert same_answer(str(number), answer) is True
        assert same_answer(str(number + 1), answer) is False
    assert same_answer(clean(f"{number:,}"), clean(shown)) is True


@settings(max_examples=EXAMPLES, deadline=None)
@given(numbers, st.integers(1, 10**9))
def test_fractions_are_exact(above: int, below: int) -> None:
    for way in ("{}/{}", "\\frac{{{}}}{{{}}}", "\\dfrac{{{}}}{{{}}}"):
        found = quantity(way.format(above, below))
        assert found is not None
        assert found[:2] == (Fraction(above, below), None)
    assert same_answer(f"{above}/{below}", f"{above + 1}/{below}") is False


@settings(max_examples=EXAMPLES, deadline=None)
@given(texts)
def test_the_other_functions_give_every_text_a_number(text: str) -> None:
    completions = [[{"role": "assistant", "content": text}]]
    assert FormatRewardFunction(["<think>"])(completions) in ([0.0], [1.0])
    assert -1 <= LengthPenaltyFunction(5, 10)(completions)[0] <= 0
    assert -1 < RepetitionPenaltyFunction(2)(completions)[0] <= 0


LONG = 400_000
HOSTILE: dict[str, Callable[[int], str]] = {
    "open box": lambda n: "\\boxed{" * (n // 7),
    "nested boxes": lambda n: "\\boxed{" * (n // 8) + "}" * (n // 8),
    "empty boxes": lambda n: "\\boxed{}" * (n // 8),
    "marks": lambda n: "####\n" * (n // 5),
    "headings": lambda n: "#### ab\n" * (n // 8),
    "thoughts": lambda n: "<think>" * (n // 7),
    "one long thought": lambda n: "<think>" + "x " * (n // 2),
    "digits": lambda n: "1" * n,
    "commas": lambda n: "1" + ",111" * (n // 4) + "1" + " " * 5000,
    "slashes": lambda n: "1/" * (n // 2) + "x" * 5000,
    "exponents": lambda n: "1e" * (n // 2) + "x" * 5000,
    "fractions": lambda n: "\\frac{1" * (n // 7) + "x" * 5000,
    "minus": lambda n: "-" * n,
    "fence": lambda n: "```" + "x" * n + "`",
    "fence and spaces": lambda n: "```" + " " * n + "`",
    "fences": lambda n: "```\n" * (n // 4),
    "spaces": lambda n: " " * n,
    "percent": lambda n: "\\boxed{1" + " " * n + "percent}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_grading_time_is_linear_in_the_text(name: str) -> None:
    """A quadratic algorithm would take minutes for the long text."""
    text = HOSTILE[name](LONG)
    completions = [[{"role": "assistant", "content": text}]]
    started = time.process_time()
    extract_answer(text)
    gold_answer(text)
    extract_program(text)
    FormatRewardFunction(["<think>"])(completions)
    RepetitionPenaltyFunction()(completions)
    assert time.process_time() - started < 20


@pytest.fixture(scope="module")
def math() -> Iterator[MathRewardFunction]:
    function = MathRewardFunction(workers=1, timeout_s=2.0)
    yield function
    function.close()


@pytest.mark.integration
@settings(max_examples=EXAMPLES // 10, deadline=None)
@given(st.lists(texts, min_size=8, max_size=8))
def test_the_math_reward_answers_for_any_texts(
    math: MathRewardFunction, responses: list[str]
) -> None:
    golds = [gold_answer(text) or "x+1" for text in reversed(responses)]
    golds = [gold if gold_answer(gold) else "x+1" for gold in golds]  # \boxed{ in a fence
    for score in math.scores(
        [[{"role": "assistant", "content": text}] for text in responses], ground_truth=golds
    ):
        assert score.status in ("ok", "unparsable", "unevaluated", "timeout", "died")
        assert (score.value is None) == (score.status in ("timeout", "died"))


@pytest.mark.integration
def test_expression_matches_itself_and_no_other(math: MathRewardFunction) -> None:
    expressions = [
        "x^2+1",
        "\\sqrt{2}",
        "(1,2)",
        "[0,1)",
        "\\{1,2\\}",
        "\\frac{\\pi}{3}",
        "2^{10}",
        "\\text{east}",
        "x=3",
    ]
    responses = [[{"role": "assistant", "content": f"\\boxed{{{text}}}"}] for text in expressions]
    assert math(responses, ground_truth=expressions) == [1.0] * len(expressions)
    assert math(responses, ground_truth=[*expressions[1:], expressions[0]]) == [0.0] * len(
        expressions
    )
    spaced = [
        [{"role": "assistant", "content": f"\\boxed{{ \\({text}\\) }}."}] for text in expressions
    ]
    assert math(spaced, ground_truth=expressions) == [1.0] * len(expressions)
