"""Several updates on a batch, the reference model, KL in the reward, and reuse without correction."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from common.algorithm import AlgorithmSection
from common.config import Config
from common.errors import ConfigError
from common.schemas import Group
from learning.ranks import Ranks
from tests.trainer.groups import make_group, off_policy_groups, save, weighed, whole, with_algorithm
from trainer.algorithms.batch import Batch
from trainer.policy.policy import Policy


@pytest.fixture
def groups() -> list[Group]:
    return off_policy_groups()


def parameters(learner: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in learner.policy.named_parameters()}


def differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(a[name], b[name]) for name in a)


def test_two_passes_over_a_batch_are_two_updates_on_it(config: Config, groups: list[Group]) -> None:
    """Ratio and clip are to the policy that sampled, in both passes."""
    once, twice = Policy(config, Ranks()), Policy(with_algorithm(config, update_epochs=2), Ranks())
    for _ in range(2):
        once.update(whole(groups, config))
    metrics = twice.update(whole(groups, twice.config))
    assert (metrics.updates, twice.step, once.step) == (2, 1, 2)
    for name, expected in parameters(once).items():
        torch.testing.assert_close(parameters(twice)[name], expected, atol=1e-6, rtol=0, msg=name)


def test_mini_batches_are_updates_on_shares_of_the_batch(config: Config, groups: list[Group]) -> None:
    changed = with_algorithm(config, mini_batches=4)
    first, again, other = Policy(changed, Ranks()), Policy(changed, Ranks()), Policy(changed, Ranks())
    other.config = changed.model_copy(update={"seed": 1})
    metrics = first.update(whole(groups, changed))
    assert metrics.updates == 4
    again.update(whole(groups, changed))
    other.update(whole(groups, changed))
    assert not differ(parameters(first), parameters(again))  # the seed orders the rows
    assert differ(parameters(first), parameters(other))


def test_updates_end_early_when_the_policy_has_moved_too_far(config: Config, groups: list[Group]) -> None:
    settings = {"update_epochs": 5, "rollout_correction": "truncate"}  # the ratio is to the policy before the updates
    full = Policy(with_algorithm(config, **settings), Ranks())
    metrics = full.update(weighed(full, groups))
    assert (metrics.updates, metrics.stopped_early) == (5, 0)
    early = Policy(with_algorithm(config, **settings, early_stop_kl=1e-9), Ranks())
    metrics = early.update(weighed(early, groups))
    assert (metrics.updates, metrics.stopped_early) == (1, 1)
    once = Policy(with_algorithm(config, rollout_correction="truncate"), Ranks())
    once.update(weighed(once, groups))
    for name, expected in parameters(once).items():  # the gradient that came too late was not applied
        torch.testing.assert_close(parameters(early)[name], expected, atol=1e-6, rtol=0, msg=name)


def test_decoupled_updates_take_the_ratio_to_the_policy_before_them(config: Config, groups: list[Group]) -> None:
    changed = with_algorithm(config, rollout_correction="truncate", update_epochs=2)
    learner = Policy(changed, Ranks())
    batch = weighed(learner, groups)
    with torch.no_grad():
        for row, old in zip(batch.rows, batch.old_logprobs, strict=True):
            ids = torch.tensor(np.concatenate([row.prompt_ids, row.completion_ids]))[None].long()
            logits = learner.policy(ids).logits[0, len(row.prompt_ids) - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(row.completion_ids).long()[:, None])[:, 0]
            torch.testing.assert_close(torch.from_numpy(old), expected, atol=1e-5, rtol=0)
    one = Policy(with_algorithm(config, rollout_correction="truncate"), Ranks())
    assert one.update(weighed(one, groups)).ratio == pytest.approx(1, abs=1e-5)  # not the ratio to what the engine said
    assert Policy(config, Ranks()).update(whole(groups, config)).ratio != pytest.approx(1, abs=1e-2)


def test_the_mismatch_is_measured_before_the_policy_moves(config: Config, groups: list[Group]) -> None:
    one, five = Policy(config, Ranks()), Policy(with_algorithm(config, update_epochs=5), Ranks())
    first, last = one.update(whole(groups, config)), five.update(whole(groups, five.config))
    for name in ("delta_logprob", "kl_rollout", "effective_sample_size"):
        assert getattr(first, name) == pytest.approx(getattr(last, name), rel=1e-5)
    for completion in groups[0].completions:  # only this group was sampled by the current weights
        completion.weight_versions = [(0, 0, len(completion.token_ids))]
    for group in groups[1:]:
        for completion in group.completions:
            completion.weight_versions = [(7, 0, len(completion.token_ids))]
    only_first = Policy(config, Ranks()).update(whole([groups[0]], config))
    assert Policy(config, Ranks()).update(whole(groups, config)).delta_logprob_current == pytest.approx(
        only_first.delta_logprob, rel=1e-5
    )


def test_kl_in_the_reward_hand_computed(config: Config, groups: list[Group]) -> None:
    """One group: r − coef · Σ k1 goes into the group baseline; with a critic it is taken token by token."""
    config.algorithm = AlgorithmSection.model_validate(
        {"advantage": "group_centred", "kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1"}
    )
    batch = Batch.of([groups[0]], [1.0], config)
    batch.old_logprobs = [np.full(length, -1.0, np.float32) for length in batch.lengths]
    batch.ref_logprobs = [np.full(length, -1.0 - 0.1 * i, np.float32) for i, length in enumerate(batch.lengths)]
    weigh(batch, config.algorithm, 512, kl_coef=0.5)
    shaped = [reward - 0.5 * 0.1 * i * batch.lengths[i] for i, reward in enumerate([1.0, 0.0, 0.0, 1.0])]
    for advantages, value in zip(batch.advantages, shaped, strict=True):
        np.testing.assert_allclose(advantages, value - sum(shaped) / 4, atol=1e-5)
    section = AlgorithmSection.model_validate(
        {"advantage": "gae", "kl_coef": 0.5, "kl_in": "reward", "kl_estimator": "k1", "whiten": False, "gae_lambda": 0.0}
    )
    batch.values = [np.zeros(length, np.float32) for length in batch.lengths]
    weigh(batch, section, 512, kl_coef=0.5)
    for i, (advantages, reward) in enumerate(zip(batch.advantages, [1.0, 0.0, 0.0, 1.0], strict=True)):
        expected = np.full(batch.lengths[i], -0.5 * 0.1 * i, np.float32)
        expected[-1] += reward
        np.testing.assert_allclose(advantages, expected, atol=1e-6)


def test_gae_advantages_are_whitened_over_the_tokens_that_count(config: Config, groups: list[Group]) -> None:
    config = with_algorithm(config, name="ppo", mask_truncated=True)
    groups[0].completions[0].finish_reason = "length"
    batch = whole(groups, config)
    counted = np.concatenate(batch.advantages[1:])
    assert counted.mean() == pytest.approx(0, abs=1e-6)
    assert counted.std(ddof=1) == pytest.approx(1, abs=1e-4)
    returns, values = np.concatenate(batch.returns), np.concatenate(batch.values)
    assert (returns - values).std() != pytest.approx(1, abs=1e-2)  # taken before whitening


def test_a_named_reference_is_loaded_and_can_be_refreshed_and_offloaded(
    config: Config, groups: list[Group], tmp_path: Path
) -> None:
    other = Policy(config, Ranks())
    with torch.no_grad():
        for parameter in other.policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.02)
    other.policy.save_pretrained(tmp_path / "other")
    changed = with_algorithm(config, kl_coef=0.1)
    assert Policy(changed, Ranks()).update(whole(groups, changed)).kl_reference == pytest.approx(0, abs=1e-6)
    changed.model.reference = str(tmp_path / "other")
    far = Policy(changed, Ranks()).update(whole(groups, changed))
    assert far.kl_reference > 1e-3
    changed.trainer.offload_reference = True
    assert Policy(changed, Ranks()).update(whole(groups, changed)) == far
    changed = with_algorithm(changed, kl_coef=0.1, reference_refresh=2)
    learner = Policy(changed, Ranks())
    distances = [learner.update(weighed(learner, groups)).kl_reference for _ in range(3)]
    assert distances[0] > 1e-3
    assert distances[1] > 1e-3
    assert distances[2] == pytest.approx(0, abs=1e-6)


def test_a_refreshed_reference_and_an_adapted_coefficient_survive_a_restart(config: Config, groups: list[Group]) -> None:
    assert config.trainer.run_dir is not None
    changed = with_algorithm(config, kl_coef=0.1, reference_refresh=1, kl_target=1e-3, kl_horizon=16)
    unbroken = Policy(changed, Ranks())
    unbroken.update(weighed(unbroken, groups))
    assert unbroken.kl_coef < 0.1  # the policy began at the reference: below its target
    save(unbroken, config.trainer.run_dir / "checkpoints")
    resumed, _, _ = Policy.resume(changed, Ranks(), config.trainer.run_dir)
    for learner in (unbroken, resumed):
        learner.update(weighed(learner, groups))
    assert resumed.kl_coef == unbroken.kl_coef
    assert not differ(parameters(resumed), parameters(unbroken))


def test_the_coefficient_adapts_towards_its_target(config: Config, groups: list[Group]) -> None:
    def coefficient(target: float) -> float:
        changed = with_algorithm(config, kl_coef=0.1, kl_target=target, kl_horizon=100)
        learner = Policy(changed, Ranks())
        for _ in range(4):
            learner.update(weighed(learner, groups))
        return learner.kl_coef

    assert coefficient(1e-9) > 0.1
    assert coefficient(10.0) < 0.1


def test_muon_updates_hidden_matrices_and_adamw_the_rest(config: Config, groups: list[Group], tmp_path: Path) -> None:
    changed = config.model_copy(deep=True)
    changed.trainer.optimizer = "muon"
    adamw, muon = Policy(config, Ranks()), Policy(changed, Ranks())
    before = parameters(adamw)
    for learner in (adamw, muon):
        learner.update(whole(groups, config))
    for name, value in parameters(muon).items():
        hidden = value.ndim == 2 and "embed" not in name
        assert torch.equal(value, parameters(adamw)[name]) != hidden, name
        if hidden:  # a step of about the same size
            sizes = [(moved - before[name]).square().mean().sqrt() for moved in (value, parameters(adamw)[name])]
            assert 0.1 < sizes[0] / sizes[1] < 10, name
    resumed = Policy(changed, Ranks())
    resumed.policy.load_state_dict(muon.policy.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(muon.optimizer.state_dict()))  # else both would share it
    resumed.step = muon.step
    for learner in (muon, resumed):
        learner.update(whole(groups, config))
    assert not differ(parameters(muon), parameters(resumed))
    with pytest.raises(ConfigError, match=r"another kind.*trainer\.optimizer"):
        adamw.optimizer.empty_state(muon.optimizer.state_dict())


def test_reuse_without_correction_takes_old_tokens_for_the_policys_own(config: Config, groups: list[Group]) -> None:
    config.replay.corrected = False
    learner = Policy(config, Ranks())
    batch = Batch.of(groups, [1.0] * 4, config, step=0, fresh=2)
    learner.score(batch)
    weigh(batch, config.algorithm, 512, 0.0)
    assert [row.corrected for row in batch.rows] == [True] * 8 + [False] * 8
    assert not batch.old_logprobs
    fresh = {float(completion.logprobs[0]) for group in groups[:2] for completion in group.completions}
    reused = {float(completion.logprobs[0]) for group in groups[2:] for completion in group.completions}
    assert {float(row.rollout_logprobs[0]) for row in batch.rows[:8]} == fresh
    assert not {float(row.rollout_logprobs[0]) for row in batch.rows[8:]} & reused


def test_a_policy_that_is_held_stays_and_its_version_moves(config: Config, groups: list[Group]) -> None:
    learner = Policy(config, Ranks())
    before = parameters(learner)
    metrics = learner.hold(whole(groups, config))
    assert (learner.step, metrics.updates, metrics.trained_tokens) == (1, 0, 0)
    assert not differ(parameters(learner), before)


def test_groups_of_different_sizes_are_refused(config: Config) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match=r"one size.*sampling\.group_size"):
        Batch.of([make_group(rng, [0.0, 1.0]), make_group(rng, [0.0])], [1.0, 1.0], config)
