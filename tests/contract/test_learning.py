"""Models of uncommon kinds on real SGLang: a run of 20 steps in which the engine serves what the
trainer publishes, and the policy learns.

On a CPU Triton's interpreter runs SGLang's kernels of Mamba, so that this takes minutes. `-s` prints
the rewards and the largest mean |Δ log-probability| of each run.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.engines import PLUGIN, SGLANG, sglang_is_installed
from tests.support.models.tiny_models import GEMMA, HYBRIDS, with_tokenizer_of
from trainer import GRPOConfig, GRPOTrainer

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(
        not sglang_is_installed(), reason="SGLang is not installed: `make sglang-cpu` does it"
    ),
]
TOKENS = 4
STEPS = 20
NEAR = 1e-5
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # SGLang reads the interval in place of the list of layers.
    "Qwen3.5": ("qwen3_5_text", {**HYBRIDS["qwen3_5_text"], "full_attention_interval": 2}),
    # Dense, like the small ones. The interpreter takes a while for every head.
    "Granite 4 hybrid": (
        "granitemoehybrid",
        {
            **HYBRIDS["granitemoehybrid"],
            "num_local_experts": 0,
            "mamba_n_heads": 2,
            "mamba_d_head": 32,
        },
    ),
    "text of a multimodal checkpoint": (GEMMA, {}),
}
"""By name: kind of model, and its settings."""
ROWS = [{"prompt": f"Tom has {number} apples"} for number in range(2, 10)]


def small_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of tokens in the lower half of the vocabulary."""
    return [sum(token < 141 for token in ids) / TOKENS for ids in completion_ids]


@pytest.mark.parametrize("name", CASES)
def test_contract_a_model_learns_on_sglang(
    name: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    kind, sizes = CASES[name]
    model = with_tokenizer_of(model_dir, kind, tmp_path / "model", **sizes)
    settings = GRPOConfig(
        output_dir=tmp_path / "run",
        verbose=False,
        use_cpu=True,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1 if kind == "granitemoehybrid" else 4,
        num_generations=8,
        max_completion_length=TOKENS,
        max_steps=STEPS,
        learning_rate=0.03,
        lr_scheduler_type="constant",
        warmup_steps=0,
        settings={
            "rollout.engine_python": str(SGLANG / "bin" / "python"),
            "rollout.max_running_requests": 16,
        },
    )
    result = GRPOTrainer(str(model), small_ids, settings, ROWS, engine="sglang").train()
    assert result.global_step == STEPS
    rewards = [line["reward"] for line in result.history]
    largest = max(line["update"]["delta_logprob"] for line in result.history)
    print(f"{name}: rewards {[round(reward, 2) for reward in rewards]}, |Δ| {largest:.1e}")
    assert largest <= NEAR
    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert last > first + 0.2
