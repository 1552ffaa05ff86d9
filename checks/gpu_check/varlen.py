"""Compares attention over packed rows with plain attention in float32, forward and backward."""

import numpy as np
import torch
from torch import Tensor

from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting
from learning import attention
from learning.attention import Segments
from learning.layout import moved

_FORWARD = 0.01
_BACKWARD = 0.02
"""Largest error, relative to the norm of the exact result: a few of bfloat16's steps of 0.4 %."""
_CASES = [  # heads, heads of keys and values, window, whether completions share a prompt
    (8, 8, None, False),
    (8, 2, None, False),
    (8, 2, 100, False),
    (14, 2, None, True),
    (8, 2, 100, True),
]


def correctness(found: Findings, setting: Setting) -> None:
    """Checks the variable-length kernel on a GPU, or rows on a CPU, in bfloat16 at head sizes 64,
    128 and 256.
    """
    for size in (64, 128, 256):
        for heads, kv_heads, window, shared in _CASES:
            name = f"head size {size}, {heads}/{kv_heads} heads"
            if window:
                name += f", window {window}"
            if shared:
                name += ", shared prompts"
            segments, pairs = _segments(setting, shared)
            try:
                result, *gradients = _errors(
                    setting, segments, pairs, (heads, kv_heads, size), window
                )
                measured = f"{result:.2%} and {max(gradients):.2%}"
                holds = result <= _FORWARD and max(gradients) <= _BACKWARD
            except RuntimeError as error:  # a kernel that refuses one size may accept others
                measured = str(error).splitlines()[0]
                holds = False
            found.claim(
                f"packed attention, {name}: errors of result and gradients",
                "≤ 1 % and 2 %",
                measured,
                holds,
            )
    probe = torch.empty(1, 8, 64, device=setting.device, dtype=torch.bfloat16)
    has = attention._has_kernel(probe)
    found.claim(
        "the kernel for variable lengths is used",
        str(setting.on_gpu),
        str(has),
        has == setting.on_gpu,
    )


def _segments(setting: Setting, shared: bool) -> tuple[Segments, list[tuple[slice, list[slice]]]]:
    """Returns segments, each with its positions in the row and the positions of its keys."""
    rng = np.random.default_rng(0)
    most = 60 if setting.small else 700
    starts = []
    sizes = []
    prefix_starts = []
    prefixes = []
    places = []
    position = 0
    for _ in range(3):
        prompt_start = position
        prompt = int(rng.integers(2, most))
        for length in (prompt, *(int(n) for n in rng.integers(1, most, 4 if shared else 0)), 1):
            own = slice(position, position + length)
            first = position == prompt_start
            starts.append(position)
            sizes.append(length)
            prefix_starts.append(prompt_start if shared and not first else 0)
            prefixes.append(prompt if shared and not first else 0)
            places.append(
                (
                    own,
                    [own]
                    if not shared or first
                    else [slice(prompt_start, prompt_start + prompt), own],
                )
            )
            position += length
    columns = (np.array(column, np.int64) for column in (starts, sizes, prefix_starts, prefixes))
    return moved(Segments.of(*columns), setting.device), places


def _errors(
    setting: Setting,
    segments: Segments,
    places: list[tuple[slice, list[slice]]],
    shape: tuple[int, int, int],
    window: int | None,
) -> list[float]:
    """Returns the relative errors of the result and of the gradients of queries, keys and
    values.
    """
    torch.manual_seed(0)
    heads, kv_heads, size = shape
    length = places[-1][0].stop
    made = [
        torch.randn(length, count, size, device=setting.device).bfloat16()
        for count in (heads, kv_heads, kv_heads)
    ]
    upper = torch.randn(length, heads, size, device=setting.device).bfloat16()
    low = [each.to(torch.bfloat16, copy=True).requires_grad_() for each in made]
    exact = [each.to(torch.float32, copy=True).requires_grad_() for each in made]
    attend = attention._attend_segments if setting.on_gpu else attention._attend_rows
    result = attend(
        query=low[0], key=low[1], value=low[2], segments=segments, scaling=None, window=window
    )
    result.backward(upper)
    wanted = _plain(query=exact[0], key=exact[1], value=exact[2], places=places, window=window)
    wanted.backward(upper.float())
    pairs = [
        (result, wanted),
        *((one.grad, other.grad) for one, other in zip(low, exact, strict=True)),
    ]
    return [float((one.float() - other).norm() / other.norm()) for one, other in pairs]


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    places: list[tuple[slice, list[slice]]],
    window: int | None,
) -> Tensor:
    """Returns attention by its definition, one segment at a time."""
    results = []
    for own, of_keys in places:
        q = query[own].transpose(0, 1)
        k = _heads_first(key, of_keys, query.shape[1])
        v = _heads_first(value, of_keys, query.shape[1])

        # The last query and the last key are of one token.
        of_queries = torch.arange(k.shape[1] - q.shape[1], k.shape[1], device=q.device)
        behind = of_queries[:, None] - torch.arange(k.shape[1], device=q.device)
        hidden = (behind < 0) | (behind >= (window or k.shape[1]))
        scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
        results.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(results)


def _heads_first(states: Tensor, places: list[slice], heads: int) -> Tensor:
    """Returns [heads, keys, size] from [T, key heads, size]: the states at `places`, repeated."""
    joined = torch.cat([states[place] for place in places])
    return joined.repeat_interleave(heads // states.shape[1], 1).transpose(0, 1)
