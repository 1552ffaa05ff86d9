"""The wheel works outside the checkout; its packages never hide other packages silently, nor are
they hidden."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from common import VERSION
from rlhf_math.commands import COMMANDS
from tests.support.package.installed_wheel import Installed
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

PACKAGES = ("common", "learning", "services", "trainer", "jobgroup", "benchmarks", "checks")


def test_the_wheel_has_one_top_level_package_with_every_project_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"rlhf_math"}
    ours = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    wanted = {
        f"rlhf_math/checkout/{path.relative_to(ROOT)}" for path in ours if path.suffix != ".pyc"
    }
    wanted |= {
        "rlhf_math/py.typed",
        "rlhf_math/checkout/constraints.txt",
        "rlhf_math/checkout/pyproject.toml",
    }
    assert len(wanted) > 200
    assert wanted <= names
    assert not any("tests/" in name for name in names)


def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_traceback(
    tmp_path: Path,
) -> None:
    # A module of this name is imported by every command.
    (tmp_path / "yaml.py").write_text("raise KeyboardInterrupt\n")
    code = "import sys; from rlhf_math.commands import main; sys.path.insert(0, sys.argv.pop()); "
    done = subprocess.run(
        [sys.executable, "-c", f"{code} main()", "train", "--help", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.split() == ["interrupted"]
    assert not done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_by_its_own_name(installed: Installed, command: str) -> None:
    done = installed.run("rlhf", command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: rlhf {command}" in done.stdout


def test_the_commands_are_listed_and_an_unknown_one_is_refused(installed: Installed) -> None:
    done = installed.run("rlhf")
    assert done.returncode == 0, done.stderr
    for command, (_, purpose) in COMMANDS.items():
        assert command in done.stdout
        assert purpose in done.stdout
    assert str(installed.site_packages / "rlhf_math" / "checkout" / "jobgroup") in done.stdout
    assert installed.run("rlhf", "--version").stdout == f"rlhf-math {VERSION}\n"
    done = installed.run("rlhf", "diagnos")
    assert done.returncode == 2
    assert "diagnos" in done.stderr
    assert "did you mean diagnose?" in done.stderr


def test_a_module_of_the_documentation_runs_without_a_checkout(installed: Installed) -> None:
    done = installed.run("python", "-m", "rlhf_math", "services.data", "--data.source", "none-such")
    assert done.returncode == 2
    assert "none-such" in done.stderr


@pytest.mark.slow
def test_one_step_of_a_job_group_from_the_wheel(installed: Installed, base_model: Path) -> None:
    """Starts every process: launcher, reward workers, router and engine under their supervisor,
    torchrun."""
    settings = {
        "RUN_CONFIG": "jobgroup/configs/tiny-cpu.yaml",
        "MODEL_NAME": str(base_model),
        "RUN_DIR": "run",
        "STATE_DIR": "state",
    }
    settings |= {"BATCH_SIZE": "2", "MAX_STEPS": "1", "RLHF_EVALUATION__EVERY": "0"}
    words = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
    nodes = ["--num-nodes", "rollout-server=1", "--num-nodes", "ppo-trainer=1"]
    done = installed.run(
        "rlhf",
        "local",
        "rlhf-math-jobgroup.yaml",
        *nodes,
        *words,
        "--log-dir",
        "logs",
        timeout_s=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    root = installed.site_packages / "rlhf_math" / "checkout"
    assert f"this is {root / 'jobgroup' / 'rlhf-math-jobgroup.yaml'}" in done.stdout + done.stderr
    assert len((installed.folder / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_training_through_the_python_api_of_the_wheel(
    installed: Installed, base_model: Path
) -> None:
    done = installed.python(
        "import warnings; warnings.simplefilter('ignore', RuntimeWarning)\n"
        "from rlhf_math import MathRewardFunction, OnlineRLTrainer, Prompt, TrainerConfig\n"
        "import rlhf_math, trainer\n"
        "assert trainer.OnlineRLTrainer is OnlineRLTrainer and set(trainer.__all__) <= set(dir(rlhf_math))\n"
        f"config = TrainerConfig(model_name_or_path={str(base_model)!r}, num_generations=2, per_device_train_batch_size=2,\n"
        "    gradient_accumulation_steps=1, max_steps=1, max_new_tokens=8, output_dir='api')\n"
        "problems = [Prompt(id='a', prompt='1+1?', ground_truth='2')]\n"
        "OnlineRLTrainer(config, MathRewardFunction(), problems).train()\n"
    )
    assert done.returncode == 0, done.stderr
    assert len((installed.folder / "api" / "metrics.jsonl").read_text().splitlines()) == 1


def test_installing_hides_no_other_package(installed: Installed) -> None:
    done = installed.python("import common; print(common.OWNER, common.__file__)")
    assert done.stdout.split(" ", 2)[:2] == ["somebody", "else"]
    assert done.stdout.endswith(f"{installed.site_packages / 'common' / '__init__.py'}\n")
    done = installed.python("import trainer")
    assert "No module named 'trainer'" in done.stderr


def test_importing_says_which_packages_it_hides(installed: Installed) -> None:
    done = installed.python(
        "import rlhf_math, common, services; print(common.__file__, services.__file__)"
    )
    assert done.returncode == 0, done.stderr
    root = installed.site_packages / "rlhf_math" / "checkout"
    assert done.stdout.split() == [
        str(root / name / "__init__.py") for name in ("common", "services")
    ]
    others = [
        installed.site_packages / "common",
        installed.site_packages / "benchmarks",
        installed.folder / "services",
    ]
    for hidden in others:
        assert f"it hides {hidden / '__init__.py'} in this process" in done.stderr
    assert done.stderr.count("RuntimeWarning") == 3


def test_another_package_named_benchmarks_may_be_imported_already(installed: Installed) -> None:
    done = installed.python("import benchmarks, rlhf_math; print(benchmarks.OWNER)")
    assert done.stdout.split() == ["somebody", "else"], done.stderr


@pytest.mark.slow
def test_the_gpu_check_runs_its_sections_beside_another_package_benchmarks(
    installed: Installed,
) -> None:
    words = ["--device", "cpu", "--small", "--only", "machine", "--out", "check"]
    # Ten times the usual limit of a section: the machine may be busy.
    done = installed.run("rlhf", "gpu-check", *words, "--minutes", "80")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "machine: " in done.stdout


def test_an_already_imported_package_is_an_error_that_names_both(installed: Installed) -> None:
    done = installed.python("import common\nimport rlhf_math")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: rlhf_math needs its own package common")
    assert str(installed.site_packages / "rlhf_math" / "checkout" / "common") in last
    assert str(installed.site_packages / "common" / "__init__.py") in last


def test_in_a_checkout_the_packages_are_those_beside_it() -> None:
    code = "import trainer, rlhf_math, common; print(rlhf_math.ROOT, common.__file__)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.stdout.split() == [str(ROOT), str(ROOT / "common" / "__init__.py")], done.stderr


def test_an_editable_install_names_the_checkout_and_copies_no_code(tmp_path: Path) -> None:
    code = f"from hatchling.build import build_editable; print(build_editable({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    archive = zipfile.ZipFile(tmp_path / done.stdout.strip())
    assert archive.read("_rlhf_math.pth").decode().split() == [str(ROOT)]
    assert not any(name.endswith(".py") for name in archive.namelist())


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    locked = {package["name"]: package.get("version") for package in packages}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    names = {name: re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    differing = {
        name: (pins[name], locked.get(key))
        for name, key in names.items()
        if locked.get(key) != pins[name]
    }
    assert not differing, "uv lock $(sed 's/^/--upgrade-package /' constraints.txt)"
    hosts = {
        re.match(r"https?://([^/]*)", url)
        for url in re.findall(r'"(https?://[^"]+)"', (ROOT / "uv.lock").read_text())
    }
    assert {host[1] for host in hosts if host} == {"pypi.org", "files.pythonhosted.org"}
