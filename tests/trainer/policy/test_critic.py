"""The critic's computations, which do not depend on how the batch is split or on a save in
between."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from common.errors import ConfigError
from common.settings.config import Config, load
from learning.batching import Indices, Sizes
from learning.optimizer import NonFiniteGradients
from learning.ranks import Ranks
from tests.support.batches.critic import VOCABULARY, batch_of, make_batch
from tests.support.errors import raises
from tests.support.models.tiny_models import write
from tests.support.processes.ranks import run_ranks
from trainer.algorithms.batch import Batch
from trainer.policy.critic import Critic, value_function


@pytest.fixture
def settings(policy_dir: Path) -> list[str]:
    """Returns the settings of a small critic as command-line arguments."""
    words = ["--model.name", str(policy_dir), "--algorithm.name", "ppo"]
    return [*words, "--critic.learning_rate", "1e-3"]


@pytest.fixture
def config(settings: list[str]) -> Config:
    return load(settings, {})


def save(critic: Critic, directory: Path) -> None:
    critic.snapshots(gathered=True)["critic"].write(directory)


def parameters(critic: Critic) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in critic.model.module.named_parameters()
    }


def trained(config: Config, batches: int = 1) -> Critic:
    critic = Critic(config, Ranks())
    for batch in range(batches):
        critic.update(make_batch(9, seed=batch), seed=batch)
    return critic


def assert_same(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, atol=tolerance, rtol=0, msg=name)


def test_the_first_values_are_exactly_zero(config: Config) -> None:
    batch = make_batch(7)
    values = Critic(config, Ranks()).values(batch)
    assert [len(value) for value in values] == [row.completion_tokens for row in batch.rows]
    assert all(value.dtype == np.float32 and not value.any() for value in values)


def test_only_the_critic_learns_in_the_first_steps(config: Config) -> None:
    config.critic.warmup_steps = 2
    critic = Critic(config, Ranks())
    assert [critic.warming_up(step) for step in range(4)] == [True, True, False, False]


def test_values_are_those_of_the_state_before_each_token_row_by_row(config: Config) -> None:
    """Compares padded, split and selected rows with a plain forward pass of each row alone."""
    critic = trained(config)
    batch = make_batch(7)
    config.trainer.micro_batch_tokens = 40
    for sequence, values in zip(batch.tokens.values(), critic.values(batch), strict=True):
        ids = torch.tensor(np.concatenate([sequence.prompt_ids, sequence.completion_ids]))[
            None
        ].long()
        with torch.no_grad():
            expected = critic.model.module(input_ids=ids).logits[
                0, len(sequence.prompt_ids) - 1 : -1, 0
            ]
        np.testing.assert_allclose(values, expected.numpy(), atol=1e-6)
        assert values.any()
    assert critic.values(make_batch(0)) == []


@pytest.mark.integration
def test_an_update_learns_the_returns_of_a_batch(config: Config) -> None:
    config.critic.value_clip = None
    critic, rows = Critic(config, Ranks()), make_batch(9)
    first = critic.update(rows, seed=0)
    for step in range(1, 60):
        last = critic.update(rows, seed=step)
    assert first.value_loss is not None
    assert last.value_loss is not None
    assert last.value_loss < first.value_loss / 2
    assert critic.step == 60


def test_metrics_hand_computed(config: Config) -> None:
    config.algorithm.update_epochs = config.algorithm.mini_batches = 1
    batch = make_batch(5)
    assert batch.values is not None
    assert batch.returns is not None
    metrics = Critic(config, Ranks()).update(batch, seed=0)
    old = np.concatenate(batch.values)
    returns = np.concatenate(batch.returns)
    weights = np.concatenate([np.full(row.completion_tokens, row.weight) for row in batch.rows])
    bounded = old + np.clip(-old, -0.2, 0.2)  # the values of a new critic are 0
    losses = 0.5 * np.maximum(returns**2, (bounded - returns) ** 2)
    assert metrics.value_loss == pytest.approx((losses * weights).mean(), rel=1e-5)
    assert metrics.clip_fraction == pytest.approx(
        ((bounded - returns) ** 2 > returns**2 + 1e-9).mean()
    )
    assert metrics.explained_variance == pytest.approx(
        1 - (returns - old).var() / returns.var(), rel=1e-5
    )
    assert (metrics.value_mean, metrics.return_mean) == pytest.approx(
        (old.mean(), returns.mean()), rel=1e-5
    )
    assert metrics.grad_norm
    assert metrics.skipped == 0
    batch.returns = [np.ones_like(row) for row in batch.returns]
    assert Critic(config, Ranks()).update(batch, seed=0).explained_variance == 0


class Recorded(Critic):
    """A critic that keeps the rows of each of its mini-batches."""

    def _accumulate(self, batch: Batch, sizes: Sizes, indices: Indices) -> torch.Tensor:
        self.parts = [*getattr(self, "parts", []), indices.tolist()]
        return super()._accumulate(batch, sizes, indices)


def test_every_pass_has_each_row_once_in_an_order_of_its_own(config: Config) -> None:
    config.algorithm.update_epochs, config.algorithm.mini_batches = 3, 4
    critic = Recorded(config, Ranks())
    for seed in (0, 100):
        critic.update(make_batch(9), seed=seed)
    passes = [[row for part in critic.parts[i : i + 4] for row in part] for i in range(0, 24, 4)]
    assert [sorted(order) for order in passes] == [list(range(9))] * 6
    assert len(set(map(tuple, passes))) == 6, "the same shuffle in two passes"


@pytest.mark.integration
@pytest.mark.parametrize("max_tokens", [1, 40])
def test_micro_batches_do_not_change_the_update(config: Config, max_tokens: int) -> None:
    whole = parameters(trained(config))
    config.trainer.micro_batch_tokens = max_tokens
    assert_same(parameters(trained(config)), whole, 2e-5)


@pytest.mark.integration
@pytest.mark.parametrize(
    "cut",
    [
        ["--algorithm.mini_batches", "9", "--parallel.shard_size", "1"],
        ["--algorithm.mini_batches", "1"],
        ["--algorithm.mini_batches", "2", "--parallel.context_size", "2"],
    ],
)
def test_two_processes_give_the_update_of_one(
    config: Config, settings: list[str], tmp_path: Path, cut: list[str]
) -> None:
    """Replicas with mini-batches of one row, which leave one rank idle; shards with equal passes on
    both ranks; two ranks that compute every row together."""
    config.algorithm.mini_batches = int(cut[1])
    one = trained(config, batches=2)
    run_ranks(2, "critic_ranks", str(tmp_path), *settings, *cut)
    assert_same(load_file(tmp_path / "new.safetensors"), parameters(one), 2e-5)
    shared = [np.load(tmp_path / f"values{rank}.npy") for rank in (0, 1)]
    together = "--parallel.context_size" in cut
    alone = [not np.isnan(values).any() for values in shared]
    assert alone == [together, together], "a rank has the values of its own rows"
    np.testing.assert_allclose(
        np.nanmean(shared, axis=0), np.concatenate(one.values(make_batch(7))), atol=2e-5
    )


@pytest.mark.integration
@pytest.mark.slow
def test_two_processes_that_own_the_experts_together(
    config: Config, settings: list[str], tmp_path: Path
) -> None:
    model = write("Qwen3-MoE", tmp_path / "model", vocab_size=VOCABULARY, num_experts=4)
    config.critic.model = str(model)
    one = trained(config, batches=2)
    divided = ["--critic.model", str(model), "--parallel.expert_size", "2"]
    run_ranks(2, "critic_ranks", str(tmp_path), *settings, *divided)
    assert_same(load_file(tmp_path / "new.safetensors"), parameters(one), 2e-5)


def test_saved_critic_continues_exactly(config: Config, tmp_path: Path) -> None:
    critic = trained(config, batches=2)
    save(critic, tmp_path)
    again = Critic(config, Ranks(), tmp_path)
    assert again.step == 2
    for value, expected in zip(
        again.values(make_batch(4)), critic.values(make_batch(4)), strict=True
    ):
        assert np.array_equal(value, expected)
    rows = make_batch(9, seed=5)
    assert_same(parameters(again), parameters(critic), 0)
    first, second = (asdict(each.update(rows, seed=5)) for each in (critic, again))
    assert first == pytest.approx(second, rel=1e-5)  # rounding of sums depends on memory layout
    assert_same(parameters(again), parameters(critic), 1e-6)


def test_damaged_or_missing_checkpoint_is_named(config: Config, tmp_path: Path) -> None:
    save(trained(config), tmp_path / "saved")
    (tmp_path / "saved" / "critic_state.json").write_bytes(b"x" * 100)
    for directory in (tmp_path / "saved", tmp_path / "none"):
        with pytest.raises(ConfigError) as error:
            Critic(config, Ranks(), directory)
        assert (error.value.field, error.value.value) == ("checkpoint", str(directory))


def test_a_model_that_cannot_be_loaded_is_named(config: Config) -> None:
    config.critic.model = "/nowhere/to/be/found"
    with raises(ConfigError, field="critic.model", value="/nowhere/to/be/found"):
        Critic(config, Ranks())


def test_the_critic_may_start_from_another_model_than_the_policy(
    config: Config, tmp_path: Path
) -> None:
    first = parameters(Critic(config, Ranks()))
    changed = Critic(config, Ranks())
    with torch.no_grad():
        for parameter in changed.model.module.parameters():
            parameter.add_(1)
    changed.model.module.save_pretrained(tmp_path)
    config.critic.model = str(tmp_path)
    found = parameters(Critic(config, Ranks()))
    assert not any(found[name].any() for name in found if name.startswith("score")), (
        "with a new head"
    )
    assert_same(
        {name: value for name, value in found.items() if not name.startswith("score")},
        {name: value + 1 for name, value in first.items() if not name.startswith("score")},
        0,
    )


@pytest.mark.integration
def test_a_models_own_dropout_plays_no_role(
    config: Config, policy_dir: Path, tmp_path: Path
) -> None:
    """Values of the same tokens are compared, so an update and the values after it are those of the
    model without it."""
    without = trained(config)
    shape = AutoConfig.from_pretrained(policy_dir)
    shape.attention_dropout = 0.5
    model = AutoModelForCausalLM.from_pretrained(policy_dir, config=shape)
    model.save_pretrained(tmp_path / "dropout")
    config.critic.model = str(tmp_path / "dropout")

    critic = trained(config)

    assert critic.model.module.config.attention_dropout == 0.5
    assert_same(parameters(critic), parameters(without), 2e-5)
    for value, expected in zip(
        critic.values(make_batch(4)), without.values(make_batch(4)), strict=True
    ):
        np.testing.assert_allclose(value, expected, atol=2e-5)
        assert value.any()


@pytest.mark.parametrize(
    "kind",
    [
        "olmo2",
        *(pytest.param(kind, marks=pytest.mark.integration) for kind in ("gemma3_text", "opt")),
    ],
)
def test_a_decoder_without_a_token_classifier_can_be_a_critic(
    kind: str, config: Config, tmp_path: Path
) -> None:
    """We add the value head; the body is the language model's, and the checkpoint uses other
    critics' names."""
    assert kind not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    shape = AutoConfig.for_model(kind, vocab_size=VOCABULARY, num_key_value_heads=1, **sizes)
    language = AutoModelForCausalLM.from_config(shape)
    language.save_pretrained(tmp_path / "language")
    config.critic.model = str(tmp_path / "language")
    critic, rows = Critic(config, Ranks()), make_batch(4)
    body = dict(language.named_parameters())
    own = {
        name
        for name, value in parameters(critic).items()
        if not (name in body and torch.equal(value, body[name]))
    }
    assert own == {"score.weight", "score.bias"}
    assert not np.concatenate(critic.values(make_batch(3))).any()
    critic.update(rows, seed=0)
    save(critic, tmp_path / "saved")
    again = Critic(config, Ranks(), tmp_path / "saved")
    assert_same(parameters(again), parameters(critic), 0)
    assert np.concatenate(again.values(make_batch(3))).any()


