"""Runs the scene of a seed."""

import logging
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from fastapi.dependencies import models

from tests.simulation.episodes import EpisodeWorld
from tests.simulation.fleet import Fleet
from tests.simulation.scene import NoEnd, Scene, Violation
from tests.simulation.takeover import EpisodeTakeover, Takeover
from tests.simulation.virtual_time import simulated
from tests.simulation.world import World

# Threads take longer than the few tokens of a prompt.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
SCENES: dict[str, type[Scene]] = {
    "groups": World,
    "episodes": EpisodeWorld,
    "takeover": Takeover,
    "takeover-episodes": EpisodeTakeover,
    "fleet": Fleet,
}
"""By the names that the command takes."""


def in_memory() -> "tempfile.TemporaryDirectory[str]":
    """Returns a directory for a run: on a disk, syncing takes longer than the run itself."""
    memory = Path("/dev/shm")  # noqa: S108
    return tempfile.TemporaryDirectory(dir=memory if memory.exists() else None)


def simulate(seed: int, directory: Path, scene: str = "groups") -> Scene:
    """Runs a seed. Raises Violation, or whatever ends the run, with the story in its notes."""
    disabled = logging.root.manager.disable
    if disabled < logging.CRITICAL:
        logging.disable(logging.CRITICAL)
    try:
        with simulated(seed) as loop:
            run = SCENES[scene](seed, directory, loop)
            with ExitStack() as stack:
                run.stand_ins(stack)
                try:
                    _run(run)
                except BaseException as error:
                    error.add_note("\n".join([*run.story.lines, f"{scene}, seed {seed}"]))
                    raise
                finally:
                    loop.end_tasks()
            return run
    finally:
        if disabled < logging.CRITICAL:
            logging.disable(disabled)
        _forget_routes()


def _run(scene: Scene) -> None:
    try:
        scene.run()
    except NoEnd as error:
        # Whoever runs many seeds goes on with the next one.
        raise Violation(str(error)) from error


def _forget_routes() -> None:
    """Empties FastAPI's caches, which keep the routes of thousands of ended services, and with
    them all their data.
    """
    for cached in vars(models).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
