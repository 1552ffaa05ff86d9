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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from common.process.security import TOKEN, token
from common.process.topology import CRITIC, DATA, ENVIRONMENT, REPLAY, REWARD, ROLLOUT, TRAINER
from common.settings.rewards import JudgeReward
from jobgroup.doctor.availability import Hub
from jobgroup.doctor.plan import ROOT, Gpu, Plan
from jobgroup.doctor.report import Result, ask, expect
from services.rollout.engine_client import toolkit_env

_EXTRA = dict.fromkeys((DATA, REWARD, REPLAY, ENVIRONMENT), "services")
_EXTRA |= {ROLLOUT: "rollout", CRITIC: "trainer", TRAINER: "trainer"}
_LOADS = (TRAINER, ROLLOUT, CRITIC, DATA, ENVIRONMENT)
"""Tasks that load models or data sets."""
_CHECKOUT = (ROOT / "Makefile").exists()
_SHOWN = 6
_SGLANG_VERSIONS = "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"
_CUDA = 13
"""CUDA version of the pinned wheels."""
_DRIVER = 580
"""The first driver series that runs it."""
_SYSTEM_TOOLKIT = "/usr/local/cuda"
_SHARE = (
    "export API_TOKEN=$(openssl rand -hex 32), and --secret API_TOKEN when launching: "
    "the same in every task"
)


def check_python(plan: Plan) -> Iterator[Result]:
    """Checks this interpreter and those the tasks use."""
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    found = f"{platform.python_version()} in {sys.prefix}"
    fix = "3.11 to 3.13 is needed: make PYTHON=/path/to/python3.11 lint makes the environment anew"
    yield expect("python", good, found, fix)
    if not _CHECKOUT:
        return  # an installed package gives the tasks of a local run its own Python
    for job in plan.here:
        python = job.workdir / ".venv/bin/python"
        if ".venv/bin/python" in job.run and not python.exists():
            fix = f"in {job.workdir}: {(job.setup or '').strip() or 'make lint'}"
            yield Result(f"python of {job.name}", "fail", f"there is no {python}", fix)


def check_packages(plan: Plan, root: Path = ROOT) -> Iterator[Result]:
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

    pins = _pins(root / "constraints.txt")
    other = []
    for name, pin in pins.items():
        if _differs(installed.get(name), pin):
            other.append(f"{name} {installed[name]} ({pin} is pinned)")
    if not other:
        same = len(installed.keys() & pins.keys())
        yield Result("packages", "ok", f"{same} in the pinned versions")
        return
    more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
    yield Result("packages", "warn", ", ".join(other[:_SHOWN]) + more, fix)


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
    python = job.path(job.config.rollout.engine_python)
    on_cpu = job.config.rollout.device == "cpu"
    fix = "make sglang-cpu" if on_cpu else "bash jobgroup/setup.sh sglang"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        wrong = f"its wheel is for Linux on x86-64, this is {platform.platform()}"
        yield Result("sglang", "fail", wrong, "rollout.engine embedded")
    elif not python.is_file():
        fix += "; or another rollout.engine_python; or rollout.engine embedded"
        yield Result("sglang", "fail", f"there is no {python}", fix)
    else:
        folder = python.parent.parent
        answer = ask(python, "-c", _SGLANG_VERSIONS, fix=f"remove {folder} and run {fix}")
        version, torch = answer.split()
        pinned = "sglang-cpu/requirements.txt" if on_cpu else "sglang-requirements.txt"
        pin = _pins(ROOT / "jobgroup" / pinned)["sglang"]
        found = f"{version} ({pin} is pinned) with torch {torch} in {folder}"
        yield expect("sglang", not _differs(version, pin), found, fix, otherwise="warn")


def check_toolkit(plan: Plan) -> Iterator[Result]:
    """Checks the tools SGLang compiles its GPU kernels with, and that the driver can run the
    result.
    """
    if not plan.gpus or plan.assumed_gb:  # `check_gpus` says so
        return
    if any(each.needs_torch or each.uses_sglang for each in plan.here):
        yield _driver(plan.gpus)

    job = plan.job(ROLLOUT)
    if job is None or not job.uses_sglang or job.config.rollout.device == "cpu":
        return
    env = {**os.environ, **job.env}
    env |= toolkit_env(job.path(job.config.rollout.engine_python), env)
    yield _nvcc(env)

    compiler = env.get("CXX") or "c++"
    place = shutil.which(compiler, path=env["PATH"])
    found = place or f"{compiler} is not on the path, but SGLang compiles kernels with it"
    fix = "apt-get install g++, or CXX in the environment"
    yield expect("C++ compiler", place is not None, found, fix)


