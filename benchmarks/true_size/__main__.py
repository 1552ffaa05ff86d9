"""The whole flow of data at the size of real runs, rehearsed without a GPU.

`python -m benchmarks.true_size 7b [--share 0.5] [--clock 8]` runs the real job group: data-server,
router, agents, reward-server, replay-buffer, collector, and the trainer's ranks over gloo. Two
things are modelled: the engines answer with real sizes at the speed that their GPUs' bandwidth
allows (`stand_in/sglang`), and the trainer's passes take the time that a GPU is predicted to take
(`rank.py`). `--clock 8` lets eight modelled seconds pass in a real one; the host's work is real and
is not compressed. `--kills` kills an agent, the replay-buffer, a rank, the reward-server, the
data-server and the router, one in each step, and judges by the ids of all groups that nothing is
lost and nothing is trained on twice.

A machine holds fewer processes than a cluster. `--share` scales the groups of a step and the
engines and ranks that they need in proportion; `--engines` and `--ranks` say by how many processes
they are played. Figures are per step, of the whole rehearsal; divide by the share for the case.
"""

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks.command import command_parser, figures_table
from benchmarks.processes import ROOT
from benchmarks.true_size.cases import BY_NAME, CASES, ENGINES, Case
from benchmarks.true_size.kills import KILLED, Kills
from benchmarks.true_size.meter import Meter, Use
from common.errors import ServiceError
from common.models.flow import Traffic, answer_flow
from common.process.cli import fail, positive
from common.settings.config import load
from tests.chaos.group import Group
from trainer.observe.run_dir import read_lines

_PLAIN = ROOT / "jobgroup" / "rlhf-math-cpu-jobgroup.yaml"
_AGENTS = ROOT / "jobgroup" / "rlhf-math-tools-jobgroup.yaml"
_SAMPLE_S = 0.5
_SLOTS = 256


def make_model(case: Case, directory: Path) -> None:
    """Makes a model of almost no size with the vocabulary, the positions and the experts of a real
    one, and the tokenizer of the built-in one.
    """
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    base = ROOT / ".cache" / "tiny-base"
    shutil.copytree(base, directory, ignore=shutil.ignore_patterns("config.json", "model.*"))
    shape: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": case.layers or 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 1 << 17,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config: Qwen3Config | Qwen3MoeConfig = Qwen3Config(**shape)
    if case.top_k:
        config = Qwen3MoeConfig(
            **shape, num_experts=128, num_experts_per_tok=case.top_k, moe_intermediate_size=4
        )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def settings(case: Case, options: Any, directory: Path) -> dict[str, Any]:
    """Returns the settings of the run."""
    rows = [{"question": f"{i} " + "x" * (case.prompt - 20), "answer": "12"} for i in range(4096)]
    data = directory / "problems.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found: dict[str, Any] = {
        "model": {"name": str(directory / "model")},
        "data": {"source": str(data)},
        "rollout": {
            "engine": "sglang",
            "engine_python": sys.executable,
            "max_running_requests": _SLOTS,
        },
        "sampling": {
            "group_size": case.group_size,
            "max_new_tokens": case.tokens,
        },
        "reward": {"workers": 2},
        "trainer": {
            "batch_size": round(case.groups * options.share),
            "max_steps": options.steps,
            "num_epochs": 1000,
            "max_staleness": case.max_staleness,
            "packing": "on",
            "routing_replay": case.top_k > 0,
        },
        "limits": {"service_timeout_s": options.limit / options.clock},
        "checkpoint": {"every": 1 if options.kills else 0},
        "evaluation": {"samples": 0},
        "parallel": {"shard_size": 1},
    }
    if case.turns:
        found["environment"] = {"turns": case.turns}
    return found


