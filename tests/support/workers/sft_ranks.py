"""Run by torchrun: a run of supervised fine-tuning, which only rank 0 reads."""

import os
import sys

import torch

from common.process.topology import Topology
from common.settings.config import load
from learning.ranks import end
from services.data.sft_examples import load_examples
from trainer.sft.run import run
from trainer.sft.settings import SFT_SETTINGS


def main(settings: list[str]) -> None:
    torch.set_num_threads(1)
    config = load(settings, {}, subset=SFT_SETTINGS)
    run(config, Topology.from_env(), load_examples(config) if os.environ["RANK"] == "0" else None)


if __name__ == "__main__":
    main(sys.argv[1:])
    end()
