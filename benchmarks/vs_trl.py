"""Compares this system with TRL's GRPOTrainer on the same machine, task, model, prompts and grader.

`python -m benchmarks.vs_trl speed` compares seconds per step. The *whole* job group is five tasks
as processes that talk HTTP; by default it is the one that `make demo` starts, with two rollout
nodes behind the router and two trainer nodes. The *bare* trainer is the same code in one process
(`train_in_process`). TRL runs in one process, with one thread and with one per core; the better
result counts. Each samples its own completions, so the report includes their lengths. Evaluation
and checkpoints are off; the first steps are not counted. `--config FILE` and settings such as
`--model.name DIRECTORY` choose another model and task than the built-in ones.

`python -m benchmarks.vs_trl learning` asks whether this trainer learns like TRL's, on the built-in
task with the demo's settings. Over several seeds, each half samples its own completions; the
held-out greedy accuracy of the checkpoints and the rewards of the batches are compared in pairs.
On the first `--replays` seeds TRL also trains on exactly the tokens that this trainer trained on,
so the loss, gradient norm and weights of every step can be compared deterministically.

TRL runs in `.venv-trl`, which `make bench-trl` creates. Runs alternate, one at a time.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM

from benchmarks.command import command_parser, figures_table
from benchmarks.learning import CONFIG, run_words, train
from benchmarks.processes import TRL_PYTHON, require_trl, run
from benchmarks.trl_side import Job, grade
from common.errors import ConfigError
from common.process.cli import fail
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.config import Config, load
from common.wire.schemas import Group
from services.data.loaders import load_split
from services.data.stream import PromptStream
from services.replay.buffer import unpack_groups
from services.replay.store import Store
from trainer.observe.run_dir import read_lines
from trainer.policy.learning_rate import learning_rate
from trainer.policy.scorer import load_tokenizer, quiet, stop_token_ids

_JOBGROUP = "jobgroup/rlhf-math-jobgroup.yaml"
_TRL_EPS = "1e-4"
"""The constant TRL adds to a group's standard deviation; TRL has no setting for it, so this trainer
adopts it."""


@dataclass(frozen=True)
class Step:
    """The figures of one step of either trainer."""

    reward: float
    tokens: float
    """Mean completion length."""
    truncated: float
    """Share of completions truncated at the limit."""
    learning_rate: float
    loss: float
    grad_norm: float
    stages: dict[str, float]
    """Seconds by stage, without evaluation; TRL's generation includes its rewards, and the rest is
    its update."""

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


def our_steps(directory: Path) -> list[Step]:
    steps = []
    for line in read_lines(directory / "metrics.jsonl"):
        stages = {name: each for name, each in line["seconds"].items() if name != "evaluation"}
        update = line["update"]
        step = Step(
            reward=line["reward"],
            tokens=line["completion_tokens"],
            truncated=line["truncated"],
            learning_rate=update["learning_rate"],
            loss=update["loss"],
            grad_norm=update["grad_norm"],
            stages=stages,
        )
        steps.append(step)
    return steps


def trl_steps(job: Job, threads: int = 1) -> list[Step]:
    """Runs TRL's trainer and returns its steps."""
    directory = Path(job.output)
    command = (TRL_PYTHON, "-m", "benchmarks.trl_side", job.write())
    run(directory / "output.txt", *command, OMP_NUM_THREADS=str(threads))
    log: dict[str, Any] = json.loads((directory / "log.json").read_text())
    steps = []
    for line, seconds, generation in zip(
        log["steps"], log["seconds"], log["generation"], strict=True
    ):
        step = Step(
            reward=line["reward"],
            tokens=line["completions/mean_length"],
            truncated=line["completions/clipped_ratio"],
            learning_rate=line["learning_rate"],
            loss=line["loss"],
            grad_norm=line["grad_norm"],
            stages={"generation": generation, "update": seconds - generation},
        )
        steps.append(step)
    return steps