def test_tokens_outside_the_vocabulary_and_long_rows_are_refused(config: Config) -> None:
    critic = Critic(config, Ranks())
    ids = np.array([5, 6], np.int32)
    for row, told in (
        ((np.array([VOCABULARY], np.int32), ids), "tokens 0 to 299"),
        ((ids, np.array([5, 2**31 - 1], np.int32)), "tokens 0 to 299"),
        ((np.ones(500, np.int32), np.ones(13, np.int32)), "at most 512 tokens"),
    ):
        with pytest.raises(ConfigError, match=told) as error:
            critic.values(batch_of([(ids, ids), row]))
        assert error.value.field == "critic.model"


def test_a_checkpoint_of_a_run_without_a_critic_is_refused(config: Config, tmp_path: Path) -> None:
    with raises(ConfigError, field="algorithm.advantage") as error:
        value_function(config, Ranks(), tmp_path)
    assert error.value.field == "algorithm.advantage"


@pytest.mark.integration
def test_the_checkpoint_is_a_hugging_face_model(config: Config, tmp_path: Path) -> None:
    critic = trained(config)
    save(critic, tmp_path)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert torch.equal(model.score.weight, critic.model.module.score.weight)


def test_gradients_that_are_not_finite_are_skipped_and_several_stop_the_run(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.algorithm.update_epochs = config.algorithm.mini_batches = 1
    monkeypatch.setattr("learning.optimizer.MAX_SKIPPED_UPDATES", 1)
    critic, good, bad = Critic(config, Ranks()), make_batch(4), make_batch(4)
    bad.rows[0] = replace(bad.rows[0], weight=float("inf"))
    before = parameters(critic)
    metrics = critic.update(bad, seed=0)
    assert (metrics.skipped, metrics.grad_norm, metrics.value_loss, metrics.clip_fraction) == (
        1,
        None,
        None,
        None,
    )
    assert_same(parameters(critic), before, 0)
    assert critic.update(good, seed=0).skipped == 0
    critic.update(bad, seed=0)
    with pytest.raises(NonFiniteGradients):
        critic.update(bad, seed=0)


def test_a_skipped_mini_batch_is_not_in_the_metrics(config: Config) -> None:
    config.algorithm.update_epochs, config.algorithm.mini_batches = 1, 2
    batch = make_batch(2)
    good = batch_of([(row.prompt_ids, row.completion_ids) for row in batch.tokens.values()][1:])
    assert batch.values is not None
    assert batch.returns is not None
    good.values = batch.values[1:]
    good.returns = batch.returns[1:]
    batch.rows = [
        replace(batch.rows[0], weight=float("inf")),
        replace(batch.rows[1], weight=1.0),
    ]
    metrics = Critic(config, Ranks()).update(batch, seed=0)
    assert metrics.skipped == 1
    config.algorithm.mini_batches = 1
    alone = Critic(config, Ranks()).update(good, seed=0)
    assert (metrics.grad_norm, metrics.value_loss) == pytest.approx(
        (alone.grad_norm, alone.value_loss), rel=1e-4
    )


@pytest.mark.integration
def test_every_setting_changes_the_update(config: Config) -> None:
    base = parameters(trained(config, batches=2))
    for name, value in {
        "critic.learning_rate": 2e-3,
        "algorithm.update_epochs": 1,
        "algorithm.mini_batches": 1,
        "critic.value_clip": 1e-3,
        "optimizer.max_grad_norm": 1e-6,
    }.items():
        changed = config.model_copy(deep=True)
        section, _, key = name.partition(".")
        setattr(getattr(changed, section), key, value)
        new = parameters(trained(changed, batches=2))
        assert any(not torch.equal(new[each], base[each]) for each in base), name
