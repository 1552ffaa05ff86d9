"""A run and its parts, composed here both for the job group and for training in one process.

    rollouts     prompts → graded groups in the replay buffer → batches    trainer/rollouts/ policy
    the model, its optimiser and its updates                  trainer/policy/policy.py reference
    the model that the KL term compares with                  trainer/policy/reference.py critic
    values and their updates, here or in the critic-server    trainer/policy/critic.py weights
    publishing of the policy's weights to the engines         trainer/weights/ evaluator    accuracy
    on the held-out problems                         trainer/rollouts/evaluation.py log          run
    directory, metrics, trackers                          trainer/observe/ checkpoints  the run on
    disk                                           trainer/policy/checkpoint.py

No part depends on the run; rollouts, weights, evaluator and log do not depend on one another.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from common.clients.base import Client, wait_healthy
from common.process import watchdog
from common.process.logs import set_run
from common.process.loop_thread import LoopThread
from common.process.metrics import Metrics
from common.process.run_lock import RunLock
from common.process.topology import TRAINER
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config
from learning.ranks import Ranks
from trainer.observe.prometheus import TrainerMetrics
from trainer.observe.run_dir import Recorder, tell
from trainer.observe.run_log import RecordedRun, RunLog
from trainer.observe.timing import StageClock
from trainer.policy.checkpoint import Checkpoints, RunState, tokenizer_files
from trainer.policy.critic import ValueFunction, value_function
from trainer.policy.identity import Facts, identity
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference
from trainer.policy.scorer import load_tokenizer, stop_token_ids
from trainer.rollouts.evaluation import Evaluator, ServedEvaluator
from trainer.rollouts.prompt_cursor import PromptProgress
from trainer.rollouts.rollouts import Rollouts, ServedRollouts
from trainer.rollouts.services import Services, flush_all
from trainer.rollouts.teacher import Teacher
from trainer.trackers.base import check
from trainer.weights.adapters import static_files
from trainer.weights.sync import PublishedWeights, WeightPublisher, WeightSync
from trainer.weights.turns import Resident, SharedTurns, Sleepers, Turns


@dataclass
class Opening:
    """The parts of rank 0 that a backend needs to start the services."""

    config: Config
    run_dir: Path
    run_id: str
    """Names this attempt, so that weights of an earlier attempt are not mistaken for its own."""
    policy: Policy
    tokenizer: Any
    static_files: list[Path]
    """Config and tokenizer files that make published weights a complete version."""
    say: Callable[[str], None]
    """Shows a line to the user."""
    metrics: TrainerMetrics
    registry: Metrics
    """The trainer's `/metrics` page."""
    loop: LoopThread
    """Runs the clients."""
    stack: ExitStack
    """Closes everything that the backend starts."""


class Backend(Protocol):
    """The services of a run and the path of weights to the engines. Only rank 0 uses it."""

    console: Console
    """For progress and results."""

    def start(self, opening: Opening) -> tuple[Services, WeightPublisher]:
        """Starts the services, or connects to them; returns their clients and the weight
        publisher.
        """

    def agents(self) -> list[Client]:
        """Returns clients of the rollout nodes' agents, which are flushed at the end."""

    def engine_gpus(self) -> int | None:
        """Returns the number of GPUs that engines hold now, except those shared with the trainer;
        None when unknown.
        """


class Listener:
    """Receives the events of a run in one process. This base class ignores them."""

    def on_event(self, run: "Run", event: str, **about: Any) -> None:
        """Handles an event on rank 0; `about` holds its data.

        The events are `train_begin`, `step_begin`, `step_end`, `log` (`logs`), `evaluating` (before
        an evaluation), `evaluate` (`metrics`), `save` (`checkpoint`) and `train_end`.
        """

    def measured(self, step: int) -> dict[str, float]:
        """Returns the caller's measurements since the last call, for the record of `step`."""
        return {}


