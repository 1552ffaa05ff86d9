"""Groups that lack episodes: the expectation of their gradient, by simulation, against the exact one.

A prompt has a softmax policy over four answers of one token. An episode of it is lost at random,
and a group with at least two whole ones is trained. The exact gradients are written down from the
definitions, in numpy.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from common.settings.config import Config
from common.wire.schemas import Completion, Group, Turn
from tests.support.batches.groups import known, with_algorithm
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.algorithms.compute_advantages import compute_advantages

Numbers = NDArray[np.float64]
N = 6
"""Episodes that a group begins with."""
FEWEST = 2
GROUPS = 3000
LOGITS = np.array([[0.4, -0.3, 0.0, 0.2], [-0.5, 0.6, 0.1, 0.0]])
"""[prompts, answers]"""
REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
"""[prompts, answers]"""
POLICY = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
_NO_LOGPROBS = np.zeros(1, np.float32)
_ONE = np.ones(1, np.int32)


def gradient(policy: Numbers, rewards: Numbers) -> Numbers:
    """Returns ∂/∂logits of Σ_a policy[a]·rewards[a], of a softmax policy [answers]."""
    return policy * (rewards - policy @ rewards)


def groups_of(rng: np.random.Generator, lost: Numbers) -> list[tuple[int, list[int]]]:
    """Returns the prompt and the whole answers of every group that may be trained.

    `lost` [prompts, answers] is the probability with which an episode is lost.
    """
    found = []
    for number in range(GROUPS):
        prompt = number % len(POLICY)
        answers = rng.choice(4, size=N, p=POLICY[prompt])
        whole = answers[rng.random(N) >= lost[prompt, answers]]
        if len(whole) >= FEWEST:
            found.append((prompt, whole.tolist()))
    return found


def trained(config: Config, groups: list[tuple[int, list[int]]]) -> list[Numbers]:
    """Returns [groups, 4] the gradient that each group contributes, by prompt."""
    items = []
    for number, (prompt, answers) in enumerate(groups):
        completions = [
            Completion(
                token_ids=np.array([answer], np.int32),
                logprobs=_NO_LOGPROBS,
                text="",
                finish_reason="stop",
                weight_versions=[(0, 0, 1)],
                reward=float(REWARDS[prompt, answer]),
                episode=episode,
            )
            for episode, answer in enumerate(answers)
        ]
        items.append(
            TrainingGroup(
                Group(
                    id=f"g{number}",
                    prompt_id=str(prompt),
                    prompt="",
                    ground_truth="",
                    prompt_token_ids=_ONE,
                    completions=completions,
                )
            )
        )
    batch = Batch.of(items, config)
    advantages = iter(known(compute_advantages(batch, config, 0.0)[0]))
    parts: list[list[Numbers]] = [[] for _ in POLICY]
    for prompt, answers in groups:
        own = np.array([next(advantages)[0] for _ in answers], np.float64)
        parts[prompt].append(own @ (np.eye(4)[answers] - POLICY[prompt]))
    return [np.array(part) for part in parts]


def assert_mean(sums: Numbers, sizes: list[int], expected: Numbers) -> None:
    """Asserts that the mean over all episodes is the expected one, within 4.5 standard errors."""
    off = sums - np.array(sizes)[:, None] * expected
    error = off.std(axis=0) / math.sqrt(len(sizes))
    np.testing.assert_array_less(np.abs(off.mean(axis=0)), 4.5 * error)


def sizes_of(groups: list[tuple[int, list[int]]]) -> list[list[int]]:
    """Returns the numbers of whole episodes of each prompt's groups."""
    return [[len(answers) for prompt, answers in groups if prompt == p] for p in (0, 1)]


def with_episodes(config: Config, advantage: str) -> Config:
    changed = with_algorithm(config, name="grpo", advantage=advantage)
    changed.environment.name = "python"
    changed.environment.min_episodes = FEWEST
    return changed


