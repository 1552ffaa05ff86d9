"""Log-probabilities are those of the model's own logits, which some models scale or cap after their
head."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import ConfigError
from learning.final_logits import FinalLogits, final_logits
from tests.support.errors import raises
from trainer.policy import logprobs
from trainer.policy.scorer import Scorer

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
PLAIN = (
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "llama",
    "mistral",
    "gemma3_text",
    "phi3",
    "smollm3",
    "olmo2",
    "gpt_oss",
)
CHANGED: dict[str, tuple[dict[str, Any], FinalLogits]] = {
    "gemma2": ({"final_logit_softcapping": 0.5}, FinalLogits(1.0, 0.5)),
    "gemma3_text": ({"final_logit_softcapping": 0.3}, FinalLogits(1.0, 0.3)),
    "granite": ({"logits_scaling": 8.0}, FinalLogits(1 / 8)),
    "granitemoe": ({"logits_scaling": 6.0}, FinalLogits(1 / 6)),
    "cohere": ({"logit_scale": 0.0625}, FinalLogits(0.0625)),
    "cohere2": ({"logit_scale": 0.25}, FinalLogits(0.25)),
    "falcon_h1": ({"lm_head_multiplier": 0.04}, FinalLogits(0.04)),
    "minicpm3": ({"dim_model_base": 4}, FinalLogits(1 / 4)),
    "nanochat": ({"final_logit_softcapping": 0.4}, FinalLogits(1.0, 0.4)),
}
PROMPTS = [np.array([5, 7, 11], np.int32), np.array([3, 8, 2, 6, 4], np.int32)]
COMPLETIONS = [np.array([9, 1, 30, 2], np.int32), np.array([17], np.int32)]


def model_of(name: str, **more: Any) -> Any:
    shape = {key: value for key, value in SHAPE.items() if hasattr(AutoConfig.for_model(name), key)}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **shape, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def own_scores(model: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities and entropies of the completions' tokens by the model's own logits,
    row by row."""
    scores, entropies = [], []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, completion])).long()[None]
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logs = (logits / temperature).log_softmax(-1)
        scores.append(logs.gather(1, torch.from_numpy(completion).long()[:, None])[:, 0])
        entropies.append(-(logs.exp() * logs).sum(-1))
    return torch.cat(scores), torch.cat(entropies)


def gradients_of(model: Any, scores: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    weights = torch.randn(2, len(scores[0]), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (weights * torch.stack(scores)).sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("name", PLAIN)
def test_plain_models_are_taken_and_stay_as_they_were(name: str) -> None:
    model, tokens = model_of(name), torch.tensor([[5, 7, 11]])
    before = model(tokens, use_cache=False).logits
    assert final_logits(model) == FinalLogits()
    Scorer(model)
    after = model(tokens, use_cache=False).logits
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(model.get_output_embeddings()(model.get_decoder()(tokens)[0]), after)


@pytest.mark.parametrize(
    "name",
    [
        # Its layers of states are slow on a CPU.
        pytest.param(name, marks=pytest.mark.slow) if name == "falcon_h1" else name
        for name in CHANGED
    ],
)
def test_scaled_and_capped_logits_are_scored_as_the_model_computes_them(name: str) -> None:
    settings, wanted = CHANGED[name]
    model = model_of(name, **settings)
    found = final_logits(model)
    assert (found.scale, found.cap or 0.0) == pytest.approx(
        (wanted.scale, wanted.cap or 0.0), rel=1e-6
    )
    scorer = Scorer(model)
    rows = scorer.layout.of(PROMPTS, COMPLETIONS)
    targets = torch.from_numpy(np.concatenate(COMPLETIONS)).long()
    scored = scorer(rows, targets, 0.7, entropy_gradient=True)
    own = own_scores(model, 0.7)
    torch.testing.assert_close(tuple(scored), own, atol=1e-5, rtol=1e-5)
    theirs = gradients_of(model, own)
    ours = gradients_of(model, tuple(scored))
    assert ours.keys() == theirs.keys()
    for key, gradient in theirs.items():
        torch.testing.assert_close(
            ours[key], gradient, atol=1e-5, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize(
    "final", [FinalLogits(0.25, 2.0), FinalLogits(3.0)], ids=["capped", "scaled"]
)
@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("kept", [True, False])
def test_the_gradient_of_a_scale_and_a_cap_is_that_of_autograd(
    final: FinalLogits, bonus: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_CPU_CHUNK", 3)
    monkeypatch.setattr(logprobs, "_KEPT_BYTES", (1 << 20) * kept)
    torch.manual_seed(2)
    linear, hidden = nn.Linear(6, 11), (4 * torch.randn(7, 6)).requires_grad_()
    targets, weights = torch.randint(11, (7,)), torch.randn(7)
    inputs = [hidden, linear.weight, linear.bias]
    logs = (final.of(linear(hidden)) / 0.8).log_softmax(-1)
    wanted, entropy = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    gradients = torch.autograd.grad((wanted * weights).sum() + bonus * entropy.sum(), inputs)
    found, theirs = logprobs.token_scores(linear, hidden, targets, 0.8, bonus, final=final)
    torch.testing.assert_close((found, theirs), (wanted, entropy), atol=1e-5, rtol=1e-5)
    loss = (found * weights).sum() + (theirs.sum() if bonus else 0)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), gradients, atol=1e-5, rtol=1e-4)


def test_a_model_with_another_kind_of_head_is_refused() -> None:
    model = model_of("llama")
    model.set_output_embeddings(nn.Sequential(model.get_output_embeddings()))
    with raises(ConfigError, field="model.name"):
        Scorer(model)


def test_a_model_whose_logits_are_something_else_is_refused() -> None:
    model = model_of("llama")
    plain = model.forward

    def shifted(*arguments: Any, **options: Any) -> Any:
        found = plain(*arguments, **options)
        found.logits = found.logits.clamp(min=-3.0)
        return found

    model.forward = shifted
    with raises(ConfigError, field="model.name"):
        Scorer(model)
