"""Several updates per batch, the reference model, KL in the reward, and reuse without
correction."""

from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from common.settings.config import Config
from common.wire.schemas import Group
from learning.ranks import Ranks
from tests.support.batches.groups import (
    batch_of,
    known,
    make_group,
    off_policy_groups,
    prepared,
    save,
    whole,
    with_algorithm,
)
from tests.support.errors import raises
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference


@pytest.fixture
def groups() -> list[Group]:
    return off_policy_groups()


def parameters(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(a[name], b[name]) for name in a)


def test_two_passes_over_a_batch_are_two_updates_on_it(config: Config, groups: list[Group]) -> None:
    """In both passes, ratio and clip refer to the policy that sampled."""
    once, twice = Policy(config, Ranks()), Policy(with_algorithm(config, update_epochs=2), Ranks())
    for _ in range(2):
        once.update(whole(groups, config))
    metrics = twice.update(whole(groups, twice.config)).metrics
    assert metrics.updates == 2
    for name, expected in parameters(once).items():
        torch.testing.assert_close(parameters(twice)[name], expected, atol=1e-6, rtol=0, msg=name)


def test_mini_batches_are_updates_on_shares_of_the_batch(
    config: Config, groups: list[Group]
) -> None:
    changed = with_algorithm(config, mini_batches=4)
    first, again, other = (
        Policy(changed, Ranks()),
        Policy(changed, Ranks()),
        Policy(changed, Ranks()),
    )
    other.config = changed.model_copy(update={"seed": 1})
    metrics = first.update(whole(groups, changed)).metrics
    assert metrics.updates == 4
    again.update(whole(groups, changed))
    other.update(whole(groups, changed))
    assert not differ(
        parameters(first), parameters(again)
    )  # the seed decides the order of the rows
    assert differ(parameters(first), parameters(other))


def test_updates_end_early_when_the_policy_has_moved_too_far(
    config: Config, groups: list[Group]
) -> None:
    # The ratio refers to the policy before the updates.
    settings = {"update_epochs": 5, "rollout_correction": "truncate"}
    full = Policy(with_algorithm(config, **settings), Ranks())
    metrics = full.update(prepared(full, groups)).metrics
    assert (metrics.updates, metrics.stopped_early) == (5, 0)
    early = Policy(with_algorithm(config, **settings, early_stop_kl=1e-9), Ranks())
    metrics = early.update(prepared(early, groups)).metrics
    assert (metrics.updates, metrics.stopped_early) == (1, 1)
    once = Policy(with_algorithm(config, rollout_correction="truncate"), Ranks())
    once.update(prepared(once, groups))
    for name, expected in parameters(once).items():  # the gradient beyond the limit was not applied
        torch.testing.assert_close(parameters(early)[name], expected, atol=1e-6, rtol=0, msg=name)


