"""How rank 0 shares the groups of a batch with the other ranks."""

import pickle
from typing import Any

import numpy as np
import pytest

from learning.ranks import Ranks
from tests.support.batches.groups import make_group
from trainer.algorithms.batch import TrainingGroup
from trainer.rollouts.rollouts import FollowerRollouts


class Told(Ranks):
    """A rank above 0 that receives `value`."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.rank, self.world_size, self.value = 1, 2, pickle.dumps(value)

    def broadcast(self, value: Any) -> Any:
        assert not value
        return pickle.loads(self.value)  # noqa: S301  # as torch does between ranks


@pytest.fixture
def groups() -> list[TrainingGroup]:
    """Two fresh groups, and two reused ones with their weights."""
    rng = np.random.default_rng(0)
    made = [make_group(rng, [1.0, 0.0, 0.5], version=i, position=i) for i in range(4)]
    return [
        *map(TrainingGroup, made[:2]),
        TrainingGroup(made[2], 0.1, True),
        TrainingGroup(made[3], 1 / 3, True),
    ]


def assert_same(found: list[TrainingGroup], expected: list[TrainingGroup]) -> None:
    assert [(item.weight, item.reused) for item in found] == [
        (item.weight, item.reused) for item in expected
    ]
    for mine, theirs in zip(
        (item.group for item in found), (item.group for item in expected), strict=True
    ):
        np.testing.assert_array_equal(mine.prompt_token_ids, theirs.prompt_token_ids)
        names = ("id", "prompt_id", "prompt", "ground_truth", "epoch", "position", "created_at")
        assert [getattr(mine, name) for name in names] == [getattr(theirs, name) for name in names]
        for ours, other in zip(mine.completions, theirs.completions, strict=True):
            np.testing.assert_array_equal(ours.token_ids, other.token_ids)
            np.testing.assert_array_equal(ours.logprobs, other.logprobs)
            assert (ours.reward, ours.correct, ours.finish_reason) == (
                other.reward,
                other.correct,
                other.finish_reason,
            )
            assert ours.weight_versions == other.weight_versions


def test_a_rank_above_0_gets_the_groups_of_rank_0(
    groups: list[TrainingGroup],
) -> None:
    assert_same(FollowerRollouts(Told(groups)).next(step=3), groups)
