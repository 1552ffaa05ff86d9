"""Random rows of worked answers, for the random tiny models."""

import numpy as np

from tests.support.groups import VOCABULARY
from trainer.sft.rows import Row


def random_rows(count: int, seed: int) -> list[Row]:
    """Returns rows of different lengths; in some, a passage between two answers is not learned."""
    rng, rows = np.random.default_rng(seed), list[Row]()
    for n in range(count):
        length = int(rng.integers(4, 12))
        learned = np.ones(length, np.float32)
        if n % 2:
            learned[1 : int(rng.integers(2, length - 1))] = 0
        prompt = rng.integers(3, VOCABULARY, int(rng.integers(3, 9)))
        rows.append(Row(prompt.astype(np.int32), rng.integers(3, VOCABULARY, length).astype(np.int32), learned))
    return rows
