"""What Docker, Kubernetes and bubblewrap are told, for random tasks and settings.

The clients are stand-ins that note their words. What they are told is read by parsers of a few
lines and compared with what the task and the settings say.
"""

import asyncio
import hashlib
import io
import json
import os
import socket
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.settings.sections import RuntimeSection
from services.environment.outcome import EnvironmentLost, EpisodeFailed
from services.environment.programs import RunningProgram
from services.environment.runtimes import client_container, sandboxed
from services.environment.runtimes.docker import DockerRuntime
from services.environment.runtimes.gateway_addresses import Gate
from services.environment.runtimes.kubernetes import KubernetesRuntime
from services.environment.runtimes.runtime import Network, Spec
from services.environment.runtimes.sandboxed import SandboxRuntime
from services.sandbox.command import SYSTEM, VARIANTS, Interpreter, Variant
from tests.support.errors import raises

_NETWORKS = ("gateway", "none", "open")
SPECS = st.builds(
    Spec,
    lifetime_s=st.floats(1.0, 1000.0),
    network=st.sampled_from(_NETWORKS),
    image=st.sampled_from(["python:3", "registry/a@sha256:1"]),
    workdir=st.sampled_from(["", "/app", "/a/b"]),
    env=st.dictionaries(st.sampled_from(["A", "B"]), st.sampled_from(["", "1", "a=b c"])),
    cpus=st.none() | st.sampled_from([0.5, 2.0]),
    memory_mb=st.none() | st.integers(1, 9),
)
SECTIONS = st.builds(
    RuntimeSection,
    cpus=st.sampled_from([1.0, 1.5]),
    memory_mb=st.integers(10, 20),
    processes=st.integers(1, 9),
    gateway=st.sampled_from(["", "http://gateway.example:80"]),
    tools=st.lists(st.sampled_from(["/usr/bin", "/usr/lib"]), unique=True, max_size=2),
)


class Clients:
    """Notes the words of every client, and answers those of the server's start."""

    def __init__(self, patch: pytest.MonkeyPatch, **answers: str) -> None:
        self.asked: list[list[str]] = []
        """At the start of the server."""
        self.started: list[tuple[list[str], bytes]] = []
        """By episodes, with what was passed to it."""
        self.answers = answers
        self.starts = True
        """Whether containers start."""
        self.status = 0
        patch.setattr(subprocess, "run", self._run)
        patch.setattr(RunningProgram, "launch", self._launch)
        # The programs that containers run are started by the same class, and so noted, too.
        patch.setattr(Gate, "open_address", self._opened)
        self.opened: list[str] = []

    def _run(self, words: Sequence[str], **options: Any) -> Any:
        assert options == {"check": True, "capture_output": True, "text": True, "timeout": 60}
        self.asked.append(list(words))
        key = "_".join(words[1:3]).replace("-", "")
        return SimpleNamespace(stdout=self.answers.get(key, "") + "\n")

    async def _opened(self, address: str) -> None:
        self.opened.append(address)

    async def _launch(
        self,
        words: Sequence[str],
        env: Any,
        *,
        home: Path,
        stdin: bytes | Path | int = b"",
        output: Path | None = None,
    ) -> Any:
        self.started.append((list(words), _read(stdin)))
        shown = client_container.READY if self.starts else b"no such image"
        return SimpleNamespace(
            output=SimpleNamespace(text=shown),
            ended=not self.starts,
            finish=self._finished,
            close=self._closed,
        )

    async def _finished(self) -> tuple[int, str]:
        return self.status, "it failed"

    async def _closed(self) -> str:
        return "it failed"

    def words(self, *first: str) -> list[list[str]]:
        """Returns the calls whose words begin so."""
        return [words for words, _ in self.started if words[: len(first)] == list(first)]


def _read(stdin: bytes | Path | int) -> bytes:
    if isinstance(stdin, bytes):
        return stdin
    if isinstance(stdin, Path):
        return stdin.read_bytes()
    return os.read(stdin, 3)


