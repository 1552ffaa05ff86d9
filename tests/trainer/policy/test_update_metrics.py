"""Every metric of an update, from random tokens of random micro-batches, with its definition over all
tokens at once."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from trainer.algorithms.batch import MicroBatch
from trainer.algorithms.losses import PolicyLoss
from trainer.policy.scorer import TokenScores
from trainer.policy.update_metrics import Sums, UpdateMetrics

Columns = dict[str, NDArray[np.float64]]
NAMES = ("logprobs", "rollout", "old", "reference", "entropy", "ratio", "clipped", "current")


def _tokens(rng: np.random.Generator, count: int) -> Columns:
    found = {name: rng.normal(-2, 0.6, count) for name in NAMES}
    found["entropy"] = rng.uniform(0, 4, count)
    found["ratio"] = rng.uniform(0.5, 1.5, count)
    found["clipped"] = rng.integers(0, 2, count).astype(float)
    found["current"] = rng.integers(0, 2, count).astype(float)
    return found


def _micro(tokens: Columns, *, has_reference: bool) -> MicroBatch:
    columns = {name: torch.from_numpy(column) for name, column in tokens.items()}
    count = len(tokens["logprobs"])
    inputs: Any = None
    return MicroBatch(
        inputs=inputs,
        rollout_logprobs=columns["rollout"],
        old_logprobs=None,
        ref_logprobs=columns["reference"] if has_reference else None,
        advantages=torch.ones(count),
        weights=torch.ones(count),
        current=columns["current"],
        row_of_token=torch.zeros(count, dtype=torch.long),
        lengths=torch.full((count,), count),
        row_count=1,
    )


def _k3(behaviour: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL(behaviour ‖ other) of samples of `behaviour`."""
    log_ratio = other - behaviour
    return np.exp(log_ratio) - 1 - log_ratio


def _mean(values: NDArray[np.float64], weights: NDArray[np.float64] | None = None) -> float:
    weights = np.ones(len(values)) if weights is None else weights
    return float((values * weights).sum() / weights.sum()) if weights.sum() else 0.0


@pytest.mark.parametrize("seed", range(12))
def test_metrics_are_their_definitions_over_all_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    has_reference = bool(seed % 2)
    updates = int(rng.integers(1, 4))
    stopped = bool(rng.integers(2))
    norms = rng.uniform(0, 3, updates).tolist()
    sums = Sums()
    every: list[Columns] = []
    first: list[Columns] = []
    losses = []
    for update in range(updates + stopped):
        of_update = Sums()
        made: list[Columns] = []
        for _ in range(rng.integers(1, 4)):
            tokens = _tokens(rng, int(rng.integers(1, 9)))
            if seed == 5:
                tokens["current"][:] = 0.0
            loss = float(rng.normal())
            micro = _micro(tokens, has_reference=has_reference)
            columns = {name: torch.from_numpy(column) for name, column in tokens.items()}
            scores = TokenScores(columns["logprobs"], columns["entropy"])
            policy = PolicyLoss(
                loss=columns["ratio"], ratio=columns["ratio"], clipped=columns["clipped"]
            )
            part = torch.tensor(loss, dtype=torch.float64)
            of_update.add(micro, scores, policy, loss=part, old_logprobs=columns["old"])
            made.append(tokens)
            losses.append(loss)
            if update == 0:
                of_update.compare(micro, scores)
                first.append(tokens)
        old, new = (np.concatenate([each[name] for each in made]) for name in ("old", "logprobs"))
        assert of_update.mean("kl_old") == pytest.approx(_mean(_k3(old, new)))
        sums.values += of_update.values
        every += made

    found = sums.metrics(norms, 0.25, 0.5, skipped=1, stopped=stopped)
    whole = {name: np.concatenate([tokens[name] for tokens in every]) for name in NAMES}
    before = {name: np.concatenate([tokens[name] for tokens in first]) for name in NAMES}
    delta = np.abs(before["logprobs"] - before["rollout"])
    weight = np.exp(before["logprobs"] - before["rollout"])
    likelier = before["entropy"] + before["logprobs"]
    chosen = likelier[before["current"] > 0]
    error = float(chosen.std() / np.sqrt(len(chosen))) if len(chosen) else 0.0
    reference = _k3(whole["logprobs"], whole["reference"])
    wanted = UpdateMetrics(
        loss=sum(losses) / (updates + stopped),
        grad_norm=sum(norms) / updates,
        learning_rate=0.25,
        clip_fraction=_mean(whole["clipped"]),
        ratio=_mean(whole["ratio"]),
        delta_logprob=_mean(delta),
        delta_logprob_current=_mean(delta, before["current"]),
        logprob_gap=_mean(before["rollout"] - before["logprobs"], before["current"]),
        likelihood_gap=_mean(likelier, before["current"]),
        likelihood_error=error,
        kl_rollout=_mean(_k3(before["rollout"], before["logprobs"])),
        kl_reference=_mean(reference) if has_reference else 0.0,
        kl_coef=0.5,
        entropy=_mean(whole["entropy"]),
        effective_sample_size=float(weight.sum() ** 2 / (weight**2).sum() / len(weight)),
        trained_tokens=len(whole["ratio"]),
        pass_fill=1.0,
        updates=updates - 1,
        skipped=1,
        stopped_early=int(stopped),
    )
    assert vars(found) == pytest.approx(vars(wanted), abs=1e-9)


def test_an_update_of_nothing_has_metrics_all_the_same() -> None:
    found = Sums().metrics([], 0.0, 0.1, skipped=0, stopped=False)
    ones = {"ratio", "effective_sample_size", "pass_fill"}
    wanted = {name: float(name in ones) for name in vars(found)} | {"kl_coef": 0.1}
    assert vars(found) == wanted


def test_what_is_not_finite_becomes_zero() -> None:
    found = Sums().metrics([float("nan"), 2.0], 0.5, float("inf"), skipped=1, stopped=False)
    assert np.isnan(found.grad_norm)
    finite = found.finite()
    assert (finite.grad_norm, finite.kl_coef, finite.learning_rate) == (0, 0, 0.5)
    assert (finite.updates, finite.skipped) == (1, 1)
