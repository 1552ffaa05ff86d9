"""A step as the run recorded it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from common import Json
from common.errors import ConfigError
from common.settings.config import Config, from_validation
from common.wire.schemas import Completion, Group
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.audit.comparison import first_difference
from trainer.observe.audit import AuditedStart, AuditedStep, AuditRecord
from trainer.observe.group_files import RecordedGroup, read_trained


@dataclass(frozen=True)
class RecordedStep:
    """The record of one step: its line, its attempt and its groups."""

    line: AuditedStep
    start: AuditedStart
    """What was recorded when the attempt that made the step began."""
    groups: list[RecordedGroup]
    """In the order in which they were trained on."""

    @classmethod
    def read(cls, run_dir: Path, record: AuditRecord, step: int) -> "RecordedStep":
        """Reads the record of a step. Raises ConfigError when a part of it is missing, damaged or
        of another attempt.
        """
        line = record.step(step)
        groups = read_trained(run_dir, step)
        ids = [item.group.id for item in groups]
        at = first_difference(line.groups, ids)
        if at is not None:
            raise ConfigError(
                f"the groups of step {step} are not those of the audit record, or not in its order",
                field=f"groups/step_{step:06d}.zip",
                value=(ids[at:] or [f"{len(ids)} groups instead of {len(line.groups)}"])[0],
                remedy="restore that file and audit.jsonl from one copy of the run directory",
            )
        return cls(line, record.start(line), groups)

    @property
    def step(self) -> int:
        """The number of the step."""
        return self.line.step

    @cached_property
    def fresh(self) -> list[Group]:
        """The groups that were generated for this step. Reused ones were part of earlier steps."""
        return [item.group for item in self.groups if not item.reused]

    @cached_property
    def completions(self) -> list[Completion]:
        """The completions of the batch: its rows."""
        return [completion for item in self.groups for completion in item.group.completions]

    @cached_property
    def names(self) -> list[str]:
        """The name of every completion of the batch, in messages."""
        return [
            f"group {number} ({item.group.id}), completion {index}"
            for number, item in enumerate(self.groups)
            for index in range(len(item.group.completions))
        ]

    def batch(self, config: Config) -> Batch:
        """Returns the batch of the step, without computed columns."""
        items = [TrainingGroup(item.group, item.weight, item.reused) for item in self.groups]
        return Batch.of(items, config, self.step - 1)


def config_of(start: AuditedStart, run_dir: Path, device: str = "") -> Config:
    """Returns the settings of an attempt, for this directory and device; without one, for the CPU
    if the attempt ran on it, and else for any GPU. Raises ConfigError.
    """
    device = device or ("cpu" if start.setup.device == "cpu" else "auto")
    content: Json = dict(start.config)
    # The run may have been moved, and its GPU may be another one here.
    content["trainer"] = content["trainer"] | {"run_dir": str(run_dir), "device": device}
    functions = content["reward"]["functions"]
    is_callers = "rewards" in start.given
    if is_callers:
        # Objects, whose names are no functions that a setting could name.
        content["reward"] = content["reward"] | {"functions": ["math"]}
    try:
        config = Config(**content)
        if is_callers:
            entries: list[Json] = [
                {"name": each} if isinstance(each, str) else each for each in functions
            ]
            weights = {entry["name"]: entry.get("weight", 1.0) for entry in entries}
            config.reward = config.reward.for_objects(weights)
        return config
    except ValidationError as error:
        reason = from_validation(error)
        made_by = start.setup.packages.get("rlhf-math", "another version")
        raise ConfigError(
            f"this version cannot read the settings of the run: {reason.message}",
            field=reason.field,
            value=reason.value,
            remedy=f"use the version that made it (rlhf-math {made_by})",
        ) from None
