"""Random token sequences and targets for critics."""

from collections.abc import Callable

import numpy as np

from common.wire.schemas import TokenSequence, ValueTargets
from tests.support.processes.forks import Forked
from trainer.algorithms.batch import Batch, Row, RowTokens

VOCABULARY = 300
Start = Callable[[], Forked]
"""Starts the service as a process."""


def make_sequences(count: int, seed: int = 0) -> list[TokenSequence]:
    """Returns random prompts and completions of different lengths."""
    rng = np.random.default_rng(seed)
    return [
        TokenSequence(
            rng.integers(3, VOCABULARY, int(rng.integers(3, 9))).astype(np.int32),
            rng.integers(3, VOCABULARY, int(rng.integers(1, 12))).astype(np.int32),
        )
        for _ in range(count)
    ]


def make_rows(count: int, seed: int = 0) -> list[ValueTargets]:
    """Returns random targets, with old values around 0 and weights around 1."""
    rng = np.random.default_rng(seed + 1)
    return [
        ValueTargets(
            sequence.prompt_ids,
            sequence.completion_ids,
            rng.normal(0, 0.1, len(sequence.completion_ids)).astype(np.float32),
            rng.normal(0.5, 1, len(sequence.completion_ids)).astype(np.float32),
            float(rng.uniform(0.5, 1.5)),
        )
        for sequence in make_sequences(count, seed)
    ]


def make_batch(count: int, seed: int = 0) -> Batch:
    """Returns a batch of the same rows, with the columns that a critic reads."""
    targets = make_rows(count, seed)
    rows = [
        Row(
            group=f"group-{i}",
            prompt=i,
            prompt_tokens=len(each.prompt_ids),
            completion_tokens=len(each.completion_ids),
            trained_tokens=len(each.completion_ids),
            episode=i,
            reward=0.0,
            weight=each.weight,
            current=True,
            in_loss=True,
        )
        for i, each in enumerate(targets)
    ]
    tokens = {
        i: RowTokens(
            each.prompt_ids,
            each.completion_ids,
            mask=None,
            targets=each.completion_ids,
            rollout_logprobs=np.zeros_like(each.returns),
        )
        for i, each in enumerate(targets)
    }
    values, returns = [each.old_values for each in targets], [each.returns for each in targets]
    return Batch(
        [],
        rows,
        tokens,
        group_sizes=[1] * len(rows),
        pass_rates=[0.0] * len(rows),
        own=list(range(len(rows))),
        values=values,
        returns=returns,
    )
