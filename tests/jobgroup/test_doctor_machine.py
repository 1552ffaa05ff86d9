"""The doctor's view of this machine: ports, folders, limits, and a sum over two processes."""

import os
import shutil
import socket
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from common.errors import ConfigError
from common.process.security import SecretRedactor
from jobgroup.doctor import gpus, machine, network, sizes, storage
from jobgroup.doctor.report import Check, Result, perform
from tests.support.package.doctor_groups import plan_of
from tests.support.processes.ports import free_port

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="asks /proc, and for loopback addresses of its own"
)


def _only(results: Iterable[Result]) -> Result:
    (result,) = results
    return result


def test_a_crash_and_a_hang_are_failed_lines_and_the_others_go_on() -> None:
    def crashing() -> Iterable[Result]:
        yield Result("first", "ok", "fine")
        raise ZeroDivisionError("by zero")

    def refusing() -> Iterable[Result]:
        raise ConfigError("it is wrong", field="seed", value=-1, remedy="use another")

    hanging = threading.Event()
    checks: dict[str, Check] = {
        "crashing": crashing,
        "hanging": lambda: [Result("never", "fail", "")] if hanging.wait(60) else [],
        "refusing": refusing,
        "last": lambda: [Result("last", "ok", "fine")],
    }
    results = list(perform(checks, limit_s=1))
    hanging.set()
    lines = [(result.name, result.state) for result in results]
    assert lines == [
        ("first", "ok"),
        ("crashing", "fail"),
        ("hanging", "fail"),
        ("refusing", "fail"),
        ("last", "ok"),
    ]
    assert "ZeroDivisionError: by zero" in results[1].found
    assert "not done after 1 s" in results[2].found
    assert (results[3].found, results[3].fix) == (
        "it is wrong · field: seed · value: -1",
        "use another",
    )
    assert all(result.fix for result in results if result.state != "ok")


def test_values_of_secret_variables_are_hidden() -> None:
    redactor = SecretRedactor(
        {"HF_TOKEN": "hf_abcdefg", "MODEL_NAME": "model", "API_TOKEN": ""},
        {"API_TOKEN": "0123456789"},
    )
    told = Result("x", "fail", "hf_abcdefg of model", "not hf_abcdefg, 0123456789").redacted(
        redactor
    )
    assert told == Result("x", "fail", "[secret] of model", "not [secret], [secret]")


@linux
def test_an_occupied_port_is_reported_with_its_process(tmp_path: Path) -> None:
    port = free_port()
    plan = plan_of(tmp_path, {"reward-server": ""}, env={"RLHF_REWARD__PORT": port})
    assert _only(network.check_ports(plan)).state == "ok"
    with socket.create_server(("0.0.0.0", port)):  # noqa: S104
        result = _only(network.check_ports(plan))
    assert (result.name, result.state) == (f"port {port} of reward-server", "fail")
    assert f"process {os.getpid()} (" in result.found
    assert "--env RLHF_REWARD__PORT=" in result.fix


@pytest.mark.parametrize("path", ["file/state", "/proc/state"])
def test_a_folder_that_cannot_be_written_fails(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    result = storage.check_folder(tmp_path / path)
    assert result.state == "fail"
    assert "cannot be written" in result.found


def test_a_folder_is_checked_without_being_created(tmp_path: Path) -> None:
    assert storage.check_folder(tmp_path / "a" / "b").state in (
        "ok",
        "warn",
    )  # warn if the disk is slow
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_does_not_fit_on_the_disk_fails_with_the_numbers(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"replay-buffer": ""}, env={"RLHF_REPLAY__CAPACITY": 10**12})
    results = list(storage.check_room(list(storage.needs(plan))))
    assert _only(results).state == "fail"
    assert "4096000.2 GB needed (full replay store 4096000.0 GB" in results[0].found
    small = plan_of(tmp_path, {"replay-buffer": ""}, env={"RLHF_REPLAY__CAPACITY": 1000})
    free = shutil.disk_usage(tmp_path).free
    assert _only(storage.check_room(list(storage.needs(small)))).state == (
        "ok" if free > 3e8 else "fail"
    )


def test_the_experts_of_routing_replay_are_part_of_the_trainers_disk(tmp_path: Path) -> None:
    """One byte for each of 48 × 8 experts of a token, for the answers of two steps."""
    env = {
        "RLHF_TRAINER__ROUTING_REPLAY": "true",
        "RLHF_TRAINER__MAX_STALENESS": "1",
        "BATCH_SIZE": "512",
        "RLHF_SAMPLING__GROUP_SIZE": "16",
        "RLHF_SAMPLING__MAX_NEW_TOKENS": "8192",
    }
    plan = plan_of(tmp_path, {"ppo-trainer": ""}, env=env)
    plan.shapes[plan.here[0].config.model.name] = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151_936,
    }
    sizes = {need.what: need.size for need in storage.needs(plan)}
    assert sizes["experts of the answers"] == 2 * 512 * 16 * 8192 * 48 * 8


