"""A trainer broadcasts weights into a running engine; the tests call the engine directly."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.wire.schemas import WorkerReport
from learning.weight_group import digest
from tests.support.engines.engine_calls import paused_request, version
from trainer.weights.comparison import Checksums
from trainer.weights.host_copy import HostCopy
from trainer.weights.transfer import EngineGroup, Rendezvous

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("on_loopback")]

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture(autouse=True)
def _as_before(worker: httpx.Client) -> Iterator[None]:
    yield
    worker.post("/end_weight_update", json={})
    worker.post("/continue_generation", json={})


class Trainer:
    """Rank 0 of a group with one engine."""

    def __init__(self, worker: httpx.Client, pool: ThreadPoolExecutor) -> None:
        self.worker, self.pool = worker, pool
        report = WorkerReport(name="engine", url="", num_nodes=1, state="ready", version=None)
        self.group = EngineGroup([report], Rendezvous("127.0.0.1"), 30)

    def post(self, path: str, body: dict[str, Any]) -> "Future[httpx.Response]":
        return self.pool.submit(lambda: self.worker.post(path, json=body))

    def join_and_send(self, snapshot: HostCopy, **last: object) -> list[httpx.Response]:
        """Makes the engine join, sends every bucket and returns the engine's answers."""
        plan = self.group.announcement(snapshot.buckets)
        init = {
            "master_address": plan.master_address,
            "master_port": plan.master_port,
            "rank_offset": 1,
        }
        init |= {"world_size": plan.world_size, "group_name": plan.group, "backend": "gloo"}
        joining = self.post("/init_weights_update_group", init)
        answers = []
        for index, (bucket, flat) in enumerate(zip(plan.buckets, snapshot.flats, strict=True)):
            if index == 0:
                connecting = self.pool.submit(
                    self.group.send, flat
                )  # sending joins the group first
                answers.append(joining.result(400))
            body = bucket.model_dump() | {
                "group_name": plan.group,
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            taking = self.post(
                "/update_weights_from_distributed",
                body | (last if bucket is plan.buckets[-1] else {}),
            )
            connecting.result(400) if index == 0 else self.group.send(flat)
            answers.append(taking.result(400))
        return answers

    def leave(self) -> httpx.Response:
        self.group.close()
        return self.worker.post(
            "/destroy_weights_update_group", json={"group_name": self.group.name}
        )


@pytest.fixture
def trainer(worker: httpx.Client, pool: ThreadPoolExecutor) -> Iterator[Trainer]:
    trainer = Trainer(worker, pool)
    yield trainer
    trainer.leave()


def snapshot_of(weights: dict[str, Tensor]) -> HostCopy:
    """Returns a copy of the weights in several buckets."""
    snapshot = HostCopy(bucket_bytes=20_000)
    snapshot.fill(weights.items(), 1)
    assert len(snapshot.buckets) > 3
    return snapshot


def held(worker: httpx.Client) -> dict[str, str]:
    """Returns the checksums of the engine's weights."""
    answer = worker.post("/weights_checker", json={"action": "checksum"})
    assert answer.status_code == 200, answer.text
    checksums = answer.json()["ranks"][0]["checksums"]
    assert isinstance(checksums, dict)
    return checksums


def expected(weights: dict[str, Tensor], names: dict[str, str]) -> dict[str, str]:
    """Returns the weights' checksums by the engine's names; SGLang pads the vocabulary to a
    multiple of 64 rows."""
    found = {}
    for name in names:
        fused = next((part for part in PARTS if f".{part}." in name), "")
        parts = [name.replace(fused, part) for part in PARTS[fused]] if fused else [name]
        whole = torch.cat([weights[part] for part in parts])
        if name.endswith("embed_tokens.weight") and fuses(names):
            whole = torch.cat([whole, torch.zeros(-len(whole) % 64, whole.shape[1])])
        found[name] = digest(whole)
    return found


def fuses(names: dict[str, str]) -> bool:
    """Returns whether this engine fuses parameters."""
    return any(".qkv_proj." in name for name in names)


def begin(worker: httpx.Client) -> int:
    return worker.post("/begin_weight_update", json={}).status_code


def end(worker: httpx.Client) -> int:
    return worker.post("/end_weight_update", json={}).status_code


def test_contract_a_session_is_opened_once_and_closed_once(worker: httpx.Client) -> None:
    assert end(worker) == 400
    body: dict[str, object] = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
    body["group_name"] = "none"
    body["load_format"] = "flattened_bucket"
    outside = worker.post("/update_weights_from_distributed", json=body)
    assert outside.status_code == 400
    assert (
        "must run between begin_weight_update() and end_weight_update()"
        in outside.json()["message"]
    )
    assert [begin(worker), begin(worker), end(worker), end(worker)] == [200, 400, 200, 400]


def test_contract_unknown_group_is_400(worker: httpx.Client) -> None:
    assert (
        worker.post("/destroy_weights_update_group", json={"group_name": "none"}).status_code == 400
    )
    assert begin(worker) == 200
    body: dict[str, object] = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
    body["group_name"] = "none"
    body["load_format"] = "flattened_bucket"
    answer = worker.post("/update_weights_from_distributed", json=body)
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert "Group none not in" in answer.json()["message"]


def test_contract_a_broadcast_in_buckets_delivers_the_same_tensors_and_the_version(
    worker: httpx.Client, trainer: Trainer, other_model_dir: Path, model_dir: Path
) -> None:
    new = load_file(other_model_dir / "model.safetensors")
    worker.post("/pause_generation", json={"mode": "retract"})
    assert begin(worker) == 200
    answers = trainer.join_and_send(snapshot_of(new), weight_version="41", flush_cache=True)
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert end(worker) == 200
    assert worker.post("/continue_generation", json={}).status_code == 200
    assert version(worker) == "41"
    found = held(worker)
    assert found == expected(new, found)
    assert found != expected(load_file(model_dir / "model.safetensors"), found)
    same = Checksums(on_gpu=False).compare(new, [found])
    assert (same.problem, same.compared, same.total) == (None, len(new), len(new))
    other = Checksums(on_gpu=False).compare(
        {name: tensor + 1 for name, tensor in new.items()}, [found]
    )
    assert set(other.wrong) == set(found)


def test_contract_a_broadcast_in_a_pause_shows_in_the_spans(
    worker: httpx.Client, trainer: Trainer, pool: ThreadPoolExecutor, other_model_dir: Path
) -> None:
    before = version(worker)
    running = paused_request(worker, pool, "broadcast")
    assert begin(worker) == 200
    trainer.join_and_send(
        snapshot_of(load_file(other_model_dir / "model.safetensors")),
        weight_version="42",
        flush_cache=True,
    )
    assert end(worker) == 200
    worker.post("/continue_generation", json={})
    meta = running.result(400)["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == [before, "42"]
    first, second = meta["weight_versions"]
    assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == 240


def test_contract_a_wrong_shape_is_400(worker: httpx.Client, trainer: Trainer) -> None:
    name = "model.norm.weight"
    begin(worker)
    answers = trainer.join_and_send(_one({name: torch.zeros(5)}), weight_version="666")
    assert [answer.status_code for answer in answers] == [200, 400]
    assert version(worker) != "666"


def test_contract_a_trainer_that_dies_fails_the_update_and_files_still_load(
    worker: httpx.Client, trainer: Trainer, pool: ThreadPoolExecutor, model_dir: Path
) -> None:
    old = load_file(model_dir / "model.safetensors")
    whole = snapshot_of(old)
    begin(worker)
    trainer.join_and_send(_one({"model.norm.weight": old["model.norm.weight"]}))
    body = whole.buckets[0].model_dump() | {
        "group_name": trainer.group.name,
        "load_format": "flattened_bucket",
    }
    waiting = trainer.post("/update_weights_from_distributed", body)
    trainer.group.close()
    assert waiting.result(400).status_code == 400
    end(worker)
    assert trainer.leave().status_code == 200
    response = worker.post(
        "/update_weights_from_disk", json={"model_path": str(model_dir), "weight_version": "44"}
    )
    assert response.status_code == 200
    assert (found := held(worker)) == expected(old, found)
    assert version(worker) == "44"


def test_contract_a_rendezvous_that_the_trainer_gives_up_ends(
    worker: httpx.Client, trainer: Trainer
) -> None:
    plan = trainer.group.announcement([])
    init = {
        "master_address": plan.master_address,
        "master_port": plan.master_port,
        "rank_offset": 1,
        "world_size": 3,
    }
    store = trainer.group._store
    assert store is not None
    alone, limit = store.num_keys(), time.monotonic() + 400
    joining = trainer.post(
        "/init_weights_update_group", init | {"group_name": plan.group, "backend": "gloo"}
    )
    while store.num_keys() == alone:
        assert time.monotonic() < limit, "the engine does not come"
        time.sleep(0.02)
    del store
    trainer.group.close()
    answer = joining.result(400)
    assert (answer.status_code, answer.json()["success"]) == (400, False)


def test_destroying_the_group_ends_a_hung_broadcast(
    engine_url: str, pool: ThreadPoolExecutor
) -> None:
    """Only for the embedded engine: SGLang answers nothing until the broadcast ends, so its agent
    restarts it."""
    with httpx.Client(base_url=engine_url, timeout=60, trust_env=False) as worker:
        trainer, before = Trainer(worker, pool), held(worker)
        begin(worker)
        trainer.join_and_send(_one({"model.norm.weight": torch.ones(32)}))
        body = {
            "names": ["model.norm.weight"],
            "dtypes": ["float32"],
            "shapes": [[32]],
            "group_name": trainer.group.name,
            "load_format": "flattened_bucket",
        }
        waiting = trainer.post("/update_weights_from_distributed", body)
        time.sleep(0.3)
        assert not waiting.done()
        destroyed = worker.post(
            "/destroy_weights_update_group", json={"group_name": trainer.group.name}
        )
        assert destroyed.status_code == 200
        answer = waiting.result(400)
        assert (answer.status_code, "destroyed meanwhile" in answer.json()["message"]) == (
            400,
            True,
        )
        assert end(worker) == 400
        assert held(worker) == before  # the session loaded nothing
        trainer.group.close()


def test_contract_an_unknown_check_is_400(worker: httpx.Client) -> None:
    assert worker.post("/weights_checker", json={"action": "nonsense"}).status_code == 400


def _one(tensors: dict[str, Tensor]) -> HostCopy:
    snapshot = HostCopy()
    snapshot.fill(tensors.items(), 1)
    return snapshot


def test_the_checksums_of_the_embedded_engine_are_those_of_what_was_sent_in_another_precision(
    engine_url: str, pool: ThreadPoolExecutor, model_dir: Path
) -> None:
    """A trainer on a GPU sends bfloat16; an engine on a CPU holds it in float32."""
    with httpx.Client(base_url=engine_url, timeout=60, trust_env=False) as worker:
        trainer, before, old = Trainer(worker, pool), held(worker), version(worker)
        sent = {
            name: tensor.bfloat16()
            for name, tensor in load_file(model_dir / "model.safetensors").items()
        }
        snapshot = _one(sent)
        worker.post("/pause_generation", json={"mode": "retract"})
        begin(worker)
        trainer.join_and_send(snapshot, weight_version="43", flush_cache=True)
        assert end(worker) == 200
        found = Checksums(on_gpu=False).compare(sent, [held(worker)])
        assert (found.problem, found.compared) == (None, len(sent))
        worker.post(
            "/update_weights_from_disk", json={"model_path": str(model_dir), "weight_version": old}
        )
        after = held(worker)
        assert after == expected(load_file(model_dir / "model.safetensors"), after)
        assert set(after) == set(before)
        trainer.leave()
