"""Continues a run from one of its steps with something changed. What the run recorded is used where
the change leaves it valid; the rest is generated anew.
"""

import json
import shlex
import shutil
from pathlib import Path

from rich.console import Console

from common import Json
from common.errors import ConfigError
from common.process.cli import CommandParser, positive, run
from common.settings.config import from_mapping, names
from common.settings.sources import variable
from trainer.audit.waits import waits_told
from trainer.cli.commands import add_settings, argument_names, run_parser
from trainer.cli.compare import compare, evaluated
from trainer.dashboard.runs import RunReader
from trainer.observe.group_files import LINES
from trainer.observe.run_dir import AUDIT, check_run, known_settings, read_lines

_EPILOG = """\
examples:
  rlhf fork runs/demo-seed0 --step 20 --set optimizer.learning_rate=1e-4
  rlhf fork runs/demo-seed0 --step 20 --set 'reward.functions=["my:Reward"]' --output runs/other
  rlhf fork runs/own-data --step 20 --set data.map=my:without_one
  rlhf fork runs/demo-seed0 --step 20 --set trainer.max_steps=30
  rlhf fork runs/on-cluster --step 50 --set algorithm.clip_high=0.28 --prepare

STEP is one with a checkpoint; of a run with trainer.audit true any step will do. The fork trains in
this process, with the embedded engine, and is compared with the run at the end. Its fork.json says
which groups were recorded and which were generated anew. With --prepare a job group trains it: the
command writes the directory and prints what to add to its launch.
"""
FORK = "fork.json"


def parser() -> CommandParser:
    """Returns the command line."""
    usage = "RUN_DIR --step STEP [--set NAME=VALUE …] [--output DIR] [--prepare]"
    made = run_parser("rlhf fork", __doc__, usage, _EPILOG)
    made.add_argument(
        "--step", type=positive, required=True, metavar="STEP", help="the last step in common"
    )
    add_settings(
        made,
        "what is changed, such as algorithm.clip_high=0.28",
    )
    made.add_argument(
        "--output", type=Path, metavar="DIR", help="default: RUN_DIR-fork-STEP, beside the run"
    )
    made.add_argument(
        "--prepare",
        action="store_true",
        help="only write the directory, with which a job group goes on",
    )
    return made


def _check_settings(run_dir: Path, step: int, changes: Json) -> None:
    """Raises ConfigError for changes that do not fit the settings of the run."""
    # Functions that a program gave have names that no setting can have.
    content = known_settings(run_dir) | {"reward.functions": ["math"]}
    with argument_names({}):
        config = from_mapping({name: content[name] for name in content.keys() & names()} | changes)
        last = config.trainer.max_steps
        if last is not None and last <= step:
            raise ConfigError(
                "the fork would end before it trains a step",
                field="trainer.max_steps",
                value=last,
                remedy=f"set one above {step}",
            )


def main(argv: list[str] | None = None) -> None:
    """Forks, trains and compares. Raises ConfigError for arguments or a record that cannot be used,
    and what training raises.
    """
    arguments = parser().parse_args(argv)
    run_dir: Path = arguments.run_dir.resolve()
    step: int = arguments.step
    check_run(run_dir)
    output = arguments.output or run_dir.with_name(f"{run_dir.name}-fork-{step}")
    if output.exists():
        raise ConfigError(
            "this directory exists already",
            field="--output",
            value=str(output),
            remedy="name another one",
        )
    changes = dict(arguments.set)
    # All this before the libraries are loaded.
    known = sorted(path.name for path in run_dir.glob("checkpoints/step_*"))
    if f"step_{step:06d}" not in known and not (run_dir / AUDIT).is_file():
        raise ConfigError(
            "the run has no checkpoint of this step, and no audit record to compute it from",
            field="--step",
            value=step,
            remedy=f"name the step of a checkpoint ({', '.join(known) or 'there is none'}); of a "
            "run with trainer.audit true, any step will do",
        )
    _check_settings(run_dir, step, changes)
    with waits_told():
        from trainer.start.in_process import train_in_process  # torch: slow to import
        from trainer.what_if.forking import prepared

        fork = prepared(run_dir, step, output, changes, needs_settings=arguments.prepare)
    said: Json = {"parent": str(run_dir), "step": step, "changes": changes}
    answers = fork.answers
    if not arguments.prepare:
        try:
            train_in_process(fork.config, rollout_transport=answers.before, problems=fork.problems)
        except BaseException:
            # Without a step of its own there is nothing to keep, and its name stays free.
            if all(line["step"] <= step for line in read_lines(output / "metrics.jsonl")):
                shutil.rmtree(output)
            raise
        said["recorded"] = answers.used
        said["generated"] = [
            group["position"]
            for line in read_lines(output / LINES)
            for group in line["groups"]
            if line["step"] > step and group["position"] not in answers.used
        ]
    (output / FORK).write_text(json.dumps(said, indent=1, default=str), encoding="utf-8")

    if arguments.prepare:
        variables = {"RUN_DIR": str(output)} | {variable(name): changes[name] for name in changes}
        words = []
        for name, value in variables.items():
            text = value if isinstance(value, str) else json.dumps(value)
            words.append(f"--env {name}={shlex.quote(text)}")
        print(f"{output} has the state of the run after step {step}")
        print(f"launch the job group as for the run, and add: {' '.join(words)}")
        print(f"then: rlhf compare {run_dir} {output}")
        return
    print(
        f"{len(answers.used)} groups of the fork are those that the run recorded (steps "
        f"{sorted(set(answers.used.values()))}), {len(said['generated'])} were generated anew: "
        f"{output / FORK}"
    )
    # At the last step that both evaluated: afterwards the run has learnt for longer.
    own = evaluated(output, None)
    at = own.step if own and evaluated(run_dir, own.step) else None
    compare([RunReader(run_dir), RunReader(output)], Console(), at)


if __name__ == "__main__":
    run(main, "")
