"""Verdicts on the golden cases, and on every real answer of GSM8K and MATH-500 in ten notations."""

import json
import re

import pytest

from common.settings.rewards import MathReward
from common.settings.sections import RewardSection
from common.wire.schemas import MAX_BATCH_ITEMS, RewardItem
from services.reward.answers.exact import quantity, same_answer
from services.reward.answers.extract import extract_answer, gold_answer
from services.reward.service import RewardService
from tests.support.paths import ROOT, SHARED_DATA
from tests.support.services.verdicts import graded

pytestmark = pytest.mark.integration

GOLDEN = ROOT / "tests" / "golden" / "rewards.jsonl"
LISTS = ROOT / "tests" / "golden" / "lists_and_notes.jsonl"
GSM8K, MATH500 = SHARED_DATA / "gsm8k", SHARED_DATA / "math500" / "test.jsonl"
NUMBER_NOTATIONS = (
    "\\boxed{{{}}}", "#### {}", "####{}", "#### ${}", "#### **{}**", "#### {}.", "The answer is ${}.",
    "\\[ \\fbox{{ {}.00 }} \\]",
    "\\boxed{{{}\\text{{ dollars}}}}", "<think>\\boxed{{-1}}</think>$\\boxed{{\\${}}}$",
)  # fmt: skip
NOTATIONS = (
    "\\boxed{{{}}}", "So the answer is $\\boxed{{{}}}$.", "\\[ \\boxed{{ {} }} \\]", "\\fbox{{{}}}", "#### {}", "####{}",
    "#### **${}$**.",
    "<think>\\boxed{{7777}}</think>\\boxed{{{}}}", "\\boxed{{7777}} no: \\boxed{{{}}}", "\\boxed{{\\displaystyle {}}}",
)  # fmt: skip


async def test_golden_cases() -> None:
    cases = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    assert len(cases) >= 300
    assert len({(case["response"], case["ground_truth"]) for case in cases}) == len(cases)
    assert (
        min(sum(case["correct"] for case in cases), sum(not case["correct"] for case in cases))
        > 100
    )
    items = [
        RewardItem(response=case["response"], ground_truth=case["ground_truth"]) for case in cases
    ]
    async with RewardService(RewardSection(functions=[MathReward(timeout_s=20)])) as grader:
        results = await grader.score(items)
    wrong = [
        f"{case['why']}: {case['response']!r} against {case['ground_truth']!r} gave {result}"
        for case, result in zip(cases, results, strict=True)
        if result.correct != case["correct"]
        or result.status not in ("ok", "unparsable", "unevaluated")
        or result.reward != float(case["correct"])
    ]
    assert not wrong, "\n".join(wrong)


LAYOUTS = (
    "Answer:\n{lines}", "**Answer:**\n\n{lines}\n", "## Final Answer\n\n{bullets}", "Answer:\n{bullets}",
    "Answer:\n{numbers}", "Solution:\n{numbers}", "<answer>\n{bullets}\n</answer>", "{bullets}",
    "Answer:\n{but_last}\n\n{last}", "**Step by step:**\n{but_last}\n\n{last}",
)  # fmt: skip


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_solution_has_one_verdict_in_every_layout(layout: str) -> None:
    for text in (GSM8K / "test.jsonl").read_text(encoding="utf-8").splitlines()[:150]:
        solution, gold = json.loads(text)["answer"].split("####")
        lines = [line for line in re.sub("<<.*?>>", "", solution).splitlines() if line.strip()]
        bullets = [f"- {line}" for line in lines]
        response = layout.format(
            lines="\n".join(lines),
            bullets="\n".join(bullets),
            numbers="\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1)),
            but_last="\n".join(bullets[:-1]),
            last=lines[-1],
        )
        said = graded(gold.strip(), response)
        assert said == graded(gold.strip(), "\n".join(lines)), f"{response!r}: {said}"


def test_lists_and_notes_as_an_author_wrote_them_who_had_not_seen_the_rules() -> None:
    cases = [json.loads(line) for line in LISTS.read_text(encoding="utf-8").splitlines()]
    assert len(cases) > 400
    wrong = [
        f"{case['kind']}: {case['response']!r} against {case['gold']!r} gave {said}"
        for case in cases
        if ((said := graded(case["gold"], case["response"])) == "right") != case["right"]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")
@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.slow), "test"])
def test_real_gsm8k_golds_verify_against_themselves_and_gold_plus_one_never_does(
    split: str,
) -> None:
    lines = (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        solution = json.loads(line)["answer"]
        gold = gold_answer(solution)
        assert gold is not None, solution
        value = int(gold.replace(",", ""))
        assert same_answer(gold, extract_answer(solution) or "") is True, solution
        for notation in NUMBER_NOTATIONS:
            for number in (str(value), f"{value:,}"):
                assert same_answer(gold, extract_answer(notation.format(number)) or "") is True, (
                    notation,
                    number,
                )
            assert same_answer(gold, extract_answer(notation.format(value + 1)) or "") is False, (
                notation,
                value + 1,
            )


@pytest.mark.skipif(not MATH500.is_file(), reason="the MATH-500 file is not here")
async def test_real_math500_golds_verify_against_themselves_and_gold_plus_one_never_does() -> None:
    items, right = [], []
    for row in map(json.loads, MATH500.read_text(encoding="utf-8").splitlines()):
        gold = row["answer"]
        number = quantity(gold)
        more = str(number[0] + 1) if number and number[1] is None else f"{gold}+1"
        answers = [(row["solution"], True)]
        answers += [
            (notation.format(said), said == gold) for notation in NOTATIONS for said in (gold, more)
        ]
        items += [RewardItem(response=response, ground_truth=gold) for response, _ in answers]
        right += [correct for _, correct in answers]
    async with RewardService(RewardSection(functions=[MathReward(timeout_s=30)])) as grader:
        parts = [items[i : i + MAX_BATCH_ITEMS] for i in range(0, len(items), MAX_BATCH_ITEMS)]
        results = [result for part in parts for result in await grader.score(part)]
    assert len(items) == 500 * (1 + 2 * len(NOTATIONS))
    wrong = [
        f"{item.response[-200:]!r} against {item.ground_truth!r} gave {result.extracted_answer!r} {result.status}"
        for item, result, correct in zip(items, results, right, strict=True)
        if result.reward != float(correct)
    ]
    assert not wrong, "\n".join(wrong)
