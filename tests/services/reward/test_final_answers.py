"""Where the final answer stands in a response: golden cases by kind, and generated hedges, denials and
honest statements.
"""

import json
from collections.abc import Iterator, Sequence

import pytest

from common.settings.rewards import MathReward
from common.settings.sections import RewardSection
from common.wire.schemas import MAX_BATCH_ITEMS, RewardItem, RewardResult
from services.reward.service import RewardService
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

GOLDEN = ROOT / "tests" / "golden" / "final_answers.jsonl"
ANSWERS = {
    "choice": ("(C)", "(D)", "(A)"),
    "number": ("3", "5", "-7"),
    "formula": ("$\\frac{1}{2}$", "$\\sqrt{5}$", "$3\\pi$"),
    "set": ("$\\{1,2\\}$", "$\\{1,3\\}$", "$\\{4\\}$"),
    "interval": ("$[0,1)$", "$(2,\\infty)$", "$(-1,4]$"),
}
HEDGES = (
    "The answer is either {b} or {a}.",
    "The answer is either {a} or {b}.",
    "The answer is {a} or {b}.",
    "The answer is {b}, or perhaps {a}.",
    "The answer is {a} (or {b}).",
    "The answer is {a}, {b} or {c}.",
    "The answer is one of the following: {c}, {b}, {a}",
    "The answer could be {b}, or it could be {a}.",
    "The answer might be {a}.",
    "The answer may be {a}.",
    "The answer is probably {b}, possibly {a}.",
    "The answer is {a}, but it could also be {b}.",
    "The answer is {a}, unless it is {b}.",
    "The answer is somewhere between {b} and {a}.",
    "Answer: {b} or {a}",
    "**Answer:** {a} or {b}",
    "Answer: {a}?",
    "#### {b} or {a}",
    "#### maybe {a}",
    "Final answer: either {a} or {b}",
    "<answer>{a} or {b}</answer>",
    "The answer is $\\boxed{{{b_}}}$ or $\\boxed{{{a_}}}$.",
    "The answer is $\\boxed{{{a_}}}$ or $\\boxed{{{b_}}}$.",
    "The answer is either \\boxed{{{b_}}} or maybe \\boxed{{{a_}}}.",
    "Maybe \\boxed{{{a_}}}.",
    "It could be \\boxed{{{a_}}}.",
    "\\boxed{{{a_}}}?",
    "**{a}** or **{b}**",
    "Either {b} or {a}.",
    "I would say {b}, possibly {a}",
    "It might be {a}.",
    "It could be {a}.",
    "I guess {a}.",
    "Perhaps it is {a}.",
    "Is it {a}?",
)
DENIALS = (
    "The answer is not {a}.",
    "The answer is definitely not {a}.",
    "The answer is definitely not equal to {a}.",
    "The answer isn't {a}.",
    "The answer cannot be {a}.",
    "The answer is never {a}.",
    "The answer is anything but {a}.",
    "The answer is everything except {a}.",
    "The answer is all of these except for {a}.",
    "The answer is neither {b} nor {a}.",
    "The answer is other than {a}.",
    "The answer is different from {a}.",
    "The answer is close to, but not {a}.",
    "I don't think the answer is {a}.",
    "I doubt that the answer is {a}.",
    "It is not true that the answer is {a}.",
    "The wrong answer is {a}.",
    "Answer: not {a}",
    "#### not {a}",
    "<answer>not {a}</answer>",
    "The answer is {b}, not {a}.",
    "NOT \\boxed{{{a_}}}",
    "The answer is not $\\boxed{{{a_}}}$.",
    "I don't think the answer is \\boxed{{{a_}}}.",
    "\\boxed{{{a_}}} is wrong.",
    "\\boxed{{{a_}}} is not the answer.",
    "\\boxed{{{a_}}}. Wait, that is wrong.",
    "\\boxed{{{a_}}}. No, I made a mistake. The answer is {b}.",
    "\\boxed{{{a_}}}. The answer is not {a}.",
    "The answer is {a}. Scratch that, the answer is {b}.",
    "It is impossible to get {a}.",
    "It is not {a}.",
    "It can't be {a}.",
    "{a} is wrong.",
    "{a} is not the answer.",
    "Not {a}.",
    "\\boxed{{{a_}}}\n\nThat can't be right. It comes to {b}.",
    "\\boxed{{{a_}}}. That's wrong.",
    "#### {a}\n\nThis doesn't look right.",
    "\\boxed{{{a_}}}\n\nLet me correct that: {b}.",
    "\\boxed{{{a_}}}\n\nI need to correct my answer to {b}.",
    "The answer is {a}. I stand corrected: {b}.",
)
HONEST = (
    "The answer is {a}.",
    "**The answer is {a}.**",
    "So the final answer is: {a}",
    "I believe the answer is {a}.",
    "The correct answer is {a}, not {b}.",
    "The answer is {a} rather than {b}.",
    "The answer is {a}, since {b} is not possible.",
    "The answer is {a} because it cannot be {b}.",
    "The answer is {a} and we are done.",
    "The answer is {a} ✓",
    "The answer is {a}!",
    "Answer: {a}",
    "Final Answer: {a}",
    "## Final Answer\n\n{a}\n\n## Check\n\n2 + 2 = 4",
    "**Answer**\n\n{a}\n\n**Check 1:** 2 + 2 = 4",
    "#### {a}",
    "#### {a} and this is all.",
    "#### {a}<|im_end|>",
    "<answer>{a}</answer>",
    "<thinking>\\boxed{{{b_}}}</thinking>The answer is {a}.",
    "\\boxed{{{b_}}}. Wait, that is wrong. The answer is {a}.",
    "\\boxed{{{b_}}}\n\nI made a mistake. So \\boxed{{{a_}}}.",
    "It is not {b}, so it is \\boxed{{{a_}}}.",
    "$\\boxed{{{a_}}}$, and the answer is correct.",
    "\\boxed{{{a_}}}. If the answer is {b}, nothing works.",
    "\\boxed{{{a_}}}. It is wrong to round it.",
    "\\boxed{{{b_}}}\n\nLet me correct that: \\boxed{{{a_}}}.",
)


