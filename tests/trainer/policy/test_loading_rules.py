"""What a run loads, or refuses to load: which tokens end an answer, models that fail or that cannot be
packed, adapters in their checkpoints, checkpoints of other kinds of runs, directories of exports."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from common.settings.config import Config
from common.settings.sections import ModelSection
from learning.context import ContextGroup
from learning.layout import Packed, Padded
from learning.ranks import Ranks
from tests.support.batches.groups import off_policy_groups, prepared, save
from tests.support.errors import raises
from tests.support.models.tiny_models import make
from trainer.policy.export import export
from trainer.policy.identity import check_same, identity
from trainer.policy.policy import Policy
from trainer.policy.scorer import Scorer, load_scorer, stop_token_ids

CHECK = "trainer.policy.scorer.check_batch_independence"
VOCABULARY = 50


def _model(of_generation: Any, of_model: Any) -> Any:
    text = SimpleNamespace(eos_token_id=of_model)
    return SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=of_generation),
        config=SimpleNamespace(get_text_config=lambda: text, name_or_path="a/model"),
        get_input_embeddings=lambda: SimpleNamespace(num_embeddings=VOCABULARY),
    )


def test_the_tokens_that_end_an_answer_are_those_of_all_who_name_some() -> None:
    rng = np.random.default_rng(0)

    def listed() -> tuple[Any, set[int]]:
        found = rng.integers(0, VOCABULARY, rng.integers(0, 3)).tolist()
        if len(found) == 1 and rng.random() < 0.5:
            return found[0], {*found}
        return (found or None), {*found}

    for _ in range(60):
        generation, of_generation = listed()
        config, of_config = listed()
        further = rng.integers(0, VOCABULARY, rng.integers(0, 3)).tolist()
        own = int(rng.integers(VOCABULARY)) if rng.random() < 0.5 else None
        tokenizer = SimpleNamespace(eos_token_id=own)
        of_tokenizer = set() if own is None else {own}
        wanted = of_generation | of_config | of_tokenizer | {*further}
        model = _model(generation, config)
        if wanted:
            assert stop_token_ids(model, tokenizer, further) == sorted(wanted)
        else:
            with raises(ConfigError, field="model.name", value="a/model"):
                stop_token_ids(model, tokenizer, further)
        with raises(ConfigError, field="sampling.stop_token_ids", value=str(VOCABULARY)):
            stop_token_ids(model, tokenizer, [*further, VOCABULARY])


class Checks:
    """Answers of the check that a model computes each sequence alone, in turn."""

    def __init__(self, answers: Sequence[Exception | set[float]]) -> None:
        self.answers = list(answers)
        self.modes: list[tuple[bool, ...]] = []

    def __call__(self, *_: object, modes: tuple[bool, ...], **__: object) -> set[float]:
        self.modes.append(modes)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _dependent() -> ConfigError:
    return ConfigError("rows of a pass influence one another", field="model.name", value="a")


@pytest.mark.parametrize("trained", [True, False])
def test_a_model_whose_packed_rows_are_not_independent_is_padded(
    config: Config, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    checks = Checks([_dependent(), {0.0, 0.25}])
    monkeypatch.setattr(CHECK, checks)
    scorer = load_scorer(config.model, Ranks(), config, trained=trained)
    assert scorer.layout is Padded
    # Only an update drops anything.
    assert checks.modes == [(False, True) if trained else (False,)] * 2
    assert scorer.dropout == ["attention_dropout 0.0"]
    trainable = {parameter.requires_grad for parameter in scorer.parameters()}
    assert trainable == {trained}


def test_a_model_that_is_not_independent_either_way_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> Any:
        return load_scorer(config.model, Ranks(), config)

    refused: list[tuple[str, list[Exception | set[float]], type[Exception]]] = [
        ("auto", [_dependent(), _dependent()], ConfigError),
        ("on", [_dependent()], ConfigError),
        ("off", [_dependent()], ConfigError),
        ("auto", [RuntimeError("of the model's own")], ConfigError),
        ("auto", [torch.OutOfMemoryError("too large")], torch.OutOfMemoryError),
    ]
    for packing, answers, kind in refused:
        config.trainer.packing = packing  # type: ignore[assignment]  # one of these words
        checks = Checks(answers)
        monkeypatch.setattr(CHECK, checks)
        with pytest.raises(kind) as error:
            load()
        assert not checks.answers
        if isinstance(error.value, ConfigError):
            assert error.value.field == "model.name"
    config.trainer.packing = "auto"
    monkeypatch.setattr(CHECK, Checks([set()]))
    assert load().layout is Packed


def test_ranks_that_compute_rows_together_need_packed_ones() -> None:
    together = ContextGroup.__new__(ContextGroup)
    together.size = 2
    model = make("qwen3")
    with raises(ConfigError, field="parallel.context_size", value="2"):
        Scorer(model, "off", context=together)
    assert Scorer(model, "auto", context=together).layout is Packed


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_an_adapter_goes_on_from_its_checkpoint_and_starts_no_run(
    config: Config, tmp_path: Path
) -> None:
    config.lora.rank = 4
    config.lora.target_modules = ["q_proj", "down_proj"]
    policy = Policy(config, Ranks())
    policy.update(prepared(policy, off_policy_groups()))
    policy.step = 1
    path = save(policy, tmp_path / "checkpoints")
    assert json.loads((path / "adapter_config.json").read_text())["inference_mode"] is True
    assert policy.model.active_adapters() == ["default"]

    resumed, state, found = Policy.resume(config, Ranks(), tmp_path)

    assert found == path
    assert state is not None
    assert (resumed.step, state.position) == (1, 7)
    for each in (policy, resumed):
        each.update(prepared(each, off_policy_groups()))
    after = dict(policy.model.named_parameters())
    moved = [name for name in after if "lora_B" in name]
    assert len(moved) == 4, "two matrices of two layers"
    for name, parameter in resumed.model.named_parameters():
        torch.testing.assert_close(parameter, after[name], atol=1e-6, rtol=0)
    assert all(after[name].any() for name in moved)

    with raises(ConfigError, field="model.name", value=str(path)):
        load_scorer(ModelSection(name=str(path)), Ranks(), config)


def test_a_checkpoint_of_another_kind_of_run_is_named(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = run / "checkpoints" / "step_000001"
    of_rewards = identity(config, "rewards")
    of_answers = identity(config, "answers")
    for before, now, maker in (
        (of_answers, of_rewards, "rlhf sft"),
        (of_rewards, of_answers, "the trainer"),
    ):
        with pytest.raises(ConfigError, match=f"was made by {maker}") as error:
            check_same(before, now, path)
        assert (error.value.field, error.value.value) == ("trainer.run_dir", str(run))
    check_same(of_rewards, of_rewards, path)

    config.algorithm.kl_coef = 0.1
    config.model.reference = str(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    with raises(ConfigError, field="model.name", value=config.model.reference):
        identity(config)


def _without_a_directory(tmp_path: Path, policy_dir: Path) -> tuple[Path, Path, str, Path]:
    return tmp_path / "none", tmp_path / "out", "CHECKPOINT", tmp_path / "none"


def _onto_another(tmp_path: Path, policy_dir: Path) -> tuple[Path, Path, str, Path]:
    (tmp_path / "out").mkdir()
    return policy_dir, tmp_path / "out", "OUT", tmp_path / "out"


def _of_what_cannot_be_loaded(tmp_path: Path, policy_dir: Path) -> tuple[Path, Path, str, Path]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return model, tmp_path / "out", "CHECKPOINT", model


@pytest.mark.parametrize("case", [_without_a_directory, _onto_another, _of_what_cannot_be_loaded])
def test_an_export_that_cannot_be_made_names_its_argument(
    case: Callable[[Path, Path], tuple[Path, Path, str, Path]], tmp_path: Path, policy_dir: Path
) -> None:
    checkpoint, out, field, value = case(tmp_path, policy_dir)
    before = sorted(tmp_path.rglob("*"))
    with raises(ConfigError, field=field, value=str(value)):
        export(checkpoint, out)
    assert sorted(tmp_path.rglob("*")) == before
