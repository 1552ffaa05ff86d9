"""How a group carries which experts computed its tokens."""

import numpy as np

from common.wire.schemas import Group

_ONE_BYTE = 256
"""Numbers below this fit into a byte."""


def split_routing(group: Group) -> None:
    """Moves the experts of the prompt, which every completion came with, to the group, once; makes
    all numbers one byte if none is above 255.

    Those of the first completion are kept. Others differ only in experts that are nearly equal, and
    only for tokens of the prompt that the engine computed again instead of finding them cached.
    """
    prompt_tokens = len(group.prompt_token_ids)
    numbers = [completion.routed_experts.view("<u2") for completion in group.completions]
    size = "<u2"
    # The experts of a long group are its largest part: half the bytes.
    if all(int(array.max()) < _ONE_BYTE for array in numbers):
        size = "<u1"
    for completion, array in zip(group.completions, numbers, strict=True):
        tokens = prompt_tokens + len(completion.token_ids) - 1
        of_prompt, of_completion = np.split(array.astype(size).reshape(tokens, -1), [prompt_tokens])
        completion.routed_experts = of_completion.reshape(-1).view(np.uint8)
        if completion is group.completions[0]:
            group.prompt_routed_experts = of_prompt.reshape(-1).view(np.uint8)
