"""Settings of a small run."""

from pathlib import Path

from common.settings.config import Config
from common.settings.sections import RolloutSection


def small_run(policy_dir: Path, directory: Path) -> Config:
    """Returns settings that train the model in `policy_dir` and keep everything in `directory`."""
    config = Config(rollout=RolloutSection(engine="embedded"))
    config.model.name = str(policy_dir)
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 0
    config.trainer.run_dir = directory / "run"
    config.state_dir = directory / "state"
    return config
