"""Log-probabilities without the logits: values and gradients equal those of the full logits, but
memory is smaller."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainer.policy.logprobs
from trainer.policy.logprobs import token_scores

TOKENS, HIDDEN, VOCABULARY = 23, 16, 50
Scores = Callable[[nn.Module, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]


class Adapted(nn.Linear):  # type: ignore[misc]  # torch is not typed for mypy here
    """A head with an adapter of rank 3."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, VOCABULARY)
        self.lora_a = nn.Parameter(torch.randn(3, HIDDEN) / 8)
        self.lora_b = nn.Parameter(torch.randn(VOCABULARY, 3) / 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + hidden @ self.lora_a.t() @ self.lora_b.t()


HEADS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(HIDDEN, VOCABULARY, bias=False),
    "bias": lambda: nn.Linear(HIDDEN, VOCABULARY),
}
WITH_ADAPTED = HEADS | {"adapted": Adapted}


def own(head: nn.Module, hidden: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    if isinstance(head, Adapted):
        options["added"] = (hidden @ head.lora_a.t(), head.lora_b)
    return token_scores(head, hidden, *arguments, **options)


def full(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    distribution = torch.distributions.Categorical(logits=head(hidden).float() / temperature)
    entropy = distribution.entropy()
    return distribution.log_prob(targets), entropy if entropy_gradient else entropy.detach()


def computed(
    scores: Scores, head: nn.Module, temperature: float, entropy_gradient: bool
) -> list[Tensor]:
    """Returns log-probabilities, entropies, and the gradients of a loss of both by hidden states
    and head."""
    generator = torch.Generator().manual_seed(3)
    dtype = next(head.parameters()).dtype
    hidden = (torch.randn(TOKENS, HIDDEN, generator=generator) * 2).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    weights = torch.randn(2, TOKENS, generator=generator)
    logprobs, entropy = scores(head, hidden, targets, temperature, entropy_gradient)
    head.zero_grad()
    (weights * torch.stack([logprobs, entropy])).sum().backward()
    gradients = [tensor.grad for tensor in (hidden, *head.parameters())]
    return [
        logprobs.detach(),
        entropy.detach(),
        *(gradient.clone() for gradient in gradients if gradient is not None),
    ]


@pytest.fixture(params=["whole and kept", "whole", "chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "whole and kept":
        monkeypatch.setattr(trainer.policy.logprobs, "_KEPT_BYTES", 0)
    if request.param == "chunks":
        monkeypatch.setattr(trainer.policy.logprobs, "_CHUNK_BYTES", 4 * VOCABULARY * 7)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("head", WITH_ADAPTED)
def test_values_and_gradients_are_those_of_the_full_logits(
    head: str, temperature: float, entropy_gradient: bool
) -> None:
    torch.manual_seed(0)
    module = WITH_ADAPTED[head]()
    for result, expected in zip(
        computed(own, module, temperature, entropy_gradient),
        computed(full, module, temperature, entropy_gradient),
        strict=True,
    ):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def exact(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    weights = {name: parameter.float() for name, parameter in head.named_parameters()}

    def whole(hidden: Tensor) -> Tensor:
        return torch.func.functional_call(head, weights, hidden.float())

    return full(whole, hidden, targets, temperature, entropy_gradient)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("float32", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_low_precision_is_rounded_where_the_full_logits_are(
    entropy_gradient: bool, float32: bool, head: str
) -> None:
    torch.manual_seed(0)
    module = HEADS[head]().to(torch.bfloat16)
    results = computed(partial(token_scores, float32=float32), module, 0.7, entropy_gradient)
    expected = computed(exact if float32 else full, module, 0.7, entropy_gradient)
    for i, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert result.dtype == wanted.dtype
        close: dict[str, Any] = (
            {"atol": 1e-5, "rtol": 1e-5} if i < 2 else {"atol": 0.05, "rtol": 0.02}
        )
        torch.testing.assert_close(result, wanted, **close)


@pytest.mark.usefixtures("chunks")
def test_autocast_gives_the_head_full_precision_gradients() -> None:
    torch.manual_seed(0)
    module = HEADS["linear"]()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = partial(token_scores, float32=False)
        results, expected = (computed(scores, module, 1.0, False) for scores in (rounded, full))
    torch.testing.assert_close(results[:2], expected[:2], atol=1e-5, rtol=1e-5)
    for result, wanted in zip(results[2:], expected[2:], strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, wanted, atol=0.05, rtol=0.02)


def test_a_tied_head_adds_to_the_gradient_of_the_embedding() -> None:
    gradients = []
    for scores in (token_scores, full):
        torch.manual_seed(0)
        embedding, head = nn.Embedding(VOCABULARY, HIDDEN), HEADS["linear"]()
        head.weight = embedding.weight
        ids = torch.arange(TOKENS)
        scores(head, embedding(ids).tanh(), ids.flip(0), 1.0, False)[0].sum().backward()
        gradients.append(embedding.weight.grad)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_memory_for_the_backward_pass_is_far_below_the_logits(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.policy.logprobs, "_KEPT_BYTES", 0)
    monkeypatch.setattr(trainer.policy.logprobs, "_CHUNK_BYTES", 4 * VOCABULARY * 16)
    module, saved = HEADS[head](), {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hidden = torch.randn(4096, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_scores(module, hidden, torch.zeros(4096).long(), 1.0, False)
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    assert sum(saved.values()) - hidden.nbytes - parameters < 4096 * VOCABULARY * 4 / 4


def test_no_tokens_have_no_scores() -> None:
    module = HEADS["linear"]()
    hidden = torch.randn(0, HIDDEN, requires_grad=True)
    logprobs, entropy = token_scores(module, hidden, torch.zeros(0).long(), 1.0, False)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert hidden.grad is not None
