"""Python, the pinned packages, and the environment of SGLang."""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tomllib
from pathlib import Path

from common.process.topology import DATA, ENVIRONMENT, REPLAY, REWARD, ROLLOUT, TINKER, TRAINER
from jobgroup.doctor.plan import ROOT, Plan
from jobgroup.doctor.report import Result, Results, ask, expect
from jobgroup.spec import Env
from services.rollout.engine_client import toolkit_env
from services.rollout.router import chosen_router

_EXTRA = dict.fromkeys((DATA, REWARD, REPLAY, ENVIRONMENT), "services")
_EXTRA |= {ROLLOUT: "rollout", TRAINER: "trainer", TINKER: "trainer"}
_CHECKOUT = (ROOT / "Makefile").exists()
_SGLANG_VERSIONS = "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"
# CUDA version of the pinned wheels.
_CUDA = 13
# The first driver series that runs it.
_DRIVER = 580
_SYSTEM_TOOLKIT = "/usr/local/cuda"


def check_python(plan: Plan) -> Results:
    """Checks this interpreter and those the tasks use."""
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield expect(
        "python",
        good,
        f"{platform.python_version()} in {sys.prefix}",
        "3.11 to 3.13 is needed: make PYTHON=/path/to/python3.11 lint makes the environment anew",
    )
    for job in plan.here if _CHECKOUT else ():  # an installed package gives tasks its own Python
        python = job.workdir / ".venv/bin/python"
        if ".venv/bin/python" in job.run and not python.exists():
            yield Result(
                f"python of {job.name}",
                "fail",
                f"there is no {python}",
                f"in {job.workdir}: {(job.setup or '').strip() or 'make lint'}",
            )


def check_packages(plan: Plan, root: Path = ROOT) -> Results:
    """Checks that the imports of the tasks here are installed, in the pinned versions."""
    installed: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        # What is on top of an image's packages comes first.
        installed.setdefault(_key(each.metadata["Name"]), each.version)

    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {_EXTRA[job.name] for job in plan.here if job.name in _EXTRA}
    if any(job.needs_torch for job in plan.here):
        extras.add("trainer")
    # For the tokenizer, as setup.sh installs it.
    tokenizer = ["transformers"] if plan.job(ENVIRONMENT) else []
    wanted = [*project["dependencies"], *tokenizer]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]

    names = ",".join(sorted(extras))
    package = f"-e '.[{names}]'" if _CHECKOUT else f"'rlhf-math[{names}]'"
    pip = f"{sys.executable} -m pip install -c {root / 'constraints.txt'}"
    fix = " ".join([pip, package, *tokenizer])
    keys = {_key(re.split(r"[^\w.-]", text)[0]) for text in wanted}
    for name in sorted(keys - installed.keys()):
        yield Result(f"package {name}", "fail", "not installed", fix)

    other = []
    for name, pin in _pins(root / "constraints.txt").items():
        # Builds (`+cpu`) are ignored.
        if installed.get(name, pin).partition("+")[0] != pin:
            other.append(f"{name} {installed[name]} ({pin} is pinned)")
    yield expect(
        "packages", not other, ", ".join(other) or "in the pinned versions", fix, otherwise="warn"
    )


def check_router(plan: Plan) -> Results:
    """Imports the router, a compiled extension: being installed does not prove that it works."""
    job = plan.job(ROLLOUT)
    if job:
        name, _ = chosen_router(job.config)
        module = name.replace("-", "_")
        ask(sys.executable, "-c", f"import {module}", fix="bash jobgroup/setup.sh rollout")
        yield Result("router", "ok", f"{name} can be imported")


def check_sglang(plan: Plan) -> Results:
    """Checks SGLang's environment if SGLang is the engine."""
    job = plan.job(ROLLOUT)
    if job is None or not job.uses_sglang:
        return
    python = job.path(job.config.rollout.engine_python)
    on_cpu = job.config.rollout.device == "cpu"
    fix = "make sglang-cpu" if on_cpu else "bash jobgroup/setup.sh sglang"
    fix += ", on Linux on x86-64; or another rollout.engine_python; or rollout.engine embedded"
    version, torch = ask(python, "-c", _SGLANG_VERSIONS, fix=fix).split()
    pinned = "sglang-cpu/requirements.txt" if on_cpu else "sglang-requirements.txt"
    pin = _pins(ROOT / "jobgroup" / pinned)["sglang"]
    yield expect(
        "sglang",
        version == pin,
        f"{version} ({pin} is pinned) with torch {torch} in {python.parent.parent}",
        fix,
        otherwise="warn",
    )


def check_toolkit(plan: Plan) -> Results:
    """Checks the tools SGLang compiles its GPU kernels with, and that the driver can run the
    result.
    """
    if not plan.gpus:  # `check_gpus` says so
        return
    if any(each.needs_torch or each.uses_sglang for each in plan.here):
        driver = plan.gpus[0].driver  # all GPUs of a machine have the same
        series = driver.partition(".")[0]
        new_enough = series.isdecimal() and int(series) >= _DRIVER
        yield expect(
            "NVIDIA driver",
            new_enough,
            f"{driver!r}; the CUDA {_CUDA} wheels of torch and SGLang need {_DRIVER} or newer",
            f"update the driver of the node to the {_DRIVER} series",
        )

    job = plan.job(ROLLOUT)
    if job is None or not job.uses_sglang or job.config.rollout.device == "cpu":
        return
    env = {**os.environ, **job.env}
    env |= toolkit_env(job.path(job.config.rollout.engine_python), env)
    yield _nvcc(env)

    compiler = env.get("CXX") or "c++"
    place = shutil.which(compiler, path=env["PATH"])
    found = place or f"{compiler} is not on the path, but SGLang compiles kernels with it"
    yield expect(
        "C++ compiler", place is not None, found, "apt-get install g++, or CXX in the environment"
    )


def _nvcc(env: Env) -> Result:
    home = Path(env.get("CUDA_HOME", _SYSTEM_TOOLKIT))
    fix = "bash jobgroup/setup.sh sglang; or CUDA_HOME of a CUDA 13 toolkit in the environment"
    nvcc = shutil.which(home / "bin/nvcc") or shutil.which("nvcc", path=env["PATH"])
    if nvcc is None:
        found = f"nvcc is not in {home}/bin or on the path, but SGLang compiles kernels with it"
        return Result("nvcc", "fail", found, fix)

    printed = ask(nvcc, "--version", fix=fix).partition("release ")[2]
    release = printed.partition(",")[0]
    found = f"CUDA {release} in {nvcc}, CUDA {_CUDA} is needed"
    library = home / "lib64/libcudart.so"
    if not library.exists():
        found += f"; there is no {library}, with which the kernels are linked"
    good = release.startswith(f"{_CUDA}.") and library.exists()
    return expect("nvcc", good, found, fix)


def _pins(path: Path) -> dict[str, str]:
    lines = re.findall(
        r"(?m)^([\w.-]+)(?:\[[^]]*\])?==([\w.!-]+)", path.read_text(encoding="utf-8")
    )
    return {_key(name): version for name, version in lines}


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
