"""Published recipes against numbers from their papers and reference tests, or computed by hand."""

import math

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from common.settings.algorithm import AlgorithmSection
from common.settings.config import Config, from_mapping
from common.settings.rewards import LengthReward, MathReward
from common.wire.schemas import Group
from learning.ranks import Ranks
from tests.support.batches.groups import (
    batch_of,
    known,
    make_group,
    off_policy_groups,
    prepared,
    with_algorithm,
)
from tests.support.errors import raises
from trainer.algorithms.advantages import length_penalty, mean_normalised, reward_normalised
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.algorithms.losses import (
    TokenTerms,
    dppo,
    geometric_mask,
    importance_correction,
    policy_loss,
    policy_weights,
    ratio_of,
    sapo,
)
from trainer.policy.policy import Policy


def logs(*values: float) -> torch.Tensor:
    return torch.tensor(values).log()


def terms(
    logprobs: torch.Tensor,
    *,
    old: torch.Tensor | None = None,
    rollout: torch.Tensor,
    advantages: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> TokenTerms:
    """Returns tokens, by default of one completion with advantage 1 and a ratio of 1."""
    row_of_token = torch.zeros(len(logprobs), dtype=torch.long) if rows is None else rows
    return TokenTerms(
        logprobs=logprobs,
        old_logprobs=logprobs if old is None else old,
        rollout_logprobs=rollout,
        advantages=torch.ones(len(logprobs)) if advantages is None else advantages,
        row_of_token=row_of_token,
        row_count=int(row_of_token.max()) + 1,
    )


@pytest.mark.parametrize(
    ("new", "old", "advantage", "loss", "masked"),
    [
        # These five are the cases in prime-rl's tests of its DPPO loss, with its bounds of 0.2.
        (1.0, 0.5, 1.0, 0.0, 1.0),
        (1.0, 0.5, -1.0, 2.0, 0.0),
        (0.3, 0.8, -1.0, 0.0, 1.0),
        (0.3, 0.8, 1.0, -0.375, 0.0),
        (0.6, 0.5, 1.0, -1.2, 0.0),
        (0.02, 0.002, 1.0, -10.0, 0.0),  # ten times as likely; a ratio would clip it
        (0.95, 0.7, 1.0, 0.0, 1.0),  # 1.36 times as likely: a change of 0.25
        (0.65, 0.9, -1.0, 0.65 / 0.9, 0.0),  # with a lower bound of 0.3
    ],
)
def test_dppo_masks_by_the_probability_that_moved_in_the_direction_of_the_advantage(
    new: float, old: float, advantage: float, loss: float, masked: float
) -> None:
    settings = AlgorithmSection(name="dppo", clip_low=0.3 if old == 0.9 else 0.2)
    logprobs = logs(new).requires_grad_()
    tokens = terms(logprobs, old=logs(old), rollout=logs(old), advantages=torch.tensor([advantage]))
    result = dppo(ratio_of(tokens.logprobs, tokens.old_logprobs), tokens, settings)
    assert result.loss.item() == pytest.approx(loss, abs=1e-6)
    assert result.clipped.item() == masked
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    assert gradient.item() == pytest.approx(
        loss, abs=1e-6
    )  # the gradient of ρ is ρ; a masked token has none


def test_dppo_measures_from_the_policy_that_sampled_even_if_the_ratio_refers_to_another(
    config: Config,
) -> None:
    """The first token moved by 0.25 from the policy that sampled it, the second by as much from the
    old one."""
    algorithm = with_algorithm(config, name="dppo", rollout_correction="truncate").algorithm
    tokens = terms(logs(0.5, 0.5), old=logs(0.45, 0.25), rollout=logs(0.25, 0.45))
    result = policy_loss(algorithm, tokens)
    np.testing.assert_allclose(result.loss, [0.0, -0.5 / 0.25], rtol=1e-6)
    assert result.clipped.tolist() == [1.0, 0.0]


def test_sapo_hand_computed() -> None:
    """4/τ · σ(τ(ρ − 1)) has the slope 4 · σ · (1 − σ) · ρ in log π: the plain policy gradient where
    ρ is 1."""
    logprobs, advantages = logs(0.5, 0.8, 0.8).requires_grad_(), torch.tensor([2.0, 1.0, -1.0])
    old = logs(0.5, 0.4, 0.4)
    tokens = terms(logprobs, old=old, rollout=old, advantages=advantages)
    settings = AlgorithmSection(name="sapo", sapo_tau_negative=2.0)
    result = sapo(ratio_of(tokens.logprobs, tokens.old_logprobs), tokens, settings)
    up, down = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))  # ρ = 2 with τ = 1 and τ = 2
    np.testing.assert_allclose(result.loss.detach(), [-2.0 * 4 * 0.5, -4 * up, 2 * down], rtol=1e-6)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    np.testing.assert_allclose(
        gradient, [-2.0, -2 * 4 * up * (1 - up), 2 * 4 * down * (1 - down)], rtol=1e-5
    )
    assert gradient[2].abs() < gradient[1].abs()  # a larger τ decays sooner
    assert result.clipped.sum() == 0


