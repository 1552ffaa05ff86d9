"""`python -m tests.simulation SEED [COUNT]`: runs seeds and prints the story of the first that breaks
an invariant.
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.simulation.world import simulate


def main() -> None:
    """Runs the seeds."""
    first = int(sys.argv[1])
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    began = time.process_time()
    faults = Counter[str]()
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            world = simulate(seed, Path(directory))
        faults += world.story.faults
        if count == 1:
            print("\n".join(world.story.lines))
    seconds = time.process_time() - began
    print(f"{count} schedules in {seconds:.1f} CPU seconds; faults {dict(faults)}")


if __name__ == "__main__":
    main()
