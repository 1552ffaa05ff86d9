"""Where the programs of episodes run: as processes, in a sandbox, in Docker or in Kubernetes."""

from common.settings.sections import RuntimeSection
from services.environment.runtimes.docker import DockerRuntime
from services.environment.runtimes.kubernetes import KubernetesRuntime
from services.environment.runtimes.local import LocalRuntime
from services.environment.runtimes.runtime import Runtime
from services.environment.runtimes.sandboxed import SandboxRuntime


def load_runtime(section: RuntimeSection, gateway: str) -> Runtime:
    """Returns the runtime that the settings name; it reaches this server at the URL `gateway`.

    Raises ConfigError when it does not work here.
    """
    if section.kind == "sandbox":
        return SandboxRuntime(section, gateway)
    if section.kind == "docker":
        return DockerRuntime(section, gateway)
    if section.kind == "kubernetes":
        return KubernetesRuntime(section, gateway)
    return LocalRuntime(gateway)
