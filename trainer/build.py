"""Composes the run of a rank. Rank 0 leads: it has the services, the log and the evaluator.

`build_run` is a collective call: all ranks load the models, restore the critic, learn the number of
steps and publish the first weights, in this order. What rank 0 does alone is between these calls.
"""

import logging
import math
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from common.clients.base import wait_healthy
from common.process import watchdog
from common.process.logs import set_run
from common.process.loop_thread import LoopThread
from common.process.metrics import Metrics
from common.process.run_lock import RunLock
from common.process.topology import TRAINER
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config
from learning.ranks import Ranks
from trainer.algorithms.spool import EXPERTS
from trainer.backends.backend import Backend, BackendContext
from trainer.evaluation.evaluator import Evaluator
from trainer.evaluation.verdicts import Verdicts, verdicts_of
from trainer.observe.audit import Audit
from trainer.observe.prometheus import TrainerMetrics
from trainer.observe.run_dir import STEP_FILES, Recorder, read_lines, tell
from trainer.observe.run_log import RunLog
from trainer.policy.checkpoint import Checkpoints, RunState, tokenizer_files
from trainer.policy.critic import value_function
from trainer.policy.identity import identity
from trainer.policy.learning_rate import learning_rate
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference
from trainer.policy.scorer import load_tokenizer, stop_token_ids
from trainer.policy.trained_prompts import TrainedPrompts, style_of
from trainer.rollouts.ground_truths import GROUND_TRUTHS, GroundTruthCheck
from trainer.rollouts.prompt_cursor import PromptProgress
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.services import RolloutContext, Services, flush_all
from trainer.rollouts.teacher import Teacher
from trainer.run import Listener, Run
from trainer.timing import StageClock
from trainer.trackers.base import check
from trainer.weights.adapters import static_files
from trainer.weights.gpu_lease import GpuLease
from trainer.weights.sync import WeightPublisher, WeightSync

_TRIAL_STEPS = 10
"""A run of at most this many steps is a trial, whose learning rate does not matter."""


def build_run(
    config: Config,
    ranks: Ranks,
    run_dir: Path,
    *,
    lock: RunLock | None,
    backend: Backend,
    stack: ExitStack,
    listener: Listener | None = None,
) -> Run:
    """Loads or resumes the models, starts the services and publishes the weights. A collective.

    Args:
        config: the settings of the run.
        ranks: this rank among the trainer's.
        run_dir: the run directory.
        lock: the lock on `run_dir`, which names the run; None on ranks above 0.
        backend: starts the services; used on rank 0 only.
        stack: closes everything that is opened here.
        listener: receives the events of the run; used on rank 0 only.

    Raises ConfigError or another ServiceError when the run cannot begin.
    """
    leader: _Leader | None = None
    if ranks.is_rank_zero:
        assert lock is not None, "rank 0 holds the lock"
        leader = _Leader(config, run_dir, lock, backend=backend, stack=stack)

    watchdog.at("loading the model")
    policy, state, saved = Policy.resume(config, ranks, run_dir)
    reference = Reference(policy, saved)
    checkpoints = Checkpoints(
        run_dir / "checkpoints",
        ranks,
        config.checkpoint.keep,
        static=lambda: tokenizer_files(run_dir / "model"),
    )
    # Whether the experience in the replay-buffer belongs to this run, from an earlier attempt.
    attempted = config.checkpoint.resume and checkpoints.directory.is_dir()
    continues = policy.step > 0 or attempted

    watchdog.at("waiting for the services and the first publishing")
    publisher: WeightPublisher | None = None
    rollouts: Rollouts | None = None
    clock = StageClock()
    if leader is not None:
        clock = leader.clock
        leader.start_services(policy)
        publisher = leader.publisher
        rollouts = leader.rollouts(policy, state)
    critic = value_function(config, ranks, saved)
    if leader is not None:
        # Loading takes minutes, and what begins last at the services ends the run before it.
        leader.lock.check()
    steps = rollouts.prepare(policy.step, continues) if rollouts else 0
    policy.total_steps = ranks.broadcast(steps)

    run = Run(
        config=config,
        ranks=ranks,
        policy=policy,
        reference=reference,
        critic=critic,
        checkpoints=checkpoints,
        weights=WeightSync(
            publisher,
            clock,
            in_background=config.trainer.max_staleness > 0,
            copies=config.rollout.colocate,
            may_load=rollouts.wait_until_idle if rollouts and config.reproducible else lambda: None,
            has_checksums=config.reproducible,
        ),
        lease=GpuLease(
            ranks,
            lambda: [policy.resident(), reference.resident(), critic.resident()],
            publisher,
            shared=config.rollout.colocate,
        ),
        total_steps=policy.total_steps,
        rollouts=rollouts,
        clock=clock,
    )
    if leader is not None:
        leader.complete(run, listener or Listener(), saved)
    if config.trainer.audit:
        run.audit = Audit(run_dir if leader else None, run.run_id)
        engine = backend.engine_kind if leader else ""
        run.audit.begin(policy, engine, backend.given if leader else ())
    run.publish_first()
    return run


