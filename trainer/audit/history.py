"""The models of a run at any step: from its newest checkpoint before, and the recorded updates."""

from dataclasses import dataclass
from pathlib import Path

from common import Json
from common.errors import ConfigError
from common.process import watchdog
from common.settings.config import Config
from learning.ranks import Ranks
from trainer.algorithms.batch import Batch
from trainer.audit.recorded import RecordedStep
from trainer.observe.audit import AuditedStep, AuditRecord, audited_step
from trainer.policy import checkpoint
from trainer.policy.critic import ValueFunction, value_function
from trainer.policy.learn import learn
from trainer.policy.policy import Policy, PolicyUpdate
from trainer.policy.reference import Reference

_SECTIONS = (
    "model",
    "lora",
    "algorithm",
    "critic",
    "sampling",
    "teacher",
    "trainer",
    "optimizer",
    "parallel",
)
"""The sections whose settings an update reads."""
UNREAD_OF_TRAINER = frozenset(
    {
        "device",
        "port",
        "num_epochs",
        "max_steps",
        "max_staleness",
        "when_stale",
        "keep_groups_mb",
        "run_dir",
        "weight_sync",
    }
)
"""Settings of `trainer` that an update does not read; the record has the total of steps."""


@dataclass(frozen=True)
class Reexecuted:
    """A step that was re-executed."""

    recorded: RecordedStep
    """What the run recorded of it."""
    batch: Batch
    """With the columns that were computed again."""
    update: PolicyUpdate
    line: AuditedStep
    """The line that a run would have recorded."""


class WeightHistory:
    """The models of a run, which `advance` takes through the recorded steps. Every rank has one.

    Args:
        record: the audit record of the run.
        run_dir: its directory.
        config: the settings of the attempt whose step is re-executed.
        ranks: this rank.
        first: the models begin at the newest checkpoint of at most this step.
    """

    policy: Policy
    """After `load`, like the next two."""
    reference: Reference
    critic: ValueFunction

    def __init__(
        self, record: AuditRecord, run_dir: Path, config: Config, ranks: Ranks, first: int
    ) -> None:
        self._record = record
        self._run_dir = run_dir
        self._config = config
        self._ranks = ranks
        # Only what rank 0 finds counts: another node may not have the directory.
        newest = checkpoint.newest(run_dir / "checkpoints", at_most=first)
        self.saved: Path | None = ranks.broadcast(newest)
        """The checkpoint; None for the model that the run began with."""

    @property
    def origin(self) -> str:
        """What the models are loaded from, in messages."""
        return self.saved.name if self.saved else f"the initial model {self._config.model.name}"

    def changed_file(self) -> str:
        """Returns the name of a file of the checkpoint that has changed since it was written; empty
        when there is none. A collective.
        """
        found = ""
        if self.saved is not None and self._ranks.is_rank_zero:
            found = checkpoint.changed_file(self.saved)
        return self._ranks.broadcast(found)

    def load(self) -> None:
        """Loads the models. A collective. Raises ConfigError when they cannot be loaded."""
        watchdog.at(f"loading {self.origin}")
        if self.saved is None:
            self.policy = Policy(self._config, self._ranks)
        else:
            body = checkpoint.read_state(self.saved) if self._ranks.is_rank_zero else b""
            state = checkpoint.load_state(self._ranks.broadcast(body), self.saved)
            self.policy = Policy.restore(self._config, self._ranks, self.saved, state)
        self.reference = Reference(self.policy, self.saved)
        self.critic = value_function(self._config, self._ranks, self.saved)

    def advance(self) -> Reexecuted:
        """Re-executes the next step. A collective. Raises ConfigError when its record is missing,
        or it was made with other settings.
        """
        recorded = RecordedStep.read(self._run_dir, self._record, self.policy.step + 1)
        self._check_settings(recorded)
        batch = recorded.batch(self._config)
        self.policy.assign(batch)
        # The learning rate decays towards it, and a resumed run may have another.
        self.policy.total_steps = recorded.line.total_steps
        update, _ = learn(self.policy, self.reference, self.critic, batch)
        self.policy.step += 1
        self.reference.refresh(self.policy)
        line = audited_step(self.policy, self.critic, batch, update, run_id=recorded.line.run_id)
        return Reexecuted(recorded, batch, update, line)

    def _check_settings(self, recorded: RecordedStep) -> None:
        """Raises ConfigError when another attempt made this step, with settings that change its
        update.
        """
        then = _of_updates(recorded.start.config)
        now = _of_updates(self._config.model_dump(mode="json"))
        for name in then:
            if then[name] != now.get(name):
                raise ConfigError(
                    f"step {recorded.step} was made with {name} {then[name]}, the re-executed step "
                    f"with {now.get(name)}, and there is no checkpoint between them",
                    field="checkpoint.keep",
                    value=self.origin,
                    remedy="restore the checkpoint that the later attempt began with",
                )


def _of_updates(config: Json) -> Json:
    """Returns the settings that an update reads, by name."""
    found: Json = {
        "seed": config["seed"],
        "reproducible": config["reproducible"],
        "environment.turn_discount": config["environment"]["turn_discount"],
        "reward.functions": config["reward"]["functions"],  # their weights, for GDPO
    }
    for section in _SECTIONS:
        for name, value in config[section].items():
            # Another `micro_batch_tokens` changes the order of sums; another port changes nothing.
            if section != "trainer" or name not in UNREAD_OF_TRAINER:
                found[f"{section}.{name}"] = value
    return found


def models_after(record: AuditRecord, run_dir: Path, config: Config, step: int) -> WeightHistory:
    """Returns the models as they were after a step, in one process. Raises ConfigError."""
    history = WeightHistory(record, run_dir, config, Ranks.alone(config), first=step)
    history.load()
    while history.policy.step < step:
        watchdog.at(f"executing step {history.policy.step + 1} again")
        history.advance()
    return history
