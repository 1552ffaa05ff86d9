"""The state of a run by its files, its living processes, and what it says of itself."""

import asyncio
import fcntl
import itertools
import json
import logging
import os
import platform
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from common import VERSION
from common.clients.base import Client
from common.errors import ConfigError, ServiceError
from common.process import watchdog
from common.process.run_lock import LOCK
from common.process.topology import LocalHost, Topology
from common.settings.config import Config
from tests.support.errors import raises
from tests.support.runs.run_files import make_run, write
from trainer.cli.diagnose import main as diagnose_command
from trainer.diagnosis import health, live, run_files, self_diagnosis
from trainer.diagnosis.facts import Facts, LogLine, finding
from trainer.diagnosis.health import Health
from trainer.diagnosis.report import lines as report_lines
from trainer.diagnosis.run_files import (
    holder_of,
    read_facts,
    read_topology,
    versions,
    write_topology,
)
from trainer.diagnosis.self_diagnosis import diagnose, diagnosed
from trainer.observe import catalogue

BEGIN = 1.8e9


@contextmanager
def held(path: Path) -> Iterator[None]:
    """The kernel's lock of a file is taken inside the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def entry(at: float, text: str, *, level: str = "ERROR", logger: str = "run", **more: Any) -> str:
    """Returns a line of a log, written at this second."""
    time = datetime.fromtimestamp(at, UTC).isoformat()
    line = {"time": time, "level": level, "logger": logger, "message": text, **more}
    return json.dumps(line) + "\n"


def write_log(run: Path, name: str, *lines: str) -> None:
    path = run / "state" / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


STATES = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize(("is_held", "has_end", "has_holder", "has_started"), STATES)
@pytest.mark.parametrize("steps", [0, 59, 60])
@pytest.mark.parametrize("group", [None, False, True])
def test_the_state_of_a_run_is_that_of_its_lock_its_last_word_and_its_steps(
    tmp_path: Path,
    *,
    is_held: bool,
    has_end: bool,
    has_holder: bool,
    has_started: bool,
    steps: int,
    group: bool | None,
) -> None:
    run = make_run(tmp_path / "run", steps)
    write(run / "attempts.jsonl", [{"time": BEGIN, "step": 0}])
    if has_started:
        lines = [entry(BEGIN + 50, "starts", level="INFO", code="started")]
        if has_end:
            lines.append(entry(BEGIN + 60, "error: it ends", level="CRITICAL", logger="end"))
        write_log(run, "ppo-trainer-rank0", *lines)
    elif has_end:
        end = LogLine(source="ppo-trainer", time=BEGIN, text="error: it ends")
        (run / "diagnosis.json").write_text(json.dumps({"end": end.model_dump()}))
    if has_holder:
        (run / LOCK).write_text(json.dumps({"pid": 7, "host": platform.node()}))
    if group is not None:
        (run / "logs").mkdir()
        (run / "logs" / "ppo-trainer-0.log").touch()
        (run / "logs" / LOCK).touch()
    with ExitStack() as stack:
        if is_held:
            stack.enter_context(held(run / LOCK))
        if group:
            stack.enter_context(held(run / "logs" / LOCK))
        facts = read_facts(run)

    if is_held:
        # The line of the newest attempt comes after its first log line.
        state = "starting" if has_started else "running"
    elif has_end:
        state = "ended"
    elif steps == 60:
        state = "finished"
    elif has_holder:
        state = "killed"
    elif group:
        state = "starting"
    else:
        state = "ended" if steps or has_started else "empty"
    assert facts.state == state
    assert facts.restarts == group
    assert facts.started == (BEGIN + 50 if has_started else None)
    assert (facts.end is not None) == has_end
    assert facts.holder.get("pid") == (7 if has_holder else None)
    assert facts.step == steps
    write(run / "attempts.jsonl", [{"time": BEGIN, "step": 0}, {"time": BEGIN + 50, "step": 0}])
    with held(run / LOCK):
        assert read_facts(run).state == "running"


@pytest.mark.parametrize("age", [44.0, 45.0, 46.0])
@pytest.mark.parametrize("host", ["elsewhere", platform.node(), None])
@pytest.mark.parametrize("kind", ["free", "held", "no locks"])
def test_a_lock_is_held_by_the_kernel_or_by_the_heartbeat_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, host: str | None, kind: str
) -> None:
    monkeypatch.setattr(run_files, "time", SimpleNamespace(time=lambda: BEGIN + age))
    path = tmp_path / LOCK
    content = {} if host is None else {"host": host, "pid": 3}
    path.write_text(json.dumps(content) if content else "\0" * 8)
    os.utime(path, (BEGIN, BEGIN))
    with ExitStack() as stack:
        if kind == "held":
            stack.enter_context(held(path))
        if kind == "no locks":

            def refuse(*_: Any) -> None:
                raise OSError("no locks here")

            monkeypatch.setattr(fcntl, "flock", refuse)
        is_beating = host == "elsewhere" and age < 45.0
        assert holder_of(path) == (content, kind == "held" or is_beating)
    assert holder_of(tmp_path / "none") == ({}, False)


@pytest.mark.parametrize("seed", range(40))
def test_the_lines_of_the_newest_attempt_come_in_order_and_once(tmp_path: Path, seed: int) -> None:
    """What a node printed is in the log of the node and in that of its process."""
    draw = random.Random(seed)
    run = make_run(tmp_path / "run", 2)
    names = ["ppo-trainer-rank0", "ppo-trainer-rank1", "sft-rank0", "data-server", "reward-server"]
    logs: dict[str, list[str]] = {name: [] for name in draw.sample(names, 3)}
    starts: dict[str, float] = {}
    known: list[tuple[float, str, str]] = []
    for name, lines in logs.items():
        at = BEGIN + draw.randrange(100)
        if draw.random() < 0.7:
            lines.append(entry(at, "starts", level="INFO", code="started"))
            starts[name] = at
        for _ in range(draw.randint(0, 4)):
            at += draw.choice([0, 1, 60])
            text = f"text {draw.randrange(4)}"
            lines.append(entry(at, text))
            known.append((at, name, text))
        write_log(run, name, *lines)
    given = draw.choice([None, BEGIN + 300])
    (run / "topology.json").write_text(json.dumps({"time": given}))
    of_rank_zero = [starts[name] for name in starts if name in ("ppo-trainer-rank0", "sft-rank0")]
    started = max([*of_rank_zero, *([given] if given else [])], default=None)
    facts = read_facts(run)
    assert facts.started == started
    expected: list[tuple[float, str, str]] = []
    for at, name, text in sorted(known, key=lambda each: each[1]):
        is_known = any((at, text) == (each[0], each[2]) for each in expected)
        if at >= (started or 0.0) - 120.0 and not is_known:
            expected.append((at, name, text))
    expected.sort(key=lambda each: each[0])
    assert [(line.time, line.source, line.text) for line in facts.lines] == expected


def test_printed_words_that_a_log_has_are_not_told_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    write_log(
        run, "data-server", entry(BEGIN, "error: it ends", code="config", fields={"field": "x"})
    )
    write_log(run, "z-node-0", "error: it ends\n", "error: another\n")
    os.utime(run / "state" / "logs" / "z-node-0.log", (BEGIN + 9, BEGIN + 9))
    found = [(line.source, line.text) for line in read_facts(run).lines]
    assert found == [("data-server", "error: it ends"), ("z-node-0", "error: another")]


ENDS: list[tuple[str, dict[str, Any], bool]] = [
    ("ppo-trainer-rank0", {"logger": "end", "level": "CRITICAL"}, True),
    ("sft-rank0", {"logger": "uncaught", "level": "CRITICAL"}, True),
    ("ppo-trainer-rank0", {"logger": "end", "level": "ERROR"}, False),
    ("ppo-trainer-rank0", {"logger": "run", "level": "CRITICAL"}, False),
    ("data-server", {"logger": "end", "level": "CRITICAL"}, False),
]


@pytest.mark.parametrize(("source", "how", "is_end"), ENDS)
def test_rank_zero_ends_with_its_last_word(
    tmp_path: Path, source: str, how: dict[str, Any], is_end: bool
) -> None:
    run = make_run(tmp_path / "run", 2)
    first = entry(BEGIN, "starts", level="INFO", code="started")
    write_log(run, source, first, entry(BEGIN + 1, "the end", **how), entry(BEGIN + 2, "later"))
    end = read_facts(run).end
    assert (end.text if end else None) == ("the end" if is_end else None)
    # What was said before the newest start is no end of this attempt.
    (run / "topology.json").write_text(json.dumps({"time": BEGIN + 1.5}))
    assert read_facts(run).end is None
    write_log(run, source, "error: printed\n")
    (run / "topology.json").unlink()
    printed = read_facts(run).end
    assert (printed.text if printed else None) == (
        "error: printed" if source != "data-server" else None
    )


def test_a_report_of_its_own_is_that_of_the_newest_attempt(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    report = run / "diagnosis.json"
    for at, attempt, started, counts in (
        (BEGIN, BEGIN, 0.0, True),
        (BEGIN, BEGIN + 1, 0.0, False),
        (BEGIN, 0.0, BEGIN + 1, False),
        (None, BEGIN, 0.0, False),
        (None, 0.0, 0.0, True),
    ):
        report.write_text(json.dumps({"end": {"source": "s", "time": at, "text": "why"}}))
        write(run / "attempts.jsonl", [{"time": attempt, "step": 0}])
        (run / "topology.json").write_text(json.dumps({"time": started}))
        assert (read_facts(run).end is not None) == counts
    unreadable: list[Any] = [{}, {"end": None}, {"end": {"text": 3}}, []]
    for content in unreadable:
        report.write_text(json.dumps(content))
        assert read_facts(run).end is None


def test_the_facts_of_a_run_have_its_newest_steps_and_their_prompts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 40)
    groups = [{"position": 3, "prompt_id": "p", "reused": True, "id": "g", "reward": 1.0}, {}]
    lines: list[dict[str, Any]] = [{"step": step, "groups": groups} for step in range(1, 40)]
    write(run / "groups.jsonl", [*lines, {"step": 40}])
    (run / "topology.json").write_text(json.dumps({"versions": {"torch": "2"}, "time": None}))
    facts = read_facts(run)
    assert [line["step"] for line in facts.steps] == list(range(17, 41))
    kept = [
        {"position": 3, "prompt_id": "p", "reused": True},
        dict.fromkeys(["position", "prompt_id", "reused"]),
    ]
    assert facts.groups[0] == {"step": 17, "groups": kept}
    assert facts.groups[-1] == {"step": 40, "groups": []}
    assert (facts.directory, facts.versions) == (str(run), {"torch": "2"})
    assert facts.config["trainer.batch_size"] == 32
    assert facts.now > 0
    with raises(ConfigError, field="RUN_DIR", value=str(tmp_path / "none")):
        read_facts(tmp_path / "none")


def test_the_addresses_of_a_run_are_kept_with_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files, "time", SimpleNamespace(time=lambda: BEGIN))
    hosts = {"data-server-0.g": LocalHost("127.1.2.4", 3)}
    topology = Topology("g", node_ips=("127.1.2.3", "127.1.2.5"), local_hosts=hosts)
    write_topology(tmp_path, topology, world_size=6)
    content = json.loads((tmp_path / "topology.json").read_text())
    known = versions()
    assert content == {
        "time": BEGIN,
        "world_size": 6,
        "topology": topology.saved(),
        "versions": known,
    }
    assert known["rlhf-math"] == VERSION
    assert known["python"] == platform.python_version()
    packages = known.keys() - {"rlhf-math", "python"}
    assert packages >= {"torch", "transformers", "numpy"}
    assert all(known[name] == metadata.version(name) for name in packages)
    found = read_topology(tmp_path)
    assert found is not None
    assert (found.group, found.node_ips, found.local_hosts) == ("g", topology.node_ips, hosts)
    damaged = [{}, {"topology": {}}, {"topology": 3}, []]
    damaged.append({"topology": {**topology.saved(), "hosts": "x"}})
    for each in damaged:
        (tmp_path / "topology.json").write_text(json.dumps(each))
        assert read_topology(tmp_path) is None
    write_topology(tmp_path / "none", topology, world_size=1)  # reported elsewhere


@pytest.mark.parametrize("has_token", [True, False])
@pytest.mark.parametrize("token_at", ["", "logs/a", "state/logs"])
@pytest.mark.parametrize("lacks", ["", "life", "topology", "settings"])
def test_a_living_run_is_asked_with_its_own_token(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_token: bool,
    token_at: str,
    lacks: str,
) -> None:
    run = make_run(tmp_path / "run", 2)
    asked: list[Any] = []

    async def ask(facts: Facts, config: Config, topology: Topology, **more: Any) -> None:
        asked.append((facts.directory, config.trainer.batch_size, topology.group, more))
        facts.asked = True

    monkeypatch.setattr(live, "ask", ask)
    monkeypatch.delenv("API_TOKEN", raising=False)
    if has_token:
        monkeypatch.setenv("API_TOKEN", "the-token-of-this-shell")
    config = Config()
    config.trainer.batch_size = 7
    settings = config.model_dump(mode="json")
    if lacks == "settings":
        settings = {**settings, "of_another_version": 3}
    (run / "config.json").write_text(json.dumps(settings | {"state_dir": str(run / "state")}))
    write_topology(run, None if lacks == "topology" else Topology("g"), world_size=1)
    write(run / "attempts.jsonl", [{"time": 2 * BEGIN, "step": 0}])
    if token_at:
        (run / token_at).mkdir(parents=True)
        (run / token_at / "ppo-trainer-0.log").touch()
        (run / token_at / "api_token").write_text("the-token-of-this-run\n")
    with ExitStack() as stack:
        if lacks != "life":
            stack.enter_context(held(run / LOCK))
        facts = live.collect(run)
    assert facts.asked == (not lacks)
    headers = (
        {"Authorization": "Bearer the-token-of-this-run"} if token_at and not has_token else None
    )
    if asked:
        [(directory, size, group, more)] = asked
        assert (directory, size, group) == (str(run), 7, "g")
        found = more["headers"]
        assert (found and {k.lower(): v for k, v in found.items()}) == (
            headers and {k.lower(): v for k, v in headers.items()}
        )
    else:
        assert lacks


@pytest.mark.parametrize(
    ("content", "variables", "field"),
    [
        (b"short", {}, "API_TOKEN"),
        (b"not-in-ascii-\xff\xff\xff", {}, "API_TOKEN"),
        (b"has spaces and 20 characters", {}, "API_TOKEN"),
        (b"", {"API_TOKEN": "short"}, "API_TOKEN"),
        (b"", {"TLS_CA": "/no/such/file.pem"}, "TLS_CA"),
    ],
)
def test_a_run_that_this_process_cannot_ask_is_diagnosed_from_its_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    variables: dict[str, str],
    field: str,
) -> None:
    for name in ("API_TOKEN", "TLS_CERT", "TLS_KEY", "TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = make_run(tmp_path / "run", 2)
    (run / "config.json").write_text(json.dumps(Config().model_dump(mode="json")))
    write_topology(run, Topology("g"), world_size=1)
    (run / "logs/a").mkdir(parents=True)
    (run / "logs/a/ppo-trainer-0.log").touch()
    if content:
        (run / "logs/a/api_token").write_bytes(content)

    with held(run / LOCK):
        facts = live.collect(run)
        assert not facts.asked
        assert (facts.not_asked["code"], facts.not_asked["field"]) == ("config", field)
        assert facts.not_asked["remedy"]
        for words in ([], ["--all"], ["--json"]):
            with pytest.raises(SystemExit) as ended:
                diagnose_command([str(run), *words])
            assert ended.value.code in (0, 1)
            said = capsys.readouterr().out
            if words == ["--json"]:
                assert json.loads(said)["not_asked"] == facts.not_asked
            else:
                assert any(line.startswith("asked ") for line in said.splitlines())
            assert not content or content.decode("latin-1") not in said

    # Beside a fault, too, since what the processes know may be its cause.
    fault = finding(catalogue.NO_STEP, "no step", None, level="stalled")
    assert any(line.startswith("asked ") for line in report_lines(facts, [fault]))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(
    ("local", "workers"),
    [(0, []), (0, [1]), (0, [3, 2]), (1, []), (1, [1]), (3, []), (3, [1]), (3, [3, 2])],
)
def test_as_many_rollout_nodes_are_asked_as_are_known(
    monkeypatch: pytest.MonkeyPatch, own: bool, local: int, workers: list[int]
) -> None:
    tasks = ["ppo-trainer", "data-server", "reward-server", "replay-buffer"]
    nodes = [f"{task}-0.g" for task in tasks] + [f"rollout-server-{n}.g" for n in range(local)]
    hosts = {name: LocalHost(f"127.1.1.{n + 1}") for n, name in enumerate(nodes) if local}
    called: list[tuple[str, str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        called.append((request.url.host, request.url.path, request.headers.get("authorization")))
        if request.url.path == "/workers" and request.url.port == Config().trainer.port:
            return httpx.Response(200, json=[{"num_nodes": each} for each in workers])
        if request.url.path == "/ranks":
            return httpx.Response(200, json=[])
        if request.url.path == "/where":
            waits = [{"call": "GET /x", "service": "s", "seconds": 4.0, "count": 1}]
            where = {"pid": 1, "stacks": f"of {request.url.host}", "version": "1", "awaited": waits}
            return httpx.Response(200, json=where)
        return httpx.Response(503, json={"reason": "it starts"})

    def client(name: str, url: str, **options: Any) -> Client:
        return Client(name, url, transport=httpx.MockTransport(answer), **options)

    for module in (health, live):
        monkeypatch.setattr(module, "Client", client)
    facts = Facts(directory="run", now=0.0, state="running")
    topology = Topology("g", local_hosts=hosts)
    headers = {"authorization": "Bearer x"}
    asyncio.run(live.ask(facts, Config(), topology, own=own, headers=headers))
    count = 1 if own else max([1, local, *workers])
    names = [each.name for each in facts.services if each.name.startswith("rollout-server")]
    assert names == [f"rollout-server-{n}" for n in range(count)]
    assert any(path == "/ranks" for _, path, _ in called) == (not own)
    assert {token for _, _, token in called} == {"Bearer x"}
    data = next(each for each in facts.services if each.name == "data-server")
    host = "127.1.1.2" if local else "data-server-0.g"
    assert (data.state, data.release, data.stacks) == ("warning", "1", f"of {host}")
    assert [each.seconds for each in data.awaited] == [4.0]
    assert facts.trainer_problem == ""


def test_a_call_in_the_stack_of_the_main_thread_is_the_collective() -> None:
    def frame(path: str, name: str) -> str:
        return f'  File "{path}", line 3, in {name}\n'

    of_torch = "x/torch/distributed/c10d.py"
    main = f"thread MainThread:\n{frame('own.py', 'step')}"
    other = f"\nthread other:\n{frame(of_torch, 'barrier')}"
    for stacks, expected in (
        (main + frame(of_torch, "wrapper") + frame(of_torch, "all_gather"), "all_gather"),
        (main + frame(of_torch, "_fn") + frame(of_torch, "inner"), ""),
        (main + frame(of_torch, "all_reduce") + frame(of_torch, "wait"), "all_reduce"),
        (main + frame("torch/autograd.py", "_engine_run_backward") + other, "backward"),
        (main + frame("torch/optim.py", "all_reduce"), ""),
        (other + "\n" + main, ""),
        (main + other + frame("torch/autograd.py", "_engine_run_backward"), ""),
        ("", ""),
    ):
        assert live.collective(stacks) == expected


def test_a_health_is_asked_again_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(watchdog, "place", lambda: ("the update", 3.0))
    state = 200
    texts = {"graded": {"ok": 0, "error": 0}, "unfinished": 0, "load": {"requests": 0}}

    def answer(request: httpx.Request) -> httpx.Response:
        known = {"/stats": texts, "/workers": {"workers": []}, "/health": {}}
        return httpx.Response(state, json=known.get(request.url.path, {}))

    def client(name: str, url: str, **options: Any) -> Client:
        return Client(name, url, transport=httpx.MockTransport(answer), **options)

    monkeypatch.setattr(health, "Client", client)

    async def ask() -> None:
        nonlocal now, state
        asked = Health(Config(), Topology(), lambda: 0, lambda: 4, headers={})
        async with asked.running():
            first = await asked.ask()
            assert first[0].name == "ppo-trainer"
            assert (first[0].text, first[0].since_s, first[0].version) == ("the update", 3.0, 4)
            reward = next(each for each in first if each.name == "reward-server")
            assert (reward.state, reward.text, reward.since_s) == ("healthy", "graded: 0", 0.0)
            assert (reward.running, reward.waiting) == (0, 0)
            now = 100.9
            assert await asked.ask() is first
            now = 101.0
            second = await asked.ask()
            assert second is not first
            since = {each.name: each.since_s for each in second}
            assert (since["reward-server"], since["router"]) == (1.0, 1.0)
            state = 500
            now = 103.0
            third = {each.name: each for each in await asked.ask()}
            assert third["reward-server"].since_s == 0.0
            assert third["reward-server"].text == "/health says 500"
            assert third["router"].problem == "not_ready"

    asyncio.run(ask())


def test_a_network_error_is_told_without_its_context() -> None:
    async def check(error: Exception) -> health.ServiceHealth:
        def fail(_: httpx.Request) -> httpx.Response:
            raise error

        client = Client("s", "http://s", transport=httpx.MockTransport(fail), headers={})
        made: Any = health._Target("s", client)
        try:
            return await health._check(made)
        finally:
            await client.close()

    told = asyncio.run(check(OSError("Cannot connect to s ssl:default [a ssl:b]")))
    assert (told.text, told.problem, told.state) == ("Cannot connect to s", "refused", "dead")
    assert asyncio.run(check(httpx.ReadTimeout(""))).text == "ReadTimeout"
    assert len(asyncio.run(check(OSError("x" * 900))).text) == 200


@pytest.mark.parametrize("ending", [None, ServiceError("e"), KeyboardInterrupt(), ValueError("v")])
@pytest.mark.parametrize("trouble", [None, TimeoutError(), ServiceError("no")])
@pytest.mark.parametrize("has_services", [True, False])
def test_a_run_diagnoses_itself_with_what_its_services_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: BaseException | None,
    trouble: Exception | None,
    *,
    has_services: bool,
) -> None:
    run = make_run(tmp_path / "run", 3)
    asked: list[Any] = []

    async def ask(facts: Facts, config: Config, topology: Topology, *, own: bool) -> None:
        asked.append((facts.state, config, topology, own))
        if trouble is not None:
            raise trouble

    monkeypatch.setattr(self_diagnosis, "ask", ask)
    config = Config()
    topology = Topology("g") if has_services else None
    said = diagnose(run, config, topology, error=ending)
    assert asked == ([("running", config, topology, ending is not None)] if has_services else [])
    assert said.startswith("diagnosis: ")
    assert said.endswith(f" ({run / 'diagnosis.txt'})")
    found = json.loads((run / "diagnosis.json").read_text())
    assert found["state"] == ("running" if ending is None else "ended")
    texts = {
        ServiceError: "error: e",
        KeyboardInterrupt: "interrupted",
        ValueError: "ValueError: v",
    }
    if ending is None:
        assert found["end"] is None
        return
    assert found["end"]["text"] == texts[type(ending)]
    assert found["end"]["source"] == "ppo-trainer"
    codes = {ServiceError: "internal", KeyboardInterrupt: "interrupted", ValueError: ""}
    assert found["end"]["code"] == codes[type(ending)]


def test_the_fields_of_the_error_are_those_of_the_last_word(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    error = ServiceError(
        "e", field="f", value=3, code="unreachable", about={"service": "s", "n": 4}
    )
    diagnose(run, Config(), error=error)
    end = json.loads((run / "diagnosis.json").read_text())["end"]
    assert end["fields"] == {"field": "f", "value": "3", "service": "s", "n": "4"}
    assert end["code"] == "unreachable"
    assert end["time"] > 0

    def leave() -> None:
        sys.exit(3)

    try:
        leave()
    except SystemExit as ending:
        diagnose(run, Config(), error=ending)
    text = json.loads((run / "diagnosis.json").read_text())["end"]["text"]
    assert text.startswith(f"SystemExit: 3 in leave ({__file__}, line ")


@pytest.mark.parametrize("has_services", [True, False])
def test_only_a_run_of_one_process_says_that_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_services: bool
) -> None:
    run = make_run(tmp_path / "run", 3)
    given: list[Any] = []
    monkeypatch.setattr(watchdog, "after_report", given.append)
    topology = Topology("g") if has_services else None
    with pytest.raises(KeyboardInterrupt), diagnosed(run, Config(), topology):
        raise KeyboardInterrupt
    assert (run / "diagnosis.json").exists() == (not has_services)
    assert given[-1] is None


def test_a_stall_is_logged_with_its_diagnosis_unless_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(watchdog, "after_report", given.append)
    run = make_run(tmp_path / "run", 3)
    with caplog.at_level(logging.WARNING), diagnosed(run, Config()):
        given[0]("no step")
        [told] = caplog.records
        assert (told.levelname, told.name) == ("ERROR", "trainer.diagnosis.self_diagnosis")
        assert told.getMessage().startswith("diagnosis: ")
        caplog.clear()
    with caplog.at_level(logging.WARNING), diagnosed(tmp_path / "none", Config()):
        given[-1]("no step")
        assert [each.levelname for each in caplog.records] == ["WARNING"]
        assert diagnose(tmp_path / "none", Config(), error=ValueError("x")) == ""


def test_a_line_of_a_log_as_people_read_it() -> None:
    line = LogLine(source="s", time=None, text="rank 3: error: it ends · field: f\nand more")
    assert line.message == "it ends"
    assert line.said == "s: rank 3: error: it ends · field: f"
    assert LogLine(source="s", time=None, text="an error: stays").message == "an error: stays"
    for seconds, value in (("5", 5.0), ("x", 0.0), ("-5", 0.0), ("", 0.0)):
        line.fields = {"seconds": seconds}
        assert line.seconds == value
    line.fields = {}
    assert line.seconds == 0.0
    for source, is_of_trainer in (
        ("ppo-trainer-rank3", True),
        ("sft-rank0", True),
        ("a-sft", False),
    ):
        line.source = source
        assert line.is_of_trainer == is_of_trainer
    facts = Facts(directory="run", now=BEGIN, state="running")
    assert (facts.step, facts.last, facts.total_steps, facts.exited) == (0, None, None, None)
    facts.steps = [{"step": 3}]
    assert (facts.step, facts.last, facts.total_steps, facts.usual_step_s) == (3, None, None, 0)
    facts.steps = [{"total_steps": 7}]
    assert (facts.step, facts.total_steps) == (0, 7)
    assert facts.lives
    assert catalogue.ENDED.codes == ()
