"""Measures recording groups, and finding them again among 100,000: `python -m benchmarks.groups
[PART …]`.

`recording`: steps of 32 groups × 8 completions × 1,024 tokens with random ids and
log-probabilities, which compress badly. Measures the seconds that the step waits, the background
thread's seconds, and bytes. `searching`: fills an index, queries it, and queries it again after one
more step. `page`: the seconds from the dashboard's URL to the first list, with a cold and a warm
server, in headless Chromium (Debian's `chromium` and `chromium-driver`).
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
from common.wire.schemas import Completion, Group
from tests.support.browser.browser import Page, chromium
from tests.support.browser.viewer_page import served
from trainer.dashboard.group_index import GroupIndex, Query
from trainer.observe.group_files import (
    LINES,
    GroupRecorder,
    RecordedGroup,
    read_group,
    recorded_steps,
)

STEPS = 3125
TOKENS = 1024
"""Tokens of a recorded completion."""
EACH = 32
"""Groups per step."""


def make_groups(rng: np.random.Generator) -> list[Group]:
    """Returns 32 groups of 8 completions of 1,024 tokens."""
    groups = []
    for i in range(EACH):
        completions = [
            Completion(
                token_ids=rng.integers(0, 150_000, TOKENS, dtype=np.int32),
                logprobs=-rng.random(TOKENS, np.float32),
                text="word " * TOKENS,
                finish_reason="stop",
                weight_versions=[(0, 0, TOKENS)],
                reward=float(rng.integers(0, 2)),
            )
            for _ in range(8)
        ]
        groups.append(
            Group(
                id=f"g-{i}",
                prompt_id="p",
                prompt="a prompt",
                ground_truth="42",
                prompt_token_ids=np.arange(64, dtype=np.int32),
                completions=completions,
            )
        )
    return groups


def recording(directory: Path, rounds: int) -> None:
    """Prints the cost of recording one step."""
    rng = np.random.default_rng(0)
    groups = make_groups(rng)
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
    first = median_seconds(lambda: index.search(Query(), limit=50, offset=0), 1)
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
        seconds = median_seconds(partial(index.search, query, limit=50, offset=offset), rounds)
        print(f"  {name}: {1e3 * seconds:.1f} ms")
    write_lines(directory, STEPS + 1, 1)
    again = median_seconds(lambda: index.search(Query(), limit=50, offset=0), 1)
    print(f"  after one more step: {1e3 * again:.1f} ms")
    of_prompt = median_seconds(lambda: index.of_prompt("gsm8k-5", 200), rounds)
    print(f"  groups of a prompt: {1e3 * of_prompt:.1f} ms")


def first_list(tab: Page, url: str) -> float:
    """Returns the seconds from the URL to the first rows."""
    tab.driver.get("about:blank")
    start = time.perf_counter()
    tab.driver.get(f"{url}#rollouts")
    while not tab.count(".viewer-open"):
        time.sleep(0.005)
    return time.perf_counter() - start


def page(directory: Path, rounds: int) -> None:
    """Prints the seconds until the list is shown."""
    groups = STEPS * EACH
    write_lines(directory, 1, STEPS)
    cold = []
    warm = []
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        chromium(Path(profile)) as tab,
    ):
        for _ in range(rounds):
            with served(directory) as url:
                cold.append(first_list(tab, url))
                while f"of {groups:,}" not in tab.text("[role=status]"):
                    time.sleep(0.05)
                warm.append(first_list(tab, url))
                tab.driver.get("about:blank")
    print(
        f"first list of {groups:,} groups: {statistics.median(cold):.2f} s "
        f"with a server that has read nothing, {statistics.median(warm):.2f} s again"
    )


def main() -> None:
    parts = {"recording": recording, "searching": searching, "page": page}
    parser = command_parser("benchmarks.groups", __doc__)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(parts)}; all if none is named")
    parser.add_argument(
        "--rounds", type=int, default=9, help="rounds of every measurement; the median counts"
    )
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} CPUs")
    for name, part in parts.items():
        if not arguments.parts or name in arguments.parts:
            with tempfile.TemporaryDirectory() as directory:
                part(Path(directory), arguments.rounds)


if __name__ == "__main__":
    main()