def test_icepop_keeps_the_weight_between_its_bounds_and_drops_the_token_outside() -> None:
    weights = [0.1, 0.49, 0.51, 1.0, 4.9, 5.1]
    tokens = terms(logs(*weights), rollout=torch.zeros(6), rows=torch.arange(6))
    found = importance_correction(tokens, AlgorithmSection(name="icepop"))
    np.testing.assert_allclose(found, [0, 0, 0.51, 1.0, 4.9, 0], rtol=1e-6)
    settings = AlgorithmSection(rollout_correction="mask", correction_cap=5.0)
    symmetric = importance_correction(tokens, settings)
    np.testing.assert_allclose(
        symmetric, [0, 0.49, 0.51, 1.0, 4.9, 0], rtol=1e-6
    )  # the lower bound defaults to 1/5


def test_a_completion_is_rejected_by_the_geometric_mean_of_its_ratios() -> None:
    """The means of the log ratios are 0, +0.002 and −0.002; single tokens, or the sum of a long
    row, may be far off."""
    rows = torch.tensor([0] * 2 + [1] * 2 + [2] * 2 + [3] * 4000)
    ratios = torch.tensor([0.5, -0.5, 0.003, 0.001, -0.003, -0.001] + [0.0009] * 4000)
    tokens = terms(ratios, rollout=torch.zeros_like(ratios), rows=rows)
    mask = geometric_mask(tokens, AlgorithmSection(geometric_low=0.999, geometric_high=1.001))
    assert [mask[rows == row].unique().tolist() for row in range(4)] == [[1.0], [0.0], [0.0], [1.0]]
    one_sided = geometric_mask(tokens, AlgorithmSection(geometric_high=1.001))
    assert [one_sided[rows == row].unique().tolist() for row in range(4)] == [
        [1.0],
        [0.0],
        [1.0],
        [1.0],
    ]
    other = geometric_mask(tokens, AlgorithmSection(geometric_low=0.999))
    assert [other[rows == row].unique().tolist() for row in range(4)] == [
        [1.0],
        [1.0],
        [0.0],
        [1.0],
    ]


def test_masks_and_corrections_multiply(config: Config) -> None:
    settings = {"rollout_correction": "truncate", "geometric_high": 1.2, "off_policy_delta": 0.1}
    algorithm = with_algorithm(config, **settings).algorithm
    rows = torch.tensor([0, 0, 1, 2])
    old = torch.tensor([0.1, 0.2, 0.9, -0.3])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0])
    tokens = terms(old, rollout=torch.zeros(4), advantages=advantages, rows=rows)
    found = policy_weights(algorithm, tokens)
    np.testing.assert_allclose(found, [math.exp(0.1), math.exp(0.2), 0, 0], rtol=1e-6)
    plain = policy_weights(with_algorithm(config).algorithm, tokens)
    assert plain.tolist() == [1.0] * 4


def test_the_recipes_have_the_published_bounds() -> None:
    """IcePop: 0.5 and 5; verl's Geo-RS: 0.999 and 1.001; SAPO: 1.0 and 1.05; prime-rl's DPPO mask:
    0.2 and 0.2."""
    sections = {
        name: AlgorithmSection.model_validate({"name": name})
        for name in ("icepop", "geo_rs", "sapo", "dppo")
    }
    assert (sections["icepop"].correction_floor, sections["icepop"].correction_cap) == (0.5, 5.0)
    assert sections["icepop"].rollout_correction == "mask"
    assert (sections["geo_rs"].geometric_low, sections["geo_rs"].geometric_high) == (0.999, 1.001)
    assert (sections["sapo"].sapo_tau_positive, sections["sapo"].sapo_tau_negative) == (1.0, 1.05)
    assert (sections["dppo"].clip_low, sections["dppo"].clip_high) == (0.2, 0.2)


