"""The setting that all sections share: the device, the size of the work, and random models of real
shapes.
"""

import importlib.util
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from benchmarks.update import make_model, peak
from checks.gpu_check.harness import Findings
from common.errors import ConfigError
from common.settings.config import Config, load
from learning.ranks import Ranks
from trainer.cli import tiny_base
from trainer.policy.update_metrics import UpdateMetrics


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

    def timed(self, work: Callable[[], object]) -> float:
        """Returns the seconds of `work`, with what it started on the GPU."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def peak(self) -> float | None:
        """Returns the FLOP/s at 100 % utilisation; None for a GPU with an unknown data sheet."""
        try:
            return peak(self.device)
        except ConfigError:
            return None

    def tiny_base(self) -> Path:
        """Returns the built-in base model, which is made where the checkout has none."""
        base = Path(".cache/tiny-base")
        if not (base / "config.json").exists():
            base = self.scratch / "tiny-base"
            tiny_base.build(base)
        return base

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
            "--optimizer.warmup_steps",
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

    def ranks(self, config: Config) -> Ranks:
        """Returns this process as the one rank."""
        return Ranks.alone(config)


def seconds(work: Callable[[], object], setting: Setting, times: int) -> float:
    """Returns the median time of `work`, after one uncounted run."""
    found = [setting.timed(work) for _ in range(times + 1)]
    return statistics.median(found[1:])


def different(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the tensors of `one` that are not bit by bit in `other`."""
    return [
        name
        for name, tensor in one.items()
        if name not in other or not torch.equal(tensor, other[name])
    ]


def finite(metrics: UpdateMetrics) -> bool:
    """Returns whether an update's loss and gradient are finite, and the gradient is not zero."""
    return math.isfinite(metrics.loss) and 0 < metrics.grad_norm < math.inf


def claim_agreement(found: Findings, text: str, apart: Tensor) -> None:
    """Claims that the |Δ log-probability| of an engine and the trainer are small."""
    found.at_most(f"{text}: mean |Δ|", float(apart.mean()), 0.02)
    found.at_most(f"{text}: largest |Δ|", float(apart.max()), 0.5)


def activities(setting: Setting) -> list[ProfilerActivity]:
    """Returns what a profile records."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]


def costs(recorded: Any, setting: Setting) -> list[tuple[float, Any]]:
    """Returns the milliseconds and the event of each operator or kernel, the most costly first."""
    kind = "device" if setting.on_gpu else "cpu"
    found = []
    for event in recorded.key_averages():
        found.append((getattr(event, f"self_{kind}_time_total") / 1e3, event))
    return sorted(found, key=lambda cost: -cost[0])


def cell(event: Any) -> str:
    """Returns an event's name for a table in Markdown."""
    name = str(event.key).replace("|", "/")[:100]
    return f"`{name}`"
