"""Random groups, and batches and checkpoints made from them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from common.settings.algorithm import RECIPES, AlgorithmSection
from common.settings.config import Config
from common.settings.sections import TeacherSection
from common.wire.schemas import Completion, Float32, Group, UInt8
from learning.ranks import Ranks
from learning.routing import Routers
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.policy.checkpoint import Checkpoints, RunState
from trainer.policy.identity import identity
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference
from trainer.policy.scorer import load_scorer
from trainer.policy.scoring import score_batch

_T = TypeVar("_T")
VOCABULARY = 300


def make_group(
    rng: np.random.Generator, rewards: list[float], version: int = 0, position: int = 0
) -> Group:
    """Returns a group of random completions of different lengths with the given rewards."""
    completions = []
    for reward in rewards:
        length = int(rng.integers(2, 12))
        completions.append(
            Completion(
                token_ids=rng.integers(3, VOCABULARY, length).astype(np.int32),
                logprobs=np.log(rng.uniform(1e-3, 1e-2, length)).astype(np.float32),
                text="x",
                finish_reason="stop",
                weight_versions=[(version, 0, length)],
                reward=reward,
                correct=reward > 0,
                components={"math": reward, "length": -length / 12},
            )
        )
    return Group(
        id=f"group-{position}-{rng.integers(1 << 30)}",
        prompt_id=f"prompt-{position}",
        prompt="How many?",
        ground_truth="1",
        prompt_token_ids=rng.integers(3, VOCABULARY, int(rng.integers(3, 9))).astype(np.int32),
        completions=completions,
        position=position,
    )


def off_policy_groups() -> list[Group]:
    """Returns four groups of four, one with equal rewards, sampled by a different policy than a new
    one."""
    rng = np.random.default_rng(1)
    rewards = [
        [1.0, 0.0, 0.0, 1.0],
        [0.0, 0.0, 1.0, 0.0],
        [1.0, 1.0, 1.0, 1.0],
        [0.0, 1.0, 1.0, 1.0],
    ]
    groups = [make_group(rng, row, position=i) for i, row in enumerate(rewards)]
    for group in groups:
        for completion in group.completions:
            noise = rng.normal(0, 0.3, len(completion.logprobs)).astype(np.float32)
            completion.logprobs = (np.log(1 / VOCABULARY) + noise).astype(np.float32)
            completion.teacher_logprobs = completion.logprobs[::-1].copy()
    return groups


def with_experts(groups: Sequence[Group], routers: Routers) -> list[Group]:
    """Gives the tokens of groups random experts of a model, as if its engine had chosen them."""
    rng = np.random.default_rng(2)

    def chosen(tokens: int) -> UInt8:
        every = np.tile(np.arange(routers.experts, dtype=np.uint8), (tokens, routers.layers, 1))
        return rng.permuted(every, axis=2)[:, :, : routers.top_k].reshape(-1)

    for group in groups:
        group.prompt_routed_experts = chosen(len(group.prompt_token_ids))
        for completion in group.completions:
            completion.routed_experts = chosen(len(completion.token_ids) - 1)
    return list(groups)


def with_algorithm(config: Config, **settings: Any) -> Config:
    """Returns a copy with these algorithm settings, defaults for the rest, and a teacher if the
    algorithm needs one."""
    changed = config.model_copy(deep=True)
    preset = RECIPES[settings.get("name", "grpo")]
    changed.algorithm = AlgorithmSection.model_validate(
        {"rollout_correction": "none", **preset, **settings}
    )
    if changed.algorithm.advantage == "none":
        changed.teacher = TeacherSection(url="http://127.0.0.1:1")
    return changed


def batch_of(groups: Sequence[Group], config: Config, step: int = 0) -> Batch:
    """Returns the batch of fresh groups, without columns."""
    return Batch.of([TrainingGroup(group) for group in groups], config, step)


def known(column: _T | None) -> _T:
    """Returns a batch's column, which must have been computed."""
    assert column is not None
    return column


def prepared(
    policy: Policy,
    groups: Sequence[Group],
    weights: list[float] | None = None,
    reference: Reference | None = None,
) -> Batch:
    """Returns the batch of these groups as the training loop prepares it for `policy`; a critic's
    values are random.

    The default `reference` is the initial model of the run.
    """
    items = zip(groups, weights or [1.0] * len(groups), strict=True)
    batch = Batch.of(
        [TrainingGroup(group, weight) for group, weight in items], policy.config, policy.step
    )
    fill(batch, policy, reference or Reference(policy))
    return batch


def learner_logprobs(model: Path, groups: Sequence[Group], temperature: float) -> list[Float32]:
    """Returns the learner's log-probabilities of tokens before any update, relative to each token's
    sampling set."""
    config = Config(algorithm=AlgorithmSection(rollout_correction="none"))
    config.model.name, config.sampling.temperature = str(model), temperature
    batch = batch_of(groups, config, max(group.weight_version for group in groups))
    return score_batch(load_scorer(config.model, Ranks(), config), batch, config, Ranks())


def fill(batch: Batch, policy: Policy, reference: Reference) -> None:
    """Computes a batch's columns for the rows that this rank computes."""
    policy.assign(batch)
    batch.old_logprobs = policy.logprobs(batch)
    batch.ref_logprobs = reference.logprobs(batch)
    if policy.config.algorithm.needs_critic:
        rng = np.random.default_rng(5)
        batch.values = [rng.normal(0, 0.3, length).astype(np.float32) for length in batch.lengths]
    batch.advantages, batch.returns = compute_advantages(
        batch, policy.config, policy.kl_coef, policy.ranks.sum_shares
    )


def whole(groups: list[Group], config: Config) -> Batch:
    """Returns the complete batch of these groups for a new policy."""
    return prepared(Policy(config, Ranks()), groups)


def save(
    policy: Policy,
    directory: Path,
    keep: int = 3,
    accuracy: float | None = None,
    static: Sequence[Path] = (),
    reference: Reference | None = None,
) -> Path:
    """Saves a complete checkpoint of the policy and a refreshed `reference`. A collective call."""
    checkpoints = Checkpoints(directory, policy.ranks, keep, static=lambda: static)
    parts = policy.snapshots(checkpoints.gathered) | (
        reference.snapshots(checkpoints.gathered) if reference else {}
    )
    same = identity(policy.config)
    path = checkpoints.save(
        RunState(policy.step, 7, "run", policy.kl_coef, accuracy=accuracy, identity=same), parts
    )
    checkpoints.wait()
    return path
