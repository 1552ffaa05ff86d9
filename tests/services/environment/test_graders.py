"""What an agent left is graded in a clean container: which files go there, and what its tests wrote.

Containers are stand-ins that note what is done with them; in whatever order, nothing of the agent
may run beside the tests.
"""

import asyncio
import json
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.settings.config import from_mapping
from common.settings.sections import EnvironmentSection, RuntimeSection
from services.environment import runners
from services.environment.class_runner import ClassRunner
from services.environment.environments import Environment
from services.environment.harbor import HarborTask, grade
from services.environment.outcome import EnvironmentLost, EpisodeFailed, parse_reward
from services.environment.programs import words_of
from services.environment.runtimes import runtime as module
from services.environment.runtimes.runtime import Container, Spec, pack, with_tools
from tests.support.environments.environments import Calculator
from tests.support.errors import raises


class Program:
    """A program in a container that has ended."""

    def __init__(self, status: int, shown: str) -> None:
        self._result = (status, shown)

    async def finish(self) -> tuple[int, str]:
        return self._result


class Noted(Container):
    """A container in which every program ends as the test says."""

    def __init__(self, name: str, home: Path, done: list[tuple[str, str]]) -> None:
        super().__init__(home, lambda words, env: (words, env))
        self.name = name
        self.done = done
        self.missing: set[str] = set()
        self.written: dict[str, bytes] = {}
        self.status = 0
        self.env: Any = None

    async def exec(
        self, words: Any, env: Any = None, *, stdin: Any = b"", output: Any = None
    ) -> Any:
        assert words[:2] == ["sh", "-c"]
        script, *more = words[2:]
        known = {module._GET: "get", module._PUT: "put", module._PUT_INSTEAD: "instead"}
        if script == module._READ:
            name, path, after = more
            assert (name, after) == ("sh", "0")
            output.write_bytes(self.written.get(path, b""))
            return Program(0 if path in self.written else 1, "")
        if script in known:
            self.done.append((self.name, f"{known[script]} {more[1]}"))
            if script == module._GET:
                with tarfile.open(output, "w"):
                    pass
                return Program(66 if more[1] in self.missing else 0, "")
            with tarfile.open(stdin) as tar:
                self.put_files = tar.getnames()
            return Program(0, "")
        self.done.append((self.name, "kill" if script == "kill -9 -1" else "test"))
        if script != "kill -9 -1":
            assert "/tests/test.sh" in script
            self.env = env
        return Program(self.status, "y" * 1001)

    async def kill(self) -> None:
        self.done.append((self.name, "removed"))


REWARDS = st.sampled_from([None, b"1.5", b'{"a": 1}', b"no json" * 20, b"\xff"])


