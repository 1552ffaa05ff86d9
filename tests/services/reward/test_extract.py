"""Extraction and exact comparison on hand-made and random text."""

import random
import time
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.prompts.stated_answers import MAX_ANSWER_CHARS, clean
from services.reward.answers.exact import quantity, same_answer
from services.reward.answers.extract import extract_answer, gold_answer
from tests.support.services.verdicts import graded

PIECES = st.sampled_from(
    ["\\boxed{", "\\fbox{", "{", "}", "\\{", "\\\\", "####", "\n", "<think>", "</think>", "\\frac", "$", "1,080", "-", ".", "%",
     "/", "e99", "e999999999", "٣", "²", "\ud800", "𝟙", "**", "\\(", "\\)", " ", "0"]
)  # fmt: skip


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("#### $42", "$42"),
        ("####42", "42"),
        ("#### **42**", "42"),
        ("#### 42.", "42"),
        ("#### 1,080", "1,080"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("<think>\\boxed{1}</think>", None),
        ("\\boxed{}", None),
        ("", None),
        ("no number", None),
        ("-5", "-5"),
        ("7 - 5", None),  # a computation without its value
        ("He has -5", "-5"),
        ("3 * 4 = 12 = \\)", "12"),
        ("1=\\}", "1"),
        ("\\boxed{" + "1" * MAX_ANSWER_CHARS + "}", "1" * MAX_ANSWER_CHARS),
        ("\\boxed{" + "1" * (MAX_ANSWER_CHARS + 1) + "}", None),
        ("#### " + "1" * (MAX_ANSWER_CHARS + 1), None),
        ("1" * 100_000, None),
        ("7 " + "x" * 100_000, "7"),
    ],
)
def test_extract_answer(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


@pytest.mark.parametrize("label", ["Answer:", "Final Answer:", "**Answer:**", "The answer is"])
@pytest.mark.parametrize("end", ["", " ", "\n", "\n\n"])
@pytest.mark.parametrize("said", ["\\boxed{5}", "So 2+3 = 5.", "#### 5", "The answer is 5."])
def test_a_label_that_states_nothing_changes_nothing(said: str, label: str, end: str) -> None:
    assert graded("5", f"{said}\n\n{label}{end}") == "right"


_LABELS = (
    "Answer:",
    "## Answer\n",
    "**Final Answer:**",
    "So the answers are:",
    "The roots are:",
    "<answer>",
)


@pytest.mark.parametrize("label", _LABELS)
@pytest.mark.parametrize("mark", ["-", "*", "•"])
@pytest.mark.parametrize("item", ["{}", "x = {}", "${}$", "**{}**", "{}."])
def test_the_lines_of_a_list_are_one_answer(label: str, mark: str, item: str) -> None:
    for values in ([5], [5, 7], [7, 5, 11]):
        lines = "".join(f"\n{mark} {item.format(value)}" for value in values)
        text = f"We solve 3 equations.\n{label}{lines}" + ("\n</answer>" if "<" in label else "")
        said = f"{text!r}: {extract_answer(text)!r}"
        assert graded(", ".join(map(str, sorted(values))), text) == "right", said
        for other in (*values[len(values) == 1 :], -values[0]):  # a part, and its mark as a sign
            assert graded(str(other), text) != "right", said


@pytest.mark.parametrize(
    "template", ["Answer: {}", "#### {}", "\\boxed{{{}}}", "So she pays {} then."]
)
@pytest.mark.parametrize("sign", ["*", "+", "-", "/", "x"])
def test_a_computation_after_its_value_is_a_note(template: str, sign: str) -> None:
    rng = random.Random(f"{template} {sign}")
    for _ in range(10):
        b = rng.randint(2, 9)
        a = b * rng.randint(2, 9)
        value = {"*": a * b, "x": a * b, "+": a + b, "-": a - b, "/": a // b}[sign]
        text = template.format(f"{value} ({a} {sign} {b})")
        assert graded(str(value), text) == "right", text
        assert graded(str(value + 1), text) != "right", text
        # It is not a computation of the value, and may be a factor.
        text = template.format(f"{value + 1} ({a} {sign} {b})")
        assert graded(str(value), text) != "right", text


@pytest.mark.parametrize("gold", ["", "  ", "$", ".", "****", "x" * (MAX_ANSWER_CHARS + 1)])
def test_a_gold_without_an_answer_is_none(gold: str) -> None:
    assert gold_answer(gold) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,080.50", Fraction(2161, 2)),
        ("-.5", Fraction(-1, 2)),
        ("1e-3", Fraction(1, 1000)),
        ("12.5\\%", None),
        ("-\\dfrac{6}{-4}", Fraction(3, 2)),
        ("2\\frac{1}{4}", Fraction(9, 4)),
        ("1e9999", None),
        ("1/0", None),
        ("1,08", None),
        (".", None),
        ("", None),
        ("inf", None),
        ("nan", None),
        ("٣", None),
        ("²", None),
        ("3½", Fraction(7, 2)),
        ("4.5 \\times 10^{3}", Fraction(4500)),
        ("10^-2", Fraction(1, 100)),
        ("0.1\\overline{6}", Fraction(1, 6)),
        ("5 million", Fraction(5_000_000)),
        ("5^{th}", Fraction(5)),
        ("11,\\! 111", Fraction(11111)),
        ("1:2:3", None),
        ("2 1", None),
    ],
)
def test_quantity(text: str, value: Fraction | None) -> None:
    found = quantity(text)
    assert (found[0] if found and found[1] is None else None) == value


