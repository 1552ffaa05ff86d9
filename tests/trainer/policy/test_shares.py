"""Every rank has the tokens of its own rows, and together they learn what one process learns."""

import json
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.settings.config import Config, load
from common.wire.codec import encode_groups
from common.wire.schemas import Group
from learning.batching import Indices, Sizes, mini_batches, owners, shares
from learning.ranks import Ranks
from tests.support.batches.groups import batch_of, known, off_policy_groups, with_algorithm
from tests.support.processes.ranks import run_ranks
from tests.support.workers.distributed_batch import numbers, scored_rows, weighted
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.policy.critic import value_function
from trainer.policy.learn import distributed_batch, learn
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference

RANKS = 3


def totals(count: int) -> Callable[[Tensor], Tensor]:
    """Returns what sums tensors over `count` threads, as `Ranks.sum_shares` does over ranks."""
    barrier = threading.Barrier(count)
    given: list[Tensor] = []

    def total(values: Tensor) -> Tensor:
        given.append(values)
        barrier.wait(10)
        found = torch.stack(given).sum(0)
        if barrier.wait(10) == 0:
            given.clear()
        barrier.wait(10)
        return found

    return total


def columns(batch: Batch) -> Batch:
    rng = np.random.default_rng(4)

    def column() -> list[np.ndarray]:
        return [rng.normal(-1, 0.3, length).astype(np.float32) for length in batch.lengths]

    batch.old_logprobs, batch.ref_logprobs, batch.values = column(), column(), column()
    return batch


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": "gae", "kl_coef": 0.2, "kl_in": "reward", "mask_truncated": True},
        {"advantage": "group_centred", "kl_coef": 0.2, "kl_in": "reward"},
        {"advantage": "batch_normalised"},
        {"advantage": "reward_normalised"},
        {"name": "opd"},
    ],
    ids=lambda algorithm: str(algorithm.get("advantage", "opd")),
)
@pytest.mark.parametrize("rows_of_last", [0, 3])
def test_ranks_compute_the_advantages_of_their_rows(
    config: Config, algorithm: dict[str, Any], rows_of_last: int
) -> None:
    """Also where a rank has no row at all."""
    config = with_algorithm(config, **algorithm)
    groups = off_policy_groups()
    groups[0].completions[1].finish_reason = "length"
    whole = columns(batch_of(groups, config, step=1))
    expected, expected_returns = compute_advantages(whole, config, 0.2)
    owner = np.arange(len(whole.rows)) % 2
    owner[len(owner) - rows_of_last :] = 2
    total = totals(RANKS)

    def of_rank(rank: int) -> Batch:
        batch = columns(batch_of(groups, config, step=1))
        batch.assign(owner, rank)
        for column in (batch.old_logprobs, batch.ref_logprobs, batch.values):
            for i in set(range(len(owner))) - set(batch.own):
                known(column)[i] = np.zeros(0, np.float32)
        batch.tokens = {i: batch.tokens[i] for i in batch.own}
        batch.advantages, batch.returns = compute_advantages(batch, config, 0.2, total)
        return batch

    with ThreadPoolExecutor(RANKS) as threads:
        found = list(threads.map(of_rank, range(RANKS)))
    for i, rank in enumerate(owner.tolist()):
        np.testing.assert_allclose(known(found[rank].advantages)[i], expected[i], atol=1e-5)
        if expected_returns is not None:
            returns = known(found[rank].returns)[i]
            np.testing.assert_allclose(returns, expected_returns[i], atol=1e-5)
        assert [len(known(batch.advantages)[i]) > 0 for batch in found] == [
            each == rank for each in range(RANKS)
        ]


def test_rows_keep_their_owners_and_every_mini_batch_is_even() -> None:
    rng = np.random.default_rng(0)
    count = 400
    sizes = Sizes(
        prompts=np.full(count, 50),
        completions=rng.integers(1, 1000, count),
        groups=np.arange(count) // 8,
        shared=True,
    )
    order = rng.permutation(count)
    minis: list[Indices] = np.array_split(order, 4)
    sizes.owners = owners(sizes, minis, 4)
    for mini in minis:
        parts = shares(sizes, mini, 4)
        costs = [float(sizes.costs(part).sum()) for part in parts]
        assert max(costs) < 1.1 * min(costs)
        for share, part in enumerate(parts):
            assert (sizes.owners[part] == share).all()
            assert np.array_equal(sizes.order(part), part)


