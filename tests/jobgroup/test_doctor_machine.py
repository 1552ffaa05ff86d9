"""The doctor's view of this machine: ports, folders, limits, and a sum over two processes."""

import os
import random
import shutil
import socket
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from common.errors import ConfigError
from common.models.memory import FITS_SHARE, ModelShape, state_bytes
from common.process.security import SecretRedactor
from jobgroup.doctor import availability, gpus, machine, network, sizes, software, storage
from jobgroup.doctor.ground_truths import check_ground_truths
from jobgroup.doctor.plan import make
from jobgroup.doctor.report import Check, Result, ask, fits, gb, perform
from tests.support.errors import raises
from tests.support.package.doctor_groups import QWEN_7B, plan_of, write_group
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
        yield Result("before", "ok", "fine")
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
        ("before", "ok"),
        ("refusing", "fail"),
        ("last", "ok"),
    ]
    assert "ZeroDivisionError: by zero" in results[1].found
    assert "not done after 1 s" in results[2].found
    assert (results[4].found, results[4].fix) == (
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


@pytest.mark.parametrize(
    ("env", "checkpoints", "trained", "published", "recorded"),
    [
        ({}, 5, 1, 1, 5 << 20),
        ({"RLHF_CHECKPOINT__KEEP": 7}, 9, 1, 1, 5 << 20),
        ({"RLHF_ALGORITHM__NAME": "ppo"}, 10, 1, 1, 5 << 20),
        ({"RLHF_TRAINER__MAX_STEPS": 2}, 5, 1, 1, 2 * 64 * 10 * 12),
        ({"RLHF_LORA__RANK": 4}, 5, 0, 0, 5 << 20),
        ({"RLHF_LORA__RANK": 4, "RLHF_LORA__PUBLISH": "merged"}, 5, 0, 1, 5 << 20),
    ],
)
def test_what_a_trainer_writes_is_counted(
    tmp_path: Path,
    env: dict[str, object],
    checkpoints: int,
    trained: int,
    published: int,
    recorded: int,
) -> None:
    """Sizes of a model of float32 numbers: three for each in a checkpoint, one in a version."""
    own = {
        "RLHF_CHECKPOINT__KEEP": 3,
        "BATCH_SIZE": 8,
        "RLHF_SAMPLING__GROUP_SIZE": 8,
        "RLHF_SAMPLING__MAX_NEW_TOKENS": 10,
        "RLHF_TRAINER__KEEP_GROUPS_MB": 5,
        "RLHF_MODEL__DTYPE": "float32",
        "RLHF_TRAINER__RUN_DIR": tmp_path / "run",
        **env,
    }
    plan = plan_of(tmp_path, {"ppo-trainer": "num_nodes: 2\n"}, env=own)
    [job] = plan.here
    plan.shapes[job.config.model.name] = QWEN_7B
    shape = ModelShape.of(QWEN_7B)
    adapter = shape.lora_parameters(4, job.config.lora.target_modules)
    numbers = {0: adapter, 1: shape.parameters}
    found = {need.what: (need.folder, need.size) for need in storage.needs(plan)}
    run_dir = tmp_path / "run"
    assert found == {
        "ppo-trainer's logs": (tmp_path / "state", 2 * 200 << 20),
        f"{checkpoints} checkpoints": (
            run_dir,
            checkpoints * state_bytes(job.config) * numbers[trained],
        ),
        "3 weight versions": (run_dir, 3 * 4 * numbers[published]),
        "recorded groups": (run_dir, recorded),
    }


@pytest.mark.parametrize(
    ("kind", "sqlite", "state"),
    [
        ("ext4", True, "ok"),
        ("nfs4", True, "warn"),
        ("nfs4", False, "ok"),
        ("fuse.rclone", True, "warn"),
        ("overlay", True, "warn"),
        ("tmpfs", False, "ok"),
    ],
)
def test_databases_are_not_for_every_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, sqlite: bool, state: str
) -> None:
    monkeypatch.setattr(storage, "file_system", lambda _: kind)
    monkeypatch.setattr(storage, "time", SimpleNamespace(monotonic=lambda: 0.0))
    assert storage.check_folder(tmp_path, sqlite=sqlite).state == state


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