def trl_settings(config: Config) -> dict[str, Any]:
    """Returns the same settings under TRL's names, but only those that matter or differ from TRL's
    defaults.
    """
    trainer = config.trainer
    sampling = config.sampling
    algorithm = config.algorithm
    return {
        "per_device_train_batch_size": trainer.batch_size * sampling.group_size,
        "gradient_accumulation_steps": 1,
        "num_iterations": 1,
        "num_generations": sampling.group_size,
        "max_completion_length": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "shuffle_dataset": False,
        "learning_rate": config.optimizer.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": config.optimizer.warmup_steps,
        "adam_beta1": config.optimizer.adam_betas[0],
        "adam_beta2": config.optimizer.adam_betas[1],
        "weight_decay": config.optimizer.weight_decay,
        "max_grad_norm": config.optimizer.max_grad_norm,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon": algorithm.clip_low,
        "epsilon_high": algorithm.clip_high,
        "beta": algorithm.kl_coef,
        "bf16": False,
        "gradient_checkpointing": False,
    }


def trl_job(config: Config, output: Path, groups: Sequence[Group] = ()) -> Job:
    """Returns TRL's half: the first prompts of the data-server's stream and, with `groups`, their
    completions.
    """
    trainer = config.trainer
    tokenizer = load_tokenizer(config.model)
    prompter = Prompter(tokenizer, PromptStyle.of(config), [])
    assert trainer.max_steps is not None
    with tempfile.TemporaryDirectory() as state:
        rows = load_split(config.data, "train", config.seed)
        stream = PromptStream(rows, config.seed, Path(state))
        prompts = stream.take(trainer.max_steps * trainer.batch_size).prompts
        stream.close()
    given_prompts = []
    for prompt in prompts:
        ids = prompter.token_ids(prompt)
        text = _text(ids, tokenizer)
        given_prompts.append({"ids": ids, "text": text, "answer": prompt.ground_truth})
    completions = [each.token_ids.tolist() for group in groups for each in group.completions]
    return Job(
        model=config.model.name,
        output=str(output),
        seed=config.seed,
        save_every=config.checkpoint.every or trainer.max_steps + 1,
        settings=trl_settings(config),
        learning_rates=[
            learning_rate(step, None, config.optimizer) for step in range(trainer.max_steps)
        ],
        prompts=given_prompts,
        completions=completions or None,
    )


def _text(ids: list[int], tokenizer: Any) -> str:
    """Returns the text that tokenizes to these tokens, without a first token that the tokenizer
    adds itself.
    """
    text = str(tokenizer.decode(ids))
    if tokenizer(text)["input_ids"] == ids:
        return text
    return str(tokenizer.decode(ids, skip_special_tokens=True))


# Seconds per step


