"""Training in one process: the same services, clients and loop as in a job group."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import torch
from rich.console import Console

from common.process import watchdog
from common.process.run_lock import RunLock
from common.settings.config import Config
from learning.device import reproducible_numbers
from learning.ranks import Ranks
from services.environment.environments import Environment
from services.reward.functions import RewardFunction
from trainer.backends.in_process import InProcessBackend, WrapApp
from trainer.build import build_run
from trainer.diagnosis.self_diagnosis import diagnosed
from trainer.loop import train
from trainer.observe.problems import Problems
from trainer.observe.run_dir import console as standard_console
from trainer.run import Listener, only_run


def train_in_process(
    config: Config,
    console: Console | None = None,
    rollout_transport: WrapApp | None = None,
    *,
    problems: Problems | None = None,
    rewards: Sequence[RewardFunction] | None = None,
    listener: Listener | None = None,
    engine: str | Sequence[str] = "embedded",
    environment: Environment | None = None,
) -> Path:
    """Trains on this machine in this process and returns the path of the last checkpoint.

    Args:
        config: as for the job group; ports, replicas, `rollout.engine` and `trainer.weight_sync`
            have no effect.
        console: for progress and results; standard output when None.
        rollout_transport: creates the transport to the engine's app; a test may pass one that fails
            now and then.
        problems: to train and to evaluate on; those of `config.data` when None.
        rewards: grade every answer, in this process, and were tried (`try_functions`); those of
            `config.reward` when None.
        listener: is notified of steps, evaluations and checkpoints.
        engine: `embedded`, `sglang` (started here, with the settings of `rollout`), or the URLs of
            SGLang servers that see this disk.
        environment: plays the episodes, in place of the one named in `config.environment.name`.

    Raises ConfigError, also while another run trains in this process, or another ServiceError with
    the reason when training cannot continue.
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run_dir = config.trainer.run_dir or Path("runs") / "local"
    backend = InProcessBackend(
        console=console or standard_console(),
        rollout_transport=rollout_transport or httpx.ASGITransport,
        problems=problems,
        rewards=rewards,
        engine=engine,
        environment=environment,
    )
    with (
        only_run(run_dir),
        RunLock.of_new_run(run_dir, "in-process") as lock,
        diagnosed(run_dir, config),
        ExitStack() as stack,
    ):
        torch.manual_seed(config.seed)
        stack.enter_context(reproducible_numbers(config.reproducible))
        run = build_run(
            config,
            Ranks.alone(config),
            run_dir,
            lock=lock,
            backend=backend,
            stack=stack,
            listener=listener,
        )
        stack.enter_context(watchdog.interpreter_guarded())
        train(run)
        return run.finish()
