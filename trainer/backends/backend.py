"""What a run needs from its surroundings: the services, and the path of weights to the engines.

`job_group.py` has the backend of a job group, `in_process.py` that of one process.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from common.clients.base import Client
from common.process.loop_thread import LoopThread
from common.process.metrics import Metrics
from common.settings.config import Config
from trainer.observe.audit import Given
from trainer.observe.prometheus import TrainerMetrics
from trainer.policy.policy import Policy
from trainer.rollouts.services import Services
from trainer.weights.sync import WeightPublisher


@dataclass
class BackendContext:
    """The parts of rank 0 that a backend needs to start the services."""

    config: Config
    run_dir: Path
    run_id: str
    """Names this attempt, so that weights of an earlier attempt are not mistaken for its own."""
    policy: Policy
    tokenizer: Any
    static_files: list[Path]
    """Config and tokenizer files that make published weights a complete version."""
    say: Callable[[str], None]
    """Shows a line to the user."""
    metrics: TrainerMetrics
    registry: Metrics
    """The trainer's `/metrics` page."""
    loop: LoopThread
    """Runs the clients."""
    stack: ExitStack
    """Closes everything that the backend starts."""


class Backend(ABC):
    """The services of a run and the path of weights to the engines. Only rank 0 uses it."""

    console: Console
    """For progress and results."""
    given: Sequence[Given] = ()
    """What the caller gave in the place of settings."""
    data = ""
    """Where the prompts come from; empty: from `data.source`."""

    @abstractmethod
    def start(self, context: BackendContext) -> tuple[Services, WeightPublisher]:
        """Starts the services, or connects to them; returns their clients and the weight
        publisher.
        """

    @property
    @abstractmethod
    def engine_kind(self) -> Literal["embedded", "sglang"]:
        """What generates the completions."""

    @property
    @abstractmethod
    def engine_gpus(self) -> int | None:
        """The number of GPUs that engines hold now, except those shared with the trainer; None when
        unknown.
        """

    def agents(self) -> list[Client]:
        """Returns clients of the rollout nodes' agents, which are flushed at the end."""
        return []
