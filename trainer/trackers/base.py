"""What a tracker is, and what it is told of its run. Its process imports this: nothing heavy here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Cell = str | float | int | bool | None
LIBRARIES = ("tensorboard", "wandb", "mlflow", "trackio")
"""The trackers that have a name of their own, which is also that of their library and of the extra that installs it."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told when it begins."""

    id: str
    """Of this run, the same when it is resumed: a tracker goes on in its run of that id."""
    name: str
    project: str
    directory: Path
    """For what is stored here: `trackers` in the run directory."""
    config: dict[str, Any]
    """The resolved configuration, by section: the hyperparameters."""
    step: int
    """The run goes on after this step: what was tracked of later ones is of an attempt that was interrupted."""

    @property
    def parameters(self) -> dict[str, Cell]:
        """The configuration as `section.name`; what is no number or text as text."""
        return dict(_flat(self.config))


class Tracker(Protocol):
    """One tracker; made with a `RunInfo`, in a process of its own. Any error it raises loses that record alone."""

    where: str
    """Where a person finds the run: an address or a command."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Numbers of a step or an evaluation, named `group/name`."""

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        """Samples or answers, as of this step."""

    def close(self, finished: bool) -> None:
        """Sends what is left. `finished`: the run has come to its end, and was not interrupted."""


def _flat(values: Mapping[str, Any], prefix: str = "") -> Sequence[tuple[str, Cell]]:
    found: list[tuple[str, Cell]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value if isinstance(value, str | int | float | bool) else str(value)))
    return found