def job_group(case: Case, options: Any, directory: Path) -> list[str]:
    """Writes the YAML and the settings; returns the command that runs them."""
    config = directory / "config.yaml"
    config.write_text(yaml.safe_dump(settings(case, options, directory)))
    source = (_AGENTS if case.turns else _PLAIN).read_text()
    program = "python -m trainer.launch -m benchmarks.true_size.rank"
    group = source.replace("python -m trainer.launch", program)
    path = directory / "jobgroup.yaml"
    restarts = 100 if options.kills else 0
    path.write_text(
        group.replace("max_restarts_on_errors: 3", f"max_restarts_on_errors: {restarts}")
    )

    speed = case.speed(options.engines, options.share, options.clock, _SLOTS)
    # Each rank computes its share of the groups: as long as at the true size, if ranks are in
    # proportion.
    ratio = case.ranks * options.share / options.ranks
    rank = {
        "directory": str(directory),
        "clock": options.clock,
        "seconds_per_token": case.pass_s_per_token / ratio,
        "turns": case.turns,
        "max_staleness": case.max_staleness,
    }
    env = {
        "RUN_CONFIG": config,
        "RUN_DIR": directory / "run",
        "STATE_DIR": directory / "state",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks' / 'true_size' / 'stand_in'}",
        "TRUE_SIZE": json.dumps(speed),
        "TRUE_SIZE_RANK": json.dumps(rank),
    }
    if case.turns:  # the YAML names another one
        env["RLHF_ENVIRONMENT__NAME"] = "python:benchmarks.true_size.conversation:Conversation"
    command = [
        sys.executable,
        "-m",
        "jobgroup.local",
        str(path),
        "--log-dir",
        str(directory / "logs"),
    ]
    counts = {"rollout-server": options.engines, "ppo-trainer": options.ranks}
    for name, count in counts.items():
        command += ["--num-nodes", f"{name}={count}"]
    for name, value in env.items():
        command += ["--env", f"{name}={value}"]
    return command


@dataclass
class Rehearsal(Group):
    """The job group of a rehearsal."""

    command: list[str] = field(default_factory=list)

    def _command(self) -> list[str]:
        return self.command


def run(
    group: Rehearsal, options: Any, kills: Kills | None
) -> tuple[dict[str, Use], dict[str, Use], float]:
    """Runs the job group; returns what its processes had used after the first step and in the end,
    and the seconds between.
    """
    meter = Meter(group.mark)
    first: dict[str, Use] = {}
    first_at = 0.0
    last: dict[str, Use] = {}
    last_at = 0.0
    steps = 0
    with group.running():
        process = group.process
        assert process is not None
        while process.poll() is None:
            time.sleep(_SAMPLE_S)
            meter.sample()
            if kills is not None:
                kills.look()
            if group.step() > steps:
                steps = group.step()
                last = meter.uses()
                last_at = time.monotonic()
                print(f"step {steps} of {options.steps}", flush=True)
                if not first:
                    first = last
                    first_at = last_at
    if process.returncode or steps < options.steps:
        tail = "\n".join(group.output().splitlines()[-30:])
        raise ServiceError(
            f"the run ended with status {process.returncode} after {steps} steps:\n{tail}",
            field="jobgroup.local",
            remedy=f"look into {group.folder}",
        )
    return first, last, last_at - first_at


