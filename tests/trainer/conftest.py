"""Shared fixtures of the trainer's tests."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.settings.config import Config, load
from services.reward.pool import ForkServer, WorkerSpec
from tests.support.paths import ROOT
from tests.support.runs.small_run import small_run


@pytest.fixture
def config(policy_dir: Path, tmp_path: Path) -> Config:
    """The settings of a small run."""
    return small_run(policy_dir, tmp_path)


@pytest.fixture
def settings(base_model: Path, tmp_path: Path) -> Callable[..., Config]:
    """Makes the settings of a run of a few small steps on the built-in task, in its own
    directory."""
    numbers = itertools.count()

    def make(*more: str, directory: Path | None = None) -> Config:
        place = directory or tmp_path / f"run{next(numbers)}"
        words = [
            *(
                "--config",
                str(ROOT / "jobgroup/configs/tiny-cpu.yaml"),
                "--model.name",
                str(base_model),
            ),
            *("--trainer.run_dir", str(place), "--state_dir", str(place / "state")),
            *(
                "--trainer.batch_size",
                "4",
                "--trainer.max_steps",
                "3",
                "--sampling.group_size",
                "4",
            ),
            *(
                "--evaluation.samples",
                "0",
                "--optimizer.warmup_steps",
                "0",
                "--reward.workers",
                "1",
            ),
        ]
        return load([*words, *more], {})

    return make


@pytest.fixture(scope="module", autouse=True)
def shared_graders() -> Iterator[None]:
    """Lets the runs of a test file share the process that forks their graders, because it takes a
    second to load."""
    servers: dict[str, ForkServer] = {}

    def shared(spec: WorkerSpec) -> ForkServer:
        return servers.setdefault(" ".join(spec.command()), ForkServer(spec))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.reward.pool.ForkServer", shared)
        patch.setattr(ForkServer, "end", lambda _: None)
        yield
    for server in servers.values():
        server.end()
