"""Vectorised sampling of one token per row, with random numbers that do not depend on the rest of
the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.kernels import compiled

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
GREEDY_BELOW = 1e-6
"""Temperatures below this are greedy."""
FIELDS = ("token", "position", "temperature", "top_p", "uniform", "top_k", "min_p")
"""Fields of a row's state; `uniform` is the random number for its next token. Barred tokens (or -1)
follow them."""
IDLE = np.array([[0.0], [0.0], [1.0], [1.0], [0.0], [np.inf], [0.0]])
"""The state of a row that is not in use."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a step, for its rows."""

    state: NDArray[np.float64]
    """[F + barred, B]: `FIELDS`, then tokens that must not be sampled; one array, so that one copy
    suffices."""
    plain: bool
    """No row is greedy or truncated."""
    kept: int = 0
    """Most tokens that truncation keeps in a row that returns them; 0: no row returns them."""
    routed: bool = False
    """Some row returns the experts of its tokens."""


def stream_keys(seeds: Sequence[int]) -> list[int]:
    """Returns the 64-bit key of each row's random numbers, as signed integers."""
    keys: list[int] = (
        _mix(np.array([seed & _MASK for seed in seeds], np.uint64)).view(np.int64).tolist()
    )
    return keys


def uniforms(keys: NDArray[np.int64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns a number in [0, 1) per row as a pure function of (key, counter)."""
    state = keys.view(np.uint64) + (counters.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    found: NDArray[np.float64] = (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits: Tensor, state: Tensor, plain: bool, kept: int = 0) -> Tensor:
    """Samples one token per row of `logits` [B, V], with `state` as in `Inputs`, on their device
    and without waiting.

    Returns tokens and log-probabilities, float64 [2, B]. A log-probability is log_softmax(logits /
    temperature) before any truncation, and log_softmax(logits) if greedy (`temperature` below
    `GREEDY_BELOW`); NaN if the row's logits are not finite. With `kept` there are 2 + kept further
    rows: the log-probability among the tokens that truncation keeps, their number, and the first
    `kept` of them.
    """
    _, _, temperature, top_p, uniform, top_k, min_p = state[: len(FIELDS)]
    invalid = logits.sum(-1) * 0.0  # NaN unless they are finite
    if len(state) > len(FIELDS):
        logits = _barred(logits, state[len(FIELDS) :])
    if plain:
        found = _chosen(logits, temperature, uniform, allowed=None)
        found[1] += invalid
        return found

    greedy = temperature < GREEDY_BELOW
    temperature = torch.where(greedy, 1.0, temperature)
    weights = torch.softmax(logits / temperature.float()[:, None], -1)
    is_kept, order = _truncate(weights, top_p.float(), top_k, min_p=min_p.float())
    likeliest = torch.zeros_like(is_kept).scatter_(1, logits.argmax(-1, keepdim=True), True)
    allowed = torch.where(greedy[:, None], likeliest, is_kept)
    found = _chosen(logits, temperature, uniform, allowed=allowed)
    found[1] += invalid
    if not kept:
        return found
    tokens = found[0].long()
    order[:, 0] = torch.where(greedy, tokens, order[:, 0])
    left = torch.where(allowed, weights, 0.0).sum(-1, dtype=torch.float64)
    among = _of_tokens(weights, tokens) - left.log()
    return torch.cat((found, among[None], allowed.sum(-1)[None], order[:, :kept].T))


def _chosen(
    logits: Tensor, temperature: Tensor, uniform: Tensor, *, allowed: Tensor | None
) -> Tensor:
    """Returns a token of each row of `logits` [B, V] among those `allowed` [B, V], or all, and its
    log-probability among all: float64 [2, B].
    """
    if logits.device.type == "cpu" and compiled():
        drawn = torch.empty(2, len(logits), dtype=torch.float64)
        compiled().draw(
            logits=logits.contiguous(),
            temperatures=temperature.contiguous(),
            uniforms=uniform.contiguous(),
            allowed=allowed,
            out=drawn,
            rows=len(logits),
            size=logits.shape[1],
            threads=torch.get_num_threads(),
        )
        return drawn

    weights = torch.softmax(logits / temperature.float()[:, None], -1)
    if allowed is None:
        tokens, normaliser = _draw(weights, uniform)
    else:
        tokens, _ = _draw(torch.where(allowed, weights, 0.0), uniform)
        # Not 1: over a large vocabulary, softmax sums coarsely.
        normaliser = weights.sum(-1, dtype=torch.float64)
    return torch.stack((tokens.double(), _of_tokens(weights, tokens) - normaliser.log()))


def _of_tokens(weights: Tensor, tokens: Tensor) -> Tensor:
    """Returns the logarithms [B] of the weights [B, V] of one token a row."""
    # As precise as the sums from which they are taken: an only token has the log-probability 0.
    return weights.gather(1, tokens[:, None])[:, 0].double().log()


def _barred(logits: Tensor, barred: Tensor) -> Tensor:
    """Returns logits [B, V] without the tokens `barred` [K, B]; -1 stands for none."""
    rows, vocabulary = logits.shape
    tokens = torch.where(barred < 0, vocabulary, barred).long().T
    padded = torch.cat((logits, logits.new_zeros(rows, 1)), -1)
    return padded.scatter(1, tokens, -torch.inf)[:, :vocabulary]


def _draw(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Inverts the cumulative distribution. Returns the tokens and the sums of the weights.

    A cumulative sum over all of a large V is slow, so it takes two levels, block and token. Sums
    are float64, so that unlikely tokens of a large vocabulary keep their share.
    """
    rows, vocabulary = weights.shape
    width = 1 << (vocabulary.bit_length() // 2)
    blocks = torch.nn.functional.pad(weights, (0, -vocabulary % width)).view(rows, -1, width)
    sums = blocks.sum(-1, dtype=torch.float64)
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1]
    target = (uniform * total)[:, None]
    block = _first_above(cumulative, target)
    target -= cumulative.gather(1, block) - sums.gather(1, block)
    of_block = blocks.gather(1, block[..., None].expand(rows, 1, width))[:, 0]
    token = _first_above(of_block.cumsum(-1, dtype=torch.float64), target)
    return (block * width + token)[:, 0].clamp(max=vocabulary - 1), total


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Returns the first place [B, 1] whose cumulative sum [B, N] is above the target [B, 1]."""
    # Rounding may put the target at the end: keep it on the last place with any weight.
    end = cumulative[:, -1:]
    target = torch.minimum(target, end.nextafter(end.new_zeros(())))
    return torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[1] - 1)


def _truncate(probs: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which tokens [B, V] truncation keeps, and all tokens by falling probability.

    As in SGLang, each bound refers to the whole distribution.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    place = torch.arange(probs.shape[-1], device=probs.device)
    everything = (top_p >= 1)[:, None]  # rounding may lift the full sum above 1
    left = (before <= top_p[:, None]) | everything
    left &= (place < top_k[:, None]) & (ordered >= min_p[:, None] * ordered[:, :1])
    return torch.zeros_like(left).scatter_(1, order, left), order
