"""The losses, gradients and steps of Tinker runs are those of plain torch on the same data."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.batches.tinker import PlainRun, learner, only, random_data
from trainer.tinker.interface import AdamParams, Datum, LoraSpec
from trainer.tinker.learner import RunLearner

NEAR = 1e-5
Given = Mapping[str, Tensor]


@pytest.fixture(scope="module")
def runs(policy_dir: Path) -> RunLearner:
    """A learner whose runs have effect: a new adapter has none, and no gradient of its A."""
    return learner(policy_dir)


def same_gradient(found: Tensor | None, expected: Tensor) -> None:
    """Compares two gradients, relative to the largest number of them."""
    assert found is not None
    largest = expected.abs().max().item()
    torch.testing.assert_close(found, expected, atol=NEAR * largest, rtol=0)


def begun(runs: RunLearner, name: str, spec: LoraSpec | None = None) -> None:
    """Makes a run with a step behind it."""
    runs.create(name, spec or LoraSpec(rank=4, seed=3))
    runs.forward_backward(name, only(random_data(9), "weights"), "cross_entropy", {})
    runs.optim_step(name, AdamParams(learning_rate=2e-2))


def weighted(given: Given, loss: Tensor) -> Tensor:
    return (loss * given.get("weights", torch.ones(()))).sum()


def plain_cross_entropy(logprobs: Tensor, given: Given) -> Tensor:
    return weighted(given, -logprobs)


def plain_importance_sampling(logprobs: Tensor, given: Given) -> Tensor:
    ratio = torch.exp(logprobs - given["logprobs"])
    return weighted(given, -(ratio * given["advantages"]))


def plain_ppo(low: float, high: float) -> Callable[[Tensor, Given], Tensor]:
    def loss(logprobs: Tensor, given: Given) -> Tensor:
        ratio = torch.exp(logprobs - given["logprobs"])
        bounded = torch.clamp(ratio, low, high)
        objective = torch.min(ratio * given["advantages"], bounded * given["advantages"])
        return weighted(given, -objective)

    return loss


def plain_cispo(low: float, high: float) -> Callable[[Tensor, Given], Tensor]:
    def loss(logprobs: Tensor, given: Given) -> Tensor:
        ratio = torch.exp(logprobs - given["logprobs"])
        weight = torch.clamp(ratio, low, high).detach()
        return weighted(given, -(weight * logprobs * given["advantages"]))

    return loss


def plain_dro(beta: float) -> Callable[[Tensor, Given], Tensor]:
    def loss(logprobs: Tensor, given: Given) -> Tensor:
        squared = (logprobs - given["logprobs"]) ** 2
        return weighted(given, -(logprobs * given["advantages"] - 0.5 * beta * squared))

    return loss


def plain_gspo(low: float, high: float) -> Callable[[Tensor, Given], Tensor]:
    def loss(logprobs: Tensor, given: Given) -> Tensor:
        marked = given["sequence_ratio_mask"] != 0
        mean = (logprobs.detach() - given["logprobs"])[marked].mean()
        ratio = torch.exp(mean + logprobs - logprobs.detach())
        bounded = torch.clamp(ratio, low, high)
        objective = torch.min(ratio * given["advantages"], bounded * given["advantages"])
        return weighted(given, -objective)

    return loss


RL = ("logprobs", "advantages")
CASES: dict[
    str, tuple[str, tuple[str, ...], dict[str, float], Callable[[Tensor, Given], Tensor]]
] = {
    "cross_entropy": ("cross_entropy", ("weights",), {}, plain_cross_entropy),
    "no_weights": ("cross_entropy", (), {}, plain_cross_entropy),
    "importance_sampling": ("importance_sampling", RL, {}, plain_importance_sampling),
    "masked": ("importance_sampling", (*RL, "weights"), {}, plain_importance_sampling),
    "ppo": ("ppo", RL, {}, plain_ppo(0.8, 1.2)),
    "narrow": ("ppo", RL, {"clip_high_threshold": 1.1}, plain_ppo(0.8, 1.1)),
    "cispo": ("cispo", RL, {}, plain_cispo(0.0, 4.0)),
    "bounded_cispo": ("cispo", RL, {"clip_low_threshold": 0.9}, plain_cispo(0.9, 4.0)),
    "dro": ("dro", RL, {"beta": 0.3}, plain_dro(0.3)),
    "gspo": ("gspo", (*RL, "sequence_ratio_mask"), {}, plain_gspo(1 - 3e-4, 1 + 4e-4)),
    "wide_gspo": (
        "gspo",
        (*RL, "sequence_ratio_mask"),
        {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
        plain_gspo(0.5, 2.0),
    ),
}


def near_policy(data: list[Datum], plain: PlainRun) -> list[Datum]:
    """Returns the data as if a policy near this one had sampled them, so that some ratios are
    within the bounds."""
    random = np.random.default_rng(5)
    found: list[Datum] = []
    for datum in data:
        own = plain.logprobs(datum).detach().numpy()
        noise = random.normal(0, 0.15, own.shape).astype(np.float32)
        found.append(Datum(datum.tokens, {**datum.inputs, "logprobs": own + noise}))
    return found


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_a_step(
    case: str, runs: RunLearner, policy_dir: Path, tmp_path: Path
) -> None:
    name, inputs, config, plain_loss = CASES[case]
    begun(runs, case)
    runs.save(case, tmp_path / "before")
    plain = PlainRun.of(policy_dir, tmp_path / "before")
    data = only(near_policy(random_data(), plain), *inputs)

    outputs = runs.forward_backward(case, data, name, config)

    logprobs = [plain.logprobs(datum) for datum in data]
    for found, expected in zip(outputs.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(found, expected.detach(), atol=NEAR)
    losses = [
        plain_loss(own, {key: torch.from_numpy(each) for key, each in datum.inputs.items()})
        for own, datum in zip(logprobs, data, strict=True)
    ]
    loss = torch.stack(losses).sum()
    assert outputs.metrics["loss:sum"] == pytest.approx(loss.item(), rel=NEAR, abs=NEAR)
    gradient = plain.gradient_of(loss)
    assert float(gradient.abs().max()) > 0.1, "the comparison means something"
    runs.save(case, tmp_path / "graded")
    graded = PlainRun.of(policy_dir, tmp_path / "graded")
    same_gradient(graded.gradient, gradient)

    # A fresh optimiser, with every value of AdamW set.
    runs.load(case, tmp_path / "before", optimizer=False)
    runs.forward_backward(case, data, name, config)
    adam = AdamParams(1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=2.0)
    metrics = runs.optim_step(case, adam)
    assert metrics["grad_norm:mean"] == pytest.approx(gradient.norm().item(), rel=NEAR)
    optimizer = torch.optim.AdamW(
        plain.all_factors, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1
    )
    # AdamW divides a gradient near 0 by its own rounded size: it gets the one that is compared.
    graded.as_gradient_of(plain.all_factors)
    torch.nn.utils.clip_grad_norm_(plain.all_factors, 2.0)
    optimizer.step()
    runs.save(case, tmp_path / "after")
    after = PlainRun.of(policy_dir, tmp_path / "after")
    for key, expected in plain.factors.items():
        torch.testing.assert_close(after.factors[key], expected, atol=NEAR, rtol=0)


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_a_gradient_is_cut_to_its_bound_and_never_stretched(runs: RunLearner, share: float) -> None:
    """By the first moment: AdamW's first step has the same size for any gradient."""
    name = f"bound {share}"
    begun(runs, name)
    runs.forward_backward(name, only(random_data()), "cross_entropy", {})
    known = runs._runs[name]
    assert known.gradient is not None
    gradient = known.gradient.clone()
    (moments,) = known.optimizer.state.values()
    before = moments["exp_avg"].clone()
    bound = share * float(gradient.norm())
    runs.optim_step(name, AdamParams(0.0, beta1=0.5, grad_clip_norm=bound))
    applied = 2 * moments["exp_avg"] - before
    expected = gradient * (0.5 if share == 0.5 else 1.0)
    torch.testing.assert_close(applied, expected, rtol=1e-4, atol=1e-5)
    runs.unload(name)


