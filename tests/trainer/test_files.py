"""Checkpoints, weight versions, the run directory and the stage clock."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import ConfigError, NotFound
from common.process.loop_thread import LoopThread
from common.process.metrics import Metrics
from common.settings.config import Config
from common.weights.checksums import Hasher
from common.wire.schemas import WeightManifest, WorkerReport
from learning.loading import _fingerprint
from learning.ranks import Ranks
from tests.support.batches.groups import make_group, save, whole
from tests.support.errors import raises
from trainer.algorithms.batch import Batch
from trainer.api.hub import write_card
from trainer.backends.server import BackgroundServer, create_trainer_app
from trainer.evaluation.evaluation import pass_at_k
from trainer.observe.run_dir import read_lines, read_settings
from trainer.policy import checkpoint
from trainer.policy.policy import Policy
from trainer.policy.scorer import load_tokenizer
from trainer.timing import StageClock
from trainer.weights.adapters import static_files
from trainer.weights.board import PublishFailed, WeightBoard
from trainer.weights.publisher import Publisher


def batch(config: Config, seed: int) -> Batch:
    groups = [make_group(np.random.default_rng(seed + i), [1.0, 0.0, 0.0]) for i in range(3)]
    return whole(groups, config)


def test_a_resumed_policy_makes_the_same_updates(config: Config, tmp_path: Path) -> None:
    unbroken = Policy(config, Ranks())
    unbroken.update(batch(config, 0))
    unbroken.step = 1
    save(unbroken, tmp_path / "checkpoints")
    unbroken.update(batch(config, 10))
    resumed, state, path = Policy.resume(config, Ranks(), tmp_path)
    assert state is not None
    assert (resumed.step, state.position, path) == (1, 7, tmp_path / "checkpoints" / "step_000001")
    resumed.update(batch(config, 10))
    for (name, a), b in zip(
        unbroken.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_checkpoint_loads_with_transformers_and_old_ones_are_removed(
    config: Config, tmp_path: Path
) -> None:
    policy = Policy(config, Ranks())
    static = static_files(config, policy.model, load_tokenizer(config.model), tmp_path / "model")
    tmp_path = tmp_path / "checkpoints"
    for policy.step in (1, 2, 3, 12):
        save(policy, tmp_path, keep=2, static=static)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003", "step_000012"]
    path = checkpoint.newest(tmp_path)
    assert path is not None
    assert path.name == "step_000012"
    model = AutoModelForCausalLM.from_pretrained(path)
    assert AutoTokenizer.from_pretrained(path).chat_template
    for a, b in zip(model.parameters(), policy.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_trap_a_new_run_ignores_the_checkpoints_of_an_earlier_one(config: Config) -> None:
    """The checkpoints of an earlier run have higher steps: they would displace those of the new
    run, or be resumed."""
    assert config.trainer.run_dir is not None
    directory, policy = config.trainer.run_dir / "checkpoints", Policy(config, Ranks())
    for policy.step in (60, 80, 100):
        save(policy, directory)
    config.checkpoint.resume = False
    anew, state, saved = Policy.resume(config, Ranks(), config.trainer.run_dir)
    assert (anew.step, state, saved) == (0, None, None)
    anew.step = 20
    assert save(anew, directory).is_dir()
    assert [path.name for path in directory.iterdir()] == ["step_000020"]
    [aside] = config.trainer.run_dir.glob("checkpoints-until-*")
    assert sorted(path.name for path in aside.iterdir()) == [
        "step_000060",
        "step_000080",
        "step_000100",
    ]


def test_a_half_written_checkpoint_does_not_count(config: Config, tmp_path: Path) -> None:
    complete = save(Policy(config, Ranks()), tmp_path)
    (tmp_path / "step_000099.partial").mkdir()
    assert checkpoint.newest(tmp_path) == complete
    (complete / "trainer_state.json").write_bytes(b"garbage")
    with pytest.raises(ConfigError) as caught:
        checkpoint.load_state(checkpoint.read_state(complete), complete)
    assert caught.value.code == "checkpoint_changed"


@pytest.mark.parametrize("lost", ["trainer_state.json", "model.safetensors", "state/.metadata"])
def test_a_checkpoint_that_a_bucket_has_only_in_part_does_not_count(
    config: Config, tmp_path: Path, lost: str
) -> None:
    """A mounted bucket moves and uploads a directory file by file in any order, and a pod may be
    lost meanwhile."""
    policy = Policy(config, Ranks())
    policy.update(batch(config, 0))
    policy.step = 1
    first = save(policy, tmp_path)
    policy.step = 2
    second = save(policy, tmp_path)
    assert checkpoint.newest(tmp_path) == second
    (second / lost).unlink()
    assert checkpoint.newest(tmp_path) == first
    if lost != "trainer_state.json":
        (second / lost).write_bytes(b"begun")
        assert checkpoint.newest(tmp_path) == first


def test_the_best_checkpoint_stays_where_there_can_be_no_link(
    config: Config, tmp_path: Path
) -> None:
    (tmp_path / "best.new" / "in the way").mkdir(parents=True)
    policy = Policy(config, Ranks())
    for policy.step, accuracy in enumerate([0.2, 0.5, 0.4, None, 0.3], 1):
        save(policy, tmp_path, keep=1, accuracy=accuracy)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.new",
        "step_000002",
        "step_000005",
    ]


def test_a_directory_without_a_state_is_no_checkpoint_of_this_version(tmp_path: Path) -> None:
    with raises(ConfigError, field="trainer.run_dir", value=str(tmp_path), code="config"):
        checkpoint.load_state(checkpoint.read_state(tmp_path), tmp_path)


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "nothing") is None


def report(
    version: int | None, state: str = "ready", run_id: str = "run", node: int = 0, nodes: int = 2
) -> WorkerReport:
    return WorkerReport.model_validate(
        {
            "name": f"rollout-server-{node}",
            "url": f"http://node{node}:30001",
            "num_nodes": nodes,
            "state": state,
            "version": version,
            "run_id": run_id,
        }
    )


def publisher(
    config: Config, tmp_path: Path, timeout_s: float, fenced: list[str]
) -> tuple[Publisher, WeightBoard, Policy]:
    policy = Policy(config, Ranks())
    board = WeightBoard(tmp_path / "weights")
    static = static_files(config, policy.model, load_tokenizer(config.model), tmp_path / "model")
    return (
        Publisher(board, static, "run", timeout_s, lambda worker: fenced.append(worker.url), print),
        board,
        policy,
    )


def test_trap_weights_are_versioned_and_every_worker_confirms(
    config: Config, tmp_path: Path
) -> None:
    """Trap: weights overwritten in place and pushed to the router.

    Here every version has its own directory and manifest, and publishing waits for every worker,
    not just for any one.
    """
    publish, board, policy = publisher(config, tmp_path, 30, [])
    board.report(report(None, "ready", node=0))
    board.report(report(None, "ready", node=1))
    thread = threading.Thread(target=publish.publish, args=(policy.weights(), 3))
    thread.start()
    while board.latest() is None:
        time.sleep(0.01)
    board.report(report(3, node=0))
    board.report(report(3, "updating", node=1))
    thread.join(0.5)
    assert thread.is_alive()
    board.report(report(3, run_id="an earlier run", node=1))
    thread.join(0.5)
    assert thread.is_alive()
    board.report(report(3, node=1))
    thread.join(400)
    assert not thread.is_alive()
    manifest = board.latest()
    assert manifest is not None
    directory = tmp_path / "weights" / "v000003"
    for file in manifest.files:
        body = (directory / file.name).read_bytes()
        assert (len(body), Hasher(body).hexdigest()) == (file.size, file.xxh3)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
        file.name for file in manifest.files
    }
    published = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(published.lm_head.weight, policy.model.get_output_embeddings().weight)
    assert "lm_head.weight" not in load_file(
        directory / "model.safetensors"
    )  # tied weights are written once


def test_a_worker_that_does_not_confirm_is_fenced(config: Config, tmp_path: Path) -> None:
    fenced: list[str] = []
    publish, board, policy = publisher(config, tmp_path, 0.5, fenced)
    board.report(report(1, node=0))
    board.report(report(0, "stale", node=1))
    publish.publish(policy.weights(), 1)
    assert fenced == ["http://node1:30001"]


def test_a_fenced_worker_is_waited_for_again_only_after_it_caught_up(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.weights.board._PERMISSION_S", 0.1)
    fenced: list[str] = []
    publish, board, policy = publisher(config, tmp_path, 1.0, fenced)
    board.report(report(1, node=0))
    board.report(report(0, "stale", node=1))
    publish.publish(policy.weights(), 1)
    board.report(report(2, node=0))
    publish.publish(policy.weights(), 2)  # returns at once: nobody waits for node 1 a second time
    assert fenced == ["http://node1:30001"]
    board.report(report(3, node=0))
    board.report(report(3, node=1))
    publish.publish(policy.weights(), 3)
    board.report(report(4, node=0))
    board.report(report(3, "stale", node=1))
    publish.publish(policy.weights(), 4)
    assert fenced == ["http://node1:30001"] * 2


def test_a_silent_worker_is_not_waited_for_and_gets_no_traffic(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent may be stopped or cut off while its engine still answers with old weights."""
    monkeypatch.setattr("trainer.weights.board._SILENT_S", 5.0)
    monkeypatch.setattr("trainer.weights.board._PERMISSION_S", 5.0)
    fenced: list[str] = []
    publish, board, policy = publisher(config, tmp_path, 60, fenced)
    board.report(report(1, node=0))
    board.report(report(1, node=1))
    publish.publish(policy.weights(), 1)
    thread = threading.Thread(target=publish.publish, args=(policy.weights(), 2))
    thread.start()
    limit = time.monotonic() + 400
    while thread.is_alive() and time.monotonic() < limit:
        board.report(report(2, node=0))  # node 1 is dead
        time.sleep(0.05)
    assert not thread.is_alive()
    assert [worker.name for worker in board.workers()] == ["rollout-server-0"]
    assert fenced == ["http://node1:30001"]
    board.report(report(3, node=0))
    publish.publish(policy.weights(), 3)
    assert len(fenced) == 1, "once is enough"
    board.report(report(4, node=0))
    board.report(report(4, node=1))  # node 1 was only stopped and goes on
    publish.publish(policy.weights(), 4)
    assert len(board.workers()) == 2


