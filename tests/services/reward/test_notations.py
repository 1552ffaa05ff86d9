"""Notations that state the same answer, graded in this process, and the choice of a response's
final answer."""

import json
import random
import re
import time
from contextlib import suppress
from fractions import Fraction
from itertools import combinations

import pytest

from common.prompts.stated_answers import MAX_ANSWER_CHARS
from services.reward.answers.equivalence import verdict
from services.reward.answers.exact import same_answer
from services.reward.answers.extract import extract_answer, gold_answer
from tests.support.paths import ROOT, SHARED_DATA
from tests.support.services.verdicts import graded

NOTATIONS = ROOT / "tests" / "golden" / "notations.jsonl"
GSM8K, MATH500 = SHARED_DATA / "gsm8k", SHARED_DATA / "math500" / "test.jsonl"
FORMS = (
    "\\boxed{{{}}}",
    "#### {}",
    "The answer is {}.",
    "The answer is ${}$.",
    "So it must be:\n\n#### **${}$**",
)


def boxed(gold: str, answer: str) -> str:
    return graded(gold, f"So \\boxed{{{answer}}}")


def test_notations() -> None:
    rows = [json.loads(line) for line in NOTATIONS.read_text(encoding="utf-8").splitlines()]
    assert min(sum(row["correct"] is right for row in rows) for right in (True, False)) >= 300
    assert len({(row["gold"], row["answer"]) for row in rows}) == len(rows)
    found = [(row, boxed(row["gold"], row["answer"])) for row in rows]
    wrong = [
        (row["kind"], row["gold"], row["answer"], said)
        for row, said in found
        if (said == "right") != row["correct"]
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_equality_is_symmetric_and_every_gold_is_its_own_answer() -> None:
    rows = [json.loads(line) for line in NOTATIONS.read_text(encoding="utf-8").splitlines()]
    one_way = [
        (row["gold"], row["answer"])
        for row in rows
        if row["correct"]
        and boxed(row["answer"], row["gold"]) not in ("right", "unevaluated")  # √9 for 3
        and "(C) 12" not in row["answer"]
    ]
    assert not one_way, "\n".join(map(str, one_way))
    other = [
        (gold, form)
        for gold in {row["gold"] for row in rows}
        for form in FORMS
        if graded(gold, form.format(gold)) != "right"
    ]
    assert not other, "\n".join(map(str, other))


def test_numbers_in_random_notations() -> None:
    """The number itself is an independent reference."""
    rng = random.Random(1)
    ways = ("{0:,}", "{0}.0", "{0:e}", "+{0}", "{0} dollars", "\\${0}", "{0}\\%", "{0}^\\circ", "x = {0}",
            "{0} \\text{{ cm}}^2", "\\text{{{0}}}", "{0}\\,\\mathrm{{km/h}}", "√{2} = {0}")  # fmt: skip
    computations = (
        "\\frac{{{1}}}{{2}}",
        "{1}/2",
        "\\frac{{{1}}}2",
        "2·{0}/2",
        "√{2}",
        "{0} + 0",
        "1 + {3}",
    )
    for _ in range(300):
        number, way = rng.randint(2, 9_000), rng.choice(ways + computations)
        shown = way.format(number, 2 * number, number * number, number - 1)
        assert boxed(str(number), shown) == ("unevaluated" if way in computations else "right"), (
            shown
        )
        assert boxed(str(number + 1), shown) == "wrong", shown


@pytest.mark.parametrize(
    ("gold", "answers"),
    [
        (
            "23",
            [
                "5 + 18",
                "46/2",
                "\\frac{46}{2}",
                "20+3",
                "\\sqrt{529}",
                "23 \\cdot 1",
                "4!-1",
                "-(-23)",
                "|-23|",
                "23^1",
                "46:2",
            ],
        ),
        (
            "23",
            [
                "5 + 18 apples",
                "\\$5 + \\$18",
                "46/2 apples",
                "x = 5 + 18",
                "(B) 5+18",
                "\\{5+18\\}",
                "5+18 \\approx 23",
            ],
        ),
        (
            "23",
            [
                "23x^0",
                "5 + 18 + 0x",
                "\\int_0^{23} 1 dx",
                "\\sum_{i=1}^{23} 1",
                "2.3 \\times 10",
                "\\frac{-46}{-2}",
                "23+0i",
            ],
        ),
        (
            "\\frac{7}{12}",
            ["\\frac13+\\frac14", "\\frac{7}{\\sqrt{144}}", "7:12 \\cdot 1"],
        ),
        ("12.5", ["25/2 + 0", "1.25 \\cdot 10"]),
        ("(1, \\sqrt{2})", ["(3-2, \\sqrt2)", "(2/2, \\sqrt{2})"]),
        ("[1, 4)", ["[1, 8/2)", "1 \\le x < 2^2"]),
        ("3, 5", ["5, 6/2", "\\{2+1, 5\\}", "x=3 or x=\\sqrt{25}"]),
        (
            "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
            ["\\begin{pmatrix} 1 \\\\ 1+1 \\end{pmatrix}"],
        ),
        ("x=5", ["x = 10/2", "10/2"]),
    ],
)
def test_computation_is_not_a_number(gold: str, answers: list[str]) -> None:
    assert {answer: boxed(gold, answer) for answer in answers} == dict.fromkeys(
        answers, "unevaluated"
    )


@pytest.mark.parametrize(
    ("gold", "answers"),
    [
        (
            "23",
            [
                "5+18=23",
                "23 = 5 + 18",
                "x = 46/2 = 23",
                "2.3 \\times 10^1",
                "2.3e1",
                "23/1",
                "23.0",
                "23\\%",
                "(B) 23",
            ],
        ),
        ("0.5", ["\\frac12", "1/2", "½", ".5", "5 \\times 10^{-1}", "\\frac{5}{10^1}"]),
        ("-0.75", ["-\\frac{3}{4}", "\\frac{-3}{4}", "3/-4", "-3/4", "-.75"]),
        ("1500", ["1.5 \\times 10^3", "-(-1500) = 1500", "1,500", "1.5 thousand", "125 dozen"]),
        ("10^{-20}", ["\\frac{1}{10^{20}}", "1e-20", "10^{-20}"]),
        ("\\frac{7}{12}", ["\\frac{84}{144}", "14/24", "84:144"]),
        ("2.5", ["2\\frac12", "2 1/2", "5/2", "2 hours 30 minutes"]),
        ("2^{10}", ["2^{10}", "1024", "2^5 \\cdot 2^5"]),
        ("\\frac{75}{100}", ["3/4", "75/100", ".75", "6/8"]),
        ("3:4", ["6:8", "3/4", "0.75"]),
        ("2\\pi", ["\\pi+\\pi", "4\\pi/2"]),
        ("2+3i", ["3i+2", "(1+1)+3i"]),
        ("x^2+2x", ["x(x+2)", "x^2+x+x"]),
        ("301!!", ["301 \\cdot 299!!"]),
    ],
)
def test_a_number_is_right_in_any_notation_and_a_gold_that_is_a_computation_in_any_form(
    gold: str, answers: list[str]
) -> None:
    assert {answer: boxed(gold, answer) for answer in answers} == dict.fromkeys(answers, "right")


def test_random_computations_earn_nothing() -> None:
    """Python's own arithmetic is an independent reference."""
    rng = random.Random(2)

    def computation(depth: int) -> str:
        if depth == 0 or rng.random() < 0.3:
            return str(rng.randint(1, 30))
        return f"({computation(depth - 1)} {rng.choice('+-*/')} {computation(depth - 1)})"

    for _ in range(200):
        text = f"{computation(2)} {rng.choice('+-*')} {computation(2)}"
        with suppress(ZeroDivisionError):
            value = eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction})  # noqa: S307
            assert boxed(str(value), text) == "unevaluated", (value, text)
            assert boxed(str(value), f"{text} = {value}") == "right", (value, text)
            assert boxed(str(value + 1), text) == "wrong", (value, text)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("The probability is 2/3.", "2/3"),
        ("The probability is \\frac{2}{3}.", "\\frac{2}{3}"),
        ("So he has $14{,}916$.", "14{,}916"),
        ("It took 3 1/2 hours.", "3 1/2 hours"),
        ("That makes 5 million.", "5 million"),
        ("The area is $2\\sqrt{3}$.", "2\\sqrt{3}"),
        ("The area is 3√2.", "3√2"),
        ("It goes 5→10.", "5→10"),
        ("We get $x = \\frac{1}{2}$.", "\\frac{1}{2}"),
        ("The answer is a/b.", "a/b"),
        ("The final answer is $\\text{east}$.", "\\text{east}"),
        ("**Answer:** 42", "42"),
        ("The answer is 18 because 3 + 15 = 18.", "18"),
        ("The answer is 5 or more.", "5 or more"),
        ("The answer is found by adding 3 and 4, which is 7.", "7"),
        ("So \\boxed{42}.\n\n#### 2. Check", "42"),
        ("So \\boxed{42}.\n\n#### **2) Check**\n2 + 40", "42"),
        ("#### 3. Result\nThe answer is 42.", "42"),
        ("#### Result\n42", "42"),
        ("#### Step 2: add\n42", "42"),
        ("#### 2 Check the result\nIt is 7.", "7"),
        ("#### 42.", "42"),
        ("#### 18 dollars\nThat was easy: 2 steps.", "18 dollars"),
        ("So it is\n#### east", "east"),
        ("#### Answer: 42", "42"),
        ("\\boxed{42}\n#### Conclusion", "42"),
    ],
)
def test_final_answer_is_found_in_a_response(response: str, answer: str) -> None:
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    "answer",
    [
        "7|8",
        "5→10",
        "5 ☃ 3",
        "5 below zero",
        "5 or more",
        "5 is wrong",
        "5 blorp",
        "7 ⇒ 8",
        "7 ⊕ 1",
        "5 squared",
        "18 maybe",
    ],
)
def test_answer_that_is_not_understood_is_unparsable_and_never_shortened(answer: str) -> None:
    assert boxed(answer[0], answer) == "unparsable"
    assert boxed(answer, answer) == "right"


