"""The agent's decisions, without processes: traffic, fencing, restarts, router plans and command
lines."""

import sys
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from fastapi import FastAPI

from common.errors import ConfigError
from common.process.topology import Topology, parse_hosts
from common.settings.config import Config, load
from common.settings.sections import ModelSection, RolloutSection, TrainerSection
from common.wire.schemas import WeightFile, WeightManifest
from services.rollout.engine_client import engine_command
from services.rollout.router import RouterClient, chosen_router, router_command
from services.rollout.state import UPDATES_BEFORE_RESTART, NodeState
from services.rollout.weights.store import _same
from services.rollout.weights.trainer_client import WeightId
from tests.support.errors import raises

V1, V2 = WeightId("a", 1), WeightId("a", 2)


def test_base_model_is_served_without_a_trainer() -> None:
    state = NodeState()
    assert (state.worker_state, state.in_traffic) == ("starting", False)
    state.engine_up(None)
    assert (state.worker_state, state.in_traffic, state.problem()) == ("ready", True, None)


def test_engine_that_comes_up_behind_the_trainer_gets_no_traffic_until_it_has_caught_up() -> None:
    state = NodeState()
    state.wanted = V2
    state.engine_up(V1)
    assert (state.worker_state, state.in_traffic) == ("updating", False)
    state.updating = True
    state.update_done(V2)
    assert (state.worker_state, state.in_traffic) == ("ready", True)


def test_an_update_to_weights_that_are_no_longer_the_newest_admits_nothing() -> None:
    state = NodeState()
    state.wanted = V2
    state.engine_up(None)
    state.updating = True
    state.update_done(V1)
    assert (state.worker_state, state.in_traffic) == ("updating", False)
    assert "wanted: weights 2" in str(state.problem())


def _manifest(**changes: Any) -> WeightManifest:
    file = WeightFile(name="model.safetensors", size=3, xxh3="0" * 32)
    return WeightManifest(version=1, run_id="a", files=[file]).model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"asleep": True}, True),
        ({"directory": "/disk", "progress": 7}, True),
        ({"version": 2}, False),
        ({"run_id": "b"}, False),
        ({"kind": "adapter"}, False),
        ({"files": [WeightFile(name="model.safetensors", size=3, xxh3="1" * 32)]}, False),
    ],
)
def test_weights_are_the_same_whatever_way_they_are_sent(
    changes: dict[str, Any], same: bool
) -> None:
    assert _same(_manifest(), _manifest(**changes)) is same


def test_engine_keeps_its_traffic_during_an_update() -> None:
    state = NodeState()
    state.engine_up(None)
    state.wanted = V1
    state.updating = True
    assert (state.worker_state, state.in_traffic) == ("updating", True)
    state.update_done(V1)
    assert (state.worker_state, state.serves, state.in_traffic) == ("ready", V1, True)


def test_an_engine_that_serves_other_weights_than_it_has_loaded_is_out_until_it_loads_again() -> (
    None
):
    state = NodeState()
    state.wanted = V1
    state.engine_up(V1)
    state.strayed("it serves weights 0")
    assert (state.worker_state, state.serves, state.in_traffic) == ("updating", None, False)
    assert "it serves weights 0" in str(state.problem())
    state.updating = True
    state.update_done(V1)
    assert (state.worker_state, state.serves, state.in_traffic) == ("ready", V1, True)
    assert state.problem() is None


def test_failed_update_fences_until_a_later_one_works() -> None:
    state = NodeState()
    state.engine_up(None)
    state.wanted = V1
    state.updating = True
    state.update_failed("checksum", engine_failed=False)
    assert (state.worker_state, state.in_traffic, state.detail) == ("stale", False, "checksum")
    assert "checksum" in str(state.problem())
    state.wanted = V2
    state.updating = True
    state.update_done(V2)
    assert (state.worker_state, state.in_traffic, state.detail) == ("ready", True, "")


def test_staleness_survives_an_engine_restart_on_old_weights() -> None:
    state = NodeState()
    state.engine_up(V1)
    state.wanted = V2
    state.update_failed("checksum", engine_failed=False)
    state.engine_down("ended")
    assert (state.worker_state, state.in_traffic, state.serves) == ("failed", False, None)
    state.engine_up(V1)
    assert (state.worker_state, state.in_traffic) == ("stale", False)
    state.engine_up(V2)
    assert (state.worker_state, state.in_traffic) == ("ready", True)