async def graded(cases: Sequence[tuple[str, str]]) -> list[RewardResult]:
    items = [RewardItem(response=text, ground_truth=gold) for text, gold in cases]
    results: list[RewardResult] = []
    async with RewardService(RewardSection(functions=[MathReward(timeout_s=20)])) as grader:
        for i in range(0, len(items), MAX_BATCH_ITEMS):
            results += await grader.score(items[i : i + MAX_BATCH_ITEMS])
    return results


def written(templates: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields every template with the answers of every kind, and the first answer as gold."""
    for a, b, c in ANSWERS.values():
        bare = {"a_": a.strip("$"), "b_": b.strip("$")}
        for template in templates:
            yield template.format(a=a, b=b, c=c, **bare), bare["a_"]


async def test_golden_cases() -> None:
    cases = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
    results = await graded([(case["text"], case["gold"]) for case in cases])
    wrong = [
        f"{case['kind']}: {case['text']!r} against {case['gold']!r} gave {result.extracted_answer!r}"
        for case, result in zip(cases, results, strict=True)
        if result.reward != float(case["right"])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("templates", "reward"),
    [(HEDGES, 0.0), (DENIALS, 0.0), (HONEST, 1.0)],
    ids=["hedges", "denials", "honest"],
)
async def test_hedges_and_denials_earn_nothing_and_honest_statements_do(
    templates: Sequence[str], reward: float
) -> None:
    assert len(templates) >= 20
    cases = list(written(templates))
    results = await graded(cases)
    wrong = [
        f"{text!r} against {gold!r} gave {result.extracted_answer!r}"
        for (text, gold), result in zip(cases, results, strict=True)
        if result.reward != reward
    ]
    assert not wrong, "\n".join(wrong)
