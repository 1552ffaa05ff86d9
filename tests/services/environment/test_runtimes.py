"""Coding agents in containers: Harbor tasks in the sandbox, in Docker and in Kubernetes.

Docker and Kubernetes are a program that notes our calls and runs them in bubblewrap, unless
$DOCKER_TEST_IMAGE or $KUBERNETES_TEST_IMAGE names an image with Python that the real ones have.
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.settings.config import from_mapping
from common.settings.sections import EnvironmentSection, RuntimeSection
from common.wire.schemas import Episode
from examples.coding_agent.tasks import DOCKERFILE, Repair, write
from services.environment.runners import load_runner
from services.environment.runtimes import load_runtime
from services.http.app import listen
from tests.support.environments import fake_containers
from tests.support.environments.environments import Served, request_for, served
from tests.support.errors import raises
from tests.support.paths import ROOT
from tests.support.processes.waits import comes, until

pytestmark = pytest.mark.integration
AGENT = ROOT / "examples" / "coding_agent" / "agent.py"
NAME = f"harbor:/usr/bin/python3 -I -S {AGENT}"
REPAIR = Repair("area", "multiplies", "+")
RIGHT = REPAIR.command("*")
SLOW = pytest.mark.slow
KINDS = (
    "sandbox",
    "docker",
    pytest.param("kubernetes", marks=SLOW),
    pytest.param("real docker", marks=SLOW),
    pytest.param("real kubernetes", marks=SLOW),
)
IMAGES = {
    "real docker": os.environ.get("DOCKER_TEST_IMAGE"),
    "real kubernetes": os.environ.get("KUBERNETES_TEST_IMAGE"),
}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder of the programs that stand for Docker and Kubernetes."""
    fake_containers.install(tmp_path)
    (tmp_path / "state" / "images").mkdir(parents=True)
    (tmp_path / "state" / "calls").touch()
    return tmp_path / "state"


@pytest.fixture
def task(tmp_path: Path) -> Path:
    write(REPAIR, tmp_path / "tasks" / "area")
    return tmp_path / "tasks" / "area"


@pytest.fixture
def section(state: Path, task: Path, monkeypatch: pytest.MonkeyPatch) -> "Make":
    """Makes the settings of a kind of `KINDS`."""

    def make(kind: str, **settings: Any) -> RuntimeSection:
        if kind in ("docker", "kubernetes"):
            monkeypatch.setenv("PATH", str(state.parent), prepend=os.pathsep)
            monkeypatch.setenv("FAKE_CONTAINERS", str(state))
        elif kind in IMAGES and not IMAGES[kind]:
            pytest.skip(f"no image for {kind} is named")
        if kind == "kubernetes":  # a cluster builds no images
            settings |= {"image": "registry.example/{task}:1", "gateway": "127.0.0.1"}
            shutil.copytree(task / "environment", state / "images" / "registry.example_area:1")
        elif kind == "real kubernetes":
            settings |= {"image": IMAGES[kind], "gateway": os.environ["KUBERNETES_TEST_HOST"]}
            (task / "environment" / "Dockerfile").unlink()
            add(task, "[environment]", 'workdir = "/app"')
        elif kind == "real docker":
            dockerfile = DOCKERFILE.replace("python:3.11-slim", IMAGES[kind] or "")
            (task / "environment" / "Dockerfile").write_text(dockerfile)
        name = kind.rpartition(" ")[2]
        return RuntimeSection.model_validate(
            {"kind": name, "tools": [str(AGENT.parent)], **settings}
        )

    return make


def add(task: Path, section: str, line: str) -> None:
    """Adds a line to a section of task.toml."""
    text = (task / "task.toml").read_text()
    (task / "task.toml").write_text(text.replace(section, f"{section}\n{line}"))


