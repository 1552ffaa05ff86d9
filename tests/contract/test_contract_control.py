"""Pause, abort, weights and information: control calls made directly to the engine."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from common.clients.rollout import GenerationFailed, completion_from_answer
from tests.support.engine_calls import PROMPT, long_request, paused_request, version

pytestmark = pytest.mark.integration


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture(autouse=True)
def _continued(worker: httpx.Client) -> Iterator[None]:
    yield
    worker.post("/pause_generation", json={"mode": "abort"})
    worker.post("/continue_generation", json={})


def test_contract_aborting_pause_answers_with_partial_output(
    worker: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    running = paused_request(worker, pool, "pause-abort", None)
    answer = running.result(400)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) < 240
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
    with pytest.raises(GenerationFailed, match="abort"):
        completion_from_answer(answer)


def test_contract_new_requests_wait_while_paused(
    worker: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    worker.post("/pause_generation", json={"mode": "abort"})
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    waiting = pool.submit(lambda: worker.post("/generate", json=body).json())
    time.sleep(0.3)
    assert not waiting.done()
    assert worker.post("/continue_generation", json={}).status_code == 200
    assert len(waiting.result(400)["output_ids"]) == 2


@pytest.mark.parametrize(("mode", "flushes"), [("retract", True), ("in_place", False)])
def test_contract_an_update_in_a_pause_shows_in_the_spans(
    worker: httpx.Client, pool: ThreadPoolExecutor, model_dir: Path, mode: str, flushes: bool
) -> None:
    before = version(worker)
    running = paused_request(worker, pool, f"update-{mode}", mode)
    path = worker.get("/model_info").json()["model_path"]
    after = str(int(before) + 1) if before.isdigit() else "1"
    update = {"model_path": path, "weight_version": after, "flush_cache": flushes}
    response = worker.post("/update_weights_from_disk", json=update)
    assert response.status_code == 200, response.text
    assert response.json()["success"] is True
    worker.post("/continue_generation", json={})
    meta = running.result(400)["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == [before, after]
    first, second = meta["weight_versions"]
    assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == 240
    assert meta["num_retractions"] == (1 if mode == "retract" else 0)
    assert meta["weight_version"] == after == version(worker)


def test_contract_an_abort_is_answered_through_the_router_too(
    reached: tuple[str, str], pool: ThreadPoolExecutor
) -> None:
    """The router neither hides the partial output nor asks for it again."""
    worker_url, url = reached
    with (
        httpx.Client(base_url=worker_url, timeout=120, trust_env=False) as worker,
        httpx.Client(base_url=url, timeout=120, trust_env=False) as asked,
    ):
        running = paused_request(worker, pool, "through-pause", "abort", asked)
        answer = running.result(400)
        worker.post("/continue_generation", json={})
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 240
    assert [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]] == answer[
        "output_ids"
    ]


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


def test_contract_the_version_can_be_renamed(worker: httpx.Client) -> None:
    response = worker.post("/update_weight_version", json={"new_version": "92"})
    assert response.json()["success"] is True
    assert response.json()["new_version"] == "92"
    assert version(worker) == "92"


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