def main() -> None:
    """Runs one case and prints its tables."""
    parser = command_parser("true_size", __doc__)
    parser.add_argument("case", choices=[case.name for case in CASES])
    parser.add_argument(
        "--share", type=float, default=0.125, help="share of the case (default 1/8)"
    )
    parser.add_argument("--clock", type=float, default=8.0, help="modelled seconds in a real one")
    parser.add_argument("--engines", type=positive, default=2, help="processes of engines")
    parser.add_argument("--ranks", type=positive, default=2, help="processes of ranks")
    parser.add_argument("--steps", type=positive, default=4, help="the first is not counted")
    parser.add_argument(
        "--limit",
        type=float,
        default=600.0,
        help="limits.service_timeout_s",
    )
    parser.add_argument(
        "--kills", nargs="*", choices=KILLED, help="kill these in turn, or all; the rest goes on"
    )
    parser.add_argument("--keep", type=Path, help="a new directory for the run, which is kept")
    options = parser.parse_args()
    if options.kills is not None:
        options.kills = options.kills or KILLED
        # The first two steps are left alone, and a kill may take more than one.
        options.steps = max(options.steps, len(options.kills) + 3)
    case = BY_NAME[options.case]
    print(f"{case.about}: a share of {options.share:g}, clock {options.clock:g}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary) / "run"
        directory.mkdir(parents=True)
        make_model(case, directory / "model")
        group = Rehearsal(directory, {}, command=job_group(case, options, directory))
        kills = Kills(group, options.kills) if options.kills else None
        try:
            first, last, seconds = run(group, options, kills)
        except ServiceError as error:
            fail(error, status=1)
        if kills is None:
            _print(case, options, directory, first, last, seconds)
        elif not kills.report():
            sys.exit(1)


def predicted(case: Case, options: Any, directory: Path) -> dict[str, Traffic]:
    """Returns what is predicted for each task; nothing for episodes."""
    if case.turns:
        return {}
    flow = answer_flow(
        load(["--config", str(directory / "config.yaml")], {}),
        case.answer_tokens * options.share,
        options.ranks,
        # Each process runs a group at least.
        engines=max(case.engines * options.share, options.engines * case.group_size / _SLOTS),
        experts_of_token=case.layers * case.top_k,
    )
    # The ranks sum the gradients of the model of this rehearsal over gloo, in a ring.
    model = (directory / "model" / "model.safetensors").stat().st_size
    of_rank = 2 * (1 - 1 / options.ranks) * model
    for task, ranks in (("trainer rank 0", 1), ("trainer, other ranks", options.ranks - 1)):
        flow[task] = replace(
            flow[task],
            received=flow[task].received + ranks * of_rank,
            sent=flow[task].sent + ranks * of_rank,
        )
    return flow


def _print(
    case: Case,
    options: Any,
    directory: Path,
    first: dict[str, Use],
    last: dict[str, Use],
    seconds: float,
) -> None:
    steps = options.steps - 1
    console = Console(width=120)
    table = figures_table(
        f"per step of {case.answer_tokens * options.share / 1e6:.1f} million tokens",
        [
            "process",
            "number",
            "CPU s",
            "peak MB",
            "MB in",
            "MB out",
            "predicted: peak",
            "in",
            "out",
        ],
    )
    flow = predicted(case, options, directory)
    for name, use in sorted(last.items(), key=lambda item: -item[1].cpu_s):
        before = first.get(name, Use())
        guess = flow.get(name)
        cells = ["", "", ""]
        if guess is not None:
            sizes = (guess.memory, guess.received, guess.sent)
            cells = [f"{size / 1e6:.0f}" for size in sizes]
        table.add_row(
            name,
            str(use.count),
            f"{(use.cpu_s - before.cpu_s) / steps:.2f}",
            f"{use.peak_mb:.0f}",
            f"{(use.received - before.received) / steps / 1e6:.1f}",
            f"{(use.sent - before.sent) / steps / 1e6:.1f}",
            *cells,
        )
    console.print(table)

    idle: dict[str, list[float]] = defaultdict(list)
    computed = []
    for line in read_lines(directory / "rank0.jsonl")[1:]:
        computed.append(line["computed"])
        for name, value in line["idle"].items():
            idle[name].append(value)
    table = figures_table(
        "rank 0's GPU: real seconds of a step", ["what the host did meanwhile", "seconds"]
    )
    table.add_row("the GPU computes (modelled, by the clock)", f"{statistics.mean(computed):.2f}")
    host = 0.0
    for name, values in sorted(idle.items(), key=lambda item: -sum(item[1])):
        mean = sum(values) / len(computed)
        host += 0.0 if name == ENGINES else mean
        table.add_row(f"GPU idle: {name}", f"{mean:.2f}")
    table.add_row("GPU waits for the host, in all", f"{host:.2f}")
    table.add_row("wall time of a step", f"{seconds / steps:.2f}")
    console.print(table)
    modelled = seconds / steps * options.clock
    console.print(
        f"a step takes {modelled:.0f} modelled seconds; the host keeps the GPU waiting for "
        f"{host:.2f} s, {100 * host / modelled:.1f} % of it"
    )


if __name__ == "__main__":
    main()