def files(archive: bytes) -> set[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name for member in tar if member.isfile()}


def pairs(words: Sequence[str], flags: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the options of a command line with their values, in any order."""
    found: list[tuple[str, ...]] = []
    rest = iter(words)
    for word in rest:
        name, has_value, value = word.partition("=")
        if word in flags:
            found.append((word,))
        else:
            found.append((name, value if has_value else next(rest)))
    return sorted(found)


def addresses(url: str) -> st.SearchStrategy[str]:
    return st.sampled_from([url, "http://10.0.0.7:8006", "https://[fe80::1]:8006/base"])


@settings(max_examples=40)
@given(SPECS, SECTIONS, addresses("http://host.example:8006"), st.booleans())
def test_docker(spec: Spec, section: RuntimeSection, gateway: str, is_known: bool) -> None:
    names = "bridge\nrlhf-episodes" if is_known else "bridge\nrlhf-episodes-of-another"
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        clients = Clients(
            patch, ps_aq="one\ntwo", network_ls=names, network_inspect="172.9.0.1", rm_f=""
        )
        runtime = DockerRuntime(section, gateway)
        label = f"rlhf-episodes={socket.gethostname()}-8006"
        created = [words for words in clients.asked if words[:3] == ["docker", "network", "create"]]
        rest = [words for words in clients.asked if words not in created]
        assert rest == [
            ["docker", "ps", "-aq", "--filter", f"label={label}"],
            ["docker", "rm", "-f", "one", "two"],
            ["docker", "network", "ls", "--format", "{{.Name}}"],
            [
                *("docker", "network", "inspect"),
                "--format={{(index .IPAM.Config 0).Gateway}}",
                "rlhf-episodes",
            ],
        ]
        assert len(created) == (0 if is_known else 1)
        for words in created:
            assert words[-1] == "rlhf-episodes"
            driver = "com.docker.network.bridge"
            assert sorted(pairs(words[3:-1], ["--internal"])) == [
                ("--internal",),
                ("--label", "rlhf-episodes"),
                ("-o", f"{driver}.enable_icc=false"),
                ("-o", f"{driver}.name=rlhf-episodes"),
            ]
        has_name = "host.example" in gateway
        if section.gateway:
            assert runtime.gateway == section.gateway
        elif has_name:
            assert runtime.gateway == gateway
        else:
            host = "10.0.0.7" if "10.0.0.7" in gateway else "[fe80::1]"
            assert runtime.gateway == gateway.replace(host, "172.9.0.1")

        container = asyncio.run(runtime.start(spec, Path(folder)))
        name = container.name  # type: ignore[attr-defined]
        assert clients.opened == (
            ["172.9.0.1"] if spec.network == "gateway" and not section.gateway else []
        )
        ((words, given),) = clients.started
        assert given == b"go\n"
        assert words[:2] == ["docker", "run"]
        assert words[-4:-1] == [spec.image, "sh", "-c"]
        assert words[-1].endswith("exec cat")
        memory = f"{spec.memory_mb or section.memory_mb}m"
        network = {"gateway": "rlhf-episodes", "none": "none", "open": "bridge"}[spec.network]
        expected = [
            ("--interactive",),
            ("--rm",),
            ("--name", name),
            ("--label", label),
            ("--network", network),
            ("--cpus", f"{spec.cpus or section.cpus:g}"),
            ("--memory", memory),
            ("--memory-swap", memory),
            ("--pids-limit", str(section.processes)),
            ("--security-opt", "no-new-privileges"),
        ]
        if spec.workdir:
            expected.append(("--workdir", spec.workdir))
        if spec.network == "gateway" and has_name:
            expected.append(("--add-host", "host.example:172.9.0.1"))
        expected += [("--volume", f"{tool}:{tool}:ro") for tool in section.tools]
        expected += [("--env", f"{name}={value}") for name, value in spec.env.items()]
        assert pairs(words[2:-4], ["--interactive", "--rm"]) == sorted(expected)

        clients.started.clear()
        asyncio.run(container.run(["ls", "-l"], {"C": "d=e"}, stdin=b"in"))
        asyncio.run(container.kill())
        assert clients.started == [
            (["docker", "exec", "--interactive", "--env=C=d=e", name, "ls", "-l"], b"in"),
            (["docker", "rm", "-f", name], b""),
        ]


@settings(max_examples=40)
@given(SPECS, SECTIONS)
def test_kubernetes(spec: Spec, section: RuntimeSection) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        clients = Clients(patch)
        patch.setattr(socket, "gethostname", lambda: "-" + "h" * 70)
        patch.setattr(socket, "gethostbyname", lambda _: "10.0.0.9")
        runtime = KubernetesRuntime(section, "http://host.example:8006")
        assert runtime.gateway == (section.gateway or "http://host.example:8006")
        port = 80 if section.gateway else 8006
        owner = ("h" * 70 + f"-{port}")[-63:]
        assert clients.asked == [
            [
                *("kubectl", "delete", "pods", "--wait=false"),
                *("--selector", f"rlhf-episodes={owner}"),
            ]
        ]
        tool = Path(folder) / "tools"
        (tool / "inner").mkdir(parents=True)
        (tool / "inner" / "agent.py").touch()
        section.tools = [str(tool), str(tool / "inner" / "agent.py")]
        home = Path(folder) / "home"
        home.mkdir()
        pod = asyncio.run(runtime.start(spec, home))
        name = pod.name  # type: ignore[attr-defined]
        created, waiting, attached, *put = clients.started
        assert created[0] == ["kubectl", "create", "-f", "-"]
        limits = {
            "cpu": f"{spec.cpus or section.cpus:g}",
            "memory": f"{spec.memory_mb or section.memory_mb}Mi",
        }
        container = {
            "name": "episode",
            "image": spec.image,
            "args": ["sh", "-c", client_container.FIRST_PROGRAM],
            "stdin": True,
            "stdinOnce": True,
            "env": [{"name": name, "value": value} for name, value in spec.env.items()],
            "resources": {"limits": limits, "requests": limits},
            "securityContext": {"allowPrivilegeEscalation": False},
        }
        if spec.workdir:
            container["workingDir"] = spec.workdir
        labels = {"rlhf-episodes": owner}
        if spec.network != "open":
            labels["rlhf-agents"] = "rlhf-math"
        aliases = [] if section.gateway else [{"ip": "10.0.0.9", "hostnames": ["host.example"]}]
        assert json.loads(created[1]) == {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {
                "restartPolicy": "Never",
                "activeDeadlineSeconds": int(spec.lifetime_s) + 600,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "hostAliases": aliases,
                "containers": [container],
            },
        }
        ready = ["wait", f"pod/{name}", "--for=condition=Ready", "--timeout=600s"]
        assert waiting == (["kubectl", *ready], b"")
        assert attached == (["kubectl", "attach", "--stdin", name], b"go\n")
        begun = ["kubectl", "exec", "--stdin", name, "--", "env", "sh", "-c"]
        assert [words[:8] for words, _ in put] == [begun, begun]
        # A file is unpacked in the folder that it is in.
        assert [(words[-1], files(archive)) for words, archive in put] == [
            (str(tool), {"inner/agent.py"}),
            (str(tool / "inner"), {"agent.py"}),
        ]

        clients.started.clear()
        asyncio.run(pod.run(["ls"], {"C": "d"}))
        asyncio.run(pod.kill())
        removing = ["delete", "pod", "--now", "--wait=false", "--ignore-not-found", name]
        assert clients.started == [
            (["kubectl", "exec", "--stdin", name, "--", "env", "C=d", "ls"], b""),
            (["kubectl", *removing], b""),
        ]


def test_an_image_is_built_once_and_a_folder_without_one_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = Clients(monkeypatch, network_ls="rlhf-episodes", network_inspect="172.9.0.1")
    runtime = DockerRuntime(RuntimeSection(), "http://10.0.0.7:8006")
    build = tmp_path / "environment"
    build.mkdir()
    (build / "data.txt").touch()
    home = tmp_path / "home"
    home.mkdir()
    with pytest.raises(EpisodeFailed, match="no image"):
        asyncio.run(runtime.start(Spec(lifetime_s=1.0), home))
    with pytest.raises(EpisodeFailed, match="no image"):
        asyncio.run(runtime.start(Spec(lifetime_s=1.0, build=build), home))
    assert not clients.started

    asyncio.run(runtime.start(Spec(lifetime_s=1.0, image="i", build=build), home))
    _, (words, archive) = clients.started
    assert words[-1] == "."
    assert files(archive) == {"data.txt"}
    clients.started.clear()

    (build / "Dockerfile").touch()
    tag = f"rlhf-episodes:{hashlib.sha256(str(build).encode()).hexdigest()[:20]}"

    async def two() -> None:
        spec = Spec(lifetime_s=1.0, build=build)
        await asyncio.gather(*(runtime.start(spec, home) for _ in range(2)))

    asyncio.run(two())
    assert clients.words("docker", "build") == [
        ["docker", "build", "--quiet", "--tag", tag, str(build)]
    ]
    assert [words[-4] for words in clients.words("docker", "run")] == [tag, tag]
    assert len(clients.started) == 3, "its Dockerfile says where the files go"

    clients.status = 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "Dockerfile").touch()
    with pytest.raises(EnvironmentLost, match=r"^docker build --quiet .* failed: it failed"):
        asyncio.run(runtime.start(Spec(lifetime_s=1.0, build=tmp_path / "other"), home))


def test_a_container_that_does_not_start_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = Clients(monkeypatch, network_inspect="172.9.0.1")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.0.0.9")
    clients.starts = False
    spec = Spec(lifetime_s=1.0, image="i")
    gateway = "http://host.example:8006"
    for runtime in (
        DockerRuntime(RuntimeSection(), gateway),
        KubernetesRuntime(RuntimeSection(), gateway),
    ):
        with pytest.raises(EnvironmentLost, match="could not be started: it failed"):
            asyncio.run(runtime.start(spec, tmp_path))
    removed = [words[-1] for words in clients.words("docker", "rm", "-f")]
    removed += [words[-1] for words in clients.words("kubectl", "delete", "pod")]
    assert len(removed) == 2
    assert all(name.startswith("rlhf-episodes-") for name in removed)
    with pytest.raises(EpisodeFailed, match="no image"):
        asyncio.run(
            KubernetesRuntime(RuntimeSection(), gateway).start(Spec(lifetime_s=1.0), tmp_path)
        )


def test_clients_that_fail_at_the_start_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(words: Sequence[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, list(words), stderr="no daemon")

    monkeypatch.setattr(subprocess, "run", fails)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.0.0.9")
    with raises(ConfigError, field="runtime.kind", value="docker") as caught:
        DockerRuntime(RuntimeSection(), "http://10.0.0.7:8006")
    assert "docker ps -aq failed: no daemon" in str(caught.value)
    with raises(ConfigError, field="runtime.kind", value="kubernetes") as caught:
        KubernetesRuntime(RuntimeSection(), "http://10.0.0.7:8006")
    assert "kubectl delete pods failed: no daemon" in str(caught.value)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.0.1")
    with raises(ConfigError, field="runtime.gateway"):
        KubernetesRuntime(RuntimeSection(), "http://localhost:8006")


def sandbox(section: RuntimeSection, gateway: str, variant: Variant) -> SandboxRuntime:
    """Returns a sandbox that is not tried at the start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandboxed, "find_bwrap", lambda: "/bin/bwrap")
        patch.setattr(sandboxed, "base_filter", lambda internet: b"filter" * internet)
        python = Interpreter("/opt/python", ("/opt/lib",), (), frozenset())
        patch.setattr(sandboxed, "interpreters", lambda name: [python] if not name else [])
        patch.setattr(SandboxRuntime, "_select_working", lambda *_: None)
        made = SandboxRuntime(section, gateway)
    made._variant = variant
    return made


