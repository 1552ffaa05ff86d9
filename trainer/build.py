"""Composes the run of a rank. Rank 0 leads: it has the services, the log and the evaluator.

`build_run` is a collective call: both builders load the models, restore the critic, learn the
number of steps and publish the first weights, in this order.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
from learning.parking import Resident
from learning.ranks import Ranks
from trainer.backends.backend import Backend, BackendContext
from trainer.evaluation.evaluator import Evaluator
from trainer.evaluation.verdicts import verdicts_of
from trainer.observe.audit import Audit, Given
from trainer.observe.prometheus import TrainerMetrics
from trainer.observe.run_dir import STEP_FILES, Recorder, read_lines, tell
from trainer.observe.run_log import RunLog
from trainer.policy.checkpoint import Checkpoints, RunState, tokenizer_files
from trainer.policy.critic import ValueFunction, value_function
from trainer.policy.identity import identity
from trainer.policy.learning_rate import learning_rate
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference
from trainer.policy.scorer import load_tokenizer, stop_token_ids
from trainer.policy.trained_prompts import TrainedPrompts, style_of
from trainer.rollouts.context import RolloutContext
from trainer.rollouts.ground_truths import GROUND_TRUTHS, GroundTruthCheck
from trainer.rollouts.prompt_cursor import PromptProgress
from trainer.rollouts.rollouts import FollowerRollouts, Rollouts
from trainer.rollouts.services import Services, flush_all
from trainer.rollouts.teacher import Teacher
from trainer.run import Listener, Run
from trainer.timing import StageClock
from trainer.trackers.base import check
from trainer.weights.adapters import static_files
from trainer.weights.gpu_lease import EngineMemory, GpuLease
from trainer.weights.sync import FollowerWeightSync, WeightSync

_WAITING = "waiting for the services and the first publishing"
_TRIAL_STEPS = 10
"""A run of so few steps is a trial, whose learning rate does not matter."""


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
    if ranks.is_rank_zero:
        assert lock is not None, "rank 0 holds the lock"
        run = _build_leader(
            config,
            ranks,
            run_dir,
            lock=lock,
            backend=backend,
            stack=stack,
            listener=listener or Listener(),
        )
    else:
        run = _build_follower(config, ranks, run_dir)
    run.publish_first()
    return run


@dataclass(frozen=True)
class _Models:
    """The models of a run, from the newest checkpoint in the run directory if there is one."""

    policy: Policy
    reference: Reference
    checkpoints: Checkpoints
    state: RunState | None
    """The state of that checkpoint; None for a new run."""
    saved: Path | None
    """The directory of that checkpoint."""
    continues: bool
    """Whether the experience in the replay buffer belongs to this run, from an earlier attempt."""


def _load_models(config: Config, ranks: Ranks, run_dir: Path) -> _Models:
    """Loads policy and reference. A collective."""
    watchdog.at("loading the model")
    policy, state, saved = Policy.resume(config, ranks, run_dir)
    reference = Reference(policy, saved)
    checkpoints = Checkpoints(
        run_dir / "checkpoints",
        ranks,
        config.checkpoint.keep,
        static=lambda: tokenizer_files(run_dir / "model"),
    )
    attempted = config.checkpoint.resume and checkpoints.directory.is_dir()
    return _Models(
        policy=policy,
        reference=reference,
        checkpoints=checkpoints,
        state=state,
        saved=saved,
        continues=policy.step > 0 or attempted,
    )


def _other_rate(policy: Policy, run_dir: Path) -> str:
    """Returns a warning if the learning rate of the last step before a resume is not that of the
    present schedule; empty otherwise.
    """
    settings = policy.config.optimizer
    for line in read_lines(run_dir / "metrics.jsonl"):
        if line["step"] != policy.step:
            continue
        was = line["update"]["learning_rate"]
        would_be = learning_rate(policy.step - 1, policy.total_steps, settings)
        if not math.isclose(was, would_be, rel_tol=1e-6):
            rate = learning_rate(policy.step, policy.total_steps, settings)
            return (
                f"warning: step {policy.step} had the learning rate {was:.3g}, and step "
                f"{policy.step + 1} has {rate:.3g}: the schedule has changed since, and is now "
                f"{settings.lr_schedule} over {policy.total_steps} steps "
                f"(optimizer.learning_rate {settings.learning_rate:.3g}, optimizer.warmup_steps "
                f"{settings.warmup_steps})"
            )
    return ""


def _gpu_lease(
    config: Config,
    models: _Models,
    critic: ValueFunction,
    engines: EngineMemory | None,
) -> GpuLease:
    """Returns the lease of the GPUs; `engines` is None on ranks above 0."""

    def resident() -> list[Resident]:
        return [
            models.policy.resident(),
            models.reference.resident(),
            critic.resident(),
        ]

    return GpuLease(models.policy.ranks, resident, engines, shared=config.rollout.colocate)


def _build_follower(config: Config, ranks: Ranks, run_dir: Path) -> Run:
    """Returns the run of a rank above 0, which takes part in rank 0's collective calls."""
    models = _load_models(config, ranks, run_dir)
    policy = models.policy
    critic = value_function(config, ranks)
    lease = _gpu_lease(config, models, critic, engines=None)
    rollouts = FollowerRollouts(ranks)

    watchdog.at(_WAITING)
    critic.restore(models.saved)
    policy.total_steps = rollouts.prepare(policy.step, models.continues)

    return Run(
        config=config,
        ranks=ranks,
        policy=policy,
        reference=models.reference,
        critic=critic,
        checkpoints=models.checkpoints,
        rollouts=rollouts,
        weights=FollowerWeightSync(),
        lease=lease,
        audit=_audit(policy, None),
        total_steps=policy.total_steps,
    )


