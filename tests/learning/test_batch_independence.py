"""A sequence is scored and generated as if alone, or the model is refused."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM

from common.errors import ConfigError
from common.settings.config import Config, from_mapping
from learning.attention import unpackable
from learning.batch_independence import (
    _eagerly,
    check_batch_independence,
    fix_rotary_factors,
)
from learning.layout import Padded
from learning.ranks import Ranks
from services.engine.engine import Engine
from services.engine.jobs import GenerationJob, SamplingParams
from services.engine.model import Model
from tests.support.errors import raises
from tests.support.models.families import FAMILIES
from tests.support.models.tiny_models import KINDS, make
from trainer.policy.policy import Policy
from trainer.policy.scorer import Scorer
from trainer.policy.value_model import load_value_model

ORIGINAL, POSITIONS = 24, 128
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 3.0, 8.0, 20.0]}
LONGROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS},
    "original_max_position_embeddings": ORIGINAL,
    "max_position_embeddings": POSITIONS,
}
MINICPM: dict[str, Any] = {
    "rope_parameters": LONGROPE["rope_parameters"] | {"original_max_position_embeddings": ORIGINAL},
    "max_position_embeddings": POSITIONS,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "dim_model_base": 32,
}
DYNAMIC: dict[str, Any] = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "max_position_embeddings": POSITIONS,
}
BY_LENGTH = {
    "phi3": ("phi3", LONGROPE),
    "minicpm3": ("minicpm3", MINICPM),
    "dynamic": ("llama", DYNAMIC),
}


def settings(directory: Path, context: int, **more: Any) -> Config:
    bounds = {
        "rollout.engine": "embedded",
        "rollout.max_context_tokens": context,
        "sampling.max_new_tokens": 8,
    }
    return from_mapping({"model.name": str(directory), **bounds, **more})


def written(directory: Path, kind: str, more: dict[str, Any]) -> Path:
    FAMILIES["Phi-3"].tokenizer().save_pretrained(directory)
    make(kind, vocab_size=400, **more).save_pretrained(directory)
    return directory


def rows(*lengths: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 300, length).astype(np.int32) for length in lengths]


def scored(scorer: Scorer, sequences: list[Any], layout: Any) -> list[Tensor]:
    prompts, completions = [each[:3] for each in sequences], [each[3:] for each in sequences]
    targets = torch.from_numpy(np.concatenate(completions)).long()
    with torch.no_grad():
        found = scorer(layout.of(prompts, completions), targets, 1.0).logprobs
    return list(found.split([len(each) for each in completions]))


@contextmanager
def running(directory: Path, context: int) -> Iterator[Engine]:
    engine = Engine(Model(directory, context))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def generated(engine: Engine, prompts: list[Any], tokens: int) -> list[Any]:
    greedy = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    jobs = [GenerationJob(str(i), prompt.tolist(), greedy) for i, prompt in enumerate(prompts)]
    engine.submit(jobs)
    return [job.done.result(60)[0] for job in jobs]


@pytest.mark.parametrize("context", [ORIGINAL, 100])
@pytest.mark.parametrize("kind", BY_LENGTH)
def test_a_sequence_is_scored_and_generated_as_if_alone(
    kind: str, context: int, tmp_path: Path
) -> None:
    directory = written(tmp_path, *BY_LENGTH[kind])
    scorer = Policy(settings(directory, context), Ranks()).scorer.eval()
    sequences = rows(12, context, context // 2, 8)
    for layout in {scorer.layout, Padded}:
        together = scored(scorer, sequences, layout)
        for sequence, found in zip(sequences, together, strict=True):
            torch.testing.assert_close(
                found, scored(scorer, [sequence], layout)[0], atol=1e-5, rtol=0
            )

    prompts = rows(5, context - 12, 7)  # the second crosses the length at which the factors change
    with running(directory, context) as engine:
        together_generated = generated(engine, prompts, 12)
        alone = [generated(engine, [prompt], 12)[0] for prompt in prompts]
    for prompt, beside, own in zip(prompts, together_generated, alone, strict=True):
        assert beside.tokens == own.tokens
        sequence = np.concatenate([prompt, own.tokens]).astype(np.int32)
        by_trainer = scored(scorer, [sequence], scorer.layout)[0][len(prompt) - 3 :]
        torch.testing.assert_close(by_trainer, torch.tensor(own.logprobs), atol=1e-5, rtol=0)
        torch.testing.assert_close(by_trainer, torch.tensor(beside.logprobs), atol=1e-5, rtol=0)


def test_within_the_original_length_nothing_changes_and_beyond_it_the_saved_model_is_the_trained_one(
    tmp_path: Path,
) -> None:
    directory = written(tmp_path / "model", "phi3", LONGROPE)
    plain = AutoModelForCausalLM.from_pretrained(directory)
    sequence = torch.arange(3, 15)[None]
    with torch.no_grad():
        own = plain(sequence).logits
        short = Policy(settings(directory, ORIGINAL), Ranks()).model.eval()
        torch.testing.assert_close(short(sequence).logits, own)
        assert (
            short.config.to_dict()["rope_parameters"] == plain.config.to_dict()["rope_parameters"]
        )
        critic = load_value_model(settings(directory, ORIGINAL + 1), Ranks())
        assert critic.module.config.rope_parameters["short_factor"] == FACTORS["long_factor"]

        long = Policy(settings(directory, ORIGINAL + 1), Ranks()).model.eval()
        assert (long(sequence).logits - own).abs().max() > 1e-2
        long.save_pretrained(tmp_path / "saved")
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        torch.testing.assert_close(saved(sequence).logits, long(sequence).logits)


def test_without_fixed_factors_the_check_finds_the_dependence(tmp_path: Path) -> None:
    """What `fix_rotary_factors` prevents is found by the check, which knows nothing of LongRoPE."""
    for kind, more, bound in [
        ("phi3", LONGROPE, 100),
        ("minicpm3", MINICPM, 100),
        ("llama", DYNAMIC, None),
    ]:
        model = make(kind, vocab_size=400, **more)
        if kind == "llama":  # its frequencies change only beyond the positions that a run may use
            model.model.rotary_emb.config = copy.deepcopy(model.config)
            model.config.max_position_embeddings = 4 * POSITIONS
        with pytest.raises(ConfigError, match="another one is computed beside it"):
            check(model, bound)


def check(
    model: Any, max_tokens: int | None = None, modes: tuple[bool, ...] = (False, True)
) -> set[float]:
    scorer = Scorer(model)
    return check_batch_independence(
        model, scorer.next_scores, torch.device("cpu"), max_tokens, modes=modes
    )


class Mixed(nn.Module):  # type: ignore[misc]  # torch is not typed for mypy here
    """A layer of a made-up model that mixes the tokens of a batch."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__()
        self.layer, self.how = layer, how
        self.norm = nn.BatchNorm1d(32)
        if hasattr(layer, "attention_type"):
            self.attention_type = layer.attention_type

    def forward(self, states: Tensor, **options: Any) -> Tensor:
        states = self.layer(states, **options)
        if self.how == "norm":
            return self.norm(states.flatten(0, 1)).view_as(states)
        if (
            self.how == "capacity"
        ):  # a router whose first expert has room for some tokens of the whole batch
            flat = states.flatten(0, 1)
            room = torch.arange(len(flat)) >= len(flat) // 2
            return torch.where(room[:, None], flat, 2 * flat).view_as(states)
        return states - states.mean((0, 1))


