"""Measures where the processor time of a step goes: `OMP_NUM_THREADS=1 python -m benchmarks.step`.

Runs the job group that `benchmarks.vs_trl speed` calls *whole*, without evaluation and checkpoints,
and prints the processor time of every process for a step, and the seconds of its stages. Processor
time depends less on what else runs than the time that passes; still, a machine whose cores are
shared takes up to half more of it.
"""

import os
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import mean

import psutil

from benchmarks.command import command_parser
from benchmarks.learning import CONFIG
from benchmarks.processes import ROOT
from common.process.cli import positive
from trainer.observe.run_dir import read_lines

_JOBGROUP = "jobgroup/rlhf-math-jobgroup.yaml"
_WARM_UP = 5
"""First steps that are not counted."""
_POLL_S = 0.05


def start(directory: Path, steps: int) -> psutil.Popen:
    """Starts the job group."""
    variables = {
        "RUN_CONFIG": CONFIG,
        "RUN_DIR": directory,
        "STATE_DIR": directory / "state",
        "OMP_NUM_THREADS": 1,
        "RLHF_TRAINER__MAX_STEPS": steps,
        "RLHF_EVALUATION__SAMPLES": 0,
        "RLHF_CHECKPOINT__EVERY": 0,
        "SEED": 0,
    }
    logs = str(directory / "logs")
    command = [sys.executable, "-m", "jobgroup.local", _JOBGROUP, "--log-dir", logs]
    for name, value in variables.items():
        command += ["--env", f"{name}={value}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
    with (directory / "output.txt").open("w") as output:
        return psutil.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)


def processor_seconds(group: psutil.Popen) -> dict[str, float]:
    """Returns the processor time so far of every process of the job group, by id and command."""
    found: dict[str, float] = {}
    for process in group.children(recursive=True):
        with suppress(psutil.Error):  # it may just have ended
            words = " ".join(process.cmdline()[1:]) or process.name()
            times = process.cpu_times()
            found[f"{process.pid} {words[:60]}"] = times.user + times.system
    return found


def wait_for(directory: Path, steps: int, group: psutil.Popen) -> int:
    """Returns the number of steps once there are `steps`. Raises RuntimeError if the run ends
    before.
    """
    while (done := len(read_lines(directory / "metrics.jsonl"))) < steps:
        if group.poll() is not None:
            raise RuntimeError((directory / "output.txt").read_text()[-4000:])
        time.sleep(_POLL_S)
    return done


def measure(steps: int) -> None:
    """Prints processor time and stages of `steps` steps."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        # The last steps are left out: the run ends after them.
        group = start(directory, _WARM_UP + steps + 2)
        first = wait_for(directory, _WARM_UP, group)
        before = processor_seconds(group)
        last = wait_for(directory, _WARM_UP + steps, group)
        after = processor_seconds(group)
        counted = read_lines(directory / "metrics.jsonl")[first:last]
        group.wait()
    spent = {name: seconds - before.get(name, seconds) for name, seconds in after.items()}
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        if seconds > 0.0005 * len(counted):
            print(f"{1000 * seconds / len(counted):7.1f} ms  {name.partition(' ')[2]}")
    total = sum(spent.values()) / len(counted)
    print(f"{1000 * total:7.1f} ms of processor for a step, in {len(counted)} steps")
    stages: defaultdict[str, list[float]] = defaultdict(list)
    for record in counted:
        for stage, seconds in record["seconds"].items():
            stages[stage].append(seconds)
    print(", ".join(f"{stage} {1000 * mean(found):.0f} ms" for stage, found in stages.items()))
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main() -> None:
    """Measures."""
    parser = command_parser("benchmarks.step", __doc__)
    parser.add_argument("--steps", type=positive, default=30, help="counted steps (default 30)")
    measure(parser.parse_args().steps)


if __name__ == "__main__":
    main()