def _nvcc(env: Mapping[str, str]) -> Result:
    home = Path(env.get("CUDA_HOME", _SYSTEM_TOOLKIT))
    fix = "bash jobgroup/setup.sh sglang; or CUDA_HOME of a CUDA 13 toolkit in the environment"
    nvcc = shutil.which(home / "bin/nvcc") or shutil.which("nvcc", path=env["PATH"])
    if nvcc is None:
        found = f"nvcc is not in {home}/bin or on the path, but SGLang compiles kernels with it"
        return Result("nvcc", "fail", found, fix)

    match = re.search(r"release (\d+\.\d+)", ask(nvcc, "--version", fix=fix))
    release = match[1] if match else "of no release"
    found = f"CUDA {release} in {nvcc}, CUDA {_CUDA} is needed"
    library = home / "lib64/libcudart.so"
    if not library.exists():
        found += f"; there is no {library}, with which the kernels are linked"
    good = release.startswith(f"{_CUDA}.") and library.exists()
    return expect("nvcc", good, found, fix)


def _driver(gpus: Sequence[Gpu]) -> Result:
    """Judges the driver version from nvidia-smi; all GPUs of a machine have the same."""
    version = gpus[0].driver
    series = re.match(r"\d+", version)
    if series is None:
        found = f"nvidia-smi says {version!r}, which is not a version"
        fix = "compare it with /proc/driver/nvidia/version"
        return Result("NVIDIA driver", "warn", found, fix)
    found = f"{version}; the CUDA {_CUDA} wheels of torch and SGLang need {_DRIVER} or newer"
    fix = f"update the driver of the node to the {_DRIVER} series"
    return expect("NVIDIA driver", int(series[0]) >= _DRIVER, found, fix)


def check_skypilot(plan: Plan) -> Iterator[Result]:
    """Checks SkyPilot if this machine launches the group."""
    if plan.topology is not None:
        return
    sky = shutil.which("sky")
    if sky is None:
        yield Result("skypilot", "ok", "not on the path; only a launch on a cluster needs it")
        return
    pin = _pins(ROOT / "jobgroup/skypilot-requirements.txt")["skypilot"]
    fix = f"uv tool install 'skypilot[kubernetes]=={pin}', in a separate environment"
    match = re.search(r"\d+\.\d+[\w.]*", ask(sky, "--version", fix=fix))
    version = match[0] if match else "no version"
    found = f"{version}; tested with {pin}"
    yield expect("skypilot", version == pin, found, fix, otherwise="warn")


def check_secrets(plan: Plan) -> Iterator[Result]:
    """Checks API_TOKEN (the same everywhere), JUDGE_API_KEY for a judge, and HF_TOKEN, which the
    hub may require.
    """
    reward = plan.job(REWARD)
    if reward and reward.config.reward.function(JudgeReward):
        has_key = bool(reward.env.get("JUDGE_API_KEY"))
        found = "set" if has_key else "not set"
        fix = "give it with --secret JUDGE_API_KEY, unless the endpoint asks for none"
        yield expect("JUDGE_API_KEY", has_key, found, fix, otherwise="warn")

    loading = [job for job in plan.here if job.name in _LOADS]
    if loading:
        found = "not set; only gated or private models and data sets need it"
        if Hub(loading[0].env).token:
            found = "set"
        yield Result("HF_TOKEN", "ok", found)

    values = {job.env.get(TOKEN, "") for job in plan.here or plan.jobs}
    value = token({TOKEN: max(values, default="")})
    in_pod = plan.topology is not None and not plan.topology.local_hosts
    if len(values) > 1:
        yield Result(TOKEN, "fail", "the tasks have different ones", _SHARE)
    elif value:
        yield Result(TOKEN, "ok", f"set, {len(value)} characters")
    elif in_pod or plan.assumed_gb is not None:
        found = "not set: anyone on the cluster's network can call every service"
        yield Result(TOKEN, "warn", found, _SHARE)
    else:
        yield Result(TOKEN, "ok", "not set: a local run listens only on loopback")


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
