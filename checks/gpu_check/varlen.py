"""Compares attention over packed rows with plain attention in float32, forward and backward."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting
from learning import attention
from learning.attention import Scores, Segments
from learning.layout import moved

_FORWARD = 0.01
_BACKWARD = 0.02
"""Largest error, relative to the norm of the exact result: a few of bfloat16's steps of 0.4 %."""


class _Case(NamedTuple):
    heads: int
    kv_heads: int
    window: int | None = None
    shared: bool = False
    """Whether completions share a prompt."""
    sinks: bool = False
    narrow: bool = False
    """Whether values have half the size of keys."""

    @property
    def name(self) -> str:
        parts = [f"{self.heads}/{self.kv_heads} heads"]
        parts += [f"window {self.window}"] if self.window else []
        parts += ["shared prompts"] if self.shared else []
        parts += ["sinks"] if self.sinks else []
        parts += ["values of half the size"] if self.narrow else []
        return ", ".join(parts)


_CASES = [
    _Case(8, 8),
    _Case(8, 2),
    _Case(8, 2, window=100),
    _Case(14, 2, shared=True),
    _Case(8, 2, window=100, shared=True),
    _Case(8, 2, shared=True, sinks=True),
    _Case(8, 2, window=100, sinks=True),
    _Case(8, 8, shared=True, narrow=True),
]


def correctness(found: Findings, setting: Setting) -> None:
    """Checks the variable-length kernel on a GPU, or rows on a CPU, in bfloat16 at head sizes 64,
    128 and 256.
    """
    for size in (64, 128, 256):
        for case in _CASES:
            segments, pairs = _segments(setting, case.shared)
            try:
                result, *gradients = _errors(setting, segments, pairs, size, case)
                measured = f"{result:.2%} and {max(gradients):.2%}"
                holds = result <= _FORWARD and max(gradients) <= _BACKWARD
            except RuntimeError as error:  # a kernel that refuses one size may accept others
                measured = str(error).splitlines()[0]
                holds = False
            found.claim(
                f"packed attention, head size {size}, {case.name}: errors of result and gradients",
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
    size: int,
    case: _Case,
) -> list[float]:
    """Returns the relative errors of the result and of the gradients of queries, keys, values and
    sinks.
    """
    torch.manual_seed(0)
    length = places[-1][0].stop
    values = size // 2 if case.narrow else size
    shapes = [
        (length, case.heads, size),
        (length, case.kv_heads, size),
        (length, case.kv_heads, values),
        *([(case.heads,)] if case.sinks else []),
    ]
    made = [torch.randn(shape, device=setting.device).bfloat16() for shape in shapes]
    upper = torch.randn(length, case.heads, values, device=setting.device).bfloat16()
    low = [each.to(torch.bfloat16, copy=True).requires_grad_() for each in made]
    exact = [each.to(torch.float32, copy=True).requires_grad_() for each in made]
    attend = attention._attend_segments if setting.on_gpu else attention._attend_rows
    scores = Scores(size**-0.5, window=case.window, sinks=low[3] if case.sinks else None)
    result = attend(low[0], low[1], low[2], segments=segments, scores=scores)
    result.backward(upper)
    wanted = _plain(exact, places=places, window=case.window)
    wanted.backward(upper.float())
    pairs = [
        (result, wanted),
        *((one.grad, other.grad) for one, other in zip(low, exact, strict=True)),
    ]
    return [float((one.float() - other).norm() / other.norm()) for one, other in pairs]


def _plain(
    tensors: list[Tensor], places: list[tuple[slice, list[slice]]], window: int | None
) -> Tensor:
    """Returns attention by its definition, one segment at a time: of queries, keys, values and, if
    there are any, sinks.
    """
    query, key, value, *sinks = tensors
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
        for sink in sinks:
            column = sink[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, column], -1)
        results.append((scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1))
    return torch.cat(results)


def _heads_first(states: Tensor, places: list[slice], heads: int) -> Tensor:
    """Returns [heads, keys, size] from [T, key heads, size]: the states at `places`, repeated."""
    joined = torch.cat([states[place] for place in places])
    return joined.repeat_interleave(heads // states.shape[1], 1).transpose(0, 1)
