"""Batches of random rows with the columns that a critic reads."""

from collections.abc import Sequence

import numpy as np

from trainer.algorithms.batch import Batch, Row, RowTokens

VOCABULARY = 300


def make_batch(count: int, seed: int = 0) -> Batch:
    """Returns a batch of prompts and completions of different lengths, with old values around 0,
    returns around 0.5 and weights around 1.
    """
    rng = np.random.default_rng(seed)
    ids = [
        (
            rng.integers(3, VOCABULARY, int(rng.integers(3, 9))).astype(np.int32),
            rng.integers(3, VOCABULARY, int(rng.integers(1, 12))).astype(np.int32),
        )
        for _ in range(count)
    ]
    batch = batch_of(ids, weights=rng.uniform(0.5, 1.5, count).tolist())
    lengths = [len(completion) for _, completion in ids]
    batch.values = [rng.normal(0, 0.1, length).astype(np.float32) for length in lengths]
    batch.returns = [rng.normal(0.5, 1, length).astype(np.float32) for length in lengths]
    return batch


def batch_of(
    ids: Sequence[tuple[np.ndarray, np.ndarray]], weights: Sequence[float] | None = None
) -> Batch:
    """Returns a batch of these prompts and completions, without values and returns."""
    rows = [
        Row(
            group=f"group-{i}",
            prompt=i,
            prompt_tokens=len(prompt),
            completion_tokens=len(completion),
            trained_tokens=len(completion),
            episode=i,
            reward=0.0,
            weight=weights[i] if weights else 1.0,
            current=True,
            in_loss=True,
        )
        for i, (prompt, completion) in enumerate(ids)
    ]
    tokens = {
        i: RowTokens(
            prompt,
            completion,
            mask=None,
            targets=completion,
            rollout_logprobs=np.zeros(len(completion), np.float32),
        )
        for i, (prompt, completion) in enumerate(ids)
    }
    return Batch(
        [],
        rows,
        tokens,
        group_sizes=[1] * len(rows),
        pass_rates=[0.0] * len(rows),
        own=list(range(len(rows))),
    )
