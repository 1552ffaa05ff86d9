"""Start of one of the processes that torchrun launches: logs, the other ranks, and the lock on the
run directory.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch

from common import VERSION
from common.process import watchdog
from common.process.logs import event, setup_logging
from common.process.run_lock import RunLock
from common.process.topology import TRAINER, Topology
from common.settings.config import Config
from learning.device import reproducible_numbers
from learning.liveness import Liveness
from learning.ranks import Ranks
from trainer.diagnosis.run_files import write_topology
from trainer.diagnosis.self_diagnosis import diagnose, diagnosed

log = logging.getLogger(__name__)


@contextmanager
def started(
    config: Config, topology: Topology, task: str
) -> Iterator[tuple[Ranks, RunLock | None]]:
    """Joins the other ranks inside the block and watches them; yields the ranks and, on rank 0, the
    lock.
    """
    run_dir = config.trainer.run_dir
    limits = config.limits
    torch.manual_seed(config.seed)
    assert run_dir is not None, "`load` sets it"
    ranks = Ranks.from_env(limits.stuck_after_s, config)
    setup_logging(
        f"{task}-rank{ranks.rank}", config.state_dir / "logs", service=task, rank=ranks.rank
    )
    place = f"rank {ranks.rank} of {ranks.world_size} on {topology.own_name(task)} ({ranks.device})"
    log.info(
        "%s %s starts: %s, model=%s run_dir=%s",
        task,
        VERSION,
        place,
        config.model.name,
        run_dir,
        extra=event("started"),
    )
    if ranks.world_size > 1:
        log.info("waiting for the other ranks at %s", topology.node_ips[0])
    watchdog.start()
    liveness = Liveness(ranks, topology, limits.lost_after_s, stuck_after_s=limits.stuck_after_s)
    group = topology.group or "local"
    # Rank 0 takes the lock before the ranks meet.
    own_lock = RunLock.of_new_run(run_dir, group) if ranks.is_rank_zero else nullcontext()
    with own_lock as lock, watchdog.stalls(), ExitStack() as stack:
        services = topology if task == TRAINER else None
        liveness.before_end = partial(diagnose, run_dir, config, services)
        if lock is not None:
            write_topology(run_dir, services, ranks.world_size)
            stack.enter_context(diagnosed(run_dir, config, services))
        stack.enter_context(reproducible_numbers(config.reproducible))
        stack.enter_context(ranks)
        stack.enter_context(liveness)
        yield ranks, lock
