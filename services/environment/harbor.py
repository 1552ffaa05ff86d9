"""Tasks in Harbor's format: a folder with the container of an agent and the tests that grade it.

task.toml                limits, the image, the working directory
instruction.md           the prompt (`services.data.loaders_harbor` reads it)
environment/Dockerfile   the image, unless task.toml names one
tests/test.sh            the grader: writes /logs/verifier/reward.txt or reward.json
solution/                is never read
"""

import asyncio
import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from common.settings.sections import HARBOR_COLUMN
from services.environment.outcome import EpisodeFailed
from services.environment.runtimes.runtime import WORKDIR, Container, Runtime, Spec, pack

TESTS = "/tests"
LOGS = "/logs/verifier"
_RUN_TESTS = f"rm -rf {LOGS}; mkdir -p {LOGS} && chmod +x {TESTS}/test.sh && exec {TESTS}/test.sh"
_SHOWN_CHARS = 1000
_MEGABYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_UNSUPPORTED_FILES = (
    "environment/docker-compose.yaml",
    "tests/Dockerfile",
    "tests/docker-compose.yaml",
)
_Env = dict[str, str | int | float]
_Nothing = Annotated[list[Any], Meta(max_length=0)]
_Root = Literal["root", 0]
"""Containers have no other user."""


# The parts of task.toml that an episode needs, and those of which it can play only one value. Other
# parts have no effect.


class _Environment(msgspec.Struct):
    docker_image: str = ""
    workdir: str = ""
    """Empty: the image's."""
    env: _Env = {}
    cpus: float | None = None
    memory_mb: int | None = None
    memory: Annotated[str, Meta(pattern=r"^\d+(\.\d+)?[GMK]$")] | None = None
    """Such as `2G`, in older tasks."""
    os: Literal["linux"] = "linux"
    gpus: Literal[0] = 0
    tpu: None = None
    mcp_servers: _Nothing = []
    healthcheck: None = None


class _Agent(msgspec.Struct):
    timeout_sec: float | None = None
    user: _Root = "root"


class _Verifier(msgspec.Struct):
    env: _Env = {}
    timeout_sec: float = 600
    environment_mode: str = ""
    """`shared`: the tests run in the agent's container, since they need more than its files."""
    user: _Root = "root"
    environment: None = None
    collect: None = None


class _Artifact(msgspec.Struct):
    source: str


class _Settings(msgspec.Struct):
    environment: _Environment = field(default_factory=_Environment)
    agent: _Agent = field(default_factory=_Agent)
    verifier: _Verifier = field(default_factory=_Verifier)
    artifacts: list[str | _Artifact] = []
    """Files outside the working directory that the tests need."""
    steps: _Nothing = []


@dataclass(frozen=True)
class HarborTask:
    """A task: its folder, and what its task.toml says."""

    folder: Path
    settings: _Settings

    @classmethod
    def read(cls, columns: Mapping[str, Any]) -> "HarborTask":
        """Reads the folder that a row names. Raises EpisodeFailed for a task that episodes cannot
        play.
        """
        named = columns.get(HARBOR_COLUMN)
        if not isinstance(named, str):
            raise EpisodeFailed(
                f"the row has no column {HARBOR_COLUMN}: set data.source to a folder of Harbor "
                "tasks"
            )
        folder = Path(named)
        try:
            content = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
            settings = msgspec.convert(content, _Settings)
        except (OSError, ValueError) as error:
            raise EpisodeFailed(
                f"{folder} is not a task of Harbor that episodes can play: {error}"
            ) from error

        for name, value in (settings.environment.env | settings.verifier.env).items():
            if "${" in str(value):
                raise EpisodeFailed(
                    f"the variable {name} of {folder} is {value}: tasks cannot read the server's "
                    "variables"
                )
        unsupported = [name for name in _UNSUPPORTED_FILES if (folder / name).exists()]
        if unsupported:
            raise EpisodeFailed(f"{folder} has {unsupported[0]}, which episodes do not support")
        if not (folder / "tests/test.sh").is_file():
            raise EpisodeFailed(f"{folder} has no tests/test.sh")
        return cls(folder, settings)

    def spec(self, spec: Spec) -> Spec:
        """Returns what its containers are made from: `spec`, and what the task says."""
        environment = self.settings.environment
        memory_mb = environment.memory_mb
        if memory_mb is None and environment.memory:
            number = float(environment.memory[:-1])
            memory_mb = int(number * _MEGABYTES[environment.memory[-1]])
        return dataclasses.replace(
            spec,
            image=environment.docker_image or spec.image.replace("{task}", self.folder.name),
            build=self.folder / "environment",
            workdir=environment.workdir,
            env=_texts(environment.env),
            cpus=environment.cpus,
            memory_mb=memory_mb,
        )


def _texts(env: _Env) -> dict[str, str]:
    return {name: str(value) for name, value in env.items()}


async def grade(
    task: HarborTask, agent: Container, runtime: Runtime, *, clean: Spec, home: Path
) -> Any:
    """Returns the reward of what an agent left in its container.

    The tests run in a clean container, which gets only the agent's working directory and the task's
    artifacts. The agent's container is removed first. Raises EpisodeFailed when the tests write no
    reward.
    """
    if task.settings.verifier.environment_mode == "shared":
        await agent.run(["sh", "-c", "kill -9 -1"])  # what the agent left running
        return await _tested(task, agent, home)

    taken: dict[str, Path] = {}
    artifacts = [
        each.source if isinstance(each, _Artifact) else each for each in task.settings.artifacts
    ]
    for number, path in enumerate((WORKDIR, *artifacts)):
        archive = home / f"left-{number}.tar"
        if await agent.get(path, archive):
            taken[path] = archive
    await agent.kill()

    grader = await runtime.start(clean, home)
    try:
        for path, archive in taken.items():
            # The parent of the working directory, as it is called here, is itself.
            folder = str(Path(path).parent)
            await grader.put(archive, folder, instead=path == WORKDIR)
        return await _tested(task, grader, home)
    finally:
        await grader.kill()


async def _tested(task: HarborTask, container: Container, home: Path) -> Any:
    archive = home / "tests.tar"
    await asyncio.to_thread(pack, task.folder / "tests", archive)
    await container.put(archive, TESTS, instead=True)
    verifier = task.settings.verifier
    async with asyncio.timeout(verifier.timeout_sec):
        status, shown = await container.run(["sh", "-c", _RUN_TESTS], _texts(verifier.env))
    written = await container.read(f"{LOGS}/reward.json")
    if written is None:
        written = await container.read(f"{LOGS}/reward.txt")

    # The exit status does not matter: tests that fail write their reward, too.
    try:
        return json.loads((written or b"").decode())
    except (ValueError, RecursionError):
        was = "no reward" if written is None else f"{written[:100]!r}, not a reward"
        raise EpisodeFailed(
            f"the tests of {task.folder.name} wrote {was} (status {status}); graders have no "
            f"network unless runtime.grader_network is set; the end of their output: "
            f"{shown[-_SHOWN_CHARS:]}"
        ) from None
