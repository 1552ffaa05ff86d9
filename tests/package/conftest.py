"""The wheel, and an environment outside the checkout in which it is installed."""

import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.package.installed_wheel import Installed
from tests.support.paths import ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run(
        build, cwd=folder, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    root = tmp_path_factory.mktemp("installed")
    own_pip = find_spec("pip") is None  # uv makes environments without pip
    venv.create(root / "env", with_pip=own_pip)
    python = root / "env" / "bin" / "python"
    pip = (
        [str(python), "-m", "pip"]
        if own_pip
        else [sys.executable, "-m", "pip", "--python", str(python)]
    )
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(
        install, cwd=root, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (site_packages,) = (root / "env" / "lib").glob("python*/site-packages")
    # Python ignores .pth files in a folder that another .pth file names, so an editable install
    # there does not count.
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "dependencies.pth").write_text("\n".join(sorted(dependencies)))
    for package in (
        site_packages / "common",
        site_packages / "benchmarks",
        root / "work" / "services",
    ):
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("OWNER = 'somebody else'\n")
    return Installed(python.parent, site_packages, root / "work")
