"""A model whose logits are not what its head computes is refused: the trainer would learn another policy."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import ConfigError
from trainer.policy.scorer import Scorer

SHAPE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
PLAIN = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma3_text", "phi3", "smollm3", "olmo2", "gpt_oss")
CHANGED: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 30.0},
    "gemma3_text": {"final_logit_softcapping": 30.0},
    "granite": {"logits_scaling": 8.0},
    "granitemoe": {"logits_scaling": 6.0},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.25},
}


def model_of(name: str, **more: Any) -> Any:
    shape = {key: value for key, value in SHAPE.items() if hasattr(AutoConfig.for_model(name), key)}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape, **more)).eval()


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models_are_taken_and_stay_as_they_were(name: str) -> None:
    model, tokens = model_of(name), torch.tensor([[5, 7, 11]])
    before = model(tokens, use_cache=False).logits
    Scorer(model)
    after = model(tokens, use_cache=False).logits
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(model.get_output_embeddings()(model.get_decoder()(tokens)[0]), after)


@pytest.mark.parametrize("name", CHANGED)
def test_models_that_change_the_logits_of_their_head_are_refused(name: str) -> None:
    model, tokens = model_of(name, **CHANGED[name]), torch.tensor([[5, 7, 11]])
    own = model.get_output_embeddings()(model.get_decoder()(tokens)[0])
    assert not torch.allclose(model(tokens, use_cache=False).logits, own, rtol=1e-6, atol=1e-9)
    with pytest.raises(ConfigError, match="scale or cap the logits") as caught:
        Scorer(model)
    assert caught.value.field == "model.name"
