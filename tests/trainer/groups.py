"""Groups sampled from nothing in particular."""

import numpy as np

from common.schemas import Completion, Group

VOCABULARY = 300


def make_group(rng: np.random.Generator, rewards: list[float], version: int = 0, position: int = 0) -> Group:
    """A group of random completions of different lengths with the given rewards."""
    completions = []
    for reward in rewards:
        length = int(rng.integers(2, 12))
        completions.append(
            Completion(
                token_ids=rng.integers(3, VOCABULARY, length).astype(np.int32),
                logprobs=np.log(rng.uniform(1e-3, 1e-2, length)).astype(np.float32),
                text="x",
                finish_reason="stop",
                weight_versions=[(version, 0, length)],
                reward=reward,
                correct=reward > 0,
            )
        )
    return Group(
        id=f"group-{position}-{rng.integers(1 << 30)}",
        prompt_id=f"prompt-{position}",
        prompt="How many?",
        ground_truth="1",
        prompt_token_ids=rng.integers(3, VOCABULARY, int(rng.integers(3, 9))).astype(np.int32),
        completions=completions,
        position=position,
    )
