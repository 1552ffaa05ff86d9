"""Runs the scene of a seed."""

import logging
from contextlib import ExitStack
from pathlib import Path

from tests.simulation.scene import Scene
from tests.simulation.virtual_time import simulated
from tests.simulation.world import World

SCENES: dict[str, type[Scene]] = {"groups": World}
"""By the names that the command takes."""


def simulate(seed: int, directory: Path, scene: str = "groups") -> Scene:
    """Runs a seed. Raises Violation, or whatever ends the run, with the story in its notes."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with simulated(seed) as loop:
            run = SCENES[scene](seed, directory, loop)
            try:
                with ExitStack() as stack:
                    run.stand_ins(stack)
                    run.run()
            except BaseException as error:
                error.add_note("\n".join([*run.story.lines, f"{scene}, seed {seed}"]))
                raise
            finally:
                loop.end_tasks()
            return run
    finally:
        logging.disable(disabled)
