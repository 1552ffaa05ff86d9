"""What a tracker is, what it gets to know about its run, and whether it can be used here."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from common.errors import ConfigError
from common.imports import import_callable
from common.sections import TrackersSection

Cell = str | float | int | bool | None
LIBRARIES = ("tensorboard", "wandb", "mlflow", "trackio")
"""The trackers with a name of their own, which is also that of their library and of the extra that installs it."""
_WANDB_KEY = "WANDB_API_KEY"


@dataclass(frozen=True)
class RunInfo:
    """What a tracker gets when it begins."""

    id: str
    """The same when the run is resumed: a tracker goes on in its run of that id."""
    name: str
    project: str
    directory: Path
    """`trackers` in the run directory, for files."""
    config: dict[str, Any]
    """The resolved configuration, by section: the hyperparameters."""
    step: int
    """The run goes on after this step; later ones that were tracked are of an attempt that was interrupted."""

    @property
    def parameters(self) -> dict[str, Cell]:
        """The configuration as `section.name`; what is no number, text or truth value as text."""
        return dict(_flat(self.config))


class Tracker(Protocol):
    """One tracker; made with a `RunInfo` and called from one thread. An error it raises loses that record alone."""

    where: str
    """Where a person finds the run: an address or a command."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Records numbers of a step or an evaluation, named `group/name`."""

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        """Records samples or answers, as of this step."""

    def close(self, finished: bool) -> None:
        """Sends what is left. `finished`: the run has come to its end, and was not interrupted."""


def load(name: str) -> Callable[[RunInfo], Tracker]:
    """The class of a tracker: one of this package, or `package.module:Class`."""
    return import_callable(f"trainer.trackers.to_{name}:Made" if name in LIBRARIES else name, "trackers.names")


def wandb_offline() -> bool:
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
    if "wandb" in settings.names and not wandb_offline() and not os.environ.get(_WANDB_KEY):
        remedy = "put it into the environment of the trainer (a secret of the job group), or WANDB_MODE=offline"
        raise ConfigError("wandb needs a key to send anything", field=_WANDB_KEY, remedy=remedy)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Cell]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str | int | float | bool) else str(value)
