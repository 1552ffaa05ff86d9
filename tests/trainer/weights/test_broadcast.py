"""The host copy of published weights, the comparison with engines' checksums, and files on
demand."""

import asyncio
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.errors import Conflict, NotFound, ServiceError
from common.process.metrics import Metrics
from common.settings.config import Config
from common.wire.schemas import WeightChecksums, WeightManifest, WorkerReport
from learning.weight_group import digest, views
from services.http.app import Server
from trainer.backends.server import BackgroundServer, create_trainer_app
from trainer.weights.board import PublishFailed, WeightBoard
from trainer.weights.broadcast import Broadcaster
from trainer.weights.host_copy import HostCopy
from trainer.weights.tensor_hash import gpu_digest
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
        found = dict(
            item
            for pair in zip(snapshot.flats, snapshot.buckets, strict=True)
            for item in views(*pair)
        )
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
        assert snapshot.size == sum(tensor.nbytes for tensor in weights.values())
    with pytest.raises(NotFound) as gone, snapshot.reading(1):
        pass
    assert (gone.value.field, gone.value.value) == ("version", "1")


@pytest.mark.parametrize(
    "change", [{"c": torch.zeros(5, 4)}, {"f": torch.zeros(1)}, {"a": torch.zeros(4, 8).double()}]
)
def test_weights_of_another_layout_are_refused(change: dict[str, Tensor]) -> None:
    snapshot = HostCopy()
    snapshot.fill(mixed().items(), 1)
    with pytest.raises(ServiceError) as refused:
        snapshot.fill((mixed() | change).items(), 2)
    (name,) = change
    assert refused.value.field == ("name" if name == "f" else name)
    assert refused.value.value == name
    with pytest.raises(NotFound), snapshot.reading(1):  # half overwritten, so nobody may read it
        pass


def test_weights_of_which_one_is_missing_are_refused() -> None:
    snapshot = HostCopy()
    snapshot.fill(mixed().items(), 1)
    for missing, found in (("b", "c"), ("e", "nothing")):
        fewer = {name: tensor for name, tensor in mixed().items() if name != missing}
        with pytest.raises(ServiceError) as refused:
            snapshot.fill(fewer.items(), 2)
        assert (refused.value.field, refused.value.value) == (missing, found)


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
        assert (
            await http.post("/weights/1/verify", json=body | {"ranks": [good]})
        ).status_code == 404


RECEIVER = """
import json, sys
import torch, torch.distributed as dist
from common.wire.schemas import Bucket
from learning.weight_group import join, size_of, views
from trainer.weights.tensor_hash import gpu_digest

group = None
for line in sys.stdin:
    sent = json.loads(line)
    if group is None:
        group = join(
            sent["master_address"], sent["master_port"], rank=1, world_size=2,
            name=sent["group"], backend="gloo", timeout_s=60.0,
        )
    sums = {}
    for body in sent["buckets"]:
        bucket = Bucket(**body)
        flat = torch.empty(size_of(bucket), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=group)
        sums |= {name: gpu_digest(tensor) for name, tensor in views(flat, bucket)}
    print(json.dumps(sums), flush=True)
"""
"""An engine that receives over gloo, and computes checksums as SGLang does on a GPU."""


def received(process: "subprocess.Popen[str]", board: WeightBoard, version: int) -> dict[str, str]:
    """Lets the engine take part in the broadcast of a version; returns its checksums."""
    while (
        (latest := board.latest()) is None or latest.version != version or latest.broadcast is None
    ):
        time.sleep(0.01)
    assert process.stdin
    assert process.stdout
    process.stdin.write(latest.broadcast.model_dump_json() + "\n")
    process.stdin.flush()
    sums: dict[str, str] = json.loads(process.stdout.readline())
    return sums


