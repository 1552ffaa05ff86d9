"""Answers and ground truths as models and data sets write them, by kind: what a reader calls right
is right, and nothing else is. And which ground truths the check refuses.
"""

import json
from typing import Any

import pytest

from common.settings.sections import RewardSection
from common.wire.schemas import RewardItem
from services.reward.service import RewardService
from tests.support.paths import ROOT
from tests.support.services.verdicts import graded


def lines(name: str) -> dict[str, list[dict[str, Any]]]:
    path = ROOT / "tests" / "golden" / f"{name}.jsonl"
    found: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["kind"], []).append(row)
    return found


@pytest.mark.parametrize(
    ("kind", "rows"), [*lines("as_written").items(), *lines("reported").items()]
)
def test_answers_as_they_are_written(kind: str, rows: list[dict[str, Any]]) -> None:
    wrong = []
    for row in rows:
        found = graded(row["gold"], row["text"])
        # A reported answer may repeat a gold that is no value, such as 1, 2, ..., n.
        accepted = ("right", "identical") if "source" in row else ("right",)
        if (found in accepted) is not row["right"]:
            wrong.append((row["text"], row["gold"], found))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "rows"), lines("ground_truths").items(), ids=lines("ground_truths")
)
async def test_ground_truths_that_are_no_value_are_refused(
    kind: str, rows: list[dict[str, Any]]
) -> None:
    items = [RewardItem.model_construct(response="", ground_truth=row["gold"]) for row in rows]
    async with RewardService(RewardSection(workers=1)) as scorer:
        found = await scorer.check_ground_truths(items)
    refused = {rows[problem.index]["gold"] for problem in found.problems}
    expected = {row["gold"] for row in rows} if kind == "refused" else set()
    assert refused == expected, refused ^ expected
    assert found.repaired == (len(rows) if kind == "repaired" else 0)
