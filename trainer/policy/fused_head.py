"""Triton kernels between the matrix products of a linear head: one pass over a block of logits
forwards, one backwards.

With z the logits divided by the temperature, y the target, p the probabilities and H the entropy:
log p(y) = z(y) - lse(z), d log p(y) / dz = onehot(y) - p, and dH / dz = -p · (log p + H). A head
with a cap is left to torch's operators. See docs/adr/0027-head.md.
"""

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 4096
_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed for mypy here
def _statistics(  # type: ignore[no-untyped-def]  # noqa: PLR0917  # Triton compiles it
    logits, targets, logprobs, entropies, normalisers, vocabulary, scale, BLOCK: tl.constexpr
):
    """Reads one row of logits once. Sums of exp are relative to the largest logit so far, so none
    overflows or cancels.
    """
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * vocabulary
    largest = -1e30
    total = 0.0
    weighted = 0.0  # finite, like the padding of a row: 0 times it is not NaN
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logit = tl.load(line + columns, mask=columns < vocabulary, other=-1e30)
        z = logit * scale
        highest = tl.maximum(largest, tl.max(z, 0))
        shift = largest - highest
        factor = tl.exp(largest - highest)
        below = z - highest
        terms = tl.exp(below)
        weighted = factor * (weighted + total * shift) + tl.sum(
            tl.where(terms > 0, terms * below, 0.0), 0
        )
        total = factor * total + tl.sum(terms, 0)
        largest = highest
    normaliser = largest + tl.log(total)
    of_target = tl.load(line + tl.load(targets + row))
    tl.store(logprobs + row, of_target * scale - normaliser)
    tl.store(entropies + row, tl.log(total) - weighted / total)
    tl.store(normalisers + row, normaliser)


@triton.jit  # type: ignore[untyped-decorator]  # triton is not typed for mypy here
def _gradient(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917  # Triton compiles it
    logits,
    targets,
    normalisers,
    entropies,
    by_logprob,
    by_entropy,
    gradient,
    vocabulary,
    scale,
    BLOCK: tl.constexpr,
):
    """Writes one block of one row of the gradient."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    of_logprob = tl.load(by_logprob + row) * scale
    logit = tl.load(logits + row * vocabulary + columns, mask=inside, other=-1e30)
    z = logit * scale
    log_p = z - tl.load(normalisers + row)
    p = tl.exp(log_p)
    slope = of_logprob * (tl.where(columns == tl.load(targets + row), 1.0, 0.0) - p)
    if by_entropy is not None:
        of_entropy = tl.load(by_entropy + row) * scale
        slope -= of_entropy * tl.where(p > 0, p * (log_p + tl.load(entropies + row)), 0.0)
    tl.store(gradient + row * vocabulary + columns, slope, mask=inside)


def statistics(logits: "Tensor", targets: "Tensor", temperature: float, result: "Tensor") -> None:
    """Computes the log-probabilities of `targets` [N], entropies and normalisers of `logits` [N, V]
    into `result` [3, N], in nats.
    """
    count, vocabulary = logits.shape
    if count == 0:
        return
    logprobs, entropies, normalisers = result.unbind()
    _statistics[(count,)](
        logits,
        targets,
        logprobs=logprobs,
        entropies=entropies,
        normalisers=normalisers,
        vocabulary=vocabulary,
        scale=1 / temperature,
        BLOCK=_block(vocabulary),
        num_warps=_WARPS,
    )


def gradient(
    logits: "Tensor",
    targets: "Tensor",
    *,
    statistics: "Tensor",
    by_logprob: "Tensor",
    by_entropy: "Tensor | None",
    temperature: float,
    result: "Tensor",
) -> None:
    """Computes the gradient [N, V] of the logits from those [N] of log-probabilities and entropies
    and what `statistics` computed, into `result` [N, V].
    """
    count, vocabulary = logits.shape
    if count == 0:
        return
    block = _block(vocabulary)
    _gradient[(count, triton.cdiv(vocabulary, block))](
        logits,
        targets,
        normalisers=statistics[2],
        entropies=statistics[1],
        by_logprob=by_logprob.contiguous(),
        by_entropy=None if by_entropy is None else by_entropy.contiguous(),
        gradient=result,
        vocabulary=vocabulary,
        scale=1 / temperature,
        BLOCK=block,
        num_warps=_WARPS,
    )


def _block(vocabulary: int) -> int:
    return min(_BLOCK, int(triton.next_power_of_2(vocabulary)))