@given(
    is_shared=st.booleans(),
    artifacts=st.lists(st.sampled_from(["/srv/out", "/srv/db", "/data"]), unique=True),
    missing=st.sets(st.sampled_from(["/srv/out", "/data"])),
    as_json=REWARDS,
    as_text=REWARDS,
    status=st.integers(0, 1),
)
def test_the_tests_of_a_task(
    is_shared: bool,
    artifacts: list[str],
    missing: set[str],
    as_json: bytes | None,
    as_text: bytes | None,
    status: int,
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name) / "task"
        (folder / "tests").mkdir(parents=True)
        (folder / "tests" / "test.sh").touch()
        mode = "shared" if is_shared else "separate"
        listed = json.dumps(artifacts[:1])[:-1] + "".join(
            f', {{ source = "{each}" }}' for each in artifacts[1:]
        )
        (folder / "task.toml").write_text(
            f"artifacts = {listed}]\n"
            f'[verifier]\nenvironment_mode = "{mode}"\nenv = {{ STRICT = 1 }}\n'
        )
        task = HarborTask.read({"harbor_task": str(folder)})
        home = Path(name)
        done: list[tuple[str, str]] = []
        agent = Noted("agent", home, done)
        agent.missing = missing
        grader = agent if is_shared else Noted("grader", home, done)
        for path, content in (("json", as_json), ("txt", as_text)):
            if content is not None:
                grader.written[f"/logs/verifier/reward.{path}"] = content
        grader.status = status
        clean = Spec(lifetime_s=1.0)

        class Runtime:
            async def start(self, spec: Spec, where: Path) -> Container:
                assert (spec, where) == (clean, home)
                done.append(("grader", "started"))
                return grader

        runtime: Any = Runtime()
        found: Any = None
        try:
            found = asyncio.run(grade(task, agent, runtime, clean=clean, home=home))
        except EpisodeFailed as error:
            found = error

    if is_shared:
        expected = [("agent", "kill"), ("agent", "instead /tests"), ("agent", "test")]
    else:
        expected = [("agent", f"get {path}") for path in (".", *artifacts)]
        expected += [("agent", "removed"), ("grader", "started"), ("grader", "instead .")]
        kept = [path for path in artifacts if path not in missing]
        expected += [("grader", f"put {Path(path).parent}") for path in kept]
        expected += [("grader", "instead /tests"), ("grader", "test"), ("grader", "removed")]
    assert done == expected
    assert grader.put_files == ["test.sh"]
    assert grader.env == {"STRICT": "1"}
    written = as_text if as_json is None else as_json
    if written in (b"1.5", b'{"a": 1}'):
        assert found == json.loads(written)
        return
    assert type(found) is EpisodeFailed
    assert f"(status {status})" in str(found)
    assert str(found).endswith(" " + "y" * 1000)
    shown = "no reward" if written is None else f"{written[:100]!r}, not a reward"
    assert f"the tests of task wrote {shown}" in str(found)


def test_what_a_container_cannot_do_has_a_reason(tmp_path: Path) -> None:
    class Failing(Noted):
        async def exec(self, words: Any, env: Any = None, **_: Any) -> Any:
            return Program(3, "no space")

    container = Failing("agent", tmp_path, [])
    archive = tmp_path / "archive"
    with pytest.raises(EnvironmentLost, match=r"/app could not be unpacked .*: no space"):
        asyncio.run(container.put(archive, "/app"))
    with pytest.raises(EpisodeFailed, match=r"/app could not be taken .*: no space"):
        asyncio.run(container.get("/app", archive))


_NAMES = st.sampled_from(["a", "b/c", "link", "link/c", "../a", "/a", "x/../y", "pipe"])
_TYPES = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])


@given(st.lists(st.tuples(_NAMES, _TYPES), max_size=4))
def test_an_archive_stays_in_its_folder(members: list[tuple[str, bytes]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "left.tar"
        with tarfile.open(path, "w") as tar:
            for name, kind in members:
                member = tarfile.TarInfo(name)
                member.type = kind
                tar.addfile(member)
        links: list[str] = []
        wrong = None
        for name, kind in members:
            leaves = name.startswith("/") or ".." in name.split("/")
            is_below = any(name.startswith(f"{link}/") for link in links)
            if leaves or is_below or kind == tarfile.FIFOTYPE:
                wrong = name
                break
            if kind == tarfile.SYMTYPE:
                links.append(name)
        if wrong is None:
            module._check_archive(path)
        else:
            with pytest.raises(EpisodeFailed) as caught:
                module._check_archive(path)
            assert repr(wrong) in str(caught.value)


def test_a_folder_is_packed_without_some_names(tmp_path: Path) -> None:
    folder = tmp_path / "task"
    (folder / "inner").mkdir(parents=True)
    for name in ("Dockerfile", "b", "inner/Dockerfile"):
        (folder / name).touch()
    archive = tmp_path / "task.tar"
    pack(folder, archive, without=["Dockerfile"])
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["b", "inner", "inner/Dockerfile"]
    pack(folder / "b", archive)
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["b"]


def test_paths_into_the_tools_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "run.py").touch()
    (tmp_path / "other.py").touch()
    section = RuntimeSection(tools=["agent"])
    words = ["python", "agent/run.py", "agent/absent.py", "other.py", "agent"]
    absolute = [str(tmp_path / "agent" / "run.py"), str(tmp_path / "agent")]
    expected = ["python", absolute[0], "agent/absent.py", "other.py", absolute[1]]
    assert with_tools(words, section) == expected


_REWARD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([1, 0.5, True, "2", "x", None, float("nan"), float("inf"), [], {}]),
    st.dictionaries(
        st.sampled_from(["a", "b", 3]), st.sampled_from([1, -0.5, float("inf"), None, "1"])
    ),
)