def _other_rate(policy: Policy, run_dir: Path) -> str:
    """Returns what has changed if the learning rate of the last step before a resume is not that of
    the present schedule; empty otherwise.
    """
    settings = policy.config.optimizer
    lines = read_lines(run_dir / "metrics.jsonl") if policy.step else []
    last = next((line for line in lines if line["step"] == policy.step), None)
    if last is None:
        return ""
    was = last["update"]["learning_rate"]
    if math.isclose(was, learning_rate(policy.step - 1, policy.total_steps, settings)):
        return ""
    rate = learning_rate(policy.step, policy.total_steps, settings)
    return (
        f"step {policy.step} had the learning rate {was:.3g}, and step {policy.step + 1} has "
        f"{rate:.3g}: the schedule has changed since, and is now {settings.lr_schedule} over "
        f"{policy.total_steps} steps (optimizer.learning_rate {settings.learning_rate:.3g}, "
        f"optimizer.warmup_steps {settings.warmup_steps})"
    )


class _Leader:
    """The parts of a run that rank 0 alone has: services, log and evaluator.

    Making one checks what can be checked before the models are loaded.
    """

    services: Services
    """After `start_services`, like the next two."""
    publisher: WeightPublisher
    verdicts: Verdicts
    prompter: Prompter
    """After `rollouts`."""

    def __init__(
        self, config: Config, run_dir: Path, lock: RunLock, backend: Backend, stack: ExitStack
    ) -> None:
        check(config.trackers)
        self.tokenizer = load_tokenizer(config.model)
        PromptStyle.of(config).check(self.tokenizer)
        self.config = config
        self.run_dir = run_dir
        self.lock = lock
        self.run_id = lock.run
        self.backend = backend
        self.stack = stack
        self.registry = Metrics(TRAINER)
        self.metrics = TrainerMetrics(self.registry)
        self.clock = StageClock(self.metrics.took)
        self.loop = stack.enter_context(LoopThread())
        self.say = partial(tell, backend.console)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}", level=logging.WARNING)

    def start_services(self, policy: Policy) -> None:
        """Starts the services, or connects to them; returns when all are healthy, and the teacher
        answers if there is one.
        """
        config = self.config
        set_run(self.run_id)
        if config.algorithm.caution:
            self.warn(config.algorithm.caution)
        continuing = f", continuing after step {policy.step}" if policy.step else ""
        self.say(f"run directory {self.run_dir}{continuing}")
        model_dir = self.run_dir / "model"
        context = BackendContext(
            config=config,
            run_dir=self.run_dir,
            run_id=self.run_id,
            policy=policy,
            tokenizer=self.tokenizer,
            static_files=static_files(config, policy.model, self.tokenizer, model_dir),
            say=self.say,
            metrics=self.metrics,
            registry=self.registry,
            loop=self.loop,
            stack=self.stack,
        )
        self.services, self.publisher = self.backend.start(context)

        patience_s = config.limits.stuck_after_s
        # A wait is told even when the console is quiet: the log shows warnings.
        quiet = self.backend.console.quiet
        say_waiting = partial(self.say, level=logging.WARNING) if quiet else self.say
        self.loop.call(wait_healthy(self.services.all(), patience_s, say_waiting))
        if config.teacher.url:
            teacher = Teacher(config.teacher)
            self.services.teacher = teacher
            self.stack.callback(lambda: self.loop.call(teacher.close()))
            self.loop.call(teacher.check(self.tokenizer, patience_s))

        recorded = read_lines(self.run_dir / "metrics.jsonl") if policy.step else []
        before = recorded[-1].get("verified") if recorded else None
        self.verdicts = self.loop.call(verdicts_of(self.services, before))
        self.say(str(self.verdicts))

    def rollouts(self, policy: Policy, state: RunState | None) -> Rollouts:
        """Returns the rollouts, which continue from the `state` of a checkpoint."""
        config = self.config
        stops = stop_token_ids(policy.model, self.tokenizer, config.sampling.stop_token_ids)
        vocabulary = policy.model.get_input_embeddings().num_embeddings
        # Of an attempt that was killed.
        shutil.rmtree(config.state_dir / EXPERTS, ignore_errors=True)
        self.prompter = Prompter(
            self.tokenizer, PromptStyle.of(config), stops, vocabulary=vocabulary
        )
        return Rollouts(
            RolloutContext(
                config, self.services, self.prompter, clock=self.clock, run_id=self.run_id
            ),
            self.loop,
            progress=PromptProgress(state.position, state.finished) if state else PromptProgress(),
            ground_truths=GroundTruthCheck(self.services, self.run_dir / GROUND_TRUTHS),
            vocabulary=vocabulary,
        )

    def complete(self, run: Run, listener: Listener, saved: Path | None) -> None:
        """Adds rank 0's parts to a run that continues from the checkpoint `saved`."""
        assert run.rollouts is not None, "rank 0 has them"
        config = self.config
        policy = run.policy
        steps = run.total_steps
        warmup = config.optimizer.warmup_steps
        if warmup >= steps > _TRIAL_STEPS:
            self.warn(
                f"the warm-up (optimizer.warmup_steps {warmup}) is not shorter than the run of "
                f"{steps} steps: the learning rate stays below optimizer.learning_rate, and little "
                "is learned"
            )
        jump = _other_rate(policy, self.run_dir)
        if jump:
            self.warn(jump)
        trained = TrainedPrompts.of(saved or config.model.name)
        trained.style = style_of(self.prompter.style)

        # All checks have passed: only now may the recorder remove the lines of lost steps.
        recorder = self.stack.enter_context(
            Recorder(
                self.run_dir,
                config,
                self.backend.console,
                step=policy.step,
                tracked=self.metrics.tracked,
                run_id=self.run_id,
                data=self.backend.data,
                verdicts=self.verdicts.decided,
                files=(*STEP_FILES, "audit") if config.trainer.audit else STEP_FILES,
                in_user_names=listener.in_user_names,
            )
        )
        run.log = RunLog(
            config,
            recorder,
            self.metrics,
            clock=self.clock,
            step=policy.step,
            measured=listener.measured,
            gpus=partial(self._gpus, run.ranks),
            collecting_cpu=self.loop.cpu_seconds,
            verdicts=self.verdicts,
            drops=run.rollouts.drops,
            dropout=policy.scorer.dropout,
        )
        if policy.step >= steps:
            recorder.say(
                f"already finished: {policy.step} steps were trained before, and their result is "
                "below; name another RUN_DIR for a new run, or raise trainer.max_steps or "
                "trainer.num_epochs to continue"
            )
        # Tells the next attempt that the stored experience is its own.
        run.checkpoints.directory.mkdir(exist_ok=True)

        run.evaluator = Evaluator(
            config,
            self.services,
            self.prompter,
            loop=self.loop,
            verdicts=self.verdicts,
            trained=trained,
        )
        run.run_id = self.run_id
        run.lock = self.lock
        run.trained_prompts = trained
        run.identity = identity(config)
        run.listener = listener
        run.tokenizer = self.tokenizer
        run.flush = self._flush

    def _gpus(self, ranks: Ranks) -> int | None:
        """Counts the GPUs of trainer and engines; None when unknown."""
        engines = self.backend.engine_gpus
        if engines is None or not ranks.on_gpu:
            return engines
        return ranks.world_size + engines

    def _flush(self) -> None:
        """Flushes the services and the rollout nodes' agents."""
        agents = self.backend.agents()
        self.loop.call(flush_all((*self.services.stateful(), *agents)))
        for client in agents:
            self.loop.call(client.close())