def saying(*commands: str) -> Callable[[str], str]:
    """Returns a model that runs these commands one after another in every episode."""

    def reply(prompt: str) -> str:
        turn = prompt.count("<|im_start|>assistant") - 1
        if turn == len(commands):
            return "done"
        call = {"name": "bash", "arguments": {"command": commands[turn]}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    return reply


async def play(server: Served, folder: Path, **limits: Any) -> Episode:
    request = request_for(server.service.runner.name, REPAIR.instruction, **limits)
    request.request_id = f"r{len(server.service._requests)}"
    request.task.columns = {"harbor_task": str(folder)}
    request.sampling.max_new_tokens = 3000
    (episode,) = await server.client.episodes(request)
    return episode


Make = Callable[..., RuntimeSection]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_repair_is_graded_by_tests_that_the_agent_never_sees(
    kind: str, section: Make, state: Path, task: Path
) -> None:
    said = "ls /tests /logs; cat lib/*; echo $GREETING"
    add(task, "[environment]", 'env = {GREETING = "hello"}')
    async with served(NAME, saying(said, RIGHT), runtime=section(kind)) as server:
        episode = await play(server, task)
        assert (episode.status, episode.reward, episode.detail) == ("ok", 1.0, "")
        assert (episode.metrics["turns"], len(episode.sequences)) == (3, 1)
        asked = server.engine.tokenizer.decode(server.engine.asked[1]["input_ids"])
        assert "cannot access '/tests'" in asked
        assert "return a + b\nhello\n" in asked
    assert fake_containers.running(state) == []


FORGED = f"""
{REPAIR.command("-")}
mkdir -p /tests /logs/verifier
echo 1 > /logs/verifier/reward.txt
echo 1 > /logs/verifier/reward.json
printf '#!/bin/sh\nexit 0\n' > /tests/test.sh
printf 'import os; os._exit(0)' > /tmp/sitecustomize.py
setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.json; sleep 0.1; done' >&- 2>&- <&- &
python3 -c 'import json, os, urllib.request as r
r.urlopen(r.Request(os.environ["EPISODE_URL"] + "/reward", b"1",
  {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}))'
"""


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param("docker", marks=SLOW), *KINDS[3:]])
async def test_an_agent_cannot_give_itself_a_reward(kind: str, section: Make, task: Path) -> None:
    async with served(NAME, saying(FORGED), runtime=section(kind)) as server:
        episode = await play(server, task)
        assert (episode.status, episode.reward, episode.detail) == ("ok", 0.0, "")


@SLOW
@pytest.mark.parametrize("kind", ["sandbox", "docker", "real docker"])
async def test_a_task_may_ask_for_the_container_of_the_agent(
    kind: str, section: Make, task: Path
) -> None:
    add(task, "[verifier]", 'environment_mode = "shared"')
    tests = task / "tests" / "test.sh"
    tests.write_text("#!/bin/sh\ncat /etc/found > /logs/verifier/reward.txt; exit 1\n")
    async with served(NAME, saying("echo 0.5 > /etc/found"), runtime=section(kind)) as server:
        episode = await play(server, task)
        assert (episode.status, episode.reward) == ("ok", 0.5)


@SLOW
async def test_files_outside_the_working_directory_are_graded_if_the_task_names_them(
    section: Make, task: Path
) -> None:
    text = (task / "task.toml").read_text()
    named = 'artifacts = ["/etc/found", { source = "/srv/folder" }, "/srv/missing"]\n'
    (task / "task.toml").write_text(named + text)
    tests = (
        "#!/bin/sh\ncat /etc/found /srv/folder/more > /logs/verifier/reward.json; ls /etc /srv\n"
    )
    (task / "tests" / "test.sh").write_text(tests)
    found = "mkdir -p /srv/folder; echo '{\"a\": 0.5,' > /etc/found"
    more = "echo '\"b\": 0.25}' > /srv/folder/more"
    async with served(NAME, saying(found, more), runtime=section("sandbox")) as server:
        episode = await play(server, task)
        assert (episode.status, episode.detail) == ("ok", "")
        assert (episode.reward, episode.components) == (0.75, {"a": 0.5, "b": 0.25})


@SLOW
async def test_tests_without_a_reward_are_an_error_and_no_zero(section: Make, task: Path) -> None:
    wrong = {
        "echo broken >&2": "wrote no reward (status 0)",
        "echo good > /logs/verifier/reward.txt": "wrote b'good\\n', not a reward",
        "echo NaN > /logs/verifier/reward.txt": "reward is nan, not a finite number",
        "kill -9 $$": "wrote no reward (status 137)",
    }
    async with served(NAME, saying(), runtime=section("sandbox")) as server:
        for script, reason in wrong.items():
            (task / "tests" / "test.sh").write_text(f"#!/bin/sh\n{script}\n")
            episode = await play(server, task)
            assert (episode.status, episode.reward) == ("error", None)
            assert reason in episode.detail


CONFINED = """
import os, socket, pathlib
for port in PORTS:
    try:
        socket.create_connection(("127.0.0.1", port), 1)
        print("reached", port)
    except OSError:
        pass
for path in PATHS:
    try:
        print("read", len(os.listdir(path)))
    except OSError:
        pass
for path in ["/usr/written", TOOLS + "/written"]:
    try:
        open(path, "w")
        print("wrote", path)
    except OSError:
        pass
for process in pathlib.Path("/proc").glob("[0-9]*/environ"):
    if b"SECRET" in process.read_bytes():
        print("a secret")
print("confined", os.environ.get("HF_TOKEN"))
"""


