"""The update: what it computes, and that it does not depend on how the batch is cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import get_scheduler

from common.errors import ConfigError
from common.settings.config import Config, from_mapping, load
from common.settings.sections import OptimizerSection
from common.wire.codec import encode_groups
from common.wire.schemas import Float32, Group, Int32
from learning.batching import micro_batches
from learning.layout import Packing, Padded
from learning.optimizer import NonFiniteGradients
from learning.ranks import Ranks
from tests.support.batches.groups import known, make_group, prepared, whole
from tests.support.errors import raises
from tests.support.processes.ranks import run_ranks
from trainer.algorithms.batch import Batch, MicroBatch
from trainer.policy.learning_rate import learning_rate
from trainer.policy.policy import Policy
from trainer.policy.scorer import Scorer
from trainer.policy.scoring import score_batch


@pytest.fixture
def groups() -> list[Group]:
    rng = np.random.default_rng(0)
    rewards = [
        [1.0, 0.0, 0.0, 1.0],
        [0.0, 0.0, 1.0, 0.0],
        [1.0, 1.0, 1.0, 1.0],
        [0.0, 1.0, 1.0, 1.0],
    ]
    return [make_group(rng, row, position=i) for i, row in enumerate(rewards)]


def parameters(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def updated(config: Config, batch: Batch) -> dict[str, torch.Tensor]:
    policy = Policy(config, Ranks())
    policy.update(batch)
    return parameters(policy)


def score(
    policy: Policy, prompt: Int32, completion: Int32, temperature: float
) -> tuple[Float32, Float32]:
    """Returns log-probabilities and entropies of one completion, scored alone."""
    padded, targets = (
        Padded.of([prompt], [completion]),
        torch.from_numpy(completion.astype(np.int64)),
    )
    with torch.no_grad():
        scores = Scorer(policy.model)(padded, targets, temperature)
    return scores.logprobs.numpy(), scores.entropy.numpy()


def on_policy(config: Config, groups: list[Group]) -> None:
    """Replaces the rollout log-probabilities by those of the policy itself."""
    policy = Policy(config, Ranks())
    for group in groups:
        for completion in group.completions:
            completion.logprobs = score(
                policy, group.prompt_token_ids, completion.token_ids, config.sampling.temperature
            )[0]


@pytest.mark.integration
@pytest.mark.parametrize("packing", ["on", "off"])
def test_logprobs_equal_those_of_the_full_logits(
    config: Config, groups: list[Group], packing: Packing
) -> None:
    """Compares layout, selection before the head and temperature with a plain forward pass of every
    row alone."""
    policy = Policy(config, Ranks())
    batch = whole(groups, config)
    scorer = Scorer(policy.model, packing)
    micro = MicroBatch.of(batch, np.arange(len(batch.rows)), scorer.layout, torch.device("cpu"))
    with torch.no_grad():
        scores = scorer(micro.inputs.tokens, micro.inputs.targets, 0.7)
        expected, entropies = [], []
        for row in batch.tokens.values():
            ids = torch.tensor(np.concatenate([row.prompt_ids, row.completion_ids]))[None].long()
            logits = policy.model(ids).logits[0, len(row.prompt_ids) - 1 : -1] / 0.7
            distribution = torch.distributions.Categorical(logits=logits)
            expected.append(distribution.log_prob(torch.tensor(row.completion_ids).long()))
            entropies.append(distribution.entropy())
    torch.testing.assert_close(scores.logprobs, torch.cat(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropy, torch.cat(entropies), atol=1e-4, rtol=0)


@pytest.mark.integration
def test_on_policy_ratio_is_one_and_the_loss_is_the_mean_advantage(
    config: Config, groups: list[Group]
) -> None:
    on_policy(config, groups)
    metrics = Policy(config, Ranks()).update(whole(groups, config)).metrics
    assert metrics.ratio == pytest.approx(1, abs=1e-5)
    assert metrics.delta_logprob == pytest.approx(0, abs=1e-5)
    assert metrics.delta_logprob_current == pytest.approx(0, abs=1e-5)
    assert metrics.clip_fraction == 0
    assert metrics.effective_sample_size == pytest.approx(1, abs=1e-5)
    batch = whole(groups, config)
    expected = -sum(float(advantages.sum()) for advantages in known(batch.advantages)) / sum(
        batch.lengths
    )
    assert metrics.loss == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 40, 100])
def test_micro_batches_do_not_change_the_update(
    config: Config, groups: list[Group], max_tokens: int
) -> None:
    one = updated(config, whole(groups, config))
    config.trainer.micro_batch_tokens = max_tokens
    batch = whole(groups, config)
    assert (
        len(
            micro_batches(batch.sizes(shared=True), np.arange(len(batch.rows)), Ranks(), max_tokens)
        )
        > 1
    )
    many = updated(config, batch)
    for name, expected in one.items():
        torch.testing.assert_close(many[name], expected, atol=2e-5, rtol=0, msg=name)


def test_an_update_measures_how_full_its_passes_are(config: Config, groups: list[Group]) -> None:
    batch = whole(groups, config)
    sizes = batch.sizes(shared=True)
    rows = np.flatnonzero([row.any() for row in known(batch.advantages)])

    def passes(room: int) -> tuple[int, int]:
        """Returns the passes of rows that are whole, and of rows that could be cut."""
        tokens = 0
        parts = micro_batches(sizes, rows, Ranks(), max_tokens=room)
        for part in parts:
            own = [batch.rows[i] for i in part.tolist()]
            tokens += sum({row.prompt: row.prompt_tokens for row in own}.values())
            tokens += sum(row.completion_tokens - 1 for row in own)
        return len(parts), -(-tokens // room)

    longest = int(sizes.totals.max())
    found = {room: passes(room) for room in range(longest, 3 * longest)}
    room = max(found, key=lambda each: found[each][0] / found[each][1])
    config.trainer.micro_batch_tokens = room
    metrics = Policy(config, Ranks()).update(batch).metrics
    assert metrics.pass_fill == pytest.approx(found[room][1] / found[room][0])
    assert metrics.pass_fill < 0.9


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batch_size_limits_the_completions(
    config: Config, groups: list[Group], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    one = updated(config, whole(groups, config))
    config.trainer.micro_batch_size = size
    passes: list[int] = []
    backward = Policy._backward

    def counted(policy: Policy, micro: MicroBatch, **more: Any) -> torch.Tensor:
        passes.append(micro.row_count)
        return backward(policy, micro, **more)

    monkeypatch.setattr(Policy, "_backward", counted)
    batch = whole(groups, config)
    many = updated(config, batch)
    assert max(passes) == size
    assert sum(passes) == sum(bool(advantages.any()) for advantages in known(batch.advantages))
    for name, expected in one.items():
        torch.testing.assert_close(many[name], expected, atol=2e-5, rtol=0, msg=name)


def test_the_requested_device_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Ranks().device.type == "cpu"
    with raises(ConfigError, field="trainer.device", value="cuda"):
        Ranks(device_kind="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Ranks().device.type == "cuda"
    assert Ranks(device_kind="cuda").device.type == "cuda"
    assert Ranks(device_kind="cpu").device.type == "cpu"  # a GPU is available, but not used


def test_equal_groups_have_no_gradient_but_count_in_the_normaliser(
    config: Config, groups: list[Group]
) -> None:
    with_equal, without = Policy(config, Ranks()), Policy(config, Ranks())
    assert [bool(row.any()) for row in known(whole(groups, config).advantages)] == [True] * 8 + [
        False
    ] * 4 + [True] * 4
    others = [*groups[:2], groups[3]]
    both = [
        policy.update(prepared(policy, part)).metrics
        for policy, part in ((with_equal, groups), (without, others))
    ]
    assert (
        both[0].trained_tokens == both[1].trained_tokens
    )  # the equal group is left out of the forward pass
    tokens = [
        sum(len(c.token_ids) for group in part for c in group.completions)
        for part in (groups, others)
    ]
    assert both[0].loss == pytest.approx(both[1].loss * tokens[1] / tokens[0], rel=1e-4)
    policy = Policy(config, Ranks())
    before = parameters(policy)
    metrics = policy.update(whole([groups[2]], config)).metrics
    assert metrics.grad_norm == 0
    for name, value in parameters(policy).items():
        torch.testing.assert_close(value, before[name], atol=0, rtol=0)


def test_momentum_and_decay_continue_on_a_batch_without_gradient(
    config: Config, groups: list[Group]
) -> None:
    """As on a rank beside others with rows: AdamW takes a step with a gradient of 0."""
    config.optimizer.weight_decay = 0.1
    policy, zeros = Policy(config, Ranks()), Policy(config, Ranks())
    for each in (policy, zeros):
        each.update(whole(groups, config))
    before = parameters(policy)
    assert policy.update(whole([groups[2]], config)).metrics.grad_norm == 0
    for parameter in zeros.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    zeros.optimizer.step(config.optimizer.learning_rate)
    for name, value in parameters(zeros).items():
        assert torch.equal(parameters(policy)[name], value)
        assert not torch.equal(before[name], value)


SEVERAL = [
    "--algorithm.update_epochs",
    "2",
    "--algorithm.mini_batches",
    "3",
    "--algorithm.rollout_correction",
    "truncate",
]
IN_REWARD = [
    "--algorithm.kl_coef",
    "0.1",
    "--algorithm.kl_in",
    "reward",
    "--algorithm.aggregation",
    "constant",
]


TOGETHER = ["--parallel.context_size", "2"]
OVER_ROWS = ["--algorithm.name", "gspo", "--algorithm.entropy_coef", "0.01"]
"""The ratio of a token is its row's, and entropies have a gradient."""


