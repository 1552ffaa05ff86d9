"""`rlhf tinker --model DIR --dir DIR`: a server of Tinker's API, on one machine with the embedded
engine; in a job group, the task tinker-server, with the engines of rollout-server.
"""

import sys

from common import VERSION
from common.models.hub import check_model
from common.process.imports import heavy_imports
from common.process.logs import wants_json
from common.process.storage import make_directory
from common.process.topology import Topology
from common.settings.config import load
from trainer.start.program import run_rank
from trainer.tinker.clients import Clients
from trainer.tinker.settings import TINKER_SETTINGS, WORDS


def main() -> None:
    """Serves on rank 0 until SIGTERM. Raises ServiceError when it cannot."""
    arguments = []
    for argument in sys.argv[1:]:
        flag, equals, value = argument.partition("=")
        arguments.append(WORDS.get(flag, flag) + equals + value)
    config = load(arguments, prog="rlhf tinker", subset=TINKER_SETTINGS)
    clients = Clients()
    check_model(config.model.name, is_policy=True)
    assert config.trainer.run_dir is not None, "`load` sets it"
    make_directory(config.trainer.run_dir, "trainer.run_dir")
    if not wants_json():
        print(f"rlhf tinker {VERSION}: loading torch and {config.model.name} …", flush=True)
    with heavy_imports():
        from trainer.tinker.run import run

    run(config, Topology.from_env(), clients)


if __name__ == "__main__":
    run_rank(main)
