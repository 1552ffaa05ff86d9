"""Interface of trackers, and their selection."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from common import Json
from common.errors import ConfigError
from common.process.imports import import_callable
from common.settings.sections import TrackersSection

Cell = str | float | int | bool | None
Record = Mapping[str, Any]
"""A step or an evaluation, as `metrics.jsonl` and `evaluations.jsonl` have it."""
Numbers = dict[str, float]
"""Numbers of a step or an evaluation by name."""
LIBRARIES = {
    "tensorboard": "trainer.trackers.to_tensorboard:TensorBoardTracker",
    "wandb": "trainer.trackers.to_wandb:WandbTracker",
    "mlflow": "trainer.trackers.to_mlflow:MlflowTracker",
    "trackio": "trainer.trackers.to_trackio:TrackioTracker",
}
"""Built-in trackers by name, which is also the name of the library and of the extra that installs
it."""
_WANDB_KEY = "WANDB_API_KEY"


@dataclass(frozen=True)
class RunInfo:
    """Description of the run for a new tracker."""

    id: str
    """Stays the same when the run is resumed, so that a tracker continues its run of that id."""
    name: str
    project: str
    directory: Path
    """Folder for the tracker's files: `trackers` in the run directory."""
    config: Json
    """Resolved configuration by section: the hyperparameters."""
    step: int
    """The run continues after this step; later tracked steps belong to an interrupted attempt."""

    @property
    def parameters(self) -> dict[str, Cell]:
        """The configuration by `section.name`; values other than numbers, texts and booleans are
        converted to text.
        """
        return {
            name: value if isinstance(value, str | int | float) else str(value)
            for name, value in flatten(self.config).items()
        }


class Tracker(Protocol):
    """A tracker, created with a `RunInfo` and called from one thread. An exception loses only that
    record.
    """

    where: str
    """Address or command that shows the run."""

    def metrics(self, step: int, values: Numbers) -> None:
        """Records the numbers of a step or an evaluation, named `group/name`."""

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        """Records samples or answers of this step."""

    def close(self, finished: bool) -> None:
        """Sends the remaining records. `finished`: whether the run was not interrupted."""


def load(name: str) -> Callable[[RunInfo], Tracker]:
    """Returns the class of a tracker, built in or `package.module:Class`."""
    return import_callable(LIBRARIES.get(name, name), "trackers.names")


def wandb_offline() -> bool:
    """Returns whether wandb writes only to the run directory (`WANDB_MODE`, as for wandb
    itself).
    """
    return os.environ.get("WANDB_MODE", "online") != "online"


def check(settings: TrackersSection) -> None:
    """Raises ConfigError for a tracker whose library or key is missing."""
    for name in settings.names:
        if name in LIBRARIES and find_spec(name) is None:
            raise ConfigError(
                f"the library {name} is not installed",
                field="trackers.names",
                value=name,
                remedy="install it with .venv/bin/pip install -c constraints.txt -e "
                f"'.[{name}]', or leave it out",
            )
    sends_to_wandb = "wandb" in settings.names and not wandb_offline()
    if sends_to_wandb and not os.environ.get(_WANDB_KEY):
        raise ConfigError(
            "wandb needs a key to send anything",
            field=_WANDB_KEY,
            remedy="set it in the environment of the trainer (as a secret of the job group), or "
            "set WANDB_MODE=offline",
        )


def flatten(values: Record, separator: str = ".") -> Json:
    """Returns the values of nested mappings by their joined names."""
    found: Json = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            for part, item in flatten(value, separator).items():
                found[f"{name}{separator}{part}"] = item
        else:
            found[name] = value
    return found


def numbers(record: Record, separator: str = ".") -> Numbers:
    """Returns the numbers of a step or an evaluation by name, without those that are not finite or
    too large for float32.
    """
    found = {}
    for name, value in flatten(record, separator).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and abs(value) < 1e38:
            found[name] = float(value)
    return found
