"""An engine over several nodes: what its first node decides, what the others do with the weights, and
what the settings must be.
"""

import asyncio
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import ValidationError

from common.errors import ConfigError, NotFound
from common.process.progress import Stuck
from common.process.topology import Topology
from common.settings.config import Config
from common.weights.checksums import checksum
from common.wire.schemas import (
    EngineNodeReport,
    EngineStart,
    EngineWeights,
    WeightFile,
    WeightManifest,
)
from services.rollout.engine_client import engine_command
from services.rollout.engine_nodes import EngineNodes, NodeCannotStart
from services.rollout.further_node import make_readable
from tests.support.errors import raises

OTHERS = ["rollout-server-1", "rollout-server-2"]
START = EngineStart(id="a", dist_init_addr="head:1", model_path="m", weight_version="default")


def nodes(silent_s: float = 60.0, stuck_after_s: float = 60.0) -> EngineNodes:
    return EngineNodes(OTHERS, silent_s=silent_s, stuck_after_s=stuck_after_s)


def say(board: EngineNodes, name: str, **fields: object) -> None:
    board.report(EngineNodeReport.model_validate({"name": name, **fields}))


async def started(board: EngineNodes) -> None:
    for name in OTHERS:
        say(board, name, prepared=START.id)
    await board.start(START, print)


async def test_no_node_may_start_before_all_are_prepared_and_those_that_lack_are_named() -> None:
    board = nodes()
    told: list[str] = []
    first = await board.order_after("", 0)
    waiting = asyncio.create_task(board.start(START, told.append))
    order = await board.order_after(first.revision, 60)
    assert order.start == START
    say(board, OTHERS[0], prepared="a")
    say(board, OTHERS[1], prepared="an earlier one", detail="10 of 20 MB fetched")
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert told[-1] == "waits for rollout-server-2 (10 of 20 MB fetched)"
    assert (await board.order_after("", 0)).start == START
    say(board, OTHERS[1], prepared="a")
    await waiting
    assert (await board.order_after(order.revision, 60)).start == START.model_copy(
        update={"go": True}
    )


async def test_a_node_that_cannot_get_the_weights_of_a_start_ends_the_wait() -> None:
    board = nodes()
    say(board, OTHERS[0], prepared="a")
    say(board, OTHERS[1], cannot_start="a", detail="the trainer has removed this file")
    with raises(NodeCannotStart, field="node", value=OTHERS[1]) as caught:
        await board.start(START, print)
    assert "the trainer has removed this file" in caught.value.message


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        ({"start": "a", "prepared": "a"}, None),
        ({"start": "", "prepared": "a"}, None),  # it has not read the order yet
        ({"start": "an earlier one", "ended": "killed", "prepared": "a"}, None),
        ({"start": "a", "ended": "the process ended with status 137"}, "status 137"),
    ],
)
async def test_an_engine_is_started_again_when_a_process_of_this_start_has_ended(
    report: dict[str, str], problem: str | None
) -> None:
    board = nodes()
    await started(board)
    say(board, OTHERS[1], **report)
    if problem is None:
        assert board.problem() is None
    else:
        assert board.problem() == "rollout-server-2: the process ended with status 137"
    board.stop()
    assert board.problem() is None
    assert (await board.order_after("", 0)).start is None


async def test_a_node_that_falls_silent_is_named() -> None:
    board = nodes(silent_s=1)
    await started(board)
    assert board.problem() is None
    say(board, OTHERS[0], start="a")
    while board.problem() is None:
        say(board, OTHERS[0], start="a")
        await asyncio.sleep(0.01)
    assert str(board.problem()).startswith("rollout-server-2 has not reported for ")


async def test_weights_are_held_when_every_node_can_read_them_at_the_path_of_the_engine() -> None:
    board = nodes()
    manifest = WeightManifest(version=3, run_id="run")
    key = EngineWeights(manifest=manifest, path="/disk/v3").key
    board.want(manifest)
    say(board, OTHERS[0], holds=key)
    say(board, OTHERS[1], holds=EngineWeights(manifest=manifest).key)  # fetched, but not there
    holding = asyncio.create_task(board.hold(manifest, Path("/disk/v3")))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not holding.done()
    say(board, OTHERS[1], holds=key)
    await holding


async def test_a_node_that_makes_no_progress_with_weights_is_named() -> None:
    board = nodes(stuck_after_s=0.1)
    say(board, OTHERS[0], holds="run-v3 /disk/v3")
    say(board, OTHERS[1], detail="no space left", progress=7)
    with raises(Stuck, code="stuck", field="rollout.stuck_after_s", value="0.1") as caught:
        await board.hold(WeightManifest(version=3, run_id="run"), Path("/disk/v3"))
    assert "rollout-server-2 (no space left)" in caught.value.message


def test_a_node_of_another_engine_is_refused() -> None:
    with raises(NotFound, field="name"):
        say(nodes(), "rollout-server-3")


