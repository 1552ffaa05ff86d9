"""Packed rows give the same results as padded rows for supported models; other models are
recognised beforehand."""

from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from common.errors import ConfigError
from common.settings.config import Config
from common.settings.sections import TrainerSection
from learning.attention import unpackable
from learning.layout import Packed, Padded, layout_for
from learning.ranks import Ranks
from learning.sharding import prepare
from tests.support.batches.groups import off_policy_groups, whole, with_algorithm
from tests.support.models.rows_alone import ROWS, alone, assert_same, results, rows, sizes
from tests.support.models.tiny_models import MLA, make
from trainer.policy.policy import Policy
from trainer.policy.value_model import load_value_model

WINDOWS: dict[str, Any] = {
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention"],
}
PACKABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 with GQA": ("qwen2", {}),
    "qwen2 with windows": ("qwen2", {**WINDOWS, "use_sliding_window": True}),
    "qwen3": ("qwen3", {}),
    "llama without GQA": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "gemma3": ("gemma3_text", {**WINDOWS, "query_pre_attn_scalar": 5}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 3}),
    "gemma2 with caps": ("gemma2", {"attn_logit_softcapping": 0.5, "sliding_window": 5}),
    "gpt-oss with sinks": (
        "gpt_oss",
        {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek-v3 with small values": ("deepseek_v3", MLA),
    "glm-4 lite": ("glm4_moe_lite", MLA),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "indexed": ("deepseek_v32", MLA, "indexed_attention"),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 2}, "rotate"),
    "dropout": ("qwen2", {"attention_dropout": 0.1}, "dropout"),
}


def packable(kind: str, implementation: str | None = None) -> PreTrainedModel:
    name, more = PACKABLE[kind]
    model: PreTrainedModel = make(name, implementation=implementation, **sizes(more))
    return model


@pytest.mark.parametrize("name", ROWS)
def test_packed_rows_equal_padded_rows(name: str) -> None:
    model = packable("qwen2 with GQA")
    assert_same(results(model, Packed, name), results(model, Padded, name))


@pytest.mark.parametrize("kind", PACKABLE)
@pytest.mark.parametrize("name", ["mixed", "prompts longer than completions"])
def test_packed_rows_equal_rows_alone_for_many_kinds_of_models(kind: str, name: str) -> None:
    """Compares with transformers' own attention and masks."""
    packed = packable(kind)
    expected = alone(packable(kind, "eager"), name)
    assert_same(results(packed, Packed, name), expected)
    assert_same(results(packed, Padded, name), expected)


# dynamo triggers this warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("kept", "compiled"),
    [(True, False), ("selective", False), pytest.param("selective", True, marks=pytest.mark.slow)],
)
def test_packed_rows_equal_padded_rows_with_gradient_checkpointing(
    kept: bool | Literal["selective"], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the graphs of dynamo and autograd matter here, so the slow C++ compiler is left out.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    settings = TrainerSection(activation_checkpointing=kept, compile=compiled)
    model, checkpointed = (packable("qwen2 with windows") for _ in range(2))
    prepare(checkpointed, settings, trained=True, device=torch.device("cpu"))
    checkpointed.train()
    counters.clear()
    layout = Padded if compiled else Packed  # packed attention is compiled only on GPUs
    assert_same(results(checkpointed, layout, "mixed"), results(model, Padded, "mixed"))
    assert (counters["stats"]["unique_graphs"] > 0) is compiled
    assert not counters["graph_break"]


def test_selective_checkpointing_computes_no_matrix_product_again() -> None:
    flops = {}
    for kept in (False, True, "selective"):
        model = packable("qwen2 with GQA")
        prepare(
            model,
            TrainerSection.model_validate({"activation_checkpointing": kept}),
            trained=True,
            device=torch.device("cpu"),
        )
        model.train()
        with FlopCounterMode(display=False) as counter:
            results(model, Packed, "mixed")
        flops[kept] = counter.get_total_flops()
    assert flops["selective"] == flops[False] < flops[True]


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_packed_are_recognised(kind: str) -> None:
    name, more, reason = REFUSED[kind]
    model = make(name, **sizes(more))
    with pytest.raises(ConfigError, match=rf"({reason}).*trainer\.packing.*on.*remedy"):
        layout_for(model, "on")
    assert layout_for(model, "auto") is layout_for(model, "off") is Padded


def test_a_packable_model_is_packed_unless_turned_off_and_otherwise_unchanged() -> None:
    model = packable("qwen2 with windows")
    ids = torch.arange(3, 33).view(2, 15)
    mask = torch.ones(2, 15).long()
    mask[0, :4] = 0
    before = model(ids, attention_mask=mask).logits
    assert unpackable(model) is None
    assert layout_for(model, "off") is Padded
    assert layout_for(model, "auto") is layout_for(model, "on") is Packed
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask == 1], before[mask == 1])
    assert "packed" not in str(model.config.to_dict())


def test_a_shared_prompt_is_computed_once() -> None:
    packed = Packed.of(*rows("groups"))
    assert packed.input_ids.shape == (
        1,
        5 + 3 + 8 + 0 + 5 + 8 + 2 + 2 + 11,
    )  # without the last tokens
    assert packed.position_ids[0, :12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8]
    assert packed.predicts[:6].tolist() == [4, 5, 6, 7, 4, 8]
    assert packed.predicts[13].item() == 4, "the completion of one token"


SETTINGS = {
    "grpo": {},
    "kl and entropy": {"kl_coef": 0.1, "entropy_coef": 0.01},
    "several": {"update_epochs": 2, "mini_batches": 3, "rollout_correction": "truncate"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_update_is_the_same_packed_and_padded(config: Config, settings: dict[str, Any]) -> None:
    new, metrics = [], []
    for packing in ("on", "off"):
        changed = with_algorithm(config, **settings)
        changed.trainer.packing = packing
        policy = Policy(changed, Ranks())
        metrics.append(policy.update(whole(off_policy_groups(), changed)).metrics)
        new.append({name: p.detach() for name, p in policy.model.named_parameters()})
    assert metrics[0].loss == pytest.approx(metrics[1].loss, abs=1e-6)
    assert metrics[0].grad_norm == pytest.approx(metrics[1].grad_norm, rel=1e-4)
    assert metrics[0].trained_tokens == metrics[1].trained_tokens
    for name, expected in new[1].items():
        torch.testing.assert_close(new[0][name], expected, atol=2e-5, rtol=0, msg=name)


def test_values_are_the_same_packed_and_padded(config: Config) -> None:
    values = []
    for packing in ("on", "off"):
        config.trainer.packing = packing
        torch.manual_seed(0)
        model = load_value_model(config, Ranks())
        torch.nn.init.normal_(model.module.score.weight, generator=torch.Generator().manual_seed(0))
        result = model(model.layout.of(*rows("mixed")))
        result.square().mean().backward()
        values.append(
            (result.detach(), [p.grad for p in model.module.parameters() if p.grad is not None])
        )
    torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=1e-4)