def test_gpus_are_chosen_as_the_processes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a stand-in for nvidia-smi: the test is about its output, which has this form."""
    rows = [
        "0, H100, GPU-aa, 81559, 12, 580.1",
        "1, H100, GPU-bb, 81559, 70000, 580.1",
        "2, H100, GPU-bc, [N/A], [N/A], 580.1",
    ]
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\ncase $1 in\n"
        "--query-compute-apps=gpu_uuid,pid,process_name) echo 'GPU-bb, 77, python3';;\n"
        "--query-gpu=index,name,uuid,memory.total,memory.used,driver_version)\n"
        f"cat << END\n{chr(10).join(rows)}\nEND\n;;\n*) exit 5;;\nesac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def chosen(variable: str) -> list[str]:
        return [each.number for each in gpus.visible({"CUDA_VISIBLE_DEVICES": variable})[0]]

    assert chosen("GPU-bb") == chosen("1") == ["1"]
    assert chosen("GPU-b") == ["1", "2"]
    assert chosen(" GPU-bc , 0,") == ["2", "0"]
    assert chosen("") == chosen("GPU-bbb") == chosen("7") == []
    found, _ = gpus.visible({})
    assert [(each.number, each.total >> 20, each.used >> 20) for each in found] == [
        ("0", 81559, 12),
        ("1", 81559, 70000),
        ("2", 0, 0),
    ]
    assert [(each.name, each.uuid, each.driver) for each in found[:1]] == [
        ("H100", "GPU-aa", "580.1")
    ]
    found = found[:2]
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
    for used, state in ((2_000_000_000, "ok"), (2_000_000_001, "warn")):
        turns.gpus = [found[0]._replace(used=used)]
        assert [each.state for each in gpus.check_gpus(turns)] == ["ok", state]
    smi.write_text("#!/bin/sh\necho no driver >&2\nexit 9\n")
    assert gpus.visible({}) == ([], "nvidia-smi fails: no driver")
    smi.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.visible({})[0] == []


@pytest.mark.parametrize("seed", range(30))
def test_the_limits_of_all_control_groups_around_a_process_count(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root has no files of limits, and each of the groups in it may have some."""
    draws = random.Random(seed)
    groups = tmp_path / "sys/fs/cgroup"
    names = ["a", "b", "c"][: draws.randrange(4)]
    table = tmp_path / "proc/self/cgroup"
    table.parent.mkdir(parents=True)
    table.write_text(f"1:name=systemd:/other\n0::/{'/'.join(names)}\n")
    groups.mkdir(parents=True)
    left = [10**9]
    processors = [8.0]
    folder = groups
    for name in names:
        folder /= name
        folder.mkdir()
        limit = draws.choice([None, 3 * 10**8, 6 * 10**8])
        used = draws.choice([0, 2 * 10**8, 5 * 10**8])
        (folder / "memory.max").write_text(f"{limit or 'max'}\n")
        if draws.random() < 0.8:
            (folder / "memory.current").write_text(f"{used}\n")
            if limit:
                left.append(max(0, limit - used))
        quota = draws.choice([None, 150000, 400000])
        (folder / "cpu.max").write_text(f"{quota or 'max'} 100000\n")
        if quota:
            processors.append(quota / 100000)

    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / path.strip("/"))
    memory = SimpleNamespace(available=10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "LINUX", True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert machine.available_memory()[0] == min(left)
    assert machine.cores() == min(processors)


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


@pytest.mark.parametrize(
    ("task", "env", "expected"),
    [
        ("data-server", {}, []),
        ("rollout-server", {}, ["org/a"]),
        ("environment-server", {}, ["org/a"]),
        ("ppo-trainer", {}, ["org/a"]),
        (
            "ppo-trainer",
            {"RLHF_MODEL__REFERENCE": "org/b", "RLHF_ALGORITHM__KL_COEF": "0.1"},
            ["org/a", "org/b"],
        ),
        (
            "ppo-trainer",
            {"RLHF_CRITIC__MODEL": "org/c", "RLHF_ALGORITHM__NAME": "ppo"},
            ["org/a", "org/c"],
        ),
        ("reward-server", {}, []),
        (
            "reward-server",
            {"RLHF_REWARD__FUNCTIONS": '[{"name": "reward_model", "model": "org/d"}]'},
            ["org/d"],
        ),
    ],
)
def test_the_models_that_a_task_loads(
    tmp_path: Path, task: str, env: dict[str, str], expected: list[str]
) -> None:
    plan = plan_of(tmp_path, {task: ""}, env={"MODEL_NAME": "org/a", **env})
    assert plan.problems == []
    assert list(availability.models(plan)) == expected
    assert all(job.name == task for job in availability.models(plan).values())
    needs_torch = task == "ppo-trainer" or expected == ["org/d"]
    assert plan.here[0].needs_torch == needs_torch


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({}, ["rollout.engine sglang without rollout.device cpu"]),
        ({"RLHF_ROLLOUT__DEVICE": "cpu"}, []),
        ({"RLHF_ROLLOUT__ENGINE": "embedded"}, []),
        (
            {"RLHF_ROLLOUT__ENGINE": "embedded", "RLHF_ROLLOUT__DEVICE": "cuda"},
            ["rollout.device cuda"],
        ),
        (
            {"RLHF_ROLLOUT__DEVICE": "cpu", "RLHF_TRAINER__DEVICE": "cuda"},
            ["trainer.device cuda"],
        ),
    ],
)
def test_the_settings_that_need_a_gpu(
    tmp_path: Path, env: dict[str, str], found: list[str]
) -> None:
    plan = plan_of(tmp_path, {"rollout-server": "", "ppo-trainer": ""}, env=env)
    assert gpus.needs_cuda(plan) == found
    assert gpus.needs_cuda(plan_of(tmp_path, {"data-server": ""})) == []


