"""Images: those of the GPU tasks have what we pin, ours has what the other tasks install, and
setup.sh adds the rest."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml

from common.process.topology import ROLLOUT, TRAINER
from common.settings.config import load
from tests.support.package.lock import locked
from tests.support.paths import ROOT

GROUPS = sorted((ROOT / "jobgroup").glob("*-jobgroup.yaml"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
SGLANG = (ROOT / "jobgroup" / "sglang-requirements.txt").read_text(encoding="utf-8")
OVERRIDES = (ROOT / "jobgroup" / "sglang-overrides.txt").read_text(encoding="utf-8")
TEMPLATES = sorted(
    (ROOT / ".venv-sky").glob("lib/python3*/site-packages/sky/templates/kubernetes-ray.yml.j2")
)
BUILDS_OURS = ("pip", "hatchling", "pathspec", "pluggy", "packaging", "trove-classifiers")
"""pip, hatchling and what hatchling needs: with these, our package is installed without a
network."""


def _pin(package: str, pins: str) -> str:
    (version,) = re.findall(rf"(?m)^{package}==(\S+)$", pins)
    return str(version)


@pytest.mark.parametrize("path", GROUPS, ids=lambda path: path.stem)
def test_the_images_have_the_pinned_sglang_and_torch(path: Path) -> None:
    cuda = ".".join(_pin("nvidia-cuda-nvcc", SGLANG).split(".")[:2])
    torch = f"docker:pytorch/pytorch:{_pin('torch', CONSTRAINTS)}-cuda{cuda}-cudnn9-devel"
    sglang = f"docker:lmsysorg/sglang:v{_pin('sglang', SGLANG)}-cu{cuda.replace('.', '')}"
    expected = {ROLLOUT: sglang, TRAINER: torch, "tinker-server": torch}
    for document in list(yaml.safe_load_all(path.read_text(encoding="utf-8")))[1:]:
        resources = document["resources"]
        env = document.get("envs", {})
        if "RUN_CONFIG" in env:
            env = env | {"RUN_CONFIG": str(ROOT / env["RUN_CONFIG"])}
        if load([], env).trainer.weight_sync == "distributed":
            # One NCCL at both ends of a broadcast: it refuses a group of two versions.
            expected[TRAINER] = sglang
        assert resources.get("image_id") == (
            expected[document["name"]] if "accelerators" in resources else None
        )


def test_both_environments_without_an_image_resolve_to_one_nccl() -> None:
    """torch's wheel requires one version of NCCL, and SGLang's and the trainer's torch are one."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
    versions = [
        package["version"]
        for package in lock["package"]
        if package["name"].startswith("nvidia-nccl")
    ]
    assert len(versions) == 1
    on_cpu = (ROOT / "jobgroup/sglang-cpu/requirements.txt").read_text(encoding="utf-8")
    # Resolved from the same SGLang as sglang-requirements.txt, whose own torch it pins.
    assert _pin("torch", on_cpu) == _pin("torch", CONSTRAINTS)
    assert _pin("sglang", on_cpu) == _pin("sglang", SGLANG)
    for pins in (CONSTRAINTS, SGLANG, OVERRIDES):
        assert set(re.findall(r"(?m)^nvidia-nccl\S*==(\S+)", pins)) <= set(versions)
        assert set(re.findall(r"(?m)^torch==(\S+)", pins)) <= {_pin("torch", CONSTRAINTS)}


@pytest.mark.parametrize("path", GROUPS, ids=lambda path: path.stem)
def test_every_task_that_needs_no_torch_can_use_our_image(path: Path) -> None:
    for document in path.read_text(encoding="utf-8").split("\n---\n")[1:]:
        light = (
            re.search(r"setup.sh (services|reward|environment)$", document, re.MULTILINE)
            is not None
        )
        assert ("\n  # image_id: docker:IMAGE   # image\n" in document) == light


