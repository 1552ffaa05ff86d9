"""Whole updates with random settings, compared with updates written from the papers
(`tests.support.batches.paper_update`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from common.settings.algorithm import RECIPES, AlgorithmSection
from common.settings.config import Config
from common.wire.schemas import Completion, Group
from learning.ranks import Ranks
from tests.support.batches.groups import known
from tests.support.batches.paper_update import Mini, PaperUpdate, adamw
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference

VOCABULARY, STEP, MAX_NEW = 24, 3, 8
TEACHER = {"url": "http://teacher", "coef": 0.7}
Parameters = dict[str, Tensor]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of a policy and of a reference near it."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=VOCABULARY, num_key_value_heads=1, tie_word_embeddings=False, **sizes
    )
    torch.manual_seed(0)
    model, directory = Qwen2ForCausalLM(config), tmp_path_factory.mktemp("papers")
    for name, spread in (("policy", 0.2), ("reference", 0.03)):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * spread)
        model.save_pretrained(directory / name)
    return directory / "policy", directory / "reference"


def random_config(rng: np.random.Generator, case: int, models: tuple[Path, Path]) -> Config:
    """Returns the settings of a case: each recipe in turn, many other settings at random."""

    def chance(share: float = 0.5) -> bool:
        return bool(rng.random() < share)

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    words: dict[str, Any] = {"name": list(RECIPES)[case % len(RECIPES)]}
    preset = RECIPES[words["name"]]
    critic = preset.get("advantage") == "gae"
    loss = preset.get("policy_loss", "clip")
    optional: dict[str, Any] = {
        "aggregation": one_of(
            "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"
        ),
        "importance_level": one_of("token", "sequence"),
        "clip_low": rng.uniform(0.05, 0.4),
        "clip_high": rng.uniform(0.05, 0.4),
        "entropy_coef": rng.uniform(0.01, 0.2),
        "overlong_buffer": int(rng.integers(1, MAX_NEW - 1)),
        "mask_truncated": True,
        "off_policy_delta": rng.uniform(0.01, 0.2),
    }
    optional |= {"dual_clip": rng.uniform(1.01, 1.4)} if loss == "clip" else {}
    if loss == "sapo":
        optional |= {f"sapo_tau_{sign}": rng.uniform(0.5, 4) for sign in ("positive", "negative")}
        optional = {name: value for name, value in optional.items() if not name.startswith("clip_")}
    advantage = preset.get("advantage")
    optional |= {"geometric_low": rng.uniform(0.8, 0.99), "geometric_high": rng.uniform(1.01, 1.2)}
    optional |= {"length_penalty": rng.uniform(0.1, 1)}
    if advantage in (
        "mean_normalised",
        "none",
    ):  # penalties would make rewards negative, or have no effect
        optional = {
            name: value
            for name, value in optional.items()
            if name not in ("overlong_buffer", "length_penalty")
        }
    optional |= {"gamma": rng.uniform(0.7, 1), "gae_lambda": rng.uniform(0.3, 1)} if critic else {}
    words |= {name: value for name, value in optional.items() if chance(0.4)}
    words |= {"update_epochs": int(rng.integers(1, 4)), "mini_batches": int(rng.integers(1, 4))}
    if words["update_epochs"] * words["mini_batches"] > 1 and chance():
        words["early_stop_kl"] = 10 ** rng.uniform(-4, -1)
    words["rollout_correction"] = preset.get("rollout_correction") or one_of(
        "none", "truncate", "mask"
    )
    if words["rollout_correction"] != "none":
        words |= {
            "correction_cap": rng.uniform(1.1, 2),
        }
    if words["rollout_correction"] == "mask" and chance():
        words |= {"correction_floor": rng.uniform(0.6, 0.95)}
    if chance(0.7):
        in_reward = (
            {} if advantage in ("mean_normalised", "reward_normalised") else {"kl_in": "reward"}
        )
        words |= {"kl_coef": rng.uniform(0.05, 0.5)} | one_of(in_reward, {}, {"kl_estimator": "k2"})
        words |= {"kl_target": 10 ** rng.uniform(-3, -1)} if chance() else {}
    config = Config(
        seed=int(rng.integers(100)),
        model={"name": str(models[0]), "reference": str(models[1]) if "kl_coef" in words else ""},
        sampling={"temperature": one_of(1.0, 0.7), "max_new_tokens": MAX_NEW, "group_size": 3},
        replay={"reuse_ratio": 0.5},
        reward={"functions": ["math", {"name": "length", "weight": rng.uniform(0.1, 2)}]},
        teacher=one_of({}, {"url": "http://teacher", "coef": rng.uniform(0.1, 2)})
        if advantage != "none"
        else TEACHER,
        algorithm=AlgorithmSection.model_validate(words),
        trainer={
            "packing": one_of("on", "off"),
            "micro_batch_tokens": int(rng.integers(8, 120)),
            "micro_batch_size": one_of(None, 1, 2, 5),
            "keep_groups_mb": one_of(0, 10),
        },
        optimizer={
            "learning_rate": 10 ** rng.uniform(-4, -2),
            "warmup_steps": 0,
            "weight_decay": one_of(0.0, 0.1),
            "max_grad_norm": one_of(0.05, 1.0),
        },
    )
    assert config.algorithm.rollout_correction == words["rollout_correction"]
    return config


def random_groups(rng: np.random.Generator, model: Any, temperature: float) -> list[Group]:
    """Returns groups of three completions, sampled by policies near `model`; some have equal
    rewards."""
    groups = []
    for position in range(int(rng.integers(2, 5))):
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(2, 5))).astype(np.int32)
        rewards = (
            rng.integers(0, 2, 3).astype(float)
            if rng.random() < 0.7
            else rng.uniform(size=3).astype(np.float32)
        )
        rewards = np.full(3, rewards[0]) if rng.random() < 0.2 else rewards
        group = Group(
            id=f"g{position}",
            prompt_id=f"p{position}",
            prompt="",
            ground_truth="",
            prompt_token_ids=prompt,
            completions=[],
            position=position,
        )
        for reward in rewards:
            length, old = (
                int(rng.integers(1, MAX_NEW + 1)),
                int(rng.integers(0, STEP + bool(group.completions))),
            )
            tokens = rng.integers(0, VOCABULARY, length).astype(np.int32)
            with torch.no_grad():
                logits = model(
                    torch.from_numpy(np.concatenate([prompt, tokens]))[None].long()
                ).logits[0, len(prompt) - 1 : -1]
            logs = torch.log_softmax(logits / temperature, -1).gather(
                -1, torch.from_numpy(tokens).long()[:, None]
            )[:, 0]
            sampled = (logs.numpy() + rng.normal(0, rng.choice([0.02, 0.3]), length)).astype(
                np.float32
            )
            group.completions.append(
                Completion(
                    token_ids=tokens,
                    logprobs=sampled,
                    text="",
                    finish_reason="stop",
                    weight_versions=[(old, 0, length)],
                    reward=float(reward),
                )
            )
            group.completions[-1].correct = bool(reward > 0.5)
            group.completions[-1].components = {
                "math": float(reward),
                "length": -float(rng.integers(0, 3)),
            }
            group.completions[-1].teacher_logprobs = (
                logs.numpy() + rng.normal(0, 0.5, length)
            ).astype(np.float32)
            if length == MAX_NEW:
                group.completions[-1].finish_reason = "length"
        groups.append(group)
    return groups


class Recorded(Policy):
    """A policy that keeps the rows, parameters and gradient of each update."""

    def record(self) -> None:
        self.minis: list[tuple[list[int], Parameters]] = []
        self.gradients: list[Parameters] = []
        step = self.optimizer.step

        def recorded(learning_rate: float) -> float:
            self.gradients.append(
                {
                    name: p.grad.clone()
                    for name, p in self.model.named_parameters()
                    if p.grad is not None
                }
            )
            return step(learning_rate)

        self.optimizer.step = recorded  # type: ignore[method-assign]  # it looks on

    def parameters(self) -> Parameters:
        return {
            name: parameter.detach().clone() for name, parameter in self.model.named_parameters()
        }

    def _accumulate(self, batch: Batch, counting: Any, first: bool) -> Any:
        self.minis.append((counting.tolist(), self.parameters()))
        return super()._accumulate(batch, counting, first)


def check(case: int, models: tuple[Path, Path]) -> None:
    """Compares one random update with the paper's."""
    rng = np.random.default_rng(case)
    config = random_config(rng, case, models)
    algorithm = config.algorithm
    policy = Recorded(config, Ranks())
    policy.step, policy.kl_coef = STEP, algorithm.kl_coef * rng.uniform(0.5, 2)
    groups = random_groups(rng, policy.model, config.sampling.temperature)
    reused = [bool(rng.random() < 0.4) for _ in groups]
    weights = [float(rng.uniform(0.3, 2)) if old else 1.0 for old in reused]
    items = zip(groups, weights, reused, strict=True)
    batch = Batch.of([TrainingGroup(*item) for item in items], config, policy.step)
    values = [rng.normal(0, 0.3, length).astype(np.float32) for length in batch.lengths]
    reference = AutoModelForCausalLM.from_pretrained(models[1])
    tensors = [torch.from_numpy(row).double() for row in values]
    paper = PaperUpdate(
        policy.model, reference, config, groups, weights, tensors, policy.kl_coef, STEP
    )

    batch.old_logprobs, batch.ref_logprobs = (
        policy.logprobs(batch),
        Reference(policy).logprobs(batch),
    )
    batch.values = values if algorithm.needs_critic else None
    batch.advantages, batch.returns = compute_advantages(batch, config, policy.kl_coef)
    for row, returns in zip(paper.rows, batch.returns or [], strict=bool(batch.returns)):
        np.testing.assert_allclose(returns, known(row.returns), atol=1e-4)
    for row, found in zip(paper.rows, known(batch.advantages), strict=True):
        if row.counts:
            np.testing.assert_allclose(found, row.advantage, atol=2e-4, rtol=2e-4)
        if (
            row.advantage.abs().max() < 1e-6
        ):  # 0 except for rounding: the trainer decides whether to leave the row out
            row.advantage = torch.from_numpy(found).double()
    policy.record()
    before = policy.parameters()
    metrics = policy.update(batch).metrics

    minis: list[Mini] = []
    for number, (indices, parameters) in enumerate(policy.minis):
        paper.load(parameters)
        minis.append(paper.mini(indices))
        if number < len(policy.gradients):
            compare(policy.gradients[number], minis[-1].gradient)
    counting = [i for i, row in enumerate(paper.rows) if row.counts]
    check_mini_batches([indices for indices, _ in policy.minis], counting, config)
    check_early_stop(minis, algorithm, len(policy.gradients), bool(metrics.stopped_early))
    after = adamw(before, policy.gradients, config.optimizer.learning_rate, config)
    for name, tensor in policy.parameters().items():
        torch.testing.assert_close(tensor.double(), after[name], atol=5e-6, rtol=1e-4)
    norms = [
        float(torch.cat([g.flatten() for g in gradient.values()]).norm()) if gradient else 0.0
        for gradient in policy.gradients
    ]
    for name, value in paper.metrics(minis, norms).items():
        assert getattr(metrics, name) == pytest.approx(value, rel=2e-3, abs=2e-5), name
    assert policy.kl_coef == pytest.approx(paper.next_kl_coef(metrics.kl_reference), rel=1e-9)