@pytest.mark.integration
@pytest.mark.parametrize(
    "settings",
    [[], [*SEVERAL, *IN_REWARD], [*SEVERAL, *IN_REWARD, *TOGETHER], [*OVER_ROWS, *TOGETHER]],
    ids=["one update", "several updates", "rows computed together", "weights of whole rows"],
)
def test_two_trainer_processes_give_the_update_of_one(
    config: Config, groups: list[Group], tmp_path: Path, settings: list[str]
) -> None:
    """Trap: trainer nodes beyond the first stay idle. Here both hold a share; the result is that of
    one process."""
    (tmp_path / "groups.msgpack").write_bytes(encode_groups(groups))
    words = (
        "--model.name",
        config.model.name,
        "--optimizer.learning_rate",
        "1e-3",
        "--optimizer.warmup_steps",
        "0",
        *settings,
    )
    run_ranks(2, "policy_ranks", str(tmp_path), *words)
    config.algorithm = load(settings, {}).algorithm
    policy = Policy(config, Ranks())
    metrics = policy.update(whole(groups, config)).metrics
    loss, grad_norm, tokens = (tmp_path / "metrics.txt").read_text().split()
    assert float(loss) == pytest.approx(metrics.loss, abs=1e-6)
    assert float(grad_norm) == pytest.approx(metrics.grad_norm, rel=1e-4)
    assert int(tokens) == metrics.trained_tokens
    two = load_file(tmp_path / "new.safetensors")
    for name, expected in parameters(policy).items():
        torch.testing.assert_close(two[name], expected, atol=2e-5, rtol=0, msg=name)