def _build_leader(
    config: Config,
    ranks: Ranks,
    run_dir: Path,
    *,
    lock: RunLock,
    backend: Backend,
    stack: ExitStack,
    listener: Listener,
) -> Run:
    """Returns the run of rank 0, with the services started and ready."""
    check(config.trackers)
    tokenizer = load_tokenizer(config.model)
    PromptStyle.of(config).check(tokenizer)
    models = _load_models(config, ranks, run_dir)
    policy = models.policy
    run_id = lock.run

    watchdog.at(_WAITING)
    set_run(run_id)
    say = partial(tell, backend.console)
    caution = config.algorithm.caution
    if caution:
        say(f"warning: {caution}", level=logging.WARNING)
    continuing = f", continuing after step {policy.step}" if policy.step else ""
    say(f"run directory {run_dir}{continuing}")

    registry = Metrics(TRAINER)
    metrics = TrainerMetrics(registry)
    clock = StageClock(metrics.took)
    loop = stack.enter_context(LoopThread())
    context = BackendContext(
        config=config,
        run_dir=run_dir,
        run_id=run_id,
        policy=policy,
        tokenizer=tokenizer,
        static_files=static_files(config, policy.model, tokenizer, run_dir / "model"),
        say=say,
        metrics=metrics,
        registry=registry,
        loop=loop,
        stack=stack,
    )
    services, publisher = backend.start(context)
    # A wait is told even when the console is quiet: the log shows warnings.
    say_waiting = partial(say, level=logging.WARNING) if backend.console.quiet else say
    _wait_ready(services, context, say_waiting)

    recorded = read_lines(run_dir / "metrics.jsonl") if policy.step else []
    verdicts = loop.call(verdicts_of(services, recorded[-1].get("verified") if recorded else None))
    say(str(verdicts))

    critic = value_function(config, ranks, services.critic, loop=loop, run_id=run_id)
    lease = _gpu_lease(config, models, critic, publisher)

    vocabulary = policy.model.get_input_embeddings().num_embeddings
    prompter = Prompter(
        tokenizer,
        PromptStyle.of(config),
        stop_token_ids(policy.model, tokenizer, config.sampling.stop_token_ids),
        vocabulary=vocabulary,
    )
    state = models.state
    progress = PromptProgress(state.position, state.finished) if state else PromptProgress()
    rollouts = Rollouts(
        RolloutContext(config, services, prompter, clock=clock, run_id=run_id),
        ranks,
        loop,
        progress=progress,
        ground_truths=GroundTruthCheck(services, run_dir / GROUND_TRUTHS),
        vocabulary=vocabulary,
    )
    critic.restore(models.saved)
    policy.total_steps = rollouts.prepare(policy.step, models.continues)

    warmup = config.optimizer.warmup_steps
    is_trial = policy.total_steps <= _TRIAL_STEPS
    if warmup >= policy.total_steps and not is_trial:
        text = (
            f"warning: the warm-up (optimizer.warmup_steps {warmup}) is not shorter than the run "
            f"of {policy.total_steps} steps: the learning rate stays below "
            "optimizer.learning_rate, and little is learned"
        )
        say(text, level=logging.WARNING)
    text = _other_rate(policy, run_dir)
    if text:
        say(text, level=logging.WARNING)
    trained = TrainedPrompts.of(models.saved or config.model.name)
    trained.style = style_of(prompter.style)

    # All checks have passed: only now may the recorder remove the lines of lost steps.
    recorder = stack.enter_context(
        Recorder(
            run_dir,
            config,
            backend.console,
            step=policy.step,
            tracked=metrics.tracked,
            run_id=run_id,
            data=backend.data(),
            verdicts=verdicts.decided,
            files=(*STEP_FILES, "audit") if config.trainer.audit else STEP_FILES,
            words=listener.words,
        )
    )
    log = RunLog(
        config,
        recorder,
        metrics,
        clock=clock,
        step=policy.step,
        measured=listener.measured,
        gpus=_gpu_counter(ranks, backend),
        collecting_cpu=loop.cpu_seconds,
        verdicts=verdicts,
        dropout=policy.scorer.dropout,
    )
    if policy.step >= policy.total_steps:
        recorder.say(_already_finished(config, policy.step))
    # Tells the next attempt that the stored experience is its own.
    models.checkpoints.directory.mkdir(exist_ok=True)

    return Run(
        config=config,
        ranks=ranks,
        policy=policy,
        reference=models.reference,
        critic=critic,
        checkpoints=models.checkpoints,
        rollouts=rollouts,
        weights=WeightSync(
            publisher,
            clock,
            in_background=config.trainer.max_staleness > 0,
            copies=lease.shared,
            may_load=rollouts.wait_until_idle if config.reproducible else lambda: None,
            has_checksums=config.reproducible,
        ),
        lease=lease,
        evaluator=Evaluator(
            config, services, prompter, loop=loop, verdicts=verdicts, trained=trained
        ),
        log=log,
        audit=_audit(
            policy,
            run_dir,
            run_id=run_id,
            engine=backend.engine_kind,
            given=backend.given(),
        ),
        clock=clock,
        run_id=run_id,
        lock=lock,
        trained=trained,
        identity=identity(config),
        total_steps=policy.total_steps,
        listener=listener,
        tokenizer=tokenizer,
        flush=_flusher(services, backend, loop),
    )