async def test_the_sandbox_reaches_the_gateway_and_nothing_else(
    section: Make, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "SECRET")
    other = listen("127.0.0.1", 0)
    script = CONFINED.replace("PORTS", str([other.getsockname()[1]]))
    script = script.replace("PATHS", json.dumps(["/home", "/var", str(ROOT / "services")]))
    script = script.replace("TOOLS", json.dumps(str(AGENT.parent)))
    said = f"python3 -c '{script}'"
    async with served(NAME, saying(said), runtime=section("sandbox")) as server:
        episode = await play(server, task)
        assert (episode.status, episode.detail) == ("ok", "")
        asked = server.engine.tokenizer.decode(server.engine.asked[1]["input_ids"])
        assert "\nconfined None\n" in asked
    other.close()


@pytest.mark.parametrize("mode", ["number", "leaves its answer"])
async def test_the_gateway_sees_how_a_client_in_the_sandbox_leaves(
    mode: str, section: Make
) -> None:
    program = ROOT / "tests" / "support" / "environments" / "agent_program.py"
    name = f"agent:/usr/bin/python3 -I -S {program}"
    settings = section("sandbox")
    settings.tools.append(str(program))
    async with served(name, lambda _: "3", runtime=settings) as server:
        (episode,) = await server.client.episodes(request_for(name, mode))
        took_it = mode == "number"
        assert (episode.status, episode.reward) == (("ok", 1.0) if took_it else ("died", None))


LIMITED = """
import os, threading, time
try:
    bytearray(1 << 30)
    print("memory")
except MemoryError:
    pass
try:
    for _ in range(200):
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
    print("threads")
except RuntimeError:
    pass
print("limited", flush=True)
os._exit(0)
"""


@SLOW
async def test_the_sandbox_limits_memory_and_processes(section: Make, task: Path) -> None:
    (task / "task.toml").write_text((task / "task.toml").read_text().replace("1024", "256"))
    settings = section("sandbox", processes=64)
    async with served(NAME, saying(f"python3 -c '{LIMITED}'"), runtime=settings) as server:
        await play(server, task)
        asked = server.engine.tokenizer.decode(server.engine.asked[1]["input_ids"])
        assert "\nlimited\n" in asked


@SLOW
@pytest.mark.parametrize("kind", ["sandbox", "docker", "kubernetes", "real docker"])
async def test_an_agent_in_a_container_may_write_its_reward(
    kind: str, section: Make, state: Path
) -> None:
    name = NAME.replace("harbor:", "agent:")
    settings = section(kind)
    settings.image = settings.image or os.environ.get("DOCKER_TEST_IMAGE") or "plain"
    (state / "images" / settings.image.replace("/", "_")).mkdir(exist_ok=True)
    said = "echo '{\"half\": 0.5}' > $EPISODE_REWARD_FILE; cd $EPISODE_DIR; pwd"
    async with served(name, saying(said), runtime=settings) as server:
        (episode,) = await server.client.episodes(request_for(name))
        assert (episode.status, episode.detail, episode.reward) == ("ok", "", 0.5)
        asked = server.engine.tokenizer.decode(server.engine.asked[1]["input_ids"])
        assert "/episode\n" in asked


@SLOW
@pytest.mark.parametrize("kind", ["sandbox", "docker", "real docker"])
async def test_a_container_ends_with_its_episode(
    kind: str, section: Make, state: Path, task: Path
) -> None:
    settings = section(kind)
    async with served(NAME, saying("sleep 1000"), runtime=settings) as server:
        limit_s = 30 if kind == "real docker" else 10
        episode = await play(server, task, deadline_s=limit_s)
        assert (episode.status, episode.reward) == ("timeout", None)
        # The second way: the request is deleted.
        server.engine.asked.clear()
        running = asyncio.create_task(play(server, task))
        await comes(lambda: bool(server.engine.asked))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await comes(lambda: not server.service.stats()["sessions"])
    assert fake_containers.running(state) == []
    if kind == "real docker":
        assert shown(*LISTED["docker"]) == ""


