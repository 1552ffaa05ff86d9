"""Run by torchrun: a story of Tinker runs on several ranks; rank 0 writes the numbers of each case.

`python tinker_ranks.py DIRECTORY BASE CASES`, where CASES is JSON: name -> settings.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from learning.ranks import Ranks, end
from tests.support.batches.tinker import settings, story
from trainer.tinker.learner import RunLearner


def main(directory: Path, base: Path, cases: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    with Ranks.from_env(join_s=400) as joined:
        for name, case in cases.items():
            config = settings(base, **case)
            ranks = Ranks(
                joined.rank,
                joined.world_size,
                joined.local_rank,
                shard_size=config.parallel.shard_size,
                context_size=config.parallel.context_size,
            )
            runs = RunLearner(config, ranks)
            if ranks.is_rank_zero:
                numbers = story(runs, directory / name)
                (directory / f"{name}.json").write_text(json.dumps([float(n) for n in numbers]))
                runs.close()
            else:
                runs.follow()
        joined.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
    end()
