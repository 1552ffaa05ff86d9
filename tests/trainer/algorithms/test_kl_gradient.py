"""The exact expected gradient of each KL term: every completion of a small softmax policy is
enumerated in float64."""

import itertools
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from common.settings.config import Config
from common.wire.schemas import Completion, Group
from tests.support.batches.groups import batch_of, with_algorithm
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.algorithms.losses import kl_divergence

V, T = 3, 3
_EVERY = list(itertools.product(range(V), repeat=T))
_STATES = [prefix for length in range(T) for prefix in itertools.product(range(V), repeat=length)]
SEQUENCES = torch.tensor(_EVERY)
PREFIXES = torch.tensor([[_STATES.index(tokens[:t]) for t in range(T)] for tokens in _EVERY])
"""[sequences, T] the state before each token, as the number of its prefix."""


def tables(seed: int) -> tuple[Tensor, Tensor]:
    """Returns logits [states, V] of a policy and of a reference near it."""
    generator = torch.Generator().manual_seed(seed)
    policy = torch.randn(len(_STATES), V, generator=generator, dtype=torch.float64)
    reference = policy + 0.1 * torch.randn(
        len(_STATES), V, generator=generator, dtype=torch.float64
    )
    return policy.requires_grad_(), reference


def token_logprobs(logits: Tensor) -> Tensor:
    """Returns log-probabilities [sequences, T]."""
    return torch.log_softmax(logits, -1)[PREFIXES, SEQUENCES]


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def gradient(value: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(value, of, retain_graph=True)[0]


@pytest.mark.parametrize("seed", range(3))
def test_each_estimator_in_the_loss_has_the_gradient_of_its_divergence(seed: int) -> None:
    """At the states the policy visits. k1: none; k2: KL(policy ‖ reference); k3: KL(reference ‖
    policy)."""
    policy, reference = tables(seed)
    logprobs, ref = token_logprobs(policy), token_logprobs(reference)
    chance = logprobs.sum(1).exp().detach()

    def expected(estimator: Literal["k1", "k2", "k3"]) -> Tensor:
        return gradient((chance[:, None] * kl_divergence(logprobs, ref, estimator)).sum(), policy)

    p, q = torch.log_softmax(policy, -1), torch.log_softmax(reference, -1)
    visits = torch.zeros(len(_STATES), dtype=torch.float64).index_add(
        0, PREFIXES.flatten(), chance.repeat_interleave(T)
    )
    forward, reverse = (p.exp() * (p - q)).sum(1), (q.exp() * (q - p)).sum(1)
    assert expected("k1").norm() < 1e-12
    torch.testing.assert_close(expected("k2"), gradient((visits * forward).sum(), policy))
    torch.testing.assert_close(expected("k3"), gradient((visits * reverse).sum(), policy))


@pytest.mark.parametrize("seed", range(3))
def test_k2_and_k3_in_the_reward_have_a_wrong_gradient(seed: int) -> None:
    """Compares E[(k − E k) ∇ log π] with the gradient of the divergence, for 50 tokens and 0.004 to
    0.007 nats."""
    generator = torch.Generator().manual_seed(seed)
    policy = torch.randn(50, generator=generator, dtype=torch.float64)
    reference = torch.log_softmax(
        policy + 0.1 * torch.randn(50, generator=generator, dtype=torch.float64), -1
    )
    logprobs = torch.log_softmax(policy.requires_grad_(), -1)
    chance = logprobs.exp().detach()
    true = gradient((logprobs.exp() * (logprobs - reference)).sum(), policy)

    def found(estimator: Literal["k1", "k2", "k3"]) -> tuple[float, float]:
        penalty = kl_divergence(logprobs, reference, estimator).detach()
        expected = gradient(
            (chance * (penalty - (chance * penalty).sum()) * logprobs).sum(), policy
        )
        return cosine(expected, true), float(expected.norm() / true.norm())

    assert found("k1") == pytest.approx((1, 1))
    for estimator in ("k2", "k3"):
        similar, size = found(estimator)
        assert similar < 0.43
        assert size < 0.09


SETTINGS: list[tuple[dict[str, Any], float]] = [
    ({"advantage": "group_centred"}, 0.999999),
    ({"advantage": "leave_one_out"}, 0.999999),
    ({"advantage": "length_weighted"}, 0.999999),  # all lengths are equal
    ({"advantage": "gae"}, 0.999),  # whitening subtracts the mean of the batch
]


@pytest.mark.parametrize(("settings", "least"), SETTINGS, ids=lambda value: str(value))
def test_the_penalty_in_the_reward_has_the_gradient_of_the_divergence(
    settings: dict[str, Any], least: float, config: Config
) -> None:
    """With rewards of 0, −E[Σ A ∇ log π] over all pairs is a multiple of the gradient of KL(policy
    ‖ reference)."""
    policy, reference = tables(0)
    logprobs, ref = token_logprobs(policy), token_logprobs(reference)
    pairs = torch.tensor(list(itertools.product(range(len(SEQUENCES)), repeat=2)))
    changed = with_algorithm(config, kl_coef=0.3, kl_in="reward", **settings)
    rows = [completion(SEQUENCES[i].tolist()) for i in range(len(SEQUENCES))]
    groups = [
        Group(
            id="g",
            prompt_id="p",
            prompt="",
            ground_truth="",
            prompt_token_ids=np.ones(1, np.int32),
            completions=[rows[i], rows[j]],
        )
        for i, j in pairs.tolist()
    ]
    batch = batch_of(groups, changed)
    order = pairs.flatten().tolist()
    own, other = logprobs.detach().float().numpy(), ref.float().numpy()
    batch.old_logprobs, batch.ref_logprobs = [own[i] for i in order], [other[i] for i in order]
    batch.values = [np.zeros(T, np.float32)] * len(order)
    advantages = (
        torch.from_numpy(np.stack(compute_advantages(batch, changed, kl_coef=0.3)[0]))
        .double()
        .view(len(pairs), 2, T)
    )
    chance = logprobs.sum(1).exp().detach()
    weighted = chance[pairs].prod(1)[:, None, None] * advantages * logprobs[pairs]
    true = gradient((logprobs.sum(1).exp() * (logprobs - ref).sum(1)).sum(), policy)
    assert cosine(gradient(-weighted.sum(), policy), true) > least


def completion(tokens: list[int]) -> Completion:
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.zeros(T, np.float32),
        text="",
        finish_reason="stop",
        weight_versions=[(0, 0, T)],
    )
