"""Whether the trackers of a run can be used here."""

import os
from importlib.util import find_spec

from common.errors import ConfigError
from common.sections import TrackersSection
from trainer.trackers.base import LIBRARIES

WANDB_KEY = "WANDB_API_KEY"


def offline() -> bool:
    """Whether wandb writes into the run directory alone (`WANDB_MODE`, as for wandb itself)."""
    return os.environ.get("WANDB_MODE", "online") != "online"


def check(settings: TrackersSection) -> None:
    """Raises ConfigError, with the remedy, for a tracker that cannot be used here."""
    for name in settings.names:
        if name in LIBRARIES and find_spec(name) is None:
            raise ConfigError(
                f"the library {name} is not installed",
                field="trackers.names",
                value=name,
                remedy=f"install it with .venv/bin/pip install -c constraints.txt -e '.[{name}]', or leave it out",
            )
    if "wandb" in settings.names and not offline() and not os.environ.get(WANDB_KEY):
        raise ConfigError(
            "wandb needs a key to send anything",
            field=WANDB_KEY,
            remedy="put it into the environment of the trainer (a secret of the job group), or WANDB_MODE=offline",
        )