@pytest.mark.parametrize(
    ("version", "state"),
    [((3, 10), "fail"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 13), "ok"), ((3, 14), "fail")],
)
def test_the_versions_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], state: str
) -> None:
    own = SimpleNamespace(version_info=(*version, 1), prefix="/p", executable="/p/bin/python")
    monkeypatch.setattr(software, "sys", own)
    plan = plan_of(tmp_path, {"data-server": ""})
    first, *others = software.check_python(plan)
    assert (first.state, others) == (state, [])


def test_the_python_of_a_task_must_be_there(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"data-server": ""})
    plan.here = [replace(plan.here[0], workdir=tmp_path, run=".venv/bin/python -m x")]
    _, missing = software.check_python(plan)
    assert (missing.name, missing.state) == ("python of data-server", "fail")
    python = plan.here[0].workdir / ".venv/bin/python"
    assert str(python) in missing.found


def test_a_pod_has_its_own_environment_and_a_local_run_that_of_the_yaml(tmp_path: Path) -> None:
    path = write_group(
        tmp_path, {"data-server": "", "ppo-trainer": ""}, {"RLHF_DATA__PORT": "1111", "A": "yaml"}
    )
    around = {"RLHF_DATA__PORT": "2222", "A": "own"}
    local = make(path, {"B": "given"}, around)
    assert (local.inside, local.group, len(local.here)) == (False, "small", 2)
    assert {job.config.data.port for job in local.here} == {1111}
    assert {(job.env["A"], job.env["B"]) for job in local.here} == {("yaml", "given")}

    inside = {**around, "SKYPILOT_JOBGROUP_NAME": "running"}
    pod = make(path, {"A": "given"}, inside, task="data-server")
    assert (pod.inside, pod.group, pod.demo) == (True, "running", False)
    assert [(job.name, job.config.data.port) for job in pod.here] == [("data-server", 2222)]
    assert pod.here[0].env["A"] == "given"
    assert make(path, {}, inside).here == []
    with pytest.raises(ConfigError) as refused:
        make(path, {}, {}, task="data")
    assert (refused.value.field, refused.value.value) == ("--task", "data")


