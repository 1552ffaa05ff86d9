"""Packs the check for a machine that has a GPU and no network.

The archive holds the source, the built-in base model, and the packages that the check imports and
that machine lacks. It is unpacked there and run as it is; nothing is installed. The machine must
have Python, torch and transformers on Linux x86-64. What else it has is read from FILE, the output
of `python3 -m pip list --format=freeze` there.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from checks.gpu_check.sections import PARTS
from common.errors import ConfigError
from common.process.cli import CommandParser, fail

_ROOT = Path(__file__).resolve().parents[2]
_DISTRIBUTION = "rlhf-math"
_SOURCES = (
    "common",
    "learning",
    "services",
    "trainer",
    "jobgroup",
    "benchmarks",
    "checks",
    "pyproject.toml",
    "constraints.txt",
)
_BASE = Path(".cache/tiny-base")
_EXTRAS = ("services", "trainer")
"""What a run in one process needs, as the demo's."""
_GIVEN = ("torch", "transformers")
"""Packages that the machine must have: they fit its driver, and are far too large to pack."""
_GLIBC = range(39, 16, -1)
"""Versions of glibc, newest first, whose wheels are taken: pip compares each tag exactly."""


def missing(installed: Mapping[str, Version], python: str) -> dict[str, Version]:
    """Returns the packages to pack and their versions, which are those of this environment.

    Args:
        installed: the other machine's packages.
        python: its version of Python, such as `3.12`.

    Raises ConfigError where it lacks torch or transformers, or has one that is too old.
    """
    environment = {name: str(value) for name, value in default_environment().items()}
    environment |= {"python_version": python, "python_full_version": f"{python}.0"}
    environment |= {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    needed = [Requirement(text) for text in metadata.requires(_DISTRIBUTION) or ()]
    waiting = list[Requirement]()
    for extra in _EXTRAS:
        waiting += [each for each in needed if _applies(each, {**environment, "extra": extra})]
    found = dict[str, Version]()

    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or _satisfies(installed, requirement):
            continue
        if name in _GIVEN:
            has = installed.get(name)
            reason = f"that machine has {name} {has}" if has else f"that machine has no {name}"
            remedy = f"install {requirement} there: its build has to fit the driver"
            raise ConfigError(reason, field="--installed", value=name, remedy=remedy)
        found[name] = Version(metadata.version(name))
        own = [Requirement(text) for text in metadata.requires(name) or ()]
        for extra in ("", *requirement.extras):
            waiting += [each for each in own if _applies(each, {**environment, "extra": extra})]

    return found


def read_installed(path: Path) -> dict[str, Version]:
    """Reads the output of `pip list --format=freeze`. Raises ConfigError where it is something
    else.
    """
    found = dict[str, Version]()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines:
            name, _, version = line.partition("==")
            found[canonicalize_name(name)] = Version(version)
        if not found:
            raise ValueError("there is no package in it")
    except (OSError, ValueError) as error:
        remedy = "give the output of `python3 -m pip list --format=freeze` of that machine"
        raise ConfigError(str(error), field="--installed", value=str(path), remedy=remedy) from None
    return found


def download(packages: Mapping[str, Version], python: str, directory: Path) -> None:
    """Unpacks wheels for that Python on Linux x86-64 into `directory`. Raises ConfigError where pip
    finds none.
    """
    if not packages:
        directory.mkdir()
        return
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    wanted = [f"{name}=={version}" for name, version in packages.items()]
    words = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
        "--only-binary=:all:",
    ]
    target = [f"--python-version={python}", "--implementation=cp", f"--target={directory}"]
    command = [sys.executable, "-m", "pip", "install", *words, *target, *platforms, *wanted]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        raise ConfigError(
            reason,
            field="--python",
            value=python,
            remedy="use a Python that these packages have wheels for",
        )


def pack(archive: Path, packages: Path) -> None:
    """Writes the archive: one directory with the source, the base model and the packages."""
    with tarfile.open(archive, "w:gz") as tar:
        for name in _SOURCES:
            tar.add(_ROOT / name, f"{_DISTRIBUTION}/{name}", filter=_without_caches)
        tar.add(_ROOT / _BASE, f"{_DISTRIBUTION}/{_BASE}")
        tar.add(packages, f"{_DISTRIBUTION}/packages")


def _applies(requirement: Requirement, environment: Mapping[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(dict(environment))


def _satisfies(installed: Mapping[str, Version], requirement: Requirement) -> bool:
    version = installed.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def _without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name else entry


def main() -> None:
    head, *details = (__doc__ or "").split("\n\n")
    parser = CommandParser("checks.gpu_check.bundle", head, epilog="\n\n".join(details))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="ARCHIVE",
        help="the archive to write, such as gpu-check.tar.gz",
    )
    parser.add_argument(
        "--python", default="3.12", metavar="VERSION", help="that machine's Python (default 3.12)"
    )
    parser.add_argument(
        "--installed", type=Path, required=True, metavar="FILE", help="that machine's packages"
    )
    options = parser.parse_args()
    try:
        if not (_ROOT / _BASE / "config.json").exists():
            remedy = "make it with `make gpu-bundle`, or with `rlhf tiny-model .cache/tiny-base`"
            raise ConfigError(
                "the built-in base model is not there",
                field="--out",
                value=str(_BASE),
                remedy=remedy,
            )
        packages = missing(read_installed(options.installed), options.python)
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary) / "packages"
            download(packages, options.python, directory)
            pack(options.out, directory)
    except ConfigError as error:
        fail(error)

    names = ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))
    print(
        f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB, "
        f"with {len(packages)} packages: {names}"
    )
    print("there:")
    print(f"  tar xzf {options.out.name} && cd {_DISTRIBUTION}")
    for part in PARTS:
        print(
            f"  PYTHONPATH=packages python3 -m checks.gpu_check --part {part} --out runs/gpu-check"
        )


if __name__ == "__main__":
    main()
