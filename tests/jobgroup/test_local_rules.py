"""What the local runner does around its nodes: their environments, GPUs and addresses, the folder
that it empties, its token, its words and the screen; random groups against the rules, written anew.
"""

import asyncio
import io
import os
import random
import resource
import socket
import sys
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from common.errors import ConfigError
from common.process import launcher, run_lock
from common.process.child import Child
from common.process.run_lock import LOCK, RunLock
from common.process.topology import LocalHost, format_hosts
from jobgroup.local import __main__ as command
from jobgroup.local import node as node_module
from jobgroup.local import placement
from jobgroup.local.node import Node
from jobgroup.local.output import COLOURS, Screen
from jobgroup.spec import JobGroup, Task
from tests.support.errors import raises


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is held is held for good here."""
    monkeypatch.setattr(run_lock, "_READER_S", 0.0)


def a_task(name: str, **fields: Any) -> Task:
    usual: dict[str, Any] = {
        "num_nodes": 1,
        "workdir": Path("/work"),
        "setup": None,
        "run": "true",
        "env": {},
        "gpus": 0,
        "max_restarts": 0,
        "restart_codes": frozenset(),
        "primary": True,
        "termination_delay_s": 0.0,
        "ignored": (),
        "on_volumes": (),
    }
    return Task(name=name, **(usual | fields))


def a_group(draw: random.Random) -> JobGroup:
    tasks = [
        a_task(name, num_nodes=draw.randint(1, 3), gpus=draw.randint(0, 3))
        for name in ("ppo-trainer", "reward-server", "rollout-server")[: draw.randint(1, 3)]
    ]
    return JobGroup("demo", tuple(tasks))


# ---------------------------------------------------------------- GPUs and addresses


@pytest.mark.parametrize("seed", range(20))
def test_gpus_are_dealt_in_turn_and_shared_only_when_there_are_too_few(seed: int) -> None:
    draw = random.Random(seed)
    tasks = a_group(draw).tasks
    gpus = [str(number) for number in draw.sample(range(9), draw.randint(0, 9))]
    shares = placement.share_gpus(tasks, gpus)
    dealt = [gpu for task in tasks for node in shares[task.name] for gpu in node]
    for task in tasks:
        assert [len(node) for node in shares[task.name]] == (
            [min(task.gpus, len(gpus))] * task.num_nodes
        )
        assert all(len(set(node)) == len(node) for node in shares[task.name])
    assert dealt == [gpus[number % len(gpus)] for number in range(len(dealt))]


@pytest.mark.parametrize("own_address", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_every_node_of_every_block_has_a_place_of_its_own(seed: int, own_address: bool) -> None:
    group = a_group(random.Random(seed))
    names = [f"{task.name}-{rank}.demo" for task in group.tasks for rank in range(task.num_nodes)]
    taken = set[LocalHost]()
    ports = set[int]()
    for block in (1, 2, 3):
        hosts = placement._hosts(group, block, own_address)
        assert list(hosts) == names
        assert taken.isdisjoint(hosts.values())
        taken |= set(hosts.values())
        assert len(taken) == block * len(names)
        for host in hosts.values():
            octets = [int(part) for part in host.address.split(".")]
            if own_address:
                assert octets[:2] == [127, block]
                assert all(0 < part < 255 for part in octets), "addresses of hosts, not of networks"
                assert host.port_shift == 0
            else:
                assert host.address == "127.0.0.1"
                near = {port + host.port_shift for port in (8000, 8002, 8003, 8004)}
                assert ports.isdisjoint(near)
                ports |= near


def test_two_groups_at_once_have_different_blocks_and_give_them_back() -> None:
    group = a_group(random.Random(0))
    with placement.choose_addresses(group) as one, placement.choose_addresses(group) as two:
        assert set(one.hosts.values()).isdisjoint(two.hosts.values())
        assert one.text() == format_hosts(one.hosts)
        for task in group.tasks:
            assert [one.hosts[f"{task.name}-{rank}.demo"] for rank in range(task.num_nodes)] == (
                one.of(task)
            )
    assert one.lock.fileno() == two.lock.fileno() == -1


def test_a_machine_without_a_free_block_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def taken(place: Any) -> None:
        tried.append(place)
        raise OSError("in use")

    monkeypatch.setattr(socket, "create_server", taken)
    with raises(ConfigError, field="YAML", value="demo"):
        placement.choose_addresses(a_group(random.Random(0)))
    assert sorted(tried) == sorted((f"127.{block}.255.254", 29499) for block in range(1, 255))


def test_the_gpus_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,,GPU-7")
    assert placement.gpus_of_machine() == ["3", "GPU-7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = [SimpleNamespace(number="0"), SimpleNamespace(number="1")]
    monkeypatch.setattr(placement, "visible", lambda environ: (found, "words"))
    assert placement.gpus_of_machine() == ["0", "1"]


@pytest.mark.parametrize("seed", range(15))
def test_a_node_sees_its_pod_and_what_is_nearest_to_it_counts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    names = ["OMP_WAIT_POLICY", "PYTHONUNBUFFERED", "API_TOKEN", "SKYPILOT_NODE_RANK", "OWN"]
    here = {name: "of this environment" for name in names if draw.random() < 0.5}
    gpus = [str(number) for number in range(draw.randint(0, 4))]
    monkeypatch.setattr(os, "environ", here)
    monkeypatch.setattr(command, "gpus_of_machine", lambda: gpus)
    group = a_group(draw)
    tasks = tuple(
        a_task(
            task.name,
            num_nodes=task.num_nodes,
            gpus=task.gpus,
            env={name: draw.choice(["", "of the task"]) for name in names if draw.random() < 0.5},
        )
        for task in group.tasks
    )
    group = JobGroup("demo", tasks)
    shares = placement.share_gpus(tasks, gpus)
    ids = set[str]()
    with placement.choose_addresses(group) as placed:
        environment = command._environments(group, placed)
        for task in tasks:
            for rank in range(task.num_nodes):
                env = environment(task, rank)
                own = shares[task.name][rank]
                pod = {
                    "SKYPILOT_JOBGROUP_NAME": "demo",
                    "SKYPILOT_NODE_RANK": str(rank),
                    "SKYPILOT_NUM_NODES": str(task.num_nodes),
                    "SKYPILOT_NODE_IPS": "\n".join(host.address for host in placed.of(task)),
                    "SKYPILOT_NUM_GPUS_PER_NODE": str(len(own)),
                    "SKYPILOT_MANAGED_JOB_ID": str(os.getpid()),
                    "JOBGROUP_HOSTS": format_hosts(placed.hosts),
                }
                assert pod.items() <= env.items()
                run, _, name = env["SKYPILOT_TASK_ID"].rpartition("_demo_")
                assert name == task.name
                ids.add(run)
                assert env.get("CUDA_VISIBLE_DEVICES") == (",".join(own) if gpus else None)
                assert all(host.address in env["NO_PROXY"] for host in placed.hosts.values())
                usual = {"OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
                for name in ("OMP_WAIT_POLICY", "PYTHONUNBUFFERED", "OWN"):
                    nearest = task.env.get(name, here.get(name, usual.get(name)))
                    assert env.get(name) == nearest
                token = task.env.get("API_TOKEN") or here.get("API_TOKEN")
                assert env.get("API_TOKEN") == token
    assert len(ids) == 1, "one run"


# ---------------------------------------------------------------- folders and tokens


@pytest.mark.parametrize("seed", range(20))
def test_all_is_removed_but_locks_and_the_logs_of_this_run(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    folder = tmp_path / "run"
    logs = folder / draw.choice(["logs/now", "logs", "deep/logs/now"])
    logs.mkdir(parents=True)
    (logs / "log").touch()
    (folder / LOCK).touch()
    for name in ("file", ".hidden"):
        (folder / name).touch()
    (folder / "folder/inner").mkdir(parents=True)
    (folder / "folder/link").symlink_to(outside)
    (folder / "link").symlink_to(outside)
    (folder / "to nothing").symlink_to(tmp_path / "absent")
    command._clear(folder, logs)
    kept = {LOCK, logs.relative_to(folder).parts[0]}
    assert {path.name for path in folder.iterdir()} == kept
    assert (logs / "log").exists()
    assert (outside / "kept").exists(), "a link is removed, not followed"
    (folder / "file").touch()
    with RunLock(folder, "another"), raises(ConfigError, code="run_in_use", field="--clear"):
        command._clear(folder, logs)
    assert (folder / "file").exists()


def test_logs_are_in_the_run_directory_unless_another_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    without = JobGroup("demo", (a_task("one"), a_task("two")))
    runs = [
        a_task("one"),
        a_task("two", env={"RUN_DIR": "here"}),
        a_task("x", env={"RUN_DIR": "b"}),
    ]
    for group, run_dir in ((without, "runs/demo"), (JobGroup("demo", tuple(runs)), "here")):
        assert command._run_dir(group) == Path(run_dir)
        logs = command._log_dir(None, group)
        assert logs.is_dir()
        assert logs.parent == tmp_path / run_dir / "logs"
        assert logs.name.endswith(f"-{os.getpid()}")
    assert command._log_dir(Path("there/logs"), without) == tmp_path / "there/logs"
    (tmp_path / "file").touch()
    with raises(ConfigError, field="--log-dir"):
        command._log_dir(Path("file/logs"), without)


def test_the_directories_of_a_run_are_held_and_one_of_another_run_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    logs = tmp_path / "logs"
    group = JobGroup("demo", (a_task("one", env={"RUN_DIR": str(run_dir)}),))
    with command._own_directories(group, logs):
        for held in (logs, run_dir / "logs"):
            with raises(ConfigError, code="run_in_use"):
                RunLock(held, "another").__enter__()
        with RunLock(run_dir, "the trainer of this run"):
            pass
    for held, field in ((logs, "--log-dir"), (run_dir, "RUN_DIR"), (run_dir / "logs", "RUN_DIR")):
        with (
            RunLock(held, "another"),
            raises(ConfigError, code="run_in_use", field=field, value=str(held)),
        ):
            command._own_directories(group, logs).__enter__()
    with command._own_directories(JobGroup("demo", (a_task("one"),)), logs):
        pass
    with command._own_directories(group, run_dir / "logs"):
        pass  # one folder is held once


@pytest.mark.parametrize("tokens", [(), (None,), ("",), ("", None), ("given",), ("", "given")])
@pytest.mark.parametrize("here", [None, "", "of this environment"])
def test_a_token_is_made_for_tasks_that_want_one_and_have_none(
    tokens: tuple[str | None, ...],
    here: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {} if here is None else {"API_TOKEN": here}
    monkeypatch.setattr(os, "environ", environ)
    file = tmp_path / "api_token"
    file.write_text("of a run before")
    file.chmod(0o644)
    tasks = [
        a_task(f"task{i}", env={} if token is None else {"API_TOKEN": token})
        for i, token in enumerate(tokens)
    ]
    made = command._make_token(tasks, tmp_path)
    wanted = "" in tokens and "given" not in tokens and not here
    assert bool(made) is wanted
    if wanted:
        assert (len(made), environ["API_TOKEN"], file.read_text()) == (32, made, made)
        assert file.stat().st_mode & 0o777 == 0o600
    else:
        assert environ.get("API_TOKEN") == here
        assert file.read_text() == "of a run before"


@pytest.mark.parametrize("secure", [False, True])
def test_the_dashboard_is_where_the_trainer_listens(
    secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TLS_CERT", raising=False)
    env = {"RLHF_TRAINER__PORT": "8111"} | ({"TLS_CERT": "/cert"} if secure else {})
    trainer = a_task("ppo-trainer", run="python -m trainer", env=env)
    foreign = a_task("ppo-trainer", run="python other.py", env=env)
    other = a_task("reward-server", run="python -m services.reward")
    group = JobGroup("demo", (other, trainer))
    with placement.choose_addresses(group) as placed:
        address = placed.of(trainer)[0].address
        scheme = "https" if secure else "http"
        url = f"dashboard, once the trainer has started: {scheme}://{address}:8111/dashboard/"
        assert command._addresses(group, placed, tmp_path, "") == [url]
        [token, call, dashboard] = command._addresses(group, placed, tmp_path, "abc")
        assert "abc" in token
        assert str(tmp_path / "api_token") in token
        assert f"$(cat {tmp_path / 'api_token'})" in call
        assert dashboard == f"{url}#token=abc"
        assert command._addresses(JobGroup("demo", (other, foreign)), placed, tmp_path, "") == []


def test_the_python_of_the_yaml_is_replaced_where_it_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "with/.venv/bin").mkdir(parents=True)
    (tmp_path / "with/.venv/bin/python").touch()
    run = ".venv/bin/python -m trainer"
    tasks = (
        a_task("there", workdir=tmp_path / "with", run=run),
        a_task("absent", workdir=tmp_path, run=run),
        a_task("other", workdir=tmp_path, run="true"),
        a_task("absent2", workdir=tmp_path, run=run),
    )
    said: list[str] = []
    screen: Any = SimpleNamespace(say=said.append)
    made = command._with_an_interpreter(JobGroup("demo", tasks), screen)
    replaced = f"{sys.executable} -m trainer"
    assert [task.run for task in made.tasks] == [run, replaced, "true", replaced]
    assert [task.name for task in made.tasks] == ["there", "absent", "other", "absent2"]
    [line] = said
    assert "absent, absent2 run with" in line
    said.clear()
    assert command._with_an_interpreter(JobGroup("demo", tasks[:1]), screen).tasks == tasks[:1]
    assert not said


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (256, 1 << 20, 8192),
        (256, 1000, 1000),
        (8192, 1 << 20, None),
        (256, -1, 8192),
        (-1, -1, None),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may(
    soft: int, hard: int, raised: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: given.append(limits))
    command._raise_file_limit()
    assert given == ([] if raised is None else [(raised, hard)])


@pytest.mark.parametrize("count", [0, 1, 9, 10, 99, 100, 199, 200, 249, 250, 251, 300, 1000])
def test_numbers_of_nodes_go_from_1_to_250(count: int) -> None:
    if 1 <= count <= 250:
        assert command._node_count(f"ppo-trainer={count}") == ("ppo-trainer", count)
    else:
        with raises(ConfigError, field="--num-nodes", value=f"ppo-trainer={count}"):
            command._node_count(f"ppo-trainer={count}")


# ---------------------------------------------------------------- the command

YAML = """
{name: demo, execution: parallel}
---
{name: one, run: 'true', envs: {COLOUR: red}, secrets: {KEY: ''}, volumes: {/data: disk}}
---
{name: two, run: 'true', num_nodes: 2}
"""


def test_the_options_reach_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    yaml = tmp_path / "group.yaml"
    yaml.write_text(YAML)
    old = tmp_path / "old"
    (old / "inner").mkdir(parents=True)
    (old / LOCK).touch()
    asked: list[Any] = []

    def run(group: JobGroup, placed: Any, screen: Screen, **options: Any) -> int:
        asked.append((group, screen, options, (old / "inner").exists()))
        with raises(ConfigError, code="run_in_use"):
            RunLock(options["log_dir"], "another").__enter__()
        return 17

    monkeypatch.setattr(command, "_run", run)
    assert command.main([str(yaml)]) == 17
    words = [str(yaml), "--env", "COLOUR=blue", "--secret", "KEY=1", "--num-nodes", "one=3"]
    words += ["--follow", "two", "--grace", "1m", "--log-dir", "logs", "--clear", str(old)]
    assert command.main(words) == 17
    (plain, screen, options, there), (group, followed, given, cleared) = asked
    assert [task.num_nodes for task in plain.tasks] == [1, 2]
    assert [task.num_nodes for task in group.tasks] == [3, 2]
    assert [task.env for task in group.tasks] == [
        {"COLOUR": "blue", "KEY": "1"},
        {"COLOUR": "blue", "KEY": "1"},
    ]
    assert plain.tasks[0].env["COLOUR"] == "red"
    assert (screen.follow, followed.follow) == (None, "two-0")
    assert (options["grace_s"], given["grace_s"]) == (10.0, 60.0)
    assert options["log_dir"].parent == tmp_path / "runs/demo/logs"
    assert given["log_dir"] == tmp_path / "logs"
    assert (there, cleared) == (True, False)

    for wrong, field in (
        (["--num-nodes", "three=1"], "--num-nodes"),
        (["--follow", "three"], "--follow"),
        (["--grace", "soon"], "--grace"),
        (["--clear", str(tmp_path)], "--clear"),
        (["--env", "9=1"], "--env"),
        (["--env", f"RUN_DIR={yaml}/below"], "RUN_DIR"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main([str(yaml), *wrong])
        assert ended.value.code == 2
        assert field in capsys.readouterr().err
    yaml.write_text(YAML.replace("run: 'true'", "run: python -m trainer"))
    with pytest.raises(SystemExit):
        command.main([str(yaml), "--env", "RLHF_TRAINER__BATCH_SIZE=-1"])
    assert "trainer.batch_size" in capsys.readouterr().err
    assert len(asked) == 2, "nothing was started"


@pytest.mark.parametrize("succeeds", [True, False])
def test_what_failed_is_shown_once_and_the_reason_last(
    succeeds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    screen: Any = SimpleNamespace(
        say=lambda text, loud=False: shown.append(("say", text)),
        plain=lambda text: shown.append(("plain", text)),
        tail=lambda name, lines, log: shown.append(("tail", name, lines, log)),
    )

    def ended(name: str, status: int, lines: list[bytes]) -> Any:
        result = SimpleNamespace(result=lambda: status)
        return SimpleNamespace(name=name, ended=result, last_lines=lines, log=f"{name}.log")

    nodes = [ended("one-0", 1, [b"a"]), ended("two-1", 137, [b"b"]), None]
    tasks = [a_task("one", setup="make"), a_task("two", num_nodes=2), a_task("three")]
    runs = [
        SimpleNamespace(task=task, failed=node, state="FAILED", restarts=3, seconds=1.25)
        for task, node in zip(tasks, nodes, strict=True)
    ]
    made: list[Any] = []

    class Made:
        def __init__(
            self, given: Any, environment: Any, on: Any, folder: Path, **rest: Any
        ) -> None:
            made.append((given, on, folder, rest))
            self.runs = runs
            self.log_dir = folder
            self.reason = None if succeeds else runs[1]

        async def run(self) -> int:
            return 0 if succeeds else 137

    monkeypatch.setattr(command, "Runner", Made)
    monkeypatch.setattr(command, "_raise_file_limit", lambda: shown.append("limit"))
    group = JobGroup("demo", tuple(tasks))
    with placement.choose_addresses(group) as placed:
        status = command._run(group, placed, screen, log_dir=tmp_path, grace_s=2.0)
    assert status == (0 if succeeds else 137)
    assert made == [(group.tasks, screen, tmp_path, {"grace_s": 2.0})]
    assert shown[0] == ("say", f"4 nodes of 3 tasks; logs in {tmp_path}")
    assert "setup is not run" in shown[1][1]
    table = [line[1] for line in shown if line[0] == "plain"]
    assert [row.split()[:5] for row in table[1:]] == [
        ["one", "1", "FAILED", "3", "1.2"],
        ["two", "2", "FAILED", "3", "1.2"],
        ["three", "1", "FAILED", "3", "1.2"],
    ]
    assert [row.split()[5] for row in table[1:]] == [
        str(tmp_path / name) for name in ("one-0.log", "two-*.log", "three-0.log")
    ]
    tails = [line for line in shown if line[0] == "tail"]
    assert tails == [
        ("tail", "one-0", [b"a"], "one-0.log"),
        ("tail", "two-1", [b"b"], "two-1.log"),
    ]
    last = shown[-1]
    assert (last == tails[-1]) is succeeds
    if not succeeds:
        assert last[1].startswith("two-1 was killed by SIGKILL")
        assert "printed nothing" not in last[1]


@pytest.mark.parametrize("status", [1, 128, 129, 143])
@pytest.mark.parametrize("lines", [[], [b"why"]])
def test_how_a_node_ended_is_said_where_its_lines_cannot(status: int, lines: list[bytes]) -> None:
    said: list[str] = []
    screen: Any = SimpleNamespace(
        say=lambda text, loud: said.append(text), tail=lambda *given: said.append("lines")
    )
    node: Any = SimpleNamespace(
        name="one-0",
        last_lines=lines,
        log="log",
        ended=SimpleNamespace(result=lambda: status),
    )
    command._say_reason(node, screen)
    first, *more = said
    assert first == "lines"
    assert bool(more) is (status > 128 or not lines)
    assert all(text.startswith("one-0 ") for text in more)
    assert all(("printed nothing" in text) is (not lines) for text in more)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("run", ["python -m services.reward", "python -m trainer", "python x.py"])
@pytest.mark.parametrize("own_path", [False, True])
def test_settings_are_checked_before_anything_starts(
    elsewhere: bool, run: str, own_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths and modules are looked at where the task will look for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {})
    workdir = tmp_path / "other" if elsewhere else tmp_path
    env = {"PYTHONPATH": "/somewhere"} if own_path else {}
    is_ours = "x.py" not in run

    def checked(**more: str) -> None:
        command._check_settings([a_task("one", run=run, workdir=workdir, env=env | more)])

    checked()
    functions = '[{"name": "json:loads"}, {"name": "no_such_module.part:function"}]'
    for wrong, field, is_seen in (
        ({"RLHF_TRAINER__BATCH_SIZE": "-1"}, "trainer.batch_size", is_ours),
        ({"API_TOKEN": "short"}, "API_TOKEN", is_ours),
        ({"RLHF_MODEL__NAME": "./absent"}, "model.name", is_ours and not (elsewhere or own_path)),
        (
            {"RLHF_REWARD__FUNCTIONS": functions},
            "reward.functions",
            is_ours and not (elsewhere or own_path),
        ),
    ):
        if is_seen:
            with raises(ConfigError, field=field):
                checked(**wrong)
        else:
            checked(**wrong)


# ---------------------------------------------------------------- the screen


class Terminal(io.TextIOWrapper):
    """A stream that remembers what is written to it."""

    def __init__(self, is_terminal: bool) -> None:
        self.content = io.BytesIO()
        super().__init__(self.content, encoding="utf-8")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("followed", [None, "two-0"])
@pytest.mark.parametrize("colourful", [False, True])
def test_a_line_has_the_name_of_its_node_or_only_one_node_is_shown(
    followed: str | None, colourful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = Terminal(colourful), Terminal(colourful)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen(["one-0", "two-0", "jobgroup-x-0"], followed)

    def prefix(name: str, colour: int) -> bytes:
        text = f"{name:<12} | "
        return (f"\x1b[{colour}m{text}\x1b[0m" if colourful else text).encode()

    red = ("\x1b[31mfailed\x1b[0m" if colourful else "failed").encode()
    screen.line("one-0", b"10 %\r50 %\rdone\r\n")
    screen.line("two-0", b"\xff plain\n")
    screen.hushed.add("one-0")
    screen.line("one-0", b"not shown")
    screen.raw(b"bytes\r")
    screen.say("first \udcff\nsecond")
    screen.say("failed", loud=True)
    screen.tail("one-0", [b"a\rb", b"c\n"], Path("/log"))
    screen.tail("one-0", [], Path("/log"))
    screen.plain("table \udcff")

    lines = [
        prefix("one-0", COLOURS[0]) + b"done",
        prefix("two-0", COLOURS[1]) + b"\xff plain",
    ]
    own = prefix("jobgroup", 1)
    head = "the last 2 lines of one-0 but requests (all in /log):"
    shown_head = f"\x1b[31m{head}\x1b[0m" if colourful else head
    said = [
        own + b"first ?",
        own + b"second",
        own + red,
        own + shown_head.encode(),
        b"    b",
        b"    c",
        b"table ?",
    ]
    if followed is None:
        content = out.content.getvalue()
        assert content == b"\n".join([*lines, b"bytes\r" + said[0], *said[1:], b""])
        assert err.content.getvalue() == b""
    else:
        assert out.content.getvalue() == b"bytes\r"
        assert err.content.getvalue() == b"\n".join([*said, b""])


# ---------------------------------------------------------------- one node


class AChild:
    """Stands for the process of a node."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.calls: list[Any] = []
        self.status = 0

    async def wait(self) -> None:
        await self.over.wait()

    async def end(self, grace_s: float) -> int:
        self.calls.append(("end", grace_s))
        return self.status

    def kill(self) -> None:
        self.calls.append("kill")