def test_publishing_fails_when_nobody_confirms(config: Config, tmp_path: Path) -> None:
    publish, board, policy = publisher(config, tmp_path, 0.5, [])
    board.report(report(0, "failed", node=1))
    with raises(PublishFailed, code="nodes_behind"):
        publish.publish(policy.weights(), 1)


def test_old_versions_are_removed_from_the_disk(config: Config, tmp_path: Path) -> None:
    publish, board, policy = publisher(config, tmp_path, 5, [])
    for version in range(6):
        board.report(report(version, nodes=1))
        publish.publish(policy.weights(), version)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        "v000003",
        "v000004",
        "v000005",
    ]
    with pytest.raises(NotFound) as caught:
        board.file(0, "config.json")
    assert (caught.value.field, caught.value.value) == ("name", "0/config.json")


def test_versions_of_an_earlier_attempt_do_not_count(config: Config, tmp_path: Path) -> None:
    (tmp_path / "weights" / "v000055").mkdir(parents=True)
    publish, board, policy = publisher(config, tmp_path, 5, [])
    for version in (51, 52, 53, 54):
        board.report(report(version, nodes=1))
        publish.publish(policy.weights(), version)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        "v000052",
        "v000053",
        "v000054",
    ]


async def test_waiting_for_a_version_ends_when_the_board_closes(tmp_path: Path) -> None:
    board = WeightBoard(tmp_path / "weights")
    waiting = asyncio.create_task(board.latest_after("", -1, 60))
    await asyncio.sleep(0.05)
    board.close()
    with pytest.raises(NotFound):
        await asyncio.wait_for(waiting, 400)


