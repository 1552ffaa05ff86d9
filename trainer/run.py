"""A run: its parts, and what happens around a step. `trainer/build.py` composes it.

| part | what it does | code |
|---|---|---|
| `rollouts` | prompts → graded groups in the replay-buffer → batches | `trainer/rollouts/` |
| `policy` | the model, its optimiser and its updates | `trainer/policy/policy.py` |
| `reference` | the model that the KL term compares with | `trainer/policy/reference.py` |
| `critic` | values and their updates | `trainer/policy/critic.py` |
| `weights` | publishes the policy's weights to the engines | `trainer/weights/` |
| `lease` | the GPUs that trainer and engines share | `trainer/weights/gpu_lease.py` |
| `evaluator` | accuracy on the held-out problems | `trainer/evaluation/` |
| `log` | run directory, metrics, trackers | `trainer/observe/` |
| `audit` | what `rlhf audit` needs to re-execute a step | `trainer/observe/audit.py` |
| `checkpoints` | the run on disk | `trainer/policy/checkpoint.py` |

No part depends on the run; rollouts, weights, evaluator and log do not depend on one another.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError, ServiceError
from common.process import watchdog
from common.process.run_lock import RunLock
from common.settings.config import Config
from learning.out_of_memory import exhausted_memory
from learning.ranks import Ranks
from trainer.algorithms.batch import Batch
from trainer.evaluation.evaluation import Evaluation
from trainer.evaluation.evaluator import Evaluator
from trainer.observe.audit import Audit
from trainer.observe.run_log import RunLog
from trainer.policy.checkpoint import Checkpoints, RunState
from trainer.policy.critic import CriticMetrics, ValueFunction
from trainer.policy.identity import Identity
from trainer.policy.policy import Policy, PolicyUpdate
from trainer.policy.reference import Reference
from trainer.policy.trained_prompts import TRAINED_PROMPTS, TrainedPrompts
from trainer.rollouts.prompt_cursor import PromptProgress
from trainer.rollouts.rollouts import Rollouts
from trainer.timing import WAITS_FOR_BATCH, StageClock
from trainer.weights.gpu_lease import GpuLease
from trainer.weights.sync import WeightSync

_TRAINING = threading.Lock()


@contextmanager
def only_run(run_dir: Path) -> Iterator[None]:
    """Raises ConfigError if another thread of this process trains: both runs would draw their
    random numbers from one generator, and one would end the other.
    """
    if not _TRAINING.acquire(blocking=False):
        raise ConfigError(
            "another run is training in this process",
            field="trainer.run_dir",
            value=run_dir,
            remedy="train one after the other, or each in a process of its own",
        )
    try:
        yield
    finally:
        _TRAINING.release()


class OutOfMemory(ServiceError):
    """There is no memory left for the training loop; the message says what takes less."""

    code = "out_of_memory"


class Listener:
    """Receives the events of a run in one process. This base class ignores them."""

    def on_event(self, run: "Run", event: str, **about: Any) -> None:
        """Handles an event on rank 0; `about` holds its data.

        The events are `train_begin`, `step_begin`, `step_end`, `log` (`logs`, the `batch` of the
        step), `evaluating` (before an evaluation), `evaluate` (`metrics`), `save` (`checkpoint`)
        and `train_end`.
        """

    def in_user_names(self, text: str, settings: Iterable[str]) -> str:
        """Returns a text with the names that its settings have in the user's own interface."""
        return text

    def measured(self, step: int) -> dict[str, float]:
        """Returns the caller's measurements since the last call, for the record of `step`."""
        return {}


