"""Containers of Docker, through its command line."""

import asyncio
import hashlib
import socket
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from common.settings.sections import RuntimeSection
from services.environment.outcome import EpisodeFailed
from services.environment.runtimes.client_container import (
    FIRST_PROGRAM,
    LABEL,
    ClientContainer,
    output_of,
)
from services.environment.runtimes.gateway_addresses import Gate
from services.environment.runtimes.runtime import Container, Runtime, Spec, Variables, tools_of

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
        self._building: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._built_tags: set[str] = set()

        self._label = f"{LABEL}={socket.gethostname()}-{self._gate.port}"
        left = _docker("ps", "-aq", "--filter", f"label={self._label}")
        if left:
            _docker("rm", "-f", *left.split())
        if _NETWORK not in _docker("network", "ls", "--format", "{{.Name}}").split():
            named = f"com.docker.network.bridge.name={_NETWORK}"
            apart = "com.docker.network.bridge.enable_icc=false"
            options = ["--internal", "--label", LABEL, "-o", named, "-o", apart]
            _docker("network", "create", *options, _NETWORK)
        self._address = _docker("network", "inspect", f"--format={_ADDRESS}", _NETWORK)
        host = self._gate.host
        # A name (of a certificate) is mapped to the bridge's address; a number cannot be.
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
        options = [
            *("--interactive", "--rm", "--name", container.name, "--label", self._label),
            *("--network", _NETWORKS[spec.network]),
            *("--cpus", f"{spec.cpus or self._section.cpus:g}"),
            *("--memory", memory, "--memory-swap", memory),
            *("--pids-limit", str(self._section.processes)),
            *("--security-opt", "no-new-privileges"),
        ]
        if spec.workdir:
            options += ["--workdir", spec.workdir]
        if spec.network == "gateway" and self._has_name:
            options += ["--add-host", f"{self._gate.host}:{self._address}"]
        for folder in tools_of(self._section):
            options += ["--volume", f"{folder}:{folder}:ro"]
        options += [f"--env={variable}={value}" for variable, value in spec.env.items()]
        async with container.killed_on_failure():
            await container.hold(["run", *options, image, "sh", "-c", FIRST_PROGRAM])
            await container.fill(spec)
        return container

    async def close(self) -> None:
        """Closes the way from containers to the gateway; the network stays, for other servers."""
        await self._gate.close()

    async def _built(self, build: Path | None, container: ClientContainer) -> str:
        """Builds the image of a folder, once. Raises EpisodeFailed."""
        if build is None or not (build / "Dockerfile").is_file():
            raise EpisodeFailed(
                "the container has no image: set runtime.image, or give the task an image or a "
                "Dockerfile"
            )
        tag = f"{LABEL}:{hashlib.sha256(str(build).encode()).hexdigest()[:20]}"
        async with self._building[tag]:
            if tag not in self._built_tags:
                # Docker's own cache makes this fast where an earlier server built it.
                await container.run_client(["build", "--quiet", "--tag", tag, str(build)])
                self._built_tags.add(tag)
        return tag


class DockerContainer(ClientContainer):
    """A container of Docker."""

    client_name = "docker"
    remove = ("rm", "-f")

    def _exec_words(self, words: Sequence[str], env: Variables) -> list[str]:
        variables = [f"--env={variable}={value}" for variable, value in env.items()]
        return ["exec", "--interactive", *variables, self.name, *words]


def _docker(*words: str) -> str:
    """Runs Docker's client at the server's start; returns its output. Raises ConfigError."""
    return output_of(["docker", *words], "docker", remedy=_DAEMON)