@dataclass(frozen=True)
class Contest:
    """The training job of all contestants, and how they run."""

    config: str
    jobgroup: str
    settings: dict[str, object]
    """Settings beside those of `config`, by name."""
    warm_up: int
    """First steps of every run that are not counted."""
    threads: int
    """Threads of each process of this system."""
    rows: int
    """Completions per micro-batch of TRL; 0: all of a step."""

    def whole(self, directory: Path) -> list[Step]:
        """Runs the job group."""
        variables: dict[str, object] = {
            "RUN_CONFIG": self.config,
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
        return our_steps(directory)

    def bare(self, directory: Path) -> list[Step]:
        """Runs the same code in one process."""
        train(directory, {"config": self.config, **self.settings}, threads=self.threads)
        return our_steps(directory)

    def trl(self, threads: int, directory: Path) -> list[Step]:
        """Runs TRL's trainer on the same prompts."""
        config = load(run_words(directory, {"config": self.config, **self.settings}), {})
        completions = config.trainer.batch_size * config.sampling.group_size
        parts = max(1, completions // self.rows) if self.rows else 1
        job = trl_job(config, directory)
        rows = {
            "per_device_train_batch_size": completions // parts,
            "gradient_accumulation_steps": parts,
        }
        return trl_steps(replace(job, settings=job.settings | rows), threads)


def compare_speed(options: argparse.Namespace, settings: dict[str, object]) -> None:
    """Runs the contestants alternately and prints the seconds, the ratios of runs of the same
    round, and where the time is spent.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    length: dict[str, object] = {
        "trainer.max_steps": options.warm_up + options.steps,
        "evaluation.samples": 0,
        "checkpoint.every": 0,
    }
    names = [*options.contestants]
    for threads in sorted({options.threads, cores}):
        names.append(f"TRL, {threads} threads")
    runs: dict[str, list[list[Step]]] = {name: [] for name in names}
    turns = []
    for seed in range(options.rounds):
        order = names if seed % 2 == 0 else names[::-1]
        turns += [(seed, name) for name in order]
    with tempfile.TemporaryDirectory() as temporary:
        for number, (seed, name) in enumerate(track(turns, description="running")):
            contest = Contest(
                config=options.config,
                jobgroup=options.jobgroup,
                settings={**length, **settings, "seed": seed},
                warm_up=options.warm_up,
                threads=options.threads,
                rows=options.trl_rows,
            )
            own: dict[str, Callable[[Path], list[Step]]] = {
                "whole": contest.whole,
                "bare": contest.bare,
            }
            for threads in (options.threads, cores):
                own[f"TRL, {threads} threads"] = partial(contest.trl, threads)
            directory = Path(temporary) / str(number)
            runs[name].append(own[name](directory)[options.warm_up :])
            shutil.rmtree(directory)
    _print_speed(runs)


def _print_speed(runs: dict[str, list[list[Step]]]) -> None:
    seconds: dict[str, list[float]] = {}
    for name, rounds in runs.items():
        seconds[name] = [median(step.seconds for step in steps) for steps in rounds]
    best = min((name for name in runs if name.startswith("TRL")), key=lambda n: median(seconds[n]))
    table = figures_table(
        f"{len(runs[best])} rounds of {len(runs[best][0])} steps",
        [
            "",
            "s/step, median of runs",
            "lowest to highest",
            "tokens/completion",
            f"of {best}",
            "lowest to highest",
        ],
    )
    splits = []
    for name, rounds in runs.items():
        ratios = [own / other for own, other in zip(seconds[name], seconds[best], strict=True)]
        steps = [step for steps in rounds for step in steps]
        table.add_row(
            name,
            f"{median(seconds[name]):.3f}",
            f"{min(seconds[name]):.3f} to {max(seconds[name]):.3f}",
            f"{mean(step.tokens for step in steps):.1f}",
            f"{median(ratios):.2f}",
            f"{min(ratios):.2f} to {max(ratios):.2f}",
        )
        stages = []
        for stage in steps[0].stages:
            stage_s = mean(step.stages[stage] for step in steps)
            stages.append(f"{stage} {stage_s:.3f}")
        splits.append(f"{name}: {', '.join(stages)}")
    console = Console(width=140)
    console.print(table)
    console.print("Mean seconds of a step", *splits, sep="\n")


# Learning


@dataclass(frozen=True)
class Half:
    """A run of one trainer."""

    accuracy: list[float]
    """Held-out greedy accuracy of its checkpoints, measured by the common evaluator."""
    steps: list[Step]

    def mean(self, name: str) -> float:
        return float(mean(getattr(step, name) for step in self.steps))


@dataclass(frozen=True)
class Replay:
    """TRL's training on the tokens of this trainer's run, beside that run."""

    ours: Half
    trl: Half
    apart: list[float]
    """Distance between the checkpoints of the two in weight space, as a share of this trainer's
    distance from the base model."""

    def largest(self, name: str) -> float:
        """Returns the largest difference in any step."""
        pairs = zip(self.ours.steps, self.trl.steps, strict=True)
        return float(max(abs(getattr(a, name) - getattr(b, name)) for a, b in pairs))

    def norms(self) -> list[float]:
        """Returns the relative difference of the gradient norms of every step."""
        pairs = zip(self.ours.steps, self.trl.steps, strict=True)
        return [abs(a.grad_norm - b.grad_norm) / a.grad_norm for a, b in pairs]


class Learning:
    """The runs of both halves, under `root`."""

    def __init__(self, root: Path, steps: int, every: int) -> None:
        self.root = root
        self.compared = sorted({*range(every, steps + 1, every), steps})
        self._settings: dict[str, object] = {
            "algorithm.advantage_eps": _TRL_EPS,
            "trainer.max_steps": steps,
            "evaluation.every": every,
            "checkpoint.every": every,
            "checkpoint.keep": 1000,
        }

    def config(self, seed: int) -> Config:
        """Returns the settings of this trainer's half."""
        words = run_words(self.root / f"ours-{seed}", {**self._settings, "seed": seed})
        return load(words, {})

    def ours(self, seed: int) -> Half:
        directory = self.root / f"ours-{seed}"
        train(directory, {**self._settings, "seed": seed})
        return self._half(directory, our_steps(directory), seed)

    def trl(self, seed: int) -> Half:
        directory = self.root / f"trl-{seed}"
        steps = trl_steps(trl_job(self.config(seed), directory))
        return self._half(directory, steps, seed)

    def replay(self, seed: int, ours: Half) -> Replay:
        """Trains TRL on the tokens of this trainer's finished run on `seed`."""
        directory = self.root / f"replay-{seed}"
        config = self.config(seed)
        groups = recorded(config)
        job = trl_job(config, directory, groups)
        given = [prompt["ids"] for prompt in job.prompts]
        assert given == [group.prompt_token_ids.tolist() for group in groups]
        trl = self._half(directory, trl_steps(job), seed)
        base = Path(config.model.name)
        apart = []
        for step in self.compared:
            own = _checkpoint(self.root / f"ours-{seed}", step)
            other = _checkpoint(directory, step)
            apart.append(_distance(own, other) / _distance(own, base))
        return Replay(ours, trl, apart)

    def _half(self, directory: Path, steps: list[Step], seed: int) -> Half:
        config = self.config(seed)
        accuracy = []
        for step in self.compared:
            accuracy.append(greedy_accuracy(_checkpoint(directory, step), config))
        return Half(accuracy, steps)


def _checkpoint(directory: Path, step: int) -> Path:
    own = directory / "checkpoints" / f"step_{step:06d}"
    return own if own.parent.exists() else directory / f"checkpoint-{step}"


def _distance(one: Path, other: Path) -> float:
    """Returns the Euclidean distance between the weights of two checkpoints."""
    left = AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).state_dict()
    right = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).state_dict()
    return float(torch.cat([(left[name] - right[name]).flatten() for name in left]).norm())


