"""The lines of the doctor for random groups and machines, against its rules written anew."""

import importlib.metadata
import json
import os
import random
import re
import shlex
import socket
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jobgroup.doctor.__main__ as command
from common.errors import ConfigError
from common.models.memory import ModelShape
from common.process.security import SecretRedactor
from jobgroup.doctor import (
    availability,
    collective,
    machine,
    network,
    plan,
    sizes,
    software,
    storage,
)
from jobgroup.doctor.plan import ROOT, make
from jobgroup.doctor.report import Result, failed
from jobgroup.doctor.storage import Need
from tests.support.package.doctor_groups import QWEN_7B, plan_of, write_group

TASKS = (
    "data-server",
    "rollout-server",
    "reward-server",
    "replay-buffer",
    "environment-server",
    "ppo-trainer",
    "tinker-server",
)


def tasks_of(draws: random.Random) -> list[str]:
    return draws.sample(TASKS, draws.randrange(1, len(TASKS)))


# Packages

PROJECT = """
[project]
dependencies = ["Foo_Bar>=1", "numpy[extra]; python_version > '3'"]
[project.optional-dependencies]
services = ["web.server==2", "typing-extensions"]
rollout = ["router-x~=1.0", "foo-bar"]
trainer = ["Torch", "numpy"]
"""
OPTIONAL = {
    "": ["Foo_Bar>=1", "numpy[extra]; python_version > '3'"],
    "services": ["web.server==2", "typing-extensions"],
    "rollout": ["router-x~=1.0", "foo-bar"],
    "trainer": ["Torch", "numpy"],
}
EXTRAS = {
    "data-server": {"services"},
    "reward-server": {"services"},
    "replay-buffer": {"services"},
    "environment-server": {"services"},
    "rollout-server": {"rollout", "trainer"},
    "ppo-trainer": {"trainer"},
    "tinker-server": {"trainer"},
    "mine": set(),
}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("checkout", [True, False])
def test_packages_are_those_of_the_tasks_in_the_pinned_versions(
    seed: int, checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = random.Random(seed)
    names = draws.sample([*EXTRAS], draws.randrange(1, 4))
    monkeypatch.setattr(software, "_CHECKOUT", checkout)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    pins = {"Foo.Bar": "1.5", "numpy[a]": "2.0", "torch": "2.9", "never": "3", "web-server": "2"}
    lines = ["# a comment", *(f"{name}=={version}" for name, version in pins.items())]
    (tmp_path / "constraints.txt").write_text("\n".join(lines))

    installed = {}
    for name in ("foo_bar", "NumPy", "torch", "web_server", "router.x", "typing_extensions"):
        if draws.random() < 0.7:
            installed[name] = draws.choice(["1.5", "2.0", "2.9+cpu", "2"])
    if draws.random() < 0.5:
        installed["transformers"] = "5"
    listed = [SimpleNamespace(metadata={"Name": n}, version=v) for n, v in installed.items()]
    hidden = [SimpleNamespace(metadata={"Name": n}, version="0") for n in installed]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [*listed, *hidden])

    found = plan_of(tmp_path, dict.fromkeys(names, ""), env={"RLHF_ROLLOUT__ENGINE": "embedded"})
    *missing, versions = software.check_packages(found, tmp_path)

    extras = sorted(set().union(*(EXTRAS[name] for name in names)))
    wanted = {Requirement(text).name for extra in ["", *extras] for text in OPTIONAL[extra]}
    more = ["transformers"] if "environment-server" in names else []
    have = {canonicalize_name(name): version for name, version in installed.items()}
    lacking = {canonicalize_name(name) for name in (*wanted, *more)} - have.keys()
    assert [each.name for each in missing] == [f"package {name}" for name in sorted(lacking)]
    assert all(each.state == "fail" for each in missing)

    wrong = set()
    for name, pin in pins.items():
        key = canonicalize_name(Requirement(name).name)
        if key in have and have[key].split("+")[0] != pin:
            wrong.add(f"{key} {have[key]} ({pin} is pinned)")
    assert versions.state == ("warn" if wrong else "ok")
    if wrong:
        assert set(versions.found.split(", ")) == wrong

    package = ["-e", f".[{','.join(extras)}]"] if checkout else [f"rlhf-math[{','.join(extras)}]"]
    limits = ["-c", str(tmp_path / "constraints.txt")]
    for each in [*missing, *([versions] if wrong else [])]:
        words = [sys.executable, "-m", "pip", "install", *limits, *package, *more]
        assert shlex.split(each.fix) == words


