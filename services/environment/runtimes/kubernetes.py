"""Pods of Kubernetes, through kubectl."""

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from common import Json
from common.errors import ConfigError
from common.settings.sections import RuntimeSection
from services.environment.outcome import EpisodeFailed
from services.environment.runtimes.client_container import (
    FIRST_PROGRAM,
    LABEL,
    ClientContainer,
    output_of,
)
from services.environment.runtimes.runtime import (
    Container,
    Runtime,
    Spec,
    Variables,
    pack,
    tools_of,
)

_START_S = 600
"""Seconds in which a pod must have started, images pulled included."""
_AGENTS = {"rlhf-agents": "rlhf-math"}
"""The label of docs/reference/network-policy.yaml: such pods reach only the gateway."""
_ACCESS = (
    "install kubectl and give this server a kubeconfig or a service account that may create, get, "
    "list and delete pods, and create pods/exec and pods/attach (docs/how-to/agents.md#containers)"
)


class KubernetesRuntime(Runtime):
    """Runs programs in pods of the cluster that kubectl reaches.

    What an earlier server of this address left is removed.

    Args:
        section: the settings.
        gateway: URL of this server.

    Raises:
        ConfigError: the cluster cannot be reached, or its pods cannot reach this server.
    """

    def __init__(self, section: RuntimeSection, gateway: str) -> None:
        super().__init__(section.gateway or gateway)
        self._section = section
        url = urlsplit(self.gateway)
        self._owner = f"{socket.gethostname()}-{url.port}"[-63:].lstrip("-.")
        self._aliases: list[Json] = []
        if not section.gateway:
            # Pods outside the job group do not know its names.
            host = url.hostname or ""
            address = socket.gethostbyname(host)
            if host != address:
                self._aliases.append({"ip": address, "hostnames": [host]})
            if address.startswith("127."):
                raise ConfigError(
                    f"pods cannot reach this server at {self.gateway}",
                    field="runtime.gateway",
                    value="",
                    remedy="set the URL at which pods reach it, or run it in a pod of a job group",
                )
        label = f"{LABEL}={self._owner}"
        words = ["kubectl", "delete", "pods", "--wait=false", "--selector", label]
        output_of(words, "kubernetes", remedy=_ACCESS)

    async def start(self, spec: Spec, home: Path) -> Container:
        """Starts a pod."""
        if not spec.image:
            raise EpisodeFailed(
                "the pod has no image: set runtime.image (a cluster builds none), or docker_image "
                "in the task's task.toml"
            )
        pod = Pod(home)
        manifest = json.dumps(self._manifest(spec, pod.name))
        ready = ["wait", f"pod/{pod.name}", "--for=condition=Ready", f"--timeout={_START_S}s"]
        async with pod.killed_on_failure():
            await pod.run_client(["create", "-f", "-"], stdin=manifest)
            await pod.run_client(ready)
            await pod.hold(["attach", "--stdin", pod.name])
            await pod.fill(spec)
            for folder in tools_of(self._section):
                tool = Path(folder)
                archive = home / "tools.tar"
                await asyncio.to_thread(pack, tool, archive)
                is_folder = await asyncio.to_thread(tool.is_dir)
                await pod.put(archive, str(tool if is_folder else tool.parent))
        return pod

    def _manifest(self, spec: Spec, name: str) -> Json:
        memory = f"{spec.memory_mb or self._section.memory_mb}Mi"
        limits = {"cpu": f"{spec.cpus or self._section.cpus:g}", "memory": memory}
        container: Json = {
            "name": "episode",
            "image": spec.image,
            "args": ["sh", "-c", FIRST_PROGRAM],
            # Its input is closed when the first client that attaches has ended.
            "stdin": True,
            "stdinOnce": True,
            "env": [{"name": variable, "value": value} for variable, value in spec.env.items()],
            "resources": {"limits": limits, "requests": limits},
            "securityContext": {"allowPrivilegeEscalation": False},
        }
        if spec.workdir:
            container["workingDir"] = spec.workdir
        agents = {} if spec.network == "open" else _AGENTS
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {LABEL: self._owner, **agents}},
            "spec": {
                "restartPolicy": "Never",
                "activeDeadlineSeconds": int(spec.lifetime_s) + _START_S,
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "hostAliases": self._aliases,
                "containers": [container],
            },
        }


class Pod(ClientContainer):
    """A pod with one container."""

    client_name = "kubectl"
    remove = ("delete", "pod", "--now", "--wait=false", "--ignore-not-found")

    def _exec_words(self, words: Sequence[str], env: Variables) -> list[str]:
        # kubectl passes no variables on.
        assignments = [f"{variable}={value}" for variable, value in env.items()]
        return ["exec", "--stdin", self.name, "--", "env", *assignments, *words]
