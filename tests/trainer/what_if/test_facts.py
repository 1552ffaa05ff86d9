"""What a record says of jumps, settings and tokens, by definitions that are written anew."""

import random
from pathlib import Path

import numpy as np
import pytest

from common.wire.schemas import Completion
from tests.support.runs.recorded_groups import entry, group, record, trained
from trainer.dashboard.columns import Columns
from trainer.observe.group_files import CompletionText, GroupSummary, GroupTexts
from trainer.what_if.causes import _graded, inverted
from trainer.what_if.gradients import _pushing
from trainer.what_if.run_facts import RunFacts
from trainer.what_if.why import explain


def _facts(values: dict[str, list[float]], directory: Path = Path()) -> RunFacts:
    columns = Columns()
    for step, numbers in enumerate(zip(*values.values(), strict=True), start=1):
        columns.append(step, dict(zip(values, numbers, strict=True)))
    return RunFacts(directory, columns, groups={}, settings=[(0, {})])


@pytest.mark.parametrize("seed", range(10))
def test_a_jump_does_not_depend_on_the_unit_of_its_number(seed: int) -> None:
    """Nor on where 0 is, and it is as large downwards as upwards."""
    draw = np.random.default_rng(seed)
    step = int(draw.integers(3, 9))
    quiet = draw.random(12) * draw.choice([0.0, 0.2])
    values = quiet + (np.arange(1, 13) >= step)
    jumps = [
        _facts({"number": (unit * values + zero).tolist()}).jump("number")
        for unit, zero in ((1.0, 0.0), (1e6, 0.0), (1e-6, 0.0), (1.0, 50.0), (-1.0, 0.0))
    ]
    assert [jump and jump.step for jump in jumps] == [step] * 5
    assert [jump and jump.size for jump in jumps] == pytest.approx([jumps[0] and jumps[0].size] * 5)
    assert [jump and jump.text.split()[1] for jump in jumps] == [*["rises"] * 4, "falls"]


@pytest.mark.parametrize("seed", range(5))
def test_settings_are_those_of_the_attempt_that_made_a_step(seed: int) -> None:
    """And they change with the step that the changes name."""
    draw = random.Random(seed)
    starts = sorted({0, *draw.sample(range(1, 12), 3)})
    facts = _facts({"number": [0.0] * 12})
    facts.settings = [(after, {"rate": float(after)}) for after in starts]
    known = [facts.setting("rate", step) for step in range(1, 13)]
    assert known == [max(after for after in starts if after < step) for step in range(1, 13)]
    steps = [step for step in range(2, 13) if known[step - 1] != known[step - 2]]
    assert [step for step, _ in facts.changes()] == steps == [after + 1 for after in starts[1:]]


@pytest.mark.parametrize("seed", range(5))
def test_the_tokens_that_push_most_are_found(seed: int) -> None:
    draw = np.random.default_rng(seed)
    completions = [
        Completion(
            token_ids=draw.integers(0, 99, size, dtype=np.int32),
            logprobs=np.log(draw.random(size)).astype(np.float32),
            text="",
            finish_reason="stop",
            weight_versions=[(0, 0, size)],
        )
        for size in draw.integers(1, 8, 6).tolist()
    ]
    advantages = [draw.normal(size=len(each.token_ids)).astype(np.float32) for each in completions]
    pushes = [
        (abs(own[at]) * (1 - np.exp(each.logprobs[at])), each.token_ids[: at + 1].tolist())
        for each, own in zip(completions, advantages, strict=True)
        for at in range(len(own))
    ]
    # At most one of an answer: its first token tells which.
    of_answers = [
        max(pushes[end - len(own) : end])
        for own, end in zip(advantages, np.cumsum([len(own) for own in advantages]), strict=True)
    ]
    wanted = [tokens for _, tokens in sorted(of_answers, key=lambda pair: -pair[0])[:3]]
    assert _pushing(completions, advantages) == wanted


def test_without_an_audit_a_share_is_that_of_advantage_times_tokens(tmp_path: Path) -> None:
    pulls = {"a": (0.5, [10, 20]), "b": (0.25, [40, 80]), "c": (0.0, [99, 99]), "d": (None, [9, 9])}
    facts = _facts({"number": [0.0]}, tmp_path)
    facts.groups = {
        1: [
            GroupSummary(**entry(0, id=name, advantage=advantage, tokens=tokens))
            for name, (advantage, tokens) in pulls.items()
        ]
    }
    shown = [(row["id"], row["share"]) for row in explain(facts, step=1)["groups"]]
    assert shown == [("b", pytest.approx(30 / 45)), ("a", pytest.approx(15 / 45))]


def test_an_answer_at_the_mean_of_its_group_is_not_paid() -> None:
    def graded(*rewards: float | None) -> list[bool]:
        completions = [CompletionText(text="#### 5", reward=reward) for reward in rewards]
        groups = [GroupTexts(ground_truth="5", completions=completions)]
        return [is_paid for _, is_paid, _ in _graded(groups)]

    assert graded(0.0, 0.5, 1.0) == [False, False, True]
    assert graded(0.5, 0.5) == graded(1.0, None) == [], "they teach nothing"


@pytest.mark.parametrize(("paid_wrong", "finds"), [(0.9, True), (0.5, False), (0.1, False)])
def test_a_reward_that_does_not_look_at_answers_is_not_turned(
    tmp_path: Path, paid_wrong: float, finds: bool
) -> None:
    """Wrong answers are paid as much as right ones, not more."""
    rewards = [paid_wrong, 0.5]
    groups = [group(number, rewards, ["#### 6", "#### 5"]) for number in range(6)]
    record(tmp_path, [[trained(each) for each in groups]])
    facts = _facts({"number": [0.0]}, tmp_path)
    assert (inverted(facts) is not None) is finds
