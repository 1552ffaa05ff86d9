"""`checks.faults`: what counts as named, and one fault that is really injected."""

import json
import os
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checks.faults.__main__ import inject, load_subjects
from checks.faults.child import run_child
from checks.faults.evidence import built_in, read_evidence
from checks.faults.fault import FAULTS, OWN, Fault
from checks.faults.judge import LIMIT_S, Line, judge
from checks.faults.lab import Lab
from checks.faults.trl_side import SIDES

STRUCK = 100.0
NAN = Fault(
    name="nan",
    subject="rewards",
    cause="the reward is NaN",
    words=(r"\bnan\b", "reward"),
    reported=OWN,
    run=lambda lab: None,
)
HEALTHY = Line(STRUCK + 1, "step    2/9  reward 0.5  tokens 9  1.0 s (gen 0.5, train 0.5)")


def said(text: str, after: float = 2.0) -> Line:
    return Line(STRUCK + after, text)


def test_a_line_names_the_cause_when_it_has_all_the_words() -> None:
    lines = [HEALTHY, said("WARNING reward 3 is NaN"), said("error: nan rewards", after=5)]
    found = judge(NAN, lines, STRUCK, ended_well=False)
    assert found.verdict == "named"
    assert (found.named_s, found.detected_s, found.steps) == (2.0, 2.0, 1)
    assert found.line == "WARNING reward 3 is NaN"
    assert found.before == ()


def test_what_is_said_before_the_fault_does_not_count() -> None:
    lines = [Line(STRUCK - 1, "error: the reward is nan")]
    assert judge(NAN, lines, STRUCK, ended_well=False).verdict == "silent"


def test_the_numbers_of_a_step_explain_nothing() -> None:
    line = said("step    3/9  reward nan  tokens 9")
    assert judge(NAN, [line], STRUCK, ended_well=False).verdict == "silent"


def test_a_complaint_about_something_else_is_a_wrong_name() -> None:
    lines = [said("hint: lower optimizer.learning_rate"), said("the banana is a reward")]
    found = judge(NAN, lines, STRUCK, ended_well=True)
    assert found.verdict == "misnamed"
    assert found.before == ("hint: lower optimizer.learning_rate",)


def test_a_name_that_comes_late_does_not_count_unless_a_timeout_rules() -> None:
    lines = [said("error: the reward is nan", after=LIMIT_S + 1)]
    assert judge(NAN, lines, STRUCK, ended_well=False).verdict == "late"
    ruled = replace(NAN, timeout="reward.function_timeout_s", timeout_s=LIMIT_S)
    assert judge(ruled, lines, STRUCK, ended_well=False).verdict == "named"


def test_a_traceback_is_one_complaint_whose_last_line_is_shown() -> None:
    texts = [
        "ppo-trainer-0    | Traceback (most recent call last):",
        'ppo-trainer-0    |   File "script.py", line 9, in reward',
        "ppo-trainer-0    |     return float(text)",
        "ppo-trainer-0    | ValueError: nan",
        "the end",
    ]
    lines = [said(text) for text in texts]
    found = judge(NAN, lines, STRUCK, ended_well=False)
    assert (found.verdict, found.line) == ("named", "ppo-trainer-0    | ValueError: nan")
    assert found.before == ()

    # The name of a file explains nothing, and a traceback that never ends is one all the same.
    lines[1] = said('ppo-trainer-0    |   File "reward.py", line 9, in grade')
    assert judge(NAN, lines, STRUCK, ended_well=False).verdict == "misnamed"
    assert judge(NAN, lines[:3], STRUCK, ended_well=False).verdict == "misnamed"


@pytest.mark.integration
def test_colours_do_not_hide_a_complaint(tmp_path: Path) -> None:
    def work() -> int:
        os.write(1, b"\x1b[31mERROR\x1b[0m router: nan as a reward\n")
        return 0

    outcome = run_child(work, tmp_path / "output.txt", 60.0, lambda line: False)
    found = judge(NAN, outcome.lines, outcome.began, ended_well=True)
    assert (found.verdict, found.before) == ("named", ())
    assert found.line == "ERROR router: nan as a reward"


def test_lines_of_a_node_are_read_without_its_name() -> None:
    line = said("ppo-trainer-0    | alarm: mean |Δ logprob| is 0.3")
    assert judge(NAN, [line], STRUCK, ended_well=False).verdict == "misnamed"


