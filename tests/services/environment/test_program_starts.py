"""With which words, variables and input programs are started, and the folders that they get."""

import asyncio
import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidInput
from common.process import topology
from common.settings.config import from_mapping
from common.settings.sections import RuntimeSection
from services.environment import __main__ as command
from services.environment import programs, runtimes
from services.environment.messages import parse_messages, parse_tools, text_of
from services.environment.outcome import EnvironmentLost, EpisodeFailed
from services.environment.programs import Folders, RunningProgram
from services.environment.runtimes.local import Processes
from services.environment.runtimes.runtime import MOST_READ, Container


@given(
    inherited=st.sets(st.sampled_from(["PATH", "LANG", "TZ", "SECRET", "SSL_CERT_FILE"])),
    own=st.dictionaries(st.sampled_from(["HOME", "A", "SSL_CERT_FILE"]), st.just("own")),
    authority=st.sampled_from(["", "/ca.pem"]),
    is_file=st.booleans(),
    has_output=st.booleans(),
)
def test_a_program_gets_its_input_and_no_secret(
    inherited: set[str],
    own: dict[str, str],
    authority: str,
    is_file: bool,
    has_output: bool,
) -> None:
    started: list[Any] = []

    async def start(
        words: Any, reader: Any, *, env: dict[str, str], stdin: int, stdout: Any = None
    ) -> Any:
        if stdout is not None:
            stdout.write(b"out")
        started.append((words, env, os.read(stdin, 99)))
        return "started"

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        given_: Any = b"the input"
        if is_file:
            given_ = home / "input"
            given_.write_bytes(b"the input")
        patch.setattr(RunningProgram, "start", start)
        patch.setattr(os, "environ", dict.fromkeys(inherited, "inherited"))
        patch.setattr(programs, "tls", lambda: SimpleNamespace(authority=authority))
        output = home / "output" if has_output else None
        launched = RunningProgram.launch(["run", "it"], own, home=home, stdin=given_, output=output)
        result: Any = asyncio.run(launched)
        assert result == "started"
        if output is not None:
            assert output.read_bytes() == b"out"
        left = {path.name for path in home.iterdir()}
        assert left == ({"input"} if is_file else set()) | ({"output"} if has_output else set())
    ((words, env, read),) = started
    assert read == b"the input"
    expected = dict.fromkeys(inherited - {"SECRET"}, "inherited")
    if authority:
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"):
            expected[name] = authority
    expected |= {"HOME": str(home), "TMPDIR": str(home), "PYTHONUNBUFFERED": "1"}
    assert env == expected | own
    if has_output:
        assert words == ["sh", "-c", 'ulimit -f 8388608; exec "$@"', "sh", "run", "it"]
    else:
        assert words == ["run", "it"]


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.ENOENT, None])
def test_a_machine_without_room_is_no_fault_of_the_program(
    number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(*_: Any, **__: Any) -> None:
        raise ValueError("null byte") if number is None else OSError(number, "why")

    monkeypatch.setattr(RunningProgram, "start", start)
    kind = EpisodeFailed if number in (errno.ENOENT, None) else EnvironmentLost
    with pytest.raises(kind, match=r"^run could not be started: ") as caught:
        asyncio.run(RunningProgram.launch(["run"], {}, home=tmp_path))
    assert type(caught.value) is kind


class Ended(RunningProgram):
    """A program that has ended."""

    def __init__(self, status: int, output: bytes) -> None:
        self.output = programs._Tail()
        stream = asyncio.StreamReader()
        stream.feed_data(output)
        stream.feed_eof()
        self._stream = stream
        self._status = status
        self.ends = 0

    async def wait(self) -> int:
        await self.output.copy(self._stream)
        return self._status

    async def end(self, grace_s: float = 0.0) -> int:
        self.ends += 1
        await asyncio.sleep(0)
        return self._status


@given(st.binary(max_size=9), st.integers(0, 9000))
def test_the_end_of_the_output_is_kept(end: bytes, length: int) -> None:
    async def finish() -> None:
        output = b"x" * length + end
        program = Ended(3, output)
        status, shown = await program.finish()
        assert status == 3
        assert shown == output[-4000:].decode("utf-8", "replace").strip()
        assert await program.close() == shown
        assert program.ends == 1, "it is killed once, whoever asks"

    asyncio.run(finish())


def test_folders_are_locked_while_their_server_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = Folders()
    assert not list(tmp_path.iterdir()), "a server without programs has none"
    one, two = folders.make(), folders.make()
    assert one != two
    assert one.parent == two.parent
    assert one.parent.parent == tmp_path
    other = tmp_path / "rlhf-episodes-left"
    young = tmp_path / "rlhf-episodes-young"
    old = tmp_path / "rlhf-episodes-old"
    for folder in (other / "episode", young, old, tmp_path / "else"):
        folder.mkdir(parents=True)
    now = young.stat().st_mtime
    monkeypatch.setattr(time, "time", lambda: now + 59.0)
    os.utime(old, (now - 2.0, now - 2.0))
    os.utime(young, (now, now))
    Folders()
    assert {path.name for path in tmp_path.iterdir()} == {one.parent.name, young.name, "else"}
    folders.close()
    folders.close()
    assert {path.name for path in tmp_path.iterdir()} == {young.name, "else"}
    again = folders.make()
    lock = os.open(again.parent, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
    folders.close()


def test_a_disk_without_room_loses_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, "no space left")

    folders = Folders()
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(EnvironmentLost, match="no space left in "):
        folders.make()


@given(st.sampled_from(["local", "sandbox", "docker", "kubernetes"]))
def test_the_setting_chooses_the_runtime(kind: str) -> None:
    section = RuntimeSection.model_validate({"kind": kind})
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Sandbox", "Docker", "Kubernetes", "Local"):
            patch.setattr(
                runtimes, f"{name}Runtime", lambda *given, name=name: (name.lower(), *given)
            )
        found: Any = runtimes.load_runtime(section, "http://gateway")
    assert (
        found == (kind, "http://gateway") if kind == "local" else (kind, section, "http://gateway")
    )


_WRONG_CONTENTS = st.sampled_from([7, {"text": "a"}, [7], ["a", {"type": "image"}], [None]])


@given(st.integers(0, 2), _WRONG_CONTENTS)
def test_a_wrong_content_is_named_with_its_value(number: int, content: Any) -> None:
    messages = [{"role": "user", "content": "a"}] * number + [{"role": "user", "content": content}]
    where = f"messages[{number}].content"
    wrong = content
    if isinstance(content, list):
        place = next(i for i, part in enumerate(content) if not isinstance(part, str))
        where += f"[{place}]"
        wrong = content[place]
    with pytest.raises(InvalidInput) as caught:
        parse_messages(messages)
    expected = InvalidInput("", field=where, value=wrong, remedy="")
    assert (caught.value.field, caught.value.value) == (where, expected.value)
    assert text_of(["a", {"text": "b"}, {"refusal": "c"}], "") == "abc"
    assert text_of(None, "") == ""


@given(st.sampled_from([7, {}, [7], [{"function": 7}], [{"function": {"name": 7}}], [{}]]))
def test_a_wrong_tool_is_named_with_its_value(content: Any) -> None:
    good = {"type": "function", "function": {"name": "f"}}
    if isinstance(content, list):
        field, value = "tools[1]", content[0]
        content = [good, *content]
    else:
        field, value = "tools", content
    with pytest.raises(InvalidInput) as caught:
        parse_tools(content, lambda tool: tool)
    expected = InvalidInput("", field=field, value=value, remedy="")
    assert (caught.value.field, caught.value.value) == (field, expected.value)
    assert parse_tools(None, lambda tool: tool) == []
    assert parse_tools([good], lambda tool: tool | {"read": 1}) == [good | {"read": 1}]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("is_supervised", [False, True])
def test_a_server_is_made_from_the_settings(
    nodes: int, is_supervised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = from_mapping({"environment.name": "python", "max_body_mb": 3, "state_dir": "state"})
    place = SimpleNamespace(
        num_nodes=nodes,
        node_rank=1,
        own_name=lambda task: f"{task}-1",
        url=lambda *given: given,
        bind=lambda task, port: ("host", port),
    )
    calls: dict[str, Any] = {}

    def note(name: str, result: Any = None) -> Any:
        def noted(*given: Any, **more: Any) -> Any:
            calls[name] = (given, more)
            return result

        return noted

    runner = SimpleNamespace(tools={"a": {}, "b": {}})
    service = SimpleNamespace(runner=runner)
    monkeypatch.setattr(topology.Topology, "from_env", lambda: place)
    for name, result in (
        ("setup_logging", None),
        ("end_with_parent", None),
        ("keep_alive", 9),
        ("load_template", ("template", [5])),
        ("RolloutClient", "router"),
        ("Metrics", "metrics"),
        ("EpisodeService", service),
        ("create_environment_app", "app"),
        ("serve", None),
    ):
        monkeypatch.setattr(command, name, note(name, result))
    monkeypatch.setattr(sys, "argv", ["program", "--set", "x"])
    monkeypatch.delenv("ENVIRONMENT_SUPERVISED", raising=False)
    if is_supervised:
        monkeypatch.setenv("ENVIRONMENT_SUPERVISED", "1")
    if nodes > 1 and not is_supervised:
        with pytest.raises(SystemExit) as ended:
            command.run(config)
        assert ended.value.code == 9
        words = [sys.executable, "-m", "services.environment", "--set", "x"]
        assert calls["keep_alive"] == ((words,), {})
        assert "serve" not in calls
        return
    command.run(config)
    assert ("end_with_parent" in calls) == is_supervised
    task = topology.ENVIRONMENT
    port = config.environment.port
    assert calls["setup_logging"] == ((f"{task}-1", Path("state/logs")), {"service": task})
    assert calls["load_template"] == (
        (config.model, config.sampling.chat_template_kwargs),
        {},
    )
    url = (topology.ROLLOUT, config.rollout.router_port)
    deadline = {"deadline_s": config.limits.service_timeout_s}
    assert calls["RolloutClient"] == (("rollout-server", url), deadline)
    assert calls["Metrics"] == ((task,), {})
    assert calls["EpisodeService"] == (
        (config.environment, "template"),
        {
            "router": "router",
            "stop_token_ids": [5],
            "metrics": "metrics",
            "gateway": (task, port, 1),
            "runtime": config.runtime,
        },
    )
    assert calls["create_environment_app"] == ((service, 3 << 20, "metrics"), {"nodes": nodes})
    assert calls["serve"] == (("app", "host", port, "environment=python tools=a,b"), {})


def test_files_of_a_container_are_read_and_packed_by_a_shell(tmp_path: Path) -> None:
    """The scripts themselves, which run in every container: here in a shell of this machine."""

    def in_shell(words: Any, stdin: Path | bytes, output: Path | None) -> Any:
        data = stdin.read_bytes() if isinstance(stdin, Path) else stdin
        done = subprocess.run(
            words, cwd=tmp_path / "in", input=data, capture_output=True, check=False
        )
        if output is not None:
            output.write_bytes(done.stdout)
        return done

    class Here(Container):
        async def exec(self, words: Any, env: Any = None, **given: Any) -> Any:
            done = in_shell(words, given.get("stdin") or b"", given.get("output"))

            async def finish() -> tuple[int, str]:
                return done.returncode, done.stderr.decode()

            return SimpleNamespace(finish=finish)

    inside = tmp_path / "in"
    (inside / "data").mkdir(parents=True)
    (inside / "data" / "file").write_text("text")
    (inside / "data" / ".hidden").write_text("dots")
    container = Here(tmp_path, lambda words, env: (words, env))
    archive = tmp_path / "archive.tar"
    target = tmp_path / "out"

    async def use() -> None:
        assert await container.get(str(inside / "absent"), archive) is False
        for path in (str(inside / "data"), "."):
            assert await container.get(path, archive) is True
            await container.put(archive, str(target))
            assert (target / "data" / "file").read_text() == "text"
            (target / "data" / "other").touch()
        await container.put(archive, str(target / "data"), instead=True)
        found = sorted(path.name for path in (target / "data").iterdir())
        assert found == ["data"], "nothing of what was there is left"
        file = inside / "data" / "file"
        os.utime(file, (100.0, 100.5))
        assert await container.read(str(file)) == b"text"
        assert await container.read(str(file), after=99.5) == b"text"
        assert await container.read(str(file), after=100.5) is None
        assert await container.read(str(inside / "absent")) is None
        file.write_bytes(b"z" * ((1 << 20) + 1))
        assert await container.read(str(file)) == b"z" * (1 << 20)

    asyncio.run(use())


async def test_files_of_an_episode_on_this_machine_are_read_if_they_are_new(tmp_path: Path) -> None:
    container = Processes(tmp_path, {"A": "a", "B": "a"})
    assert container.directory == str(tmp_path)
    assert container._command(["ls"], {"B": "b"}) == (["ls"], {"A": "a", "B": "b"})
    file = tmp_path / "reward.json"
    assert await container.read(str(file)) is None
    file.write_bytes(b"z" * (MOST_READ + 1))
    os.utime(file, (100.0, 100.5))
    for after in (0.0, 99.5, 100.0):
        assert await container.read(str(file), after) == b"z" * MOST_READ
    for after in (100.5, 101.0):
        assert await container.read(str(file), after) is None
    with pytest.raises(EpisodeFailed):
        await container.read(str(tmp_path))