@given(_REWARD)
def test_a_reward_is_a_finite_number_or_has_parts(reward: Any) -> None:
    parts = reward if isinstance(reward, dict) else {"reward": reward}
    numbers = {}
    for name, value in parts.items():
        is_number = value in (1, 0.5, -0.5) or value in ("1", "2")
        if is_number and not isinstance(value, list):
            numbers[str(name)] = float(value)
    if parts and len(numbers) == len(parts):
        assert parse_reward(reward, "it is") == (sum(numbers.values()), numbers)
    else:
        with pytest.raises(EpisodeFailed, match=r"^it is .*, not a finite number"):
            parse_reward(reward, "it is")


@given(
    kind=st.sampled_from(["python", "agent", "harbor", "unknown"]),
    target=st.sampled_from(["", "/bin/true", "http://here:1", "https://[::1]/run"]),
    runtime=st.sampled_from(["local", "docker"]),
    workers=st.sampled_from([0, 5]),
    is_given=st.booleans(),
)
def test_the_setting_chooses_the_runner(
    kind: str, target: str, runtime: str, workers: int, is_given: bool
) -> None:
    own: Any = "own" if is_given else None
    made: list[Any] = []

    def note(name: str) -> Any:
        def noted(*given: Any, **more: Any) -> Any:
            made.append((name, given, more))
            return name

        return noted

    loader: Any = type("Loader", (), {"load": staticmethod(lambda name: f"loaded {name}")})
    section = EnvironmentSection.model_construct(name=f"{kind}:{target}", workers=workers)
    place = RuntimeSection.model_validate({"kind": runtime})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runners, "ClassRunner", note("class"))
        patch.setattr(runners, "ProgramRunner", note("program"))
        patch.setattr(runners, "Environment", loader)
        try:
            runners.load_runner(section, "http://gateway", place, own)
        except ConfigError as error:
            made.append(error)
    assert runners.needs_gateway(section) == (kind in ("agent", "harbor"))
    (found,) = made
    if is_given or kind == "python":
        environment = "own" if is_given else f"loaded {section.name}"
        assert found == ("class", (environment, workers or 1024), {})
    elif kind == "harbor" and (runtime == "local" or target.startswith("http")):
        assert (found.field, found.value) == ("runtime.kind", runtime)
    elif kind == "unknown":
        assert (found.field, found.value) == ("environment.name", section.name)
    else:
        more = {
            "slots": workers or 64,
            "gateway": "http://gateway",
            "section": place,
            "plays_tasks": kind == "harbor",
        }
        assert found == ("program", (section.name, target), more)


def test_commands_that_cannot_be_run() -> None:
    assert words_of("sh -c 'a b'") == ["sh", "-c", "a b"]
    assert words_of("absent-program x", is_here=False) == ["absent-program", "x"]
    for command in ("", "absent-program x", "sh 'open"):
        with raises(ConfigError, field="environment.name", value=command):
            words_of(command)
    with raises(ConfigError, field="environment.name"):
        words_of("", is_here=False)


def test_a_class_says_what_its_episodes_have() -> None:
    prepared: list[str] = []

    class Prepared(Calculator):
        gives_verdicts = True

        @staticmethod
        def _prepare() -> None:
            prepared.append("once")

        def step(self, messages: list[Any]) -> None:
            """Ends."""

    async def made() -> None:
        runner = ClassRunner(Environment.of(Prepared, "name"), 7)
        assert (runner.name, runner.threads.limit) == ("name", 7)
        assert (runner.has_steps, runner.has_reward, runner.gives_verdicts) == (True, True, True)
        assert sorted(runner.tools) == ["add", "broken"]
        await runner.close()

    asyncio.run(made())
    assert prepared == ["once"]
    assert from_mapping({}).environment.name == ""
