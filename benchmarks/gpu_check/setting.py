"""The setting that all sections share: the device, the size of the work, and random models of real
shapes.
"""

import importlib.util
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.update import make_model
from common.settings.config import Config, load
from common.settings.sections import TrainerSection
from learning.ranks import Ranks


@dataclass(frozen=True)
class Setting:
    """The options of every section."""

    device_kind: str
    """`cuda` or `cpu`."""
    small: bool
    """Use tiny shapes, which show that the code runs but not its speed."""
    scratch: Path
    """Directory for models and runs; removed at the end."""
    model_path: Path | None = None
    """A real model for the real run, if one is given."""
    data: Path | None = None
    """Directory with `train.jsonl` in GSM8K's form, if one is given."""
    sglang: Path | None = None
    """Python with SGLang, if there is one."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")

    @property
    def on_gpu(self) -> bool:
        return self.device_kind == "cuda"

    def synchronize(self) -> None:
        """Waits for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def model(self, shape: str) -> Path:
        """Returns a random model of this shape from `benchmarks.update`; the first section to need
        it creates it.
        """
        directory = self.scratch / f"model-{shape}"
        if not directory.exists():
            partial = directory.with_name(f"{directory.name}.{os.getpid()}")
            make_model(shape, partial, self.device)
            shutil.move(partial, directory)
        return directory

    def config(self, model: Path, *words: str) -> Config:
        """Returns the configuration for updates of `model` on the device, with these extra
        settings.
        """
        fixed = (
            "--model.name",
            str(model),
            "--trainer.device",
            self.device_kind,
            "--trainer.warmup_steps",
            "0",
        )
        return load([*fixed, "--algorithm.advantage", "group_centred", *words], {})

    def sglang_python(self) -> Path | None:
        """Returns a Python that has SGLang: the one that was given, or this one; None if there is
        none.
        """
        if self.sglang is not None:
            return self.sglang
        return Path(sys.executable) if importlib.util.find_spec("sglang") else None

    def ranks(self, settings: TrainerSection) -> Ranks:
        """Returns this process as the one rank."""
        return Ranks.alone(settings)


def seconds(work: Callable[[], object], setting: Setting, times: int) -> float:
    """Returns the median time of `work`, after one uncounted run."""
    found = []
    for _ in range(times + 1):
        setting.synchronize()
        start = time.perf_counter()
        work()
        setting.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])