@given(
    network=st.sampled_from(_NETWORKS),
    memory_mb=st.none() | st.integers(1, 9),
    section=SECTIONS,
    variant=st.sampled_from(VARIANTS),
    host=st.sampled_from(["127.0.0.5", "10.0.0.7", "host.example"]),
    user=st.sampled_from([0, 1000]),
)
def test_bubblewrap(
    network: Network,
    memory_mb: int | None,
    section: RuntimeSection,
    variant: Variant,
    host: str,
    user: int,
) -> None:
    runtime = sandbox(section, f"http://{host}:8006", variant)
    address = host if host.startswith("127.") else "127.0.0.1"
    spec = Spec(lifetime_s=1.0, network=network, memory_mb=memory_mb)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: user)
        words = runtime._command(
            ["ls", "-l"], spec, Path("/e/home"), root=Path("/e/home/root"), workdir="/app"
        )
    assert words[:3] == ["sh", "-c", 'exec 9<"$0"; exec "$@"']
    assert words[3] == "/e/home/filter"
    at = words.index("/bin/bwrap")
    dropped = ["setpriv", "--reuid", "60599", "--regid", "60599", "--clear-groups"]
    assert words[4:at] == ([] if user else dropped)
    end = words.index("--")
    assert words[end + 1 : end + 5] == ["/opt/python", "-I", "-S", "-c"]
    assert words[end + 5] == Path(sandboxed.__file__).with_name("inside.py").read_text()
    inner = "/run/gateway.sock" if network == "gateway" else ""
    memory = (memory_mb or section.memory_mb) * 1024 * 1024
    limits = [str(memory), str(section.processes)]
    assert words[end + 6 :] == [*limits, inner, address, "8006", "ls", "-l"]

    arguments = {
        "--ro-bind-try": 2,
        "--bind": 2,
        "--proc": 1,
        "--dev": 1,
        "--chdir": 1,
        "--seccomp": 1,
        "--cap-drop": 1,
        "--uid": 1,
        "--gid": 1,
        "--hostname": 1,
    }
    found: dict[str, list[tuple[str, ...]]] = {}
    rest = iter(words[at + 1 : end])
    for word in rest:
        values = tuple(next(rest) for _ in range(arguments.get(word, 0)))
        found.setdefault(word, []).append(values)
    shared = found.pop("--ro-bind-try")
    assert all(source == target for source, target in shared)
    systems = [name for name in SYSTEM if not Path(name).is_symlink()]
    etc = ["/etc/ld.so.cache", "/etc/ssl", "/etc/alternatives", "/etc/localtime"]
    assert [name for name, _ in shared] == [*systems, *etc, "/opt/lib", *section.tools]
    binds = [("/e/home/root", "/")]
    if inner:
        binds.append(("/e/gateway.sock", inner))
    assert found.pop("--bind") == binds
    expected = {
        "--chdir": [("/app",)],
        "--seccomp": [("9",)],
        "--dev": [("/dev",)],
        "--cap-drop": [("ALL",)],
        "--uid": [("0",)],
        "--gid": [("0",)],
        "--hostname": [("sandbox",)],
        "--die-with-parent": [()],
        "--new-session": [()],
    }
    for name in ("user", "ipc", "pid", "net", "uts", "cgroup-try"):
        expected[f"--unshare-{name}"] = [()]
    if variant.disable_userns:
        expected["--disable-userns"] = [()]
    if variant.proc:
        expected["--proc"] = [("/proc",)]
    assert found == expected


