"""The project's own job group: what it promises, and the traps it must avoid."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.process import topology
from common.settings.config import Config
from common.settings.sources import SHORT_NAMES
from jobgroup import spec
from jobgroup.local.placement import choose_addresses, share_gpus
from tests.support.jobgroups import render
from tests.support.paths import ROOT
from trainer.cli.launch import torchrun_arguments

PATH = ROOT / "jobgroup" / "rlhf-math-jobgroup.yaml"
TASKS = [topology.DATA, topology.ROLLOUT, topology.REWARD, topology.REPLAY, topology.TRAINER]
TEXT = PATH.read_text(encoding="utf-8")
GROUPS = sorted(PATH.parent.glob("*-jobgroup.yaml"))
ON_GPUS = [path for path in GROUPS if path.stem != "rlhf-math-cpu-jobgroup"]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> spec.JobGroup:
    monkeypatch.chdir(ROOT)
    return spec.load(PATH)


def _commands(group: spec.JobGroup) -> str:
    return "\n".join(f"{task.setup}\n{task.run}" for task in group.tasks)


def test_header_and_tasks_are_as_promised(group: spec.JobGroup) -> None:
    assert next(yaml.safe_load_all(TEXT)) == {
        "name": "rlhf-math",
        "execution": "parallel",
        "primary_tasks": ["ppo-trainer"],
        "termination_delay": "10s",
        "inter_connection": True,
    }
    assert [task.name for task in group.tasks] == TASKS
    assert {task.name: (task.num_nodes, task.gpus) for task in group.tasks} == {
        "data-server": (1, 0),
        "rollout-server": (2, 1),
        "reward-server": (1, 0),
        "replay-buffer": (1, 0),
        "ppo-trainer": (2, 1),
    }
    assert [task.name for task in group.tasks if task.primary] == ["ppo-trainer"]
    assert all(task.max_restarts == 3 and task.termination_delay_s == 10 for task in group.tasks)


def test_a_packaged_configuration_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packaged = {"RUN_CONFIG": "jobgroup/configs/tiny-cpu.yaml"}
    group = spec.load(PATH, packaged)
    assert group.tasks[0].settings(packaged).data.source == "tiny"
    (tmp_path / "own.yaml").write_text("data: {port: 9000}\n")
    monkeypatch.chdir(ROOT)
    assert group.tasks[0].settings({"RUN_CONFIG": "own.yaml"}).data.port == 9000


def test_the_ports_in_the_comments_match_the_configuration() -> None:
    config = Config()
    told = {int(port) for port in re.findall(r"\b[Pp]ort (\d+)", TEXT)}
    used = {
        config.data.port,
        config.reward.port,
        config.replay.port,
        config.rollout.router_port,
        config.rollout.engine_port,
    }
    assert told == used == {8000, 8002, 8003, 30000, 30001}


def test_every_command_starts_a_module_that_exists(group: spec.JobGroup) -> None:
    for task in group.tasks:
        assert len(task.run.strip().splitlines()) == 1
        module = task.run.split()[-1]
        assert task.run.startswith("exec .venv/bin/python -m ")
        found = importlib.util.find_spec(module)
        assert found is not None, module
        is_package = found.submodule_search_locations is not None
        assert not is_package or importlib.util.find_spec(f"{module}.__main__"), module


def test_an_env_from_the_command_line_reaches_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    group = spec.load(
        PATH, {"MODEL_NAME": "tiny", "SEED": "3"}, {"HF_TOKEN": "given"}, {"rollout-server": 4}
    )
    assert all(task.env["MODEL_NAME"] == "tiny" and task.env["SEED"] == "3" for task in group.tasks)
    assert dict(group.task("ppo-trainer", "").env).get("HF_TOKEN") == "given"
    assert group.task("rollout-server", "").num_nodes == 4


def test_the_settings_that_the_yaml_tells_are_the_defaults(group: spec.JobGroup) -> None:
    config = Config()
    told = f"{config.trainer.num_epochs} epochs, {config.trainer.batch_size} prompts per step"
    assert f"{config.model.name} on GSM8K, {told}" in TEXT
    assert config.data.source == "gsm8k"
    for task in group.tasks:
        assert set(task.env) - {"API_TOKEN", "HF_TOKEN"} == set(task.on_volumes)


@pytest.mark.parametrize("path", GROUPS, ids=lambda path: path.stem)
def test_a_setting_is_in_every_task_or_in_the_settings_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable reaches only the task that names it: what describes the run is a file, named once
    in each task."""
    monkeypatch.chdir(ROOT)
    tasks = spec.load(path).tasks
    for task in tasks:
        names = {
            name
            for name in task.env
            if name.startswith("RLHF_") or name in SHORT_NAMES or name == "RUN_CONFIG"
        }
        shared = names - set(task.on_volumes)
        assert len(shared) <= 2
        assert all(other.env[name] == task.env[name] for other in tasks for name in shared)


