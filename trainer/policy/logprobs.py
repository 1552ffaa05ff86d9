"""Log-probabilities and entropies of given tokens, without the logits of all of them at once."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_CHUNK_BYTES = 256 << 20
"""Limit of the float32 logits in memory."""
_CPU_CHUNK = 512
"""Limit of tokens of a chunk on a CPU, whose caches then hold the logits of a small vocabulary."""
_KEPT_BYTES = 64 << 20
"""Limit up to which probabilities are kept for the backward pass; larger ones are computed again."""


def token_scores(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities [C] of `targets` [C] under softmax(head(hidden) / temperature), and entropies [C], in nats.

    Logits are rounded as the head computes them; everything after that is float32. The gradient of a plain linear head is
    written by hand, that of another one comes from autograd.
    """
    if type(head) is nn.Linear:
        weight = head.weight
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        options = (temperature, entropy_gradient, torch.is_grad_enabled())
        logprobs, entropy = _LinearScores.apply(hidden, weight, head.bias, targets, *options)
        return logprobs, entropy
    rows = _chunk(hidden, max(parameter.shape[0] for parameter in head.parameters() if parameter.ndim > 1))
    parts = []
    for i in range(0, max(1, len(hidden)), rows):
        chunk = (head, hidden[i : i + rows], targets[i : i + rows], temperature, entropy_gradient)
        again = len(hidden) > rows and torch.is_grad_enabled()
        parts.append(checkpoint(_called, *chunk, use_reentrant=False) if again else _called(*chunk))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _chunk(hidden: Tensor, vocabulary: int) -> int:
    """Returns the tokens whose logits are in memory at once."""
    rows = max(1, _CHUNK_BYTES // (4 * vocabulary))
    return rows if hidden.is_cuda else min(rows, _CPU_CHUNK)


def _called(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperature
    normaliser = logits.logsumexp(dim=-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = normaliser - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    return logprobs, entropy


class _LinearScores(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed for mypy here
    """Scores under a linear head.

    With p the probabilities, y the target and H the entropy: d logprob / d logits = onehot(y) − p, and
    d H / d logits = −p · (log p + H). Only p − onehot(y) is kept, or nothing if that is large. A token's factor of the
    gradient is multiplied into its hidden state, which saves a pass over the matrix of logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        entropy_gradient: bool,
        backward: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, logprobs, entropies, kept = _chunk(hidden, len(weight)), [], [], None
        if backward and not entropy_gradient and hidden.dtype == torch.float32:
            kept = hidden.new_empty(len(hidden), len(weight)) if 4 * len(hidden) * len(weight) <= _KEPT_BYTES else None
        for i in range(0, max(1, len(hidden)), rows):
            chunk = slice(i, i + rows)
            logs = _log_probabilities(hidden[chunk], weight, bias, temperature)
            logprobs.append(logs.gather(-1, targets[chunk, None])[:, 0])
            p = torch.exp(logs, out=None if kept is None else kept[chunk])
            entropies.append(-logs.mul_(p).sum(-1))
            if kept is not None:
                _less_target(p, targets[chunk])
        logprob, entropy = torch.cat(logprobs), torch.cat(entropies)
        ctx.temperature, ctx.rows = temperature, rows if kept is None else max(1, len(hidden))
        ctx.save_for_backward(hidden, weight, bias, targets, kept, entropy if entropy_gradient else None)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, kept, entropy = ctx.saved_tensors
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        cast = weight.to(hidden.dtype)
        hidden_gradient = torch.empty_like(hidden) if to_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if to_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and to_bias else None
        for i in range(0, len(hidden), ctx.rows):
            chunk = slice(i, i + ctx.rows)
            factor = (-by_logprob[chunk] / ctx.temperature)[:, None]
            if kept is not None:
                slope = kept
            else:
                logs = _log_probabilities(hidden[chunk], weight, bias, ctx.temperature)
                p = logs.exp()
                if entropy is not None:  # its gradient has another shape than the log-probability's: both at once
                    logs.add_(entropy[chunk, None]).mul_(p).mul_(-by_entropy[chunk, None] / ctx.temperature)
                    logs.addcmul_(_less_target(p, targets[chunk]), factor)
                    slope, factor = logs.to(hidden.dtype), torch.ones_like(factor)
                else:
                    slope = _less_target(p, targets[chunk]).to(hidden.dtype)
            if hidden_gradient is not None:
                torch.mul(slope @ cast, factor, out=hidden_gradient[chunk])
            if weight_gradient is not None:
                weight_gradient += slope.t() @ (hidden[chunk] * factor).to(hidden.dtype)
            if bias_gradient is not None:
                bias_gradient += (slope.t() @ factor.to(hidden.dtype))[:, 0]
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
            *(None, None, None, None),
        )


def _log_probabilities(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """[tokens, vocabulary] in float32."""
    cast = None if bias is None else bias.to(hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        logits = nn.functional.linear(hidden, weight.to(hidden.dtype), cast).float()
    return torch.log_softmax(logits if temperature == 1 else logits.div_(temperature), dim=-1)


def _less_target(p: Tensor, targets: Tensor) -> Tensor:
    """Subtracts onehot(targets) from p, in place."""
    return p.scatter_add_(1, targets[:, None], p.new_full((len(p), 1), -1.0))
