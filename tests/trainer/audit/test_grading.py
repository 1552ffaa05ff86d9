"""Answers are graded again by the functions of the run, and a function that cannot decide is
named."""

import numpy as np
import pytest

from common.settings.config import from_mapping
from common.wire.schemas import Completion, Prompt, RewardItem
from trainer.audit.grading import GradedAnswer, answer_of_episode, graded_again

pytestmark = pytest.mark.integration
ROW = Prompt(id="p", prompt="What is 1 + 1?", ground_truth="2")


def completion(reward: float, **scores: float) -> Completion:
    return Completion(
        token_ids=np.array([1], np.int32),
        logprobs=np.zeros(1, np.float32),
        text="#### 2",
        finish_reason="stop",
        weight_versions=[(0, 0, 1)],
        reward=reward,
        correct=reward == 1.0,
        components=dict(scores),
    )


def graded(recorded: Completion) -> GradedAnswer:
    item = RewardItem(prompt=ROW.prompt, response="#### 2", ground_truth=ROW.ground_truth)
    return GradedAnswer("the answer", item, recorded)


def test_a_function_that_is_not_deterministic_is_named() -> None:
    name = "tests.support.services.own_rewards:dice"
    functions = [{"name": name, "weight": 1.0}, {"name": "math", "weight": 1.0}]
    config = from_mapping({"reward.functions": functions, "reward.workers": 1})
    found = graded_again(config, [graded(completion(1.5, dice=0.5, math=1.0))])
    assert found.state == "differs"
    assert "dice is not deterministic" in found.detail
    assert "math" not in found.detail.partition(";")[2]
    # Also when it has no weight, so that the reward does not tell.
    functions[0]["weight"] = 0.0
    config = from_mapping({"reward.functions": functions, "reward.workers": 1})
    found = graded_again(config, [graded(completion(1.0, dice=0.5, math=1.0))])
    assert "dice is not deterministic" in found.detail


def test_a_function_that_decides_otherwise_is_not_called_random() -> None:
    config = from_mapping({"reward.workers": 1})
    right = graded_again(config, [graded(completion(1.0, math=1.0))])
    assert right.state == "equal"
    wrong = graded_again(config, [graded(completion(0.0, math=0.0))])
    assert (wrong.state, wrong.where) == ("differs", "the answer")
    assert wrong.expected.startswith("0.0")
    assert wrong.found.startswith("1.0")
    assert "deterministic" not in wrong.detail


def test_the_rewards_of_turns_are_a_part_of_the_recorded_reward() -> None:
    config = from_mapping({"reward.workers": 1})
    recorded = completion(1.25, math=1.0)
    recorded.correct = True
    answer = answer_of_episode("an episode", ROW, "#### 2", recorded, of_turns=0.25)
    assert graded_again(config, [answer]).state == "equal"
    other = answer_of_episode("an episode", ROW, "#### 2", recorded, of_turns=0.0)
    assert graded_again(config, [other]).state == "differs"