@pytest.mark.parametrize(
    ("latest", "known"),
    [
        (WeightManifest(version=3, run_id="run"), ("run", 2, False)),
        (WeightManifest(version=0, run_id="another run"), ("run", 9, False)),
        (WeightManifest(version=3, run_id="run", asleep=True), ("run", 3, False)),
        (WeightManifest(version=3, run_id="run"), ("run", 3, True)),
    ],
    ids=["newer", "of another run", "asleep", "awake"],
)
async def test_an_agent_that_knows_something_else_gets_the_latest_version_without_waiting(
    tmp_path: Path, latest: WeightManifest, known: tuple[str, int, bool]
) -> None:
    board = WeightBoard(tmp_path / "weights")
    run_id, version, asleep = known
    board.announce(latest)
    asking = asyncio.create_task(board.latest_after(run_id, version, wait_s=3600, asleep=asleep))
    await asyncio.sleep(0)
    assert asking.done()
    assert await asking == latest

    same = asyncio.create_task(
        board.latest_after(latest.run_id, latest.version, wait_s=3600, asleep=latest.asleep)
    )
    await asyncio.sleep(0)
    assert not same.done(), "one that knows the latest waits for the next"
    board.close()
    assert await same == latest


@pytest.mark.parametrize("name", ["../config.json", ".hidden", "nothing"])
def test_only_files_of_the_version_are_served(config: Config, tmp_path: Path, name: str) -> None:
    publish, board, policy = publisher(config, tmp_path, 5, [])
    board.report(report(0, nodes=1))
    publish.publish(policy.weights(), 0)
    with pytest.raises(NotFound):
        board.file(0, name)