def test_each_policy_loss_is_chosen_by_its_name(config: Config) -> None:
    tokens = terms(logs(0.9), old=logs(0.3), rollout=logs(0.3))
    found = {}
    for name in ("clip", "cispo", "dppo", "sapo"):
        algorithm = with_algorithm(config, policy_loss=name).algorithm
        found[name] = policy_loss(algorithm, tokens).loss.item()
    wanted = {
        "clip": -1.2,
        "cispo": -1.2 * math.log(0.9),
        "dppo": 0.0,
        "sapo": -4 / (1 + math.exp(-2)),
    }
    assert found == pytest.approx(wanted, rel=1e-5)


def test_maxrl_divides_by_the_mean() -> None:
    """If one of four is right, it counts three times as much as in GRPO's centred form; K of N: (r
    − K/N) / (K/N)."""
    found = mean_normalised(
        torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    )
    wanted = torch.tensor([[3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_maxrl_gives_the_gradient_of_the_log_of_the_pass_rate() -> None:
    """Exact for n answers of a policy with pass rate p: d log p = Σ_k (1 − p)^(k − 1) d p, for k up
    to n − 1.

    The paper's theorem has k ≤ n for the estimator without a baseline; the mean as baseline drops
    the last term.
    """
    p, n = 0.3, 5
    expected = 0.0
    for right in range(n + 1):
        chance = math.comb(n, right) * p**right * (1 - p) ** (n - right)
        rewards = torch.tensor([[1.0] * right + [0.0] * (n - right)], dtype=torch.float64)
        score = torch.where(rewards > 0, 1 / p, -1 / (1 - p))  # d log P(answer) / d p
        expected += chance * float((mean_normalised(rewards) * score).mean())
    assert expected == pytest.approx(sum((1 - p) ** (k - 1) for k in range(1, n)), rel=1e-6)


def test_maxrl_refuses_rewards_below_zero() -> None:
    with raises(ConfigError, field="algorithm.advantage", value="mean_normalised"):
        mean_normalised(torch.tensor([[1.0, -0.5]]))


def test_gdpo_tells_apart_what_grpo_cannot() -> None:
    """The paper's example: two answers and two rewards of 0 or 1, with the sums (0, 1) and (0,
    2)."""
    one, two = [[0.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]  # by reward: [groups, n]
    sums = []
    for group in range(2):
        parts = torch.tensor([[one[group]], [two[group]]])
        found = reward_normalised(parts, torch.ones(2), eps=1e-9)
        # Undo the division by the standard deviation of the batch.
        total = found * (0.7071068 * (group + 1)) * math.sqrt(2)
        sums.append(total[0].tolist())
    np.testing.assert_allclose(sums, [[-0.7071, 0.7071], [-1.4142, 1.4142]], atol=1e-4)


def test_gdpo_hand_computed_over_a_batch() -> None:
    parts = torch.tensor([[[0.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [5.0, 3.0]]])
    half = math.sqrt(0.5)
    sums = np.array([[-half, half], [-half + 0.5 * half, half - 0.5 * half]])
    expected = (sums - sums.mean()) / sums.std(ddof=1)
    np.testing.assert_allclose(
        reward_normalised(parts, torch.tensor([1.0, 0.5])), expected, rtol=1e-5
    )
    assert reward_normalised(torch.ones(2, 3, 2), torch.ones(2)).abs().max() == 0


def test_gdpo_compares_only_answers_that_a_reward_grades() -> None:
    nan, half = math.nan, math.sqrt(0.5)
    parts = torch.tensor([[[0.0, 1.0, nan], [nan, nan, 2.0]], [[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]]])
    second = (np.array([0.0, 1.0, 1.0]) - 2 / 3) / np.std([0.0, 1.0, 1.0], ddof=1)
    sums = np.array([[-half, half, 0.0], second])
    np.testing.assert_allclose(
        reward_normalised(parts, torch.ones(2), eps=1e-9), sums / sums.std(ddof=1), rtol=1e-5
    )


def gdpo(config: Config, groups: list[Group]) -> list[float]:
    advantages, _ = compute_advantages(batch_of(groups, config), config, 0.0)
    return [float(row[0]) for row in advantages]


def test_gdpo_reads_the_scores_of_the_reward_functions_and_their_weights(config: Config) -> None:
    changed = with_algorithm(config, name="gdpo")
    group = make_group(np.random.default_rng(0), [1.0, 0.0, 0.0])
    for completion, length in zip(group.completions, (0.0, -1.0, 0.0), strict=True):
        completion.components = {
            "math": completion.reward,
            "length": length,
            "length/inner": 7.0 + length**2 + completion.reward,
        }
    one = gdpo(changed, [group])
    changed.reward.functions = [MathReward(), LengthReward(weight=3.0)]
    three = gdpo(changed, [group])
    math_part, length_part = (
        np.array([2, -1, -1]) / math.sqrt(3),
        np.array([1, -2, 1]) / math.sqrt(3),
    )
    for found, weight in ((one, 1.0), (three, 3.0)):
        total = math_part + weight * length_part
        np.testing.assert_allclose(found, total / total.std(ddof=1), rtol=1e-4)
    group.completions[1].components = {}
    with pytest.raises(ConfigError) as caught:
        gdpo(changed, [group])
    assert (caught.value.field, caught.value.value) == ("algorithm.advantage", "reward_normalised")


def test_a_function_that_grades_only_one_task_gives_others_no_advantage(config: Config) -> None:
    changed, rng = with_algorithm(config, name="gdpo"), np.random.default_rng(0)
    groups = [make_group(rng, [1.0, 0.0]), make_group(rng, [1.0, 0.0])]
    for group, name in zip(groups, ("math", "code"), strict=True):
        for completion in group.completions:
            completion.components = {name: completion.reward}
    found = np.array(gdpo(changed, groups))
    np.testing.assert_allclose(found, np.array([1, -1, 1, -1]) * math.sqrt(3 / 4), rtol=1e-4)


def test_alp_scales_the_length_penalty_by_the_pass_rate() -> None:
    found = length_penalty(torch.tensor([10, 20, 20]), torch.tensor([1.0, 0.5, 0.0]), 4, 40)
    np.testing.assert_allclose(
        found, [-0.25, -0.25, -0.125]
    )  # never solved: 1 / 4 of the full penalty


def test_the_length_penalty_is_part_of_the_reward(config: Config) -> None:
    changed = with_algorithm(config, length_penalty=0.5, advantage="group_centred")
    group = make_group(np.random.default_rng(0), [1.0, 1.0, 0.0])
    lengths = np.array([len(completion.token_ids) for completion in group.completions])
    shaped = np.array([1.0, 1.0, 0.0]) - 0.5 * (2 / 3) * lengths / changed.sampling.max_new_tokens
    np.testing.assert_allclose(gdpo(changed, [group]), shaped - shaped.mean(), rtol=1e-5)


AFFINE = ((1.0, 0.0), (1.0, -10.0), (0.125, 3.0), (1000.0, -500.0))


@pytest.mark.parametrize(("scale", "shift"), AFFINE)
def test_pass_rates_do_not_depend_on_the_scale_of_rewards_without_verdicts(
    config: Config, scale: float, shift: float
) -> None:
    rewards = [[1.0, 0.75, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]]
    changed = with_algorithm(config, length_penalty=0.5, advantage="group_normalised")
    groups = []
    for own in rewards:
        group = make_group(np.random.default_rng(0), [scale * reward + shift for reward in own])
        for completion in group.completions:
            completion.verified = False
            completion.correct = False
        groups.append(group)
    batch = batch_of(groups, changed)
    assert batch.pass_rates == [0.5, 0.25, 1.0]
    equal = batch_of(groups[2:], changed)
    assert equal.pass_rates == [0.0], "nothing is above the mean"


def test_a_verdict_counts_more_than_its_reward(config: Config) -> None:
    group = make_group(np.random.default_rng(0), [0.0, 5.0, 1.0, 2.0])
    for completion, correct in zip(group.completions, (True, False, False, False), strict=True):
        completion.correct = correct
    group.completions[2].verified = group.completions[3].verified = False
    assert batch_of([group], config).pass_rates == [0.5], "1 of 2 verdicts; 2 is above the mean 1.5"


def test_the_teacher_adds_its_log_ratio_to_every_token_and_nothing_normalises_it(
    config: Config,
) -> None:
    groups = off_policy_groups()
    changed = with_algorithm(config, name="reinforce_pp")
    plain, _ = compute_advantages(batch_of(groups, changed), changed, 0.0)
    changed.teacher.url, changed.teacher.coef = "http://127.0.0.1:1", 0.5
    taught, _ = compute_advantages(batch_of(groups, changed), changed, 0.0)
    for i, completion in enumerate(c for group in groups for c in group.completions):
        gap = known(completion.teacher_logprobs) - completion.logprobs
        np.testing.assert_allclose(taught[i], plain[i] + 0.5 * gap, atol=1e-5)


def test_the_teacher_is_compared_with_the_policy_about_to_be_updated(config: Config) -> None:
    """The engine's log-probabilities are those of that policy only if it sampled the whole
    completion."""
    changed, groups = with_algorithm(config, name="opd"), off_policy_groups()
    policy = Policy(changed, Ranks())
    assert policy.logprobs(batch_of(groups, changed)) is None
    policy.step = 1
    batch = prepared(policy, groups)
    own = known(policy.logprobs(batch_of(groups, changed, step=1)))
    for found, logprobs, teacher in zip(
        known(batch.advantages), own, known(batch.teacher_logprobs), strict=True
    ):
        np.testing.assert_allclose(found, teacher - logprobs, atol=1e-5)
    gaps = np.concatenate(own) - np.concatenate(known(batch.teacher_logprobs))
    assert batch.teacher_kl() == pytest.approx(gaps.mean(), rel=1e-5)


def test_a_group_without_scores_of_the_teacher_is_refused(config: Config) -> None:
    changed = with_algorithm(config, name="opd")
    with pytest.raises(ConfigError) as caught:
        batch_of([make_group(np.random.default_rng(0), [1.0, 0.0])], changed)
    assert caught.value.field == "teacher.url"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"algorithm.name": "opd"}, "algorithm.advantage"),
        ({"teacher.coef": 2.0}, "teacher.coef"),
        ({"teacher.url": "localhost:30000"}, "teacher.url"),
        ({"teacher.url": "http://me:secret@host"}, "teacher.url"),
        ({"teacher.url": "http://host/v1"}, "teacher.url"),
        ({"teacher.url": "http://host", "teacher.model": "m"}, "teacher.model"),
        (
            {
                "algorithm.name": "opd",
                "teacher.url": "http://host",
                "algorithm.dynamic_sampling": True,
            },
            "algorithm.dynamic_sampling",
        ),
        (
            {"teacher.url": "http://host", "sampling.top_p": 0.9, "rollout.engine": "embedded"},
            "sampling.top_p",
        ),
        ({"algorithm.name": "gdpo", "reward.require_stop": True}, "reward.require_stop"),
        (
            {"algorithm.name": "gdpo", "algorithm.kl_coef": 0.1, "algorithm.kl_in": "reward"},
            "algorithm.kl_in",
        ),
        (
            {"algorithm.name": "gdpo", "reward.functions": [{"name": "a:B", "weight": 2.0}]},
            "reward.functions",
        ),
        (
            {"algorithm.name": "sapo", "algorithm.clip_low": 0.1},
            "algorithm.clip_low",
        ),
        ({"algorithm.sapo_tau_positive": 2.0}, "algorithm.sapo_tau_positive"),
        (
            {"algorithm.name": "dppo", "algorithm.dual_clip": 3.0},
            "algorithm.dual_clip",
        ),
        (
            {"algorithm.rollout_correction": "truncate", "algorithm.correction_floor": 0.5},
            "algorithm.correction_floor",
        ),
        (
            {"algorithm.name": "geo_rs", "algorithm.old_logprobs": "engine"},
            "algorithm.old_logprobs",
        ),
        (
            {"algorithm.name": "maxrl", "algorithm.advantage_eps": 1e-3},
            "algorithm.advantage_eps",
        ),
    ],
)
def test_conflicting_settings_are_refused_with_their_names(
    settings: dict[str, object], field: str
) -> None:
    with raises(ConfigError, field=field):
        from_mapping(settings)


def test_a_teacher_alone_needs_no_group() -> None:
    config = from_mapping(
        {"algorithm.name": "opd", "teacher.url": "http://host", "sampling.group_size": 1}
    )
    assert config.sampling.group_size == 1
