"""Measures the cost of recording groups, and search speed over 100,000 groups: `python -m
benchmarks.groups`.

Records steps of 32 groups × 8 completions × 1,024 tokens with random ids and log-probabilities,
which compress badly. Measures the seconds that the step waits, the background thread's seconds, and
bytes. Then fills an index of 100,000 groups, queries it, and queries it again after one more step.
"""

import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from benchmarks.command import command_parser, median_seconds, seconds_of
from benchmarks.replay import make_groups
from trainer.dashboard.group_index import GroupIndex, Query
from trainer.observe.group_files import (
    LINES,
    GroupRecorder,
    RecordedGroup,
    read_group,
    recorded_steps,
)

STEPS = 3125
EACH = 32
"""Groups per step."""


def recording(directory: Path, rounds: int) -> None:
    """Prints the cost of recording one step."""
    rng = np.random.default_rng(0)
    groups = make_groups("g", rng)
    items = []
    for group in groups:
        advantages = []
        logprobs = []
        for completion in group.completions:
            length = len(completion.logprobs)
            advantages.append(np.full(length, 0.5, np.float32))
            shift = rng.normal(0, 1e-3, length).astype(np.float32)
            logprobs.append(completion.logprobs + shift)
        items.append(RecordedGroup(group, advantages, logprobs))

    recorder = GroupRecorder(directory, 1 << 40, 0)
    waited = []
    wrote = []
    cpu = []
    for step in range(1, rounds + 1):
        waited.append(seconds_of(partial(recorder.step, step, items, ())))
        used = time.process_time()
        wrote.append(seconds_of(recorder.flush))
        cpu.append(time.process_time() - used)
    size = recorded_steps(directory)[1].stat().st_size
    line = (directory / LINES).stat().st_size / rounds
    tokens = sum(len(completion.token_ids) for group in groups for completion in group.completions)
    waits_ms = 1e3 * statistics.median(waited)
    writes_s = statistics.median(wrote)
    print(f"a step of {tokens:,} tokens: waits {waits_ms:.1f} ms, thread {writes_s:.2f} s")
    sizes = f"file {size / 1e6:.1f} MB ({size / tokens:.1f} bytes a token)"
    print(f"  CPU of the thread {statistics.median(cpu):.2f} s, {sizes}")
    read_ms = 1e3 * median_seconds(lambda: read_group(directory, 1, 7), 9)
    print(f"  line {line / 1e3:.1f} kB; one group read in {read_ms:.1f} ms")


def write_lines(directory: Path, first: int, steps: int) -> None:
    rng = np.random.default_rng(first)
    with (directory / LINES).open("a", encoding="utf-8") as file:
        for step in range(first, first + steps):
            groups = []
            for i in range(EACH):
                number = (step - 1) * EACH + i
                rewards = rng.integers(0, 2, 8)
                group = {
                    "id": f"group-{number}",
                    "prompt_id": f"gsm8k-{number % 7473}",
                    "position": number,
                    "prompt": f"What is {number % 7473} + 1? " * 12,
                    "versions": [step - 1, step - 1],
                    "reward": float(rewards.mean()),
                    "rewards": rewards.tolist(),
                    "correct": int(rewards.sum()),
                    "tokens": rng.integers(20, 512, 8).tolist(),
                    "marks": ["truncated"] if number % 9 == 0 else [],
                    "advantage": float(rewards.std()),
                    "delta": float(rng.random() * 1e-3),
                    "reused": False,
                }
                groups.append(group)
            file.write(json.dumps({"step": step, "groups": groups}) + "\n")


def searching(directory: Path, rounds: int) -> None:
    """Prints the cost of the index."""
    write_lines(directory, 1, STEPS)
    index = GroupIndex(directory)
    before = psutil.Process().memory_info().rss
    first = median_seconds(lambda: index.search(Query(), 50, 0), 1)
    size = (directory / LINES).stat().st_size / 1e6
    memory = (psutil.Process().memory_info().rss - before) / 1e6
    print(
        f"{STEPS * EACH:,} groups ({size:.0f} MB of lines): first answer after {first:.2f} s, "
        f"{memory:.0f} MB of memory, then"
    )
    asked = {
        "the newest page": (Query(), 0),
        "page 1,000": (Query(), 50_000),
        "text in the prompt": (Query(text="is 123 +"), 0),
        "reward, length and error, by length": (
            Query(reward_min=0.5, length_max=300, error="truncated", sort="-length"),
            0,
        ),
        "all by |Δ logprob|": (Query(sort="-delta"), 0),
    }
    for name, (query, offset) in asked.items():
        seconds = median_seconds(partial(index.search, query, 50, offset), rounds)
        print(f"  {name}: {1e3 * seconds:.1f} ms")
    write_lines(directory, STEPS + 1, 1)
    again = median_seconds(lambda: index.search(Query(), 50, 0), 1)
    print(f"  after one more step: {1e3 * again:.1f} ms")
    of_prompt = median_seconds(lambda: index.of_prompt("gsm8k-5", 200), rounds)
    print(f"  groups of a prompt: {1e3 * of_prompt:.1f} ms")


def main() -> None:
    parser = command_parser("groups", __doc__)
    parser.add_argument(
        "--rounds", type=int, default=9, help="rounds of every measurement; the median counts"
    )
    rounds = parser.parse_args().rounds
    print(f"{os.cpu_count()} CPUs")
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        recording(Path(one), rounds)
        searching(Path(two), rounds)


if __name__ == "__main__":
    main()