def version(directory: Path, content: str) -> WeightManifest:
    directory.mkdir(parents=True)
    file = directory / "model.safetensors"
    file.write_text(content)
    files = [WeightFile(name=file.name, size=file.stat().st_size, xxh3=checksum(file))]
    return WeightManifest(version=3, run_id="run", files=files)


def test_weights_on_a_disk_that_the_nodes_share_are_read_where_they_are(tmp_path: Path) -> None:
    own = tmp_path / "rollout-server-1" / "v3"
    shared = tmp_path / "rollout-server-0" / "v3"
    manifest = version(own, "numbers")
    version(shared, "numbers")
    make_readable(shared, own, EngineWeights(manifest=manifest))
    assert not shared.is_symlink()


def test_weights_on_a_disk_of_its_own_are_read_through_a_link(tmp_path: Path) -> None:
    own = tmp_path / "rollout-server-1" / "v3"
    manifest = version(own, "numbers")
    path = tmp_path / "rollout-server-0" / "v3"
    weights = EngineWeights(manifest=manifest)
    make_readable(path, own, weights)
    assert (path / "model.safetensors").read_text() == "numbers"
    make_readable(path, own, weights)  # a second time, as when the version is loaded again

    newer = tmp_path / "rollout-server-1" / "v4"
    version(newer, "newer")
    shutil.rmtree(own)
    make_readable(path.with_name("v4"), newer, weights)
    assert (path.with_name("v4") / "model.safetensors").read_text() == "newer"
    assert [entry.name for entry in path.parent.iterdir()] == ["v4"]


def test_other_weights_where_the_engine_would_read_are_refused(tmp_path: Path) -> None:
    own = tmp_path / "rollout-server-1" / "v3"
    other = tmp_path / "rollout-server-0" / "v3"
    manifest = version(own, "numbers")
    version(other, "NUMBERS")
    with pytest.raises(OSError, match=r"rollout-server-0/v3 .*checksum.*remove it"):
        make_readable(other, own, EngineWeights(manifest=manifest))


def config(tmp_path: Path, **rollout: object) -> Config:
    python = tmp_path / "python"
    python.touch()
    settings = {"nodes_per_engine": 2, "tensor_parallel_size": 16, "engine_python": str(python)}
    return Config.model_validate({"rollout": {**settings, **rollout}})


def options(config: Config, rank: int, count: int) -> dict[str, str]:
    topology = Topology(node_rank=rank, num_nodes=count, node_ips=("127.0.0.1",) * count)
    command = engine_command(config, topology, "m", "3", dist_init_addr="head:4711")
    return dict(pairwise(command))


def test_consecutive_nodes_are_told_to_form_one_engine_that_samples_alike(tmp_path: Path) -> None:
    found = [options(config(tmp_path, tensor_parallel_size=16), rank, 4) for rank in range(4)]
    assert [each["--node-rank"] for each in found] == ["0", "1", "0", "1"]
    assert {each["--nnodes"] for each in found} == {"2"}
    assert {each["--tp-size"] for each in found} == {"16"}
    assert {each["--dist-init-addr"] for each in found} == {"head:4711"}
    seeds = [each["--random-seed"] for each in found]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    alone = options(config(tmp_path, nodes_per_engine=1), 0, 4)
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & alone.keys()


def test_nodes_that_cannot_be_divided_into_engines_are_refused(tmp_path: Path) -> None:
    with raises(ConfigError, field="rollout.nodes_per_engine"):
        options(config(tmp_path), 0, 3)
    found = options(config(tmp_path, nodes_per_engine=3, tensor_parallel_size=3), 2, 3)
    assert found["--node-rank"] == "2"


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"engine": "embedded"}, "rollout.engine embedded is one"),
        ({"tensor_parallel_size": 3}, "3 processes of an engine cannot be divided among"),
        ({"colocate": True}, "rollout.colocate"),
        ({"engine_args": ["--dp-size", "2"]}, "2 copies of the model"),
        ({"engine_args": ["--node-rank", "1"]}, "set rollout.nodes_per_engine"),
        ({"engine_args": ["--dist-init-addr=a:1"]}, "set rollout.nodes_per_engine"),
    ],
)
def test_what_does_not_go_with_an_engine_over_nodes_is_refused(
    tmp_path: Path, rollout: dict[str, object], message: str
) -> None:
    with pytest.raises((ValidationError, ValueError), match=message):
        config(tmp_path, **rollout)


@pytest.mark.parametrize(
    ("rollout", "gpus", "per_node"),
    [
        ({}, 16, 8),
        ({"engine_args": ["--pp-size=2"], "tensor_parallel_size": 8}, 16, 8),
        ({"engine_args": ["--dp-size", "8", "--enable-dp-attention"]}, 16, 8),
        ({"nodes_per_engine": 1, "tensor_parallel_size": 2, "engine_args": ["--dp=4"]}, 8, 8),
    ],
)
def test_the_gpus_of_an_engine_are_counted_over_its_groups(
    tmp_path: Path, rollout: dict[str, object], gpus: int, per_node: int
) -> None:
    section = config(tmp_path, **rollout).rollout
    assert (section.gpus_per_engine, section.gpus_per_node) == (gpus, per_node)
