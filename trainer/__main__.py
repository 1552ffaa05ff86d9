"""`torchrun … -m trainer` (`trainer/cli/launch.py`): one process of the ppo-trainer for each GPU,
or for each node on CPUs.
"""

import os
import signal

from common import VERSION
from common.errors import ConfigError, ServiceError
from common.models.hub import check_models
from common.process.cli import fail
from common.process.imports import heavy_imports
from common.process.logs import log_exit_reason, wants_json
from common.process.storage import make_directory
from common.process.topology import Topology, setting_status
from common.settings.config import load
from trainer.trackers.thread import exit_despite_hung_tracker

_ABOUT = (
    "One process of the trainer of a job group, which waits for the group's services. "
    "`rlhf local` starts a whole group on this machine, and "
    "`rlhf train` trains in one process without one. The settings below are "
    "those of every program of a group."
)


def main() -> None:
    """Runs this rank; exits with `setting_status()` for a wrong setting, 1 for any other named
    error, 130 for Ctrl-C.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    try:
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
    except ConfigError as error:
        fail(error, setting_status())
    except ServiceError as error:
        fail(error, status=1)
    except KeyboardInterrupt:
        log_exit_reason(
            "interrupted; start again with the same run directory to continue from its newest "
            "checkpoint",
            code="interrupted",
        )
        raise SystemExit(130) from None


if __name__ == "__main__":
    with exit_despite_hung_tracker():
        main()
    from learning.ranks import end

    end()
