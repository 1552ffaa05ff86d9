"""The embedded engine of a run, from its settings."""

from pathlib import Path

from common.settings.config import Config
from learning.device import choose_device
from services.engine.engine import Engine
from services.engine.model import Model


def embedded_model(config: Config, directory: Path) -> Model:
    """Returns the model in a directory for the embedded engine. Raises ConfigError as `Model`."""
    rollout = config.rollout
    return Model(
        directory,
        rollout.max_context_tokens,
        choose_device(rollout.device, "rollout.device"),
        dtype=config.model.dtype,
        fp32_head=config.model.fp32_head,
        deterministic=config.reproducible,
    )


def embedded_engine(config: Config, directory: Path, label: str, *, beside_trainer: bool) -> Engine:
    """Returns the engine with the weights in a directory, which have the version `label`."""
    model = embedded_model(config, directory)
    if beside_trainer:
        # The concurrent device synchronisations of training would abort a capture.
        model.graphs = None
    return Engine(
        model,
        max_running=config.rollout.max_running_requests,
        seed=config.seed,
        weight_version=label,
    )