def recorded(config: Config) -> list[Group]:
    """Reads every group that a finished run trained on from its replay buffer, in prompt order."""
    store = Store(config.state_dir / "replay" / "replay.db")
    listed = sorted(store.listing(1_000_000, 0), key=lambda row: int(row["position"]))
    groups = unpack_groups([store.blob(row["id"]) for row in listed])
    store.close()
    return groups


def greedy_accuracy(directory: Path, config: Config) -> float:
    """Evaluates a checkpoint of either half: transformers' greedy decoding on the held-out
    problems.
    """
    tokenizer = load_tokenizer(config.model)
    prompter = Prompter(tokenizer, PromptStyle.of(config), [])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    stops = stop_token_ids(model, tokenizer)
    problems = load_split(config.data, "eval", config.seed)[: config.evaluation.samples]
    prompts = [prompter.token_ids(problem) for problem in problems]
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=config.sampling.max_new_tokens,
            eos_token_id=stops,
        )
    answers = output[:, inputs["input_ids"].shape[1] :].tolist()
    right = 0
    for problem, tokens in zip(problems, answers, strict=True):
        stopped = any(stop in tokens for stop in stops)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        right += grade(problem.ground_truth, text, stopped)
    return right / len(problems)


def compare_learning(options: argparse.Namespace) -> None:
    """Runs everything and prints the tables."""
    quiet()
    torch.set_num_threads(1)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    ours: dict[int, Half] = {}
    trl: dict[int, Half] = {}
    with tempfile.TemporaryDirectory() as temporary:
        learning = Learning(Path(temporary), options.steps, options.every)
        for seed in track(seeds, description="training"):
            if seed % 2:
                trl[seed] = learning.trl(seed)
            ours[seed] = learning.ours(seed)
            if seed % 2 == 0:
                trl[seed] = learning.trl(seed)
        replays = {}
        for seed in track(seeds[: options.replays], description="replaying"):
            replays[seed] = learning.replay(seed, ours[seed])
    _print_free(learning.compared, [ours[seed] for seed in seeds], [trl[seed] for seed in seeds])
    if replays:
        _print_replays(replays, learning.compared)


