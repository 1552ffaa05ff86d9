"""The models of a run at any step: from its newest checkpoint before, and the recorded updates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.errors import ConfigError
from common.settings.config import Config, from_validation
from common.wire.schemas import Group
from learning.ranks import Ranks
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.observe.audit import AuditedStart, AuditedStep, AuditRecord, audited_step
from trainer.observe.group_files import RecordedGroup, read_trained
from trainer.policy import checkpoint
from trainer.policy.critic import ValueFunction, value_function
from trainer.policy.learn import learn
from trainer.policy.policy import Policy, PolicyUpdate
from trainer.policy.reference import Reference

_MAY_CHANGE = (
    "state_dir",
    "data",
    "evaluation",
    "trackers",
    "replay",
    "reward",
    "rollout",
    "environment",
    "runtime",
    "max_body_mb",
)
"""Settings that the updates of a step do not read."""
_OF_TRAINER_MAY_CHANGE = (
    "max_steps",
    "num_epochs",
    "max_staleness",
    "when_stale",
    "eval_every",
    "eval_samples",
    "eval_k",
    "eval_pass_samples",
    "checkpoint_every",
    "keep_checkpoints",
    "keep_groups_mb",
    "resume",
    "run_dir",
    "port",
    "wait_timeout_s",
    "weight_sync",
    "service_timeout_s",
    "publish_timeout_s",
    "lost_after_s",
    "max_failed_groups",
)


@dataclass(frozen=True)
class Reexecuted:
    """A step that was re-executed."""

    batch: Batch
    """With the columns that were computed again."""
    update: PolicyUpdate
    line: AuditedStep
    """The line that a run would have recorded."""


def config_of(start: AuditedStart, run_dir: Path, device: str) -> Config:
    """Returns the settings of an attempt, for this directory and device. Raises ConfigError."""
    content = dict(start.config)
    content["trainer"] = content["trainer"] | {"run_dir": str(run_dir), "device": device}
    try:
        return Config(**content)
    except ValidationError as error:
        raise from_validation(error) from None


def recorded_batch(run_dir: Path, line: AuditedStep) -> list[RecordedGroup]:
    """Returns the groups of a step in the order in which they were trained on.

    Raises ConfigError when the file of the groups is missing, damaged or of another attempt.
    """
    groups = read_trained(run_dir, line.step)
    ids = [item.group.id for item in groups]
    if ids != line.groups:
        raise ConfigError(
            f"the groups of step {line.step} are others, or in another order, than the audit "
            "record says",
            field=f"groups/step_{line.step:06d}.zip",
            value=_first_difference(line.groups, ids),
            remedy="restore that file and audit.jsonl from one copy of the run directory",
        )
    return groups


def batch_of(groups: list[RecordedGroup], config: Config, step: int) -> Batch:
    """Returns the batch of the update after `step` steps, without computed columns."""
    items = [TrainingGroup(item.group, item.weight, item.reused) for item in groups]
    return Batch.of(items, config, step)


class History:
    """The models of a run, which `advance` takes through the recorded steps. Every rank has one.

    Args:
        record: the audit record of the run.
        run_dir: its directory.
        config: the settings of the attempt that made the steps.
        ranks: this rank.
        first: the models begin at the newest checkpoint of at most this step.

    Raises ConfigError when the models cannot be loaded.
    """

    def __init__(
        self, record: AuditRecord, run_dir: Path, config: Config, ranks: Ranks, first: int
    ) -> None:
        self._record = record
        self._run_dir = run_dir
        self._config = config
        newest = checkpoint.newest(run_dir / "checkpoints", at_most=first)
        self.saved: Path | None = ranks.broadcast(newest)
        """The checkpoint; None for the model that the run began with."""
        self.policy: Policy
        self.reference: Reference
        self.critic: ValueFunction
        self._ranks = ranks

    def changed_file(self) -> str:
        """Returns the name of a file of the checkpoint that has changed since it was written; empty
        when there is none. A collective.
        """
        found = ""
        if self.saved is not None and self._ranks.is_rank_zero:
            found = checkpoint.changed_file(self.saved)
        return self._ranks.broadcast(found)

    def load(self) -> None:
        """Loads the models. A collective."""
        if self.saved is None:
            self.policy = Policy(self._config, self._ranks)
        else:
            body = checkpoint.read_state(self.saved) if self._ranks.is_rank_zero else b""
            state = checkpoint.load_state(self._ranks.broadcast(body), self.saved)
            self.policy = Policy.restore(self._config, self._ranks, self.saved, state)
        self.reference = Reference(self.policy, self.saved)
        self.critic = value_function(self._config, self._ranks)
        self.critic.restore(self.saved)

    def advance(self) -> Reexecuted:
        """Re-executes the next step. A collective. Raises ConfigError when its record is missing or
        it was made with other settings.
        """
        line = self._record.step(self.policy.step + 1)
        start = self._record.start(line)
        other = _other_setting(start.config, self._config.model_dump(mode="json"))
        if other:
            raise ConfigError(
                f"step {line.step} was made with another {other}, and no checkpoint after it is "
                "left",
                field=other,
                value=start.run_id,
                remedy="name a step of that attempt, or keep more checkpoints "
                "(trainer.keep_checkpoints)",
            )
        groups = recorded_batch(self._run_dir, line)
        batch = batch_of(groups, self._config, self.policy.step)
        self.policy.total_steps = line.total_steps
        update, _ = learn(self.policy, self.reference, self.critic, batch)
        found = audited_step(self.policy, self.critic, batch, update, run_id=line.run_id)
        return Reexecuted(batch, update, found)


def fresh(groups: list[RecordedGroup]) -> list[Group]:
    """Returns the groups that were generated for their step, in order."""
    return [item.group for item in groups if not item.reused]


def versions_of(groups: list[Group]) -> list[int]:
    """Returns the weight versions that sampled a token of the groups, oldest first."""
    found: set[int] = set()
    for group in groups:
        for completion in group.completions:
            found.update(version for version, _, _ in completion.weight_versions)
    return sorted(found)


def _other_setting(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Returns a setting of the updates that differs, or an empty text."""
    for section, before in then.items():
        if section in _MAY_CHANGE:
            continue
        after = now.get(section)
        if not isinstance(before, dict) or not isinstance(after, dict):
            if before != after:
                return section
            continue
        for name, value in before.items():
            free = section == "trainer" and name in (*_OF_TRAINER_MAY_CHANGE, "device")
            if not free and after.get(name) != value:
                return f"{section}.{name}"
    return ""


def _first_difference(known: list[str], found: list[str]) -> str:
    """Returns the first found id that is not the known one, or how many were found."""
    for was, is_now in zip(known, found, strict=False):
        if was != is_now:
            return is_now
    return f"{len(found)} groups instead of {len(known)}"
