"""Log-probabilities and entropies of given tokens, computed without all logits in memory at
once.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from learning.final_logits import FinalLogits
from learning.head import float32_logits, float32_product
from learning.kernels import has_triton
from learning.support import Support

_PLAIN = FinalLogits()
_CHUNK_BYTES = 1 << 30
"""Maximum size of the float32 logits in memory."""
_CPU_CHUNK = 512
"""Maximum tokens per chunk on a CPU, so that the logits of a small vocabulary fit into its
caches."""
_KEPT_BYTES = 64 << 20
_GPU_KEPT_BYTES = 5 << 30
"""Up to these sizes, probabilities are kept for the backward pass; larger ones are recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """How scores are computed from the output of a head."""

    temperature: float
    """Divides the logits; includes the scale of the model's final logits."""
    cap: float | None
    """c in c · tanh(z / c) of the head's output z; None without a cap."""
    entropy_gradient: bool
    """Whether the entropies get a gradient."""
    float32: bool
    """Whether logits are computed in float32, not in the precision of the hidden states."""
    support: Support | None
    """The tokens that each target was sampled from; None for the whole vocabulary."""


def token_scores(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_gradient: bool,
    float32: bool = True,
    support: Support | None = None,
    final: FinalLogits = _PLAIN,
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities [C] of `targets` under softmax(logits / temperature), and entropies
    [C], in nats.

    log p(y) = z_y − log Σ_v exp z_v and H = −Σ_v p_v · log p_v, where z are the logits divided by
    the temperature. Everything after the logits is float32. A plain linear head has a hand-written
    gradient; other heads use autograd.

    Args:
        head: returns [C, V] from `hidden`.
        hidden: [C, H] the final hidden states that predict the targets.
        targets: [C] token ids.
        temperature: the sampling temperature.
        entropy_gradient: whether the entropies get a gradient.
        float32: whether logits are float32; else they are rounded to the precision of `hidden`.
        support: restricts the distribution to the tokens that each target was sampled from.
        final: what the model does to the output of its head.
    """
    # Logits are scale · c · tanh(z / c) with c = cap / scale: the scale is part of the temperature.
    options = _Options(
        temperature=temperature / final.scale,
        cap=None if final.cap is None else final.cap / final.scale,
        entropy_gradient=entropy_gradient,
        float32=float32,
        support=support,
    )
    needs_gradient = torch.is_grad_enabled()
    if type(head) is nn.Linear:
        weight = head.weight
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        # `apply` takes no keywords.
        logprobs, entropy = _LinearScores.apply(
            hidden, weight, head.bias, targets, options, needs_gradient
        )
        return logprobs, entropy

    vocabulary = max(parameter.shape[0] for parameter in head.parameters() if parameter.ndim > 1)
    size = _chunk_size(hidden, vocabulary)
    recomputes = len(hidden) > size and needs_gradient
    logprob_parts: list[Tensor] = []
    entropy_parts: list[Tensor] = []
    for start in range(0, max(1, len(hidden)), size):
        chunk = slice(start, start + size)
        if recomputes:
            logprobs, entropy = checkpoint(
                _chunk_scores,
                head,
                hidden[chunk],
                targets[chunk],
                start=start,
                options=options,
                use_reentrant=False,
            )
        else:
            logprobs, entropy = _chunk_scores(
                head, hidden[chunk], targets[chunk], start=start, options=options
            )
        logprob_parts.append(logprobs)
        entropy_parts.append(entropy)
    return torch.cat(logprob_parts), torch.cat(entropy_parts)


def _chunk_size(hidden: Tensor, vocabulary: int) -> int:
    """Returns how many tokens' logits are in memory at once."""
    size = max(1, _CHUNK_BYTES // (4 * vocabulary))
    return size if hidden.is_cuda else min(size, _CPU_CHUNK)


def _chunk_scores(
    head: nn.Module, hidden: Tensor, targets: Tensor, *, start: int, options: _Options
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities [N] and entropies [N] of the N tokens from `start` on."""
    if options.float32:
        with torch.autocast(hidden.device.type, enabled=False):
            weights = {name: parameter.float() for name, parameter in head.named_parameters()}
            output = functional_call(head, weights, hidden.float())
    else:
        output = head(hidden).float()

    logits = FinalLogits(cap=options.cap).of(output) / options.temperature
    if options.support is not None:
        logits = options.support.apply(logits.clone(), start)
    normaliser = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    with torch.set_grad_enabled(options.entropy_gradient and torch.is_grad_enabled()):
        entropy = normaliser - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    return logprobs, entropy


def _kernels(device_type: str) -> ModuleType | None:
    """Returns the Triton kernels of a head for this kind of device; None where torch's own
    operators are used.
    """
    if not has_triton(device_type):
        return None
    from trainer.policy import fused_head

    return fused_head


class _LinearScores(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """Scores under a linear head.

    With p the probabilities, y the target and H the entropy: d logprob / d logits = onehot(y) − p,
    and d H / d logits = −p · (log p + H). Only p − onehot(y) is kept, or nothing if that is large.
    The gradient factor of a token is multiplied into its hidden state, which saves a pass over the
    matrix of logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: _Options,
        needs_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities [C] and entropies [C] from hidden [C, H], weight [V, H], bias
        [V] and targets [C].
        """
        kernels = _kernels(hidden.device.type)
        size = _chunk_size(hidden, len(weight))
        cast = weight.to(hidden.dtype)

        kept: Tensor | None = None  # [C, V] p − onehot(y), times the derivative of the cap
        one_factor = not options.entropy_gradient  # the entropy has another gradient matrix
        exact = kernels is not None or hidden.dtype == torch.float32
        if needs_gradient and one_factor and exact:
            limit = _GPU_KEPT_BYTES if kernels else _KEPT_BYTES
            if hidden.element_size() * len(hidden) * len(weight) <= limit:
                kept = hidden.new_empty(len(hidden), len(weight))

        # Log-probabilities, entropies and normalisers.
        statistics = hidden.new_empty(3, len(hidden), dtype=torch.float32)
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            target = targets[chunk]
            slope = None if kept is None else kept[chunk]
            logits = _logits(hidden[chunk], cast, bias, float32=options.float32)
            bend = None
            if kernels is None:  # the kernels cap by themselves
                bend = _cap(logits, options.cap, with_derivative=slope is not None)
            if options.support is not None:
                options.support.apply(logits, start)

            if kernels is not None:
                kernels.statistics(
                    logits,
                    target,
                    temperature=options.temperature,
                    cap=options.cap,
                    result=statistics[:, chunk],
                )
                if slope is not None:
                    # -temperature leaves the factor to the backward pass.
                    by_logprob = torch.full_like(statistics[0, chunk], -options.temperature)
                    kernels.gradient(
                        logits,
                        target,
                        normalisers=statistics[2, chunk],
                        entropies=statistics[1, chunk],
                        by_logprob=by_logprob,
                        by_entropy=None,
                        temperature=options.temperature,
                        cap=options.cap,
                        result=slope,
                    )
                del logits  # before the next chunk's are computed
                continue

            log_p = _log_probabilities(logits, options.temperature)
            statistics[0, chunk] = log_p.gather(-1, target[:, None])[:, 0]
            p = torch.exp(log_p, out=slope)
            statistics[1, chunk] = -log_p.mul_(p).sum(-1)
            if slope is not None:
                _subtract_targets(p, target)
                if bend is not None:
                    p.mul_(bend)

        logprobs, entropies, normalisers = (row.clone() for row in statistics)
        ctx.options = options
        ctx.kernels = kernels
        ctx.chunk_size = size if kept is None else max(1, len(hidden))
        ctx.save_for_backward(hidden, weight, bias, targets, kept, normalisers, entropies)
        if not options.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of `forward`'s arguments from those of its results, [C] each."""
        options: _Options = ctx.options
        hidden, weight, bias, targets, kept, normalisers, entropies = ctx.saved_tensors
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        cast = weight.to(hidden.dtype)
        hidden_gradient = torch.empty_like(hidden) if to_hidden else None
        weight_gradient: Tensor | None = None
        bias_gradient: Tensor | None = None
        if bias is not None and to_bias:
            bias_gradient = torch.zeros_like(bias, dtype=torch.float32)

        for start in range(0, len(hidden), ctx.chunk_size):
            chunk = slice(start, start + ctx.chunk_size)
            factor = (-by_logprob[chunk] / options.temperature)[:, None]
            if kept is not None:
                slope = kept
            else:
                slope, factor = _recomputed(
                    _logits(hidden[chunk], cast, bias, float32=options.float32),
                    targets[chunk],
                    factor,
                    start=start,
                    kernels=ctx.kernels,
                    options=options,
                    normalisers=normalisers[chunk],
                    entropies=entropies[chunk],
                    by_logprob=by_logprob[chunk],
                    by_entropy=by_entropy[chunk] if options.entropy_gradient else None,
                    dtype=hidden.dtype,
                )

            if hidden_gradient is not None:
                torch.mul(slope @ cast, factor, out=hidden_gradient[chunk])
            if to_weight:
                product = float32_product(slope.t(), (hidden[chunk] * factor).to(hidden.dtype))
                if weight_gradient is None:
                    weight_gradient = product
                else:
                    weight_gradient.add_(product)
                del product
            if bias_gradient is not None:
                bias_gradient += float32_product(slope.t(), factor.to(hidden.dtype))[:, 0]
            del slope  # before the next chunk's is computed

        if to_weight and weight_gradient is None:
            weight_gradient = torch.zeros_like(weight)
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
            None,  # targets
            None,  # options
            None,  # needs_gradient
        )


def _recomputed(
    logits: Tensor,
    targets: Tensor,
    factor: Tensor,
    *,
    start: int,
    kernels: ModuleType | None,
    options: _Options,
    normalisers: Tensor,
    entropies: Tensor,
    by_logprob: Tensor,
    by_entropy: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of N tokens' logits as slope [N, V] · factor [N, 1]; may overwrite
    `logits` [N, V].

    `factor` is that of p − onehot(y), the gradient by the log-probabilities. With a gradient of the
    entropies there is no common factor: the slope is their sum, and the factor is 1.
    """
    bend = None
    if kernels is None:
        bend = _cap(logits, options.cap, with_derivative=True)
    if options.support is not None:
        options.support.apply(logits, start)

    if kernels is not None:
        slope = torch.empty_like(logits, dtype=dtype)
        kernels.gradient(
            logits,
            targets,
            normalisers=normalisers,
            entropies=entropies,
            by_logprob=by_logprob,
            by_entropy=by_entropy,
            temperature=options.temperature,
            cap=options.cap,
            result=slope,
        )
        return slope, torch.ones_like(factor)

    log_p = _log_probabilities(logits, options.temperature)
    p = log_p.exp()
    if by_entropy is None:
        exact = _subtract_targets(p, targets)
    else:
        by_logits = -by_entropy[:, None] / options.temperature
        exact = log_p.add_(entropies[:, None]).mul_(p).mul_(by_logits)
        exact.addcmul_(_subtract_targets(p, targets), factor)
        factor = torch.ones_like(factor)
    if bend is not None:
        exact.mul_(bend)
    return exact.to(dtype), factor


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, float32: bool) -> Tensor:
    """Returns logits [tokens, vocabulary] in float32; unless `float32`, rounded to the precision of
    `hidden`.
    """
    if float32:
        return float32_logits(hidden, weight, bias)
    cast = None if bias is None else bias.to(hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden, weight, cast).float()


def _cap(logits: Tensor, cap: float | None, with_derivative: bool) -> Tensor | None:
    """Replaces z by cap · tanh(z / cap) in `logits` [tokens, vocabulary]; returns the derivative if
    it is asked for.

    Without a cap it does nothing.
    """
    if cap is None:
        return None
    logits.div_(cap).tanh_()
    derivative = 1 - logits**2 if with_derivative else None
    logits.mul_(cap)
    return derivative


def _log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Returns log-probabilities [tokens, vocabulary]; may overwrite `logits`."""
    return torch.log_softmax(logits if temperature == 1 else logits.div_(temperature), dim=-1)


def _subtract_targets(p: Tensor, targets: Tensor) -> Tensor:
    """Subtracts onehot(targets) from p in place; returns p."""
    return p.scatter_add_(1, targets[:, None], p.new_full((len(p), 1), -1.0))