@given(st.one_of(st.text(), st.lists(PIECES).map("".join)))
@example("\\boxed{\ud800}")
@example("1e999999999")
def test_no_text_makes_extraction_or_comparison_raise(text: str) -> None:
    answer = extract_answer(text)
    assert answer is None or (0 < len(answer) <= MAX_ANSWER_CHARS and answer == answer.strip())
    gold = gold_answer(text)
    same_answer(gold or "1", answer or "2")
    same_answer(clean(text), "1")
    quantity(text[:MAX_ANSWER_CHARS])


@given(st.fractions(), st.fractions())
def test_fractions_are_equal_exactly_when_they_are(a: Fraction, b: Fraction) -> None:
    assert same_answer(
        f"\\frac{{{a.numerator}}}{{{a.denominator}}}", f"{b.numerator}/{b.denominator}"
    ) is (a == b)


@given(st.integers(), st.integers(-2, 2))
def test_integers_are_equal_exactly_when_they_are(value: int, more: int) -> None:
    assert same_answer(str(value), extract_answer(f"\\boxed{{\\${value + more:,}}}") or "") is (
        more == 0
    )


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{",
        "{",
        "}",
        "\\",
        "####",
        "#### a\n",
        "\\boxed{}",
        "<think>",
        "1,",
        "1 ",
        "-",
        "\\boxed {",
        "1.1",
        "$",
        "\n",
        "The answer is ",
        "answer to ",
        "the answer is not 3, or 5. ",
        "<answer>1</answer>",
        "Wait, that is wrong. ",
        "But 8, ",
        "(but is ",
        ". No, I mean 8 a b c d ",
        "5 or ",
        "```\\boxed{1}",
        "<!--",
        "\n- 1",
        "\n* ",
        "Answer:\n- 1\n",
        "1 (9 * 2) ",
        "1 (2",
    ],
)
def test_long_repetitive_text_is_read_in_linear_time(piece: str) -> None:
    """The longest takes two seconds; a quadratic algorithm would take half a minute on 100,000
    characters."""
    start = time.process_time()
    for text in (piece * (100_000 // len(piece)), "\\boxed" + piece * 20_000 + "}" * 20_000):
        extract_answer(text)
        gold_answer(text)
    assert time.process_time() - start < 8


@pytest.mark.parametrize(
    "piece", ["1,", "1", "\\frac{1}", " ", "1 ", "a ", "ab ", "-", "\\,", "*", "1/", "\\(", "**a"]
)
def test_answers_at_the_cap_are_compared_quickly(piece: str) -> None:
    start = time.process_time()
    text = (piece * MAX_ANSWER_CHARS)[:MAX_ANSWER_CHARS]
    for answer in (text, "1 " + text, "1" + text + "!", "\\frac{" + text + "}{2}"):
        same_answer("18", clean(answer))
    assert time.process_time() - start < 5
