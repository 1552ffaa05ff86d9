"""The parts of a run that its rollouts use."""

from dataclasses import dataclass

from common.prompts.prompter import Prompter
from common.settings.config import Config
from trainer.rollouts.services import Services
from trainer.timing import StageClock


@dataclass(frozen=True)
class RolloutContext:
    """Settings, clients, prompter and clock of a run."""

    config: Config
    services: Services
    prompter: Prompter
    clock: StageClock
    run_id: str
    """Names this attempt; makes the ids of its requests and groups unique."""