def test_engine_is_restarted_after_refusals_but_not_after_bad_downloads() -> None:
    state = NodeState()
    state.engine_up(None)
    state.wanted = V1
    for _ in range(UPDATES_BEFORE_RESTART + 2):
        state.update_failed("checksum", engine_failed=False)
    assert not state.must_restart
    for _ in range(UPDATES_BEFORE_RESTART):
        assert not state.must_restart
        state.update_failed("refused", engine_failed=True)
    assert state.must_restart
    state.engine_down("restarted")
    state.engine_up(None)
    assert not state.must_restart


def test_backoff_grows_and_is_bounded() -> None:
    state = NodeState()
    pauses = [state.backoff_s]
    for _ in range(50):
        state.update_failed("x", engine_failed=True)
        pauses.append(state.backoff_s)
    assert pauses[:4] == [0.0, 0.5, 1.0, 2.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 30.0


def test_interrupted_update_is_not_a_failure() -> None:
    state = NodeState()
    state.engine_up(V1)
    state.wanted = V2
    state.updating = True
    state.updating = False
    assert (state.worker_state, state.in_traffic) == ("ready", True)


def test_draining_node_gets_no_traffic() -> None:
    state = NodeState()
    state.engine_up(None)
    state.draining = True
    assert not state.in_traffic


def test_same_version_number_of_another_run_is_not_the_same_weights() -> None:
    state = NodeState()
    state.wanted = WeightId("b", 1)
    state.engine_up(V1)
    assert not state.in_traffic


def worker(url: str, healthy: bool = True, name: str = "id-1") -> dict[str, Any]:
    return {"id": name, "url": url, "is_healthy": healthy}


@pytest.mark.parametrize(
    ("workers", "wanted", "calls", "done"),
    [
        ([], True, ["add http://me:1"], False),
        ([worker("http://other:1")], True, ["add http://me:1"], False),
        ([worker("http://me:1")], True, [], True),
        ([worker("http://me:1/")], True, [], True),
        ([worker("http://me:1", healthy=False)], True, [], False),
        ([], False, [], True),
        ([worker("http://other:1")], False, [], True),
        (
            [worker("http://me:1"), worker("http://me:1", False, "id-2")],
            False,
            ["remove id-1", "remove id-2"],
            False,
        ),
    ],
)
async def test_plan_of_router_calls(
    workers: list[dict[str, Any]], wanted: bool, calls: list[str], done: bool
) -> None:
    router, made = FastAPI(), list[str]()
    router.get("/workers")(lambda: {"workers": workers})

    @router.post("/workers")
    def add(body: dict[str, str]) -> None:
        made.append(f"add {body['url']}")

    @router.delete("/workers/{name}")
    def remove(name: str) -> None:
        made.append(f"remove {name}")

    client = RouterClient("router", "http://router", transport=httpx.ASGITransport(router))
    assert await client.reconcile("http://me:1", lambda: wanted) is done
    await client.close()
    assert made == calls


def pairs(command: list[str]) -> dict[str, str]:
    return {word: command[i + 1] for i, word in enumerate(command[:-1]) if word.startswith("--")}


def two_nodes(rank: int) -> Topology:
    hosts = parse_hosts(
        "rollout-server-0.g=127.0.3.1,rollout-server-1.g=127.0.3.2:50,ppo-trainer-0.g=127.0.3.3"
    )
    return Topology("g", rank, 2, ("127.0.3.1", "127.0.3.2"), local_hosts=hosts)


def test_sglang_command_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    rollout = RolloutSection(
        engine_python=str(python), tensor_parallel_size=2, engine_args=["--dtype", "float32", "--x"]
    )
    command = engine_command(Config(rollout=rollout, seed=3), two_nodes(1), "/w/v000012", "12")
    assert command[:3] == [str(python), "-m", "sglang.launch_server"]
    assert command[-3:] == [
        "--dtype",
        "float32",
        "--x",
    ]  # last, so that the operator's own arguments win
    options = pairs(command)
    assert options["--model-path"] == "/w/v000012"
    assert options["--weight-version"] == "12"
    assert (options["--host"], options["--port"]) == ("127.0.3.2", "30051")
    assert (options["--tp-size"], options["--max-running-requests"]) == ("2", "256")
    assert "--trust-remote-code" not in command


@pytest.mark.parametrize("engine", ["sglang", "embedded"])
@pytest.mark.parametrize("fp32_head", [True, False])
def test_trainer_and_engine_make_logits_alike(
    fp32_head: bool, engine: Literal["sglang", "embedded"], tmp_path: Path
) -> None:
    (tmp_path / "python").touch()
    rollout = RolloutSection(engine=engine, engine_python=str(tmp_path / "python"))
    command = engine_command(
        Config(rollout=rollout, model=ModelSection(fp32_head=fp32_head)), Topology(), "m", "default"
    )
    assert ("--enable-fp32-lm-head" in command) is fp32_head


@pytest.mark.parametrize("engine", ["sglang", "embedded"])
@pytest.mark.parametrize("reproducible", [True, False])
def test_engines_of_a_reproducible_run_are_deterministic(
    reproducible: bool, engine: Literal["sglang", "embedded"], tmp_path: Path
) -> None:
    (tmp_path / "python").touch()
    rollout = RolloutSection(engine=engine, engine_python=str(tmp_path / "python"))
    config = Config(rollout=rollout, reproducible=reproducible)
    command = engine_command(config, Topology(), "m", "default")
    assert ("--enable-deterministic-inference" in command) is reproducible


@pytest.mark.parametrize("replays", [True, False])
def test_sglang_records_experts_only_for_routing_replay(replays: bool, tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    rollout = RolloutSection(engine_python=str(tmp_path / "python"), router="smg")
    config = Config(rollout=rollout, trainer=TrainerSection(routing_replay=replays))
    command = engine_command(config, Topology(), "m", "default")
    assert ("--enable-return-routed-experts" in command) is replays
    # Kernels that choose the experts themselves leave no record of them.
    assert (pairs(command).get("--moe-runner-backend") == "triton") is replays


def test_missing_sglang_is_named_before_anything_starts(tmp_path: Path) -> None:
    config = Config(rollout=RolloutSection(engine_python=str(tmp_path / "nothing")))
    with raises(ConfigError, field="rollout.engine_python"):
        engine_command(config, Topology(), "m", "default")


def test_embedded_command_line_and_seeds_of_nodes_differ() -> None:
    config = Config(rollout=RolloutSection(engine="embedded", max_context_tokens=999), seed=3)
    commands = [engine_command(config, two_nodes(rank), "m", "default") for rank in (0, 1)]
    assert commands[0][:3] == [sys.executable, "-m", "services.engine"]
    assert pairs(commands[0])["--max-context-tokens"] == "999"
    assert pairs(commands[0])["--seed"] != pairs(commands[1])["--seed"]


def test_router_command_line() -> None:
    command = router_command(Config(), two_nodes(0))
    options = pairs(command)
    assert (options["--host"], options["--port"]) == ("127.0.3.1", "30000")
    assert (options["--prometheus-host"], options["--prometheus-port"]) == ("127.0.3.1", "29000")
    assert int(options["--request-timeout-secs"]) > 30 * 86_400, "no clock for a healthy request"
    assert "--disable-circuit-breaker" in command
    assert "--worker-urls" not in command


@pytest.mark.parametrize("name", ["sglang-router", "smg"])
def test_a_router_that_is_not_installed_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = Config(rollout=RolloutSection.model_validate({"router": name}))
    with raises(ConfigError, field="rollout.router", value=name) as caught:
        router_command(config, two_nodes(0))
    assert "pip install" in str(caught.value.remedy)


def test_power_of_two_is_refused() -> None:
    """Both routers exit at the start with this policy unless they are given two engines; ours
    register later."""
    with raises(ConfigError, field="rollout.router_policy"):
        load(["--rollout.router_policy", "power_of_two"], {})


@pytest.mark.parametrize(
    ("words", "name", "reason"),
    [
        ([], "sglang-router", ""),
        (["--rollout.engine", "embedded"], "sglang-router", ""),
        (["--sampling.top_p", "0.9"], "smg", "sampling.top_p"),
        (["--sampling.top_k", "20", "--rollout.engine", "embedded"], "smg", "sampling.top_k"),
        (["--trainer.routing_replay", "true"], "smg", "trainer.routing_replay"),
        (["--evaluation.top_p", "0.9"], "sglang-router", ""),
        (["--rollout.router", "smg"], "smg", ""),
        (["--rollout.router", "sglang-router"], "sglang-router", ""),
    ],
)
def test_a_run_takes_the_router_that_passes_on_what_it_needs(
    words: list[str], name: str, reason: str
) -> None:
    config = load(words, {})
    found, because = chosen_router(config)
    assert found == name
    assert because.startswith(reason)
    assert bool(because) == bool(reason)
    module = f"{name.replace('-', '_')}.launch_router"
    assert any(module in word for word in router_command(config, two_nodes(0)))
