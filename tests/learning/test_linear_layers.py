"""Packed rows of models with linear layers (Mamba, gated delta rule, short convolution) give the
results of each row alone."""

import json
import math
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from common.errors import ConfigError
from common.settings.config import load
from common.settings.sections import TrainerSection
from learning.batch_independence import check_batch_independence
from learning.layout import Packed, Padded, layout_for
from learning.linear_layers import LinearLayer, StateRows, continues_states
from learning.ranks import Ranks
from learning.sharding import prepare
from tests.support.batches.groups import VOCABULARY
from tests.support.batches.sharding import run_cases
from tests.support.errors import raises
from tests.support.models.rows_alone import ROWS, alone, assert_same, results, rows, sizes
from tests.support.models.tiny_models import HYBRIDS, make, write
from tests.support.workers.sharded_policies import learned
from trainer.policy.policy import Policy
from trainer.policy.scorer import Scorer
from trainer.policy.value_model import ValueModel


def hybrid(kind: str) -> PreTrainedModel:
    model: PreTrainedModel = make(kind, **sizes(HYBRIDS[kind]))
    return model


@pytest.fixture
def _shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a further call of a layer cost nothing, so that few tokens suffice to share a prompt."""
    monkeypatch.setattr("learning.linear_layers._CALL", 0)


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize("kind", HYBRIDS)
def test_packed_rows_equal_rows_alone(kind: str) -> None:
    model = hybrid(kind)
    expected = alone(hybrid(kind), "mixed")
    assert_same(results(model, Packed, "mixed"), expected)
    assert_same(results(model, Padded, "mixed"), expected)


@pytest.mark.parametrize("call", [0, 20, 512])
@pytest.mark.parametrize("name", ROWS)
def test_any_rows_in_many_calls_and_in_few(
    name: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 20, the prompts of one call differ in length: a prompt's end is computed with each
    completion."""
    monkeypatch.setattr("learning.linear_layers._CALL", call)
    for kind in ("bamba", "lfm2"):
        assert_same(results(hybrid(kind), Packed, name), alone(hybrid(kind), name))


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize("kept", [True, "selective"])
def test_layers_that_are_computed_again(kept: bool | str) -> None:
    settings = TrainerSection.model_validate({"activation_checkpointing": kept})
    model = hybrid("qwen3_5_text")
    layout_for(model, "on")
    prepare(model, settings, trained=True, device=torch.device("cpu"))
    model.train()
    assert_same(results(model, Packed, "groups"), alone(hybrid("qwen3_5_text"), "groups"))


