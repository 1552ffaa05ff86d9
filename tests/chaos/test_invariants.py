"""The invariants can fail: each broken history is detected by the check responsible for it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.wire.schemas import Completion, Group, Turn
from tests.chaos.invariants import Evidence, violations

STEPS, BATCH = 4, 2


def group(step: int, i: int, attempt: str = "a") -> dict[str, Any]:
    position = (step - 1) * BATCH + i
    versions = [step - 1, step - 1]
    return {
        "id": f"{attempt}{position}",
        "prompt_id": f"p{position}",
        "position": position,
        "versions": versions,
        "reused": False,
    }


@pytest.fixture
def good() -> Evidence:
    """Returns a run whose third step was undone once: it was trained in attempt a and again in
    attempt b."""
    lineage: list[dict[str, Any]] = [
        {"step": step, "groups": [group(step, i, "b" if step >= 3 else "a") for i in range(BATCH)]}
        for step in range(1, STEPS + 1)
    ]
    undone = [group(3, i) for i in range(BATCH)]
    seen = [
        lineage[0]["groups"],
        lineage[1]["groups"],
        undone,
        lineage[2]["groups"],
        lineage[3]["groups"],
    ]
    stored = {
        each["id"]: ("consumed", each["position"], each["prompt_id"])
        for groups in seen
        for each in groups
    }
    return Evidence(
        steps=STEPS,
        batch=BATCH,
        max_staleness=0,
        prompts=STEPS * BATCH,
        target_accuracy=0.6,
        metrics=[
            {"step": step, "update": {"delta_logprob_current": 1e-6}}
            for step in range(1, STEPS + 1)
        ],
        groups=lineage,
        seen=seen,
        stored=stored,
        counters={
            "added": len(stored) + 1,
            "evicted": 0,
            "removed": 0,
            "dropped": 1,
            "duplicates": 3,
        },
        cursor=STEPS * BATCH,
        evaluations=[{"step": 0, "accuracy": 0.2}, {"step": STEPS, "accuracy": 0.7}],
    )


def test_good_run_has_no_violations(good: Evidence) -> None:
    assert violations(good) == []


def _undone_step_stayed(run: Evidence) -> None:
    run.groups.insert(2, {"step": 3, "groups": run.seen[2]})


def _line_lost(run: Evidence) -> None:
    del run.metrics[1]


def _small_batch(run: Evidence) -> None:
    run.groups[3]["groups"].pop()


def _trained_twice(run: Evidence) -> None:
    run.groups[3]["groups"][1]["position"] = 0


def _next_epoch_instead(run: Evidence) -> None:
    run.groups[1]["groups"][0]["position"] = STEPS * BATCH + 1


def _prompt_twice(run: Evidence) -> None:
    run.groups[1]["groups"][0]["prompt_id"] = "p0"


def _prompts_moved(run: Evidence) -> None:
    run.stored["b4"] = ("consumed", 4, "p9")


def _cursor_lost(run: Evidence) -> None:
    run.cursor = 3


def _stored_lost(run: Evidence) -> None:
    del run.stored["b6"]


def _not_acknowledged(run: Evidence) -> None:
    run.stored["b6"] = ("leased", 6, "p6")


def _one_too_many(run: Evidence) -> None:
    run.stored["x"] = ("fresh", 5, "p5")
    run.counters["added"] += 1


def _counter_off(run: Evidence) -> None:
    run.counters["evicted"] = 2


def _handed_out_twice(run: Evidence) -> None:
    run.seen[3][0] = run.seen[2][0]


def _old_weights(run: Evidence) -> None:
    run.groups[2]["groups"][0]["versions"] = [1, 2]


def _later_weights(run: Evidence) -> None:
    run.groups[2]["groups"][0]["versions"] = [2, 3]


def _said_another_version(run: Evidence) -> None:
    run.metrics[2]["update"]["delta_logprob_current"] = 0.01


def _learned_nothing(run: Evidence) -> None:
    run.evaluations[-1]["accuracy"] = 0.3


def _no_evaluation(run: Evidence) -> None:
    run.evaluations.pop()


def _failed(run: Evidence) -> None:
    run.status = 1


def _left_behind(run: Evidence) -> None:
    run.processes = ["77 python -m services.data"]


@pytest.mark.parametrize(
    ("damage", "check", "words"),
    [
        (_undone_step_stayed, "steps", "groups.jsonl has the steps"),
        (_line_lost, "steps", "metrics.jsonl has the steps"),
        (_small_batch, "steps", "step 4 has 1 groups"),
        (_trained_twice, "exactly_once", "position 0 was trained on 2 times"),
        (
            _next_epoch_instead,
            "exactly_once",
            "never trained on, and nobody says why: positions [2",
        ),
        (_prompt_twice, "exactly_once", "prompt p0 2 times in epoch 0"),
        (_prompts_moved, "exactly_once", "position 4 was that of ['p4', 'p9']"),
        (_cursor_lost, "exactly_once", "the data-server handed out 3 prompts"),
        (_stored_lost, "acknowledged", "group b6 (position 6) was trained on and is lost"),
        (_not_acknowledged, "acknowledged", "group b6 (position 6) was trained on and is leased"),
        (_one_too_many, "acknowledged", "1 groups were never handed out"),
        (_counter_off, "acknowledged", "8 groups should be stored"),
        (_handed_out_twice, "handed_out_once", "group a4 was handed out 2 times"),
        (_old_weights, "weight_versions", "step 3 trained on weights 1 to 2"),
        (_later_weights, "weight_versions", "step 3 trained on weights 2 to 3"),
        (_said_another_version, "weight_versions", "step 3: |Δ logprob| is 0.01"),
        (_learned_nothing, "accuracy", "0.300, below 0.6"),
        (_no_evaluation, "accuracy", "no evaluation at the end"),
        (_failed, "ended", "exit status 1"),
        (_left_behind, "ended", "still there: 77"),
    ],
)
def test_a_broken_history_is_found(
    good: Evidence, damage: Callable[[Evidence], None], check: str, words: str
) -> None:
    damage(good)
    found = violations(good)
    assert any(each.startswith(f"{check}: ") and words in each for each in found), found


def test_position_logged_as_left_out_is_not_missing(good: Evidence) -> None:
    _next_epoch_instead(good)
    good.cursor += BATCH
    assert any("never trained on" in each for each in violations(good))
    found = violations(replace(good, left_out={2, STEPS * BATCH}))
    assert not any("never trained on" in each for each in found), found


def test_staleness_up_to_the_limit_is_no_violation(good: Evidence) -> None:
    _old_weights(good)
    good.max_staleness = 1
    assert violations(good) == []


def episode(number: int, turns: int = 3, steps: int = 3, observed: int = 0) -> Completion:
    """Returns an episode of turns of two tokens, each followed by an observation of one token."""
    mask = np.array([1, 1, observed] * turns, np.int32)[: 3 * turns - 1]
    tokens, logprobs = np.arange(len(mask), dtype=np.int32), -0.5 * mask.astype(np.float32)
    spans = [Turn(3 * i, 3 * i + 2) for i in range(turns)]
    return Completion(
        *(tokens, logprobs, "", "stop", [(1, 0, len(mask))]),
        components={"steps": steps / 1000},
        mask=mask,
        turns=spans,
        episode=number,
    )


@pytest.fixture
def played(good: Evidence) -> Evidence:
    """Returns a run on groups of two episodes."""
    good.group_size = 2
    for name, (_, position, prompt) in good.stored.items():
        ids = np.array([1], np.int32)
        good.episodes[name] = Group(
            name, prompt, "", "", ids, [episode(0), episode(1)], position=position
        )
    return good


def test_good_run_on_episodes_has_no_violations(played: Evidence) -> None:
    assert violations(played) == []


@pytest.mark.parametrize(
    ("completions", "words"),
    [
        ([episode(0)], "has the episodes [0] instead of 2"),
        ([episode(0), episode(1), episode(1)], "has the episodes [0, 1, 1] instead of 2"),
        (
            [episode(0), episode(1, turns=4)],
            "episode 1 of group b6 has 4 turns, and its environment has seen 3",
        ),
        (
            [episode(0), episode(1, turns=2)],
            "episode 1 of group b6 has 2 turns, and its environment has seen 3",
        ),
        ([episode(0), episode(1, observed=1)], "its mask is not its turns"),
    ],
)
def test_an_episode_that_is_not_whole_is_found(
    played: Evidence, completions: list[Completion], words: str
) -> None:
    played.episodes["b6"].completions = completions
    found = violations(played)
    assert any(each.startswith("episodes: ") and words in each for each in found), found
