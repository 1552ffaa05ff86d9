"""The embedded engine as a teacher: log-probabilities of prompts in SGLang's form, alongside
generating requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.engine import requests
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model
from tests.support.engines.engines import expected_logprobs, write_model

ROWS = [[20, 21, 22, 23, 24], [30, 31], [40, 41, 42, 43, 44, 45, 46, 47], [50, 51, 52]]
ALONE = {"max_new_tokens": 0}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("scores") / "model", seed=0)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Engine:
    return Engine(Model(model_dir, 256), max_running=8, weight_version="7")


@asynccontextmanager
async def connected(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(engine)
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=300
    )
    async with app.router.lifespan_context(app), client:
        yield client


def ask(model_dir: Path, *bodies: dict[str, Any]) -> list[Any]:
    """Sends requests concurrently and returns their answers."""

    async def run() -> list[Any]:
        async with connected(
            Engine(Model(model_dir, 256), max_running=8, weight_version="7")
        ) as client:
            answers = await asyncio.gather(
                *(client.post("/generate", json=body) for body in bodies)
            )
            return [(answer.status_code, answer.json()) for answer in answers]

    return asyncio.run(run())


def scoring(rows: Any, start: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": rows,
        "sampling_params": ALONE,
        "return_logprob": True,
        "logprob_start_len": start,
        **more,
    }


def test_scores_are_those_of_transformers_in_sglangs_form(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "SCORED_LOGITS", 300 * 12)  # scores one or two rows at a time
    (status, answers), (_, one) = ask(model_dir, scoring(ROWS, 1), scoring(ROWS[0]))
    assert (status, len(answers)) == (200, 4)
    for row, answer in zip(ROWS, answers, strict=True):
        pairs = answer["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in pairs] == row[1:]
        assert pairs[0][0] is None  # SGLang gives no score for the first token
        np.testing.assert_allclose(
            [pair[0] for pair in pairs[1:]],
            expected_logprobs(model_dir, None, row[:2], row[2:]),
            atol=2e-5,
        )
        assert (answer["output_ids"], answer["meta_info"]["completion_tokens"]) == ([], 0)
        assert answer["meta_info"]["weight_version"] == "7"
    pairs = one["meta_info"]["input_token_logprobs"]
    np.testing.assert_allclose(
        [pair[0] for pair in pairs[1:]],
        expected_logprobs(model_dir, None, ROWS[0][:1], ROWS[0][1:]),
        atol=2e-5,
    )


def test_other_tokens_are_scored_beside_those_of_the_prompt(model_dir: Path) -> None:
    row = ROWS[0]
    ((_, answer),) = ask(
        model_dir, scoring(row, 1, top_logprobs_num=3, token_ids_logprob=[7, row[2]])
    )
    meta = answer["meta_info"]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logs = model(torch.tensor([row])).logits[0].log_softmax(-1)

    assert meta["input_top_logprobs"][0] is None
    assert meta["input_token_ids_logprobs"][0] is None
    places = zip(meta["input_top_logprobs"][1:], logs[1:-1], strict=True)
    for found, wanted in places:
        best = wanted.topk(3)
        assert [token for _, token, _ in found] == best.indices.tolist()
        np.testing.assert_allclose([pair[0] for pair in found], best.values, atol=2e-5)
    for found, wanted in zip(meta["input_token_ids_logprobs"][1:], logs[1:-1], strict=True):
        assert [token for _, token, _ in found] == [7, row[2]]
        np.testing.assert_allclose([pair[0] for pair in found], wanted[[7, row[2]]], atol=2e-5)


def test_scoring_changes_nothing_for_requests_that_run(model_dir: Path) -> None:
    generating = {
        "input_ids": ROWS[0],
        "sampling_params": {"max_new_tokens": 60, "ignore_eos": True, "n": 4, "sampling_seed": 3},
        "return_logprob": True,
    }
    ((_, alone),) = ask(model_dir, generating)
    (_, beside), *scored = ask(model_dir, generating, *[scoring(ROWS) for _ in range(6)])
    for one, other in zip(alone, beside, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert (
            one["meta_info"]["output_token_logprobs"] == other["meta_info"]["output_token_logprobs"]
        )
    assert all(status == 200 for status, _ in scored)


def test_a_text_is_read_by_the_tokenizer(model_dir: Path, engine: Engine) -> None:
    text = "Tom has 3 apples<|im_end|>"
    ids = engine.scheduler.model.tokenizer(text).input_ids
    body = scoring([]) | {"text": text}
    greedy = {"sampling_params": {"temperature": 0, "max_new_tokens": 5}}
    (_, scored), (_, by_text), (_, by_ids), (_, several) = ask(
        model_dir,
        body,
        {"text": text, **greedy},
        {"input_ids": ids, **greedy},
        {"text": [text, "a"], **greedy},
    )
    assert [token for _, token, _ in scored["meta_info"]["input_token_logprobs"]] == ids
    assert by_text["output_ids"] == by_ids["output_ids"] == several[0]["output_ids"]
    assert len(several) == 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"logprob_start_len": 5}, "logprob_start_len"),
        ({"return_logprob": False}, "logprob_start_len"),
        ({"sampling_params": {"max_new_tokens": 1}}, "logprob_start_len"),
        ({"sampling_params": {}}, "logprob_start_len"),
        ({"sampling_params": {"max_new_tokens": 0, "n": 2}}, "logprob_start_len"),
        ({"lora_path": "a"}, "lora_path"),
        ({"logprob_start_len": -1}, "sampling_params.max_new_tokens"),
        ({"logprob_start_len": "0"}, "logprob_start_len"),
        ({"input_ids": [5, 999]}, "input_ids"),
        ({"token_ids_logprob": [5, 999]}, "token_ids_logprob"),
        ({"top_logprobs_num": 5000}, "top_logprobs_num"),
        ({"text": "a"}, "text"),
        ({"text": [1]}, "text"),
    ],
)
def test_what_the_engine_cannot_score_is_refused(
    model_dir: Path, change: dict[str, Any], field: str
) -> None:
    ((status, answer),) = ask(model_dir, scoring(ROWS[0]) | change)
    assert status == 400, answer
    assert answer["error"]["field"] == field