@pytest.mark.parametrize("how", ["norm", "capacity", "mean"])
def test_made_up_models_that_mix_a_batch_are_refused(how: str) -> None:
    model = make("llama")
    model.model.layers[0] = Mixed(model.model.layers[0], how)
    model.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(ConfigError, match=r"another one is computed beside it.*model\.name"):
        check(model)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0)
    assert not model.training
    if how == "norm":  # a batch norm mixes nothing in evaluation mode
        check(model, modes=(False,))


@pytest.mark.parametrize("kind", [*KINDS, "olmo2"])
def test_families_pass_the_check_which_leaves_no_trace(kind: str) -> None:
    model = make(kind)
    state = torch.get_rng_state()
    assert check(model) == set()
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training


def test_a_model_that_routes_at_random_in_training_is_refused_with_that_reason() -> None:
    model = make("phimoe", num_local_experts=4, input_jitter_noise=0.01)  # as Phi-3.5-MoE
    state = torch.get_rng_state()
    with pytest.raises(
        ConfigError, match="draws random numbers in training mode, not only for dropout"
    ):
        check(model)
    assert torch.equal(torch.get_rng_state(), state)
    check(model, modes=(False,))


def test_a_model_whose_layers_pass_no_options_on_is_padded(tmp_path: Path) -> None:
    directory = written(tmp_path, "nemotron", {})
    model = make("nemotron", vocab_size=400)
    assert unpackable(model) is None
    with raises(ConfigError, field="trainer.packing"):
        check(model)
    config = settings(directory, 100)
    assert Policy(config, Ranks()).scorer.layout is Padded
    config.trainer.packing = "on"
    with raises(ConfigError, field="trainer.packing"):
        Policy(config, Ranks())


def test_the_check_names_the_rates_of_dropout_in_updates() -> None:
    model = make(
        "gpt2", n_embd=32, n_head=4, n_layer=2, resid_pdrop=0.2, attn_pdrop=0.1, embd_pdrop=0.0
    )
    assert check(model) == {0.1, 0.2}
    assert check(model, modes=(False,)) == set()


def test_the_policy_knows_which_settings_drop_numbers_in_updates(tmp_path: Path) -> None:
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.3, "resid_pdrop": 0.1}
    gpt2 = written(tmp_path / "gpt2", "gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, **dropout})
    assert Policy(settings(gpt2, 100), Ranks()).scorer.dropout == [
        "resid_pdrop 0.1",
        "embd_pdrop 0.3",
    ]
    llama = written(tmp_path / "llama", "llama", {"attention_dropout": 0.1})
    adapter = settings(llama, 100, **{"lora.rank": 2, "lora.dropout": 0.25})
    assert Policy(adapter, Ranks()).scorer.dropout == ["attention_dropout 0.1", "lora.dropout 0.25"]
    assert (
        Policy(settings(written(tmp_path / "plain", "llama", {}), 100), Ranks()).scorer.dropout
        == []
    )


def test_factors_of_every_kind_of_layer_are_fixed() -> None:
    config = AutoConfig.for_model(
        "phi3", head_dim=8, hidden_size=32, num_attention_heads=4, **LONGROPE
    )
    each = config.rope_parameters
    fix_rotary_factors(config, ORIGINAL)
    assert each["short_factor"] == FACTORS["short_factor"]
    fix_rotary_factors(config, ORIGINAL + 1)
    assert each["short_factor"] == each["long_factor"] == FACTORS["long_factor"]


def test_layers_are_compiled_again_after_two_checks_at_once() -> None:
    """As a trainer and its engine make them in one process, each in a thread of its own."""
    torch._dynamo.reset()
    counters.clear()
    first, second = _eagerly(), _eagerly()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    torch.compile(torch.sin, backend="eager")(torch.zeros(2))
    assert counters["stats"]["unique_graphs"] == 1