def _print_free(compared: Sequence[int], ours: Sequence[Half], trl: Sequence[Half]) -> None:
    """Compares halves that sampled on their own: means and paired differences."""
    figures: dict[str, Callable[[Half], float]] = {}
    for i, step in enumerate(compared):
        figures[f"accuracy, step {step}"] = lambda half, i=i: half.accuracy[i]  # type: ignore[misc]
    figures |= {
        "reward, step 1": lambda half: half.steps[0].reward,
        "reward, all steps": lambda half: half.mean("reward"),
        "completion tokens, all steps": lambda half: half.mean("tokens"),
        "truncated share, all steps": lambda half: half.mean("truncated"),
        "seconds, all steps": lambda half: half.mean("seconds"),
    }
    table = figures_table(
        f"own samples, {len(ours)} seeds: mean ± standard error; "
        "difference: ours − TRL, paired by seed",
        ["", "ours", "TRL", "difference", "in s.e."],
    )
    for label, figure in figures.items():
        left = [figure(half) for half in ours]
        right = [figure(half) for half in trl]
        apart = [a - b for a, b in zip(left, right, strict=True)]
        error = _standard_error(apart)
        in_errors = f"{mean(apart) / error:+.1f}" if error > 0 else ""
        table.add_row(label, _mean(left), _mean(right), _mean(apart), in_errors)
    console = Console(width=120, highlight=False)
    console.print(table)
    for name, halves in (("ours", ours), ("TRL", trl)):
        last = " ".join(f"{half.accuracy[-1]:.3f}" for half in halves)
        console.print(f"at the end, by seed: {name:>4}: {last}")


def _print_replays(replays: dict[int, Replay], compared: Sequence[int]) -> None:
    """Compares TRL with the runs whose tokens it trained on, by seed."""
    differences = ("reward", "rate", "loss", "first norm", "norm", "weights apart*")
    table = figures_table(
        "TRL on our tokens: largest difference in any step "
        "(gradient norm: relative; also in the first step)",
        ["seed", *differences, "accuracy: ours", "TRL"],
    )
    for seed, replay in replays.items():
        norms = replay.norms()
        largest = [replay.largest(name) for name in ("reward", "learning_rate", "loss")]
        table.add_row(
            str(seed),
            *(f"{value:.0e}" for value in [*largest, norms[0], max(norms)]),
            " ".join(f"{value:.0e}" for value in replay.apart),
            " ".join(f"{value:.3f}" for value in replay.ours.accuracy),
            " ".join(f"{value:.3f}" for value in replay.trl.accuracy),
        )
    console = Console(width=150)
    console.print(table)
    steps = ", ".join(map(str, compared))
    console.print(f"* of the way from the base model; this and the accuracy after steps {steps}")


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _mean(values: Sequence[float]) -> str:
    digits = 4 if abs(mean(values)) < 2 else 2
    return f"{mean(values):.{digits}f} ± {_standard_error(values):.{digits}f}"


def main() -> None:
    parser = command_parser("benchmarks.vs_trl", __doc__)
    parts = parser.add_subparsers(dest="part", required=True, parser_class=argparse.ArgumentParser)
    speed = parts.add_parser("speed", help="seconds per step")
    speed.add_argument("--rounds", type=int, default=3, help="runs of each contestant (default 3)")
    speed.add_argument("--steps", type=int, default=20, help="counted steps per run (default 20)")
    speed.add_argument("--warm-up", type=int, default=5, help="uncounted first steps (default 5)")
    speed.add_argument("--config", default=CONFIG, help=f"settings (default {CONFIG})")
    speed.add_argument("--jobgroup", default=_JOBGROUP, help=f"(default {_JOBGROUP})")
    own = ["whole", "bare"]
    speed.add_argument("--contestants", nargs="+", choices=own, default=own, help="beside TRL")
    speed.add_argument("--threads", type=int, default=1, help="of each of our processes (1)")
    speed.add_argument("--trl-rows", type=int, default=0, help="TRL's micro-batch (default: all)")
    learning = parts.add_parser("learning", help="accuracy and updates")
    learning.add_argument("--seeds", type=int, default=5, help="pairs of runs (default 5)")
    learning.add_argument("--first-seed", type=int, default=0)
    learning.add_argument("--steps", type=int, default=40, help="updates of a run (default 40)")
    learning.add_argument("--every", type=int, default=10, help="steps between checkpoints (10)")
    learning.add_argument("--replays", type=int, default=1, help="seeds that TRL replays (1)")
    options, words = parser.parse_known_args()
    pairs = len(words) % 2 == 0 and all(word.startswith("--") for word in words[::2])
    if words and (options.part == "learning" or not pairs):
        parser.error(f"further settings are pairs of --NAME VALUE after `speed`, not {words}")
    try:
        require_trl()
        if options.part == "speed":
            names = [word.removeprefix("--") for word in words[::2]]
            compare_speed(options, dict(zip(names, words[1::2], strict=True)))
        else:
            compare_learning(options)
    except ConfigError as error:
        fail(error)


if __name__ == "__main__":
    main()