def _installed_by_the_image() -> tuple[set[str], list[str], list[str]]:
    """Returns the system packages, the extras of ours and the other packages that the Dockerfile
    installs."""
    commands = DOCKERFILE.replace("\\\n", " ")
    (apt,) = re.findall(r"apt-get install --yes --no-install-recommends (.*?)&&", commands)
    (extras,) = re.findall(r"pip install .* --editable '\.\[(.*?)\]'", commands)
    (others,) = re.findall(r"--editable '\S+' (.*?)&&", commands)
    return set(apt.split()), extras.split(","), others.split()


def test_our_image_has_all_that_its_tasks_install_and_no_torch(tmp_path: Path) -> None:
    system, extras, others = _installed_by_the_image()
    assert {"bubblewrap", "libseccomp2"} <= system
    assert all(_pin(name, CONSTRAINTS) for name in others)
    have = locked(extras, [name for name in others if name != "hatchling"])
    assert "math-verify" in have  # by which setup.sh knows the image
    assert "torch" not in have
    for role in ("services", "reward", "environment"):
        (arguments,) = _recorded(tmp_path / role, role)
        (wanted,) = re.findall(r"-e \.\[(.*?)\]", arguments)
        more = re.findall(r"--python \S+ (.*?)-c constraints.txt", arguments)[0].split()
        assert locked(wanted.split(","), more) <= have


@pytest.mark.skipif(
    not TEMPLATES,
    reason="SkyPilot is not installed in .venv-sky: `make check-jobgroup` installs it",
)
def test_our_image_has_what_skypilot_would_install_at_every_start() -> None:
    (packages,) = re.findall(r'PACKAGES="(rsync .*?)"', TEMPLATES[0].read_text(encoding="utf-8"))
    system, _, _ = _installed_by_the_image()
    assert set(packages.replace("netcat", "netcat-openbsd").split()) | {"sudo"} <= system


def test_docker_is_sent_what_the_image_copies_and_nothing_else() -> None:
    (copied,) = re.findall(r"(?m)^COPY (.*) \./$", DOCKERFILE)
    ignored = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert ignored[0] == "*"
    assert {line.removeprefix("!") for line in ignored[1:]} == set(copied.split())
    assert all((ROOT / name).is_file() for name in copied.split())


def _work(folder: Path) -> Path:
    """A folder with setup.sh, and a small package in the place of ours."""
    (folder / "jobgroup").mkdir(parents=True)
    shutil.copy(ROOT / "jobgroup" / "setup.sh", folder / "jobgroup")
    (folder / "jobgroup" / "sglang-requirements.txt").write_text("sglang==0.5.21\n")
    (folder / "jobgroup" / "sglang-overrides.txt").write_text("cuda-tile==1.6.0\n")
    (folder / "constraints.txt").write_text("torch==2.13.0\nmath-verify==0.9.0\n")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "rlhf-math"\nversion = "1"\n[project.optional-dependencies]\ntrainer = ["torch>=2.11"]\n'
        '[tool.hatch.build.targets.wheel]\nonly-include = ["jobgroup"]\ndev-mode-dirs = ["."]\n'
    )
    return folder


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _uv(folder: Path) -> None:
    """An installer that only records its arguments."""
    _program(
        folder / "bin" / "uv", 'echo "$@" >> calls; if [ "$1" = venv ]; then mkdir -p "$5/bin"; fi'
    )


