"""`rlhf sft`, or `torchrun … -m trainer.sft` with a process per GPU: trains a model on
examples.
"""

import os

from common import VERSION
from common.models.hub import check_model
from common.process.imports import heavy_imports
from common.process.logs import wants_json
from common.process.storage import make_directory
from common.process.topology import Topology
from common.settings.config import load
from trainer.sft.settings import SFT_SETTINGS
from trainer.start.program import run_rank


def main() -> None:
    """Trains on this rank. Raises ServiceError when that fails."""
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


if __name__ == "__main__":
    run_rank(main)
