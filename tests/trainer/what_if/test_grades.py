"""What other grades do to a run, over random groups, by definitions that are written anew."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from common.settings.config import Config
from common.wire.schemas import RewardItem, RewardResult
from services.reward.service import RewardService
from tests.support.runs.recorded_groups import group, record, trained
from trainer.observe.group_files import (
    CompletionText,
    GroupTexts,
    RecordedGroup,
    recorded_steps,
)
from trainer.what_if.grades import AnswerGrade, GroupGrades, Regrading
from trainer.what_if.regrade import Regraded, _cells, _line, _sum


def _group(draw: random.Random, number: int, *, missing: float) -> GroupGrades:
    """Returns a group with recorded grades and other ones, of which a share is missing."""
    verified = draw.random() < 0.7
    grades = []
    for index in range(draw.randint(2, 5)):
        rewards = [
            None if draw.random() < missing else draw.choice([0.0, 0.5, 1.0]) for _ in range(2)
        ]
        right = [verified and draw.random() < 0.5 for _ in range(2)]
        answer = CompletionText(reward=rewards[0], correct=right[0], verified=verified)
        now = RewardResult(
            reward=rewards[1],
            correct=right[1],
            verified=verified,
            extracted_answer=f"read {index}",
            ground_truth="5",
            status="ok" if rewards[1] is not None else "error",
            reason="" if rewards[1] is not None else "no value",
        )
        grades.append(AnswerGrade(index, answer, now))
    texts = GroupTexts(
        id=f"group-{number}",
        prompt_id=f"problem-{number % 4}",
        completions=[grade.answer for grade in grades],
        reason=draw.choice(["", "", "", "stale"]),
    )
    is_cut = draw.random() < 0.1  # one of its answers cannot be graded again
    return GroupGrades(1 + number // 4, texts, grades[is_cut:])


def _is_changed(grade: AnswerGrade) -> bool:
    before, now = grade.sides
    if before.reward != now.reward:
        return True
    return before.reward is not None and before.verified and before.correct != now.correct


@pytest.mark.parametrize("missing", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(20))
def test_what_grades_change_is_counted(seed: int, missing: float) -> None:
    draw = random.Random(seed)
    groups = [_group(draw, number, missing=missing) for number in range(draw.randint(1, 12))]
    found = Regraded(Config())
    for each in groups:
        found.add(each)

    answers = [grade for each in groups for grade in each.grades]
    total = _sum(found, sorted(found.counts))
    assert total[0, 0] == len(answers)
    assert total[0, 1] == sum(map(_is_changed, answers))
    assert found.unknown == sum(len(each.group.completions) - len(each.grades) for each in groups)
    assert found.reasons.total() == sum(grade.now.reward is None for grade in answers)
    assert [each.group.id for each in found.changed] == [
        each.group.id for each in groups if any(map(_is_changed, each.grades))
    ]

    # Of what was trained on, the groups of which all rewards are known before and now.
    kept = [each for each in groups if not each.group.reason]
    whole = [
        [(grade.answer.reward, grade.now.reward) for grade in each.grades]
        for each in kept
        if len(each.grades) == len(each.group.completions)
    ]
    pairs = [
        np.array(rewards, float)
        for rewards in whole
        if all(reward is not None for pair in rewards for reward in pair)
    ]
    pushes = [rewards - rewards.mean(0) for rewards in pairs]
    turned = sum(int((push[:, 0] * push[:, 1] < -1e-9).sum()) for push in pushes)
    assert total[0, 2:4].tolist() == [len(pairs), turned]
    for side in range(2):
        graded = [
            grade.sides[side]
            for each in kept
            for grade in each.grades
            if grade.sides[side].reward is not None
        ]
        teach = sum(len({*rewards[:, side].tolist()}) > 1 for rewards in pairs)
        assert total[side, 4:8].tolist() == [
            len(graded),
            sum(each.verified for each in graded),
            sum(each.correct for each in graded),
            teach,
        ]
        push = sum(float(np.abs(each[:, side]).mean()) for each in pushes)
        assert total[side, 8] == pytest.approx(push)

    cells = _cells(total)
    assert cells[0] == f"{sum(map(_is_changed, answers))}"
    assert cells[2].endswith(f" of {len(pairs)}")
    assert cells[4] == f"{turned}"


@pytest.mark.parametrize("seed", range(20))
def test_the_worst_disagreements_are_of_different_problems(seed: int) -> None:
    draw = random.Random(seed)
    found = Regraded(Config())
    for number in range(10):
        found.add(_group(draw, number, missing=0.1))

    def badness(grade: AnswerGrade) -> tuple[bool, float]:
        return "→" in grade.kind, abs((grade.now.reward or 0) - (grade.answer.reward or 0))

    most: dict[str, tuple[bool, float]] = {}
    for each in found.changed:
        name = each.group.prompt_id
        most[name] = max([most.get(name, (False, -1.0)), *map(badness, each.changed)])
    for count in range(6):
        worst = found.worst(count)
        assert [badness(grade) for _, grade in worst] == sorted(most.values(), reverse=True)[:count]
        assert len({each.group.prompt_id for each, _ in worst}) == len(worst)


def test_a_line_has_a_verdict_only_where_one_was_given() -> None:
    for verified in (True, False):
        now = RewardResult(
            reward=1.0,
            extracted_answer="5",
            ground_truth="5",
            correct=verified,
            status="ok",
            verified=verified,
        )
        grade = AnswerGrade(0, CompletionText(reward=0.0, verified=verified), now)
        line = _line(GroupGrades(3, GroupTexts(id="g"), [grade]))
        assert (line.step, line.id, line.changed) == (3, "g", 1)
        assert line.grades[0].correct is (True if verified else None)


class _Graders:
    """Stand-ins that find no answer right."""

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [
            RewardResult(
                reward=0.0,
                extracted_answer=None,
                ground_truth=item.ground_truth,
                correct=False,
                status="ok",
            )
            for item in items
        ]


async def test_a_group_that_was_reused_is_graded_once(tmp_path: Path) -> None:
    texts = ["#### 5", "#### 6"]
    first, second = (group(number, [1.0, 0.0], texts) for number in (1, 2))
    again = RecordedGroup(first, trained(first).advantages, reused=True)
    record(tmp_path, [[trained(first)], [trained(second), again]])
    regrading = Regrading(tmp_path, Config().reward, rows={}, golds={"prompt/2": "6"})
    service = cast("RewardService", _Graders())
    found = [
        (each.step, each.group.id, [grade.now.ground_truth for grade in each.grades])
        for step, path in recorded_steps(tmp_path).items()
        for each in await regrading._step(service, step, path)
    ]
    assert sorted(found) == [(1, "group-1", ["5", "5"]), (2, "group-2", ["6", "6"])]