def shown(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


STARTS = """
import asyncio, pathlib, sys
from common.settings.sections import RuntimeSection
from services.environment.runtimes import load_runtime
from services.environment.runtimes.runtime import Spec

async def main():
    kind, gateway, image, home = sys.argv[1:]
    runtime = load_runtime(RuntimeSection(kind=kind, gateway=gateway), gateway)
    spec = Spec(lifetime_s=1000, image=image, network="none")
    await runtime.start(spec, pathlib.Path(home))
    print("started", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""
LISTED = {
    "docker": ("docker", "ps", "--quiet", "--all", "--filter", "label=rlhf-episodes"),
    "kubernetes": ("kubectl", "get", "pods", "--output", "name", "--selector", "rlhf-episodes"),
}


def leave_one(kind: str, image: str, owner: str) -> None:
    """Starts a container that a server has left."""
    if kind == "docker":
        shown("docker", "run", "-d", "--label", f"rlhf-episodes={owner}", image, "sleep", "1000")
    else:
        label = f"--labels=rlhf-episodes={owner}"
        shown("kubectl", "run", "left", "--image", image, label, "--", "sleep", "1000")


@pytest.mark.parametrize("kind", ["docker", *KINDS[3:]])
def test_containers_of_a_killed_server_end_and_the_next_server_removes_the_rest(
    kind: str, section: Make, state: Path, tmp_path: Path
) -> None:
    settings = section(kind)
    image = IMAGES.get(kind) or "plain"
    (state / "images" / "plain").mkdir()
    host = settings.gateway or "127.0.0.1"

    def load(port: int) -> None:
        settings.gateway = f"http://{host}:{port}"
        load_runtime(settings, settings.gateway)

    words = [sys.executable, "-c", STARTS, settings.kind, f"http://{host}:7", image, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"started\n"
        server.kill()

    owner = f"{socket.gethostname()}-7"
    if kind == "docker":  # the client stands for the daemon, and died with the server
        made = {"label": f"rlhf-episodes={owner}", "env": {}, "volumes": []}
        fake_containers.make("left", image, made, state)
        load(8)
        assert "left" in fake_containers.running(state), "it is another server's"
        load(7)
        assert "left" not in fake_containers.running(state)
        return
    listing = LISTED[settings.kind]
    if kind == "real kubernetes":
        listing = (*listing, "--field-selector", "status.phase==Running")
    until(lambda: not shown(*listing))
    leave_one(settings.kind, image, owner)
    until(lambda: shown(*listing))
    load(8)
    assert shown(*listing), "it is another server's"
    load(7)
    until(lambda: not shown(*listing))


async def test_what_docker_is_told(section: Make, state: Path, task: Path) -> None:
    async with served(NAME, saying(), runtime=section("docker", processes=99)) as server:
        await play(server, task)
    calls = [" ".join(call) for call in fake_containers.calls(state)]
    (network,) = [call for call in calls if "network create" in call]
    assert "--internal" in network
    assert "enable_icc=false" in network
    agent, grader = [call for call in calls if call.startswith("docker run")]
    limits = "--cpus 1 --memory 1024m --memory-swap 1024m --pids-limit 99"
    assert limits in agent
    assert limits in grader
    assert "--network rlhf-episodes" in agent
    assert "--network none" in grader
    assert all("OPENAI_API_KEY" not in call for call in calls if grader.split()[5] in call)


async def test_what_kubernetes_is_told(section: Make, state: Path, task: Path) -> None:
    async with served(NAME, saying(), runtime=section("kubernetes")) as server:
        await play(server, task, deadline_s=100)
    lines = (state / "manifests").read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        pod = json.loads(line)
        assert pod["metadata"]["labels"]["rlhf-agents"] == "rlhf-math", "the NetworkPolicy's"
        # Its deadline, a day for what the engines take besides, and the time to start.
        assert pod["spec"]["activeDeadlineSeconds"] == 100 + 86_400 + 600
        assert pod["spec"]["restartPolicy"] == "Never"
        assert pod["spec"]["automountServiceAccountToken"] is False
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"] == {"cpu": "1", "memory": "1024Mi"}
        assert (container["stdin"], container["stdinOnce"]) == (True, True)


WRONG = {
    "local": ("runtime.kind", "local"),
    "docker": ("runtime.kind", "docker"),
    "kubernetes": ("runtime.gateway", ""),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_runtime_that_cannot_work_is_refused_at_the_start(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    field, value = WRONG[kind]
    environment = EnvironmentSection(name=NAME)
    runtime = RuntimeSection.model_validate({"kind": kind})
    with raises(ConfigError, field=field, value=value):
        load_runner(environment, "http://127.0.0.1:1", runtime)


def test_only_programs_read_the_settings_of_containers() -> None:
    with raises(ConfigError, field="runtime.kind"):
        from_mapping({"environment.name": "python", "runtime.kind": "docker"})
    from_mapping({"environment.name": "harbor:agent", "runtime.kind": "docker"})
