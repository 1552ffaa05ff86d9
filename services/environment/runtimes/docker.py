"""Containers of Docker, through its command line."""

import asyncio
import hashlib
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from common.settings.sections import RuntimeSection
from services.environment.outcome import EpisodeFailed
from services.environment.runtimes.gate import Gate
from services.environment.runtimes.held import HOLD, LABEL, Held, call
from services.environment.runtimes.runtime import Container, Runtime, Spec, tools_of

_NETWORK = "rlhf-episodes"
_NETWORKS = {"gateway": _NETWORK, "none": "none", "open": "bridge"}
_DAEMON = "start Docker, and let this server's user reach it (DOCKER_HOST, the group docker)"
_ADDRESS = "{{(index .IPAM.Config 0).Gateway}}"


class DockerRuntime(Runtime):
    """Runs programs in containers whose network has no way out but this server's gateway.

    What an earlier server of this address left is removed.

    Args:
        section: the settings.
        gateway: URL of this server.

    Raises:
        ConfigError: Docker cannot be reached.
    """

    def __init__(self, section: RuntimeSection, gateway: str) -> None:
        super().__init__(section.gateway or gateway)
        self._section = section
        self._gate = Gate(gateway)
        self._builds: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

        self._label = f"{LABEL}={socket.gethostname()}-{self._gate.port}"
        left = _docker("ps", "-aq", "--filter", f"label={self._label}")
        if left:
            _docker("rm", "-f", *left.split())
        if _NETWORK not in _docker("network", "ls", "--format", "{{.Name}}").split():
            options = ["--internal", "--label", LABEL]
            options += ["-o", f"com.docker.network.bridge.name={_NETWORK}"]
            options += ["-o", "com.docker.network.bridge.enable_icc=false"]
            _docker("network", "create", *options, _NETWORK)
        self._address = _docker("network", "inspect", f"--format={_ADDRESS}", _NETWORK)
        host = self._gate.host
        self._has_name = not (host.replace(".", "").isdecimal() or ":" in host)
        if not section.gateway and not self._has_name:
            # Containers reach this server only at its address in their own network.
            netloc = f"{self._address}:{self._gate.port}"
            self.gateway = urlsplit(gateway)._replace(netloc=netloc).geturl()

    async def start(self, spec: Spec, home: Path) -> Container:
        """Starts a container, after its image was built if it has none."""
        if spec.network == "gateway" and not self._section.gateway:
            await self._gate.open_address(self._address)
        container = DockerContainer(home)
        image = spec.image or await self._built(spec.build, container)
        memory = f"{spec.memory_mb or self._section.memory_mb}m"
        options = ["--name", container.name, "--label", self._label]
        options += ["--network", _NETWORKS[spec.network]]
        options += ["--cpus", f"{spec.cpus or self._section.cpus:g}"]
        options += ["--memory", memory, "--memory-swap", memory]
        options += ["--pids-limit", str(self._section.processes)]
        options += ["--security-opt", "no-new-privileges"]
        if spec.workdir:
            options += ["--workdir", spec.workdir]
        if spec.network == "gateway" and self._has_name:
            options += ["--add-host", f"{self._gate.host}:{self._address}"]
        for folder in tools_of(self._section):
            options += ["--volume", f"{folder}:{folder}:ro"]
        for variable, value in spec.env.items():
            options.append(f"--env={variable}={value}")
        try:
            command = [image, "sh", "-c", HOLD]
            await container.hold(["run", "--interactive", "--rm", *options, *command])
            await container.fill(spec)
        except BaseException:
            await container.kill()
            raise
        return container

    async def close(self) -> None:
        """Stops passing connections on. The network stays: other servers may use it."""
        await self._gate.close()

    async def _built(self, build: Path | None, container: Held) -> str:
        """Builds the image of a folder, once. Raises EpisodeFailed."""
        if build is None or not (build / "Dockerfile").is_file():
            raise EpisodeFailed(
                "the container has no image: set runtime.image, or give the task an image or a "
                "Dockerfile"
            )
        content = await asyncio.to_thread(_content, build)
        tag = f"{LABEL}:{content}"
        async with self._builds[tag]:
            inspecting = await container.client(["image", "inspect", tag])
            missing, _ = await inspecting.finish()
            if not missing:
                return tag
            await container.must(["build", "--quiet", "--tag", tag, str(build)])
        return tag


class DockerContainer(Held):
    """A container of Docker."""

    client_name = "docker"
    remove = ("rm", "-f")

    def _exec_words(self, words: Sequence[str], env: Mapping[str, str]) -> list[str]:
        variables = [f"--env={variable}={value}" for variable, value in env.items()]
        return ["exec", "--interactive", *variables, self.name, *words]


def _docker(*words: str) -> str:
    """Runs Docker's client at the server's start; returns its output. Raises ConfigError."""
    return call(["docker", *words], "docker", remedy=_DAEMON)


def _content(folder: Path) -> str:
    """Returns a digest of the files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)} {path.stat().st_mode & 0o111} ".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:20]