def test_the_file_system_of_a_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owned: list[tuple[Path, int, int]] = []
    monkeypatch.setattr(
        os,
        "chown",
        lambda path, user, group, follow_symlinks: owned.append(
            (Path(path), user, group if not follow_symlinks else -1)
        ),
    )
    runtime = sandbox(RuntimeSection(), "http://host.example:8006", VARIANTS[0])
    for user in (0, 1000):
        home = tmp_path / str(user) / "home"
        home.mkdir(parents=True, mode=0o700)
        home.chmod(0o700)
        home.parent.chmod(0o700)
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        root = runtime._make_root(home, "/data/inner")
        assert root.parent == home
        for folder in ("tmp", "root", "run", "etc", "episode", "data/inner"):
            assert (root / folder).is_dir()
        links = {name.strip("/") for name in SYSTEM if Path(name).is_symlink()}
        assert {each.name for each in root.iterdir() if each.is_symlink()} == links
        assert all((root / name).readlink() == Path("/", name).readlink() for name in links)
        hosts = (root / "etc" / "hosts").read_text()
        assert hosts == "127.0.0.1 localhost\n127.0.0.1 host.example\n"
        assert (root / "etc" / "passwd").read_text().startswith("root:x:0:0:root:/root:")
        assert (root / "etc" / "group").read_text().startswith("root:x:0:")
        assert (root / "run" / "gateway.sock").is_file()
        assert (home / "filter").read_bytes() == b"filter"
        if user:
            assert not owned
            assert home.stat().st_mode & 0o777 == 0o700
        else:
            assert {path for path, _, _ in owned} == {root, *root.rglob("*")}
            assert {each[1:] for each in owned} == {(60599, 60599)}
            assert home.stat().st_mode & 0o777 == home.parent.stat().st_mode & 0o777 == 0o711
            owned.clear()