def _audit(
    policy: Policy,
    run_dir: Path | None,
    *,
    run_id: str = "",
    engine: str = "",
    given: Sequence[Given] = (),
) -> Audit | None:
    """Returns the audit of this rank, whose start is recorded; None without `trainer.audit`. A
    collective; `run_dir` and what follows are rank 0's.
    """
    if not policy.config.trainer.audit:
        return None
    audit = Audit(run_dir, run_id)
    audit.begin(policy, engine, given)
    return audit


def _wait_ready(services: Services, context: BackendContext, say: Callable[[str], None]) -> None:
    """Waits until all services are healthy, and the teacher answers if there is one."""
    config = context.config
    loop = context.loop
    if config.teacher.url:
        teacher = Teacher(config.teacher)
        services.teacher = teacher
        context.stack.callback(lambda: loop.call(teacher.close()))

    loop.call(wait_healthy(services.all(), config.limits.stuck_after_s, say))
    if services.teacher is not None:
        loop.call(services.teacher.check(context.tokenizer, config.limits.stuck_after_s))


def _gpu_counter(ranks: Ranks, backend: Backend) -> Callable[[], int | None]:
    """Returns a function that counts the GPUs of trainer and engines; its result is None when
    unknown.
    """
    own = ranks.world_size if ranks.on_gpu else 0

    def gpus() -> int | None:
        engines = backend.engine_gpus()
        return None if engines is None else own + engines

    return gpus


def _already_finished(config: Config, trained: int) -> str:
    limit = "trainer.num_epochs"
    value = config.trainer.num_epochs
    if config.trainer.max_steps is not None:
        limit = "trainer.max_steps"
        value = config.trainer.max_steps
    return (
        f"already finished: {trained} steps were trained before, and their result is below; name "
        f"another RUN_DIR for a new run, or raise {limit} ({value}) to continue"
    )


def _flusher(services: Services, backend: Backend, loop: LoopThread) -> Callable[[], None]:
    """Returns the function that flushes the services and the rollout nodes' agents."""

    def flush() -> None:
        agents = backend.agents()
        loop.call(flush_all((*services.stateful(), *agents)))
        for client in agents:
            loop.call(client.close())

    return flush
