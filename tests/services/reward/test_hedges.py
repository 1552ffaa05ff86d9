"""No answer matches two different ground truths; every honest answer is compared with all (minutes
on two cores)."""

import json
import logging
from collections import defaultdict
from multiprocessing import get_context

import pytest
from math_verify import parse, verify

from services.reward.answers.equivalence import verdict
from services.reward.answers.exact import same_answer
from services.reward.answers.extract import extract_answer, gold_answer
from tests.support.paths import ROOT, SHARED_DATA

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NOTATIONS = ROOT / "tests" / "golden" / "notations.jsonl"
GSM8K, MATH500 = SHARED_DATA / "gsm8k" / "test.jsonl", SHARED_DATA / "math500" / "test.jsonl"
EQUAL = (
    ("(-8)^{1/3}", "-2"), ("(-\\infty,-1]\\cup[1,\\infty)", "x\\le -1\\text{ or }x\\ge 1"), ("(1+i)^2", "\\sqrt{-4}"),
    ("(2,\\infty)", "\\{x|x>2\\}"), ("(2,\\infty)", "t > 2"), ("+\\infty", "∞"), ("-1", "e^{i\\pi}"), ("-3", "–3"),
    ("0.5", "½"), ("0.\\overline{9}", "1"), ("1½", "\\frac{3}{2}"), ("2 < x < 5", "x > 2 \\text{ and } x < 5"),
    ("2\\sqrt{3}\\text{ units}", "2√3"), ("3:30", "\\text{3:30 p.m.}"), ("5", "\\underline{5}"), ("5", "|3+4i|"),
    ("A=5", "AB=5"), ("A=5", "x=5"), ("\\frac{2}{3}", "⅔"), ("\\frac{\\sqrt{3}}{2}", "√(3)/2"), ("\\sin x", "sin x"),
    ("\\sin x", "sinx"), ("a=1,b=2", "x=1,y=2"), ("abs(x)", "|x|"), ("(x,y)=(1,2)", "a=1,b=2"), ("(\\$5)", "5"),
    ("–3", "−3"), ("1½", "1 \\frac{1}{2}"), ("1½", "1.5 hours"), ("5", "5 boys"), ("0.\\overline{3}", "1/3"),
    ("\\frac{3}{2}", "1 hour 30 minutes"), ("10^-2", "\\frac{1}{100}"),
    ("18.90", "\\$\\text{18.90}"), ("5.5", "5 feet 6 inches"), ("5.5", "5 ft 6 in"), ("5.5", "5\\text{ feet }6\\text{ inches}"),
    ("7 3/4", "7\\frac{3}{4}"), ("7*sin(pi*x/5)+1", "7\\sin\\left(\\frac{\\pi x}{5}\\right)+1"), ("\\pi r^2", "pi*r^2"),
    ("5", "\\color{red}{5}"), ("(1,2)", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ("\\emptyset", "\\text{no solution}"),
)  # fmt: skip
"""Pairs of equal ground truths, one of which math-verify reads differently."""
LEFT_OUT = (
    ("0.5", "30\\text{ minutes}"), ("1", "1000\\text{ m}"), ("1", "60\\text{ km/h}"), ("120", "2 hours"),
    ("24", "1\\text{ day}"), ("6", "864 \\mbox{ inches}^2"), ("20", "5\\text{ gallons}"), ("\\frac{1}{4}", "25\\text{ cents}"),
    ("40", "3\\text{ ft } 4\\text{ in}"), ("50", "5\\text{ cm}"), ("12", "\\textbf{(B) } 12"), ("12", "\\text{(B)}"),
    ("12", "\\text{(C)}"), ("\\textbf{(B) } 12", "\\text{(B)}"), ("1,-2", "(-2,1)"),
    ("12", "\\text{C}"), ("200", "3 hours 20 minutes"), ("500", "\\$5"), ("\\frac{3}{2}", "90 minutes"),
    ("66", "5\\text{ feet }6\\text{ inches}"),
    ("10000", "10\\text{ L}"), ("7200", "2 hours"), ("25", "(x-3)^2+(y+2)^2=25"),
    ("25\\text{ cents}", "(x-3)^2+(y+2)^2=25"),
    ("4", "x^2+y^2=4"), ("3", "y=2x+3"),
)  # fmt: skip
"""Pairs of ground truths, one of which states what answers may omit: a unit, an option,
brackets."""
Pair = tuple[str, str]


def matched(answer: Pair, golds: list[str]) -> list[Pair]:
    """Returns pairs of the answer's own ground truth and another one that it matches too."""
    given, own = extract_answer(f"\\boxed{{{answer[0]}}}"), answer[1]
    assert given is not None
    logging.disable(logging.WARNING)
    found = []
    for gold in golds:
        cleaned = gold_answer(gold) or ""
        same = same_answer(cleaned, given)
        if same or (same is None and verdict(cleaned, given) == "right"):
            found.append((own, gold))
    return found


def read(gold: str) -> list[object]:
    return list(parse(f"${gold}$", parsing_timeout=None))


def test_no_answer_is_right_for_two_ground_truths_that_differ() -> None:
    rows = [json.loads(line) for line in NOTATIONS.read_text(encoding="utf-8").splitlines()]
    rows = [
        row for row in rows if row["kind"] != "computations"
    ]  # their values are ground truths too
    golds = {row["gold"] for row in rows}
    if MATH500.is_file():
        golds |= {
            json.loads(line)["answer"] for line in MATH500.read_text(encoding="utf-8").splitlines()
        }
    if GSM8K.is_file():
        solutions = [
            json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()
        ]
        golds |= {solution.rpartition("####")[2].strip() for solution in solutions}
    answers = {(row["answer"], row["gold"]) for row in rows if row["correct"]} | {
        (gold, gold) for gold in golds
    }
    with get_context("spawn").Pool(2) as pool:
        found = pool.starmap(
            matched, [(answer, sorted(golds)) for answer in sorted(answers)], chunksize=8
        )
    pairs = {pair for each in found for pair in each if pair[0] != pair[1]}

    classes: dict[str, set[str]] = defaultdict(set)  # classes of equal ground truths
    readings = {gold: read(gold) for pair in pairs for gold in pair}
    equal = {(a, b) for a, b in pairs if verify(readings[a], readings[b], timeout_seconds=None)}
    for a, b in {*equal, *EQUAL}:
        merged = classes[a] | classes[b] | {a, b}
        for gold in merged:
            classes[gold] = merged

    def left_out(a: str, b: str) -> bool:
        return any(
            (a in classes[x] | {x} and b == y) or (b in classes[x] | {x} and a == y)
            for x, y in LEFT_OUT
        )

    different = sorted((a, b) for a, b in pairs if b not in classes[a] and not left_out(a, b))
    assert not different, "\n".join(map(str, different))
