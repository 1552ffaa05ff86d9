"""`python -m tests.simulation SEED [COUNT] [--scene NAME]`: runs seeds. One seed tells its story; of
many, those that break an invariant are named.
"""

import argparse
import gc
import logging
import sys
import time
from collections import Counter
from pathlib import Path

from tests.simulation.run import SCENES, in_memory, simulate


def main() -> int:
    """Runs the seeds; the exit status is 1 when one breaks an invariant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--scene", choices=list(SCENES), default="groups")
    arguments = parser.parse_args()
    # Once: to disable or enable them empties a cache of every logger.
    logging.disable(logging.CRITICAL)
    # Otherwise the first full collection waits until a quarter as much garbage as libraries is there.
    gc.freeze()
    gc.collect()
    gc.disable()
    began = time.process_time()
    faults = Counter[str]()
    broken: list[int] = []
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        gc.collect()  # what the run before leaves, which nobody holds any more
        with in_memory() as directory:
            try:
                story = simulate(seed, Path(directory), arguments.scene).story
            except BaseException as error:
                if arguments.count == 1:
                    raise
                broken.append(seed)
                print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
                continue
        faults += story.faults
        if arguments.count == 1:
            print("\n".join(story.lines))
        elif (seed + 1) % 500 == 0:
            print(f"up to seed {seed}: {time.process_time() - began:.0f} CPU s", flush=True)
    seconds = time.process_time() - began
    print(
        f"{arguments.count} schedules in {seconds:.1f} CPU seconds, "
        f"{len(broken)} violations; faults {dict(faults)}"
    )
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
