"""Imports run one way, and the light services stay light."""

import gc
import importlib
import pkgutil
import re
import subprocess
import sys

import pytest

from common.process.imports import heavy_imports
from tests.support.paths import ROOT

pytestmark = pytest.mark.integration

HEAVY = ("torch", "transformers")


def modules_of(package: str) -> list[str]:
    found = importlib.import_module(package)
    return [package, *(info.name for info in pkgutil.walk_packages(found.__path__, f"{package}."))]


@pytest.mark.parametrize(
    "package", ["common", "services.data", "services.reward", "services.replay"]
)
def test_light_packages_import_no_torch(package: str) -> None:
    modules = [*modules_of(package), "services.http.app"]
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert len(modules) > 2


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    for package in ("common", "services", "trainer", "jobgroup"):
        for path in (ROOT / package).rglob("*.py"):
            assert path.stem.startswith("__") or path.stem not in sys.stdlib_module_names, path


def test_every_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for package in ("common", "learning", "services", "trainer", "jobgroup", "rlhf_math"):
        for path in (ROOT / package).rglob("*.py"):
            for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(), re.MULTILINE):
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 300
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_garbage_is_collected_again_after_a_heavy_import_that_fails() -> None:
    collected = gc.isenabled()
    with pytest.raises(ModuleNotFoundError), heavy_imports():
        importlib.import_module("no_such_module")
    assert gc.isenabled() == collected


def test_no_garbage_is_collected_during_a_heavy_import() -> None:
    with heavy_imports():
        assert not gc.isenabled()