def binary_factor(advantage: str, size: int, rate: float) -> float:
    """Returns f in E[mean over a group of A·∇log π] = f · ∇(pass rate), for rewards of 0 and 1.

    Enumerates the number of right answers: the mean of ∇log π is ∇p/p over right answers, and
    −∇p/(1 − p) over wrong ones.
    """
    total = 0.0
    for right in range(1, size):
        chance = math.comb(size, right) * rate**right * (1 - rate) ** (size - right)
        mean = right / size
        scale = {
            "leave_one_out": (size - 1) / size,
            "group_centred": 1.0,
            "group_normalised": math.sqrt(size / (size - 1) * mean * (1 - mean)) + 1e-6,
        }[advantage]
        credit = mean * (1 - mean) / scale
        total += chance * (credit / rate + credit / (1 - rate))
    return total


@pytest.mark.parametrize("advantage", ["leave_one_out", "group_centred", "group_normalised"])
def test_a_loss_that_is_no_ones_fault_leaves_the_gradient_what_it_is(
    config: Config, advantage: str
) -> None:
    """The second prompt loses more than the first: each prompt's direction stays exact, and its
    weight is its number of whole episodes."""
    lost = np.array([[0.1] * 4, [0.4] * 4])
    groups = groups_of(np.random.default_rng(1), lost)
    sizes = sizes_of(groups)
    assert set(itertools.chain.from_iterable(sizes)) == set(range(FEWEST, N + 1))
    sums = trained(with_episodes(config, advantage), groups)
    for prompt in (0, 1):
        exact = gradient(POLICY[prompt], REWARDS[prompt])
        rate = float(POLICY[prompt] @ REWARDS[prompt])
        factors = [binary_factor(advantage, size, rate) for size in sizes[prompt]]
        factor = np.average(factors, weights=sizes[prompt])
        if advantage == "leave_one_out":
            assert factor == pytest.approx(1.0)
        assert_mean(sums[prompt], sizes[prompt], factor * exact)


def test_losses_that_depend_on_the_answer_train_the_reward_of_what_is_left(config: Config) -> None:
    """As with answers that are played again in place of the lost ones: the gradient is exactly that
    of the mean reward of whole episodes."""
    lost = np.array([[0.6, 0.1, 0.1, 0.1]] * 2)
    groups = groups_of(np.random.default_rng(2), lost)
    sizes = sizes_of(groups)
    sums = trained(with_episodes(config, "leave_one_out"), groups)
    for prompt in (0, 1):
        kept = POLICY[prompt] * (1 - lost[prompt])
        kept /= kept.sum()
        of_whole = gradient(kept, REWARDS[prompt])
        assert_mean(sums[prompt], sizes[prompt], of_whole)
        wanted = gradient(POLICY[prompt], REWARDS[prompt])
        with pytest.raises(AssertionError):
            assert_mean(sums[prompt], sizes[prompt], wanted)


@pytest.mark.parametrize(
    ("advantage", "turn_discount"),
    [
        ("group_normalised", None),
        ("length_weighted", None),
        ("group_normalised", 0.5),
        ("group_centred", 0.5),
    ],
)
def test_each_group_is_compared_as_if_it_were_alone(
    config: Config, advantage: str, turn_discount: float | None
) -> None:
    settings = with_episodes(config, advantage)
    settings.environment.turn_discount = turn_discount
    rng = np.random.default_rng(3)
    items = []
    for number, size in enumerate((6, 2, 5, 6)):
        completions = []
        for episode in range(size):
            completions.append(_episode(rng, episode, sequences=1 + episode % 2))
        flat: list[Completion] = list(itertools.chain.from_iterable(completions))
        items.append(
            TrainingGroup(
                Group(
                    id=f"g{number}",
                    prompt_id="p",
                    prompt="",
                    ground_truth="",
                    prompt_token_ids=_ONE,
                    completions=flat,
                )
            )
        )
    together = known(compute_advantages(Batch.of(items, settings), settings, 0.0)[0])
    alone: list[Any] = []
    for item in items:
        alone += known(compute_advantages(Batch.of([item], settings), settings, 0.0)[0])
    assert len(together) == len(alone)
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def _episode(rng: np.random.Generator, number: int, sequences: int) -> list[Completion]:
    reward = float(rng.normal())
    lengths = [int(rng.integers(1, 5)) for _ in range(sequences)]
    return [
        Completion(
            token_ids=np.ones(length, np.int32),
            logprobs=np.zeros(length, np.float32),
            text="",
            finish_reason="stop",
            weight_versions=[(0, 0, length)],
            reward=reward,
            episode=number,
            turns=[Turn(0, length, 0.25 * number)],
        )
        for length in lengths
    ]
