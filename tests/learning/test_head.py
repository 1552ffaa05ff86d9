"""Float32 logits of models that compute in lower precision."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from learning.head import float32_logits, make_float32_logits
from trainer.policy.logprobs import token_scores

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("kind", ["tied", "bias", "gemma"])
def test_the_head_of_a_model_in_bfloat16_rounds_nothing(kind: str) -> None:
    torch.manual_seed(0)
    if kind == "gemma":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8))
    elif kind == "bias":
        model = PhiForCausalLM(PhiConfig(**SIZES))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    model = model.bfloat16().eval()
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        rounded, hidden = model(ids).logits, model.get_decoder()(ids).last_hidden_state
        make_float32_logits(model)
        logits = model(ids).logits
        head = model.get_output_embeddings()
        exact = hidden.double() @ head.weight.double().T + (
            0 if head.bias is None else head.bias.double()
        )
        targets = ids.flatten().roll(1)
        scored, _ = token_scores(head, hidden.flatten(0, 1), targets, 1.0, False)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)
    assert (rounded.double() - exact).abs().max() > 3e-4
    sampled = logits.flatten(0, 1).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(scored, sampled, atol=1e-6, rtol=1e-6)  # trainer and engine agree


def test_float32_logits_keep_the_shape_of_the_rows() -> None:
    hidden, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    torch.testing.assert_close(float32_logits(hidden, weight), hidden @ weight.T)
    assert float32_logits(hidden[:0], weight).shape == (0, 3, 5)
