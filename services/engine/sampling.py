"""Sampling of one token per row, vectorised, with random numbers that do not depend on what else is in the batch."""

import numpy as np
import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_INDEX_STRIDE = 0xD1B54A32D192ED03
GREEDY_BELOW = 1e-6
"""Temperatures below this are greedy."""


def sample_seed(seed: int, index: int) -> int:
    """Returns the seed of sample `index` of a request with n > 1; a single request with this seed gives the same sample."""
    return (seed + index * _INDEX_STRIDE) & _MASK


def stream_key(seed: int) -> int:
    """Returns the 64-bit key of a row's random numbers as a signed integer for torch.int64."""
    key = int(_mix(np.array([seed & _MASK], np.uint64))[0])
    return key - (1 << 64) if key >> 63 else key


def uniforms(keys: Tensor, counters: Tensor) -> Tensor:
    """Returns a number in [0, 1) per row as a pure function of (key, counter): int64 [B], int64 [B] -> float64 [B]."""
    state = keys.numpy().view(np.uint64) + (counters.numpy().astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    return torch.from_numpy((_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Applies the finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Samples one token per row of `logits` [B, V] with `uniform` [B] numbers. Returns the tokens and their log-probabilities.

    A log-probability is log_softmax(logits / temperature) before any truncation, and log_softmax(logits) where greedy
    (`temperature` below `GREEDY_BELOW`). A row with logits that are not finite gives such a log-probability.
    """
    greedy = temperature < GREEDY_BELOW
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    scaled -= scaled.amax(-1, keepdim=True)
    weights = scaled.exp()
    normaliser = weights.sum(-1, dtype=torch.float64)
    cut = (top_p < 1) & ~greedy
    if bool(cut.any()):
        weights[cut] = _truncate(weights[cut] / normaliser[cut, None].float(), top_p[cut])
    tokens = _draw(weights, uniform)
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, (scaled.gather(1, tokens[:, None])[:, 0] - normaliser.log()).float()


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverts the cumulative distribution in two levels, block and token, because a sum along all of V is slow.

    Sums are float64, so that unlikely tokens of a large vocabulary keep their share.
    """
    rows, vocabulary = weights.shape
    width = 1 << (vocabulary.bit_length() // 2)
    blocks = torch.nn.functional.pad(weights, (0, -vocabulary % width)).view(rows, -1, width)
    cumulative = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = (uniform * cumulative[:, -1])[:, None]
    block = torch.searchsorted(cumulative, target, right=True).clamp(max=blocks.shape[1] - 1)
    target -= torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(rows), block[:, 0]].cumsum(-1, dtype=torch.float64)
    # Rounding may put the target at the end of the block: keep it on the last token with any weight.
    target = torch.minimum(target, inside[:, -1:].nextafter(torch.zeros(1, dtype=torch.float64)))
    token = torch.searchsorted(inside, target, right=True).clamp(max=width - 1)
    return (block * width + token)[:, 0].clamp(max=vocabulary - 1)


def _truncate(probs: Tensor, top_p: Tensor) -> Tensor:
    """Zeroes what top_p excludes. [B, V] -> [B, V], not renormalised."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    keep = ordered.cumsum(-1) - ordered <= top_p[:, None]
    return torch.zeros_like(probs).scatter_(1, order, ordered * keep)
