"""Verdicts: the golden cases, and every real GSM8K answer in several notations."""

import json
from pathlib import Path

import pytest

from common.schemas import RewardItem
from common.sections import RewardSection
from services.reward.exact import same_answer
from services.reward.extract import extract_answer, gold_answer
from services.reward.scorer import Scorer

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "rewards.jsonl"
GSM8K = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"
NOTATIONS = ("\\boxed{{{}}}", "#### {}", "####{}", "#### ${}", "#### **{}**", "#### {}.", "The answer is ${}.")


async def test_golden_cases() -> None:
    cases = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    assert len(cases) >= 120
    items = [RewardItem(response=case["response"], ground_truth=case["ground_truth"]) for case in cases]
    async with Scorer(RewardSection(timeout_s=20)) as grader:
        results = await grader.score(items)
    wrong = [
        f"{case['why']}: {case['response']!r} against {case['ground_truth']!r} gave {result}"
        for case, result in zip(cases, results, strict=True)
        if result.correct != case["correct"]
        or result.status not in ("ok", "unparsable")
        or result.reward != float(case["correct"])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")
@pytest.mark.parametrize("split", ["train", "test"])
def test_real_gsm8k_golds_verify_against_themselves_and_gold_plus_one_never_does(split: str) -> None:
    lines = (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines:
        solution = json.loads(line)["answer"]
        gold = gold_answer(solution)
        assert gold is not None, solution
        value = int(gold.replace(",", ""))
        assert same_answer(gold, extract_answer(solution) or "") is True, solution
        for notation in NOTATIONS:
            for number in (str(value), f"{value:,}"):
                assert same_answer(gold, extract_answer(notation.format(number)) or "") is True, (notation, number)
            assert same_answer(gold, extract_answer(notation.format(value + 1)) or "") is False, (notation, value + 1)
