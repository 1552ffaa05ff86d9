"""Log-probabilities and entropies of given tokens, computed without all logits in memory at
once.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from learning.final_logits import FinalLogits
from learning.head import float32_logits, float32_product
from learning.kernels import has_triton
from learning.sampling_support import Support

_PLAIN = FinalLogits()
_CHUNK_BYTES = 1 << 30
"""Maximum size of the float32 logits in memory."""
_CPU_CHUNK = 512
"""Maximum tokens per chunk on a CPU, so that the logits of a small vocabulary fit into its
caches."""
_KEPT_BYTES = 64 << 20
_GPU_KEPT_BYTES = 5 << 30
"""Up to these sizes, probabilities are kept for the backward pass; larger ones are recomputed."""


def token_scores(  # noqa: PLR0913  # keywords say what each is
    head: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_gradient: bool,
    *,
    float32: bool = True,
    support: Support | None = None,
    final: FinalLogits = _PLAIN,
    added: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities [C] of `targets` under softmax(logits / temperature), and entropies
    [C], in nats.

    log p(y) = z_y − log Σ_v exp z_v and H = −Σ_v p_v · log p_v, where z are the logits divided by
    the temperature. Everything after the logits is float32. The gradient is written by hand.

    Args:
        head: a linear layer of weight [V, H].
        hidden: [C, H] the final hidden states that predict the targets.
        targets: [C] token ids.
        temperature: the sampling temperature.
        entropy_gradient: whether the entropies get a gradient.
        float32: whether logits are float32; else they are rounded to the precision of `hidden`.
        support: restricts the distribution to the tokens that each target was sampled from.
        final: what the model does to the output of its head.
        added: [C, r] and [V, r], whose product is added to that output: an adapter of the head.
    """
    # Logits are scale · c · tanh(z / c) with c = cap / scale: the scale is part of the temperature.
    scoring = _Scoring(
        targets=targets,
        temperature=temperature / final.scale,
        cap=None if final.cap is None else final.cap / final.scale,
        needs_gradient=torch.is_grad_enabled(),
        entropy_gradient=entropy_gradient,
        float32=float32,
        support=support,
        kernels=_kernels(hidden.device.type) if final.cap is None else None,
    )
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    parameters = (head.weight, head.bias)
    added_parts = added or (None, None)
    logprobs, entropies = _LinearScores.apply(hidden, *parameters, *added_parts, scoring)
    return logprobs, entropies


