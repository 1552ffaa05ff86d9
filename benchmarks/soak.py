"""Does anything leak? Runs the local job group on the built-in task for a long time and watches
every process and file.

`python -m benchmarks.soak [--minutes 30]` reads the memory, open files and threads of every process
and the size of every store every ten seconds. The first quarter of the time is a warm-up; after it,
lines are fitted. The exit status is 1 if anything grows beyond its bound. Files that grow by design
(a line per step, checkpoints, logs) are shown with their rate.
"""

import json
import os
import signal
import stat
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.command import command_parser, figures_table
from tests.chaos.group import ROOT, Group
from tests.chaos.targets import Process

EVERY_S = 10.0
WARM_UP = 0.25
RSS_BOUND_MB_PER_HOUR = 40.0
"""A process may grow by this much per hour, plus the noise."""
RSS_NOISE_MB = 8.0
"""In a short run, allocators settle late."""
FILES_BOUND = 3.0
"""Open files that a process may gain over the whole time."""
THREADS_BOUND = 2.0
"""Threads that a process may gain over the whole time."""
STORE_BOUND_MB = 4.0
"""A bounded store may grow by this much plus `STORE_SHARE` of its size, because it is written in
chunks."""
STORE_SHARE = 0.1
SETTINGS = {
    "RUN_CONFIG": str(ROOT / "jobgroup" / "configs" / "tiny-cpu.yaml"),
    "NUM_EPOCHS": "100000",
    "MAX_STEPS": "1000000",
    "BATCH_SIZE": "4",
    "RLHF_SAMPLING__GROUP_SIZE": "4",
    "RLHF_REPLAY__CAPACITY": "1600",  # full after a hundred steps, so that old groups are removed
    # the model hardly changes, so the step time stays constant
    "RLHF_OPTIMIZER__LEARNING_RATE": "1e-6",
    "RLHF_EVALUATION__EVERY": "100",
    "RLHF_EVALUATION__SAMPLES": "16",
    "RLHF_EVALUATION__PASS_SAMPLES": "0",
    "RLHF_CHECKPOINT__EVERY": "50",
    "RLHF_CHECKPOINT__KEEP": "2",
}
STORES = {
    "data-server's cursor": "state/data",
    "replay-buffer's groups": "state/replay",
    "weights of the engines": "state/rollout",
    "weights of the trainer": "run/weights",
    "checkpoints": "run/checkpoints",
}
BY_DESIGN = {
    "metrics.jsonl": "run/metrics.jsonl",
    "groups.jsonl": "run/groups.jsonl",
    "groups in full": "run/groups",
    "samples.jsonl": "run/samples.jsonl",
    "logs of the services": "state/logs",
    "logs of the local runner": "logs",
}
Series = list[tuple[float, float]]
"""(seconds since the start, value)."""


@dataclass
class Samples:
    """The samples, by name."""

    rss_mb: dict[str, Series] = field(default_factory=lambda: defaultdict(list))
    files: dict[str, Series] = field(default_factory=lambda: defaultdict(list))
    threads: dict[str, Series] = field(default_factory=lambda: defaultdict(list))
    stores: dict[str, Series] = field(default_factory=lambda: defaultdict(list))
    steps: Series = field(default_factory=list)


def role(process: Process) -> str:
    """Names the node and the process's role in it, as in `ppo-trainer-0 trainer`."""
    words = process.argv
    if not process.node:
        return "jobgroup.local"
    if process.is_launcher:
        name = "launcher"
    elif process.is_grader:
        name = "graders"
    elif len(words) == 1:
        name = words[0]
    elif "-m" in words[:4] and "-S" not in words:
        name = words[words.index("-m") + 1].removeprefix("services.")
    else:
        name = "starter" if "-S" in words else Path(words[0]).name
    return f"{process.node} {name}"


