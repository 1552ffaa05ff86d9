"""The invariants of episodes can fail: each broken history is detected by the check responsible for it."""

from collections.abc import Callable

import numpy as np
import pytest

from common.wire.schemas import Completion, Group, Turn
from tests.chaos.episodes.invariants import Evidence, violations
from tests.chaos.episodes.swallows import UNIT

ANSWER = 3
"""Tokens of an answer."""


def answer(group: int, episode: int, turn: int) -> list[int]:
    return [100 * group + 10 * episode + turn] * ANSWER


def completion(group: int, episode: int) -> Completion:
    tokens = answer(group, episode, 0) + answer(group, episode, 1)
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        text=f"{group}-{episode}-0 {group}-{episode}-1",
        finish_reason="stop",
        weight_versions=[(0, 0, len(tokens))],
        components={"score": 1.0, "number": (10 * group + episode) * UNIT},
        mask=np.ones(len(tokens), np.int32),
        turns=[Turn(0, ANSWER), Turn(ANSWER, 2 * ANSWER)],
        episode=episode,
    )


@pytest.fixture
def good() -> Evidence:
    """Returns a run of three groups of two episodes of two turns; the second prompt was left out."""
    numbers = [(group, episode) for group in (0, 2, 3) for episode in (0, 1)]
    groups = [
        Group(
            id=f"g{position}",
            prompt_id=f"p{position}",
            prompt="?",
            ground_truth="",
            prompt_token_ids=np.array([1], np.int32),
            completions=[completion(position, episode) for episode in (0, 1)],
            position=position,
        )
        for position in (0, 2, 3)
    ]
    engine = [
        {"text": "", "tokens": answer(group, episode, turn), "fault": ""}
        for group, episode in numbers
        for turn in (0, 1)
    ]
    programs = [
        {
            "number": 10 * group + episode,
            "calls": [{"text": f"{group}-{episode}-{turn}", "error": None} for turn in (0, 1)],
        }
        for group, episode in numbers
    ]
    return Evidence(
        kind="agent",
        group_size=2,
        wanted=3,
        drawn=4,
        left_out={1},
        groups=groups,
        engine=engine,
        programs=programs,
    )


def swallow(run: Evidence) -> None:
    run.programs[2]["calls"][1] = {"text": None, "error": "TimeoutError"}


def lose_a_group(run: Evidence) -> None:
    run.left_out = set()


def store_twice(run: Evidence) -> None:
    run.groups[1].position = 0


def lose_an_episode(run: Evidence) -> None:
    run.groups[0].completions.pop()


def train_an_answer_twice(run: Evidence) -> None:
    run.groups[0].completions[0].token_ids[ANSWER:] = answer(0, 0, 0)


def render_again(run: Evidence) -> None:
    run.groups[0].completions[0].token_ids[1] += 1


def widen_the_mask(run: Evidence) -> None:
    run.groups[0].completions[0].turns.pop()


def forget_an_answer(run: Evidence) -> None:
    run.programs[0]["calls"].append({"text": "0-0-2", "error": None})


def end_early(run: Evidence) -> None:
    run.programs.pop(0)


def leave_a_folder(run: Evidence) -> None:
    run.left_in_disk = ["rlhf-episodes-1"]


BROKEN: list[tuple[Callable[[Evidence], None], str]] = [
    (swallow, "no_reward_of_a_fault"),
    (end_early, "no_reward_of_a_fault"),
    (lose_a_group, "groups"),
    (store_twice, "groups"),
    (lose_an_episode, "groups"),
    (train_an_answer_twice, "tokens"),
    (render_again, "tokens"),
    (widen_the_mask, "tokens"),
    (forget_an_answer, "whole"),
    (leave_a_folder, "tidy"),
]


@pytest.mark.parametrize(("break_it", "check"), BROKEN)
def test_a_broken_history_is_detected(
    good: Evidence, break_it: Callable[[Evidence], None], check: str
) -> None:
    assert violations(good) == []
    break_it(good)
    assert check in {problem.partition(":")[0] for problem in violations(good)}
