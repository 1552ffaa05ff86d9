"""A rank of a small run with an audit, whose services are in rank 0: `audited_run RUN_DIR MODEL
[STEP [SETTING …]]`, killed at the end of STEP.
"""

import os
import signal
import sys
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from common.process.run_lock import RunLock
from learning.ranks import Ranks
from tests.support.runs.audits import audited
from tests.support.runs.in_process import quiet
from trainer import build
from trainer.backends.in_process import InProcessBackend
from trainer.loop import train
from trainer.policy.critic import value_function
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference
from trainer.run import Listener, Run


class Killer(Listener):
    """Kills this process at the end of a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_event(self, run: Run, event: str, **about: Any) -> None:
        if event == "step_end" and run.policy.step == self._step:
            run.checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)


def main(run_dir: Path, model: Path, kill_at: int, *settings: str) -> None:
    config = audited(model, run_dir, *settings)
    backend = InProcessBackend(
        console=quiet(),
        rollout_transport=httpx.ASGITransport,
        problems=None,
        rewards=None,
    )
    with ExitStack() as stack:
        is_first = os.environ["RANK"] == "0"
        lock = stack.enter_context(RunLock.of_new_run(run_dir, "ranks")) if is_first else None
        ranks = stack.enter_context(Ranks.from_env(120.0, config))
        if not is_first:
            _gathers_first_weights()
        run = build.build_run(
            config,
            ranks,
            run_dir,
            lock=lock,
            backend=backend,
            stack=stack,
            listener=Killer(kill_at),
        )
        train(run)
        run.finish()
        ranks.barrier()


def _gathers_first_weights() -> None:
    """Makes this rank take part when rank 0, whose engine is in its process, gathers the weights
    with which the engine begins: before the value function.
    """
    policies: list[Policy] = []

    def reference(policy: Policy, saved: Path | None) -> Reference:
        policies.append(policy)
        return Reference(policy, saved)

    def value(*arguments: Any) -> Any:
        deque(policies[0].weights(), maxlen=0)
        return value_function(*arguments)

    vars(build).update(Reference=reference, value_function=value)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int((sys.argv[3:] or ["0"])[0]), *sys.argv[4:])
