"""Python, the pinned packages, the environments of SGLang and SkyPilot, and secrets (never their
values).
"""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.process.security import TOKEN, token
from common.process.topology import CRITIC, DATA, ENVIRONMENT, REPLAY, REWARD, ROLLOUT, TRAINER
from jobgroup.doctor.availability import Hub
from jobgroup.doctor.plan import ROOT, Gpu, Plan
from jobgroup.doctor.report import Result, ask, expect
from services.rollout.engine_client import toolkit_env

_EXTRA = dict.fromkeys((DATA, REWARD, REPLAY, ENVIRONMENT), "services")
_EXTRA |= {ROLLOUT: "rollout", CRITIC: "trainer", TRAINER: "trainer"}
_CHECKOUT = (ROOT / "Makefile").exists()
_SHOWN = 6
_SGLANG_VERSIONS = "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"
_CUDA, _DRIVER = 13, 580
"""CUDA version of the pinned wheels, and the first driver series that runs it."""
_SYSTEM_TOOLKIT = "/usr/local/cuda"
_SHARE = "export API_TOKEN=$(openssl rand -hex 32), and --secret API_TOKEN when launching: the same in every task"


def check_python(plan: Plan) -> Iterator[Result]:
    """Checks this interpreter and those the tasks use."""
    found, good = (
        f"{platform.python_version()} in {sys.prefix}",
        (3, 11) <= sys.version_info[:2] <= (3, 13),
    )
    yield expect(
        "python",
        good,
        found,
        "3.11 to 3.13 is needed: make PYTHON=/path/to/python3.11 lint makes the environment anew",
    )
    for job in (
        plan.here if _CHECKOUT else ()
    ):  # an installed package gives the tasks of a local run its own Python
        python = job.workdir / ".venv/bin/python"
        if ".venv/bin/python" in job.run and not python.exists():
            fix = f"in {job.workdir}: {(job.setup or '').strip() or 'make lint'}"
            yield Result(f"python of {job.name}", "fail", f"there is no {python}", fix)


def check_packages(plan: Plan, root: Path = ROOT) -> Iterator[Result]:
    """Checks that the imports of the tasks here are installed, in the pinned versions."""
    installed: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        installed.setdefault(
            _key(each.metadata["Name"]), each.version
        )  # what is on top of an image's packages comes first
    pins = _pins(root / "constraints.txt")
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {_EXTRA[job.name] for job in plan.here if job.name in _EXTRA}
    extras |= {"trainer" for job in plan.here if job.needs_torch}
    more_packages = (
        ["transformers"] if plan.job(ENVIRONMENT) else []
    )  # for the tokenizer, as setup.sh installs it
    wanted = project["dependencies"] + [
        each for extra in extras for each in project["optional-dependencies"][extra]
    ]
    wanted += more_packages
    install = "-e '.[{}]'" if _CHECKOUT else "'rlhf-math[{}]'"
    words = [
        sys.executable,
        "-m pip install -c",
        root / "constraints.txt",
        install.format(",".join(sorted(extras))),
    ]
    fix = " ".join(map(str, [*words, *more_packages]))
    for name in sorted({_key(re.split(r"[^\w.-]", text)[0]) for text in wanted} - installed.keys()):
        yield Result(f"package {name}", "fail", "not installed", fix)
    other = [
        f"{name} {installed[name]} ({pin} is pinned)"
        for name, pin in pins.items()
        if _differs(installed.get(name), pin)
    ]
    more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
    same = f"{len(installed.keys() & pins.keys())} in the pinned versions"
    yield expect("packages", not other, ", ".join(other[:_SHOWN]) + more or same, fix, "warn")


def check_router(plan: Plan) -> Iterator[Result]:
    """Imports the router, a compiled extension: being installed does not prove that it works."""
    if plan.job(ROLLOUT):
        ask(sys.executable, "-c", "import sglang_router", fix="bash jobgroup/setup.sh rollout")
        yield Result("sglang-router", "ok", "can be imported")


def check_sglang(plan: Plan) -> Iterator[Result]:
    """Checks SGLang's environment if SGLang is the engine."""
    job = plan.job(ROLLOUT)
    if job is None or not job.uses_sglang or plan.assumed_gb:
        return
    python, cpu = job.path(job.config.rollout.engine_python), job.config.rollout.device == "cpu"
    fix = "make sglang-cpu" if cpu else "bash jobgroup/setup.sh sglang"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        wrong = f"its wheel is for Linux on x86-64, this is {platform.platform()}"
        yield Result("sglang", "fail", wrong, "rollout.engine embedded")
    elif not python.is_file():
        fix += "; or another rollout.engine_python; or rollout.engine embedded"
        yield Result("sglang", "fail", f"there is no {python}", fix)
    else:
        answer = ask(
            python, "-c", _SGLANG_VERSIONS, fix=f"remove {python.parent.parent} and run {fix}"
        )
        version, torch = answer.split()
        pin = _pins(
            ROOT
            / "jobgroup"
            / ("sglang-cpu/requirements.txt" if cpu else "sglang-requirements.txt")
        )["sglang"]
        found = f"{version} ({pin} is pinned) with torch {torch} in {python.parent.parent}"
        yield expect("sglang", not _differs(version, pin), found, fix, "warn")