def test_trap_settings_change_the_update(config: Config, groups: list[Group]) -> None:
    """Trap: settings that nothing reads. Each of these settings changes the update."""
    base = updated(config, whole(groups, config))

    def differs(section: str, name: str, value: object) -> bool:
        changed = config.model_copy(deep=True)
        setattr(getattr(changed, section), name, value)
        new = updated(changed, whole(groups, changed))
        return any(not torch.equal(new[key], base[key]) for key in base)

    assert differs("algorithm", "clip_high", 50.0)
    assert differs("algorithm", "clip_low", 0.99)
    assert differs("optimizer", "learning_rate", 2e-3)
    assert differs("optimizer", "max_grad_norm", 1e-6)
    assert differs("optimizer", "weight_decay", 0.5)
    assert differs("optimizer", "warmup_steps", 10)
    assert differs("sampling", "temperature", 0.5)
    assert differs("algorithm", "advantage_eps", 1.0)


def test_kl_term_pulls_towards_the_reference(config: Config, groups: list[Group]) -> None:
    """With equal rewards only the KL term is left; once the policy has moved, its gradient points
    to the reference."""
    config.algorithm.kl_coef = 0.5
    policy = Policy(config, Ranks())
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.02
            )
    batch = prepared(policy, [groups[2]])
    first = policy.update(batch).metrics.kl_reference
    for _ in range(10):
        last = policy.update(batch).metrics.kl_reference
    assert 0 < last < first


def test_importance_weights_scale_the_gradient(config: Config, groups: list[Group]) -> None:
    config.optimizer.max_grad_norm = 1e9
    policies = [Policy(config, Ranks()), Policy(config, Ranks())]
    pairs = zip(policies, (1.0, 0.5), strict=True)
    full, half = (
        policy.update(prepared(policy, groups, [weight] * 4)).metrics for policy, weight in pairs
    )
    assert half.grad_norm == pytest.approx(full.grad_norm / 2, rel=1e-4)


