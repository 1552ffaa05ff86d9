"""The kinds of episodes that `environment.name` can select, each with its runner."""

from common.errors import ConfigError
from common.settings.sections import EnvironmentSection, RuntimeSection
from services.environment.class_runner import ClassRunner
from services.environment.environments import FIELD, Environment
from services.environment.outcome import EpisodeRunner
from services.environment.program_runner import ProgramRunner
from services.environment.user_server import is_url

_THREADS = 1024
_PROGRAMS = 64
_PROGRAM_KINDS = ("agent", "harbor")


def needs_gateway(config: EnvironmentSection) -> bool:
    """Whether episodes are programs that reach the model over HTTP."""
    return config.kind in _PROGRAM_KINDS


def load_runner(
    config: EnvironmentSection,
    gateway: str,
    runtime: RuntimeSection,
    environment: Environment | None = None,
) -> EpisodeRunner:
    """Returns the runner that the settings name, or that of the caller's `environment`; programs
    run in `runtime`, and reach this server at the URL `gateway`.

    Raises ConfigError when it cannot work here.
    """
    name = config.name
    kind, _, target = name.partition(":")
    if kind == "python" and environment is None:
        environment = Environment.load(name)
    if environment is not None:
        return ClassRunner(environment, config.workers or _THREADS)

    slots = config.workers or _PROGRAMS
    if kind == "harbor" and (runtime.kind == "local" or is_url(target)):
        raise ConfigError(
            "the agents and tests of Harbor tasks run in containers",
            field="runtime.kind",
            value=runtime.kind,
            remedy="set it to docker, kubernetes or, for tasks that need only Python and a shell, "
            "sandbox, and write harbor:COMMAND",
        )
    if kind in _PROGRAM_KINDS:
        return ProgramRunner(
            name,
            target,
            slots=slots,
            gateway=gateway,
            section=runtime,
            plays_tasks=kind == "harbor",
        )
    raise ConfigError(
        f"there is no environment {name!r} to serve",
        field=FIELD,
        value=name,
        remedy="use one of python, python:package.module:Class, agent:COMMAND or URL, "
        "harbor:COMMAND",
    )
