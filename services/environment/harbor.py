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
from typing import Any

from common.settings.sections import HARBOR_COLUMN
from services.environment.outcome import EpisodeFailed
from services.environment.runtimes.runtime import WORKDIR, Container, Runtime, Spec, pack

TESTS = "/tests"
LOGS = "/logs/verifier"
_RUN_TESTS = f"rm -rf {LOGS}; mkdir -p {LOGS} && chmod +x {TESTS}/test.sh && exec {TESTS}/test.sh"
_SHOWN_CHARS = 1000
_USERS = ("agent.user", "verifier.user")
"""Only root works: containers have no other user."""
_UNSUPPORTED = (
    "environment.gpus",
    "environment.tpu",
    "environment.mcp_servers",
    "environment.healthcheck",
    "verifier.environment",
    "verifier.collect",
)
_UNSUPPORTED_FILES = (
    "environment/docker-compose.yaml",
    "tests/Dockerfile",
    "tests/docker-compose.yaml",
)


@dataclass(frozen=True)
class HarborTask:
    """A task, as far as an episode needs it."""

    folder: Path
    image: str
    workdir: str
    """Empty: the image's."""
    env: Mapping[str, str]
    cpus: float | None
    memory_mb: int | None
    timeout_s: float
    """Seconds for the agent."""
    grader_env: Mapping[str, str]
    grader_timeout_s: float
    is_shared: bool
    """Whether the tests run in the agent's container, since they need more than its files."""
    artifacts: tuple[str, ...]
    """Files outside the working directory that the tests need."""

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
            _check(content, folder)
            return cls._of(content, folder)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            raise EpisodeFailed(f"{folder} is not a task of Harbor: {error}") from error

    @classmethod
    def _of(cls, content: dict[str, Any], folder: Path) -> "HarborTask":
        environment = content.get("environment", {})
        verifier = content.get("verifier", {})
        memory = environment.get("memory_mb")
        if memory is None and "memory" in environment:
            memory = _megabytes(environment["memory"])
        artifacts = [
            each if isinstance(each, str) else str(each["source"])
            for each in content.get("artifacts", [])
        ]
        return cls(
            folder=folder,
            image=str(environment.get("docker_image") or ""),
            workdir=str(environment.get("workdir") or ""),
            env=_variables(environment, folder),
            cpus=environment.get("cpus"),
            memory_mb=memory,
            timeout_s=float(content.get("agent", {}).get("timeout_sec") or float("inf")),
            grader_env=_variables(verifier, folder),
            grader_timeout_s=float(verifier.get("timeout_sec", 600)),
            is_shared=verifier.get("environment_mode") == "shared",
            artifacts=tuple(artifacts),
        )

    def spec(self, spec: Spec) -> Spec:
        """Returns what its containers are made from: `spec`, and what the task says."""
        return dataclasses.replace(
            spec,
            image=self.image or spec.image.replace("{task}", self.folder.name),
            build=self.folder / "environment",
            workdir=self.workdir,
            env=self.env,
            cpus=self.cpus,
            memory_mb=self.memory_mb,
        )


async def grade(
    task: HarborTask, agent: Container, runtime: Runtime, *, clean: Spec, home: Path
) -> Any:
    """Returns the reward of what an agent left in its container.

    The tests run in a clean container, which gets only the agent's working directory and the task's
    artifacts. The agent's container is removed first. Raises EpisodeFailed when the tests write no
    reward.
    """
    if task.is_shared:
        await agent.run(["sh", "-c", "kill -9 -1"])  # what the agent left running
        return await _tested(task, agent, home)

    taken = []
    for number, path in enumerate((WORKDIR, *task.artifacts)):
        archive = home / f"left-{number}.tar"
        if await agent.get(path, archive):
            taken.append((path, archive))
    await agent.kill()

    grader = await runtime.start(clean, home)
    try:
        for path, archive in taken:
            if path == WORKDIR:
                await grader.put(archive, path, instead=True)
            else:
                await grader.put(archive, str(Path(path).parent))
        return await _tested(task, grader, home)
    finally:
        await grader.kill()


async def _tested(task: HarborTask, container: Container, home: Path) -> Any:
    archive = home / "tests.tar"
    await asyncio.to_thread(pack, task.folder / "tests", archive)
    await container.put(archive, TESTS, instead=True)
    async with asyncio.timeout(task.grader_timeout_s):
        status, shown = await container.run(["sh", "-c", _RUN_TESTS], task.grader_env)
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


def _check(content: dict[str, Any], folder: Path) -> None:
    """Raises ValueError for what episodes cannot play."""

    def value(name: str) -> Any:
        table, _, key = name.partition(".")
        return content.get(table, {}).get(key)

    used = ["steps"] if content.get("steps") else []
    if str(value("environment.os") or "linux").lower() != "linux":
        used.append("environment.os")
    used += [name for name in _USERS if value(name) not in (None, "root", 0)]
    used += [name for name in _UNSUPPORTED if value(name)]
    used += [name for name in _UNSUPPORTED_FILES if (folder / name).exists()]
    if used:
        raise ValueError(f"it uses {', '.join(used)}, which episodes do not support")
    if not (folder / "tests/test.sh").is_file():
        raise ValueError("it has no tests/test.sh")


def _variables(section: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Returns the variables of a section. Raises ValueError for one of the server's."""
    variables = {name: str(value) for name, value in section.get("env", {}).items()}
    for name, value in variables.items():
        if "${" in value:
            raise ValueError(
                f"its variable {name} is {value}: tasks cannot read the server's variables"
            )
    return variables


def _megabytes(size: str) -> int:
    """Returns a size such as `2G`, in older tasks."""
    units = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
    return int(float(size[:-1]) * units[size[-1].upper()])
