"""`rlhf why` names what it finds in the record of a run, and no cause where there is none."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from common.errors import ConfigError
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.runs.audits import audited
from tests.support.runs.in_process import quiet
from tests.support.runs.recorded_groups import group, record, trained
from trainer.dashboard.app import create_dashboard_app
from trainer.dashboard.run_list import RunList
from trainer.observe.group_files import GroupSummary, GroupTexts
from trainer.start.in_process import train_in_process
from trainer.what_if.causes import causes
from trainer.what_if.gradients import step_gradient
from trainer.what_if.run_facts import RunFacts
from trainer.what_if.why import _traits, explain, main

STEPS = 12


def written(
    directory: Path,
    texts: Callable[[int], list[str]] = lambda step: ["#### 5", "so #### 5", "#### 6", "none"],
    rewards: Callable[[int], list[float]] = lambda step: [1.0, 1.0, 0.0, 0.0],
    prompt: str = "How many apples are there now?",
    **numbers: Callable[[int], Any],
) -> RunFacts:
    """Returns a run of twelve steps; `numbers` gives those of a step, with __ for the point."""
    steps = []
    for step in range(1, STEPS + 1):
        groups = [group(10 * step + i, rewards(step), texts(step), prompt) for i in range(2)]
        for number, each in enumerate(groups):
            each.prompt_id = f"problem-{step}-{number}"
            each.prompt = prompt if "####" in prompt else f"{prompt} {step} {number}"
            for completion in each.completions:
                completion.weight_versions = [(step - 1, 0, 7)]
        steps.append([trained(each) for each in groups])
    record(directory, steps)
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            line: dict[str, Any] = {"step": step, "reward": 0.5 + 0.01 * (step % 2), "update": {}}
            for name, value in numbers.items():
                section, _, key = name.rpartition("__")
                (line[section] if section else line)[key] = value(step)
            file.write(json.dumps(line) + "\n")
    settings = {"optimizer": {"max_grad_norm": 1.0}, "algorithm": {"clip_high": 0.2}}
    (directory / "config.json").write_text(json.dumps(settings))
    return RunFacts.read(directory)


def first(facts: RunFacts) -> tuple[str, int] | None:
    cause = next(causes(facts), None)
    return None if cause is None else (cause.name, cause.first)


def test_a_healthy_run_has_no_cause_and_no_jump(tmp_path: Path) -> None:
    facts = written(
        tmp_path,
        update__learning_rate=lambda step: 1e-4 * min(1.0, step / 4),  # a warm-up
        update__delta_logprob_current=lambda step: 2e-6 * (1 + step % 3),
        update__grad_norm=lambda step: 0.5 + 0.1 * (step % 3),
        truncated=lambda step: 0.02 * (step % 2),
        staleness=lambda step: 0.0,
    )
    assert first(facts) is None
    answer = explain(facts)
    assert (answer["jump"], answer["causes"], answer["changes"]) == (None, [], [])


@pytest.mark.parametrize(
    ("name", "step", "numbers"),
    [
        ("rate", 7, {"update__learning_rate": lambda step: 1e-4 if step < 7 else 1e-3}),
        (
            "engine",
            8,
            {"alarms": lambda step: {"delta_logprob": "…"} if 8 <= step < 11 else {}},
        ),
        ("cut", 5, {"truncated": lambda step: 0.6 if step >= 5 else 0.0}),
        # No answer ends any more: the update before broke the policy.
        ("rate", 5, {"truncated": lambda step: 1.0 if step >= 5 else 0.0}),
        ("stale groups", 9, {"staleness": lambda step: 4.0 if step >= 9 else 0.0}),
        ("dropped", 6, {"dropped": lambda step: {"reward": 3} if step >= 6 else {}}),
    ],
)
def test_a_number_that_says_it(
    tmp_path: Path, name: str, step: int, numbers: dict[str, Any]
) -> None:
    facts = written(tmp_path, **numbers)
    assert first(facts) == (name, step)
    answer = explain(facts)
    assert answer["causes"][0]["remedy"]


def test_a_phrase_that_is_paid_for(tmp_path: Path) -> None:
    def texts(step: int) -> list[str]:
        return ["certainly! #### 6", "certainly! #### 5", "#### 5", "#### 5"]

    def rewards(step: int) -> list[float]:
        return [1.0, 1.0, 0.0, 0.0] if step >= 6 else [0.0, 1.0, 1.0, 1.0]

    facts = written(tmp_path, texts, rewards)
    assert first(facts) == ("phrase", 6)
    assert "certainly!" in next(causes(facts)).what


@pytest.mark.parametrize(("episode", "cause"), [(None, ("reward", 6)), (1, None)])
def test_a_reward_that_pays_for_wrong_answers(
    tmp_path: Path, episode: int | None, cause: tuple[str, int] | None
) -> None:
    """What is right in an episode, its text does not tell: the environment's words are in it."""
    facts = written(tmp_path, rewards=lambda step: [float(step < 6)] * 2 + [float(step >= 6)] * 2)
    for step in facts.steps:
        for each in facts.texts(step):
            for completion in each.completions:
                completion.episode = episode
    assert first(facts) == cause


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [("settings", "temperature", 2.5), ("cut", "max_new_tokens", 9), ("cut", "temperature", None)],
)
def test_answers_that_are_cut_since_settings_were_changed(
    tmp_path: Path, name: str, setting: str, value: float | None
) -> None:
    facts = written(tmp_path, truncated=lambda step: 0.4 if step >= 9 else 0.0)
    before = {f"sampling.{setting}": 1.0, "trainer.max_steps": 8}
    after = {f"sampling.{setting}": value or 1.0, "trainer.max_steps": 12}
    facts.settings = [(0, before), (8, after)]
    assert first(facts) == (name, 9)


