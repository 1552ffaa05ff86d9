"""Triton's kernels for the head against torch's operators: compiled on a GPU, elsewhere in Triton's
interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trainer.policy.logprobs
from tests.support.paths import ROOT
from trainer.policy.logprobs import token_scores

pytest.importorskip(
    "triton",
    reason="triton is not installed: it comes with torch for CUDA and with the extra `dev`",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FACTORS = [0.0, 1.0, -0.3, 2.0, 0.0, 1e-3, -5.0]
"""Gradients with respect to the log-probabilities; 0 means a token that the loss ignores."""


def computed(
    patch: pytest.MonkeyPatch,
    fused: bool,
    head: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    bonus: bool,
) -> list[Tensor]:
    """Returns log-probabilities, entropies, and the gradients with respect to hidden states and
    head."""
    patch.setattr(trainer.policy.logprobs, "has_triton", lambda _: fused)
    inputs = hidden.clone().requires_grad_()
    head.zero_grad()
    logprobs, entropies = token_scores(head, inputs, targets, temperature, bonus)
    factors = torch.tensor(FACTORS, device=DEVICE).repeat(len(targets))[: len(targets)]
    loss = (logprobs * factors).sum() + (0.1 * (entropies * factors.roll(1)).sum() if bonus else 0)
    loss.backward()
    assert inputs.grad is not None
    gradients = [
        parameter.grad.clone() for parameter in head.parameters() if parameter.grad is not None
    ]
    return [logprobs.detach(), entropies.detach(), inputs.grad, *gradients]


@pytest.mark.parametrize(("kept", "bonus"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "temperature", "bias"),
    [(1, 8, 2, 1.0, False), (7, 16, 97, 0.7, True), (5, 24, 9001, 1.3, True)],
)
def test_kernels_compute_what_torch_does(
    tokens: int,
    width: int,
    vocabulary: int,
    temperature: float,
    bias: bool,
    dtype: torch.dtype,
    kept: bool,
    bonus: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(tokens)
    head = nn.Linear(width, vocabulary, bias, device=DEVICE, dtype=dtype)
    hidden = 8 * torch.randn(tokens, width, device=DEVICE).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    monkeypatch.setattr(trainer.policy.logprobs, "_GPU_KEPT_BYTES", 1 << 30 if kept else 0)
    monkeypatch.setattr(trainer.policy.logprobs, "_CHUNK_BYTES", 4 * vocabulary * 3)
    given = (head, hidden, targets, temperature, bonus)
    found, expected = computed(monkeypatch, True, *given), computed(monkeypatch, False, *given)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == other.dtype
        exact = i < 2 or dtype == torch.float32
        torch.testing.assert_close(
            one, other, atol=2e-5 if exact else 0.02, rtol=2e-5 if exact else 0.02
        )
    ignored = torch.tensor(FACTORS).repeat(tokens)[:tokens] == 0
    assert bonus or not found[2][ignored].any()


def test_extreme_logits_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certain token, an impossible token, rising and falling logits across blocks, and a logit of
    minus infinity."""
    vocabulary = 9000
    logits = torch.zeros(5, vocabulary)
    logits[0, 3], logits[1, 8999] = 1e4, -1e4
    logits[2], logits[3] = (
        torch.linspace(-300, 300, vocabulary),
        torch.linspace(300, -300, vocabulary),
    )
    logits[4, 17] = -torch.inf
    targets = torch.tensor([3, 8999, 0, vocabulary - 1, 5])
    bias_only = nn.Linear(5, vocabulary, False)
    bias_only.weight.data = logits.nan_to_num(neginf=-3e38).T.contiguous()
    given = (bias_only.to(DEVICE), torch.eye(5, device=DEVICE), targets.to(DEVICE), 1.0, True)
    for one, other in zip(
        computed(monkeypatch, True, *given), computed(monkeypatch, False, *given), strict=True
    ):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trainer.policy import fused_head

def compiled(kernel, types, capability):
    names = kernel.arg_names
    fixed = {name: None for name, kind in zip(names, types) if kind == "constexpr"} | {"BLOCK": 4096}
    source = ASTSource(kernel, dict(zip(names, types)), constexprs=fixed)
    return len(triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8}).asm["cubin"])

read = ["*fp32", "*i64", "*fp32", "*fp32", "*fp32"]
size = ["i32", "fp32", "constexpr"]
for capability in (80, 100):
    assert compiled(fused_head._statistics, [*read, *size], capability)
    assert compiled(fused_head._gradient, [*read, "*fp32", "*bf16", *size], capability)
assert compiled(fused_head._gradient, [*read, "constexpr", "*bf16", *size], 90)
assert compiled(fused_head._statistics, [*read, *size], 90)
"""


@pytest.mark.integration
def test_kernels_compile_for_absent_gpus(tmp_path: Path) -> None:
    """Compiles for Ampere, Hopper and Blackwell, which needs neither a GPU nor torch."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
