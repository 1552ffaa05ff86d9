"""Measures the calls of the replay buffer on large stores: `python -m benchmarks.replay [--sizes N
…]`.

Each call runs in this process, on stores of `--sizes` groups of 8 answers, half of them consumed.
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.command import command_parser, seconds_of
from common.settings.sections import ReplaySection
from common.wire.schemas import Completion, Group, SampleRequest, TakeRequest
from services.replay.buffer import ReplayBuffer

GROUPS = 32
PER_VERSION = 128
"""Groups of one weight version."""


def at_size(path: Path, groups: int, rounds: int = 30) -> list[str]:
    """Returns a row of the table: the cost of a store with `groups` small groups, half of them
    consumed.

    The columns are: adding and taking 32 groups (which are then acknowledged), drawing 64 by
    priority from all and from those of the last eight versions, drawing 64 answers, opening the
    store, and megabytes on disk.
    """
    ids = np.arange(4, dtype=np.int32)
    config = ReplaySection(capacity=8 * (groups + (rounds + 1) * GROUPS))

    def completions(version: int) -> list[Completion]:
        return [
            Completion(
                token_ids=ids,
                logprobs=-ids.astype(np.float32),
                text="a",
                finish_reason="stop",
                weight_versions=[(version, 0, 4)],
                reward=i / 8,
            )
            for i in range(8)
        ]

    def made(first: int, count: int) -> list[Group]:
        return [
            Group(
                id=f"g-{i}",
                prompt_id="p",
                prompt="a prompt",
                ground_truth="42",
                prompt_token_ids=ids,
                completions=completions(i // PER_VERSION),
                position=i,
            )
            for i in range(first, first + count)
        ]

    buffer = ReplayBuffer(config, path)
    for first in range(0, groups, 5_000):
        buffer.add(made(first, 5_000))
        if first < groups // 2:
            buffer.store.ack([f"g-{i}" for i in range(first, first + 5_000)])
    buffer.close()
    start = time.perf_counter()
    buffer = ReplayBuffer(config, path)
    opened = time.perf_counter() - start
    add = []
    take = []
    sample = []
    sample_new = []
    answers = []
    for i in range(rounds):
        fresh = made(groups + i * GROUPS, GROUPS)
        take_request = TakeRequest(count=GROUPS, request_id=f"take-{i}")
        sample_request = SampleRequest(count=64, seed=i)
        newest = SampleRequest(count=64, seed=i, min_version=groups // 2 // PER_VERSION - 8)
        draw = partial(buffer.sample_experiences, 64, prioritized=True, seed=i)
        add.append(seconds_of(partial(buffer.add, fresh)))
        take.append(seconds_of(partial(buffer.take, take_request)))
        sample.append(seconds_of(partial(buffer.sample, sample_request)))
        sample_new.append(seconds_of(partial(buffer.sample, newest)))
        answers.append(seconds_of(draw))
    size = buffer.store.size()
    buffer.close()
    measured = (add, take, sample, sample_new, answers)
    times = [statistics.median(values) * 1e3 for values in measured]
    return [f"{groups:,}", *(f"{each:.1f}" for each in times), f"{opened:.2f}", f"{size / 1e6:.0f}"]


def main() -> None:
    parser = command_parser("benchmarks.replay", __doc__)
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[10_000, 100_000],
        help="groups of the stores",
    )
    arguments = parser.parse_args()
    print(
        "groups; add 32, take 32, sample 64 of all and of the last 8 versions, 64 answers (ms); "
        "open (s); file (MB)"
    )
    for groups in arguments.sizes:
        with tempfile.TemporaryDirectory() as state:
            print(*at_size(Path(state) / "replay.db", groups), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