def test_weights_over_http(config: Config, tmp_path: Path) -> None:
    publish, board, policy = publisher(config, tmp_path, 10, [])
    with (
        BackgroundServer(create_trainer_app(board, Metrics("test")), "127.0.0.1", 0) as server,
        httpx.Client(timeout=60) as http,
    ):
        base = f"http://127.0.0.1:{server.port}"
        assert http.get(f"{base}/health").json()["status"] == "healthy"
        answer = http.get(f"{base}/weights/latest")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        body = report(0, nodes=1).model_dump()
        assert http.post(f"{base}/workers/rollout-server-0", json=body).status_code == 200
        assert http.post(f"{base}/workers/rollout-server-7", json=body).status_code == 422
        assert (
            http.post(f"{base}/workers/rollout-server-0", json=body | {"state": "odd"}).status_code
            == 422
        )
        publish.publish(policy.weights(), 0)
        manifest = http.get(f"{base}/weights/latest", params={"wait_s": 5}).json()
        for file in manifest["files"]:
            content = http.get(f"{base}/weights/0/files/{file['name']}").content
            assert Hasher(content).hexdigest() == file["xxh3"]
        again = http.get(
            f"{base}/weights/latest", params={"after_run": "run", "after_version": 0, "wait_s": 0.2}
        )
        assert again.json() == manifest
        assert http.get(f"{base}/weights/0/files/..%2F..%2Fconfig.json").status_code == 404
        assert http.get(f"{base}/weights/latest", params={"wait_s": "nan"}).status_code == 422


def test_stages_add_up_to_the_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = StageClock()
    now = 2.0
    clock.lap()
    with clock.stage("generation"):
        now = 7.0
        with clock.stage("update"):  # takes precedence
            now = 10.0
    now = 12.0
    seconds = clock.lap()
    assert {stage: spent for stage, spent in seconds.items() if spent} == {
        "generation": 5.0,
        "update": 3.0,
        "waiting": 2.0,
    }
    assert sum(seconds.values()) == 12.0 - 2.0
    assert sum(clock.lap().values()) == 0.0


def test_generations_in_flight_are_a_mean_over_the_wall_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = StageClock()
    with clock.stage("generation"):
        now = 2.0
        with clock.stage("generation"), clock.stage("generation"):
            now = 5.0
        now = 6.0
    now = 10.0
    assert clock.generating() == (0.6, 1.2)  # of 10 s, 2 and 1 had one generation, 3 had three
    now = 11.0
    assert clock.generating() == (0.0, 0.0)


def test_the_processor_time_of_the_loop_is_only_that_of_its_thread() -> None:
    async def compute(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    with LoopThread() as loop:
        before = loop.cpu_seconds()
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        assert loop.cpu_seconds() - before < 0.1
        loop.call(compute(0.2))
        assert 0.2 <= loop.cpu_seconds() - before < 0.4


@pytest.mark.parametrize(
    ("samples", "correct", "k", "expected"),
    [(8, 0, 8, 0.0), (8, 1, 8, 1.0), (4, 2, 1, 0.5), (5, 2, 2, 0.7), (10, 3, 5, 1 - 21 / 252)],
)
def test_pass_at_k_hand_computed(samples: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, correct, k) == pytest.approx(expected)


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(3, 1, 4)


def test_a_line_cut_by_a_crash_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    path.write_bytes('{"step": 1}\n{"text": "½"}'.encode()[:-3])  # cut within a character
    assert read_lines(path) == [{"step": 1}]


def damaged(content: bytes) -> bytes:
    """Returns the content with a byte that is no UTF-8 in its middle."""
    at = len(content) // 2
    return content[:at] + b"\xff" + content[at + 1 :]


@pytest.mark.parametrize("name", ["metrics", "groups", "attempts", "evaluations", "audit"])
def test_a_damaged_line_is_named_with_its_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damaged(b'{"step": 22222}') + b"\n")
    with raises(ConfigError, field="trainer.run_dir", value=str(path)) as caught:
        read_lines(path)
    assert caught.value.message.startswith("line 2 ")


@pytest.mark.parametrize("content", [b'{"learning_rate": 1}', b"[]", b"{"])
def test_damaged_settings_of_a_run_are_named_with_their_file(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "config.json").write_bytes(damaged(content) if len(content) > 2 else content)
    for read in (read_settings, lambda run_dir: write_card(run_dir, run_dir, 1)):
        with raises(ConfigError, field="trainer.run_dir", value=str(tmp_path / "config.json")):
            read(tmp_path)


@pytest.mark.parametrize("change", [damaged, lambda body: body.replace(b"7", b"8", 1)])
def test_a_damaged_state_of_a_checkpoint_is_named_with_its_file(
    config: Config, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    save(Policy(config, Ranks()), tmp_path)
    path = next(tmp_path.glob("step_*"))
    state = path / "trainer_state.json"
    before = _fingerprint(path)
    state.write_bytes(change(state.read_bytes()))

    assert _fingerprint(path) != before, "ranks compare what they see"
    assert checkpoint.changed_file(path) == "trainer_state.json"
    with raises(ConfigError, code="checkpoint_changed"):
        checkpoint.load_state(state.read_bytes(), path)
    with raises(ConfigError, code="checkpoint_changed"):
        checkpoint.check_model(path)
