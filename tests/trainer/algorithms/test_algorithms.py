"""Recipes: what each one sets, what is refused, and that every setting that is read changes the
update."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from common.errors import ConfigError
from common.settings.algorithm import RECIPES, AlgorithmSection
from common.settings.config import Config, load
from common.wire.schemas import Group
from learning.ranks import Ranks
from tests.support.batches.groups import (
    batch_of,
    known,
    off_policy_groups,
    prepared,
    whole,
    with_algorithm,
)
from tests.support.errors import raises
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.policy.policy import Policy


@pytest.fixture
def groups() -> list[Group]:
    return off_policy_groups()


def updated(
    config: Config, groups: list[Group], max_tokens: int = 16_384
) -> dict[str, torch.Tensor]:
    config.trainer.micro_batch_tokens = max_tokens
    policy = Policy(config, Ranks())
    policy.update(prepared(policy, groups))
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_sets_its_preset_and_the_rest_stays_default(recipe: str) -> None:
    section, default = AlgorithmSection.model_validate({"name": recipe}), AlgorithmSection()
    for name in AlgorithmSection.model_fields:
        expected = recipe if name == "name" else RECIPES[recipe].get(name, getattr(default, name))
        assert getattr(section, name) == expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_gives_an_update_that_micro_batches_do_not_change(
    recipe: str, config: Config, groups: list[Group]
) -> None:
    # The default bounds of geo_rs would drop all of these groups.
    bounds = {"geometric_low": 0.9, "geometric_high": 1.1} if recipe == "geo_rs" else {}
    changed = with_algorithm(config, name=recipe, **bounds)
    one, many = updated(changed, groups), updated(changed, groups, max_tokens=40)
    base = Policy(changed, Ranks()).model.state_dict()
    assert any(not torch.equal(value, base[name]) for name, value in one.items())
    for name, expected in one.items():
        torch.testing.assert_close(many[name], expected, atol=3e-5, rtol=0, msg=name)


def test_recipes_differ_from_each_other(config: Config, groups: list[Group]) -> None:
    config.optimizer.max_grad_norm = 1e9
    losses = {}
    for recipe in RECIPES:
        changed = with_algorithm(config, name=recipe)
        metrics = Policy(changed, Ranks()).update(whole(groups, changed)).metrics
        losses[recipe] = (round(metrics.loss, 6), round(metrics.grad_norm, 6))
    # dapo differs from grpo only in its upper clip and its choice of groups, not on this batch.
    losses.pop("dapo")
    assert len(set(losses.values())) == len(losses), losses


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"name": "cispo", "dual_clip": 3.0}, "dual_clip"),
        ({"name": "rloo", "advantage_eps": 1e-3}, "advantage_eps"),
        ({"kl_estimator": "k1"}, "kl_estimator"),
        ({"dynamic_sampling_rounds": 3}, "dynamic_sampling_rounds"),
        ({"rollout_correction": "none", "correction_cap": 3.0}, "correction_cap"),
        ({"gamma": 0.9}, "gamma"),
        ({"name": "rloo", "gae_lambda": 0.9}, "gae_lambda"),
        ({"kl_in": "reward"}, "kl_in"),
        ({"kl_target": 0.01}, "kl_target"),
        ({"reference_refresh": 5}, "reference_refresh"),
        ({"early_stop_kl": 0.1}, "early_stop_kl"),
        ({"name": "ppo", "advantage_eps": 1e-3}, "advantage_eps"),
        ({"name": "reinforce_pp", "advantage_eps": 1e-3}, "advantage_eps"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=rf"algorithm\.{field} is set but not read"):
        Config.model_validate({"algorithm": settings})


@pytest.mark.parametrize(
    "recipe", sorted(RECIPES.keys() - {"gdpo"})
)  # which refuses a KL in the reward
def test_the_kl_estimator_has_the_gradient_of_a_divergence_where_it_is_used(recipe: str) -> None:
    """The default passes too; test_kl_gradient.py shows what each estimator measures."""

    def estimator(**settings: Any) -> str:
        algorithm = {"name": recipe, "kl_coef": 0.1, **settings}
        teacher = {"url": "http://127.0.0.1:1"} if recipe == "opd" else {}
        return Config.model_validate(
            {"algorithm": algorithm, "teacher": teacher}
        ).algorithm.kl_estimator

    assert estimator() == "k3"
    assert estimator(kl_estimator="k2") == "k2"
    assert estimator(kl_in="reward") == estimator(kl_in="reward", kl_estimator="k1") == "k1"
    for name in ("k2", "k3"):
        with pytest.raises(
            ValidationError,
            match=rf"algorithm\.kl_estimator {name} with algorithm\.kl_in reward.*use k1",
        ):
            estimator(kl_in="reward", kl_estimator=name)
    for place in ({}, {"kl_in": "loss"}):
        with pytest.raises(
            ValidationError,
            match=r"algorithm\.kl_estimator k1 with algorithm\.kl_in loss.*use k2.*or k3",
        ):
            estimator(kl_estimator="k1", **place)


def test_normalised_kl_noise_causes_a_caution() -> None:
    def caution(**settings: Any) -> str | None:
        return AlgorithmSection.model_validate(
            {"kl_coef": 0.1, "kl_in": "reward", **settings}
        ).caution

    assert "whatever algorithm.kl_coef is. Use algorithm.advantage group_centred" in str(caution())
    assert caution(name="dapo")
    for settings in (
        {"name": "rloo"},
        {"name": "dr_grpo"},
        {"name": "opo"},
        {"name": "ppo"},
        {"kl_in": "loss"},
    ):
        assert caution(**settings) is None, settings
    assert AlgorithmSection().caution is None


@pytest.mark.parametrize("words", [["--algorithm.name", "gspo"], ["--algorithm.kl_in", "reward"]])
def test_a_saved_configuration_can_be_read_again(tmp_path: Any, words: list[str]) -> None:
    path = tmp_path / "config.json"
    first = load([*words, "--algorithm.kl_coef", "0.01"], {})
    path.write_text(first.model_dump_json())
    again = load(["--config", str(path)], {})
    assert again.algorithm == first.algorithm


def test_explicit_settings_override_the_recipe() -> None:
    assert (
        load(["--algorithm.name", "gspo", "--algorithm.clip_low", "0.1"], {}).algorithm.clip_low
        == 0.1
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--algorithm.name", "grpoo"],
        ["--algorithm.clip_low", "1.5"],
        ["--sampling.group_size", "1"],
        ["--algorithm.overlong_buffer", "512", "--sampling.max_new_tokens", "512"],
        ["--algorithm.kl_coef", "0.1", "--algorithm.kl_target", "0"],
        [
            "--sampling.group_size",
            "2",
            "--trainer.batch_size",
            "2",
            "--algorithm.mini_batches",
            "5",
        ],
        ["--model.reference", "somewhere"],
        ["--parallel.offload_reference", "true"],
        ["--critic.learning_rate", "1e-3"],
        ["--replay.priority", "reward"],
        ["--replay.max_times_sampled", "9"],
        ["--replay.reuse_ratio", "0.5", "--replay.priority", "newest"],
    ],
)
def test_contradictions_are_refused_at_start(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(words, {})
    assert words[-1] in str(caught.value) or words[-2].removeprefix("--") in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregation": "sequence_mean_token_mean"},
        {"aggregation": "sequence_mean_token_sum"},
        {"aggregation": "constant"},
        {"importance_level": "sequence"},
        {"dual_clip": 1.01},
        {"rollout_correction": "truncate"},
        {"rollout_correction": "truncate", "correction_cap": 1.1},
        {"rollout_correction": "mask", "correction_cap": 1.2},
        {"off_policy_delta": 0.01},
        {"overlong_buffer": 510},
        {"update_epochs": 2},
        {"mini_batches": 2},
        {"advantage": "gae"},
        {"advantage": "gae", "gae_lambda": 0.5},
        {"advantage": "gae", "gamma": 0.5},
    ],
    ids=str,
)
def test_every_setting_changes_the_gradient(
    settings: dict[str, Any], config: Config, groups: list[Group]
) -> None:
    def gradient(changed: Config) -> tuple[float, float]:
        changed.optimizer.max_grad_norm = 1e9
        metrics = Policy(changed, Ranks()).update(whole(groups, changed)).metrics
        return metrics.loss, metrics.grad_norm

    base = gradient(with_algorithm(config))
    assert gradient(with_algorithm(config, **settings)) != pytest.approx(base, rel=1e-4)


def test_a_group_of_one_needs_a_critic() -> None:
    with raises(ConfigError, field="algorithm.advantage", value=None):
        load(["--sampling.group_size", "1"], {})
    assert (
        load(["--sampling.group_size", "1", "--algorithm.name", "ppo"], {}).sampling.group_size == 1
    )


def test_the_recipes_are_shown_by_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(["--help-all"], {})
    shown = " ".join(capsys.readouterr().out.split())
    for name, preset in RECIPES.items():
        expected = ", ".join(f"{key} {value}" for key, value in preset.items()) or "the defaults"
        assert f"{name} ({expected})" in shown


def test_truncated_completions_can_be_left_out(config: Config, groups: list[Group]) -> None:
    groups[0].completions[0].finish_reason = "length"
    masked = with_algorithm(config, mask_truncated=True)
    every, kept = whole(groups, config), whole(groups, masked)
    assert [row.in_loss for row in every.rows] == [True] * 16
    assert [row.in_loss for row in kept.rows] == [False] + [True] * 15
    for all_of_them, rest in zip(known(every.advantages), known(kept.advantages), strict=True):
        assert (
            all_of_them == rest
        ).all()  # the masked completion still counts in the statistics of its group
    tokens = [
        Policy(c, Ranks()).update(b).metrics.trained_tokens
        for c, b in ((config, every), (masked, kept))
    ]
    assert tokens[0] - tokens[1] == len(groups[0].completions[0].token_ids)


def test_the_overlong_penalty_shapes_the_reward(config: Config, groups: list[Group]) -> None:
    lengths = [len(completion.token_ids) for completion in groups[2].completions]
    config.sampling.max_new_tokens = max(lengths)
    batch = batch_of([groups[2]], config)
    advantages, _ = compute_advantages(
        batch, with_algorithm(config, advantage="group_centred"), 0.0
    )
    assert [float(row[0]) for row in advantages] == [0.0] * 4  # equal rewards
    advantages, _ = compute_advantages(
        batch, with_algorithm(config, advantage="group_centred", overlong_buffer=4), 0.0
    )
    shaped = [float(row[0]) for row in advantages]
    assert shaped[lengths.index(max(lengths))] == min(shaped) < 0


def test_off_policy_the_effective_sample_size_is_below_one(
    config: Config, groups: list[Group]
) -> None:
    metrics = Policy(config, Ranks()).update(whole(groups, config)).metrics
    assert 0 < metrics.effective_sample_size < 0.99
