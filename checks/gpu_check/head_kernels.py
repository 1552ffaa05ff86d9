"""The fused kernels of the head by themselves: time, bandwidth and error, beside torch's
operators.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting, seconds
from learning.head import float32_logits
from learning.kernels import has_triton
from trainer.policy import logprobs

_LOGPROB = 1e-4
"""Largest error of a log-probability or an entropy in nats: float32 sums over the vocabulary."""
_GRADIENT = 0.01
"""Largest relative error of a gradient: slopes are rounded to bfloat16, whose steps are 0.4 %."""
_CHECKED = 256
"""Tokens compared with float64."""


def measure(found: Findings, setting: Setting) -> None:
    """Measures 16,384 tokens of a vocabulary of 151,936, in bfloat16 under float32 weights as in an
    update.
    """
    problem = _problem(setting)
    if problem:
        found.not_reached("the kernels of the head", problem)
        return
    from trainer.policy import fused_head

    tokens, width, vocabulary = (32, 16, 1000) if setting.small else (16_384, 896, 151_936)
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False, device=setting.device)
    hidden = 4 * torch.randn(tokens, width, device=setting.device).bfloat16()
    targets = torch.randint(vocabulary, (tokens,), device=setting.device)

    rows = [["work", "ms by the kernels", "ms by torch", "GB/s", "GB/s by torch"]]
    _passes(
        setting,
        rows,
        fused_head,
        logits=_logits(head, hidden),
        targets=targets[: _rows(hidden, vocabulary)],
    )
    table = f"The head: {tokens:,} tokens, {vocabulary:,} words, {width} wide"
    _whole(found, setting, rows, fused_head, work=(head, hidden, targets))
    found.tables[table] = rows
    _error(found, fused_head, head, hidden=hidden[:_CHECKED], targets=targets[:_CHECKED])


def _problem(setting: Setting) -> str:
    """Returns why the kernels cannot run here; empty if they can."""
    if setting.on_gpu:
        return "" if has_triton("cuda") else "Triton cannot compile here: see the section's log"
    try:
        from triton.runtime.errors import TritonError
    except ImportError:
        return "Triton is not installed"
    from trainer.policy import fused_head

    logits = torch.zeros(1, 2)
    target = torch.zeros(1, dtype=torch.int64)
    try:
        fused_head.statistics(logits, target, temperature=1.0, result=torch.zeros(3, 1))
    except (
        TritonError,
        RuntimeError,
    ) as error:  # no interpreter, or one that fails: Triton 3.6's with NumPy 2.5
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return f"on a CPU they need TRITON_INTERPRET=1 and an interpreter that works: {reason}"
    return ""


def _rows(hidden: Tensor, vocabulary: int) -> int:
    """Returns the rows of logits that the head has in memory at once."""
    return min(len(hidden), logprobs._chunk_size(hidden, vocabulary))


def _logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    chunk = hidden[: _rows(hidden, head.out_features)]
    with torch.no_grad():
        return float32_logits(chunk, head.weight.to(hidden.dtype))


def _passes(
    setting: Setting, rows: list[list[str]], kernels: ModuleType, *, logits: Tensor, targets: Tensor
) -> None:
    """Measures both passes over a chunk of logits [N, V]: the bytes are those that must be read and
    written.
    """
    result = logits.new_empty(3, len(logits))
    slopes = torch.empty_like(logits, dtype=torch.bfloat16)
    factor = torch.ones_like(result[0])

    def statistics() -> None:
        kernels.statistics(logits, targets, temperature=1.0, result=result)

    def statistics_by_torch() -> None:
        logs = torch.log_softmax(logits, dim=-1)
        logs.gather(-1, targets[:, None])
        (logs.exp() * logs).sum(-1)

    def gradient() -> None:
        kernels.gradient(
            logits,
            targets,
            statistics=result,
            by_logprob=factor,
            by_entropy=None,
            temperature=1.0,
            result=slopes,
        )

    def gradient_by_torch() -> None:
        p = torch.softmax(logits, dim=-1)
        slopes.copy_(-p.scatter_add_(1, targets[:, None], p.new_full((len(p), 1), -1.0)))

    read = 4 * logits.numel()
    works: list[tuple[str, int, Callable[[], None], Callable[[], None]]] = [
        ("log-probabilities and entropies of a chunk", read, statistics, statistics_by_torch),
        ("its gradient", read + 2 * logits.numel(), gradient, gradient_by_torch),
    ]
    times = 1 if setting.small else 10
    for name, size, own, others in works:
        own_s = seconds(own, setting, times)
        other_s = seconds(others, setting, times)
        rates = [f"{size / own_s / 1e9:,.0f}", f"{size / other_s / 1e9:,.0f}"]
        rows.append(
            [
                f"{name} ({len(logits):,} tokens)",
                f"{1e3 * own_s:.2f}",
                f"{1e3 * other_s:.2f}",
                *rates,
            ]
        )


def _whole(
    found: Findings,
    setting: Setting,
    rows: list[list[str]],
    kernels: ModuleType,
    *,
    work: tuple[nn.Linear, Tensor, Tensor],
) -> None:
    """Measures log-probabilities and their gradient from hidden states on, with the matrix
    products.
    """
    head, hidden, targets = work
    spent: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    for name, used in (("kernels", kernels), ("torch", None)):
        with _using(used):
            if setting.on_gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            inputs = hidden.clone().requires_grad_()

            def forward(inputs: Tensor = inputs) -> Tensor:
                return logprobs.token_scores(head, inputs, targets, 1.0, False)[0]

            def both(forward: Callable[[], Tensor] = forward) -> None:
                head.zero_grad(set_to_none=True)
                forward().sum().backward()

            times = 1 if setting.small else 5
            spent[name] = [seconds(forward, setting, times), seconds(both, setting, times)]
            if setting.on_gpu:
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 1e9
    for index, name in enumerate(("forward", "forward and backward")):
        milliseconds = [f"{1e3 * spent[kind][index]:.1f}" for kind in ("kernels", "torch")]
        rows.append([f"all tokens, {name}", *milliseconds, "", ""])
    products = 2.0 * hidden.shape[1] * head.out_features * len(hidden)
    rate = 3 * products / spent["kernels"][1] / 1e12
    measured = f"{1e3 * spent['kernels'][1]:.1f} ms, {rate:.1f} TFLOP/s of its products"
    found.claim("the head, forward and backward", "", measured)
    ratio = spent["torch"][1] / spent["kernels"][1]
    text = "the head by torch's operators beside the kernels: times as long"
    found.claim(text, "> 1", f"{ratio:.2f}", None if setting.small else ratio > 1)
    if peaks:
        text = "memory of the head at the peak, by the kernels and by torch"
        found.claim(text, "", f"{peaks['kernels']:.2f} and {peaks['torch']:.2f} GB")
    found.figures = {"seconds": spent, "peaks": peaks}


def _using(kernels: ModuleType | None) -> AbstractContextManager[Any]:
    """Makes the head use these kernels, or torch's operators, on any device."""
    return patch.object(logprobs, "_kernels", lambda _: kernels)


