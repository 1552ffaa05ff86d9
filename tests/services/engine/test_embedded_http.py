"""The engine's HTTP API in a real process: many concurrent requests, clients that disconnect, bad
input."""

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from common.process.topology import WRONG_SETTING
from tests.support.engines.engines import answers, end, engine_process, write_model
from tests.support.processes.forks import Forked
from tests.support.processes.ports import free_port
from tests.support.processes.waits import until

pytestmark = pytest.mark.integration

IDS = [20, 21, 22]
BAD: list[tuple[Any, str]] = [
    ({}, "input_ids"),
    ({"text": "a", "input_ids": IDS}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [1, [2]]}, "input_ids"),
    ({"input_ids": [1, -1]}, "input_ids"),
    ({"input_ids": [1, 10**30]}, "input_ids"),
    ({"input_ids": [1, True]}, "input_ids"),
    ({"input_ids": [1, "2"]}, "input_ids"),
    ({"input_ids": [5] * 256}, "input_ids"),
    ({"text": 5}, "text"),
    ({"input_ids": IDS, "stream": True}, "stream"),
    ({"input_ids": IDS, "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
    ({"input_ids": IDS, "sampling_params": {"json_schema": "{}"}}, "sampling_params.json_schema"),
    ({"input_ids": IDS, "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
    ({"input_ids": IDS, "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
    ({"input_ids": IDS, "sampling_params": {"temperature": "1"}}, "sampling_params.temperature"),
    ({"input_ids": IDS, "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
    ({"input_ids": IDS, "sampling_params": {"n": 0}}, "sampling_params.n"),
    ({"input_ids": IDS, "sampling_params": {"n": 10**9}}, "sampling_params.n"),
    (
        {"input_ids": IDS, "sampling_params": {"max_new_tokens": -1}},
        "sampling_params.max_new_tokens",
    ),
    ({"input_ids": IDS, "sampling_params": {"max_new_tokens": 254}}, "max_new_tokens"),
    (
        {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}},
        "sampling_params.max_new_tokens",
    ),
    ({"input_ids": IDS, "sampling_params": {"stop": [3]}}, "sampling_params.stop"),
    ({"input_ids": IDS, "sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
    ({"input_ids": IDS, "sampling_params": {"min_p": 1.5}}, "sampling_params.min_p"),
    (
        {"input_ids": IDS, "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}},
        "min_new_tokens",
    ),
    ({"input_ids": IDS, "sampling_params": {"top_p": 0.5}, "return_sampling_mask": True}, "top_k"),
    ({"input_ids": IDS, "sampling_params": {"top_k": 5000}, "return_sampling_mask": True}, "top_k"),
    ({"input_ids": IDS, "sampling_params": 3}, "sampling_params"),
    ({"input_ids": IDS, "sampling_params": [{}, {}]}, "sampling_params"),
    ({"input_ids": IDS, "top_logprobs_num": 3}, "top_logprobs_num"),
    ({"input_ids": IDS, "lora_path": "a"}, "lora_path"),
    ({"input_ids": IDS, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def url(directory: Path) -> Iterator[str]:
    model = write_model(directory / "model", seed=0)
    with engine_process(
        model, directory / "log", "--max-context-tokens", "256", "--weight-version", "3"
    ) as (address, _):
        yield address


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as made:
        yield made


def alive(client: httpx.Client) -> None:
    response = client.post(
        "/generate",
        json={"input_ids": IDS, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}},
    )
    assert response.status_code == 200, response.text
    assert len(response.json()["output_ids"]) == 2


@pytest.mark.parametrize(("body", "field"), BAD)
def test_embedded_bad_input_is_400_with_field_and_value_and_the_engine_lives(
    client: httpx.Client, body: Any, field: str
) -> None:
    response = client.post("/generate", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["field"] == field
    assert error["message"]
    alive(client)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"text": "\xff"}', b'{"text": "\\ud800"}', b'{"input_ids": [NaN]}'],
)
def test_embedded_bodies_that_are_not_usable_json_are_400(
    client: httpx.Client, content: bytes
) -> None:
    response = client.post("/generate", content=content, headers={"X-Request-Id": "no-type"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    alive(client)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", {"mode": "sleep"}),
        ("/pause_generation", {"mode": "abort"}),
        ("/update_weights_from_disk", {}),
        ("/update_weights_from_disk", {"model_path": "/no/such/place"}),
    ],
)
def test_embedded_other_calls_refuse_bad_input_too(
    client: httpx.Client, path: str, body: Any
) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    alive(client)


async def test_embedded_three_hundred_requests_at_once(url: str) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, timeout=400, trust_env=False, limits=limits
    ) as client:

        async def one(index: int) -> tuple[int, int]:
            sampling = {"max_new_tokens": 1 + index % 7, "ignore_eos": True, "n": 2}
            response = await client.post(
                "/generate",
                json={
                    "input_ids": [10 + index % 200] * (1 + index % 30),
                    "sampling_params": sampling,
                },
            )
            assert response.status_code == 200, response.text
            return len(response.json()), len(response.json()[1]["output_ids"])

        found = await asyncio.gather(*map(one, range(300)))
    assert found == [(2, 1 + index % 7) for index in range(300)]


async def test_embedded_a_client_that_goes_away_frees_its_rows(url: str, directory: Path) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=400, trust_env=False) as watcher:

        async def sequences(count: int) -> None:
            async with asyncio.timeout(400):
                while (await watcher.get("/v1/loads")).json()["aggregate"][  # noqa: ASYNC110
                    "num_total_reqs"
                ] != count:
                    await asyncio.sleep(0.01)

        await watcher.post("/pause_generation", json={"mode": "retract"})
        async with httpx.AsyncClient(base_url=url, trust_env=False) as leaver:
            body = {
                "input_ids": IDS,
                "sampling_params": {"n": 50, "max_new_tokens": 250, "ignore_eos": True},
            }
            request = asyncio.create_task(leaver.post("/generate", json=body, timeout=400))
            await sequences(50)
            request.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await request
        await sequences(0)
        await watcher.post("/continue_generation", json={})
    assert "never retrieved" not in (directory / "log").read_text(), (
        "that is no error of the engine"
    )


def test_embedded_metrics_count_tokens(client: httpx.Client) -> None:
    def page() -> str:
        return client.get("/metrics").text

    def generated() -> float:
        found = re.findall(r"(?m)^\S*generated_tokens_total (\S+)$", page())
        assert len(found) == 1, found
        return float(found[0])

    before = generated()
    alive(client)
    assert generated() == before + 2
    assert "running_sequences" in page()


def test_embedded_health_stays_while_paused(client: httpx.Client) -> None:
    client.post("/pause_generation", json={"mode": "retract"})
    status = client.get("/health").status_code
    client.post("/continue_generation", json={})
    assert status == client.get("/health").status_code == 200


def test_embedded_sigterm_ends_with_status_0(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", seed=0)
    with engine_process(model, tmp_path / "log", "--max-context-tokens", "64") as (
        address,
        process,
    ):
        assert (
            httpx.get(f"{address}/model_info", trust_env=False, timeout=60).json()[
                "max_context_tokens"
            ]
            == 64
        )
        process.terminate()
        assert process.wait(400) == 0


def test_embedded_a_crash_of_the_engine_ends_the_process(tmp_path: Path) -> None:
    """The supervisor notices at once, so nobody waits for a dead engine."""
    model, port = write_model(tmp_path / "model", seed=0), free_port()
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    process = Forked(
        "tests.support.workers.crashing_engine",
        "--model-path",
        str(model),
        "--port",
        str(port),
        log=log,
    )
    try:
        until(lambda: answers(f"{url}/health"), log, process)
        body = {"input_ids": IDS, "sampling_params": {"ignore_eos": True}}
        with contextlib.suppress(httpx.TransportError):
            httpx.post(f"{url}/generate", json=body, trust_env=False, timeout=400)
        assert process.wait(400) == 70
        assert "the engine's thread died" in log.read_text()
    finally:
        end(process)


def test_embedded_assigned_but_unusable_gpus_end_the_process_with_the_reason(
    tmp_path: Path,
) -> None:
    """The status is 78, on which the agent ends instead of restarting the engine."""
    model, log = write_model(tmp_path / "model", seed=0), tmp_path / "log"
    given = {
        "SKYPILOT_JOBGROUP_NAME": "group",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    process = Forked("services.engine", "--model-path", str(model), log=log, env=os.environ | given)
    assert process.wait(400) == WRONG_SETTING
    reason = log.read_text().rstrip().splitlines()[-1]
    assert reason.startswith("error: torch finds no GPU, but SKYPILOT_NUM_GPUS_PER_NODE is 1: ")
    assert "field: --device · value: auto" in reason