def test_settings_that_are_wrong_in_several_tasks_are_one_problem_each(tmp_path: Path) -> None:
    tasks = {"data-server": "", "reward-server": ""}
    plan = plan_of(tmp_path, tasks, env={"RLHF_SEED": "x"})
    assert [problem.name for problem in plan.problems] == ["settings of data-server"]
    documents = [
        f"name: {name}\nrun: x\nenvs: {{{setting}: 'x'}}\n"
        for name, setting in (("data-server", "RLHF_SEED"), ("reward-server", "RLHF_DATA__PORT"))
    ]
    path = tmp_path / "two.yaml"
    path.write_text("---\n".join(["name: small\nexecution: parallel\n", *documents]))
    found = make(path, {}, {}).problems
    assert [each.name for each in found] == ["settings of data-server", "settings of reward-server"]


def test_ports_are_not_checked_in_a_running_group_and_each_task_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def listen(address: tuple[str, int]) -> Any:
        tried.append(address[1])
        if address[1] == 8003:
            raise OSError(98, "Address already in use")
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(network, "socket", SimpleNamespace(create_server=listen))
    monkeypatch.setattr(network, "_listeners", lambda port: {"5 (other)"})
    tasks = ["data-server", "rollout-server", "reward-server", "replay-buffer", "ppo-trainer"]
    plan = plan_of(tmp_path, dict.fromkeys([*tasks, "environment-server", "mine"], ""))
    taken, free = network.check_ports(plan)
    ports = [8000, 30002, 30001, 30000, 30003, 8002, 8003, 8004, 8006]
    assert set(tried) >= set(ports) - {30003}
    assert (taken.name, taken.state) == ("port 8003 of replay-buffer", "fail")
    assert "--env RLHF_REPLAY__PORT=9003" in taken.fix
    assert (free.state, "8003" in free.found, "8004" in free.found) == ("ok", False, True)
    plan.inside = True
    assert list(network.check_ports(plan)) == []


def test_ground_truths_need_the_data_and_the_rewards(tmp_path: Path) -> None:
    for task in ("data-server", "reward-server"):
        with pytest.raises(ConfigError) as refused:
            list(check_ground_truths(plan_of(tmp_path, {task: ""})))
        assert refused.value.field == "--data"


@pytest.mark.parametrize("seed", range(30))
def test_what_fits_is_judged_by_a_tenth_to_spare(seed: int) -> None:
    draws = random.Random(seed)
    available = draws.choice([100.0, 80e9])
    needed = available * draws.choice([0.5, 0.899, 0.9, 0.901, 1.0, 1.001])
    share = needed / available
    state = "ok" if share <= FITS_SHARE else "warn" if share <= 1 else "fail"
    found = fits("x", "these", needed=needed, available=available, fix="more")
    assert (found.state, found.fix) == (state, "" if state == "ok" else "more")
    assert found.text().startswith(f"{state.upper() if state == 'fail' else state:<4}  x: ")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0.0 MB"), (49.9e6, "49.9 MB"), (5e7, "0.1 GB"), (15.24e9, "15.2 GB")]
)
def test_sizes_are_decimal(size: float, text: str) -> None:
    assert gb(size) == text


def test_a_program_that_fails_is_named_with_its_last_line() -> None:
    assert ask("sh", "-c", "echo $A", fix="x", env={"A": "five"}) == "five\n"
    for command, words in (
        ("echo first; echo last >&2; exit 3", "first"),
        ("echo first >&2; echo last >&2; exit 3", "last"),
        ("exit 3", "exit status 3"),
    ):
        with pytest.raises(ConfigError) as refused:
            ask("sh", "-c", command, fix="do this")
        assert refused.value.message == f"sh fails: {words}"
        assert refused.value.remedy == "do this"
    with raises(ConfigError, field="no-such-program"):
        ask("no-such-program", fix="install it")
    with raises(ConfigError, field="sleep", value="sleep 60"):
        ask("sleep", 60, fix="wait", timeout_s=0.01)
