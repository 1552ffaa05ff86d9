"""The host copy of published weights, the comparison with engines' checksums, and files on demand."""

import sys
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.config import Config
from common.errors import NotFound, ServiceError
from common.observe import Metrics
from common.schemas import WeightManifest, WorkerReport
from learning.weight_group import digest, views
from services.http.app import Server
from trainer.server import BackgroundServer, create_trainer_app
from trainer.weights.broadcast import Broadcaster
from trainer.weights.host_copy import HostCopy
from trainer.weights.publisher import PublishFailed, WeightBoard
from trainer.weights.transfer import EngineGroup, Rendezvous, Transfer


def mixed() -> dict[str, Tensor]:
    """Tensors of two dtypes, one of them with an odd number of elements."""
    return {
        "a": torch.randn(4, 8),
        "b": torch.randn(3, dtype=torch.bfloat16),
        "c": torch.randn(5, 5),
        "d": torch.randn(()),
        "e": torch.randn(40, 8),
    }


def test_buckets_keep_their_tensors_and_end_at_their_size_or_another_dtype() -> None:
    snapshot, filled = HostCopy(bucket_bytes=250), list[int]()
    for version in (1, 2):
        weights = mixed()
        filled.clear()
        snapshot.fill(weights.items(), version, filled.append)
        assert [bucket.names for bucket in snapshot.buckets] == [["a"], ["b"], ["c", "d"], ["e"]]
        assert filled == [0, 1, 2, 3]
        found = dict(item for pair in zip(snapshot.flats, snapshot.buckets, strict=True) for item in views(*pair))
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
        assert snapshot.size == sum(tensor.nbytes for tensor in weights.values())
    with pytest.raises(NotFound), snapshot.reading(1):
        pass


@pytest.mark.parametrize("change", [{"c": torch.zeros(5, 4)}, {"f": torch.zeros(1)}, {"a": torch.zeros(4, 8).double()}])
def test_weights_of_another_layout_are_refused(change: dict[str, Tensor]) -> None:
    snapshot = HostCopy()
    snapshot.fill(mixed().items(), 1)
    with pytest.raises(ServiceError):
        snapshot.fill((mixed() | change).items(), 2)
    with pytest.raises(NotFound), snapshot.reading(1):  # half overwritten, so nobody may read it
        pass


def broadcaster(tmp_path: Path) -> tuple[Broadcaster, WeightBoard]:
    board = WeightBoard(tmp_path / "weights")
    static = tmp_path / "config.json"
    static.write_text("{}")
    return Broadcaster(board, [static], "run", 5.0, Rendezvous("127.0.0.1")), board


async def test_files_are_written_on_request_and_checksums_are_compared(tmp_path: Path) -> None:
    sender, board = broadcaster(tmp_path)
    transport = httpx.ASGITransport(create_trainer_app(board, Metrics("trainer")))
    async with httpx.AsyncClient(base_url="http://trainer", transport=transport) as http:
        sums = {name: digest(tensor) for name, tensor in mixed().items()}
        body = {"worker": "rollout-server-0", "ranks": [sums]}
        assert (await http.post("/weights/1/verify", json=body)).status_code == 404
        weights = mixed()
        sender.publish(weights.items(), 1)
        latest = (await http.get("/weights/latest")).json()
        assert (latest["files"], latest["broadcast"]) == ([], None)
        assert not list(board.directory.glob("v*"))
        asked = (await http.get("/weights/latest", params={"files": "true"})).json()
        assert {file["name"] for file in asked["files"]} == {"config.json", "model.safetensors"}
        written = load_file(board.directory / "v000001" / "model.safetensors")
        assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())
        good = {name: digest(tensor) for name, tensor in weights.items()}
        answer = await http.post("/weights/1/verify", json=body | {"ranks": [good]})
        assert answer.json()["compared"] == "5 of 5 tensors with the trainer's"
        for wrong in (good | {"c": sums["c"]}, {"other": "0"}):
            answer = await http.post("/weights/1/verify", json=body | {"ranks": [wrong]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
        sender.publish(mixed().items(), 2)
        assert (await http.post("/weights/1/verify", json=body | {"ranks": [good]})).status_code == 404


def test_an_unknown_address_is_logged_and_weights_go_as_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board = WeightBoard(tmp_path / "weights")
    board.report(WorkerReport(name="rollout-server-0", url="", num_nodes=1, state="ready", version=None))
    sender = Broadcaster(board, [], "run", 1.0, Rendezvous("nobody.invalid"))
    manifest, size = sender.publish(mixed().items(), 1)
    assert (manifest.broadcast, size) == (None, sum(tensor.nbytes for tensor in mixed().values()))
    assert "no group can be formed at nobody.invalid" in caplog.text


class Exiting(EngineGroup):
    """Leaves the interpreter where others raise an error."""

    def send(self, flat: Tensor) -> None:
        sys.exit("in the middle of a broadcast")


def test_a_transfer_whose_thread_ends_is_a_failed_transfer() -> None:
    """The publisher would take it for sent, and wait until `trainer.publish_timeout_s` for engines to confirm it."""
    worker = WorkerReport(name="rollout-server-0", url="", num_nodes=1, state="ready", version=None)
    transfer = Transfer(Exiting([worker], Rendezvous("127.0.0.1"), 5.0), [torch.zeros(1, dtype=torch.uint8)])
    transfer.put(0)
    transfer.done.wait()
    assert str(transfer.error) == "in the middle of a broadcast"


def test_a_server_whose_thread_dies_ends_the_wait_for_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No node could fetch the version or report, and the publisher would wait for `trainer.publish_timeout_s`."""
    board = WeightBoard(tmp_path / "weights")
    app = create_trainer_app(board, Metrics("trainer"))

    async def breaks(*_: object) -> bool:
        raise ZeroDivisionError("no such tick")

    with BackgroundServer(app, "127.0.0.1", 0, died=board.server_died):
        monkeypatch.setattr(Server, "on_tick", breaks)
        with pytest.raises(PublishFailed, match=r"the trainer's HTTP server, .*, has died"):
            board.wait_confirmed(WeightManifest(version=1, run_id="run"), 3600.0, print)
    assert "ZeroDivisionError: no such tick" in caplog.text


def test_an_engine_has_as_many_ranks_as_the_settings_say() -> None:
    for words in (["--dp-size", "2"], ["--tp=2"], ["--nnodes", "2"]):
        settings = {"trainer": {"weight_sync": "distributed"}, "rollout": {"engine_args": words}}
        with pytest.raises(ValueError, match=r"rollout\.engine_args has --.*distributed"):
            Config.model_validate(settings)
        Config.model_validate(settings | {"trainer": {"weight_sync": "http"}})