def test_decoupled_updates_take_the_ratio_to_the_policy_before_them(
    config: Config, groups: list[Group]
) -> None:
    changed = with_algorithm(config, rollout_correction="truncate", update_epochs=2)
    policy = Policy(changed, Ranks())
    batch = prepared(policy, groups)
    with torch.no_grad():
        for row, old in zip(batch.tokens.values(), known(batch.old_logprobs), strict=True):
            ids = torch.tensor(np.concatenate([row.prompt_ids, row.completion_ids]))[None].long()
            logits = policy.model(ids).logits[0, len(row.prompt_ids) - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(
                -1, torch.tensor(row.completion_ids).long()[:, None]
            )[:, 0]
            torch.testing.assert_close(torch.from_numpy(old), expected, atol=1e-5, rtol=0)
    one = Policy(with_algorithm(config, rollout_correction="truncate"), Ranks())
    ratio = one.update(prepared(one, groups)).metrics.ratio
    assert ratio == pytest.approx(1, abs=1e-5)  # not the ratio to the engine's log-probabilities
    assert Policy(config, Ranks()).update(whole(groups, config)).metrics.ratio != pytest.approx(
        1, abs=1e-2
    )


def test_dropout_of_the_model_itself_applies_only_to_updates(
    config: Config, groups: list[Group]
) -> None:
    config = with_algorithm(config, update_epochs=2, old_logprobs="trainer")
    config.trainer.packing = "off"  # as for every model with dropout
    policy = Policy(config, Ranks())
    for layer in policy.model.get_decoder().layers:
        layer.self_attn.attention_dropout = 0.5
    batch = batch_of(groups, config)
    first, second = policy.logprobs(batch), policy.logprobs(batch)
    assert first is not None
    assert second is not None
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    assert policy.model.training


def test_the_mismatch_is_measured_before_the_policy_moves(
    config: Config, groups: list[Group]
) -> None:
    one, five = Policy(config, Ranks()), Policy(with_algorithm(config, update_epochs=5), Ranks())
    first, last = (
        one.update(whole(groups, config)).metrics,
        five.update(whole(groups, five.config)).metrics,
    )
    for name in ("delta_logprob", "kl_rollout", "effective_sample_size"):
        assert getattr(first, name) == pytest.approx(getattr(last, name), rel=1e-5)
    for completion in groups[0].completions:  # the current weights sampled only this group
        completion.weight_versions = [(0, 0, len(completion.token_ids))]
    for group in groups[1:]:
        for completion in group.completions:
            completion.weight_versions = [(7, 0, len(completion.token_ids))]
    only_first = Policy(config, Ranks()).update(whole([groups[0]], config)).metrics
    every = Policy(config, Ranks()).update(whole(groups, config)).metrics
    assert every.delta_logprob_current == pytest.approx(only_first.delta_logprob, rel=1e-5)


def test_kl_in_the_reward_hand_computed(config: Config, groups: list[Group]) -> None:
    """One group: r − coef · Σ k1 enters the group baseline; with a critic, the penalty is applied
    token by token, and advantages are whitened."""
    in_reward = {"kl_coef": 0.5, "kl_in": "reward"}
    config = with_algorithm(config, advantage="group_centred", **in_reward)
    batch = batch_of([groups[0]], config)
    batch.old_logprobs = [np.full(length, -1.0, np.float32) for length in batch.lengths]
    batch.ref_logprobs = [
        np.full(length, -1.0 - 0.1 * i, np.float32) for i, length in enumerate(batch.lengths)
    ]
    found, _ = compute_advantages(batch, config, kl_coef=0.5)
    shaped = [
        reward - 0.5 * 0.1 * i * batch.lengths[i] for i, reward in enumerate([1.0, 0.0, 0.0, 1.0])
    ]
    for advantages, value in zip(found, shaped, strict=True):
        np.testing.assert_allclose(advantages, value - sum(shaped) / 4, atol=1e-5)
    config = with_algorithm(config, advantage="gae", gae_lambda=0.0, **in_reward)
    batch.values = [np.zeros(length, np.float32) for length in batch.lengths]
    found, _ = compute_advantages(batch, config, kl_coef=0.5)
    raw = []
    for i, reward in enumerate([1.0, 0.0, 0.0, 1.0]):
        shaped_tokens = np.full(batch.lengths[i], -0.5 * 0.1 * i, np.float32)
        shaped_tokens[-1] += reward
        raw.append(shaped_tokens)
    tokens = np.concatenate(raw)
    whitened = (tokens - tokens.mean()) / tokens.std(ddof=1)
    np.testing.assert_allclose(np.concatenate(found), whitened, atol=1e-5)


def test_gae_advantages_are_whitened_over_the_tokens_that_count(
    config: Config, groups: list[Group]
) -> None:
    config = with_algorithm(config, name="ppo", mask_truncated=True)
    groups[0].completions[0].finish_reason = "length"
    batch = whole(groups, config)
    counted = np.concatenate(known(batch.advantages)[1:])
    assert counted.mean() == pytest.approx(0, abs=1e-6)
    assert counted.std(ddof=1) == pytest.approx(1, abs=1e-4)
    returns, values = np.concatenate(known(batch.returns)), np.concatenate(known(batch.values))
    assert (returns - values).std() != pytest.approx(1, abs=1e-2)  # computed before whitening
    means = [np.abs(advantages).mean() for advantages in known(batch.advantages)]
    assert np.concatenate(batch.mean_advantages()) == pytest.approx(
        means, rel=1e-6
    )  # the tokens have both signs


def test_batch_normalised_hand_computed(config: Config) -> None:
    """REINFORCE++ with a group baseline whitens over tokens, as in verl and OpenRLHF, not over
    completions."""
    group = make_group(np.random.default_rng(0), [1.0, 0.0])
    for completion, length in zip(group.completions, (1, 3), strict=True):
        completion.token_ids, completion.logprobs = (
            completion.token_ids[:1].repeat(length),
            np.zeros(length, np.float32),
        )
    changed = with_algorithm(config, name="reinforce_pp")
    found, _ = compute_advantages(batch_of([group], changed), changed, 0.0)
    # Tokens: ½ −½ −½ −½; mean −¼, unbiased variance (0.75² + 3 · 0.25²) / 3 = ¼
    np.testing.assert_allclose(np.concatenate(found), [1.5, -0.5, -0.5, -0.5], atol=1e-6)


def test_a_named_reference_is_loaded_and_can_be_refreshed_and_offloaded(
    config: Config, groups: list[Group], tmp_path: Path
) -> None:
    other = Policy(config, Ranks())
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.02
            )
    other.model.save_pretrained(tmp_path / "other")
    changed = with_algorithm(config, kl_coef=0.1)
    assert Policy(changed, Ranks()).update(
        whole(groups, changed)
    ).metrics.kl_reference == pytest.approx(0, abs=1e-6)
    changed.model.reference = str(tmp_path / "other")
    far = Policy(changed, Ranks()).update(whole(groups, changed)).metrics
    assert far.kl_reference > 1e-3
    changed.parallel.offload_reference = True
    assert Policy(changed, Ranks()).update(whole(groups, changed)).metrics == far
    changed = with_algorithm(changed, kl_coef=0.1, reference_refresh=2)
    policy = Policy(changed, Ranks())
    reference, distances = Reference(policy), []
    for _ in range(3):
        distances.append(
            policy.update(prepared(policy, groups, reference=reference)).metrics.kl_reference
        )
        policy.step += 1
        reference.refresh(policy)
    assert distances[0] > 1e-3
    assert distances[1] > 1e-3
    assert distances[2] == pytest.approx(0, abs=1e-6)