# Disks


@pytest.mark.parametrize("seed", range(25))
def test_every_disk_needs_room_for_all_of_its_folders(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = random.Random(seed)
    disks = {f"/{letter}": draws.randrange(3) for letter in "abcdef"}
    free = {disk: draws.choice([10**9, 10**10, 10**12]) for disk in range(3)}
    wanted = []
    for number in range(draws.randrange(1, 12)):
        size = draws.choice([0, draws.randrange(10**9), draws.randrange(3 * 10**11)])
        wanted.append(Need(Path(draws.choice([*disks])), f"part {number}", size))

    def place(folder: Path) -> Any:
        disk = disks[str(folder)]
        return SimpleNamespace(disk=disk, stat=lambda: SimpleNamespace(st_dev=disk))

    used = SimpleNamespace(disk_usage=lambda where: SimpleNamespace(free=free[where.disk]))
    monkeypatch.setattr(storage, "_existing", place)
    monkeypatch.setattr(storage, "shutil", used)
    by_disk: dict[int, list[Need]] = defaultdict(list)
    for need in wanted:
        by_disk[disks[str(need.folder)]].append(need)
    running = draws.random() < 0.5
    results = list(storage.check_room(wanted, running=running))
    assert len(results) == len(by_disk)
    for result, (disk, needs) in zip(results, by_disk.items(), strict=True):
        needed = sum(need.size for need in needs)
        state = "ok" if needed <= 0.9 * free[disk] else "warn"
        if needed > free[disk] and not running:
            state = "fail"
        assert (result.name, result.state) == (f"disk of {needs[0].folder}", state)
        assert (result.fix == "") == (state == "ok")
        named = re.findall(r"part \d+", result.found)
        order = sorted(needs, key=lambda need: need.size, reverse=True)
        assert named == [need.what for need in order[:4]]


@pytest.mark.parametrize("seed", range(12))
def test_what_every_task_writes_to_its_disk(seed: int, tmp_path: Path) -> None:
    draws = random.Random(seed)
    experts = draws.choice([0, 8, 256, 257, 512])
    nodes = {name: draws.randrange(1, 4) for name in tasks_of(draws)}
    env: dict[str, Any] = {
        "MODEL_NAME": "org/a",
        "RLHF_REPLAY__CAPACITY": draws.choice([100, 5000]),
        "RLHF_SAMPLING__MAX_NEW_TOKENS": draws.choice([10, 700]),
        "RLHF_CHECKPOINT__KEEP": 2,
    }
    adapter = draws.random() < 0.3
    if adapter:
        env["RLHF_LORA__RANK"] = 2
    replays = bool(experts) and not adapter and draws.random() < 0.7
    if replays:
        env["RLHF_TRAINER__ROUTING_REPLAY"] = "true"
    tasks = {name: f"num_nodes: {count}\n" for name, count in nodes.items()}
    found = plan_of(tmp_path, tasks, env=env)
    assert found.problems == []
    content = dict(QWEN_7B)
    if experts:
        more = {"moe_intermediate_size": 64, "num_experts": experts, "num_experts_per_tok": 4}
        content |= {"model_type": "qwen3_moe", **more}
    known = draws.random() < 0.8
    if known:
        found.shapes["org/a"] = content
    state = tmp_path / "state"
    parameters = ModelShape.of(content).parameters if known else 0

    expected = []
    for job in found.here:
        expected.append((state, f"{job.name}'s logs", nodes[job.name] * 200 * 1024**2))
        if job.name == "replay-buffer":
            tokens = env["RLHF_REPLAY__CAPACITY"] * env["RLHF_SAMPLING__MAX_NEW_TOKENS"]
            expected.append((state, "full replay store", 8 * tokens))
        if job.name == "rollout-server" and not adapter:
            size = 5 * nodes[job.name] * 2 * parameters
            expected.append((state, "5 pulled versions", size))
        if job.name == "ppo-trainer" and replays and known:
            slots = (job.config.trainer.max_staleness + 1) * job.config.step_tokens
            of_token = 28 * 4 * (2 if experts > 256 else 1)
            expected.append((state, "experts of the answers", slots * of_token))
    # The folder that a local run of this group writes, in that of the task.
    folder = found.here[0].workdir / "runs/small"
    needs = [tuple(need) for need in storage.needs(found)]
    assert [need for need in needs if need[0] != folder] == expected
    of_run = [need for need in needs if need[0] == folder]
    assert len(of_run) == 3 * ("ppo-trainer" in nodes)
    if of_run and not known:
        # Only the recorded groups have a size that does not follow from the model's.
        assert [need[2] for need in of_run[:2]] == [0, 0]


def test_only_folders_with_databases_are_judged_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: dict[str, bool] = {}

    def check(folder: Path, sqlite: bool = False) -> Result:
        assert folder.name not in judged
        judged[folder.name] = sqlite
        return Result(folder.name, "ok", "")

    monkeypatch.setattr(storage, "check_folder", check)
    monkeypatch.setattr(storage, "check_room", lambda wanted, running: [])
    for name in TASKS:
        found = plan_of(tmp_path, {name: ""}, env={"STATE_DIR": name, "RLHF_TRAINER__RUN_DIR": "r"})
        first, *_ = storage.check_disk(found)
        assert first.name == name
    assert judged.pop("r") is False
    assert judged == {name: name in ("data-server", "replay-buffer") for name in TASKS}


@pytest.mark.parametrize(
    ("seconds", "state"), [(0.0, "ok"), (1.0, "ok"), (1.01, "warn"), (9, "warn")]
)
@pytest.mark.parametrize("sqlite", [True, False])
def test_a_slow_disk_is_a_warning(
    seconds: float, state: str, sqlite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([5.0, 5.0 + seconds])
    monkeypatch.setattr(storage, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(storage, "file_system", lambda place: "ext4")
    result = storage.check_folder(tmp_path / "later", sqlite=sqlite)
    assert (result.name, result.state) == (f"folder {tmp_path / 'later'}", state)
    assert f"in {1000 * seconds:.0f} ms, ext4" in result.found
    assert bool(result.fix) == (state == "warn")
    monkeypatch.undo()
    (tmp_path / "file").touch()
    refused = storage.check_folder(tmp_path / "file" / "later")
    assert (refused.state, refused.fix != "") == ("fail", True)


# Tasks, ports, processes


@pytest.mark.parametrize("seed", range(15))
def test_whose_variables_a_task_has(seed: int, tmp_path: Path) -> None:
    """In a running group, what it was launched with, or else what the machine has; in a local run
    the YAML's; over all of these what the command gives."""
    draws = random.Random(seed)
    names = [f"VARIABLE_{number}" for number in range(6)]

    def some(value: str) -> dict[str, str]:
        return {name: value for name in names if draws.random() < 0.5}

    of_yaml = some("yaml")
    of_command = some("command")
    around = some("around")
    inside = draws.random() < 0.5
    if inside:
        around["SKYPILOT_JOBGROUP_NAME"] = "running"
        if draws.random() < 0.5:
            around["JOBGROUP_HOSTS"] = "data-server-0.small=127.0.0.1:0"
    tasks = ["data-server", "reward-server"]
    path = write_group(tmp_path, dict.fromkeys(tasks, ""), of_yaml)
    chosen = draws.choice([None, *tasks])
    found = make(path, of_command, around, task=chosen)
    assert found.problems == []
    assert (found.inside, found.demo) == (inside, False)
    assert found.group == ("running" if inside else "small")
    here = [chosen] if chosen else [] if inside else tasks
    assert [job.name for job in found.here] == here
    for job in found.here:
        for name in names:
            order = [around, of_yaml] if not inside else [of_yaml, around]
            given = dict(order[0])
            given.update(order[1])
            given.update(of_command)
            assert job.env.get(name) == given.get(name)


@pytest.mark.parametrize("seed", range(20))
def test_only_a_process_that_listens_has_a_port(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = random.Random(seed)
    table = []
    expected = set()
    for pid in range(20):
        port = draws.choice([7000, 7001])
        status = draws.choice(["LISTEN", "ESTABLISHED", "TIME_WAIT"])
        owner = pid or None
        near: Any = SimpleNamespace(ip="::", port=port) if draws.random() < 0.9 else ()
        table.append(
            SimpleNamespace(status=status, pid=owner, laddr=near, raddr=SimpleNamespace(port=7000))
        )
        if status == "LISTEN" and owner and near and port == 7000:
            expected.add(f"{pid} (name of {pid})")

    def listed(kind: str) -> list[Any]:
        assert kind == "tcp"
        return table

    monkeypatch.setattr(psutil, "net_connections", listed)
    monkeypatch.setattr(
        psutil, "Process", lambda pid: SimpleNamespace(name=lambda: f"name of {pid}")
    )
    assert network._listeners(7000) == expected

    def refused(kind: str) -> Any:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", refused)
    assert network._listeners(7000) == set()


def test_a_taken_port_is_said_with_or_without_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((network._NODE, 0)) as listener:
        port = listener.getsockname()[1]
        found = plan_of(tmp_path, {"data-server": ""}, env={"RLHF_DATA__PORT": port})
        for users, words in (
            (set(), ": Address already in use"),
            ({"5 (x)"}, " by process 5 (x)"),
            ({"5 (x)", "6 (y)"}, " by process "),
        ):
            monkeypatch.setattr(network, "_listeners", lambda port, users=users: users)
            [taken] = network.check_ports(found)
            assert f"already in use{words}" in taken.found
            assert sum(user in taken.found for user in users) == len(users)
            assert f"RLHF_DATA__PORT={port + 1000}" in taken.fix


@pytest.mark.parametrize("seed", range(12))
def test_processes_that_compute_share_the_cores(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = random.Random(seed)
    nodes = {name: draws.randrange(1, 4) for name in tasks_of(draws)}
    on_gpus = {name for name in nodes if draws.random() < 0.2}
    limited = {name for name in nodes if draws.random() < 0.3}
    sglang = draws.random() < 0.3
    documents = []
    for name, count in nodes.items():
        env = {"RLHF_ROLLOUT__ENGINE": "sglang" if sglang else "embedded"}
        env |= {"OMP_NUM_THREADS": "1"} if name in limited else {}
        more = "resources: {accelerators: 'H100:1'}\n" if name in on_gpus else ""
        document = f"name: {name}\nrun: x\nnum_nodes: {count}\nenvs: {json.dumps(env)}\n{more}"
        documents.append(document)
    path = tmp_path / "group.yaml"
    path.write_text("---\n".join(["name: small\nexecution: parallel\n", *documents]))
    usable = draws.choice([1.0, 2.0, 7.5, 64.0])
    monkeypatch.setattr(machine, "cores", lambda: usable)
    _, *warned = machine.check_cores(make(path, {}, {}))

    computing = {"ppo-trainer", "tinker-server"} | (set() if sglang else {"rollout-server"})
    counted = [name for name in nodes if name in computing and name not in on_gpus]
    count = sum(nodes[name] for name in counted)
    unlimited = [name for name in counted if name not in limited]
    if count < 2 or not unlimited:
        assert warned == []
        return
    [warning] = warned
    assert (warning.name, warning.state) == ("OMP_NUM_THREADS", "warn")
    assert f"not set for {', '.join(unlimited)}:" in warning.found
    assert warning.fix == f"--env OMP_NUM_THREADS={max(1, int(usable / count))}"


@pytest.mark.parametrize("gpus", [0, 1, 4])
@pytest.mark.parametrize("task", ["data-server", "ppo-trainer"])
def test_as_many_processes_add_up_as_there_are_gpus(
    gpus: int, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ask(*words: object, **options: Any) -> str:
        asked.append((words, options))
        return " 2.5\n"

    monkeypatch.setattr(machine, "ask", ask)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = plan_of(tmp_path, {task: ""})
    found.gpus = [plan.Gpu(str(n), "H100", f"GPU-{n}", 8, 0, "580.1") for n in range(gpus)]
    results = list(machine.check_collective(found))
    if task == "data-server":
        assert (results, asked) == ([], [])
        return
    [(words, options)] = asked
    backend = "nccl" if gpus else "gloo"
    world = gpus or 2
    assert words == (sys.executable, "-m", "jobgroup.doctor.collective", backend, world)
    assert ("NCCL" in options["fix"], "GLOO" in options["fix"]) == (bool(gpus), not gpus)
    assert options["timeout_s"] > collective.TIMEOUT_S
    env = options["env"]
    assert (env["OMP_NUM_THREADS"], env["PYTHONPATH"]) == ("3", str(ROOT))
    assert (env["PATH"], env.get("GLOO_SOCKET_IFNAME")) == (os.environ["PATH"], "lo")
    [result] = results
    assert (result.name, result.state) == ("all_reduce", "ok")
    assert result.found.startswith(f"{world} processes over {backend} in 2.5 s")


@pytest.mark.parametrize("added", [3.0, 2.0])
@pytest.mark.parametrize(("rank", "backend"), [(0, "gloo"), (1, "nccl")])
def test_every_process_checks_the_sum_and_the_first_says_the_time(
    added: float,
    rank: int,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done: list[Any] = []
    made: list[Any] = []
    ones = torch.ones

    def filled(size: int, device: str) -> torch.Tensor:
        made.append((size, device))
        return ones(size)

    monkeypatch.setattr(torch, "ones", filled)

    def begin(backend: str, where: str, **options: Any) -> None:
        done.append((backend, where, options["world_size"], options["rank"]))
        assert options["timeout"].total_seconds() == 45

    others = SimpleNamespace(
        init_process_group=begin,
        all_reduce=lambda tensor: tensor.mul_(added),
        destroy_process_group=lambda: done.append("end"),
    )
    monkeypatch.setattr(collective, "dist", others)
    times = iter([5.0, 6.26])
    monkeypatch.setattr(collective, "time", SimpleNamespace(monotonic=lambda: next(times)))
    if added == 3:
        collective.worker(rank, backend, 3, "/folder")
        assert done[1:] == ["end"]
    else:
        with pytest.raises(RuntimeError):
            collective.worker(rank, backend, 3, "/folder")
    assert done[0] == (backend, "file:///folder/rendezvous", 3, rank)
    assert made == [(1 << 20, "cpu" if backend == "gloo" else f"cuda:{rank}")]
    assert capsys.readouterr().out == ("1.3\n" if rank == 0 and added == 3 else "")


# Models and data sets


class Hub:
    """Answers for the hub's library, and keeps what it was asked."""

    def __init__(self, known: set[str], offline: bool) -> None:
        self.asked: list[Any] = []
        self.known = known
        self.constants = SimpleNamespace(HF_HUB_OFFLINE=offline)
        self.endpoint = "https://here"

    def __call__(self) -> "Hub":
        return self

    def auth_check(self, name: str, *, repo_type: str) -> None:
        self._look("hub", name, repo_type)

    def snapshot_download(self, name: str, *, repo_type: str, local_files_only: bool) -> None:
        assert local_files_only
        self._look("cache", name, repo_type)

    def _look(self, *asked: str) -> None:
        self.asked.append(asked)
        if asked[1] not in self.known:
            raise FileNotFoundError(f"no   {asked[1]}\n" + "x" * 900)


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("gsm8k", "openai/gsm8k"),
        ("math", "DigitalLearningGmbH/MATH-lighteval"),
        ("org/own", "org/own"),
        ("math:org/own", "org/own"),
    ],
)
def test_a_data_set_is_looked_for_where_the_task_will_look(
    source: str,
    name: str,
    is_there: bool,
    offline: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = Hub({name} if is_there else set(), offline)
    library: Any = ModuleType("huggingface_hub")
    library.HfApi = hub
    library.constants = hub.constants
    library.snapshot_download = hub.snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    found = plan_of(tmp_path, {"data-server": ""}, env={"RLHF_DATA__SOURCE": source})
    found.here = [replace(found.here[0], workdir=tmp_path)]
    [result] = availability.check_dataset(found)
    assert hub.asked == [("cache" if offline else "hub", name, "dataset")]
    assert (result.name, result.state) == (f"data set {source}", "ok" if is_there else "fail")
    if is_there:
        assert ("cache" in result.found) == offline
        assert ("https://here" in result.found) == (not offline)
    else:
        assert result.found.startswith(f"FileNotFoundError: no {name} xxx")
        assert 300 < len(result.found) < 450
        assert result.fix

    if "/" in source:
        (tmp_path / name).mkdir(parents=True)
        [result] = availability.check_dataset(found)
        assert (result.name, result.state, len(hub.asked)) == (f"data set {source}", "ok", 1)
    assert list(availability.check_dataset(plan_of(tmp_path, {"reward-server": ""}))) == []


def test_a_model_is_a_folder_or_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def check(place: str) -> None:
        looked.append(place)
        if place.endswith("missing"):
            raise ConfigError("there is none", field="model.name", value=place)

    def content(place: str, *, ask_hub: bool) -> Any:
        assert ask_hub
        return {} if place == "org/empty" else {"of": place}

    monkeypatch.setattr(
        availability, "hub", SimpleNamespace(check_model=check, text_config=content)
    )
    folder = tmp_path / "own"
    folder.mkdir()
    for name, state in (
        ("org/there", "ok"),
        ("own", "ok"),
        ("org/empty", "ok"),
        ("missing", "fail"),
    ):
        found = plan_of(tmp_path, {"ppo-trainer": ""}, env={"MODEL_NAME": name})
        job = replace(found.here[0], workdir=tmp_path)
        place = str(folder) if name == "own" else name
        [result] = availability.check_model(found, name, job)
        assert (result.name, result.state, looked.pop()) == (f"model {name}", state, place)
        if state == "ok":
            assert ("folder" in result.found) == (name == "own")
        known = {} if name in ("org/empty", "missing") else {name: {"of": place}}
        assert found.shapes == known

        # Where the setup of the task, or `make demo`, makes it, it need not be there.
        made = replace(job, setup="python -m trainer.tiny_model x")
        [result] = availability.check_model(found, name, made)
        assert result.state == "ok"
        found.demo = True
        [result] = availability.check_model(found, name, job)
        assert (result.state, looked.pop()) == ("ok", place)


# The report and the command


@pytest.mark.parametrize("seed", range(12))
def test_an_error_is_a_line_with_all_that_it_says(seed: int) -> None:
    draws = random.Random(seed)
    name = draws.choice([None, "a.b"])
    value = draws.choice([None, 0, "", "text"])
    remedy = draws.choice([None, "do this"])
    line = failed("check", ConfigError("it is wrong", field=name, value=value, remedy=remedy))
    parts = ["it is wrong"]
    if name is not None:
        parts.append(f"field: {name}")
    if value is not None:
        parts.append(f"value: {value}")
    assert (line.name, line.state, line.found.split(" · ")) == ("check", "fail", parts)
    assert line.fix == (remedy or f"change {name or 'it'}")


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("as_json", [True, False])
def test_the_status_is_that_of_the_lines(
    seed: int, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    draws = random.Random(seed)
    redactor = SecretRedactor({"API_TOKEN": "a-secret-value"})
    lines = []
    for number in range(draws.randrange(5)):
        state: Any = draws.choice(["ok", "warn", "fail", "ok", "ok"])
        fix = "" if state == "ok" else "use a-secret-value"
        lines.append(Result(f"line {number}", state, "é a-secret-value", fix))
    may_fail = draws.random() < 0.3
    states = [line.state for line in lines]
    status = command._report(iter(lines), redactor, as_json, may_fail=may_fail)
    assert status == ("fail" in states and not may_fail)
    out = capsys.readouterr().out
    assert "a-secret-value" not in out
    hidden = [replace(line, found="é [secret]", fix=line.fix and "use [secret]") for line in lines]
    if as_json:
        assert "\\u" not in out
        report = json.loads(out)
        assert report == {
            "ok": "fail" not in states,
            "checks": [vars(line) for line in hidden],
        }
        return
    *written, _, last = out.splitlines()
    expected = []
    for line in hidden:
        mark = {"ok": "ok    ", "warn": "warn  ", "fail": "FAIL  "}[line.state]
        expected.append(f"{mark}{line.name}: {line.found}")
        if line.fix:
            expected.append(f"      fix: {line.fix}")
    assert written == expected
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}
    assert counts == {state: states.count(state) for state in ("ok", "warn", "fail")}


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--gpus", "8"], "--gpus and --gpu-memory-gb"),
        (["--gpu-memory-gb", "80"], "--gpus and --gpu-memory-gb"),
        (["--env", "A-B=1"], "--env"),
        (["--plan", "nowhere"], "--plan"),
        (["--task", "x"], "--task"),
        (["--data", "--task", "data-server"], None),
    ],
)
def test_what_is_wrong_with_a_command_is_named(
    words: list[str], field: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if field is None:
        assert command.main([*words, "--env", "RLHF_DATA__SOURCE=tiny"]) == 1
        assert "field: --data" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert f"field: {field}" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--gpus", "3"], ["--gpu-memory-gb", "33"]])
def test_a_plan_is_for_one_gpu_unless_it_says_more(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def predict(model: str, gpus: int, env: Any, *, only_gb: float | None) -> Any:
        asked.append((model, gpus, env["A"], env["PATH"], only_gb))
        yield Result("trainer", "fail", "does not fit", "more")

    monkeypatch.setattr(sizes, "predict", predict)
    monkeypatch.setenv("A", "around")
    status = command.main(["--plan", "org/a", *words, "--env", "A=given"])
    size = 33.0 if "33" in words else None
    assert asked == [("org/a", 3 if "3" in words else 1, "given", os.environ["PATH"], size)]
    assert status == (1 if size else 0)


@pytest.mark.parametrize("as_json", [True, False])
def test_the_gpus_that_are_visible_here_are_those_of_the_checks(
    as_json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\ncase $1 in *compute-apps*) ;;\n"
        "*) echo 0, A, GPU-a, 80, 1, 580; echo 1, B, GPU-b, 80, 1, 580;; esac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    seen: list[Any] = []

    def results(found: plan.Plan) -> Any:
        seen.append(found)
        yield Result("line", "ok", "secret-of-a-task")

    monkeypatch.setattr(command, "results", results)
    for name in [name for name in os.environ if name.startswith(("SKYPILOT_", "RLHF_"))]:
        monkeypatch.delenv(name)
    group = write_group(
        tmp_path, {"data-server": "", "mine": ""}, {"API_TOKEN": "secret-of-a-task"}
    )
    words = [str(group), *(["--json"] if as_json else [])]
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert command.main([*words, "--env", "HF_HUB_OFFLINE=1", "--env", "MINE_X=2"]) == 0
    assert (os.environ.get("HF_HUB_OFFLINE"), os.environ.get("MINE_X")) == ("1", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    [found] = seen
    assert [gpu.name for gpu in found.gpus] == ["B"]
    assert found.no_gpus == "CUDA_VISIBLE_DEVICES is '1'"
    out = capsys.readouterr().out
    assert "[secret]" in out
    assert "secret-of-a-task" not in out
    assert out.startswith("{" if as_json else "small: data-server, mine\n\n")


def test_every_check_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the models come first, since others need their sizes."""
    order: list[str] = []

    def note(name: str) -> Any:
        def check(*arguments: Any) -> Any:
            order.append(name)
            yield Result(name, "ok", " ".join(map(str, arguments[1:2])))

        return check

    monkeypatch.setattr(availability, "check_model", note("model"))
    monkeypatch.setattr(availability, "check_dataset", note("data"))
    monkeypatch.setattr(command, "_CHECKS", {"first": note("first"), "second": note("second")})
    found = plan_of(tmp_path, {"ppo-trainer": ""}, env={"MODEL_NAME": "org/a"})
    found.problems = [Result("problem", "fail", "", "x")]
    lines = [(each.name, each.found) for each in command.results(found)]
    assert lines == [
        ("problem", ""),
        ("data", ""),
        ("model", "org/a"),
        ("first", ""),
        ("second", ""),
    ]
    assert set(order[:2]) == {"data", "model"}


# SGLang's environment


@pytest.mark.parametrize("device", ["cpu", "auto"])
@pytest.mark.parametrize("engine", ["sglang", "embedded"])
@pytest.mark.parametrize("fits", [True, False])
def test_the_version_of_sglang_is_that_of_its_pin(
    device: str, engine: str, fits: bool, tmp_path: Path
) -> None:
    pins = "sglang-cpu/requirements.txt" if device == "cpu" else "sglang-requirements.txt"
    text = (ROOT / "jobgroup" / pins).read_text()
    [pin] = [
        line.partition("==")[2].split()[0]
        for line in text.splitlines()
        if re.match(r"sglang(\[\w+\])?==", line)
    ]
    python = tmp_path / "venv/bin/own"
    env = {
        "RLHF_ROLLOUT__ENGINE": engine,
        "RLHF_ROLLOUT__DEVICE": device,
        "RLHF_ROLLOUT__ENGINE_PYTHON": python,
    }
    found = plan_of(tmp_path, {"rollout-server": ""}, env=env)
    if engine == "embedded":
        assert list(software.check_sglang(found)) == []
        return
    with pytest.raises(ConfigError) as missing:
        list(software.check_sglang(found))
    setup = "make sglang-cpu" if device == "cpu" else "bash jobgroup/setup.sh sglang"
    assert str(missing.value.remedy).startswith(setup)
    python.parent.mkdir(parents=True)
    asked = "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"
    # A Python that has these versions, whatever it is asked by.
    python.write_text(
        f'#!/bin/sh\n[ "$1 $2" = "-c {asked}" ] && echo {pin if fits else "0.0"} 2.9\n'
    )
    python.chmod(0o755)
    [result] = software.check_sglang(found)
    assert (result.name, result.state) == ("sglang", "ok" if fits else "warn")
    assert f"({pin} is pinned) with torch 2.9 in {tmp_path / 'venv'}" in result.found
    assert result.fix == ("" if fits else missing.value.remedy)
    assert list(software.check_sglang(plan_of(tmp_path, {"data-server": ""}))) == []


@pytest.mark.parametrize("router", ["auto", "smg", "sglang-router"])
def test_the_router_of_the_run_is_imported(
    router: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(software, "ask", lambda *words, fix: asked.append((words, fix)))
    found = plan_of(tmp_path, {"rollout-server": ""}, env={"RLHF_ROLLOUT__ROUTER": router})
    assert found.problems == []
    [result] = software.check_router(found)
    module = "smg" if router == "smg" else "sglang_router"
    assert [each[0] for each in asked] == [(sys.executable, "-c", f"import {module}")]
    assert (result.name, result.state) == ("router", "ok")
    assert result.found.startswith("smg" if router == "smg" else "sglang-router")
    assert list(software.check_router(plan_of(tmp_path, {"data-server": ""}))) == []
