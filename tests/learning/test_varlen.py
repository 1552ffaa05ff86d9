"""Variable-length attention as on GPUs, with plain kernels on a CPU: matches rows and compiles
without graph breaks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from common.wire.schemas import Int32
from learning import attention
from learning.layout import Packed
from learning.sharding import layers
from tests.support.models.tiny_models import GEMMA, KINDS, MLA, make
from tests.support.models.varlen_kernels import install
from trainer.policy.scorer import Scorer

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2 with windows": (
        "Qwen2",
        {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "Llama without GQA": ("Llama 3", {"num_key_value_heads": 4}),
    "Qwen3 with larger heads": ("Qwen3", {"head_dim": 24}),
    "sinks and windows": (
        "gpt_oss",
        {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "values of another size": ("deepseek_v3", MLA),
}


@pytest.fixture(autouse=True)
def _kernels() -> None:
    install()


def batch(seed: int) -> tuple[list[Int32], list[Int32]]:
    """Groups of prompts longer and shorter than their completions, some of which have one token or
    none."""
    rng = np.random.default_rng(seed)
    prompts, completions = [], []
    for length in (*rng.integers(1, 40, 3).tolist(), 2):
        prompt = rng.integers(3, 90, length).astype(np.int32)
        for answer in (*rng.integers(1, 30, int(rng.integers(1, 4))).tolist(), 1, 0):
            prompts.append(prompt)
            completions.append(rng.integers(3, 90, answer).astype(np.int32))
    return prompts, completions


def scores(scorer: Scorer, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns log-probabilities, and gradients of a loss that weights every token and its entropy
    differently."""
    prompts, completions = batch(seed)
    targets = torch.from_numpy(np.concatenate(completions)).long()
    scorer.zero_grad()
    found = scorer(Packed.of(prompts, completions), targets, 0.8, entropy_gradient=True)
    weights = torch.linspace(-1, 1, len(targets)) / len(targets)
    (weights * found.logprobs + weights.square() * found.entropy).sum().backward()
    return found.logprobs.detach(), {
        name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None
    }


def made(kind: str) -> Any:
    if kind in MORE:
        name, settings = MORE[kind]
        return make(name, **settings)
    return make(kind)


@pytest.mark.parametrize("kind", [*KINDS, *MORE, GEMMA])
def test_the_variable_length_kernel_matches_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer = Scorer(made(kind), "on")
    for seed in range(2):
        logprobs, gradients = scores(scorer, seed)
        with monkeypatch.context() as patch:
            patch.setattr("learning.attention._has_kernel", lambda query: True)
            other, theirs = scores(scorer, seed)
        torch.testing.assert_close(other, logprobs, atol=1e-5, rtol=0)
        assert theirs.keys() == gradients.keys()
        for name, expected in gradients.items():
            torch.testing.assert_close(
                theirs[name],
                expected,
                atol=1e-5,
                rtol=0,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.slow
# dynamo triggers both.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "kind",
    [
        "Gemma 3 text",
        "Qwen2",
        "Qwen3",
        "Llama 3",
        "Mistral",
        "Phi-3",
        "Qwen3-MoE",
        "Mixtral",
        "sinks and windows",
        "values of another size",
    ],
)
def test_layers_compile_without_graph_breaks_or_repeats_per_batch(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learning.attention._has_kernel", lambda query: True)
    scorer, compiled = Scorer(made(kind), "on"), Scorer(made(kind), "on")
    torch._dynamo.reset()
    counters.clear()
    for layer in layers(compiled.model):
        layer.forward = torch.compile(layer.forward, backend="aot_eager", dynamic=True)
    graphs = []
    for seed in range(3):
        logprobs, gradients = scores(compiled, seed)
        graphs.append(counters["stats"]["unique_graphs"])
        expected, theirs = scores(scorer, seed)
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
        assert all(
            torch.allclose(gradients[name], grad, atol=1e-5) for name, grad in theirs.items()
        )
    torch._dynamo.reset()
    assert not counters["graph_break"]
    assert graphs[-1] == graphs[1] > 0, "lengths are dynamic"


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [(9, torch.bfloat16, 2), (7, torch.bfloat16, 1), (9, torch.float32, 1)],
)
def test_the_kernel_is_chosen_when_a_layer_is_compiled(
    capability: int, dtype: torch.dtype, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a fake GPU with made-up properties. A check that dynamo cannot trace would break every
    layer."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(major=capability, minor=5)
    monkeypatch.setattr(torch.cuda, "_get_device_properties", lambda _: properties, raising=False)

    def attend(query: torch.Tensor) -> torch.Tensor:
        return query.new_ones(2 if attention._has_kernel(query) else 1)

    torch._dynamo.reset()
    with FakeTensorMode():
        query = torch.empty(1, 2, 4, 64, device="cuda:0", dtype=dtype)
        assert torch.compile(attend, backend="aot_eager", fullgraph=True)(query).shape == (
            expected,
        )
    torch._dynamo.reset()


def test_a_kernel_without_gqa_gets_repeated_key_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch 2.11; the kernel here checks that the numbers of heads match or that it is told
    otherwise."""
    scorer = Scorer(made("Qwen2"), "on")
    logprobs, gradients = scores(scorer, 0)
    told: list[dict[str, Any]] = []

    def kernel(*tensors: Any, **options: Any) -> Any:
        told.append(options)
        return varlen_attn(*tensors, **options)

    monkeypatch.setattr("learning.attention._has_kernel", lambda query: True)
    monkeypatch.setattr("learning.attention.varlen_attn", kernel)
    for knows in {attention.GQA, False}:
        monkeypatch.setattr("learning.attention.GQA", knows)
        other, theirs = scores(scorer, 0)
        assert ("enable_gqa" in told[-1]) is knows
        torch.testing.assert_close(other, logprobs, atol=1e-5, rtol=0)
        assert all(
            torch.allclose(theirs[name], expected, atol=1e-5)
            for name, expected in gradients.items()
        )
