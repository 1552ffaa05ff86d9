"""The estimate of an update's memory against what torch's allocator hands out on a CPU.

The rehearsal counts tensors; here the profiler records every allocation and release of a real update.
"""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from common.models.memory import ModelShape, trainer_memory
from common.settings.config import load
from learning.ranks import Ranks
from tests.support.batches.groups import batch_of, make_group
from trainer.algorithms.batch import Batch
from trainer.policy.policy import Policy

pytestmark = [pytest.mark.integration, pytest.mark.slow]
_FLOAT32 = 4
_TOKENS = 2048
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}


def full_batch(policy: Policy) -> Batch:
    """Returns a batch whose rows together have about `_TOKENS` tokens, in one pass."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(_TOKENS // 512):
        group = make_group(rng, [1.0, 0.0, 1.0, 0.0], position=number)
        for completion in group.completions:
            completion.token_ids = rng.integers(3, 300, 124).astype(np.int32)
            completion.logprobs = np.full(124, -5, np.float32)
        groups.append(group)
    batch = batch_of(groups, policy.config, policy.step)
    ones = [np.ones(124, np.float32) for _ in batch.rows]
    batch.advantages = batch.old_logprobs = ones
    return batch


def peak_bytes(policy: Policy) -> int:
    """Returns the most bytes that an update after a first one has allocated, with what is held."""
    policy.update(full_batch(policy))
    policy.optimizer.zero_grad()
    batch = full_batch(policy)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        policy.update(batch)
    events = profiled.profiler.kineto_results.events()
    changes = [(each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"]
    sizes = [size for _, size in sorted(changes)]
    held = sum(each.numel() for each in policy.model.parameters()) * 3 * _FLOAT32
    return int(held + max(accumulate(sizes)))


@pytest.mark.parametrize("checkpointing", ["false", "selective", "true"])
@pytest.mark.parametrize(("kind", "more"), [("llama", {}), ("qwen3_moe", _EXPERTS)])
def test_a_real_update_allocates_what_is_estimated(
    tmp_path: Path, kind: str, more: dict[str, Any], checkpointing: str
) -> None:
    shape = _SIZES | more
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).save_pretrained(tmp_path)
    options = {
        "model.name": tmp_path,
        "optimizer.warmup_steps": 0,
        "trainer.micro_batch_tokens": _TOKENS,
        "trainer.activation_checkpointing": checkpointing,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    config = load(words, {})
    written = json.loads((tmp_path / "config.json").read_text())
    estimate = trainer_memory(ModelShape.of(written), config, 1, width=_FLOAT32)
    peak = peak_bytes(Policy(config, Ranks()))
    assert 0.75 < peak / (estimate.total - estimate.overhead) < 1.05