def test_a_refreshed_reference_and_an_adapted_coefficient_survive_a_restart(
    config: Config, groups: list[Group]
) -> None:
    assert config.trainer.run_dir is not None
    changed = with_algorithm(config, kl_coef=0.1, reference_refresh=1, kl_target=1e-3)
    unbroken = Policy(changed, Ranks())
    reference = Reference(unbroken)
    unbroken.update(prepared(unbroken, groups, reference=reference))
    unbroken.step += 1
    reference.refresh(unbroken)
    assert unbroken.kl_coef < 0.1  # the policy started at the reference, below the target
    save(unbroken, config.trainer.run_dir / "checkpoints", reference=reference)
    resumed, _, saved = Policy.resume(changed, Ranks(), config.trainer.run_dir)
    for policy, its_reference in ((unbroken, reference), (resumed, Reference(resumed, saved))):
        policy.update(prepared(policy, groups, reference=its_reference))
    assert resumed.kl_coef == unbroken.kl_coef
    assert not differ(parameters(resumed), parameters(unbroken))


def test_the_coefficient_adapts_towards_its_target(config: Config, groups: list[Group]) -> None:
    def coefficient(target: float) -> float:
        changed = with_algorithm(config, kl_coef=0.1, kl_target=target)
        policy = Policy(changed, Ranks())
        for _ in range(4):
            policy.update(prepared(policy, groups))
        return policy.kl_coef

    assert coefficient(1e-9) > 0.1
    assert coefficient(10.0) < 0.1


def test_a_skipped_update_leaves_the_policy(config: Config, groups: list[Group]) -> None:
    policy = Policy(config, Ranks())
    before = parameters(policy)
    metrics = policy.skip_update().metrics
    assert (metrics.updates, metrics.trained_tokens) == (0, 0)
    assert not differ(parameters(policy), before)


def test_groups_of_different_sizes_are_refused(config: Config) -> None:
    rng = np.random.default_rng(0)
    with raises(ConfigError, field="sampling.group_size"):
        batch_of([make_group(rng, [0.0, 1.0]), make_group(rng, [0.0])], config)
