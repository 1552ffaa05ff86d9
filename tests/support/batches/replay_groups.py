"""Small groups for the tests of the replay buffer."""

from collections.abc import Callable

import numpy as np

from common.wire.schemas import Completion, Group

MakeGroup = Callable[..., Group]
"""The type of `make_group`."""


def make_group(
    group_id: str,
    version: int = 0,
    position: int = 0,
    rewards: tuple[float, ...] = (0.0, 1.0),
    tokens: int = 3,
    prompt_id: str = "p1",
) -> Group:
    """Returns a group of completions with these rewards; a reward above 0 means a right answer."""
    completions = [
        Completion(
            token_ids=np.arange(tokens, dtype=np.int32) + i,
            logprobs=np.linspace(-1.5, -0.25, tokens, dtype=np.float32),
            text=f"answer {i}",
            finish_reason="stop",
            weight_versions=[(version, 0, tokens)],
            reward=reward,
            correct=reward > 0,
        )
        for i, reward in enumerate(rewards)
    ]
    prompt = np.array([1, 2], np.int32)
    return Group(
        id=group_id,
        prompt_id=prompt_id,
        prompt="1 + 1?",
        ground_truth="2",
        prompt_token_ids=prompt,
        completions=completions,
        position=position,
        created_at=5.0,
    )