@linux
def test_sqlite_in_memory_or_on_a_network_is_a_warning(tmp_path: Path) -> None:
    result = storage.check_folder(Path("/dev/shm/state"), sqlite=True)  # noqa: S108
    assert (result.state, "tmpfs" in result.found) == ("warn", True)
    mounts = [
        ("/", "ext4"),
        ("/shared", "ext4"),
        ("/shared", "nfs4"),
        ("/shared/with space", "fuse.rclone"),
    ]
    table = [
        SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in mounts
    ]  # a later mount hides an earlier one
    kinds = {
        path: storage.file_system(Path(path), table)
        for path in ("/srv", "/shared/state", "/shared/with space/x")
    }
    assert kinds == {"/srv": "ext4", "/shared/state": "nfs4", "/shared/with space/x": "fuse.rclone"}


def test_memory_and_cores_never_exceed_those_of_this_machine() -> None:
    size, _ = machine.available_memory()
    assert 0 < size <= psutil.virtual_memory().total
    assert 0 < machine.cores() <= (os.cpu_count() or 0)


def test_a_thread_per_core_in_every_process_is_a_warning(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path, {"rollout-server": "num_nodes: 2\n"}, env={"RLHF_ROLLOUT__ENGINE": "embedded"}
    )
    assert [result.name for result in machine.check_cores(plan) if result.state == "warn"][-1:] == [
        "OMP_NUM_THREADS"
    ]
    quiet = plan_of(
        tmp_path,
        {"rollout-server": "num_nodes: 2\n"},
        env={"RLHF_ROLLOUT__ENGINE": "embedded", "OMP_NUM_THREADS": 1},
    )
    assert "OMP_NUM_THREADS" not in [result.name for result in machine.check_cores(quiet)]


@pytest.mark.integration
def test_two_processes_add_over_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "COLLECTIVE_S", 240.0)
    plan = plan_of(tmp_path, {"ppo-trainer": ""})
    result = _only(perform({"all_reduce": lambda: machine.check_collective(plan)}, 300))
    assert (result.name, result.state) == ("all_reduce", "ok")
    assert result.found.startswith("2 processes over gloo")


@pytest.mark.integration
@pytest.mark.slow
def test_gloo_on_an_interface_that_does_not_exist_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "COLLECTIVE_S", 240.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    plan = plan_of(tmp_path, {"ppo-trainer": ""})
    result = _only(perform({"all_reduce": lambda: machine.check_collective(plan)}, 300))
    assert result.state == "fail"
    assert "nosuch0" in result.found
    assert "GLOO_SOCKET_IFNAME=lo" in result.fix


def test_a_service_that_needs_no_torch_is_not_checked_for_it(tmp_path: Path) -> None:
    assert list(machine.check_collective(plan_of(tmp_path, {"data-server": ""}))) == []


def test_sglang_on_a_machine_without_gpus_fails_by_name(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"rollout-server": ""})
    result = _only(gpus.check_gpus(plan))
    assert result.state == "fail"
    assert "rollout.engine sglang without rollout.device cpu" in result.found


@pytest.mark.integration
@pytest.mark.parametrize(
    "listed", ["0, H100, GPU-aa, 81559, 12, 580.1\n1, H100, GPU-bb, 81559, 70000, 580.1"]
)
def test_gpus_are_chosen_as_the_processes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    """Uses a stand-in for nvidia-smi: the test is about its output, which has this form."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        f"#!/bin/sh\ncase $1 in *compute-apps*) echo 'GPU-bb, 77, python3';; *) echo '{listed}';; esac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found, _ = gpus.visible({})
    assert [(each.number, each.total >> 20) for each in found] == [("0", 81559), ("1", 81559)]
    chosen, _ = gpus.visible({"CUDA_VISIBLE_DEVICES": "GPU-bb"})
    assert [each.number for each in chosen] == ["1"]
    plan = plan_of(tmp_path, {"ppo-trainer": "num_nodes: 2\nresources: {accelerators: 'H100:2'}\n"})
    plan.gpus = found
    results = list(gpus.check_gpus(plan))
    states = [(result.name, result.state) for result in results]
    assert states == [("GPUs", "warn"), ("GPU 0", "ok"), ("GPU 1", "warn")]
    assert "process 77 (python3)" in results[2].found
    turns = plan_of(
        tmp_path,
        {"ppo-trainer": "resources: {accelerators: 'H100:4'}\n"},
        env={"RLHF_ROLLOUT__COLOCATE": "true"},
    )
    turns.gpus = found
    shared = next(iter(gpus.check_gpus(turns)))
    assert shared.state == "ok"


@pytest.mark.parametrize(("usable", "state"), [(0.5, "warn"), (1.9, "warn"), (2, "ok"), (64, "ok")])
def test_two_cores_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usable: float, state: str
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: usable)
    found = _only(machine.check_cores(plan_of(tmp_path, {"reward-server": ""})))
    assert (found.name, found.state) == ("cores", state)


@pytest.mark.parametrize("gpus", range(1, 17))
@pytest.mark.parametrize("count", [0, 1, 6, 8, 12])
def test_gpus_are_divided_into_equal_groups(gpus: int, count: int) -> None:
    found = sizes._divisors(gpus, count)
    shared = {size for size in range(2, 100) if gpus % size == count % size == 0}
    assert found == (sorted(shared) if count else [])