def _error(
    found: Findings, kernels: ModuleType, head: nn.Linear, *, hidden: Tensor, targets: Tensor
) -> None:
    """Compares log-probabilities, entropies and gradients with float64, for the kernels and for
    torch's operators.
    """
    cast = head.weight.detach().to(hidden.dtype)
    exact_hidden = hidden.double().requires_grad_()
    exact_weight = cast.double().requires_grad_()
    logs = torch.log_softmax(exact_hidden @ exact_weight.t(), dim=-1)
    exact = logs.gather(-1, targets[:, None])[:, 0]
    log_p = exact.detach()
    entropy = -(logs.exp() * logs).sum(-1).detach()
    upper = torch.linspace(-1, 1, len(targets), device=hidden.device, dtype=torch.float64)
    wanted = torch.autograd.grad((exact * upper).sum(), [exact_hidden, exact_weight])

    for name, used in (("kernels", kernels), ("torch's operators", None)):
        inputs = hidden.clone().requires_grad_()
        with _using(used):
            scores, entropies = logprobs.token_scores(head, inputs, targets, 1.0, False)
            gradients = torch.autograd.grad((scores * upper.float()).sum(), [inputs, head.weight])
        pairs = ((scores, log_p), (entropies, entropy))
        errors = [float((one.detach().double() - other).abs().max()) for one, other in pairs]
        apart = [
            float((one.double() - other).norm() / other.norm())
            for one, other in zip(gradients, wanted, strict=True)
        ]
        text = f"the head by {name} beside float64"
        found.at_most(f"{text}: largest |Δ log-probability| and |Δ entropy|", max(errors), _LOGPROB)
        found.at_most(
            f"{text}: error of the gradients of states and weights", max(apart), _GRADIENT
        )