_FOLDERS = st.sampled_from(["/app", "/a/b", "/usr/src/x"])


@given(st.lists(st.tuples(st.sampled_from(["WORKDIR", " workdir ", "RUN"]), _FOLDERS), max_size=4))
def test_the_last_working_directory_of_a_dockerfile_counts(lines: list[tuple[str, str]]) -> None:
    named = [folder for word, folder in lines if word != "RUN"]
    with TemporaryDirectory() as folder:
        assert sandboxed._workdir_of(Path(folder)) == sandboxed._workdir_of(None) == "/app"
        text = "".join(f"{word} {place}\n" for word, place in [("FROM", "x"), *lines])
        (Path(folder) / "Dockerfile").write_text(text)
        assert sandboxed._workdir_of(Path(folder)) == (named[-1] if named else "/app")


def test_the_first_variant_with_which_a_program_runs_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = sandbox(RuntimeSection(), "http://10.0.0.7:8006", VARIANTS[-1])
    pythons = [Interpreter(f"/python{n}", (), (), frozenset()) for n in range(2)]
    tried: list[list[str]] = []
    works = 3

    def run(words: list[str], **options: Any) -> Any:
        assert options == {"capture_output": True, "text": True, "timeout": 10.0}
        assert words[-1] == "true"
        assert Path(words[3]).read_bytes() == b"filter", "the file system is there"
        tried.append(words)
        is_last = len(tried) == works
        return SimpleNamespace(returncode=0 if is_last else 1, stderr=f" reason {len(tried)}\n")

    monkeypatch.setattr(subprocess, "run", run)
    for works in (1, 3, 6):
        tried.clear()
        runtime._select_working(pythons)
        assert len(tried) == works
        variants = len(VARIANTS)
        python = pythons[(works - 1) // variants]
        assert (runtime._python, runtime._variant) == (python, VARIANTS[(works - 1) % variants])
        assert python.executable in tried[-1]
        assert ("--proc" in tried[-1]) == runtime._variant.proc
    works = 0
    tried.clear()
    with raises(ConfigError, field="runtime.kind", value="sandbox") as caught:
        runtime._select_working(pythons)
    assert f"reason 1; reason {2 * len(VARIANTS)}" in str(caught.value)
