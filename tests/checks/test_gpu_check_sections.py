"""The sections of `checks.gpu_check`, executed on a CPU with tiny shapes."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Console

from checks.gpu_check import report
from checks.gpu_check.__main__ import check, parse
from checks.gpu_check.bundle import missing, read_installed
from checks.gpu_check.harness import Outcome
from checks.gpu_check.sections import SECTIONS
from common.errors import ConfigError
from tests.support.errors import raises

PRESENT = """
accelerate aiohappyeyeballs aiohttp aiosignal annotated-doc anyio attrs certifi charset-normalizer click filelock
frozenlist fsspec h11 hf-xet httpcore httpx huggingface-hub idna jinja2 markdown-it-py markupsafe mdurl mpmath msgpack
multidict networkx numpy packaging pandas peft pillow pip prometheus-client propcache protobuf psutil pyarrow pygments
python-dateutil pyyaml regex requests rich safetensors setuptools shellingham sympy tensorboard tokenizers torch tqdm
transformers triton typer typing-extensions urllib3 uvloop xxhash yarl
"""
"""What a machine with a GPU that was at hand had of this environment's packages."""
NEWER = {"httpx2", "httpcore2", "truststore", "outcome", "trio", "sortedcontainers"}
"""Imported by the huggingface_hub of this environment, not by that machine's."""
HIDING = """
import importlib.machinery
import os

hidden = set(os.environ["HIDDEN_MODULES"].split())
find = importlib.machinery.PathFinder.find_spec


def find_visible(name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else find(name, path, target)


importlib.machinery.PathFinder.find_spec = staticmethod(find_visible)
"""


def packages_of_the_machine() -> dict[str, Version]:
    return {
        str(canonicalize_name(name)): Version(metadata.version(name)) for name in PRESENT.split()
    }


def _hide_other_packages(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = packages_of_the_machine()
    known = {*installed, *missing(installed, "3.12"), *NEWER, "rlhf-math"}
    hidden = [
        module
        for module, distributions in metadata.packages_distributions().items()
        if not known.intersection(map(canonicalize_name, distributions))
    ]
    assert {"smg", "selenium", "mypy"} <= set(hidden)
    (directory / "sitecustomize.py").write_text(HIDING)
    monkeypatch.setenv("HIDDEN_MODULES", " ".join(hidden))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), str(Path.cwd())]))


def lines(directory: Path, *words: str) -> dict[str, Outcome]:
    # Ten times the usual limits of the sections: the machine may be busy.
    plain = ["--out", str(directory), "--device", "cpu", "--small", "--minutes", "320"]
    options = parse([*plain, *words])
    with (directory.parent / "console").open("w") as file:
        status = check(options, Console(file=file))
    assert status == 0, (directory / "gpu-check.md").read_text()
    return {outcome.name: outcome for outcome in report.read(directory)}


@pytest.mark.slow
@pytest.mark.integration
def test_sections_run_as_processes(tmp_path: Path) -> None:
    found = lines(tmp_path / "out", "--only", "varlen", "resume")
    assert list(found) == ["varlen", "resume"]
    assert all(outcome.findings.claims for outcome in found.values())
    assert (
        "200 tensors of weights and optimiser, bit by bit"
        in (tmp_path / "out" / "gpu-check.md").read_text()
    )


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_section_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the packages of a machine for machine learning and those that the bundle adds, and no
    others."""
    _hide_other_packages(tmp_path, monkeypatch)
    found = lines(tmp_path / "out", "--minutes", "60")
    assert list(found) == list(SECTIONS)
    assert not any(outcome.error or outcome.not_reached for outcome in found.values())


@pytest.mark.integration
@pytest.mark.slow
def test_the_update_alone_needs_no_service() -> None:
    code = "import sys, benchmarks.update; print(*{'fastapi', 'datasets', 'math_verify'}.intersection(sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == ""
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_names_the_options_for_a_cpu(tmp_path: Path) -> None:
    with raises(ConfigError, field="--device", value="cuda") as caught:
        check(parse(["--out", str(tmp_path)]), Console(quiet=True))
    assert "--device cpu --small" in str(caught.value)


def test_the_bundle_holds_what_the_machine_lacks() -> None:
    """The first list was read off that machine, where these packages were not found; the demo needs
    the others."""
    installed = packages_of_the_machine()
    absent = """
    annotated-types fastapi httptools msgspec opentelemetry-api orjson pydantic pydantic-core
    sniffio starlette typing-inspection uvicorn
    """
    graders_and_data = "antlr4-python3-runtime datasets dill latex2sympy2-extended math-verify multiprocess pyseccomp"
    assert set(missing(installed, "3.12")) == {*absent.split(), *graders_and_data.split()}


def test_a_package_that_is_too_old_is_bundled_and_torch_never() -> None:
    installed = packages_of_the_machine()
    assert "rich" in missing({**installed, "rich": Version("13.0")}, "3.12")
    assert "torch" not in missing({**installed, "torch": Version("2.11.0+cu130")}, "3.12")
    with raises(ConfigError, field="--installed", value="torch"):
        missing({**installed, "torch": Version("2.9")}, "3.12")
    del installed["transformers"]
    with raises(ConfigError, field="--installed", value="transformers"):
        missing(installed, "3.12")


@pytest.mark.parametrize("body", ["", "not a list", "torch==", "torch @ file:///torch.whl"])
def test_what_is_no_list_of_packages_is_refused(tmp_path: Path, body: str) -> None:
    (tmp_path / "list").write_text(body)
    with raises(ConfigError, field="--installed", value=str(tmp_path / "list")):
        read_installed(tmp_path / "list")