@dataclass
class Run:
    """The parts of a run on this rank, as the training loop uses them.

    Ranks above 0 have the default parts, which only take part in collective calls.
    """

    config: Config
    ranks: Ranks
    policy: Policy
    reference: Reference
    critic: ValueFunction
    checkpoints: Checkpoints
    rollouts: Rollouts
    weights: WeightSync
    turns: Turns
    evaluator: Evaluator = field(default_factory=Evaluator)
    log: RunLog = field(default_factory=RunLog)
    clock: StageClock = field(default_factory=StageClock)
    run_id: str = ""
    lock: RunLock | None = None
    """The lock on the run directory; rank 0 only."""
    identity: Facts = field(default_factory=dict)
    """The settings that all attempts share; rank 0 only."""
    total_steps: int = 0
    listener: Listener = field(default_factory=Listener)
    tokenizer: Any = None
    """Rank 0 only."""
    collecting_cpu: Callable[[], float] = lambda: 0.0
    """Returns the CPU seconds of rank 0's collecting thread."""
    flush: Callable[[], None] = lambda: None
    """Makes the state of every service durable: SkyPilot does not announce the end of the job group
    to the services."""

    @classmethod
    def build(
        cls,
        config: Config,
        ranks: Ranks,
        run_dir: Path,
        lock: RunLock | None,
        backend: Backend,
        stack: ExitStack,
        listener: Listener | None = None,
    ) -> "Run":
        """Loads or resumes the models, starts the services and publishes the weights. A collective.

        Rank 0 holds the `lock` of `run_dir`, which names the run; `stack` closes everything. Raises
        ConfigError or another ServiceError when the run cannot begin.
        """
        run_id = lock.run if lock else ""
        if ranks.is_rank_zero:
            check(config.trackers)
            PromptStyle.of(config).check(load_tokenizer(config.model))
        watchdog.at("loading the model")
        policy, state, saved = Policy.resume(config, ranks, run_dir)
        reference, keep = Reference(policy, saved), config.trainer.keep_checkpoints
        checkpoints = Checkpoints(
            run_dir / "checkpoints", ranks, keep, lambda: tokenizer_files(run_dir / "model")
        )
        critic, rollouts = value_function(config, ranks), Rollouts(ranks)
        turns = SharedTurns(ranks, lambda: run.resident()) if config.rollout.colocate else Turns()
        parts = (policy, reference, critic, checkpoints, rollouts, WeightSync(turns), turns)
        run = cls(config, ranks, *parts, run_id=run_id, lock=lock, listener=listener or Listener())
        watchdog.at("waiting for the services and the first publishing")
        known = policy.step > 0 or (config.trainer.resume and checkpoints.directory.is_dir())
        metrics = (
            run._build_rank_zero(run_dir, state, backend, stack) if ranks.is_rank_zero else None
        )
        run.critic.restore(saved)
        run.total_steps = policy.total_steps = run.rollouts.prepare(policy.step, known)
        if metrics is not None:  # all checks have passed: lines of lost steps may be removed
            recorder = stack.enter_context(
                Recorder(run_dir, config, backend.console, policy.step, metrics.tracked, run_id)
            )
            own = ranks.world_size if ranks.on_gpu else 0

            def gpus() -> int | None:
                return None if (more := backend.engine_gpus()) is None else own + more

            about = (run.listener.measured, gpus, run.collecting_cpu, policy.scorer.dropout)
            run.log = RecordedRun(config, recorder, metrics, run.clock, policy.step, *about)
            if policy.step >= run.total_steps:
                raised = (
                    "trainer.num_epochs"
                    if config.trainer.max_steps is None
                    else "trainer.max_steps"
                )
                remedy = f"name another RUN_DIR for a new run, or raise {raised} to continue"
                recorder.say(
                    f"already finished: all {run.total_steps} steps were trained before, and their result is below; {remedy}"
                )
            checkpoints.directory.mkdir(
                exist_ok=True
            )  # tells the next attempt that the stored experience is its own
        run.evaluator.prepare()
        run.weights.push(policy).result()
        if policy.step == 0:
            run._evaluate(config.trainer.eval_pass_samples)
        return run

    def _build_rank_zero(
        self, run_dir: Path, state: RunState | None, backend: Backend, stack: ExitStack
    ) -> TrainerMetrics:
        """Replaces the default parts, except the log, by rank 0's; waits until the services are
        ready.
        """
        config, policy, run_id = self.config, self.policy, self.run_id
        set_run(run_id)
        metrics = TrainerMetrics(registry := Metrics(TRAINER))
        say = partial(tell, backend.console)
        if caution := config.algorithm.caution:
            say(f"warning: {caution}", level=logging.WARNING)
        say(
            f"run directory {run_dir}"
            + (f", continuing after step {policy.step}" if policy.step else "")
        )
        loop = stack.enter_context(LoopThread())
        self.collecting_cpu = loop.cpu_seconds
        self.tokenizer = tokenizer = load_tokenizer(config.model)
        static = static_files(config, policy.model, tokenizer, run_dir / "model")
        opening = Opening(
            config, run_dir, run_id, policy, tokenizer, static, say, metrics, registry, loop, stack
        )
        services, publisher = backend.start(opening)
        if config.teacher.url:
            services.teacher = Teacher(config.teacher)
            stack.callback(lambda teacher: loop.call(teacher.close()), services.teacher)
        waiting = (
            partial(say, level=logging.WARNING) if backend.console.quiet else say
        )  # never wait in silence
        loop.call(wait_healthy(services.all(), config.trainer.wait_timeout_s, waiting))
        if services.teacher:
            loop.call(services.teacher.check(tokenizer, config.trainer.wait_timeout_s))
        prompter = Prompter(
            tokenizer,
            PromptStyle.of(config),
            stop_token_ids(policy.model, tokenizer, config.sampling.stop_token_ids),
        )
        progress = PromptProgress(state.position, state.finished) if state else PromptProgress()
        self.identity = identity(config)
        self.clock = StageClock(metrics.took)
        self.critic = value_function(config, self.ranks, services.critic, loop, run_id)
        vocabulary = policy.model.get_input_embeddings().num_embeddings
        self.rollouts = ServedRollouts(
            config, self.ranks, services, prompter, self.clock, loop, run_id, progress, vocabulary
        )
        if isinstance(self.turns, SharedTurns):
            assert isinstance(publisher, Sleepers), "backends with GPUs to share have one"
            self.turns.engines = publisher
        self.weights = PublishedWeights(
            publisher, self.clock, config.trainer.max_staleness > 0, self.turns
        )
        self.evaluator = ServedEvaluator(config, services, prompter, loop)

        def flush() -> None:
            agents = backend.agents()
            loop.call(flush_all((*services.stateful(), *agents)))
            for client in agents:
                loop.call(client.close())

        self.flush = flush
        return metrics

    def resident(self) -> list[Resident]:
        """Returns the models and optimizers that this rank keeps on its GPU during an update."""
        return [part.resident() for part in (self.policy, self.reference, self.critic)]

    @contextmanager
    def training(self) -> Iterator[None]:
        """Collects groups and records steps inside the block."""
        step = self.policy.step
        log = self.log.training(step, self.total_steps, self.rollouts.drops)
        self.listener.on_event(self, "train_begin")
        with self.checkpoints, log, self.rollouts.collecting(step, self.total_steps):
            try:
                yield
                self.weights.wait()
            finally:
                self.weights.close()

    def begin_step(self) -> None:
        """Seeds the step's randomness, such as dropout.

        Raises CheckpointFailed if the last checkpoint was not written, ServiceError if another run
        took the directory.
        """
        self.checkpoints.check()
        if self.lock is not None:
            self.lock.check()
        torch.manual_seed((self.policy.seed * 4096 + self.ranks.rank) % 2**63)
        self.listener.on_event(self, "step_begin")
        watchdog.at(f"waiting for the batch of step {self.policy.step + 1}")

    def end_step(self, record: Mapping[str, Any]) -> None:
        """Writes a checkpoint if one is due, after the step's line, so that a run that resumes from
        it has the line.
        """
        self.checkpoint()
        self.listener.on_event(self, "step_end")
        self.listener.on_event(self, "log", logs=record)

    def stop(self) -> None:
        """Ends the run after the current step, or at once between steps."""
        self.total_steps = min(self.total_steps, self.policy.step)

    def evaluate_now(self, pass_samples: int = 0) -> None:
        """Evaluates the current weights, unless that was done."""
        if self.evaluator.last is None or self.evaluator.last.step != self.policy.step:
            self._evaluate(pass_samples)

    def save_now(self) -> Path:
        """Returns the checkpoint of the current step, which is written unless there is one. A
        collective.
        """
        self.checkpoints.wait()  # for one that is being written: rewriting it could lose it
        saved = self.checkpoints.newest()
        return (
            saved
            if saved is not None and saved.name == self.checkpoints.name(self.policy.step)
            else self._save()
        )

    def evaluate(self) -> None:
        """Evaluates every `trainer.eval_every` steps, but not after the last one."""
        every, step = self.config.trainer.eval_every, self.policy.step
        if every and step % every == 0 and step < self.total_steps:
            self._evaluate(pass_samples=0)

    def _evaluate(self, pass_samples: int) -> None:
        self.weights.wait()
        if self.evaluator.has_problems:
            self.listener.on_event(self, "evaluating")
        with self.log.evaluating():
            evaluation = self.evaluator.evaluate(self.policy.step, pass_samples)
        if evaluation:
            self.log.evaluation(evaluation)
            self.listener.on_event(self, "evaluate", metrics=evaluation.summary())

    def checkpoint(self) -> None:
        """Saves every `trainer.checkpoint_every` steps, but not after the last one. A
        collective.
        """
        every, step = self.config.trainer.checkpoint_every, self.policy.step
        if every and step % every == 0 and step < self.total_steps:
            watchdog.at(f"the checkpoint of step {step}")
            self._save()

    def _save(self) -> Path:
        self.checkpoints.wait()
        alone, step, progress = self.checkpoints.alone, self.policy.step, self.rollouts.progress
        with self.turns.borrowed():
            parts = (
                self.policy.snapshots(alone)
                | self.reference.snapshots(alone)
                | self.critic.snapshots(alone)
            )
        kl_coef, finished = self.policy.kl_coef, progress.finished
        last = (
            self.evaluator.last
            if self.evaluator.last and self.evaluator.last.step == step
            else None
        )
        accuracy, mean_reward = (last.accuracy, last.mean_reward) if last else (None, None)
        state = RunState(
            step,
            progress.position,
            self.run_id,
            kl_coef,
            finished,
            accuracy,
            mean_reward,
            self.identity,
        )
        saved = self.checkpoints.save(state, parts)
        self.listener.on_event(self, "save", checkpoint=saved)
        return saved

    def finish(self) -> Path:
        """Evaluates, saves the policy, reports and flushes the services; returns the checkpoint. A
        collective.
        """
        watchdog.at("the end of the run")
        self.listener.on_event(self, "train_end")
        self.evaluate_now(self.config.trainer.eval_pass_samples)
        saved = self.save_now()
        self.checkpoints.wait()
        self.log.report(saved)
        self.flush()
        return saved
