"""Python, the pinned packages, the environments of SGLang and SkyPilot."""

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from common.topology import CRITIC, DATA, REPLAY, REWARD, ROLLOUT, TRAINER
from jobgroup.doctor.plan import ROOT, Job, Plan
from jobgroup.doctor.result import Result, fail, ok, warn

_EXTRA = {DATA: "services", REWARD: "services", REPLAY: "services", ROLLOUT: "rollout", CRITIC: "trainer", TRAINER: "trainer"}
_TOLD = 6
_SGLANG_VERSIONS = "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"


def check_python(plan: Plan) -> Iterable[Result]:
    """The interpreter that runs this, and the one that the tasks name."""
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield ok("python", f"{version} in {sys.prefix}")
    else:
        remedy = "make the environment anew: make PYTHON=/path/to/python3.11 lint"
        yield fail("python", f"{version}, 3.11 to 3.13 is needed", remedy)
    if plan.topology is None and not (ROOT / "Makefile").exists():
        return  # installed: a local run gives its tasks this Python
    for job in plan.here:
        if ".venv/bin/python" in job.run and not (job.workdir / ".venv/bin/python").exists():
            mend = f"in {job.workdir}: {job.setup.strip() or 'make lint'}"
            yield fail(f"python of {job.name}", f"there is no {job.workdir}/.venv/bin/python", mend)


def check_packages(plan: Plan, root: Path = ROOT) -> Iterable[Result]:
    """What the tasks here import is installed, in the pinned version."""
    installed = {_key(each.metadata["Name"]): each.version for each in importlib.metadata.distributions()}
    pins = dict(_pins(root / "constraints.txt"))
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {_name(text) for text in project["dependencies"]}
    extras = {_EXTRA[job.name] for job in plan.here if job.name in _EXTRA} | {"trainer" for job in plan.here if job.computes}
    for extra in extras:
        wanted |= {_name(text) for text in project["optional-dependencies"][extra]}
    chosen, pip = ",".join(sorted(extras)), f"{sys.executable} -m pip install -c {root / 'constraints.txt'}"
    checkout = (root / "Makefile").exists()
    again = f".venv/bin/pip install -c constraints.txt -e '.[{chosen}]'" if checkout else f"{pip} 'rlhf-math[{chosen}]'"
    for name in sorted(wanted - set(installed)):
        if name != "torch":  # has a line of its own
            yield fail(f"package {name}", "not installed", again)
    other = [f"{name} {installed[name]} ({pin} is pinned)" for name, pin in pins.items() if _differs(installed.get(name), pin)]
    other = [each for each in other if not each.startswith("torch ")]
    if other:
        more = f" and {len(other) - _TOLD} more" if len(other) > _TOLD else ""
        yield warn("packages", f"{', '.join(other[:_TOLD])}{more}", again)
    else:
        yield ok("packages", f"{len(installed.keys() & pins.keys())} in the pinned versions")
    yield _torch(plan, installed.get("torch"), pins["torch"], again)


def _torch(plan: Plan, version: str | None, pin: str, again: str) -> Result:
    """A light environment has no torch, and needs none."""
    needing = [job.name for job in plan.here if job.computes]
    if version is None and needing:
        return fail("torch", f"not installed; {', '.join(needing)} cannot do without", again)
    if version is None:
        return ok("torch", "not installed, and nothing here needs it")
    return fail("torch", f"{version}, {pin} is pinned", again) if _differs(version, pin) else ok("torch", version)


def check_router(plan: Plan) -> Iterable[Result]:
    """The router is a compiled extension: installed is not yet usable."""
    if plan.job(ROLLOUT) is None:
        return
    done = subprocess.run(
        [sys.executable, "-c", "import sglang_router"], capture_output=True, text=True, timeout=20, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield fail("sglang-router", f"cannot be imported: {reason}", "bash jobgroup/setup.sh rollout")
    else:
        yield ok("sglang-router", "can be imported")


def check_sglang(plan: Plan) -> Iterable[Result]:
    """Its own environment, where the engine is SGLang."""
    job = plan.job(ROLLOUT)
    if job is None or not job.uses_sglang or plan.assumed is not None:
        return
    rollout, python = job.config.rollout, job.path(job.config.rollout.engine_python)
    install = "make sglang-cpu" if rollout.device == "cpu" else "bash jobgroup/setup.sh sglang"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        yield fail("sglang", f"its wheel is for Linux on x86-64, this is {platform.platform()}", "rollout.engine embedded")
    elif not python.is_file():
        yield fail(
            "sglang", f"there is no {python}", f"{install}; or another rollout.engine_python; or rollout.engine embedded"
        )
    else:
        yield _sglang_versions(job, python, install)


def _sglang_versions(job: Job, python: Path, install: str) -> Result:
    done = subprocess.run([python, "-c", _SGLANG_VERSIONS], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return fail("sglang", f"{python}: {reason}", f"remove {python.parent.parent} and run {install}")
    version, torch = done.stdout.split()
    folder = "sglang-cpu/requirements.txt" if job.config.rollout.device == "cpu" else "sglang-requirements.txt"
    pin = dict(_pins(ROOT / "jobgroup" / folder))["sglang"]
    found = f"{version} with torch {torch} in {python.parent.parent}"
    return warn("sglang", f"{found}; {pin} is pinned", install) if _differs(version, pin) else ok("sglang", found)


def check_skypilot(plan: Plan) -> Iterable[Result]:
    """On whichever machine the group is launched from."""
    if plan.topology is not None:
        return
    pin = dict(_pins(ROOT / "jobgroup/skypilot-requirements.txt"))["skypilot"]
    sky = shutil.which("sky")
    if sky is None:
        yield ok("skypilot", "not on the path; only a launch on a cluster needs it")
        return
    done = subprocess.run([sky, "--version"], capture_output=True, text=True, timeout=30, check=False)
    match = re.search(r"\d+\.\d+[\w.]*", done.stdout)
    install = f"uv tool install 'skypilot[kubernetes]=={pin}', an environment of its own"
    if done.returncode or match is None:
        yield fail("skypilot", f"{sky} --version fails", install)
    else:
        yield warn("skypilot", f"{match[0]}, read and tried was {pin}", install) if match[0] != pin else ok("skypilot", pin)


def _pins(path: Path) -> Iterable[tuple[str, str]]:
    """(name, version) of every `name==version` of a file."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([\w.-]+)(?:\[[^]]*\])?==([\w.!+-]+)", line):
            yield _key(match[1]), match[2]


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None
    return _key(match[0])


def _differs(version: str | None, pin: str) -> bool:
    """Another release than the pinned one; the build (`+cpu`) does not count, nor does a package that is not there."""
    return version is not None and version.partition("+")[0] != pin.partition("+")[0]
