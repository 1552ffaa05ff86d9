"""Compares seconds per step of this system and TRL's GRPOTrainer on the same machine, task, model,
batch and lengths.

Three contestants run alternately, one at a time. The *whole* job group is five tasks as processes
that talk HTTP; by default it is the one that `make demo` starts, with two rollout nodes behind the
router and two trainer nodes. The
*bare* trainer is the same code in one process (`train_in_process`). TRL runs in one process, with
one thread and with one per core; the better result counts. All train on groups of the same prompts,
but each samples its own completions, so the report includes their lengths.

The default is the built-in task. `--config FILE` and settings such as `--model.name DIRECTORY`
choose another model and task. TRL runs in `.venv-trl`, which `make bench-trl` creates. Evaluation
and checkpoints are off; the first steps are not counted.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.command import command_parser, setting_words
from benchmarks.processes import TRL_PYTHON, require_trl, run
from benchmarks.vs_trl_learning import job
from common.errors import ConfigError
from common.process.cli import fail
from common.settings.config import Config, load
from trainer import train_in_process
from trainer.observe.run_dir import read_lines

_CONFIG = "jobgroup/configs/tiny-cpu.yaml"
_JOBGROUP = "jobgroup/rlhf-math-jobgroup.yaml"
_SETTINGS = {"trainer.eval_samples": "0", "trainer.checkpoint_every": "0"}


@dataclass(frozen=True)
class Run:
    """The counted steps of one run."""

    seconds: list[float]
    tokens: float
    """Mean completion length."""
    split: dict[str, float]
    """Mean seconds per step by stage; TRL's generation includes its rewards, and the rest is its
    update."""

    @property
    def step(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True)
class Task:
    """The training job of all contestants."""

    config: str
    jobgroup: str
    settings: dict[str, str]
    """Extra settings by name."""
    warm_up: int
    """First steps of every run that are not counted."""
    threads: int
    """Threads of each process of this system."""
    rows: int
    """Completions per micro-batch of TRL; 0: all of a step."""

    def load(self, steps: int, seed: int, directory: Path) -> Config:
        """Returns the settings of this trainer's runs; TRL gets the same."""
        own = {
            "seed": seed,
            "state_dir": directory / "state",
            "trainer.run_dir": directory,
            "trainer.max_steps": steps,
        }
        words = setting_words({"config": self.config, **self.settings, **own})
        return load(words, {})

    def whole(self, steps: int, seed: int, directory: Path) -> Run:
        """Runs the job group."""
        variables: dict[str, object] = {
            "RUN_CONFIG": self.config,
            "SEED": seed,
            "MAX_STEPS": steps,
            "RUN_DIR": directory,
            "STATE_DIR": directory / "state",
            "OMP_NUM_THREADS": self.threads,
        }
        for name, value in self.settings.items():
            variables[f"RLHF_{name.replace('.', '__').upper()}"] = value
        command = ["-m", "jobgroup.local", self.jobgroup, "--log-dir", str(directory / "logs")]
        for name, setting in variables.items():
            command += ["--env", f"{name}={setting}"]
        run(directory / "output.txt", sys.executable, *command, OMP_NUM_THREADS=str(self.threads))
        return self._ours(directory)

    def bare(self, steps: int, seed: int, directory: Path) -> Run:
        """Runs the same code in one process."""
        words = [*sys.argv[1:], "--bare", str(steps), str(seed), str(directory)]
        command = [sys.executable, "-m", "benchmarks.vs_trl", *words]
        run(directory / "output.txt", *command, OMP_NUM_THREADS=str(self.threads))
        return self._ours(directory)

    def _ours(self, directory: Path) -> Run:
        lines = read_lines(directory / "metrics.jsonl")[self.warm_up :]
        stages = list(lines[0]["seconds"])
        return Run(
            seconds=[sum(line["seconds"].values()) for line in lines],
            tokens=mean(line["completion_tokens"] for line in lines),
            split={stage: mean(line["seconds"][stage] for line in lines) for stage in stages},
        )

    def trl(self, threads: int, steps: int, seed: int, directory: Path) -> Run:
        """Runs TRL's trainer on the same prompts."""
        settings = self.load(steps, seed, directory)
        completions = settings.trainer.batch_size * settings.sampling.group_size
        parts = max(1, completions // self.rows) if self.rows else 1
        rows = {
            "per_device_train_batch_size": completions // parts,
            "gradient_accumulation_steps": parts,
        }
        task = replace(job(settings, directory, rows), save_every=steps + 1)
        command = (TRL_PYTHON, "-m", "benchmarks.trl_side", task.write())
        run(directory / "output.txt", *command, OMP_NUM_THREADS=str(threads))
        log: dict[str, Any] = json.loads((directory / "log.json").read_text())
        tokens = [entry["completions/mean_length"] for entry in log["steps"]][self.warm_up :]
        seconds = log["seconds"][self.warm_up :]
        generation = mean(log["generation"][self.warm_up :])
        return Run(
            seconds=seconds,
            tokens=mean(tokens),
            split={"generation": generation, "update": mean(seconds) - generation},
        )


def compare(task: Task, names: list[str], *, rounds: int, steps: int, console: Console) -> None:
    """Runs the contestants and prints the tables."""
    require_trl()
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    own: dict[str, Callable[[int, int, Path], Run]] = {"whole": task.whole, "bare": task.bare}
    contestants = {name: own[name] for name in names}
    for threads in sorted({task.threads, cores}):
        contestants[f"TRL, {threads} threads"] = partial(task.trl, threads)
    runs: dict[str, list[Run]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as temporary:
        turns = []
        for seed in range(rounds):
            order = [*contestants] if seed % 2 == 0 else [*contestants][::-1]
            turns += [(seed, name) for name in order]
        for seed, name in track(turns, description="running", console=console):
            directory = Path(temporary) / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
            runs[name].append(contestants[name](task.warm_up + steps, seed, directory))
            shutil.rmtree(directory)
    report(runs, cores, console)


def report(runs: dict[str, list[Run]], cores: int, console: Console) -> None:
    """Prints the seconds, the ratios of runs of the same round, and where the whole system spends
    its time.
    """
    best = min(
        (name for name in runs if name.startswith("TRL")),
        key=lambda name: median(run.step for run in runs[name]),
    )
    table = Table(
        "",
        "s/step, median of runs",
        "lowest to highest",
        "tokens/completion",
        f"of {best}",
        "lowest to highest",
    )
    for name, of in runs.items():
        steps = [run.step for run in of]
        ratios = [run.step / peer.step for run, peer in zip(of, runs[best], strict=True)]
        table.add_row(
            name,
            f"{median(steps):.3f}",
            f"{min(steps):.3f} to {max(steps):.3f}",
            f"{mean(run.tokens for run in of):.1f}",
            f"{median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
        )
    rounds = runs[best]
    console.print(f"{cores} cores; {len(rounds)} rounds of {len(rounds[0].seconds)} steps each")
    console.print(table)
    own = [name for name in runs if not name.startswith("TRL")]
    means: dict[str, dict[str, float]] = {}
    for name, of in runs.items():
        means[name] = {stage: mean(run.split[stage] for run in of) for stage in of[0].split}
    split = Table("seconds of a step", *own, best, *(f"{name}, of {best}" for name in own))
    for stage in means[own[0]]:
        own_s = [means[name][stage] for name in own]
        row = [f"{seconds:.3f}" for seconds in own_s]
        if stage in means[best]:
            trl_s = means[best][stage]
            row.append(f"{trl_s:.3f}")
            row += [f"{seconds / trl_s:.2f}" for seconds in own_s]
        split.add_row(stage, *row)
    console.print(split)


def main() -> None:
    parser = command_parser("vs_trl", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant (default 3)")
    parser.add_argument("--steps", type=int, default=20, help="counted steps per run (default 20)")
    parser.add_argument(
        "--warm-up", type=int, default=5, help="uncounted first steps per run (default 5)"
    )
    parser.add_argument("--config", default=_CONFIG, help=f"settings (default {_CONFIG})")
    parser.add_argument(
        "--jobgroup", default=_JOBGROUP, help=f"job group of the whole system (default {_JOBGROUP})"
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=("whole", "bare"),
        default=["whole", "bare"],
        help="beside TRL",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads of each of this system's processes (default 1)",
    )
    parser.add_argument(
        "--trl-rows", type=int, default=0, help="TRL's micro-batch size (default: all of a step)"
    )
    parser.add_argument("--bare", nargs=3, help=argparse.SUPPRESS)
    options, words = parser.parse_known_args()
    if len(words) % 2 or not all(word.startswith("--") for word in words[::2]):
        parser.error(f"further settings are pairs of --NAME VALUE, not {words}")
    settings = _SETTINGS | dict(zip((word[2:] for word in words[::2]), words[1::2], strict=True))
    task = Task(
        config=options.config,
        jobgroup=options.jobgroup,
        settings=settings,
        warm_up=options.warm_up,
        threads=options.threads,
        rows=options.trl_rows,
    )
    try:
        if options.bare:
            steps, seed, directory = options.bare
            train_in_process(task.load(int(steps), int(seed), Path(directory)), Console(quiet=True))
        else:
            compare(
                task,
                options.contestants,
                rounds=options.rounds,
                steps=options.steps,
                console=Console(),
            )
    except ConfigError as error:
        fail(error)


if __name__ == "__main__":
    main()