def test_several_targets_of_a_token(runs: RunLearner, policy_dir: Path, tmp_path: Path) -> None:
    begun(runs, "several")
    runs.save("several", tmp_path / "run")
    plain = PlainRun.of(policy_dir, tmp_path / "run")
    data = only(random_data(several=3), "weights")
    outputs = runs.forward_backward("several", data, "cross_entropy", {})
    loss = torch.zeros(())
    for datum, found in zip(data, outputs.logprobs, strict=True):
        expected = plain.logprobs(datum)
        np.testing.assert_allclose(found, expected.detach(), atol=NEAR)
        loss = loss - (expected * torch.from_numpy(datum.inputs["weights"])).sum()
    runs.save("several", tmp_path / "graded")
    same_gradient(PlainRun.of(policy_dir, tmp_path / "graded").gradient, plain.gradient_of(loss))


def test_a_loss_of_the_client(runs: RunLearner, policy_dir: Path, tmp_path: Path) -> None:
    """As the SDK's `forward_backward_custom`: a loss over two sequences, with its gradient by
    log-probabilities sent as weights."""
    begun(runs, "custom")
    runs.save("custom", tmp_path / "run")
    plain = PlainRun.of(policy_dir, tmp_path / "run")
    data = only(random_data())
    forward = runs.forward("custom", data, "cross_entropy", {})
    leaves = [torch.from_numpy(each).requires_grad_() for each in forward.logprobs]

    def loss_of(logprobs: list[Tensor]) -> Tensor:
        return -torch.nn.functional.logsigmoid(logprobs[0].sum() - logprobs[1].mean() * 20)

    loss_of(leaves).backward()
    sent = [
        Datum(datum.tokens, {**datum.inputs, "weights": -_or_zero(leaf)})
        for datum, leaf in zip(data, leaves, strict=True)
    ]
    runs.forward_backward("custom", sent, "cross_entropy", {})
    runs.save("custom", tmp_path / "graded")
    expected = plain.gradient_of(loss_of([plain.logprobs(datum) for datum in data]))
    same_gradient(PlainRun.of(policy_dir, tmp_path / "graded").gradient, expected)


