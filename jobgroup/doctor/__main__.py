"""`python -m jobgroup.doctor [YAML]`: looks at this machine for a job group, or at the group around this pod.

Without a YAML: is this machine ready for `make demo`? With one: as a local run of it would find it. Inside a running group
(`SKYPILOT_JOBGROUP_NAME` is set): the other tasks, and this machine for the task that `--task` names. Exit status 0: nothing
failed, 1: something did, 2: wrong usage.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.config import program
from common.errors import ConfigError
from common.security import Hider
from common.topology import DATA
from jobgroup.doctor import cluster, disk, fits, gpu, hub, machine, ports, tokens, versions
from jobgroup.doctor.plan import Assumed, Plan, Usage, make
from jobgroup.doctor.result import Check, Result, hidden, perform
from jobgroup.spec import variable

_HUB_S = 12.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    env = dict(os.environ)
    try:
        overrides = dict(_assignment(text) for text in options.env)
        if options.gpus is not None and options.gpu_memory_gb is None:
            raise Usage("--gpus needs --gpu-memory-gb: GPUs are assumed together with their memory")
        if options.gpus is not None and options.gpus < 1:
            raise Usage(f"--gpus {options.gpus}: at least 1")
        assumed = None if options.gpu_memory_gb is None else Assumed(options.gpu_memory_gb, options.gpus)
        plan = make(options.yaml, overrides, env, options.task, assumed)
    except (Usage, ConfigError) as error:
        parser.error(str(error))
    hiders = [Hider(each) for each in (env, overrides, *(job.env for job in plan.jobs))]
    if not options.json:
        print(_title(plan) + "\n")
    results = []
    for result in (hidden(each, hiders) for each in _results(plan, env)):
        results.append(result)
        if not options.json:
            print(result.text(), flush=True)
    bad = sum(result.state == "fail" for result in results)
    if options.json:
        print(json.dumps({"ok": not bad, "checks": [vars(result) for result in results]}, indent=1, ensure_ascii=False))
    else:
        counts = [(sum(result.state == state for result in results), state) for state in ("ok", "warn", "fail")]
        print("\n" + ", ".join(f"{count} {state}" for count, state in counts))
    return 1 if bad else 0


def _title(plan: Plan) -> str:
    tasks = ", ".join(job.name for job in plan.here) or "no task (--task names that of this pod)"
    if plan.topology is not None:
        return f"inside the job group {plan.group}; this machine for {tasks}"
    if plan.assumed is not None:
        return f"{plan.group}: {tasks}, on GPUs of {plan.assumed.memory_gb:g} GB"
    return f"this machine for {'make demo' if plan.demo else f'a local run of {plan.group}'}: {tasks}"


def _results(plan: Plan, env: dict[str, str]) -> Iterator[Result]:
    """All lines of the report. First what the others build on: the models, and the GPUs."""
    yield from plan.problems
    shapes: dict[str, dict[str, Any]] = {}
    named = hub.models(plan).items()
    loading = [Check(f"model {name}", partial(hub.check_model, name, job, plan.demo, shapes), _HUB_S) for name, job in named]
    data = plan.job(DATA)
    loading += [Check("data set", partial(hub.check_dataset, data), _HUB_S)] if data else []
    loading += [Check("clock", partial(hub.check_clock, env), _HUB_S, "warn")]
    asked = list(perform(loading))
    gpus, why = gpu.visible(env)
    yield from perform(_checks(plan, env, gpus, why, shapes))
    yield from asked
    yield from perform([Check("memory for the model", partial(fits.check_fit, plan, gpus, shapes)), *cluster.checks(plan)])


def _checks(plan: Plan, env: dict[str, str], gpus: list[gpu.Gpu], why: str, shapes: dict[str, dict[str, Any]]) -> list[Check]:
    here = [
        Check("cores", partial(machine.check_cores, plan)),
        Check("memory", machine.check_memory),
        Check("open files", partial(machine.check_files, plan)),
        Check("shared memory", partial(machine.check_shared_memory, plan)),
        Check("all_reduce", partial(gpu.check_collective, plan, gpus), gpu.COLLECTIVE_S + 30),
        Check("ports", partial(ports.check_ports, plan)),
        Check("sandbox", partial(machine.check_sandbox, plan), 60),
        Check("proxies", partial(machine.check_proxies, plan, env)),
    ]
    return [
        Check("python", partial(versions.check_python, plan)),
        Check("packages", partial(versions.check_packages, plan)),
        Check("sglang-router", partial(versions.check_router, plan), 25),
        Check("sglang", partial(versions.check_sglang, plan), 25),
        Check("skypilot", partial(versions.check_skypilot, plan), 35),
        Check("GPUs", partial(gpu.check_gpus, plan, gpus, why), 45),
        *(here if plan.assumed is None else []),  # what a cluster's machines have cannot be seen from here
        Check("disk", partial(disk.check_disk, plan, shapes), 30),
        Check("HF_TOKEN", partial(hub.check_hf_token, plan)),
        Check("API_TOKEN", partial(tokens.check_api_token, plan)),
        Check("JUDGE_API_KEY", partial(tokens.check_judge, plan)),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("jobgroup.doctor"),
        description="Checks a machine, or a running job group from within.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("yaml", nargs="?", type=Path, metavar="YAML", help="a job group; the demo when not given")
    add("--env", action="append", default=[], metavar="K=V", help="sets a variable in every task, as in jobgroup.local")
    add("--task", metavar="NAME", help="only what this task needs; inside a group: the task of this pod")
    add(
        "--gpu-memory-gb",
        type=_positive,
        metavar="GB",
        help="judge the model for a cluster's GPUs of this size, not this machine's",
    )
    add(
        "--gpus",
        type=int,
        metavar="N",
        help="with --gpu-memory-gb: GPUs of the trainer in all (nodes × accelerators of the YAML)",
    )
    add("--json", action="store_true", help="one JSON object instead of lines")
    return parser


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no size of a memory")
    return number


def _assignment(text: str) -> tuple[str, str]:
    """`K=V`, or `K` for a variable of this environment. Raises Usage or ConfigError."""
    name, equals, value = text.partition("=")
    variable(name, "--env")
    if not equals and name not in os.environ:
        raise Usage(f"{name} is not set here: write --env {name}=VALUE")
    return name, value if equals else os.environ[name]


if __name__ == "__main__":
    sys.exit(main())
