"""The embedded engine returns the experts that computed its tokens: those that a plain forward pass
of transformers chooses."""

import base64
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.routing import write_model as write_mixture
from services.engine.engine import Engine
from services.engine.jobs import GenerationJob, SamplingParams
from services.engine.model import Model
from services.engine.protocol import BadRequest, GenerateBody, answer
from tests.support.engines.engines import write_model
from tests.support.errors import raises
from tests.support.models.tiny_models import with_tokenizer_of

LIMIT_S = 400
_LAYERS = 2
_TOP_K = 3
_MOE: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": _TOP_K}
PROMPTS = [[20, 21, 22, 23, 24], [30, 31]]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("engine") / "dense", seed=0)


@pytest.fixture(scope="module")
def mixtures(dense: Path) -> list[Path]:
    return [
        with_tokenizer_of(dense, "Qwen3-MoE", dense.parent / f"mixture{seed}", seed, **_MOE)
        for seed in (0, 1)
    ]


@pytest.fixture
def engine(mixtures: list[Path]) -> Iterator[Engine]:
    made = Engine(Model(mixtures[0], 128), max_running=8, weight_version="0")
    made.start()
    yield made
    made.stop()


def jobs(engine: Engine, tokens: int = 12, **more: Any) -> list[GenerationJob]:
    """Submits a request for three completions of each prompt."""
    body = GenerateBody(
        input_ids=PROMPTS,
        sampling_params=SamplingParams(
            n=3, max_new_tokens=tokens, ignore_eos=True, sampling_seed=3
        ),
        return_logprob=True,
        **more,
    )
    made = body.jobs(body.prompts(engine.model), engine.model)
    engine.submit(made)
    return made


def check(engine: Engine, job: GenerationJob, model: Path) -> None:
    """Compares the experts of every answer with those that the model chooses for its tokens."""
    for sequence in job.done.result(LIMIT_S):
        found = answer(sequence, engine.model.tokenizer)
        experts = np.frombuffer(base64.b64decode(found["meta_info"]["routed_experts"]), "<i4")
        computed = [*job.prompt, *found["output_ids"]][:-1]
        expected = chosen(model, computed)
        assert experts.reshape(len(computed), _LAYERS, _TOP_K).tolist() == expected.tolist()


def chosen(path: Path, tokens: list[int]) -> torch.Tensor:
    """Returns [tokens, layers, top_k] what the routers of transformers' model return."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    by_layer: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda _module, _inputs, outputs: by_layer.append(outputs[2])
        )
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return torch.stack(by_layer, 1)


def test_experts_of_prompts_and_answers(engine: Engine, mixtures: list[Path]) -> None:
    """Beside rows that do not return theirs, and prompts of other lengths."""
    others = jobs(engine)
    for job in jobs(engine, return_routed_experts=True):
        check(engine, job, mixtures[0])
    for job in others:
        for sequence in job.done.result(LIMIT_S):
            assert "routed_experts" not in answer(sequence, engine.model.tokenizer)["meta_info"]


def test_what_is_computed_again_has_new_experts(engine: Engine, mixtures: list[Path]) -> None:
    """New weights arrive while answers are generated: their tokens are computed again."""
    made = jobs(engine, tokens=100, return_routed_experts=True)
    limit = time.monotonic() + LIMIT_S
    while not engine.running:
        assert time.monotonic() < limit, "nothing runs"
        time.sleep(0.001)
    engine.call(lambda scheduler: scheduler.pause()).result(LIMIT_S)
    update = engine.call(
        lambda scheduler: scheduler.update_weights(mixtures[1], "1"), exclusive=True
    )
    update.result(LIMIT_S)
    engine.call(lambda scheduler: scheduler.resume()).result(LIMIT_S)
    for job in made:
        check(engine, job, mixtures[1])
        assert all(len(sequence.versions) == 2 for sequence in job.sequences)


def test_experts_are_refused_by_what_has_none(dense: Path) -> None:
    models = {
        "no layer with experts": Model(dense, 128),
        "a deterministic engine": Model(dense, 128, deterministic=True),
    }
    body = GenerateBody(input_ids=[20, 21], return_routed_experts=True)
    for reason, model in models.items():
        model.reserve(4)  # which tries it
        with pytest.raises(BadRequest, match=reason) as refused:
            body.jobs([[20, 21]], model)
        assert refused.value.field == "return_routed_experts"


def test_a_part_of_the_experts_is_refused(dense: Path) -> None:
    body = GenerateBody.model_validate({"input_ids": [20, 21], "routed_experts_start_len": 1})
    with raises(BadRequest, field="routed_experts_start_len", value="1"):
        body.prompts(Model(dense, 128))


def test_a_mixture_whose_routing_rounding_decides_is_served(dense: Path, tmp_path: Path) -> None:
    write_mixture(tmp_path / "tied", 32, tied=True, tokenizer=dense)
    made = Engine(Model(tmp_path / "tied", 128), max_running=8, weight_version="0")
    made.start()
    try:
        [sequence, *_] = jobs(made, return_routed_experts=True)[0].done.result(LIMIT_S)
        found = answer(sequence, made.model.tokenizer)
        experts = np.frombuffer(base64.b64decode(found["meta_info"]["routed_experts"]), "<i4")
        assert len(set(experts.tolist())) > 8, "every token has the experts of the check"
    finally:
        made.stop()