def test_a_harmless_fault_may_not_disturb_the_run() -> None:
    harmless = replace(NAN, words=(), harmless=True)
    assert judge(harmless, [HEALTHY], STRUCK, ended_well=True).verdict == "untouched"
    assert judge(harmless, [HEALTHY], STRUCK, ended_well=False).verdict == "disturbed"
    warned = [said("warning: the clock jumped")]
    assert judge(harmless, warned, STRUCK, ended_well=True).verdict == "disturbed"


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward"),
    [
        ("3+4=7.\n#### 7", "stop", 1.0),
        ("#### 07 ", "stop", 1.0),
        ("#### 7", "length", 0.0),
        ("#### 8", "stop", 0.0),
        ("7", "stop", 0.0),
        ("#### 7 apples", "stop", 0.0),
    ],
)
def test_the_right_reward_of_the_built_in_task(
    text: str, finish_reason: str, reward: float
) -> None:
    assert built_in(text, "7", finish_reason) == reward


def _run_of_a_checkpoint(run_dir: Path, position: int, lines: list[dict[str, Any]]) -> None:
    """Writes what a run leaves behind that has a checkpoint of step 2."""
    checkpoint = run_dir / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    state = {"step": 2, "position": position, "finished": [position + 1]}
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    (run_dir / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _trained(position: int, *, reused: bool = False) -> dict[str, Any]:
    return {"position": position, "reused": reused, "reason": ""}


def _dropped(position: int, reason: str) -> dict[str, Any]:
    return {"position": position, "reused": False, "reason": reason}


def test_a_finished_prompt_is_lost_unless_the_run_says_what_became_of_it(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "groups": [_trained(0)], "dropped": [_dropped(1, "zero_variance")]},
        # 2 was drawn again after its first group had failed; 3 never was.
        {"step": 2, "groups": [_trained(2)], "dropped": [_dropped(2, "reward")]},
        {"step": 2, "groups": [_trained(3, reused=True)], "dropped": [_dropped(3, "stale")]},
        {"step": 3, "groups": [_trained(5)], "dropped": []},  # after the checkpoint
    ]
    _run_of_a_checkpoint(tmp_path, position=5, lines=lines)
    output = "WARNING prompt abc at 4 is skipped after 3 tries"
    evidence = read_evidence(tmp_path, output, None)
    # 6 is finished without a line of a step.
    assert (evidence.lost, evidence.given_up) == (2, 1)


def test_that_a_group_was_consumed_does_not_mean_it_was_trained_on(tmp_path: Path) -> None:
    _run_of_a_checkpoint(tmp_path, position=0, lines=[])
    store = tmp_path / "state" / "replay" / "replay.db"
    store.parent.mkdir(parents=True)
    with closing(sqlite3.connect(store)) as db:
        db.execute("CREATE TABLE blobs (data)")
        db.execute("CREATE TABLE groups (position, state)")
        db.execute("INSERT INTO groups VALUES (1, 'consumed')")
        db.commit()
    assert read_evidence(tmp_path, "", None).lost == 1


@pytest.mark.integration
def test_there_are_a_hundred_faults_and_each_says_who_reported_it() -> None:
    load_subjects()
    assert len(FAULTS) >= 100
    for fault in FAULTS.values():
        assert bool(fault.words) != fault.harmless, fault.name
        assert fault.reported == OWN or re.fullmatch(
            r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", fault.reported
        )
    assert SIDES.keys() <= FAULTS.keys()


@pytest.mark.integration
def test_a_fault_that_never_struck_is_not_named(tmp_path: Path) -> None:
    def break_down(lab: Lab) -> None:
        raise RuntimeError("the reward of this benchmark is nan")

    result = inject(replace(NAN, run=break_down), 0, tmp_path / "run", tmp_path)
    assert result.judgement.verdict == "not injected"
    assert not result.is_right


@pytest.mark.integration
@pytest.mark.slow
def test_a_fault_is_injected_named_and_falsifies_nothing(base_model: Path, tmp_path: Path) -> None:
    load_subjects()
    fault = FAULTS["reward_nan"]
    result = inject(fault, 0, tmp_path / "run", base_model)
    assert result.judgement.verdict == "named"
    assert "nan is not a number" in result.judgement.line
    assert result.evidence.checked > 0
    assert (result.evidence.falsified, result.evidence.lost) == (0, 0)

    def wrong(text: str, truth: str, finish: str) -> float:
        return 7.0

    # The same run with other words and another oracle: the measurement can fail.
    other = replace(fault, words=("the moon",), oracle=wrong)
    result = inject(other, 0, tmp_path / "other", base_model)
    assert result.judgement.verdict == "misnamed"
    assert result.evidence.falsified == result.evidence.checked > 0