def sample(group: Group, at: float, samples: Samples) -> None:
    """Takes one sample of everything. Processes with the same role on a node are summed."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for process in group.processes():
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        except OSError:  # the process has just ended
            continue
        values = dict(line.split(":", 1) for line in status.splitlines())
        if "VmRSS" in values:
            row = totals[role(process)]
            row[0] += int(values["VmRSS"].split()[0]) / 1024
            row[1] += files
            row[2] += int(values["Threads"])
    for name, (rss, files_open, threads) in totals.items():
        samples.rss_mb[name].append((at, rss))
        samples.files[name].append((at, files_open))
        samples.threads[name].append((at, threads))
    for name, path in {**STORES, **BY_DESIGN}.items():
        samples.stores[name].append((at, _bytes(group.folder / path)))
    samples.steps.append((at, group.step()))


def _bytes(path: Path) -> float:
    """Returns the size of a file, or of all files in a directory; hard links count once."""
    sizes = {}
    inside = []
    for folder, _, names in os.walk(path):  # skips files that are removed meanwhile
        inside += [Path(folder) / name for name in names]
    for file in inside or [path]:
        try:
            found = file.stat()
        except OSError:  # the file has just been removed
            continue
        if stat.S_ISREG(found.st_mode):
            sizes[found.st_ino] = found.st_size
    return float(sum(sizes.values()))


def growth(series: Series, since: float) -> float:
    """Returns the rise of a line fitted to the values from `since` on."""
    points = np.array([point for point in series if point[0] >= since])
    if len(points) < 3:
        return 0.0
    slope = float(np.polyfit(points[:, 0], points[:, 1], 1)[0])
    return slope * float(points[-1, 0] - points[0, 0])


def judge(samples: Samples, since: float, until: float) -> list[str]:
    """Names everything that grew beyond its bound."""
    seconds = f"{until - since:.0f} s"
    rss_bound = RSS_NOISE_MB + RSS_BOUND_MB_PER_HOUR * (until - since) / 3600
    bounds: list[tuple[str, Mapping[str, Series], float]] = [
        ("MB of memory", samples.rss_mb, rss_bound),
        ("open files", samples.files, FILES_BOUND),
        ("threads", samples.threads, THREADS_BOUND),
    ]
    found = []
    for what, table, bound in bounds:
        for name, series in table.items():
            more = growth(series, since)
            if more > bound:
                found.append(f"{name}: {more:+.1f} {what} in {seconds}, more than {bound:.1f}")
    for name in STORES:
        series = samples.stores[name]
        bound = STORE_BOUND_MB * 1e6 + STORE_SHARE * series[-1][1]
        more = growth(series, since)
        if more > bound:
            on_disk = f"{more / 1e6:+.1f} MB on disk in {seconds}"
            found.append(f"{name}: {on_disk}, more than {bound / 1e6:.1f}")
    return found


def report(samples: Samples, since: float, console: Console) -> None:
    """Prints the tables; growth is measured after the warm-up."""
    title = f"processes: at the end (risen since {since:.0f} s)"
    table = figures_table(title, ["process", "memory MB", "open files", "threads"])
    for name in sorted(samples.rss_mb):
        cells = [
            f"{series[name][-1][1]:.0f} ({growth(series[name], since):+.1f})"
            for series in (samples.rss_mb, samples.files, samples.threads)
        ]
        table.add_row(name, *cells)
    console.print(table)
    steps = max(1.0, samples.steps[-1][1])
    table = figures_table("files", ["what", "MB at the end", "MB risen", "bytes per step"])
    for name, series in samples.stores.items():
        rate = f"{series[-1][1] / steps:.0f}" if name in BY_DESIGN else "bounded"
        table.add_row(
            name, f"{series[-1][1] / 1e6:.2f}", f"{growth(series, since) / 1e6:+.2f}", rate
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns the exit status."""
    parser = command_parser("benchmarks.soak", __doc__)
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="duration, counted from the first step"
    )
    parser.add_argument("--base-model", type=Path, default=ROOT / ".cache" / "tiny-base")
    parser.add_argument("--json", type=Path, help="write every sample here")
    options = parser.parse_args(argv)
    console = Console(width=120, highlight=False)
    samples = Samples()
    seconds = options.minutes * 60
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        group = Group(Path(folder), SETTINGS | {"MODEL_NAME": str(options.base_model.resolve())})
        with group.running():
            assert group.process is not None
            while not group.step():
                if group.process.poll() is not None:
                    console.print(group.output()[-4000:], markup=False)
                    return 1
                time.sleep(0.2)
            start = time.monotonic()
            while (at := time.monotonic() - start) < seconds and group.process.poll() is None:
                sample(group, at, samples)
                time.sleep(max(0.0, min(EVERY_S - (time.monotonic() - start - at), seconds - at)))
            ended = group.process.poll()
            if ended is None:
                group.process.send_signal(signal.SIGTERM)
        until = samples.steps[-1][0]
        since = WARM_UP * until
        problems = judge(samples, since, until)
        if ended is not None:
            problems.append(
                f"the group ended by itself with status {ended}:\n{group.output()[-3000:]}"
            )
        restarts = dict(group.restarts())
        if restarts:
            problems.append(f"tasks were restarted: {restarts}")
    report(samples, since, console)
    console.print(
        f"{samples.steps[-1][1]:.0f} steps in {until:.0f} s, {len(samples.steps)} samples"
    )
    for problem in problems:
        console.print(f"grows or fails: {problem}", style="red", markup=False)
    if options.json:
        options.json.write_text(json.dumps(samples.__dict__) + "\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
