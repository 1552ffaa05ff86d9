"""Ends at once, as if it were killed, while it writes the checkpoint of step 1: `killed_save MODEL
DIRECTORY`."""

import os
import sys
from pathlib import Path

import learning.saving
from common.settings.config import Config
from learning.ranks import Ranks
from tests.support.batches.groups import save
from trainer.policy.policy import Policy


def main(model: str, directory: Path) -> None:
    learning.saving.Snapshot.write_state = lambda *_: os._exit(9)  # type: ignore[method-assign]
    config = Config()
    config.model.name = model
    policy = Policy(config, Ranks())
    policy.step = 1
    save(policy, directory)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
