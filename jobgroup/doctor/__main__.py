"""`rlhf doctor [YAML]`: is this machine ready for a job group?

Without a YAML: is this machine ready for `make demo`? With one: is it ready for a local run of it?
In a pod of a running group (`SKYPILOT_JOBGROUP_NAME` is set): is it ready for `--task`? With
`--plan MODEL`: how much memory does this model need on GPUs of every size? Only its `config.json`
is read. With `--data`: can every ground truth of the data set be graded? Exit status 0: nothing
failed, 1: something did, 2: wrong usage.
"""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from common.errors import ConfigError
from common.process.cli import CommandParser, fail, positive
from common.process.security import SecretRedactor
from jobgroup.doctor import availability, gpus, machine, memory, network, sizes, software, storage
from jobgroup.doctor.ground_truths import check_ground_truths
from jobgroup.doctor.plan import Plan, make
from jobgroup.doctor.report import STATES, Check, Result, Results, perform
from jobgroup.spec import assignments

_CHECKS = {
    "python": software.check_python,
    "packages": software.check_packages,
    "router": software.check_router,
    "sglang": software.check_sglang,
    "GPUs": gpus.check_gpus,
    "CUDA toolkit": software.check_toolkit,
    "cores": machine.check_cores,
    "all_reduce": machine.check_collective,
    "ports": network.check_ports,
    "disk": storage.check_disk,
    memory.TITLE: memory.check_fit,
}


def results(plan: Plan) -> Results:
    """Runs all checks; the models come first, since disk and memory need their sizes."""
    yield from plan.problems
    loading: dict[str, Check] = {"data set": partial(availability.check_dataset, plan)}
    for name, job in availability.models(plan).items():
        loading[f"model {name}"] = partial(availability.check_model, plan, name, job)
    yield from perform(loading)

    yield from perform({name: partial(check, plan) for name, check in _CHECKS.items()})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(argv)
    env = dict(os.environ)
    try:
        if options.plan is None and (options.gpus or options.gpu_memory_gb):
            raise ConfigError(
                "these options describe the machines for a planned model",
                field="--gpus and --gpu-memory-gb",
                remedy="give --plan too",
            )
        overrides = assignments(options.env, "--env")
        redactor = SecretRedactor(env, overrides)
        # The hub's library reads these once, when a check imports it.
        os.environ.update({name: overrides[name] for name in overrides if name.startswith("HF_")})
        if options.plan is not None:
            size = options.gpu_memory_gb
            lines = list(
                sizes.predict(options.plan, options.gpus or 1, {**env, **overrides}, only_gb=size)
            )
            return _report(lines, redactor, options.json, may_fail=size is None)
        plan = make(options.yaml, overrides, env, task=options.task)
    except ConfigError as error:
        fail(error)

    if options.data:
        graded = perform({"data set": partial(check_ground_truths, plan)}, limit_s=None)
        return _report([*plan.problems, *graded], redactor, options.json)

    plan.gpus, plan.no_gpus = gpus.visible(env)
    redactor = SecretRedactor(env, overrides, *(job.env for job in plan.here))
    if not options.json:
        tasks = (
            ", ".join(job.name for job in plan.here) or "no task (--task names that of this pod)"
        )
        print(f"{'make demo' if plan.demo else plan.group}: {tasks}\n")
    return _report(results(plan), redactor, options.json)


def _report(
    results: Iterable[Result],
    redactor: SecretRedactor,
    as_json: bool,
    *,
    may_fail: bool = False,
) -> int:
    """Prints the results as they arrive; returns the exit status, always 0 with `may_fail`."""
    found = []
    for result in results:
        found.append(result.redacted(redactor))
        if not as_json:
            print(found[-1].text(), flush=True)
    states = [result.state for result in found]
    if as_json:
        report = {"ok": "fail" not in states, "checks": [vars(result) for result in found]}
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        print(f"\n{', '.join(f'{states.count(state)} {state}' for state in STATES)}")
    return 1 if "fail" in states and not may_fail else 0


_EPILOG = """\
examples:
  rlhf doctor                                       # is it ready for the demo?
  rlhf doctor my-jobgroup.yaml --env MAX_STEPS=10   # for this group?
  rlhf doctor my-jobgroup.yaml --data               # can its data be graded?
  rlhf doctor --plan Qwen/Qwen2.5-7B-Instruct --gpus 8
"""


def _parser() -> CommandParser:
    parser = CommandParser(
        "rlhf doctor",
        "Checks a machine, or a pod from within: a line for each check, and a remedy if it fails.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("yaml", nargs="?", type=Path, metavar="YAML", help="a job group; the demo when not given")
    add(
        "--env",
        action="append",
        default=[],
        metavar="K=V",
        help="sets a variable in every task, as in jobgroup.local",
    )
    add(
        "--task",
        metavar="NAME",
        help="only what this task needs; in a pod: its task",
    )
    add("--gpu-memory-gb", type=positive, metavar="GB", help="with --plan: only GPUs of this size")
    add(
        "--plan",
        metavar="MODEL",
        help="the memory of this model (a directory, or org/name on the hub) on GPUs of every "
        "size, and nothing else",
    )
    add(
        "--data",
        action="store_true",
        help="grades every ground truth of the data set against itself, and nothing else",
    )
    add(
        "--gpus",
        type=positive,
        metavar="N",
        help="with --plan: GPUs of the trainer in all (nodes × accelerators of the YAML)",
    )
    add("--json", action="store_true", help="one JSON object instead of lines")
    return parser


if __name__ == "__main__":
    sys.exit(main())
