"""Pause, weights and information: control calls made directly to the engine."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.engines.engine_calls import PROMPT, long_request, paused_request, version

pytestmark = pytest.mark.integration


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture(autouse=True)
def _continued(worker: httpx.Client) -> Iterator[None]:
    yield
    worker.post("/pause_generation", json={"mode": "retract"})
    worker.post("/continue_generation", json={})


def test_contract_new_requests_wait_while_paused(
    worker: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    worker.post("/pause_generation", json={"mode": "retract"})
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    waiting = pool.submit(lambda: worker.post("/generate", json=body).json())
    time.sleep(0.3)
    assert not waiting.done()
    assert worker.post("/continue_generation", json={}).status_code == 200
    assert len(waiting.result(400)["output_ids"]) == 2


def test_contract_an_update_in_a_pause_shows_in_the_spans(
    worker: httpx.Client, pool: ThreadPoolExecutor, model_dir: Path
) -> None:
    before = version(worker)
    running = paused_request(worker, pool, "update")
    path = worker.get("/model_info").json()["model_path"]
    after = str(int(before) + 1) if before.isdigit() else "1"
    update = {"model_path": path, "weight_version": after}
    response = worker.post("/update_weights_from_disk", json=update)
    assert response.status_code == 200, response.text
    assert response.json()["success"] is True
    worker.post("/continue_generation", json={})
    meta = running.result(400)["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == [before, after]
    first, second = meta["weight_versions"]
    assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == 240
    assert meta["num_retractions"] == 1
    assert meta["weight_version"] == after == version(worker)


def test_contract_an_update_waits_for_running_requests(
    worker: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    before = version(worker)
    running = long_request(worker, pool, "writer-lock")
    path = worker.get("/model_info").json()["model_path"]
    response = worker.post(
        "/update_weights_from_disk", json={"model_path": path, "weight_version": "91"}
    )
    assert response.status_code == 200
    assert running.result(400)["meta_info"]["weight_versions"] == [
        {"version": before, "start": 0, "end": 240}
    ]
    assert version(worker) == "91"


def test_contract_a_bad_path_is_400_and_changes_nothing(
    worker: httpx.Client, tmp_path: Path
) -> None:
    before = version(worker)
    response = worker.post(
        "/update_weights_from_disk", json={"model_path": str(tmp_path), "weight_version": "666"}
    )
    assert response.status_code == 400
    assert response.json()["success"] is False
    assert response.json()["message"]
    assert version(worker) == before


def test_contract_health_is_a_status_whatever_the_body(worker: httpx.Client) -> None:
    for body in (b"", b"{}", b"not JSON"):
        assert worker.request("GET", "/health", content=body).status_code == 200


@pytest.mark.parametrize(
    "path", ["/model_info", "/get_model_info", "/server_info", "/get_server_info", "/v1/models"]
)
def test_contract_information(worker: httpx.Client, path: str) -> None:
    assert worker.get(path).status_code == 200
    assert worker.get(path).json()


def test_contract_a_control_call_without_a_body_is_400(worker: httpx.Client) -> None:
    assert worker.post("/pause_generation", headers={"X-Request-Id": "empty"}).status_code == 400
    assert worker.post("/continue_generation", headers={"X-Request-Id": "empty"}).status_code == 400
