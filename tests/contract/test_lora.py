"""LoRA adapters on the engines: the adapter named in a request generates the whole answer, or the
request fails."""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from common.clients.rollout import GenerationFailed, RolloutClient
from common.errors import ServiceError
from common.settings.sections import LoraSection
from common.wire.schemas import WeightFile, WeightManifest, adapter_name
from services.rollout.engine_client import EngineClient
from tests.support.engines.engines import (
    engine_process,
    expected_logprobs,
    router_process,
    sglang_is_installed,
    sglang_process,
    write_adapter,
)
from tests.support.processes.lossy_proxy import LossyProxy

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]
PROMPT = [20, 21, 22, 23]
FILES = [WeightFile(name="adapter_config.json", size=0, xxh3="0" * 32)]


@pytest.fixture(scope="module", params=["engine", "sglang"])
def url(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Starts an engine for adapters as an agent does; yields its URL."""
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    if request.param == "engine":
        with engine_process(model_dir, log, "--max-context-tokens", "500") as (found, _):
            yield found
    elif not sglang_is_installed():
        pytest.skip("SGLang is not installed: `make sglang-cpu` does it")
    else:
        with sglang_process(model_dir, log, "default", LoraSection(rank=4)) as found:
            yield found


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("adapters")
    return [write_adapter(place / str(seed), model_dir, seed) for seed in range(4)]


@pytest.fixture
def engine(url: str) -> Iterator[httpx.Client]:
    """Yields a client of the engine, which has no adapters before and after the test."""

    def empty() -> None:
        for card in client.get("/v1/models").json()["data"]:
            if card["parent"] is not None:
                client.post("/unload_lora_adapter", json={"lora_name": card["id"]})

    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        empty()
        yield client
        empty()


def load(engine: httpx.Client, name: str, path: Path) -> httpx.Response:
    return engine.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def generate(engine: httpx.Client, name: str | None, tokens: int = 12) -> httpx.Response:
    body: dict[str, Any] = {"input_ids": PROMPT, "return_logprob": True, "lora_path": name}
    return engine.post(
        "/generate", json=body | {"sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    )


def error_of(model: Path, adapter: Path | None, answer: dict[str, Any]) -> float:
    """Returns the largest difference between the engine's logprobs and those of the model with this
    adapter."""
    logprobs = [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]
    return float(
        np.abs(
            np.array(logprobs) - expected_logprobs(model, adapter, PROMPT, answer["output_ids"])
        ).max()
    )


def loaded(engine: httpx.Client) -> dict[str, str]:
    """Returns the directories of the loaded adapters by name."""
    cards = engine.get("/v1/models").json()["data"]
    return {card["id"]: card["root"] for card in cards if card["parent"] is not None}


def test_contract_adapters_are_loaded_and_unloaded_by_name(
    engine: httpx.Client, adapters: list[Path]
) -> None:
    first = load(engine, "a", adapters[0])
    assert (first.status_code, first.json()["success"]) == (200, True), first.text
    load(engine, "b", adapters[1])
    again = load(engine, "a", adapters[1])
    assert (again.status_code, again.json()["success"]) == (400, False)
    assert "already loaded" in again.text
    assert loaded(engine) == {"a": str(adapters[0]), "b": str(adapters[1])}
    gone = engine.post("/unload_lora_adapter", json={"lora_name": "a"})
    assert gone.status_code == 200
    assert loaded(engine) == {"b": str(adapters[1])}
    missing = engine.post("/unload_lora_adapter", json={"lora_name": "a"})
    assert (missing.status_code, missing.json()["success"]) == (400, False)


def test_contract_a_request_is_answered_with_the_adapter_that_it_names(
    engine: httpx.Client, adapters: list[Path], model_dir: Path
) -> None:
    for i, letter in enumerate("ab"):
        load(engine, letter, adapters[i])
    asked: list[tuple[str | None, Path | None]]
    asked = [("a", adapters[0]), ("b", adapters[1]), (None, None), ("a", adapters[0])]
    for name, adapter in asked:
        answer = generate(engine, name).json()
        assert error_of(model_dir, adapter, answer) < 1e-4
        others = {None, adapters[0], adapters[1]} - {adapter}
        assert min(error_of(model_dir, other, answer) for other in others) > 0.1


def test_contract_an_adapter_that_was_never_loaded_is_400(
    engine: httpx.Client, adapters: list[Path], tmp_path: Path
) -> None:
    load(engine, "a", adapters[0])
    assert generate(engine, "nobody").status_code == 400
    bad = load(engine, "bad", tmp_path)
    assert (bad.status_code, bad.json()["success"]) == (400, False)
    assert generate(engine, "bad").status_code == 400
    assert generate(engine, "a").status_code == 200


def test_contract_an_unloaded_adapter_whose_files_are_gone_is_400(
    engine: httpx.Client, adapters: list[Path], tmp_path: Path
) -> None:
    """SGLang reloads an unloaded adapter from its path, so a path must never hold two adapters."""
    path = Path(shutil.copytree(adapters[0], tmp_path / "gone"))
    load(engine, "gone", path)
    shutil.rmtree(path)
    assert generate(engine, "gone").status_code == 200
    engine.post("/unload_lora_adapter", json={"lora_name": "gone"})
    assert generate(engine, "gone").status_code == 400


def long_request(
    engine: httpx.Client, pool: ThreadPoolExecutor, name: str
) -> "Future[httpx.Response]":
    """Starts a request of 400 tokens and waits until it runs."""
    limit = time.monotonic() + 400
    while time.monotonic() < limit:
        future = pool.submit(generate, engine, name, 400)
        while not future.done():  # on a busy machine, the request may end before this check
            if engine.get("/v1/loads").json()["loads"][0]["num_running_reqs"]:
                return future
        assert future.result().status_code == 200, future.result().text
    raise AssertionError("the request does not start")


async def test_contract_a_new_adapter_leaves_running_requests_with_theirs(
    url: str, engine: httpx.Client, adapters: list[Path], model_dir: Path
) -> None:
    """Three versions arrive while a request uses the first; the agent unloads the first once that
    request ends."""
    manifests = [
        WeightManifest(version=i, run_id="run", files=FILES, kind="adapter") for i in range(4)
    ]
    async with EngineClient("engine", url) as agent, RolloutClient("rollout", url) as trainer:
        await agent.load_adapter(adapters[0], manifests[0], 2, 60)
        with ThreadPoolExecutor(1) as pool:
            running = long_request(engine, pool, adapter_name("run", 0))
            for version in (1, 2):
                await agent.load_adapter(adapters[version], manifests[version], 2, 60)
                trainer.adapter = (adapter_name("run", version), version)
                [completion] = await trainer.generate(
                    PROMPT, n=1, max_new_tokens=8, temperature=1, stop_token_ids=[]
                )
                assert completion.weight_versions == [(version, 0, len(completion.token_ids))]
                right = expected_logprobs(
                    model_dir, adapters[version], PROMPT, completion.token_ids.tolist()
                )
                np.testing.assert_allclose(completion.logprobs, right, rtol=0, atol=1e-4)
            answer = running.result(400).json()
        assert answer["meta_info"]["completion_tokens"] == 400
        assert error_of(model_dir, adapters[0], answer) < 1e-3
        assert await agent.adapters() == {adapter_name("run", i): str(adapters[i]) for i in (1, 2)}
        assert (
            await agent.weight_version() == "default"
        )  # the version of the base model, which has not changed


async def test_contract_a_lost_answer_loads_and_unloads_nothing_twice(
    url: str, engine: httpx.Client, adapters: list[Path]
) -> None:
    manifests = [
        WeightManifest(version=i, run_id="run", files=FILES, kind="adapter") for i in range(3)
    ]
    proxy = LossyProxy(int(url.rpartition(":")[2]))
    async with proxy.running() as lossy, EngineClient("engine", lossy) as agent:
        for version in range(3):
            await agent.load_adapter(adapters[version], manifests[version], 1, 60)
        assert await agent.adapters() == {adapter_name("run", 2): str(adapters[2])}
    assert proxy.forwarded["POST /load_lora_adapter"] == 4
    assert proxy.forwarded["POST /unload_lora_adapter"] == 3


async def test_contract_loading_is_repeatable_and_another_runs_adapters_go(
    url: str, engine: httpx.Client, adapters: list[Path]
) -> None:
    old = WeightManifest(version=9, run_id="old", files=FILES, kind="adapter")
    new = WeightManifest(version=1, run_id="new", files=FILES, kind="adapter")
    async with EngineClient("engine", url) as agent:
        await agent.load_adapter(adapters[0], old, 2, 60)
        for _ in range(2):
            await agent.load_adapter(adapters[1], new, 2, 60)
        assert await agent.adapters() == {adapter_name("new", 1): str(adapters[1])}


@pytest.fixture
def relabelled(engine: httpx.Client, model_dir: Path) -> Iterator[None]:
    """Loads the engine's own weights again, under another version."""
    for label in ("5", "default"):
        body = {"model_path": str(model_dir), "weight_version": label}
        assert engine.post("/update_weights_from_disk", json=body).status_code == 200
        if label == "5":
            yield


async def test_contract_adapter_on_weights_other_than_the_first_is_never_trained_on(
    url: str, engine: httpx.Client, adapters: list[Path], relabelled: None
) -> None:
    load(engine, "run-v000001", adapters[0])
    async with RolloutClient("rollout", url) as trainer:
        trainer.adapter = ("run-v000001", 1)
        with pytest.raises(GenerationFailed, match="weights default"):
            await trainer.generate(PROMPT, n=1, max_new_tokens=4, temperature=1, stop_token_ids=[])


async def test_contract_the_router_passes_the_adapter_on(
    url: str, engine: httpx.Client, adapters: list[Path], model_dir: Path, tmp_path: Path
) -> None:
    """Asks like the trainer: one request per group, with n for the embedded engine and n prompts
    for SGLang."""
    load(engine, "routed-v000001", adapters[0])
    with router_process(url, tmp_path / "router.log") as router:
        async with (
            EngineClient("engine", url) as agent,
            RolloutClient("rollout", router) as trainer,
        ):
            embedded = '"engine":"embedded"' in (await agent.request("GET", "/server_info")).text
            trainer.adapter, trainer.repeats_prompt = ("routed-v000001", 1), not embedded
            group = await trainer.generate(
                PROMPT, n=3, max_new_tokens=12, temperature=1, stop_token_ids=[]
            )
            assert len({tuple(completion.token_ids.tolist()) for completion in group}) == 3
            for completion in group:
                right = expected_logprobs(
                    model_dir, adapters[0], PROMPT, completion.token_ids.tolist()
                )
                np.testing.assert_allclose(completion.logprobs, right, rtol=0, atol=1e-4)
            trainer.adapter = ("routed-v000002", 2)
            with pytest.raises(ServiceError) as refused:
                await trainer.generate(
                    PROMPT, n=3, max_new_tokens=12, temperature=1, stop_token_ids=[]
                )
            assert refused.value.status == 400
            # SGLang would wait for ever if it still counted a user of the adapter.
            await agent.request(
                "POST", "/unload_lora_adapter", json={"lora_name": "routed-v000001"}, deadline_s=30
            )
            assert await agent.adapters() == {}
