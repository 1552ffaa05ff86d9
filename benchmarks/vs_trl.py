"""Seconds per step of this system and of TRL's GRPOTrainer: the same machine, task, model, batch and lengths, in one run.

Three contestants on the built-in task, one at a time and alternately: the *whole* job group as `make demo` starts it (five
tasks, two rollout nodes behind the router, two trainer nodes, HTTP between them), the *bare* trainer (`train_in_process`: the
same code in one process), and TRL in one process, with one thread and with as many as there are cores; its better one counts.
Both train on groups of the same prompts; each samples its own completions, so their lengths are reported too.

TRL runs in `.venv-trl`, which `make bench-trl` makes. Evaluation and checkpoints are off; the first steps do not count.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.vs_trl_learning import TRL_PYTHON, job
from common.config import Config, fail, load
from common.errors import ConfigError
from trainer import train_in_process
from trainer.observe.run_dir import read_lines

_CONFIG = "jobgroup/configs/tiny-cpu.yaml"
_SETTINGS = {"trainer.eval_samples": 0, "trainer.checkpoint_every": 0}
_WARM_UP = 5
"""First steps of every run that do not count."""


@dataclass(frozen=True)
class Run:
    """The steps of one run that count."""

    seconds: list[float]
    tokens: float
    """Mean completion length."""
    split: dict[str, float]
    """Mean seconds of a step by stage; empty for TRL."""

    @property
    def step(self) -> float:
        return median(self.seconds)


def config(steps: int, seed: int, directory: Path) -> Config:
    """Settings of this trainer's runs; TRL gets the same."""
    own = {"seed": seed, "state_dir": directory / "state", "trainer.run_dir": directory, "trainer.max_steps": steps}
    words = [word for name, value in {**_SETTINGS, **own}.items() for word in (f"--{name}", str(value))]
    return load(["--config", _CONFIG, *words], {})


def whole(steps: int, seed: int, directory: Path) -> Run:
    """The job group, as `make demo` starts it."""
    fixed = {f"RLHF_{name.replace('.', '__').upper()}": str(value) for name, value in _SETTINGS.items()}
    own = {"RUN_CONFIG": _CONFIG, "SEED": seed, "MAX_STEPS": steps, "RUN_DIR": directory, "STATE_DIR": directory / "state"}
    empty = dict.fromkeys(("MODEL_NAME", "NUM_EPOCHS", "BATCH_SIZE"), "")
    words = [word for name, value in {**fixed, **own, **empty}.items() for word in ("--env", f"{name}={value}")]
    command = ["-m", "jobgroup.local", "jobgroup/rlhf-math-jobgroup.yaml", "--log-dir", str(directory / "logs")]
    _run([sys.executable, *command, *words, "--env", "OMP_NUM_THREADS=1"], directory, threads=1)
    return _ours(directory)


def bare(steps: int, seed: int, directory: Path) -> Run:
    """The same code in one process."""
    _run([sys.executable, "-m", "benchmarks.vs_trl", "--bare", str(steps), str(seed), str(directory)], directory, threads=1)
    return _ours(directory)


def _ours(directory: Path) -> Run:
    lines = read_lines(directory / "metrics.jsonl")[_WARM_UP:]
    stages = list(lines[0]["seconds"])
    return Run(
        [sum(line["seconds"].values()) for line in lines],
        mean(line["completion_tokens"] for line in lines),
        {stage: mean(line["seconds"][stage] for line in lines) for stage in stages},
    )


def trl(threads: int, steps: int, seed: int, directory: Path) -> Run:
    """TRL's trainer on the same prompts."""
    task = replace(job(config(steps, seed, directory), directory, {}), save_every=steps + 1)
    _run([str(TRL_PYTHON), "-m", "benchmarks.trl_side", str(task.write())], directory, threads)
    log: dict[str, Any] = json.loads((directory / "log.json").read_text())
    tokens = [entry["completions/mean_length"] for entry in log["steps"]]
    return Run(log["seconds"][_WARM_UP:], mean(tokens[_WARM_UP:]), {})


def _run(command: list[str], directory: Path, threads: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    own = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    log = directory / "output.txt"
    with log.open("w", encoding="utf-8") as file:
        status = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **own}, check=False
        ).returncode
    if status:
        tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-20:])
        raise ConfigError(f"a run ended with status {status}, and these lines last:\n{tail}", value=command)


def compare(rounds: int, steps: int, console: Console) -> None:
    """Runs everything and prints the tables."""
    if not TRL_PYTHON.exists():
        raise ConfigError("TRL's environment is not there", value=str(TRL_PYTHON), remedy="`make bench-trl` makes it")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    contestants: dict[str, Callable[[int, int, Path], Run]] = {"whole": whole, "bare": bare}
    for threads in sorted({1, cores}):
        contestants[f"TRL, {threads} threads"] = lambda *about, threads=threads: trl(threads, *about)
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as temporary:
        turns = [(seed, name) for seed in range(rounds) for name in (contestants if seed % 2 == 0 else [*contestants][::-1])]
        for seed, name in track(turns, description="running", console=console):
            directory = Path(temporary) / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
            runs[name].append(contestants[name](_WARM_UP + steps, seed, directory))
            shutil.rmtree(directory)
    report(runs, cores, console)


def report(runs: dict[str, list[Run]], cores: int, console: Console) -> None:
    """Prints seconds, ratios of runs of the same round, and where the time of the whole system goes."""
    best = min((name for name in runs if name.startswith("TRL")), key=lambda name: median(run.step for run in runs[name]))
    table = Table("", "s/step, median of runs", "lowest to highest", "tokens/completion", f"of {best}", "lowest to highest")
    for name, of in runs.items():
        steps, ratios = [run.step for run in of], [run.step / peer.step for run, peer in zip(of, runs[best], strict=True)]
        table.add_row(
            *(name, f"{median(steps):.3f}", f"{min(steps):.3f} to {max(steps):.3f}"),
            *(f"{mean(run.tokens for run in of):.1f}", f"{median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"),
        )
    console.print(f"{cores} cores; {len(runs[best])} rounds of {len(runs[best][0].seconds)} steps each")
    console.print(table)
    split = Table("seconds of a step", *runs["whole"][0].split)
    for name in ("whole", "bare"):
        split.add_row(name, *(f"{mean(run.split[stage] for run in runs[name]):.3f}" for stage in runs[name][0].split))
    console.print(split)


def main() -> None:
    head, *details = (__doc__ or "").split("\n\n")
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vs_trl", description=head, epilog="\n\n".join(details), formatter_class=layout
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant (default 3)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each that count (default 20)")
    parser.add_argument("--bare", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.bare:
            steps, seed, directory = options.bare
            train_in_process(config(int(steps), int(seed), Path(directory)), Console(quiet=True))
        else:
            compare(options.rounds, options.steps, Console())
    except ConfigError as error:
        fail(error)


if __name__ == "__main__":
    main()