# dynamo triggers it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize("checkpointing", [True, False, "selective"])
def test_layers_that_are_compiled(
    checkpointing: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer whose rows change with each micro-batch has its other parts compiled."""
    # Only the graphs of dynamo and autograd matter here, so the slow C++ compiler is left out.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = hybrid("lfm2")
    layout_for(model, "on")
    settings = TrainerSection.model_validate(
        {"activation_checkpointing": checkpointing, "compile": True}
    )
    prepare(model, settings, trained=True, device=torch.device("cpu"))
    model.train()
    torch.compiler.reset()  # else graphs of another run serve this one
    linear = model.model.layers[0]
    compiled = {name for name, part in linear.named_children() if "forward" in vars(part)}
    around = {"feed_forward", "operator_norm", "ffn_norm"}
    assert compiled == {"conv"} | (around if checkpointing != "selective" else set())
    counters.clear()
    for name in ("groups", "mixed"):
        assert_same(results(model, Packed, name), alone(hybrid("lfm2"), name))
    if checkpointing != "selective":
        assert counters["stats"]["unique_graphs"] > 0


def test_a_prompt_is_computed_once_and_its_state_continues() -> None:
    """The example of the module: 600 prompts of a token would cost less than a further call."""
    prompt = np.arange(700, dtype=np.int32)
    completions = [np.arange(4, dtype=np.int32), np.arange(2, dtype=np.int32)]
    columns = Packed.of([prompt, prompt], completions).segments.columns
    shared = StateRows.of(columns, continues=True)
    assert shared.calls == [(1, 700), (2, 3)]
    assert (shared.heads, shared.tails) == (1, 1)
    assert shared.states.tolist() == [0, 0]
    assert shared.tokens[700:].tolist() == [700, 701, 702, 703, 0, 0]
    assert shared.back.tolist() == list(range(704))

    again = StateRows.of(columns, continues=False)
    assert again.calls == [(2, 703)]
    assert (again.heads, again.tails) == (0, 0)
    short = Packed.of([prompt[:500]] * 2, completions).segments.columns
    assert StateRows.of(short, continues=True).heads == 0, "a call would cost more"


def test_layers_that_cannot_continue_from_a_state_are_recognised() -> None:
    found = {kind: continues_states(hybrid(kind)) for kind in HYBRIDS}
    assert {kind for kind, continues in found.items() if not continues} == {"jamba"}
    assert continues_states(make("qwen2")) is None


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "mamba2"])
def test_a_state_that_reaches_another_row_is_found_at_the_start(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> set[float]:
        scorer = Scorer(hybrid(kind), "on")
        return check_batch_independence(
            scorer.model, scorer.next_scores, torch.device("cpu"), max_tokens=None
        )

    assert check() == set()

    def whole_line(self: Any, hidden_states: torch.Tensor, **options: Any) -> Any:
        return self._forward(hidden_states, **options)

    monkeypatch.setattr(LinearLayer, "_by_rows", whole_line)
    with pytest.raises(ConfigError, match="another one is computed beside it"):
        check()


def test_a_model_that_does_not_pass_its_options_on_is_refused() -> None:
    """The first Mamba; the trainer then pads its rows."""
    scorer = Scorer(make("mamba", state_size=8), "on")
    with raises(ConfigError, field="trainer.packing"):
        scorer.next_scores(torch.arange(8)[None], None)


def test_values_are_the_same_packed_and_padded() -> None:
    values = []
    for packing in ("on", "off"):
        module = make("bamba", **sizes(HYBRIDS["bamba"])).model
        module.score = torch.nn.Linear(32, 1, bias=False)
        torch.nn.init.normal_(module.score.weight, generator=torch.Generator().manual_seed(0))
        model = ValueModel(module, packing)
        assert model.layout is (Packed if packing == "on" else Padded)
        values.append(model.layout.of(*rows("mixed")).hidden(module))
    torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=1e-4)


def test_a_copy_computes_with_its_own_weights() -> None:
    model = hybrid("lfm2")
    expected = results(model, Packed, "groups")
    copied = deepcopy(model)
    torch.nn.init.zeros_(copied.get_output_embeddings().weight)
    assert_same(results(model, Packed, "groups"), expected)
    uniform = torch.full_like(expected["logprobs"], -math.log(VOCABULARY))
    torch.testing.assert_close(results(copied, Packed, "groups")["logprobs"], uniform)
    assert copied.model.layers[0].conv.in_proj.weight.grad is not None


def test_several_ranks_cannot_compute_their_rows_together() -> None:
    context: Any = SimpleNamespace(size=2)
    with raises(ConfigError, field="parallel.context_size"):
        layout_for(hybrid("qwen3_5_text"), "auto", context)


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h"])
def test_two_ranks_make_the_update_of_one(kind: str, tmp_path: Path) -> None:
    model = write(kind, tmp_path / "model", **sizes(HYBRIDS[kind]))
    words = ["--model.name", str(model), "--optimizer.warmup_steps", "0", "--trainer.packing", "on"]
    expected = torch.tensor(learned(Policy(load(words, {}), Ranks()), 2))
    cases: dict[str, dict[str, Any]] = {
        "sharded": {"settings": words, "updates": 2},
        "recomputed": {
            "settings": [*words, "--trainer.activation_checkpointing", "true"],
            "updates": 2,
        },
    }
    run_cases(2, tmp_path, cases)
    for name in cases:
        found = torch.tensor(json.loads((tmp_path / f"{name}.json").read_text()))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=5e-6, msg=name)