def test_groups_that_were_dropped_once_are_no_cause(tmp_path: Path) -> None:
    facts = written(tmp_path, dropped=lambda step: {"reward": 3} if step == 6 else {"stale": 2})
    assert first(facts) is None


def test_settings_that_were_changed_are_named_where_nothing_else_is(tmp_path: Path) -> None:
    facts = written(tmp_path)
    before = {"algorithm.kl_coef": 0.01, "trainer.max_steps": 8, "evaluation.every": 5}
    facts.settings = [(0, before), (8, before | {"trainer.max_steps": 12, "evaluation.every": 4})]
    assert first(facts) is None, "these change no answer"
    facts.settings.append((10, before | {"algorithm.kl_coef": 1.0}))
    assert first(facts) == ("settings", 11)
    assert "algorithm.kl_coef 0.01 → 1.0" in next(causes(facts)).what


def test_a_run_that_ended_with_a_fault_says_so(tmp_path: Path) -> None:
    facts = written(tmp_path)
    (tmp_path / "diagnosis.txt").write_text("Answers cannot be graded: no worker\nmore\n")
    assert first(facts) == ("fault", STEPS)
    assert "step 12: Answers cannot be graded: no worker" in next(causes(facts)).what


@pytest.mark.parametrize("text", ["The answer is #### 5", "(key 5)", "Is it \\boxed{5}?"])
def test_problems_that_state_their_answers(tmp_path: Path, text: str) -> None:
    facts = written(tmp_path, prompt=f"How many apples? {text} ####")
    assert first(facts) == ("leak", 1)


def asked(facts: RunFacts, change: Callable[[int, GroupTexts], None]) -> RunFacts:
    """Changes the problems of a run by their numbers."""
    groups = [(step, place) for step in facts.steps for place in range(2)]
    for number, (step, place) in enumerate(groups):
        change(number, facts.texts(step)[place])
        facts.groups[step][place].prompt = facts.texts(step)[place].prompt
    return facts


@pytest.mark.parametrize(("every", "name"), [(1, "leak"), (3, "leak"), (12, None)])
def test_a_third_of_the_problems_may_state_their_answers(
    tmp_path: Path, every: int, name: str | None
) -> None:
    """Some others have a number that happens to be the answer."""

    def change(number: int, group: GroupTexts) -> None:
        group.ground_truth = str(number % 7)
        hint = f"Hint: {number % 7}." if number % every == 0 else ""
        group.prompt = f"Ann has {number % 5} eggs and finds {number % 4}. How many? {hint}"

    facts = asked(written(tmp_path), change)
    assert (first(facts) or (None,))[0] == name


@pytest.mark.parametrize(("copies", "name"), [(9, "duplicates"), (2, None)])
def test_one_problem_that_was_copied(tmp_path: Path, copies: int, name: str | None) -> None:
    def change(number: int, group: GroupTexts) -> None:
        if number < copies:
            group.prompt = "How many eggs?"

    facts = asked(written(tmp_path), change)
    assert (first(facts) or (None,))[0] == name


@pytest.mark.parametrize(
    ("name", "value"), [("optimizer.max_grad_norm", 1e6), ("algorithm.clip_high", 9.0)]
)
def test_a_clip_that_was_off_from_the_start(tmp_path: Path, name: str, value: float) -> None:
    facts = written(
        tmp_path, update__grad_norm=lambda step: 2.0, update__clip_fraction=lambda step: 0.0
    )
    settings = {"algorithm.policy_loss": "clip", name: value}
    facts.settings = [(0, settings)]
    assert first(facts) == ("clip", 1)
    facts.settings = [(0, settings | {name: 0.2})]
    assert first(facts) is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("trait", "changed"),
    [
        (None, {}),
        ("characters of the problem", {"prompt": "How many apples are there? " * 3}),
        ("share of other scripts than Latin", {"prompt": "有几个苹果"}),
        ("share unparsable", {"marks": ["unparsable"]}),
        ("oldest weights", {"versions": (1, 1)}),
    ],
)
def test_what_the_groups_that_carry_an_update_have_in_common(
    trait: str | None, changed: dict[str, Any], seed: int
) -> None:
    """Sizes that scatter alike in both parts are none, nor is what one of the others has."""
    draw = random.Random(seed)

    def drawn(number: int, **more: Any) -> GroupSummary:
        prompt = "How many?" + " Say it." * draw.randint(0, 2)
        tokens = [draw.randint(5, 20) for _ in range(4)]
        about = {"prompt": prompt, "tokens": tokens, "versions": (9, 9)} | more
        return GroupSummary(id=str(number), prompt_id=str(number), **about)

    half = [drawn(number, **changed) for number in range(4)]
    others = [drawn(number) for number in range(4, 12)]
    others[0].marks = ["truncated"]
    first_line, *traits = _traits(half, others)
    assert first_line == "4 of 12 groups make half of the update"
    names = [line.partition(":")[0] for line in traits]
    assert (trait is None) if not names else (trait in names)
    for each in half:
        each.prompt_id = "one"
    assert "they are of one problem, one" in _traits(half, others)
    assert _traits(half[:1], others[:1]) == ["1 of 2 groups make half of the update"]


