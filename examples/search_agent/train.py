"""`python -m examples.search_agent.train DIRECTORY [--seed N] [--SETTING VALUE …]`: makes the model
and trains it, in one process.

Writes what `base` writes, and the run to DIRECTORY/run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from common.settings.config import load
from examples.search_agent.base import build
from trainer.start.in_process import train_in_process

SETTINGS = Path(__file__).with_name("grpo.yaml")


def main(
    directory: Path, seed: int = 0, settings: Sequence[str] = (), console: Console | None = None
) -> None:
    """Trains, with more settings than those of grpo.yaml."""
    build(directory, seed, console)
    paths = {
        "config": SETTINGS,
        "seed": seed,
        "model.name": directory / "base",
        "data.source": directory / "problems",
        "trainer.run_dir": directory / "run",
        "state_dir": directory / "state",
    }
    arguments = [f"--{name}={value}" for name, value in paths.items()]
    train_in_process(load([*arguments, *settings], env={}), console)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="examples.search_agent.train", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options, rest = parser.parse_known_args()
    main(options.directory, options.seed, rest)
