"""Log-probabilities and entropies of given tokens, computed without all logits in memory at
once.
"""

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
_KEPT_BYTES, _GPU_KEPT_BYTES = 64 << 20, 5 << 30
"""Up to these sizes, probabilities are kept for the backward pass; larger ones are recomputed."""


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
    """Returns log-probabilities [C] of `targets` [C] under softmax(logits / temperature), and
    entropies [C], in nats.

    The logits are what `final` makes of head(hidden). With `support` the distribution is over the
    tokens that each target was sampled from. Logits are `float32`, or rounded to the precision of
    the hidden states; everything after that is float32. A plain linear head has a hand-written
    gradient; other heads use autograd.
    """
    # Logits are scale · c · tanh(z / c) with c = cap / scale: the scale is part of the temperature.
    temperature = temperature / final.scale
    cap = None if final.cap is None else final.cap / final.scale
    if type(head) is nn.Linear:
        weight = head.weight
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        options = (temperature, cap, entropy_gradient, float32, support, torch.is_grad_enabled())
        logprobs, entropy = _LinearScores.apply(hidden, weight, head.bias, targets, *options)
        return logprobs, entropy
    rows = _chunk(
        hidden, max(parameter.shape[0] for parameter in head.parameters() if parameter.ndim > 1)
    )
    parts = []
    for i in range(0, max(1, len(hidden)), rows):
        chunk = (
            head,
            hidden[i : i + rows],
            targets[i : i + rows],
            temperature,
            cap,
            entropy_gradient,
            float32,
            support,
            i,
        )
        again = len(hidden) > rows and torch.is_grad_enabled()
        parts.append(checkpoint(_called, *chunk, use_reentrant=False) if again else _called(*chunk))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _chunk(hidden: Tensor, vocabulary: int) -> int:
    """Returns how many tokens' logits are in memory at once."""
    rows = max(1, _CHUNK_BYTES // (4 * vocabulary))
    return rows if hidden.is_cuda else min(rows, _CPU_CHUNK)


def _called(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    cap: float | None,
    entropy_gradient: bool,
    float32: bool,
    support: Support | None,
    first: int,
) -> tuple[Tensor, Tensor]:
    if float32:
        with torch.autocast(hidden.device.type, enabled=False):
            weights = {name: parameter.float() for name, parameter in head.named_parameters()}
            output = functional_call(head, weights, hidden.float())
    else:
        output = head(hidden).float()
    logits = FinalLogits(cap=cap).of(output) / temperature
    if support is not None:
        logits = support.apply(logits.clone(), first)
    normaliser = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
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


class _LinearScores(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed for mypy here
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
        temperature: float,
        cap: float | None,
        entropy_gradient: bool,
        float32: bool,
        support: Support | None,
        backward: bool,
    ) -> tuple[Tensor, Tensor]:
        kernels, rows = _kernels(hidden.device.type), _chunk(hidden, len(weight))
        kept, cast = None, weight.to(hidden.dtype)
        if backward and not entropy_gradient and (kernels or hidden.dtype == torch.float32):
            limit = _GPU_KEPT_BYTES if kernels else _KEPT_BYTES
            small = hidden.element_size() * len(hidden) * len(weight) <= limit
            kept = hidden.new_empty(len(hidden), len(weight)) if small else None
        found = hidden.new_empty(
            3, len(hidden), dtype=torch.float32
        )  # log-probabilities, entropies, normalisers
        for i in range(0, len(hidden), rows):
            chunk = slice(i, i + rows)
            target, slope = targets[chunk], None if kept is None else kept[chunk]
            logits = _logits(hidden[chunk], cast, bias, float32)
            steepness = None if kernels else _cap(logits, cap, with_steepness=slope is not None)
            if support is not None:
                support.apply(logits, i)
            if kernels:
                kernels.statistics(logits, target, temperature, cap, found[:, chunk])
                if slope is not None:
                    minus = torch.full_like(
                        found[0, chunk], -temperature
                    )  # leaves the factor to the backward pass
                    kernels.gradient(
                        logits,
                        target,
                        normalisers=found[2, chunk],
                        entropies=found[1, chunk],
                        by_logprob=minus,
                        by_entropy=None,
                        temperature=temperature,
                        cap=cap,
                        result=slope,
                    )
                del logits  # before the next chunk's are computed
                continue
            logs = _log_probabilities(logits, temperature)
            found[0, chunk] = logs.gather(-1, target[:, None])[:, 0]
            p = torch.exp(logs, out=slope)
            found[1, chunk] = -logs.mul_(p).sum(-1)
            if slope is not None:
                _less_target(p, target)
                if steepness is not None:
                    p.mul_(steepness)
        logprob, entropy, normaliser = (row.clone() for row in found)
        ctx.temperature, ctx.float32, ctx.kernels, ctx.support = (
            temperature,
            float32,
            kernels,
            support,
        )
        ctx.cap = cap
        ctx.rows, ctx.entropy_gradient = (
            rows if kept is None else max(1, len(hidden)),
            entropy_gradient,
        )
        ctx.save_for_backward(hidden, weight, bias, targets, kept, normaliser, entropy)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, kept, normaliser, entropy = ctx.saved_tensors
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        cast = weight.to(hidden.dtype)
        hidden_gradient = torch.empty_like(hidden) if to_hidden else None
        weight_gradient: Tensor | None = None
        bias_gradient = (
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and to_bias else None
        )
        for i in range(0, len(hidden), ctx.rows):
            chunk = slice(i, i + ctx.rows)
            target, factor = targets[chunk], (-by_logprob[chunk] / ctx.temperature)[:, None]
            if kept is not None:
                slope = kept
            else:
                logits = _logits(hidden[chunk], cast, bias, ctx.float32)
                steepness = None if ctx.kernels else _cap(logits, ctx.cap, with_steepness=True)
                if ctx.support is not None:
                    ctx.support.apply(logits, i)
                given = by_entropy[chunk] if ctx.entropy_gradient else None
                if ctx.kernels:
                    slope = torch.empty_like(logits, dtype=hidden.dtype)
                    ctx.kernels.gradient(
                        logits,
                        target,
                        normalisers=normaliser[chunk],
                        entropies=entropy[chunk],
                        by_logprob=by_logprob[chunk],
                        by_entropy=given,
                        temperature=ctx.temperature,
                        cap=ctx.cap,
                        result=slope,
                    )
                    factor = torch.ones_like(factor)
                else:
                    logs = _log_probabilities(logits, ctx.temperature)
                    p = logs.exp()
                    if given is not None:  # no common factor for both gradients: compute their sum
                        logs.add_(entropy[chunk, None]).mul_(p).mul_(
                            -given[:, None] / ctx.temperature
                        )
                        exact = logs.addcmul_(_less_target(p, target), factor)
                        factor = torch.ones_like(factor)
                    else:
                        exact = _less_target(p, target)
                    slope = (exact if steepness is None else exact.mul_(steepness)).to(hidden.dtype)
            if hidden_gradient is not None:
                torch.mul(slope @ cast, factor, out=hidden_gradient[chunk])
            if to_weight:
                product = float32_product(slope.t(), (hidden[chunk] * factor).to(hidden.dtype))
                weight_gradient = (
                    product if weight_gradient is None else weight_gradient.add_(product)
                )
                del product
            if bias_gradient is not None:
                bias_gradient += float32_product(slope.t(), factor.to(hidden.dtype))[:, 0]
            slope = logits = exact = steepness = None  # before the next chunk's are computed
        if to_weight and weight_gradient is None:
            weight_gradient = torch.zeros_like(weight)
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
            *[None] * 7,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, float32: bool) -> Tensor:
    """Returns logits [tokens, vocabulary] in float32; unless `float32`, rounded to the precision of
    `hidden`.
    """
    if float32:
        return float32_logits(hidden, weight, bias)
    cast = None if bias is None else bias.to(hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden, weight, cast).float()


def _cap(logits: Tensor, cap: float | None, with_steepness: bool) -> Tensor | None:
    """Replaces z by cap · tanh(z / cap) in `logits` [tokens, vocabulary]; returns the derivative if
    it is asked for.

    Without a cap it does nothing.
    """
    if cap is None:
        return None
    logits.div_(cap).tanh_()
    steepness = 1 - logits**2 if with_steepness else None
    logits.mul_(cap)
    return steepness


def _log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Returns log-probabilities [tokens, vocabulary]; may overwrite `logits`."""
    return torch.log_softmax(logits if temperature == 1 else logits.div_(temperature), dim=-1)


def _less_target(p: Tensor, targets: Tensor) -> Tensor:
    """Subtracts onehot(targets) from p in place; returns p."""
    return p.scatter_add_(1, targets[:, None], p.new_full((len(p), 1), -1.0))
