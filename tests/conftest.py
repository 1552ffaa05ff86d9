"""Fixtures shared by all tests."""

import gc
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from common.process import logs
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from tests.support.browser.browser import Page

# Nothing that the imports make is garbage. With the default of 700 tests take a tenth longer, too.
gc.disable()
gc.set_threshold(50_000)
# Every run has the same examples; `make fuzz` looks for new ones. A busy machine makes them slowly.
settings.register_profile(
    "repeatable",
    derandomize="FUZZ_SECONDS" not in os.environ,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")
if not Path("/dev/nvidiactl").exists():
    # Triton's kernels then run in its interpreter, which must be chosen before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


_running: list[pytest.Item] = []
_refused: list[str] = []


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    """Keeps `make check` quick: only tests marked `integration` may start Python. Small programs
    (fc-list) are fine."""
    started = event == "os.fork" or (
        event == "subprocess.Popen" and Path(str(arguments[0])).name.startswith("python")
    )
    if started and _running and not _running[0].get_closest_marker("integration"):
        _refused.append(
            f"{_running[0].nodeid} starts a process ({arguments}) and needs the marker `integration`"
        )
        raise AssertionError(_refused[-1])


@pytest.fixture(autouse=True)
def _same_logs() -> Iterator[None]:
    """Programs that a test calls set level and handlers of all logs, and the run that this process
    works for, which clients tell services; uvicorn enables every logger."""
    # torch writes hundreds of DEBUG lines per checkpoint, which would hide the failure.
    logging.getLogger("c10d-NullHandler-dcp_logger").disabled = True
    root = logging.getLogger()
    level = root.level
    handlers = list(root.handlers)
    yield
    logs.set_run("")
    root.setLevel(level)
    for handler in list(root.handlers):
        if handler not in handlers:
            root.removeHandler(handler)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log of this test alone: what earlier ones left behind is collected before it begins, since
    asyncio logs their lost errors when that happens.
    """
    gc.collect()
    gc.freeze()  # what lives now is not looked at again before every test
    return caplog


@contextmanager
def _of_the_session() -> Iterator[None]:
    """Inside this context, a process is not the doing of the test that runs."""
    test = _running[:]
    _running.clear()
    try:
        yield
    finally:
        _running[:] = test


def pytest_configure() -> None:
    sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _running[:] = [item]
    try:
        return (yield)
    finally:
        _running.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _refused.clear()
    result = yield
    assert not _refused, _refused  # refused in another thread, or caught by the test
    return result


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Makes integration tests slow unless a guarantee names them, calls tests long that are marked
    slow themselves, and runs slow folders first, so that no worker is left alone with them at the
    end.
    """
    page = (ROOT / "docs" / "explanation" / "guarantees.md").read_text(encoding="utf-8")
    quick = re.sub(r"slow: [^|]*", "", page)
    named = set(re.findall(r"tests/[\w/]+\.py|\btest_\w+", quick))
    for item in items:
        file, _, name = item.nodeid.partition("::")
        of_guarantee = file in named or name.partition("[")[0] in named
        if item.get_closest_marker("slow"):
            item.add_marker("long")
        elif item.get_closest_marker("integration") and not of_guarantee:
            item.add_marker("slow")

    services = [
        f"tests/services/{name}" for name in ("rollout", "reward", "replay", "data", "engine")
    ]
    first = [
        "tests/simulation",
        "tests/chaos",
        "tests/e2e",
        "tests/trainer",
        *services,
        "tests/fuzz",
        "tests/security",
        "tests/jobgroup",
        "tests/learning",
    ]
    order = {folder: place for place, folder in enumerate(first)}

    def place(item: pytest.Item) -> int:
        name = item.nodeid
        return next((order[folder] for folder in first if name.startswith(folder)), len(first))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Collections during the tests skip what the imports made, hundreds of thousands of objects."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The cached tiny base model; `make test` creates it in advance, otherwise it is created
    here."""
    path = ROOT / ".cache" / "tiny-base"
    path.parent.mkdir(exist_ok=True)
    with (path.parent / "tiny-base.lock").open("w") as lock:
        flock(lock, LOCK_EX)  # one process of pytest-xdist at a time
        if not (path / "config.json").exists():
            with _of_the_session():
                subprocess.run(
                    [sys.executable, "-m", "trainer.tiny_model", str(path)], cwd=ROOT, check=True
                )
    return path


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a tiny random Qwen2."""
    import torch  # not at the top: the tests of most services do not need torch

    from tests.support.batches.groups import VOCABULARY
    from trainer.cli.tiny_base import make_model, make_tokenizer

    directory = tmp_path_factory.mktemp("policy")
    tokenizer = make_tokenizer(iter(["How many apples now? 1 2 3", "#### 12"]))
    torch.manual_seed(0)
    model = make_model(
        max(VOCABULARY, len(tokenizer)), tokenizer.eos_token_id, tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Page]":
    """A tab of a headless Chromium, the same one for all tests."""
    from tests.support.browser.browser import chromium

    with chromium(tmp_path_factory.mktemp("chromium")) as page:
        yield page
