"""A rank of a small run with an audit, whose services are in rank 0: `audited_run RUN_DIR MODEL`."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx

from common.process.run_lock import RunLock
from learning.ranks import Ranks
from tests.support.audits import audited
from tests.support.in_process import quiet
from trainer.build import build_run
from trainer.in_process import InProcessBackend
from trainer.loop import train


def main(run_dir: Path, model: Path) -> None:
    config = audited(model, run_dir)
    backend = InProcessBackend(
        console=quiet(),
        rollout_transport=httpx.ASGITransport,
        problems=None,
        rewards=None,
    )
    with ExitStack() as stack:
        is_first = os.environ["RANK"] == "0"
        lock = stack.enter_context(RunLock.of_new_run(run_dir, "ranks")) if is_first else None
        ranks = stack.enter_context(Ranks.from_env(120.0, "cpu", config.trainer.shard_size))
        run = build_run(config, ranks, run_dir, lock=lock, backend=backend, stack=stack)
        train(run)
        run.finish()
        ranks.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
