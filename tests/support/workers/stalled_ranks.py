"""Run on two ranks: rank 0 waits in a collective that rank 1 never reaches, because it waits for
something else."""

import sys
import threading
from pathlib import Path

import torch

from common.process import watchdog
from common.process.logs import setup_logging
from learning.ranks import Ranks


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    with watchdog.stalls(2), Ranks.from_env(join_s=600) as ranks:
        setup_logging(f"rank{ranks.rank}", directory)
        watchdog.start()
        ranks.barrier()
        watchdog.at("the update of step 3")
        if ranks.is_rank_zero:
            ranks.sum(torch.ones(10))
        threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