def test_an_update_whose_gradient_is_not_finite_is_skipped_and_several_stop_the_run(
    config: Config, groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learning.optimizer.MAX_SKIPPED_UPDATES", 1)
    policy = Policy(config, Ranks())
    good, bad = whole(groups, config), whole(groups, config)
    known(bad.advantages)[0][:] = float("nan")
    before = parameters(policy)
    assert policy.update(bad).metrics.skipped == 1
    for name, value in parameters(policy).items():
        assert torch.equal(value, before[name])
    assert policy.update(good).metrics.skipped == 0  # restarts the count
    policy.update(bad)
    with raises(NonFiniteGradients, field="optimizer.learning_rate"):
        policy.update(bad)


def test_an_entropy_bonus_raises_the_entropy(config: Config, groups: list[Group]) -> None:
    def entropy(coefficient: float) -> float:
        changed = config.model_copy(deep=True)
        changed.algorithm.entropy_coef = coefficient
        policy = Policy(changed, Ranks())
        with torch.no_grad():  # the entropy of a uniform distribution could not rise
            policy.model.get_output_embeddings().weight.mul_(8)
        for _ in range(5):
            metrics = policy.update(prepared(policy, [groups[2]])).metrics
        return metrics.entropy

    with_bonus = entropy(1.0)
    config.algorithm.kl_coef = 1e-9  # keeps the rows of the equal group, but moves nothing
    assert with_bonus > entropy(0.0) + 0.01


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 0, 0.1),
        ("constant", 9, 1.0),
        ("constant", 100, 1.0),
        ("linear", 4, 0.5),
        ("linear", 10, 1.0),
        ("linear", 60, 0.5),
        ("linear", 110, 0.0),
        ("cosine", 10, 1.0),
        ("cosine", 60, 0.5),
        ("cosine", 35, 0.8535534),
        ("cosine", 110, 0.0),
    ],
)
def test_learning_rate_hand_computed(schedule: str, step: int, expected: float) -> None:
    settings = OptimizerSection.model_validate(
        {"learning_rate": 1.0, "warmup_steps": 10, "lr_schedule": schedule}
    )
    assert learning_rate(step, 110, settings) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize(
    ("schedule", "arguments"),
    [
        ("linear", {}),
        ("cosine", {"num_cycles": 1.5}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_with_min_lr", {"min_lr": 2e-6}),
        ("cosine_warmup_with_min_lr", {"min_lr": 2e-6, "warmup_lr_rate": 0.2}),
        ("polynomial", {"power": 2.0, "lr_end": 1e-6}),
        ("inverse_sqrt", {"timescale": 20}),
        ("inverse_sqrt", {}),
        ("warmup_stable_decay", {"num_decay_steps": 12, "decay_type": "1-sqrt"}),
        (
            "warmup_stable_decay",
            {"num_decay_steps": 9, "num_stable_steps": 20, "min_lr_ratio": 0.2},
        ),
    ],
    ids=str,
)
def test_every_rate_is_that_of_the_scheduler_of_transformers(
    schedule: str, arguments: dict[str, Any], warmup: int
) -> None:
    """Each rate of the run, from that of an optimiser which their scheduler really moves; those of
    the warm-up are a step ahead."""
    steps = 40
    config = from_mapping(
        {
            "optimizer.learning_rate": 1e-5,
            "optimizer.warmup_steps": warmup,
            "optimizer.lr_schedule": schedule,
            "optimizer.lr_schedule_args": arguments,
        }
    )
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=1e-5)
    end = None if "num_stable_steps" in arguments else steps
    scheduler = get_scheduler(schedule, optimizer, warmup, end, arguments)
    theirs = []
    for _ in range(steps + 1):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()

    ours = [learning_rate(step, steps, config.optimizer) for step in range(steps)]
    assert ours == pytest.approx([*theirs[1 : warmup + 1], *theirs[warmup:steps]], rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "arguments", "message"),
    [
        ("linear", {"num_cycles": 2}, "num_cycles, which linear does not read.*leave it out"),
        ("cosine", {"num_cycle": 2}, "num_cycle, which cosine.*did you mean num_cycles"),
        ("polynomial", {"power": "two"}, "the power two.*a number"),
        ("polynomial", {"lr_end": 1.0}, "lr_end 1, which is not below optimizer.learning_rate"),
        ("cosine_with_min_lr", {}, "needs one lowest rate.*min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 0, "min_lr_rate": 0}, "needs one lowest rate"),
        ("warmup_stable_decay", {}, "give num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "step"}, "use one of linear"),
    ],
)
def test_arguments_that_a_schedule_does_not_have_are_refused(
    schedule: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping({"optimizer.lr_schedule": schedule, "optimizer.lr_schedule_args": arguments})


def test_engine_and_trainer_are_compared_on_a_batch_without_a_gradient(
    config: Config, groups: list[Group]
) -> None:
    """An engine with damaged weights gives wrong answers only: all rewards are equal then."""
    policy = Policy(config, Ranks())
    batch = prepared(policy, [groups[2]])
    own = score_batch(policy.scorer, batch, config, Ranks())
    sampled = [completion.logprobs for completion in groups[2].completions]
    differences = np.concatenate([abs(a - b) for a, b in zip(own, sampled, strict=True)])
    metrics = policy.update(batch).metrics
    assert metrics.delta_logprob_current == pytest.approx(float(differences.mean()), rel=1e-4)
    assert metrics.trained_tokens == 0
