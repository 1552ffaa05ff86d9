"""Answers by the kind of their notation, and hedges inside a box, graded in this process."""

import json
import logging
from itertools import product
from typing import Any

import pytest

from common.settings.sections import RewardSection
from common.wire.schemas import RewardItem
from services.reward.answers import equivalence
from services.reward.answers.equivalence import prepare
from services.reward.service import RewardService
from tests.support.paths import ROOT
from tests.support.services.verdicts import compared

KINDS = ROOT / "tests" / "golden" / "kinds.jsonl"
HEDGED = {
    "\\text{(C)}": ("\\text{(C)}", "\\text{(D)}"),
    "5": ("5", "7"),
    "\\{1,2\\}": ("\\{1,2\\}", "\\{1,3\\}"),
    "[0,1)": ("[0,1)", "[0,2)"),
}
PHRASES = (
    "{0}\\text{{ or }}{1}", "{1}\\text{{ or }}{0}", "\\text{{either }}{0}\\text{{ or }}{1}",
    "\\text{{not }}{0}", "\\neg {0}", "{0}\\text{{ is wrong}}", "{0}\\text{{ is not correct}}",
    "\\text{{maybe }}{0}", "{0}\\text{{ maybe}}", "{0}\\text{{, possibly }}{1}", "{0}?",
    "\\text{{anything but }}{0}", "{0}\\text{{ (or }}{1})", "{0}\\text{{ but not sure}}",
    "\\text{{neither }}{0}\\text{{ nor }}{1}", "{0}\\text{{ (wrong)}}", "{0}/{1}", "{0}\\to {1}",
    "\\text{{not equal to }}{0}", "{0}\\text{{ if }}x>0\\text{{ else }}{1}", "{0} \\vee {1}",
    "\\text{{except }}{0}", "{0}\\text{{ versus }}{1}", "{0}\\text{{ unless }}{1}",
)  # fmt: skip


def cases() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in KINDS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["kind"], []).append(row)
    return found


@pytest.mark.parametrize(("kind", "rows"), list(cases().items()), ids=list(cases()))
def test_kind(kind: str, rows: list[dict[str, Any]]) -> None:
    wrong = []
    for row in rows:
        found = compared(row["gold"], row["answer"])
        if (found == "right") is not row["correct"]:
            wrong.append((row["gold"], row["answer"], found))
    assert not wrong, wrong


@pytest.mark.parametrize(("gold", "phrase"), list(product(HEDGED, PHRASES)))
def test_hedge_in_a_box_earns_nothing(gold: str, phrase: str) -> None:
    assert compared(gold, phrase.format(*HEDGED[gold])) != "right"


def test_an_exception_of_the_grader_is_an_error_with_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = prepare({"memory_mb": 1 << 20, "alarm_s": 60})()
    monkeypatch.setattr(equivalence, "read_gold", lambda text: 1 // 0)
    with caplog.at_level(logging.ERROR):
        found = handle(json.dumps(["x+1", "1+x+0"]))
    assert found.startswith("error: ZeroDivisionError in test_kinds.py, line ")
    assert "'1+x+0' against 'x+1'" in caplog.text


@pytest.mark.integration
async def test_an_error_of_the_grader_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    async with RewardService(RewardSection(workers=1)) as grader:
        [pool] = grader._pools

        async def broken(*_: object) -> bytes:
            return b"error: TypeError in values.py, line 7"

        monkeypatch.setattr(pool, "call", broken)
        item = RewardItem(response="\\boxed{x+1}", ground_truth="1+x")
        [result] = await grader.score([item])
    assert (result.status, result.reward) == ("error", None)
    assert result.reason == "math: error: TypeError in values.py, line 7"
