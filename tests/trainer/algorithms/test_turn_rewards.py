"""Rewards of single turns, against an independent computation in float64; without such rewards
nothing changes."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ConfigError
from common.settings.config import Config, load
from common.wire.schemas import Completion, Group, Turn
from tests.support.errors import raises
from tests.support.paths import ROOT
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.algorithms.compute_advantages import compute_advantages

SIZE = 4


def config(base_model: Path, **settings: Any) -> Config:
    words = [
        "--config",
        str(ROOT / "jobgroup/configs/tiny-cpu.yaml"),
        "--model.name",
        str(base_model),
    ]
    words += ["--environment.name", "python", "--sampling.group_size", str(SIZE)]
    for name, value in settings.items():
        words += [f"--{name.replace('__', '.')}", str(value)]
    return load(words, {})


def sequence(
    rng: np.random.Generator, rewards: list[float | None], total: float, episode: int
) -> Completion:
    """Returns a sequence of turns with one to five tokens each, separated by observations of one to
    three tokens."""
    mask: list[int] = []
    turns: list[Turn] = []
    for reward in rewards:
        mask += [0] * int(rng.integers(1, 4)) if mask else []
        start = len(mask)
        mask += [1] * int(rng.integers(1, 6))
        turns.append(Turn(start, len(mask), reward))
    marks, zeros = np.array(mask, np.int32), np.zeros(len(mask), np.float32)
    spans = [(0, 0, len(mask))]
    return Completion(
        token_ids=marks.copy(),
        logprobs=zeros,
        finish_reason="stop",
        weight_versions=spans,
        reward=total,
        mask=marks,
        turns=turns,
        episode=episode,
        prompt_ids=marks[:1],
    )


def groups(seed: int, count: int, with_rewards: bool = True) -> list[TrainingGroup]:
    """Returns groups of episodes with one or two sequences and one to six turns."""
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        completions = []
        for episode in range(SIZE):
            parts = [
                [
                    float(rng.normal()) if with_rewards and rng.random() < 0.8 else None
                    for _ in range(int(rng.integers(1, 4)))
                ]
                for _ in range(int(rng.integers(1, 3)))
            ]
            total = float(rng.integers(0, 3)) + sum(
                reward or 0.0 for part in parts for reward in part
            )
            completions += [sequence(rng, part, total, episode) for part in parts]
        found.append(
            TrainingGroup(
                Group(
                    id=f"g{number}",
                    prompt_id="p",
                    prompt="",
                    ground_truth="",
                    prompt_token_ids=np.array([1], np.int32),
                    completions=completions,
                )
            )
        )
    return found


def expected(
    item: TrainingGroup, discount: float, normalised: bool, eps: float
) -> list[list[float]]:
    """Computes the advantages of every sequence of a group from the definition, in float64 and one
    number at a time."""
    episodes: dict[int, list[Completion]] = {}
    for each in item.group.completions:
        episodes.setdefault(each.episode or 0, []).append(each)
    rewards = {
        k: [turn.reward or 0.0 for one in several for turn in one.turns]
        for k, several in episodes.items()
    }
    left = {k: several[0].reward - sum(rewards[k]) for k, several in episodes.items()}
    ahead = {
        k: [sum(discount ** (u - t) * own[u] for u in range(t, len(own))) for t in range(len(own))]
        for k, own in rewards.items()
    }
    turned = {
        k: [
            own[t] - statistics.fmean(each[t] for each in ahead.values() if len(each) > t)
            for t in range(len(own))
        ]
        for k, own in ahead.items()
    }
    squares = [value**2 for own in turned.values() for value in own]
    spread = (
        (statistics.variance(left.values()) + statistics.fmean(squares)) ** 0.5 + eps
        if normalised
        else 1.0
    )
    found = []
    for k, several in episodes.items():
        turn = 0
        for one in several:
            row: list[float] = []
            for span in one.turns:
                centred = left[k] - statistics.fmean(left.values())
                row += [(centred + turned[k][turn]) / spread] * (span.end - span.start)
                turn += 1
            found.append(row)
    return found


@pytest.mark.parametrize("advantage", ["group_normalised", "group_centred"])
@pytest.mark.parametrize("discount", [0.0, 0.5, 0.95, 1.0])
def test_advantages_of_turns_match_the_definition(
    advantage: str, discount: float, base_model: Path
) -> None:
    made = config(base_model, algorithm__advantage=advantage, environment__turn_discount=discount)
    for seed in range(20):
        items = groups(seed, 3)
        advantages, _ = compute_advantages(Batch.of(items, made), made, 0.0)
        eps = made.algorithm.advantage_eps
        wanted = [
            row
            for item in items
            for row in expected(item, discount, advantage == "group_normalised", eps)
        ]
        assert [len(row) for row in advantages] == [len(row) for row in wanted]
        for row, other in zip(advantages, wanted, strict=True):
            np.testing.assert_allclose(row, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("advantage", ["group_normalised", "group_centred", "batch_normalised"])
def test_without_rewards_of_turns_the_setting_changes_nothing(
    advantage: str, base_model: Path
) -> None:
    items = groups(7, 4, with_rewards=False)
    plain = config(base_model, algorithm__advantage=advantage)
    made = config(base_model, algorithm__advantage=advantage, environment__turn_discount=0.9)
    wanted, _ = compute_advantages(Batch.of(items, plain), plain, 0.0)
    advantages, _ = compute_advantages(Batch.of(items, made), made, 0.0)
    for row, other in zip(advantages, wanted, strict=True):
        np.testing.assert_allclose(row, other, rtol=1e-6, atol=1e-6)


def test_opo_weighs_an_episode_by_the_tokens_of_all_its_sequences(base_model: Path) -> None:
    """The baseline of a group is Σ l·r / Σ l over its episodes, where l counts the sampled tokens
    of an episode."""
    made = config(base_model, algorithm__name="opo")
    items = groups(3, 4, with_rewards=False)
    assert any(len(item.group.completions) > SIZE for item in items), (
        "some episodes have two sequences"
    )

    advantages, _ = compute_advantages(Batch.of(items, made), made, 0.0)

    rows = iter(advantages)
    for item in items:
        lengths = [0] * SIZE
        rewards = [0.0] * SIZE
        for each in item.group.completions:
            assert each.episode is not None
            assert each.mask is not None
            lengths[each.episode] += int(each.mask.sum())
            rewards[each.episode] = each.reward
        baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
        for each in item.group.completions:
            np.testing.assert_allclose(next(rows), each.reward - baseline, rtol=1e-5, atol=1e-6)


def test_a_turn_that_earned_a_reward_is_credited_and_later_turns_are_not(base_model: Path) -> None:
    rng = np.random.default_rng(0)
    completions = [
        sequence(rng, [1.0 if i == 0 else 0.0, 0.0], 1.0 if i == 0 else 0.0, i) for i in range(SIZE)
    ]
    items = [
        TrainingGroup(
            Group(
                id="g",
                prompt_id="p",
                prompt="",
                ground_truth="",
                prompt_token_ids=np.array([1], np.int32),
                completions=completions,
            )
        )
    ]
    made = config(base_model, algorithm__advantage="group_centred", environment__turn_discount=1.0)
    (first, *_), _ = compute_advantages(Batch.of(items, made), made, 0.0)
    length = completions[0].turns[0].end
    np.testing.assert_allclose(first[:length], 0.75)
    np.testing.assert_allclose(first[length:], 0.0)
    whole, _ = compute_advantages(
        Batch.of(items, plain := config(base_model, algorithm__advantage="group_centred")),
        plain,
        0.0,
    )
    np.testing.assert_allclose(whole[0], 0.75)


def test_rounding_of_equal_sums_gives_no_huge_advantage(base_model: Path) -> None:
    rng = np.random.default_rng(0)
    parts: list[list[float | None]] = [
        [0.1, 0.2, 0.7],
        [0.7, 0.2, 0.1],
        [0.3, 0.3, 0.4],
        [0.2, 0.7, 0.1],
    ]
    completions = [
        sequence(rng, own, sum(each or 0.0 for each in own), i) for i, own in enumerate(parts)
    ]
    items = [
        TrainingGroup(
            Group(
                id="g",
                prompt_id="p",
                prompt="",
                ground_truth="",
                prompt_token_ids=np.array([1], np.int32),
                completions=completions,
            )
        )
    ]
    made = config(base_model, environment__turn_discount=1.0)
    advantages, _ = compute_advantages(Batch.of(items, made), made, 0.0)
    assert 0.5 < max(float(np.abs(row).max()) for row in advantages) < 3


@pytest.mark.parametrize("advantage", ["leave_one_out", "length_weighted", "mean_normalised"])
def test_advantages_that_do_not_compare_turns_are_refused(advantage: str, base_model: Path) -> None:
    with raises(ConfigError, field="algorithm.advantage", value=None):
        config(base_model, algorithm__advantage=advantage, environment__turn_discount=0.9)