def _setup(folder: Path, role: str, *paths: Path) -> str:
    path = os.pathsep.join([*map(str, paths), str(folder / "bin"), "/usr/bin", "/bin"])
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "UV_", "CUDA_"))
    }
    env |= {"PATH": path, "HOME": str(folder), "CUDA_HOME": str(folder / "cuda")}
    env |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = ["bash", "jobgroup/setup.sh", role]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _recorded(folder: Path, role: str, *paths: Path) -> list[str]:
    """Returns the arguments of every installation that setup.sh asks uv for."""
    if not folder.exists():
        _work(folder)
    _uv(folder)
    (folder / "calls").write_text("")
    _program(folder / "bin" / "curl", "exit 1")
    _program(folder / "bin" / "bwrap", "exit 0")
    _setup(folder, role, *paths)
    return [
        line
        for line in (folder / "calls").read_text().splitlines()
        if line.startswith("pip install")
    ]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python of its own, as in an image, with pip, hatchling, and the metadata of torch and
    SGLang. Returns its programs."""
    root = tmp_path_factory.mktemp("image")
    stdlib = Path(sysconfig.get_path("stdlib"))
    library = root / "lib" / stdlib.name
    library.mkdir(parents=True)
    for entry in stdlib.iterdir():
        if entry.name not in ("site-packages", "dist-packages"):
            (library / entry.name).symlink_to(entry)
    python = root / "bin" / "python3"
    python.parent.mkdir()
    shutil.copy(Path(sys.executable).resolve(), python)
    asked = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"],
        capture_output=True,
        text=True,
    )
    packages = Path(asked.stdout.strip())
    packages.mkdir(parents=True, exist_ok=True)
    for name in BUILDS_OURS:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            (packages / top).symlink_to(str(found.locate_file(top)))
    for name, version in (("torch", "2.13.0+cu130"), ("sglang", "0.5.21")):
        (packages / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (packages / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    return python.parent


def _own(folder: Path) -> set[str]:
    """Returns the distributions that an environment itself has, beside those of the image."""
    return {
        path.name.partition("-")[0]
        for path in folder.glob("lib/python3*/site-packages/*.dist-info")
    }


@pytest.mark.integration
def test_only_our_package_is_added_to_an_image_that_has_torch(tmp_path: Path, image: Path) -> None:
    folder = _work(tmp_path / "pod")
    told = _setup(
        folder, "trainer", image
    )  # with the real pip, which has no index to install anything from
    assert f"setup: making .venv on top of the packages of {image / 'python3'}" in told
    assert _own(folder / ".venv") == {"rlhf_math"}
    ask = "import importlib.metadata as m; print(m.version('torch'), m.version('rlhf-math'))"
    seen = subprocess.run(
        [folder / ".venv/bin/python", "-c", ask], capture_output=True, text=True, check=True
    )
    assert seen.stdout.split() == ["2.13.0+cu130", "1"]
    assert "setup: .venv is up to date" in _setup(folder, "trainer", image)


@pytest.mark.integration
def test_an_image_with_another_torch_is_not_used(tmp_path: Path, image: Path) -> None:
    folder = _work(tmp_path / "pod")
    (folder / "constraints.txt").write_text("torch==2.14.0\n")
    (arguments,) = _recorded(folder, "trainer", image)
    assert arguments.endswith("-c constraints.txt -e .[trainer]")


@pytest.mark.integration
def test_an_environment_that_stands_alone_is_kept(tmp_path: Path, image: Path) -> None:
    folder = _work(tmp_path / "pod")
    _program(folder / ".venv" / "bin" / "python", "exit 1")
    (folder / ".venv" / "pyvenv.cfg").write_text("include-system-site-packages = false\n")
    assert len(_recorded(folder, "trainer", image)) == 1
    assert "exit 1" in (folder / ".venv" / "bin" / "python").read_text()


@pytest.mark.integration
def test_the_sglang_of_an_image_is_used_with_the_compiler_of_the_image(
    tmp_path: Path, image: Path
) -> None:
    folder = _work(tmp_path / "pod")
    _program(folder / "bin" / "c++", "exit 0")
    (arguments,) = _recorded(folder, "sglang", image)  # it has no nvcc
    assert arguments.endswith("-r jobgroup/sglang-requirements.txt")
    shutil.rmtree(folder / ".venv-sglang")
    _program(folder / "cuda" / "bin" / "nvcc", "exit 0")
    assert _recorded(folder, "sglang", image) == []
    assert _own(folder / ".venv-sglang") == set()
    ask = "import importlib.metadata as m; print(m.version('sglang'))"
    seen = subprocess.run(
        [folder / ".venv-sglang/bin/python", "-c", ask], capture_output=True, text=True, check=True
    )
    assert seen.stdout.strip() == "0.5.21"