def test_trap_no_sleep_for_readiness(group: spec.JobGroup) -> None:
    scripts = _commands(group) + (ROOT / "jobgroup" / "setup.sh").read_text(encoding="utf-8")
    assert not re.search(r"\bsleep\b|\bwait\b|\buntil\b", scripts)


def test_trap_every_trainer_node_trains(
    group: spec.JobGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = group.task("ppo-trainer", "")
    assert trainer.num_nodes == 2
    # The command does not depend on the rank.
    assert trainer.run == "exec .venv/bin/python -m trainer.launch"
    commands = []
    for rank in (0, 1):
        env = {
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        }
        command = torchrun_arguments(topology.Topology.from_env(env), ["-m", "trainer"])
        place = command.index("--node-rank")
        assert command[place + 1] == str(rank)
        commands.append(command[:place] + command[place + 2 :])
    assert commands[0] == commands[1]


def test_only_the_topology_makes_names(group: spec.JobGroup) -> None:
    commands = _commands(group)
    assert "SKYPILOT_" not in commands
    assert not re.search(r"\d+\.\d+\.\d+\.\d+|://|-\d+\.", commands)


def test_secrets_have_no_value_in_the_file() -> None:
    for document in list(yaml.safe_load_all(TEXT))[1:]:
        assert all(value == "" for value in document.get("secrets", {}).values())
        assert not any(re.search("TOKEN|KEY|PASSWORD", name) for name in document.get("envs", {}))


@pytest.mark.parametrize("path", GROUPS, ids=lambda path: path.stem)
def test_every_task_takes_the_token_of_the_run(path: Path) -> None:
    """A secret does not reach a task that does not name it, and that service would answer
    anyone."""
    _, *tasks = yaml.safe_load_all(path.read_text(encoding="utf-8"))
    assert len(tasks) >= 2
    for task in tasks:
        assert task["secrets"]["API_TOKEN"] == "", task["name"]


def _volumes() -> dict[str, dict[str, Any]]:
    """The volumes of the project by name."""
    contents = [
        yaml.safe_load(path.read_text())
        for path in sorted((ROOT / "jobgroup" / "volumes").glob("*.yaml"))
    ]
    return {volume["name"]: volume for volume in contents}


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_what_a_task_writes_is_on_a_volume_that_its_nodes_can_mount(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    group = spec.load(path)
    mounting: dict[str, list[spec.Task]] = {}
    for document in list(yaml.safe_load_all(path.read_text(encoding="utf-8")))[1:]:
        task = group.task(document["name"], "")
        assert task.on_volumes == ("RUN_DIR" if task.primary else "STATE_DIR",)
        ((_, name),) = document["volumes"].items()
        mounting.setdefault(name, []).append(task)
    for name, tasks in mounting.items():
        volume = _volumes()[name]
        several = sum(task.num_nodes for task in tasks) > 1
        if volume["type"] == "k8s-hostpath":  # a folder of the one machine
            assert all(task.num_nodes == 1 for task in group.tasks)
        else:
            assert volume["config"]["access_mode"] == (
                "ReadWriteMany" if several else "ReadWriteOnce"
            )
            # SQLite is not safe on what several machines mount.
            assert not several or not {"data-server", "replay-buffer"} & {
                task.name for task in tasks
            }


def test_every_volume_is_mounted_by_a_job_group() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in ON_GPUS)
    assert set(_volumes()) == set(re.findall(r"volumes: \{\S+: (\S+)\}", text))


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_the_volumes_can_be_left_out(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    without = tmp_path / "group.yaml"
    with without.open("w") as file:
        subprocess.run(["sed", "/# volume$/d", str(path)], stdout=file, check=True)
    assert "volumes:" not in without.read_text()
    tasks = spec.load(without).tasks
    with_volumes = [task.without_volumes() for task in spec.load(path).tasks]
    assert [(task.run, dict(task.env)) for task in tasks] == [
        (task.run, dict(task.env)) for task in with_volumes
    ]


def test_every_node_has_its_own_address_and_gpus_are_shared_out(group: spec.JobGroup) -> None:
    places = choose_addresses(group)
    with places.lock:
        assert len({(host.address, host.port_shift) for host in places.hosts.values()}) == 7
        assert set(topology.parse_hosts(places.text())) == set(places.hosts)
    shares = share_gpus(group.tasks, ["0", "1", "2", "3"])
    assert shares["rollout-server"] + shares["ppo-trainer"] == [["0"], ["1"], ["2"], ["3"]]
    assert shares["data-server"] == [[]]
    assert share_gpus(group.tasks, ["7"])["ppo-trainer"] == [["7"], ["7"]]
    assert share_gpus(group.tasks, [])["ppo-trainer"] == [[], []]


@pytest.mark.integration
def test_setup_installs_the_role_once_and_again_when_the_pins_change(tmp_path: Path) -> None:
    (tmp_path / "jobgroup").mkdir()
    (tmp_path / "bin").mkdir()
    for name in (
        "jobgroup/setup.sh",
        "jobgroup/sglang-requirements.txt",
        "jobgroup/sglang-overrides.txt",
        "pyproject.toml",
        "constraints.txt",
    ):
        shutil.copy(ROOT / name, tmp_path / name)
    uv = tmp_path / "bin" / "uv"  # an installer that only records its arguments
    uv.write_text('#!/bin/sh\necho "$@" >> calls\nif [ "$1" = venv ]; then mkdir -p "$5/bin"; fi\n')
    uv.chmod(0o755)
    curl = tmp_path / "bin" / "curl"  # whether PyTorch's index can be reached
    curl.symlink_to("/bin/false")
    gpu = tmp_path / "bin" / "nvidia-smi"

    def setup(role: str) -> tuple[int, list[str]]:
        (tmp_path / "calls").write_text("")
        env = os.environ | {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
        script = subprocess.run(
            ["bash", "jobgroup/setup.sh", role],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        return script.returncode, (tmp_path / "calls").read_text().splitlines()

    status, calls = setup("services")
    assert status == 0
    assert calls[0] == "venv --quiet --python 3.11 .venv"
    assert calls[1].endswith("-c constraints.txt -e .[services]")
    assert setup("services") == (0, [])
    (tmp_path / "constraints.txt").write_text("httpx==0.28.1\n")
    assert len(setup("services")[1]) >= 1
    assert setup("trainer")[1][-1].endswith("-e .[trainer]")
    assert setup("rollout")[1][-1].endswith("-e .[rollout,trainer]")  # no GPU: the CPU engine
    curl.unlink()
    curl.symlink_to("/bin/true")
    cpu_torch = "--torch-backend=cpu -c constraints.txt -e"
    assert setup("trainer")[1][-1].endswith(f"{cpu_torch} .[trainer]")
    assert setup("rollout")[1][-1].endswith(f"{cpu_torch} .[rollout,trainer]")
    assert "--torch-backend=cpu" not in setup("services")[1][-1]
    gpu.symlink_to("/bin/true")
    assert "--torch-backend=cpu" not in setup("trainer")[1][-1]
    assert setup("rollout")[1][-1].endswith("-r jobgroup/sglang-requirements.txt")
    assert setup("tariner") == (2, [])


@pytest.mark.parametrize("overlay", render.OVERLAYS, ids=lambda path: path.stem)
def test_a_variant_is_what_its_overlay_makes(overlay: Path) -> None:
    text = render.target(overlay).read_text(encoding="utf-8")
    assert text == render.render(overlay), "run: make jobgroups"


def test_every_variant_has_an_overlay() -> None:
    assert {PATH, *map(render.target, render.OVERLAYS)} == set(GROUPS)
