"""What an audit costs: bytes and seconds of a step, and bytes per second of a checksum.

    python -m benchmarks.audit RUN_DIR [--parameters 100000000]

Reads the audit record of a run. The checksum of a model takes its size divided by the rate, twice a
step: once for the gradient, once for the weights.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from learning.digest import digest
from learning.ranks import Ranks
from trainer.observe.run_dir import AUDIT, read_lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    arguments = parser.parse_args()
    lines = [line for line in read_lines(arguments.run_dir / AUDIT) if line["kind"] == "step"]
    steps = [
        sum(line["seconds"].values()) for line in read_lines(arguments.run_dir / "metrics.jsonl")
    ]
    sizes = [len(json.dumps(line)) + 1 for line in lines]
    seconds = [line["seconds"] for line in lines]
    groups = [path.stat().st_size for path in (arguments.run_dir / "groups").glob("*.zip")]

    print(f"{len(lines)} steps of {arguments.run_dir}")
    print(f"audit.jsonl: {statistics.mean(sizes):.0f} bytes a step")
    print(f"groups/:     {statistics.mean(groups):.0f} bytes a step, with and without an audit")
    print(
        f"seconds:     {statistics.median(seconds):.4f} a step "
        f"({min(seconds):.4f} to {max(seconds):.4f}), of {statistics.median(steps):.3f}"
    )
    print(f"checksum:    {rate(arguments.parameters) / 1e9:.2f} GB/s")


def rate(parameters: int) -> float:
    """Returns the bytes per second of a checksum of as many float32 parameters."""
    tensors = [(str(i), torch.ones(parameters // 10)) for i in range(10)]
    ranks = Ranks(device_kind="cpu")
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        digest(tensors, ranks)
        seconds.append(time.perf_counter() - began)
    return 4 * parameters / min(seconds)


if __name__ == "__main__":
    main()