def compare(found: Parameters, expected: Mapping[str, Tensor]) -> None:
    """Compares a gradient, as one vector, with the paper's."""
    ours = torch.cat(
        [
            found.get(name, torch.zeros_like(value)).double().flatten()
            for name, value in expected.items()
        ]
    )
    theirs = torch.cat([value.flatten() for value in expected.values()])
    assert (ours - theirs).norm() <= 2e-4 * theirs.norm() + 1e-6


def check_mini_batches(minis: list[list[int]], counting: list[int], config: Config) -> None:
    """Checks that every whole pass has each row once, in parts of nearly equal size and in a
    different order."""
    parts = min(config.algorithm.mini_batches, len(counting))
    passes = [minis[i : i + parts] for i in range(0, len(minis), parts)]
    for each in passes:
        rows = [i for part in each for i in part]
        assert set(rows) <= set(counting)
        assert len(set(rows)) == len(rows)
        if len(each) == parts:
            assert sorted(rows) == counting
        assert max(map(len, each)) - min(map(len, each)) <= 1
    orders = [[i for part in each for i in part] for each in passes if len(each) == parts]
    if parts > 1 and len(counting) > 5:
        assert len({tuple(order) for order in orders}) == len(orders), (
            "the same shuffle in every pass"
        )


def check_early_stop(
    minis: list[Mini], algorithm: AlgorithmSection, applied: int, stopped: bool
) -> None:
    """Checks that updates end before the first mini-batch whose mean KL from the old policy exceeds
    the limit."""
    limit = algorithm.early_stop_kl
    means = [float(mini.columns["kl_old"].mean()) if mini.columns else 0.0 for mini in minis]
    over = [limit is not None and mean > limit for mean in means]
    assert not any(over[:-1])
    assert over[-1] == stopped
    assert applied == len(minis) - stopped


@pytest.mark.parametrize("case", [0, 8, 46, 56])
def test_an_update_is_that_of_the_papers(case: int, models: tuple[Path, Path]) -> None:
    """Together these have an entropy bonus, both kinds of KL, corrections, a critic's advantages,
    early stops, and packed and padded rows."""
    check(case, models)


@pytest.mark.integration
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (17, 34))]
)
def test_updates_are_those_of_the_papers(first: int, models: tuple[Path, Path]) -> None:
    for case in range(first, first + 17):
        check(case, models)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("first", range(51, 561, 51))
def test_many_more_updates_are_those_of_the_papers(first: int, models: tuple[Path, Path]) -> None:
    for case in range(first, first + 51):
        check(case, models)
