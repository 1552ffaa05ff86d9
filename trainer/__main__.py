"""`torchrun … -m trainer` (`trainer/cli/launch.py`): one process of the ppo-trainer for each GPU,
or for each node on CPUs.
"""

import os

from common import VERSION
from common.models.hub import check_models
from common.process.imports import heavy_imports
from common.process.logs import wants_json
from common.process.storage import make_directory
from common.process.topology import Topology
from common.settings.config import load
from trainer.start.program import run_rank

_ABOUT = (
    "One process of the trainer of a job group, which waits for the group's services. "
    "`rlhf local` starts a whole group on this machine, and "
    "`rlhf train` trains in one process without one. The settings below are "
    "those of every program of a group."
)


def main() -> None:
    """Trains on this rank. Raises ServiceError when that fails."""
    config = load(prog="python -m trainer", about=_ABOUT)
    topology = Topology.from_env()
    os.environ.update(config.rollout.nccl_env())
    check_models(config)
    assert config.trainer.run_dir is not None, "`load` sets it"
    make_directory(config.trainer.run_dir, "trainer.run_dir")
    if not wants_json() and os.environ.get("RANK", "0") == "0":
        print(f"ppo-trainer {VERSION}: loading torch and {config.model.name} …", flush=True)
    with heavy_imports():
        from trainer.start.job_group import run

    run(config, topology)


if __name__ == "__main__":
    run_rank(main)
