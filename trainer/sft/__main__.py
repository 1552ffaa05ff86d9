"""`rlhf sft`, or `torchrun … -m trainer.sft` with a process per GPU: trains a model on
examples.
"""

import os
import signal

from common import VERSION
from common.errors import ConfigError, ServiceError
from common.models.hub import check_model
from common.process.cli import fail
from common.process.imports import heavy_imports
from common.process.logs import log_exit_reason, wants_json
from common.process.storage import make_directory
from common.process.topology import Topology, setting_status
from common.settings.config import load
from trainer.sft.settings import SFT_SETTINGS
from trainer.trackers.thread import exit_despite_hung_tracker


def main() -> None:
    """Runs this rank; exits with `setting_status()` for a wrong setting, 1 for any other named
    error, 130 for Ctrl-C.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    try:
        config = load(prog="rlhf sft", subset=SFT_SETTINGS)
        topology = Topology.from_env()
        is_rank_zero = os.environ.get("RANK", "0") == "0"
        check_model(config.model.name, is_policy=True)
        assert config.trainer.run_dir is not None, "`load` sets it"
        make_directory(config.trainer.run_dir, "trainer.run_dir")
        from services.data.sft_examples import load_examples

        # Before torch, whose import takes seconds.
        examples = load_examples(config) if is_rank_zero else None
        if is_rank_zero and not wants_json():
            print(f"rlhf sft {VERSION}: loading torch and {config.model.name} …", flush=True)
        with heavy_imports():
            from trainer.sft.run import run

        run(config, topology, examples)
    except ConfigError as error:
        fail(error, setting_status())
    except ServiceError as error:
        fail(error, status=1)
    except KeyboardInterrupt:
        log_exit_reason(
            "interrupted; start again with the same run directory to continue from its newest "
            "checkpoint"
        )
        raise SystemExit(130) from None


if __name__ == "__main__":
    with exit_despite_hung_tracker():
        main()
    from learning.ranks import end

    end()
