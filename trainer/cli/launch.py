"""`python -m trainer.launch [ARGUMENT…]`: torchrun over the nodes of this task of the job group.

Starts one process per GPU (one on a node without GPUs). The arguments are those of torchrun, from
the program on; without any, it runs `-m trainer`.
"""

import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from common.errors import ConfigError
from common.process.cli import fail
from common.process.exits import SIGNALLED, how_ended
from common.process.logs import SEPARATOR
from common.process.topology import Topology


def torchrun_arguments(topology: Topology, program: Sequence[str]) -> list[str]:
    """Returns torchrun's arguments that run `program` on this node of the task.

    Rank 0 is the first address of `SKYPILOT_NODE_IPS`, read when the command starts, so it is
    current after a recovery.
    """
    options = {
        "--nnodes": topology.num_nodes,
        "--node-rank": topology.node_rank,
        "--nproc-per-node": max(1, topology.gpus_per_node),
        "--master-addr": topology.node_ips[0],
        "--master-port": topology.torchrun_port,
    }
    words = []
    for option, value in options.items():
        words += [option, str(value)]
    return [*words, *program]


def _check_port(port: int) -> None:
    """Raises ConfigError if torchrun, which prints a traceback, cannot listen on `port`."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise ConfigError(
            f"torchrun cannot listen on port {port}: {error.strerror}",
            field="torchrun",
            value=port,
            remedy=f"end the process that uses it (ss -ltnp 'sport = :{port}'), "
            "or an earlier run's trainer",
        ) from None


def _run_torchrun(arguments: list[str], *, several: bool) -> int:
    """Runs torchrun; returns the status of the rank that failed first, or 128 plus its signal.

    With `several` ranks, prints the reason that this rank recorded (`log_exit_reason`) instead of
    torchrun's traceback, because the others have written since.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    for name in ("", ".multiprocessing.api", ".multiprocessing.errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)

    # Without its wrapper, which records every failure and prints it.
    unwrapped: Any = getattr(torchrun, "__wrapped__", torchrun)
    try:
        unwrapped(arguments)
    except SignalException as end:
        return SIGNALLED + int(end.sigval)
    except ChildFailedError as end:
        rank, failure = end.get_first_failure()
        if failure.exitcode < 0:
            # A killed rank cannot log this, so it becomes a line of the node's log, with a code.
            ended = f"error: rank {rank} {how_ended(failure.exitcode)}"
            print(f"{ended}{SEPARATOR}code: rank_killed", file=sys.stderr)
            return SIGNALLED - int(failure.exitcode)
        if several and failure.error_file_data:
            print(f"rank {rank}: {failure.message}", file=sys.stderr)
        return int(failure.exitcode)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the trainer's processes of this node and returns their exit status."""
    program = list(sys.argv[1:] if argv is None else argv) or ["-m", "trainer"]
    try:
        topology = Topology.from_env()
        if topology.node_rank == 0:
            _check_port(topology.torchrun_port)
    except ConfigError as error:
        fail(error)
    os.environ.update(topology.loopback_env())
    arguments = torchrun_arguments(topology, program)
    return _run_torchrun(arguments, several=topology.gpus_per_node > 1)


if __name__ == "__main__":
    sys.exit(main())