@dataclass
class Run:
    """The parts of a run on this rank, as the training loop uses them.

    Some are rank 0's alone, and None on the others.
    """

    config: Config
    ranks: Ranks
    policy: Policy
    reference: Reference
    critic: ValueFunction
    checkpoints: Checkpoints
    weights: WeightSync
    lease: GpuLease
    total_steps: int
    rollouts: Rollouts | None = None
    """Rank 0 only."""
    audit: Audit | None = None
    """None without `trainer.audit`."""
    evaluator: Evaluator | None = None
    """Rank 0 only."""
    log: RunLog | None = None
    """Rank 0 only."""
    clock: StageClock = field(default_factory=StageClock)
    run_id: str = ""
    lock: RunLock | None = None
    """The lock on the run directory; rank 0 only."""
    trained_prompts: TrainedPrompts = field(default_factory=TrainedPrompts.none)
    """The prompts that the model was trained on; only rank 0's are saved."""
    identity: Identity = field(default_factory=dict)
    """The settings that all attempts share; rank 0 only."""
    listener: Listener = field(default_factory=Listener)
    tokenizer: Any = None
    """Rank 0 only."""
    flush: Callable[[], None] = lambda: None
    """Makes the state of every service durable: SkyPilot does not announce the end of the job group
    to the services."""

    def publish_first(self) -> None:
        """Publishes the weights that the run begins with, and evaluates those of a new run. A
        collective.
        """
        if self.evaluator is not None:
            self.evaluator.prepare()
        with self.lease.training(self.clock):
            weights = self.weights.gather(self.policy)
        self.weights.publish(weights, self.policy.step).result()
        if self.policy.step == 0:
            self._evaluate(self.config.evaluation.pass_samples)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Collects groups and records steps inside the block."""
        step = self.policy.step
        total_steps = self.total_steps
        self.listener.on_event(self, "train_begin")  # which may end the run at once
        with ExitStack() as stack:
            stack.enter_context(self.checkpoints)
            if self.log is not None:
                stack.enter_context(self.log.training(step, total_steps))
            if self.rollouts is not None:
                stack.enter_context(self.rollouts.collecting(step, total_steps))
            try:
                yield
                self.weights.wait()
            except Exception as error:
                memory = exhausted_memory(error)
                if not memory:
                    raise
                raise self._out_of_memory(memory, error) from error
            finally:
                self.weights.close()

    def _out_of_memory(self, memory: str, error: Exception) -> OutOfMemory:
        remedy = "lower it, set trainer.activation_checkpointing"
        if memory != "GPU memory":
            remedy = "give its process more memory and threads (pod limits, ulimit), lower it"
        return OutOfMemory(
            f"rank {self.ranks.rank} is out of {memory} in step {self.policy.step + 1}: {error}",
            field="trainer.micro_batch_tokens",
            value=self.policy.config.trainer.pass_tokens,
            remedy=f"{remedy}, shorten answers (sampling.max_new_tokens), or spread the models "
            "over more ranks (parallel.shard_size); `rlhf doctor` computes what fits",
            settings=("trainer.activation_checkpointing", "sampling.max_new_tokens"),
        )

    def begin_step(self) -> None:
        """Raises CheckpointFailed if the last checkpoint was not written, ServiceError if another
        run took the directory.
        """
        self.checkpoints.check()
        if self.lock is not None:
            self.lock.check()
        self.listener.on_event(self, "step_begin")
        watchdog.at(f"{WAITS_FOR_BATCH} of step {self.policy.step + 1}")

    def end_step(self, batch: Batch, update: PolicyUpdate, critic: CriticMetrics | None) -> None:
        """Records the step, then writes a checkpoint if one is due, so that a run that resumes from
        it has the step's line.
        """
        record: Mapping[str, Any] = {}
        if self.log is not None:
            record = self.log.step(
                self.policy.step,
                batch,
                update,
                critic,
                weights_checksum=self.weights.checksum,
            )
        self.checkpoint()
        self.listener.on_event(self, "step_end")
        self.listener.on_event(self, "log", logs=record, batch=batch)

    def stop(self) -> None:
        """Ends the run after the current step; between steps, at once."""
        self.total_steps = min(self.total_steps, self.policy.step)

    def evaluate_now(self, pass_samples: int = 0) -> None:
        """Evaluates the current weights, unless that was done."""
        last = self._evaluation
        if last is None or last.step != self.policy.step:
            self._evaluate(pass_samples)

    def save_now(self) -> Path:
        """Returns the checkpoint of the current step, which is written unless there is one. A
        collective.
        """
        self.checkpoints.wait()  # for one that is being written: rewriting it could lose it
        saved = self.checkpoints.newest()
        if saved is not None and saved.name == self.checkpoints.name(self.policy.step):
            return saved
        return self._save()

    @property
    def _evaluation(self) -> Evaluation | None:
        """The newest evaluation, which rank 0 has."""
        return None if self.evaluator is None else self.evaluator.last

    def evaluate(self) -> None:
        """Evaluates every `evaluation.every` steps, but not after the last one."""
        if self._is_due(self.config.evaluation.every):
            self._evaluate(pass_samples=0)

    def checkpoint(self) -> None:
        """Saves every `checkpoint.every` steps, but not after the last one. A collective."""
        if self._is_due(self.config.checkpoint.every):
            watchdog.at(f"the checkpoint of step {self.policy.step}")
            self._save()

    def _is_due(self, every: int) -> bool:
        """Whether something that happens every `every` steps (0: never) is due now. Never after the
        last step: `finish` does it then.
        """
        step = self.policy.step
        return every > 0 and step % every == 0 and step < self.total_steps

    def _evaluate(self, pass_samples: int) -> None:
        # Engines must serve the step that is evaluated.
        self.weights.wait()
        if self.evaluator is None or self.log is None:
            return  # rank 0 evaluates
        if self.evaluator.has_problems:
            self.listener.on_event(self, "evaluating")
        with self.log.evaluating():
            evaluation = self.evaluator.evaluate(self.policy.step, pass_samples)
        if evaluation:
            self.log.evaluation(evaluation)
            self.listener.on_event(self, "evaluate", metrics=evaluation.summary())

    def _save(self) -> Path:
        if self.lock is not None:
            self.lock.check()
        self.checkpoints.wait()
        progress = self.rollouts.progress if self.rollouts else PromptProgress()
        step = self.policy.step

        gathered = self.checkpoints.gathered
        # Parked tensors come back to the GPU for the copy.
        with self.lease.borrowed():
            snapshots = (
                self.policy.snapshots(gathered)
                | self.reference.snapshots(gathered)
                | self.critic.snapshots(gathered)
            )

        evaluated = self._evaluation
        if evaluated is not None and evaluated.step != step:
            evaluated = None
        state = RunState(
            step=step,
            position=progress.position,
            run_id=self.run_id,
            kl_coef=self.policy.kl_coef,
            finished=progress.finished,
            accuracy=evaluated.accuracy if evaluated else None,
            mean_reward=evaluated.mean_reward if evaluated else None,
            identity=self.identity,
        )
        saved = self.checkpoints.save(
            state, snapshots, {TRAINED_PROMPTS: self.trained_prompts.file()}
        )
        self.listener.on_event(self, "save", checkpoint=saved)
        return saved

    def finish(self) -> Path:
        """Evaluates, saves the policy, reports and flushes the services; returns the checkpoint. A
        collective.
        """
        watchdog.at("the end of the run")
        self.evaluate_now(self.config.evaluation.pass_samples)
        saved = self.save_now()
        self.checkpoints.wait()
        if self.log is not None:
            self.log.report(saved)
        self.flush()
        self.listener.on_event(self, "train_end")
        return saved