@pytest.mark.parametrize("way", ["ends", "stopped", "killed", "killed while it starts"])
@pytest.mark.parametrize("status", [0, 128, 137])
async def test_a_node_ends_with_the_status_of_its_command_and_takes_all_with_it(
    way: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = AChild()
    child.status = status
    begun: list[Any] = []
    may_start = asyncio.Event()
    orphans: list[str] = []

    async def start(words: list[str], output: Any, **options: Any) -> AChild:
        begun.append((words, options))
        await may_start.wait()
        return child

    monkeypatch.setattr(Child, "start", start)
    monkeypatch.setattr(node_module, "ChildOutput", lambda *given, **options: None)
    monkeypatch.setattr(node_module, "_kill_orphans", lambda: orphans.append("killed"))
    screen: Any = SimpleNamespace(follow=None, say=print, raw=None)
    node = Node(
        "one-0",
        "run me",
        env={"A": "b"},
        workdir=tmp_path,
        log=tmp_path / "log",
        screen=screen,
        grace_s=7.0,
    )
    if way == "killed while it starts":
        await asyncio.sleep(0)
        node.kill()
    may_start.set()
    while not begun or node._child is None:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not node.ended.done()
    deeds: dict[str, Callable[[], object]] = {
        "ends": child.over.set,
        "stopped": node.stop,
        "killed": node.kill,
        "killed while it starts": lambda: None,
    }
    deeds[way]()
    assert await node.ended == status
    options = {"env": {"A": "b"}, "workdir": tmp_path, "grace_s": 7.0}
    assert begun == [(["bash", "-c", "run me"], options)]
    grace_s = 0.0 if "killed" in way else 7.0
    assert child.calls == (["kill"] if way == "killed" else []) + [("end", grace_s)]
    assert bool(orphans) is (status > 128)


async def test_the_last_lines_are_those_that_may_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Child, "start", lambda *given, **options: asyncio.Event().wait())
    monkeypatch.setattr(node_module, "ChildOutput", lambda *given, **options: None)
    shown: list[tuple[str, bytes]] = []
    screen: Any = SimpleNamespace(
        follow=None, say=print, line=lambda name, line: shown.append((name, line))
    )
    node = Node("one-0", "", env={}, workdir=tmp_path, log=tmp_path, screen=screen, grace_s=1.0)
    served = b'{"time": 1, "code": "served"}'
    draw = random.Random(1)
    lines = [served if draw.random() < 0.4 else b"line %d" % number for number in range(90)]
    for begin, end in pairwise([0, 7, 8, 50, 90]):
        node._show(lines[begin:end])
    assert shown == [("one-0", line) for line in lines]
    assert node.last_lines == deque([line for line in lines if line != served][-30:])
    node.ended.cancel()


def test_what_a_killed_launcher_left_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    deeds: list[str] = []

    class Process:
        def __init__(self, name: str, words: list[str], below: list[Any]) -> None:
            self.name = name
            self.words = words
            self.below = below

        def cmdline(self) -> list[str]:
            if not self.words:
                raise psutil.NoSuchProcess(1)
            return self.words

        def children(self, recursive: bool = False) -> list[Any]:
            return self.below

        def kill(self) -> None:
            deeds.append(f"kill {self.name}")

        def wait(self) -> None:
            deeds.append(f"wait {self.name}")

    own_launcher = Process("launcher", ["python", str(launcher.__file__)], [])
    gone = Process("gone", [], [])
    orphan = Process("orphan", ["bash"], [Process("below", ["sleep"], [])])
    own = Process("own", ["python"], [own_launcher, gone, orphan])
    monkeypatch.setattr(psutil, "Process", lambda: own)
    node_module._kill_orphans()
    assert deeds == ["kill below", "kill orphan", "wait orphan"]
