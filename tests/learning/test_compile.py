"""How many graphs torch compiles of the layers of all models of a process, before it gives up."""

import logging
from collections.abc import Iterator
from contextvars import Context
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from common.settings.sections import TrainerSection
from learning.layout import Padded
from learning.sharding import prepare
from tests.support.models.tiny_models import make
from trainer.policy.scorer import Scorer

_SETTINGS = TrainerSection(compile=True)


class Layer(nn.Module):  # type: ignore[misc]  # torch is not typed for mypy here
    def forward(self, states: Tensor, kind: str) -> Tensor:
        return states + len(kind)


class Decoder(nn.Module):  # type: ignore[misc]
    """What `prepare` reads of a model."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([Layer(), Layer()])


class Said(logging.Handler):
    """What torch says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Counts graphs without compiling them to anything; yields torch's warnings, which it also
    prints."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    said, logger = Said(), logging.getLogger("torch._dynamo")
    logger.addHandler(said)
    yield said.lines
    logger.removeHandler(said)
    torch._dynamo.reset()


def compute(model: Decoder, kinds: int) -> None:
    """Makes torch compile one graph for each kind, on the first layer, and use it on the second."""
    for kind in range(kinds):
        for layer in model.model.layers:
            layer(torch.ones(3), "x" * kind)


def test_layers_are_compiled_for_many_cases_in_any_thread(warnings: list[str]) -> None:
    """The backward pass recomputes layers in threads of torch, each with a context of its own.
    torch's limit is 8."""
    model = Decoder()
    prepare(model, _SETTINGS, trained=True, device=torch.device("cpu"))
    for kinds in (6, 12):
        Context().run(compute, model, kinds)
    assert counters["stats"]["unique_graphs"] == 12
    assert not warnings


def test_a_layer_that_is_no_longer_compiled_is_reported(
    warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learning.sharding._GRAPHS", 3)
    model = Decoder()
    prepare(model, _SETTINGS, trained=True, device=torch.device("cpu"))
    compute(model, 5)
    assert counters["stats"]["unique_graphs"] == 3
    assert "recompile_limit (3)" in warnings[0]


def score(model: PreTrainedModel, train: bool) -> None:
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (4, 9)]
    completions = [np.arange(5, 5 + length, dtype=np.int32) for length in (6, 2)]
    targets = torch.from_numpy(np.concatenate(completions)).long()
    with torch.set_grad_enabled(train):
        scores = Scorer(model, "off")(
            Padded.of(prompts, completions), targets, 1.0, entropy_gradient=False
        )
    if train:
        scores.logprobs.sum().backward()


# dynamo triggers this warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
def test_gemma_3_and_its_reference_stay_compiled(warnings: list[str]) -> None:
    more: dict[str, Any] = {
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    policy, reference = (
        make("gemma3_text", **more),
        make("gemma3_text", **more).requires_grad_(False),
    )
    for model, trained in ((policy, True), (reference, False)):
        prepare(
            model,
            _SETTINGS.model_copy(update={"activation_checkpointing": True}),
            trained,
            torch.device("cpu"),
        )
    for train in (False, True):
        score(policy.eval(), train)
        score(policy.train(), train)
    score(reference.eval(), train=False)
    assert counters["stats"]["unique_graphs"] > 8, "more than torch would compile"
    assert not warnings
