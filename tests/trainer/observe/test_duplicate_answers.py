"""Equal answers of a group: a policy that is certain repeats itself; one that is not cannot."""

import math
import random

import numpy as np
import pytest

from common.settings.config import Config
from common.wire.schemas import Completion, Group
from trainer.observe.catalogue import ALARMS
from trainer.observe.duplicate_answers import copied_answers, duplicate_answers


def answer(tokens: list[int], logprob: float) -> Completion:
    """An answer of these tokens, each with this log-probability."""
    ids = np.array(tokens, np.int32)
    logprobs = np.full(len(tokens), logprob, np.float32)
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        text="answer",
        finish_reason="stop",
        weight_versions=[(0, 0, len(tokens))],
        reward=1.0,
        correct=True,
    )


def group(*answers: Completion) -> Group:
    return Group(
        id="g",
        prompt_id="p",
        prompt="1 + 1?",
        ground_truth="2",
        prompt_token_ids=np.array([1, 2], np.int32),
        completions=list(answers),
    )


def test_one_seed_for_all_answers_is_named() -> None:
    groups = [
        group(*[answer([7, index, 9], -1.0)] * size) for index, size in enumerate((2, 4, 4, 4))
    ]
    found = duplicate_answers(groups)
    assert found.share == 1
    assert duplicate_answers(groups[:1]).share == 1
    assert found.surprise > ALARMS["copied_answers"].limit
    text = copied_answers(found, Config())["copied_answers"]
    assert "100% of the answers" in text
    assert "sampled with one seed" in text


def test_a_policy_that_is_certain_repeats_itself_without_an_alarm() -> None:
    groups = [group(*[answer([7, index, 9], -0.001)] * 8) for index in range(32)]
    found = duplicate_answers(groups)
    assert found.share == 1
    assert copied_answers(found, Config()) == {}


@pytest.mark.parametrize("entropy", [0.1, 0.7, 2.0])
def test_answers_that_are_sampled_independently_raise_no_alarm(entropy: float) -> None:
    """Samples of a known distribution over words, as a short answer has."""
    rng = random.Random(f"copies {entropy}")
    words = range(6)
    weights = [math.exp(-word / entropy) for word in words]
    total = sum(weights)
    for _ in range(200):
        groups = []
        for _ in range(16):
            drawn = rng.choices(words, weights, k=8)
            answers = [answer([word], math.log(weights[word] / total)) for word in drawn]
            groups.append(group(*answers))
        assert copied_answers(duplicate_answers(groups), Config()) == {}


def test_groups_of_one_and_no_groups_have_nothing_to_compare() -> None:
    assert duplicate_answers([group(answer([1], -5.0))]).share == 0
    assert copied_answers(duplicate_answers([]), Config()) == {}
