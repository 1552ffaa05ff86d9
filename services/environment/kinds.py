"""The kinds of episodes that `environment.name` can select."""

import shlex
from pathlib import Path
from typing import Any, Protocol

from common.errors import ConfigError
from common.settings.sections import EnvironmentSection
from common.wire.schemas import EpisodeLimits, EpisodeTask
from services.environment.agent import AgentRunner
from services.environment.environments import FIELD, Environment
from services.environment.openenv import OpenEnv
from services.environment.outcome import Outcome
from services.environment.runner import ClassEpisodes
from services.environment.session import Session
from services.environment.threads import Threads

_THREADS = 1024
_PROGRAMS = 64
_VERIFIERS = Path(__file__).with_name("verifiers_program.py")
_VERIFIERS_PYTHON = ".venv-verifiers/bin/python"


class EpisodeRunner(Protocol):
    """Runs episodes of one environment."""

    name: str
    tools: dict[str, Any]
    """The functions offered to the model, as far as known before an episode."""
    has_steps: bool
    has_reward: bool | None
    """Whether episodes give a reward; None: known once an episode gave one."""

    @property
    def threads(self) -> Threads | None:
        """The threads whose calls may hang; None for episodes that run in their own processes."""

    async def run(self, task: EpisodeTask, session: Session, limits: EpisodeLimits) -> Outcome:
        """Plays an episode and returns its outcome; never raises, except when cancelled."""

    async def close(self) -> None:
        """Stops whatever keeps running between episodes."""


def needs_gateway(config: EnvironmentSection) -> bool:
    """Whether episodes are programs that reach the model over HTTP."""
    return config.name.partition(":")[0] in ("agent", "verifiers")


def of_class(environment: Environment, config: EnvironmentSection) -> EpisodeRunner:
    """Returns the kind that plays episodes of a class."""
    return ClassEpisodes(environment, config.workers or _THREADS)


def load_kind(config: EnvironmentSection, gateway: str) -> EpisodeRunner:
    """Returns the kind that the settings name; programs reach this server at the URL `gateway`.

    Raises ConfigError when it cannot work here.
    """
    kind, _, target = config.name.partition(":")
    if kind == "python":
        return of_class(Environment.load(config.name), config)
    if kind == "agent":
        return AgentRunner(config.name, target, config.workers or _PROGRAMS, gateway)
    if kind == "openenv":
        return OpenEnv(config.name, target, config.workers or _PROGRAMS)
    if kind == "verifiers":
        python, _, identifier = target.strip().rpartition(" ")
        command = shlex.join([python.strip() or _VERIFIERS_PYTHON, str(_VERIFIERS), identifier])
        return AgentRunner(
            config.name, command, config.workers or _PROGRAMS, gateway, has_reward=True
        )
    remedy = "use one of python, python:package.module:Class, agent:COMMAND or URL, openenv:COMMAND or URL, verifiers:ID"
    raise ConfigError(
        f"there is no environment {config.name}", field=FIELD, value=config.name, remedy=remedy
    )