class Posted(Ranks):
    """One of several ranks, whose messages from rank 0 lie in `sent`."""

    sent: list[Any]

    def scatter(self, value: Any, part: Callable[[int], Any]) -> tuple[Any, Any]:
        """See `Ranks`."""
        if self.is_rank_zero:
            self.sent = [pickle.dumps((value, part(share))) for share in range(self.world_size)]
            return value, part(0)
        found: tuple[Any, Any] = pickle.loads(self.sent[self.rank])  # noqa: S301
        return found


@pytest.mark.parametrize("count", [2, 40])
def test_every_rank_gets_the_tokens_of_its_rows_and_rank_zero_keeps_all(
    config: Config, count: int
) -> None:
    """Rows are divided so that every mini-batch is even, of rows with and without a gradient
    apart."""
    config = with_algorithm(config, mini_batches=2)
    config.seed = 3
    groups = [TrainingGroup(group) for group in off_policy_groups()]
    policy = Policy(config, Ranks())
    policy.step = 5
    whole = Batch.of(groups, config, policy.step)
    policy.ranks = sender = Posted(0, count, shard_size=1)

    first = distributed_batch(groups, policy)

    equal = np.array([row.equal for row in whole.rows])
    rows = np.arange(len(whole.rows))
    parts = [rows]
    for mini in mini_batches(len(rows), 2, seed=(3 * 1_000_003 + 5) * 1_000):
        parts += [mini[equal[mini]], mini[~equal[mini]]]
    wanted = owners(whole.sizes(policy.scorer.layout.shared), parts, count)
    found: list[int] = []
    for rank in range(count):
        policy.ranks = Posted(rank, count, shard_size=1)
        policy.ranks.sent = sender.sent
        batch = first if rank == 0 else distributed_batch([], policy)
        assert batch.rows == whole.rows
        assert known(batch.owners).tolist() == wanted.tolist()
        assert batch.own == rows[wanted == rank].tolist()
        # Whoever has no row takes part with the first one.
        assert list(batch.tokens) == (rows.tolist() if rank == 0 else batch.own or [0])
        for row, tokens in batch.tokens.items():
            assert np.array_equal(tokens.completion_ids, whole.tokens[row].completion_ids)
        assert len(batch.groups) == (len(groups) if rank == 0 else 0)
        found += batch.own
    assert sorted(found) == rows.tolist()


@pytest.mark.integration
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_two_ranks_learn_from_a_batch_that_rank_zero_has(
    policy_dir: Path, tmp_path: Path, name: str
) -> None:
    groups = off_policy_groups()
    (tmp_path / "groups.msgpack").write_bytes(encode_groups(groups))
    words = ["--model.name", str(policy_dir), "--algorithm.name", name]
    words += ["--algorithm.mini_batches", "2", "--trainer.micro_batch_tokens", "30"]
    words += ["--algorithm.rollout_correction", "none"]
    run_ranks(2, "distributed_batch", str(tmp_path), *words)
    told = [json.loads((tmp_path / f"told{rank}.json").read_text()) for rank in (0, 1)]

    assert told[0]["update"] == pytest.approx(told[1]["update"])
    rows = [set(each["own"]) for each in told]
    assert rows[0] | rows[1] == set(range(16))
    assert not rows[0] & rows[1]
    assert set(told[1]["tokens"]) == rows[1], "a rank receives the tokens of its rows only"
    one, scored = alone(groups, words)
    assert told[0]["advantages"] == 16, "rank 0 records all rows"
    assert told[0]["scored"] == scored
    one["pass_fill"] = told[0]["update"]["pass_fill"]  # two ranks cut other passes
    assert told[0]["update"] == pytest.approx(one, rel=2e-4, abs=1e-5)


def alone(groups: list[Group], words: list[str]) -> tuple[dict[str, float], int]:
    """Returns the metrics of the same update in one process, and how many rows have
    log-probabilities.
    """
    config = load(words, {})
    policy = Policy(config, Ranks())
    policy.step = 1
    critic = value_function(config, Ranks(), None)
    batch = Batch.of(weighted(groups), config, 1)
    update, metrics = learn(policy, Reference(policy), critic, batch)
    return numbers(update, metrics), scored_rows(batch, update)