@pytest.mark.integration
def test_checksums_for_gpus_are_those_of_every_version_that_is_sent(tmp_path: Path) -> None:
    board = WeightBoard(tmp_path / "weights")
    board.report(
        WorkerReport(name="rollout-server-0", url="", num_nodes=1, state="ready", version=None)
    )
    sender = Broadcaster(
        board, [], "run", 300.0, Rendezvous("127.0.0.1", gpu_checksums=True), bucket_bytes=250
    )
    words = [sys.executable, "-c", RECEIVER]
    with (
        subprocess.Popen(
            words, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
        ThreadPoolExecutor(1) as pool,
    ):
        for version in (1, 2, 3):
            answer = pool.submit(received, process, board, version)
            weights = mixed()
            sender.publish(weights.items(), version)
            engine = answer.result(300)
            assert engine == {name: gpu_digest(tensor) for name, tensor in weights.items()}
            sums = WeightChecksums(worker="rollout-server-0", ranks=[engine])
            assert (
                asyncio.run(sender.verify(version, sums)).compared
                == "5 of 5 tensors with the trainer's"
            )
            wrong = WeightChecksums(worker="rollout-server-0", ranks=[engine | {"c": "0" * 16}])
            with pytest.raises(Conflict, match=r"differ from what was sent: c"):
                asyncio.run(sender.verify(version, wrong))
        assert process.stdin
        process.stdin.close()
    sender.close()


def test_an_unknown_address_is_logged_and_weights_go_as_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = WeightBoard(tmp_path / "weights")
    board.report(
        WorkerReport(name="rollout-server-0", url="", num_nodes=1, state="ready", version=None)
    )
    sender = Broadcaster(board, [], "run", 1.0, Rendezvous("nobody.invalid"))
    manifest, size = sender.publish(mixed().items(), 1)
    assert (manifest.broadcast, size) == (None, sum(tensor.nbytes for tensor in mixed().values()))
    assert "no group can be formed at nobody.invalid" in caplog.text


class Exiting(EngineGroup):
    """Leaves the interpreter where others raise an error."""

    def send(self, flat: Tensor) -> None:
        sys.exit("in the middle of a broadcast")


def test_a_transfer_whose_thread_ends_is_a_failed_transfer() -> None:
    """The publisher would take it for sent, and wait until `limits.fence_after_s` for engines
    to confirm it."""
    worker = WorkerReport(name="rollout-server-0", url="", num_nodes=1, state="ready", version=None)
    group = Exiting([worker], Rendezvous("127.0.0.1"), 5.0)
    transfer = Transfer(group, [torch.zeros(1, dtype=torch.uint8)])
    transfer.put(0)
    assert str(transfer.done.exception()) == "SystemExit: in the middle of a broadcast"


def test_a_server_whose_thread_dies_ends_the_wait_for_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No node could fetch the version or report, and the publisher would wait for
    `limits.fence_after_s`."""
    board = WeightBoard(tmp_path / "weights")
    app = create_trainer_app(board, Metrics("trainer"))

    async def breaks(*_: object) -> bool:
        raise ZeroDivisionError("no such tick")

    with BackgroundServer(app, "127.0.0.1", 0, died=board.server_died):
        monkeypatch.setattr(Server, "on_tick", breaks)
        with pytest.raises(PublishFailed) as caught:
            board.wait_confirmed(WeightManifest(version=1, run_id="run"), 3600.0, print)
    assert caught.value.field == "trainer.port"
    assert "ZeroDivisionError: no such tick" in caplog.text


@pytest.mark.parametrize(
    "words",
    [
        *(["--dp-size", "2"], ["--tp=2"], ["--pipeline-parallel-size", "2"]),
        *(
            ["--moe-dp-size", "2"],
            ["--moe-a2a-backend", "deepep"],
            ["--enable-eplb"],
            ["--moe-dense-tp-size", "1"],
        ),
        *(["--quantization", "fp8"], ["--quantization=w8a8_int8"], ["--quantize-and-serve"]),
        *(["--moe-runner-backend", "flashinfer_trtllm"], ["--moe-runner-backend=triton_kernel"]),
    ],
    ids=" ".join,
)
def test_arguments_with_which_sglang_holds_other_weights_than_it_is_sent_are_refused(
    words: list[str],
) -> None:
    settings = {"trainer": {"weight_sync": "distributed"}, "rollout": {"engine_args": words}}
    with pytest.raises(
        ValueError, match=rf"rollout\.engine_args has {words[0].partition('=')[0]}[ ,].*distributed"
    ):
        Config.model_validate(settings)
    Config.model_validate(settings | {"trainer": {"weight_sync": "http"}})
    triton = {"engine_args": ["--moe-runner-backend", "triton"]}
    Config.model_validate(settings | {"rollout": triton})


@pytest.mark.parametrize(
    "words",
    [
        ["--ep-size", "2"],
        ["--ep=4"],
        ["--enable-dp-attention", "--dp-size", "2"],
    ],
)
def test_groups_of_an_engines_ranks_must_divide_them(words: list[str]) -> None:
    def config(size: int) -> Config:
        rollout = {"engine_args": words, "tensor_parallel_size": size}
        return Config.model_validate(
            {"trainer": {"weight_sync": "distributed"}, "rollout": rollout}
        )

    assert config(4).rollout.gpus_per_engine == 4
    with pytest.raises(ValueError, match=r"does not divide rollout\.tensor_parallel_size 3"):
        config(3)


@pytest.mark.parametrize("weight_sync", ["http", "distributed"])
def test_arguments_that_differ_between_the_nodes_of_an_engine_are_refused(weight_sync: str) -> None:
    settings = {
        "trainer": {"weight_sync": weight_sync},
        "rollout": {"engine_args": ["--nnodes", "2"]},
    }
    with pytest.raises(
        ValueError, match=r"rollout\.engine_args has --nnodes.*rollout\.nodes_per_engine"
    ):
        Config.model_validate(settings)