def _chunk_size(hidden: Tensor, vocabulary: int) -> int:
    """Returns how many tokens' logits are in memory at once."""
    size = max(1, _CHUNK_BYTES // (4 * vocabulary))
    return size if hidden.is_cuda else min(size, _CPU_CHUNK)


def _kernels(device_type: str) -> ModuleType | None:
    """Returns the Triton kernels of a head for this kind of device; None where torch's own
    operators are used.
    """
    if not has_triton(device_type):
        return None
    from trainer.policy import fused_head

    return fused_head


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scoring:
    """What is computed of the output of a head for C tokens, chunk by chunk.

    A chunk is a slice of the tokens. Methods may overwrite its logits [N, V].
    """

    targets: Tensor
    """[C] token ids."""
    temperature: float
    """Divides the logits; includes the scale of the model's final logits."""
    cap: float | None
    """c in c · tanh(z / c) of the head's output z; None without a cap."""
    needs_gradient: bool
    """Whether a backward pass follows."""
    entropy_gradient: bool
    """Whether the entropies get a gradient."""
    float32: bool
    """Whether logits are computed in float32, not in the precision of the hidden states."""
    support: Support | None
    """The tokens that each target was sampled from; None for the whole vocabulary."""
    kernels: ModuleType | None
    """Triton's; None where torch's own operators are used, as for a head with a cap."""

    def logits(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        low_weight: Tensor | None,
    ) -> Tensor:
        """Returns logits [N, V] in float32; unless `float32`, the head's own are rounded to the
        precision of `hidden`. `low` [N, r] and `low_weight` [V, r] are what is added to them.
        """
        if self.float32:
            logits = float32_logits(hidden, weight, bias)
        else:
            cast = None if bias is None else bias.to(hidden.dtype)
            with torch.autocast(hidden.device.type, enabled=False):
                logits = nn.functional.linear(hidden, weight, cast).float()
        if low is not None and low_weight is not None:
            logits.add_(float32_product(low, low_weight.t()))
        return logits

    def factor(self, by_logprob: Tensor) -> Tensor:
        """Returns [N, 1] what p − onehot(y) is multiplied by to get the gradient of the logits,
        from the gradient [N] of the log-probabilities.
        """
        return (-by_logprob / self.temperature)[:, None]

    def score(self, logits: Tensor, chunk: slice, statistics: Tensor, slope: Tensor | None) -> None:
        """Computes the `statistics` [3, N] of a chunk and, unless it is None, p − onehot(y) as
        `slope` [N, V].
        """
        targets = self.targets[chunk]
        bend = self._bend(logits, chunk, with_derivative=slope is not None)
        if self.kernels is not None:
            self.kernels.statistics(
                logits, targets, temperature=self.temperature, result=statistics
            )
            if slope is not None:
                # -temperature leaves the factor to the backward pass.
                by_logprob = torch.full_like(statistics[0], -self.temperature)
                self._kernel_gradient(logits, targets, statistics, by_logprob, result=slope)
            return

        log_p = self._log_probabilities(logits)
        statistics[0] = log_p.gather(-1, targets[:, None])[:, 0]
        p = torch.exp(log_p, out=slope)
        statistics[1] = -log_p.mul_(p).sum(-1)
        if slope is not None:
            _subtract_targets(p, targets)
            if bend is not None:
                p.mul_(bend)

    def gradient(
        self,
        logits: Tensor,
        chunk: slice,
        statistics: Tensor,
        *,
        by_logprob: Tensor,
        by_entropy: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradient of the logits of a chunk as slope [N, V] · factor [N, 1].

        The factor is that of p − onehot(y), the gradient by the log-probabilities. With a gradient
        of the entropies there is no common factor: the slope is their sum, and the factor is 1.
        """
        targets = self.targets[chunk]
        factor = self.factor(by_logprob)
        bend = self._bend(logits, chunk, with_derivative=True)
        if self.kernels is not None:
            slope = torch.empty_like(logits, dtype=dtype)
            self._kernel_gradient(
                logits, targets, statistics, by_logprob, by_entropy=by_entropy, result=slope
            )
            return slope, torch.ones_like(factor)

        log_p = self._log_probabilities(logits)
        p = log_p.exp()
        if by_entropy is None:
            exact = _subtract_targets(p, targets)
        else:
            by_logits = -by_entropy[:, None] / self.temperature
            exact = log_p.add_(statistics[1, :, None]).mul_(p).mul_(by_logits)
            exact.addcmul_(_subtract_targets(p, targets), factor)
            factor = torch.ones_like(factor)
        if bend is not None:
            exact.mul_(bend)
        return exact.to(dtype), factor

    def _kernel_gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        statistics: Tensor,
        by_logprob: Tensor,
        *,
        by_entropy: Tensor | None = None,
        result: Tensor,
    ) -> None:
        assert self.kernels is not None
        self.kernels.gradient(
            logits,
            targets,
            statistics=statistics,
            by_logprob=by_logprob,
            by_entropy=by_entropy,
            temperature=self.temperature,
            result=result,
        )

    def _bend(self, logits: Tensor, chunk: slice, *, with_derivative: bool) -> Tensor | None:
        """Replaces z by cap · tanh(z / cap) in the logits and excludes the tokens that were not
        sampled from; returns the derivative of the cap, 1 − tanh²(z / cap), if it is asked for.
        """
        derivative: Tensor | None = None
        if self.cap is not None:
            logits.div_(self.cap).tanh_()
            derivative = 1 - logits**2 if with_derivative else None
            logits.mul_(self.cap)
        if self.support is not None:
            self.support.apply(logits, chunk.start)
        return derivative

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        scaled = logits if self.temperature == 1 else logits.div_(self.temperature)
        return torch.log_softmax(scaled, dim=-1)


class _LinearScores(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """Scores under a linear head.

    With p the probabilities, y the target and H the entropy: d logprob / d logits = onehot(y) − p,
    and d H / d logits = −p · (log p + H). Only p − onehot(y) is kept, or nothing if that is large.
    The gradient factor of a token is multiplied into its hidden state, which saves a pass over the
    matrix of logits.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  # as `apply` calls it
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        low_weight: Tensor | None,
        scoring: _Scoring,
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities [C] and entropies [C] from hidden [C, H], weight [V, H] and
        bias [V], and from low [C, r] and low_weight [V, r], whose product is added to the logits.
        """
        size = _chunk_size(hidden, len(weight))
        cast = weight.to(hidden.dtype)
        low_cast = None if low_weight is None else low_weight.to(hidden.dtype)

        kept: Tensor | None = None  # [C, V] p − onehot(y), times the derivative of the cap
        # What is kept for the backward pass saves computing the logits again.
        one_factor = not scoring.entropy_gradient  # the entropy has another gradient matrix
        exact = scoring.kernels is not None or hidden.dtype == torch.float32
        if scoring.needs_gradient and one_factor and exact:
            limit = _GPU_KEPT_BYTES if scoring.kernels else _KEPT_BYTES
            if hidden.element_size() * len(hidden) * len(weight) <= limit:
                kept = hidden.new_empty(len(hidden), len(weight))

        # Log-probabilities, entropies and normalisers.
        statistics = hidden.new_empty(3, len(hidden), dtype=torch.float32)
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            own_low = None if low is None else low[chunk]
            logits = scoring.logits(hidden[chunk], cast, bias, low=own_low, low_weight=low_cast)
            slope = None if kept is None else kept[chunk]
            scoring.score(logits, chunk, statistics[:, chunk], slope)
            del logits  # before the next chunk's are computed

        logprobs = statistics[0].clone()
        entropies = statistics[1].clone()
        ctx.scoring = scoring
        ctx.chunk_size = size if kept is None else max(1, len(hidden))
        ctx.save_for_backward(hidden, weight, bias, low, low_weight, kept, statistics)
        if not scoring.entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of `forward`'s arguments from those of its results, [C] each."""
        scoring: _Scoring = ctx.scoring
        hidden, weight, bias, low, low_weight, kept, statistics = ctx.saved_tensors
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        cast = weight.to(hidden.dtype)
        hidden_gradient = torch.empty_like(hidden) if to_hidden else None
        weight_gradient: Tensor | None = None
        bias_gradient: Tensor | None = None
        if bias is not None and to_bias:
            bias_gradient = torch.zeros_like(bias, dtype=torch.float32)
        low_cast: Tensor | None = None
        low_gradient: Tensor | None = None
        low_weight_gradient: Tensor | None = None
        if low is not None:
            low_cast = low_weight.to(hidden.dtype)
            low_gradient = torch.empty_like(low)
            low_weight_gradient = torch.zeros_like(low_weight, dtype=torch.float32)

        for start in range(0, len(hidden), ctx.chunk_size):
            chunk = slice(start, start + ctx.chunk_size)
            if kept is not None:
                slope = kept
                factor = scoring.factor(by_logprob[chunk])
            else:
                own_low = None if low is None else low[chunk]
                slope, factor = scoring.gradient(
                    scoring.logits(hidden[chunk], cast, bias, low=own_low, low_weight=low_cast),
                    chunk,
                    statistics[:, chunk],
                    by_logprob=by_logprob[chunk],
                    by_entropy=by_entropy[chunk] if scoring.entropy_gradient else None,
                    dtype=hidden.dtype,
                )

            if hidden_gradient is not None:
                torch.mul(slope @ cast, factor, out=hidden_gradient[chunk])
            if to_weight:
                product = float32_product(slope.t(), (hidden[chunk] * factor).to(hidden.dtype))
                weight_gradient = (
                    product if weight_gradient is None else weight_gradient.add_(product)
                )
                del product
            if low_cast is not None and low_gradient is not None:
                torch.mul(slope @ low_cast, factor, out=low_gradient[chunk])
                scaled = (low[chunk] * factor).to(hidden.dtype)
                low_weight_gradient += float32_product(slope.t(), scaled)
            if bias_gradient is not None:
                bias_gradient += float32_product(slope.t(), factor.to(hidden.dtype))[:, 0]
            del slope  # before the next chunk's is computed

        if to_weight and weight_gradient is None:
            weight_gradient = torch.zeros_like(weight)
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
            low_gradient,
            None if low_weight_gradient is None else low_weight_gradient.to(low_weight.dtype),
            None,  # scoring
        )


def _subtract_targets(p: Tensor, targets: Tensor) -> Tensor:
    """Subtracts onehot(targets) from p in place; returns p."""
    return p.scatter_add_(1, targets[:, None], p.new_full((len(p), 1), -1.0))