@pytest.mark.parametrize(
    "piece",
    [
        "(",
        "x_",
        "1 cm ",
        "\\frac",
        "√",
        "2^",
        "\\text{a}",
        "1,",
        "x=",
        "±",
        "\\{",
        "a b ",
        "1<",
        "\\sin",
        "[1,",
        "-",
        "é",
    ],
)
def test_long_answers_are_read_in_bounded_time(piece: str) -> None:
    started = time.process_time()
    text = (piece * MAX_ANSWER_CHARS)[:MAX_ANSWER_CHARS]
    for answer in (text, "1 " + text[2:], text + ")"):
        verdict("18", answer)
        same_answer("18", answer)
    assert time.process_time() - started < 20


@pytest.mark.skipif(not MATH500.is_file(), reason="the MATH-500 file is not here")
def test_real_math500_golds_are_their_own_answers_in_every_form_and_no_others() -> None:
    golds = sorted(
        {json.loads(line)["answer"] for line in MATH500.read_text(encoding="utf-8").splitlines()}
    )
    wrong = [
        (gold, form)
        for gold in golds
        for form in FORMS
        if graded(gold, form.format(gold)) != "right"
    ]
    assert not wrong, "\n".join(map(str, wrong))
    pairs = random.Random(0).sample(list(combinations(golds, 2)), 3000)
    equal = {pair for pair in pairs if "right" in (boxed(*pair), boxed(*reversed(pair)))}
    true = {
        ("(-2,1)", "-2,1"),
        ("-2,1", "1,-2"),
        ("10,\\!080", "10080"),
        ("15", "15\\mbox{ cm}^2"),
        ("5", "x=5"),
    }
    unlike = [
        pair
        for pair in equal - true
        if "circ" not in pair[1] and pair[1].replace("{", "").replace(" ", "") not in pair[0]
    ]
    assert len(equal) < 12, equal
    assert not [
        pair
        for pair in unlike
        if pair not in {("2 \\sqrt{5}", "2\\sqrt{5}"), ("\\frac14", "\\frac{1}{4}")}
    ]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")
def test_real_gsm8k_golds_in_percent_and_in_a_sentence() -> None:
    for line in (GSM8K / "test.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        gold = gold_answer(row["answer"]) or ""
        for form in (
            "\\boxed{{{}\\%}}",
            "#### {}%",
            "The answer is {}%.",
            "The answer is {}.",
            "The answer is {} percent.",
        ):
            assert graded(gold, form.format(gold)) == "right", (gold, form)
            assert graded(gold, form.format(int(gold.replace(",", "")) + 1)) == "wrong", (
                gold,
                form,
            )