def check_toolkit(plan: Plan) -> Iterator[Result]:
    """Checks the tools SGLang compiles its GPU kernels with, and that the driver can run the
    result.
    """
    job = plan.job(ROLLOUT)
    if not plan.gpus or plan.assumed_gb:  # `check_gpus` says so
        return
    if any(each.needs_torch or each.uses_sglang for each in plan.here):
        yield _driver(plan.gpus)
    if job is None or not job.uses_sglang or job.config.rollout.device == "cpu":
        return
    env = {**os.environ, **job.env}
    env |= toolkit_env(job.path(job.config.rollout.engine_python), env)
    fix = "bash jobgroup/setup.sh sglang; or CUDA_HOME of a CUDA 13 toolkit in the environment"
    home = Path(env.get("CUDA_HOME", _SYSTEM_TOOLKIT))
    nvcc = shutil.which(home / "bin/nvcc") or shutil.which("nvcc", path=env["PATH"])
    if nvcc is None:
        yield Result(
            "nvcc",
            "fail",
            f"nvcc is not in {home}/bin or on the path, but SGLang compiles kernels with it",
            fix,
        )
    else:
        release = next(
            iter(re.findall(r"release (\d+\.\d+)", ask(nvcc, "--version", fix=fix))),
            "of no release",
        )
        linked = (home / "lib64/libcudart.so").exists()
        missing = (
            ""
            if linked
            else f"; there is no {home}/lib64/libcudart.so, with which the kernels are linked"
        )
        good = release.startswith(f"{_CUDA}.") and linked
        yield expect(
            "nvcc", good, f"CUDA {release} in {nvcc}, CUDA {_CUDA} is needed{missing}", fix
        )
    compiler = env.get("CXX") or "c++"
    place = shutil.which(compiler, path=env["PATH"])
    missing = f"{compiler} is not on the path, but SGLang compiles kernels with it"
    yield expect(
        "C++ compiler",
        place is not None,
        place or missing,
        "apt-get install g++, or CXX in the environment",
    )


def _driver(gpus: Sequence[Gpu]) -> Result:
    """Judges the driver version from nvidia-smi; all GPUs of a machine have the same."""
    told = gpus[0].driver
    number = re.match(r"\d+", told)
    if number is None:
        fix = "compare it with /proc/driver/nvidia/version"
        return Result(
            "NVIDIA driver", "warn", f"nvidia-smi says {told!r}, which is not a version", fix
        )
    found = f"{told}; the CUDA {_CUDA} wheels of torch and SGLang need {_DRIVER} or newer"
    return expect(
        "NVIDIA driver",
        int(number[0]) >= _DRIVER,
        found,
        f"update the driver of the node to the {_DRIVER} series",
    )


def check_skypilot(plan: Plan) -> Iterator[Result]:
    """Checks SkyPilot if this machine launches the group."""
    pin = _pins(ROOT / "jobgroup/skypilot-requirements.txt")["skypilot"]
    fix = f"uv tool install 'skypilot[kubernetes]=={pin}', in a separate environment"
    if plan.topology is None and (sky := shutil.which("sky")):
        version = next(
            iter(re.findall(r"\d+\.\d+[\w.]*", ask(sky, "--version", fix=fix))), "no version"
        )
        yield expect("skypilot", version == pin, f"{version}; tested with {pin}", fix, "warn")
    elif plan.topology is None:
        yield Result("skypilot", "ok", "not on the path; only a launch on a cluster needs it")


def check_secrets(plan: Plan) -> Iterator[Result]:
    """Checks API_TOKEN (the same everywhere), JUDGE_API_KEY for a judge, and HF_TOKEN, which the
    hub may require.
    """
    reward, loading = (
        plan.job(REWARD),
        [job for job in plan.here if job.name in (TRAINER, ROLLOUT, CRITIC, DATA, ENVIRONMENT)],
    )
    if reward and "judge" in reward.config.reward.function_names():
        given = bool(reward.env.get("JUDGE_API_KEY"))
        fix = "give it with --secret JUDGE_API_KEY, unless the endpoint asks for none"
        yield expect("JUDGE_API_KEY", given, "set" if given else "not set", fix, "warn")
    if loading:
        found = (
            "set"
            if Hub(loading[0].env).token
            else "not set; only gated or private models and data sets need it"
        )
        yield Result("HF_TOKEN", "ok", found)
    values = {job.env.get(TOKEN, "") for job in plan.here or plan.jobs}
    value = token({TOKEN: max(values, default="")})
    exposed = plan.assumed_gb is not None or (
        plan.topology is not None and not plan.topology.local_hosts
    )
    if len(values) > 1:
        yield Result(TOKEN, "fail", "the tasks have different ones", _SHARE)
    elif value:
        yield Result(TOKEN, "ok", f"set, {len(value)} characters")
    else:
        why = (
            "anyone on the cluster's network can call every service"
            if exposed
            else "a local run listens only on loopback"
        )
        yield expect(TOKEN, not exposed, f"not set: {why}", _SHARE, "warn")


def _pins(path: Path) -> dict[str, str]:
    lines = re.findall(
        r"(?m)^([\w.-]+)(?:\[[^]]*\])?==([\w.!+-]+)", path.read_text(encoding="utf-8")
    )
    return {_key(name): version for name, version in lines}


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _differs(version: str | None, pin: str) -> bool:
    """Whether this is another release; builds (`+cpu`) and missing packages are ignored."""
    return version is not None and version.partition("+")[0] != pin.partition("+")[0]