def _or_zero(leaf: Tensor) -> np.ndarray:
    return np.zeros(leaf.shape, np.float32) if leaf.grad is None else leaf.grad.numpy()


def test_bounds_of_a_token_replace_those_of_the_request(runs: RunLearner) -> None:
    begun(runs, "bounds")
    data = only(random_data(), *RL)
    wide = [
        Datum(
            datum.tokens,
            {**datum.inputs, "clip_high_threshold": np.full(len(datum.tokens), 9.0, np.float32)},
        )
        for datum in data
    ]
    expected = runs.forward("bounds", data, "ppo", {"clip_high_threshold": 9.0})
    assert runs.forward("bounds", wide, "ppo", {}).metrics == expected.metrics
    assert runs.forward("bounds", data, "ppo", {}).metrics != expected.metrics


def test_another_loss_is_computed_in_the_place_of_stable_reinforce(policy_dir: Path) -> None:
    runs = learner(policy_dir, tinker__stable_reinforce="cispo")
    data = only(random_data(4), "logprobs", "advantages")
    found = []
    for name in ("stable_reinforce", "cispo"):
        runs.create(name, LoraSpec(rank=4, seed=3))
        found.append(runs.forward_backward(name, data, name, {"clip_high_threshold": 2.0}))
    one, other = found
    assert one.metrics == other.metrics
    assert runs.optim_step("stable_reinforce", AdamParams()) == runs.optim_step(
        "cispo", AdamParams()
    )
