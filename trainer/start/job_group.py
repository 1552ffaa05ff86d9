"""One process of the ppo-trainer task: the run on this rank, with the services of the job group."""

import gc
from contextlib import ExitStack

from common.process import topology as names
from common.process.topology import Topology
from common.settings.config import Config
from trainer.backends.job_group import JobGroupBackend
from trainer.build import build_run
from trainer.loop import train
from trainer.start.rank import started


def run(config: Config, topology: Topology) -> None:
    """Trains on this rank until the last step."""
    run_dir = config.trainer.run_dir
    assert run_dir is not None, "`load` sets it"
    with started(config, topology, names.TRAINER) as (ranks, lock), ExitStack() as stack:
        training = build_run(
            config,
            ranks,
            run_dir,
            lock=lock,
            backend=JobGroupBackend(topology),
            stack=stack,
        )
        gc.freeze()  # libraries and models stay: the garbage collector need not scan them
        train(training)
        training.finish()
        ranks.barrier()