def test_eight_problems_that_come_again_and_again_are_no_copies(tmp_path: Path) -> None:
    facts = written(tmp_path)
    for step in facts.steps:
        for place, each in enumerate(facts.groups[step]):
            number = (2 * step + place) % 8
            each.prompt_id = f"problem-{number}"
            each.prompt = f"How many eggs have {number} hens?"
    assert first(facts) is None


def test_the_jump_is_found_and_its_step_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = written(tmp_path, completion_tokens=lambda step: 9.0 if step < 8 else 40.0 + step % 2)
    jump = facts.jump("completion_tokens")
    assert jump is not None
    assert jump.step == 8
    assert jump.text.startswith("completion_tokens rises from 9 to 40.")
    main([str(tmp_path)])
    said = capsys.readouterr().out
    assert "completion_tokens rises" in said
    answer = json.loads((tmp_path / "why.json").read_text())
    assert answer["step"] == 7, "the update before it made the longer answers"
    assert sum(row["share"] for row in answer["groups"]) == pytest.approx(1.0)


def test_the_dashboard_has_the_answer_once_somebody_asked(tmp_path: Path) -> None:
    written(tmp_path, truncated=lambda step: 0.6 if step >= 5 else 0.0)
    client = TestClient(create_dashboard_app(RunList([tmp_path])))
    assert client.get("/dashboard/api/why").json() is None
    main([str(tmp_path)])
    answer = client.get("/dashboard/api/why").json()
    assert [cause["name"] for cause in answer["causes"]] == ["cut"]


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (["--metric", "nothing"], ["reward", "update.grad_norm"]),
        (["--metric", "update.gradnorm"], ["did you mean update.grad_norm?"]),
        (["--step", "99"], ["1", "12"]),
    ],
)
def test_a_number_or_step_that_was_not_recorded_is_refused_with_those_that_are(
    tmp_path: Path, words: list[str], known: list[str]
) -> None:
    written(tmp_path, update__grad_norm=lambda step: 0.5)
    with raises(ConfigError, code="config", field=words[0], value=words[1]) as caught:
        main([str(tmp_path), *words])
    assert all(name in str(caught.value.remedy) for name in known)


@pytest.mark.integration
@pytest.mark.slow
def test_the_parts_of_the_groups_are_the_gradient_of_the_step(
    base_model: Path, tmp_path: Path
) -> None:
    config = audited(base_model, tmp_path / "run")
    train_in_process(config, quiet())
    lines = [json.loads(line) for line in (tmp_path / "run/audit.jsonl").read_text().splitlines()]
    norm = next(line["norms"][0] for line in lines if line.get("step") == 3)
    whole, parts = step_gradient(tmp_path / "run", 3)
    assert whole == pytest.approx(norm, rel=1e-4)
    assert sum(each.share for each in parts) == pytest.approx(1.0, abs=1e-3)
    # Of the whole, the part and the rest, by the law of cosines.
    for each in parts:
        rest = norm**2 - 2 * each.share * norm**2 + each.norm**2
        assert each.without == pytest.approx(np.sqrt(max(0.0, rest)), rel=1e-2, abs=1e-3)


@pytest.mark.integration
@pytest.mark.slow
def test_a_kl_term_that_outweighs_the_rewards_is_named(base_model: Path, tmp_path: Path) -> None:
    words = ["--algorithm.kl_coef=50", "--trainer.max_steps=2", "--optimizer.learning_rate=1e-3"]
    train_in_process(audited(base_model, tmp_path, *words), quiet())
    answer = explain(RunFacts.read(tmp_path), step=2)
    assert sum(row["share"] for row in answer["groups"]) < 0.5
    assert len(answer["traits"]) == 1
    assert "KL" in answer["traits"][0]


@pytest.mark.integration
@pytest.mark.slow
def test_causes_that_were_put_into_runs_are_named_first(base_model: Path) -> None:
    """All ten take minutes: `python -m checks.causes`."""
    done = subprocess.run(
        [sys.executable, "-m", "checks.causes", "a_rate_ten_times_too_high", "a_leak"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "LOG_LEVEL": "ERROR"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right in 2 of 2 runs" in done.stdout
