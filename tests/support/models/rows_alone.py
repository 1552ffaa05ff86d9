"""Scores and gradients of made-up rows: packed or padded by the trainer, and of each row alone by
transformers itself."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from common.wire.schemas import Int32
from learning.layout import Layout, Packed
from tests.support.batches.groups import VOCABULARY
from trainer.policy.scorer import Scorer

TEMPERATURE = 0.7
ROWS = {
    "rows alone": [(5, [4]), (3, [7]), (9, [2])],
    "groups": [(5, [4, 9, 1, 6]), (8, [3, 3, 12])],
    "prompts longer than completions": [(40, [2, 5, 1]), (30, [4, 4])],
    "one-token completions": [(4, [1, 1, 1]), (1, [1])],
    "an empty completion": [(4, [0, 3]), (6, [2, 0])],
    "mixed": [(1, [30, 2]), (25, [1, 40, 3]), (7, [5]), (60, [6, 6, 6]), (2, [1])],
}
"""Length of each prompt, and of its completions."""


def sizes(more: dict[str, Any]) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, **more}


def rows(name: str) -> tuple[list[Int32], list[Int32]]:
    rng = np.random.default_rng(0)
    prompts, completions = [], []
    for length, answers in ROWS[name]:
        prompt = rng.integers(3, VOCABULARY, length).astype(np.int32)
        for answer in answers:
            prompts.append(prompt.copy())
            completions.append(rng.integers(3, VOCABULARY, answer).astype(np.int32))
    return prompts, completions


def results(model: PreTrainedModel, layout: type[Layout], name: str) -> dict[str, torch.Tensor]:
    """Returns scores, and gradients of a loss that weights every token and its entropy
    differently."""
    prompts, completions = rows(name)
    targets = torch.from_numpy(np.concatenate(completions)).long()
    scorer = Scorer(model, "on" if layout is Packed else "off")
    assert scorer.layout is layout
    model.zero_grad()
    scores = scorer(layout.of(prompts, completions), targets, TEMPERATURE, entropy_gradient=True)
    return _with_gradients(model, scores.logprobs, scores.entropy)


def alone(model: PreTrainedModel, name: str) -> dict[str, torch.Tensor]:
    """Returns what `results` does, from transformers' own logits of each row by itself."""
    model.zero_grad()
    logprobs = []
    entropies = []
    for prompt, completion in zip(*rows(name), strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, completion])).long()
        logits = model(tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_softmax = (logits.float() / TEMPERATURE).log_softmax(-1)
        logprobs.append(log_softmax.gather(1, tokens[len(prompt) :, None])[:, 0])
        entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
    return _with_gradients(model, torch.cat(logprobs), torch.cat(entropies))


def _with_gradients(
    model: PreTrainedModel, logprobs: torch.Tensor, entropy: torch.Tensor
) -> dict[str, torch.Tensor]:
    count = len(logprobs)
    weights = torch.randn(2, count, generator=torch.Generator().manual_seed(1)) / count
    (weights * torch.stack([logprobs, entropy])).sum().backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), **gradients}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(
            found[key], tensor, atol=1e-5, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )
