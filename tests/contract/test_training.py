"""The system's own use of an engine, through its own clients: groups to train on, and new weights
from an agent."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.clients.base import Client
from common.clients.rollout import RolloutClient, completion_from_answer
from common.errors import ServiceError
from common.wire.schemas import Completion, Float32
from services.rollout.engine_client import EngineClient, LoadFailed
from tests.support.errors import raises

pytestmark = pytest.mark.integration

PROMPT = [20, 21, 22, 23, 24, 25]
TOLERANCE = 1e-4


def expected_logprobs(model_dir: Path, completion: Completion, temperature: float) -> Float32:
    """Returns log-probabilities of the completion's tokens by transformers in float32, at this
    temperature."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.tensor([[*PROMPT, *completion.token_ids.tolist()]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1]
        scores = torch.log_softmax(logits / temperature, dim=-1)
    found: Float32 = scores.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()
    return found


async def weights_of(url: str) -> Path:
    """Returns the path of the engine's current weights."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        return Path((await client.get("/model_info")).json()["model_path"])


@pytest.fixture
async def engine(worker_url: str, model_dir: Path) -> AsyncIterator[EngineClient]:
    """Yields the agent's client; afterwards the engine has its first weights again."""
    async with EngineClient("engine", worker_url) as client:
        yield client
        await client.load(model_dir, "7", 60)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_contract_group_requested_by_the_trainer_has_the_logprobs_of_transformers(
    target_url: str, model_dir: Path, temperature: float
) -> None:
    async with RolloutClient("rollout", target_url) as client:
        group = await client.generate(
            PROMPT,
            n=4,
            max_new_tokens=24,
            temperature=temperature,
            stop_token_ids=[2],
            sampling_seed=5,
        )
    assert len({tuple(completion.token_ids.tolist()) for completion in group}) > 1
    for completion in group:
        size = len(completion.token_ids)
        assert completion.finish_reason in ("stop", "length")
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == 2)
        assert completion.finish_reason == "stop" or size == 24
        assert [(start, end) for _, start, end in completion.weight_versions] == [(0, size)]
        expected = expected_logprobs(model_dir, completion, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=TOLERANCE)


async def test_contract_greedy_request_of_the_evaluation_repeats(
    target_url: str, model_dir: Path
) -> None:
    async with RolloutClient("rollout", target_url) as client:
        [first], [second] = [
            await client.generate(PROMPT, n=1, max_new_tokens=8, temperature=0, stop_token_ids=[2])
            for _ in range(2)
        ]
    assert first.token_ids.tolist() == second.token_ids.tolist()
    np.testing.assert_allclose(
        first.logprobs, expected_logprobs(model_dir, first, 1.0), rtol=0, atol=TOLERANCE
    )


def test_contract_logprobs_are_those_before_top_p(target: httpx.Client, model_dir: Path) -> None:
    sampling = {"max_new_tokens": 24, "ignore_eos": True, "top_p": 0.3, "temperature": 1.3}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    completion = completion_from_answer(target.post("/generate", json=body).json())
    assert len(completion.token_ids) == 24
    np.testing.assert_allclose(
        completion.logprobs, expected_logprobs(model_dir, completion, 1.3), rtol=0, atol=TOLERANCE
    )


async def test_contract_a_refused_request_is_an_error_with_the_reason(target_url: str) -> None:
    async with RolloutClient("rollout", target_url) as client:
        with raises(ServiceError, field="input_ids", value="100000") as refused:
            await client.generate(
                [5] * 100_000, n=4, max_new_tokens=8, temperature=1, stop_token_ids=[2]
            )
    assert refused.value.status == 400


async def running_requests(engine: EngineClient) -> int:
    return int((await engine.request("GET", "/v1/loads")).json()["loads"][0]["num_running_reqs"])


async def test_contract_each_span_has_the_logprobs_of_its_weights(
    reached: tuple[str, str], model_dir: Path, other_model_dir: Path
) -> None:
    """An agent loads new weights during a request: the cache keeps nothing of the old ones."""
    worker_url, url = reached
    sampling = {"max_new_tokens": 240, "temperature": 0.8, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    async with EngineClient("engine", worker_url) as engine, Client("rollout", url) as client:
        limit, spans = time.monotonic() + 400, 1
        while spans == 1:  # on a busy machine, the request may end before the new weights arrive
            assert time.monotonic() < limit, "the request always has only one version"
            await engine.load(model_dir, "201", 60)
            running = asyncio.create_task(client.request("POST", "/generate", json=body))
            while not running.done() and not await running_requests(engine):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await engine.load(other_model_dir, "202", 60)
            completion = completion_from_answer((await running).json())
            spans = len(completion.weight_versions)
        await engine.load(model_dir, "7", 60)
    (old, start, middle), (new, again, end) = completion.weight_versions
    assert (old, start, new, again, end) == (201, 0, 202, middle, len(completion.token_ids))
    assert 0 < middle < end
    before, after = (
        expected_logprobs(path, completion, 0.8) for path in (model_dir, other_model_dir)
    )
    right = np.concatenate([before[:middle], after[middle:]])
    np.testing.assert_allclose(completion.logprobs, right, rtol=0, atol=TOLERANCE)
    assert np.median(np.abs(before - after)) > TOLERANCE


async def test_contract_weights_are_loaded_as_the_agent_does_it(
    engine: EngineClient, worker_url: str, other_model_dir: Path
) -> None:
    assert await engine.unhealthy_reason() is None
    await engine.load(other_model_dir, "101", 60)
    assert await engine.weight_version() == "101"
    async with RolloutClient("rollout", worker_url) as client:
        [completion] = await client.generate(
            PROMPT, n=1, max_new_tokens=16, temperature=1, stop_token_ids=[]
        )
    assert [version for version, _, _ in completion.weight_versions] == [101]
    np.testing.assert_allclose(
        completion.logprobs,
        expected_logprobs(other_model_dir, completion, 1),
        rtol=0,
        atol=TOLERANCE,
    )
    with raises(LoadFailed, field="weight_version", value="101"):
        await engine.confirm("102")


async def test_contract_failed_load_leaves_the_engine_generating_with_its_old_weights(
    engine: EngineClient, worker_url: str, tmp_path: Path
) -> None:
    before, path = await engine.weight_version(), await weights_of(worker_url)
    with pytest.raises(ServiceError):
        await engine.load(tmp_path, "103", 60)
    assert (await engine.weight_version(), await weights_of(worker_url)) == (before, path)
    async with RolloutClient("rollout", worker_url) as client:
        [completion] = await client.generate(
            PROMPT, n=1, max_new_tokens=4, temperature=1, stop_token_ids=[]
        )
    assert [version for version, _, _ in completion.weight_versions] == [int(before)]


async def test_contract_weights_of_another_shape_are_refused_and_change_nothing(
    request: pytest.FixtureRequest,
    engine: EngineClient,
    worker_url: str,
    model_dir: Path,
    other_model_dir: Path,
    tmp_path: Path,
) -> None:
    if "[sglang]" in request.node.name:
        pytest.skip("SGLang ends when it is given such weights, and its agent starts it again")
    await engine.load(model_dir, "104", 60)
    wrong = Path(shutil.copytree(other_model_dir, tmp_path / "wrong"))
    tensors = load_file(wrong / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].contiguous()
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ServiceError):
        await engine.load(wrong, "105", 60)
    assert await engine.weight_version() == "104"
    async with RolloutClient("rollout", worker_url) as client:
        [completion] = await client.generate(
            PROMPT, n=1, max_new_tokens=16, temperature=1, stop_token_ids=[]
        )
    assert [version for version, _, _ in completion.weight_versions] == [104]
    np.testing.assert_allclose(
        completion.logprobs, expected_logprobs(model_dir, completion, 1), rtol=0, atol=TOLERANCE
    )


async def test_contract_a_paused_engine_is_healthy(engine: EngineClient) -> None:
    await engine.request("POST", "/pause_generation", json={"mode": "retract"})
    assert await engine.unhealthy_reason() is None
    await engine.request("POST", "/continue_generation", json={})
