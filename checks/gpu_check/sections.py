"""The sections in three parts, most valuable first, because time may run out at the end of a part.

`python -m checks.gpu_check.sections NAME DEVICE SIZE SCRATCH MODEL DATA SGLANG LINE` runs one
in this process (`harness.run` starts it).
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from checks.gpu_check.harness import Findings, leave


@dataclass(frozen=True)
class Section:
    """A function of a module of this package, and its time limit in seconds."""

    about: str
    module: str
    function: str
    limit_s: float
    arguments: tuple[object, ...] = ()


def _update(shape: str, tokens: int, words: str = "") -> Section:
    about = f"update of {shape}, {tokens:,} tokens a micro-batch" + (f", {words}" if words else "")
    arguments = (shape, tokens, words)
    return Section(about, "updates", "measure", limit_s=150, arguments=arguments)


BASE = "update-0.5b-16k"
TORCH_HEAD = "the head by torch's operators"
EAGER = "--trainer.compile false"
VARIANTS = {
    "compile-off": EAGER,
    "packing-off": "--trainer.packing off",
    "checkpointing": "--trainer.activation_checkpointing true",
    "selective": "--trainer.activation_checkpointing selective",
    "torch-head": TORCH_HEAD,
    "bf16-head": "--model.fp32_head false",
    "offload": "--parallel.offload_optimizer true",
    "lora": "--lora.rank 16",
}
"""Settings added to those of `BASE`. One GPU shards only to offload; by default, it compiles and
fuses the head."""

_FIRST = {
    "machine": Section("versions, arithmetic and bandwidth", "machine", "speed", 60),
    "varlen": Section(
        "attention over packed rows compared with float32", "varlen", "correctness", 60
    ),
    "precision": Section("bfloat16 compared with float32", "precision", "correctness", 90),
    BASE: _update("0.5b", 16_384),
    "resume": Section("a checkpoint and its resume", "resume", "correctness", 90),
    "engine": Section("the embedded engine beside `generate`", "generation", "speed", 90),
    "kernels": Section("the most costly kernels", "updates", "kernels", 90),
    "head-kernels": Section("the kernels of the head by themselves", "head_kernels", "measure", 90),
    "group": Section("a process group for CPU and GPU", "machine", "process_group", 60),
    "memory-0.5b-checkpointing": _update("0.5b", 16_384, f"{EAGER} {VARIANTS['checkpointing']}"),
    "memory-0.5b-selective": _update("0.5b", 16_384, f"{EAGER} {VARIANTS['selective']}"),
}
_SECOND = {
    "demo": Section("the tiny demo in one process", "demo", "learns", 180),
    "update-1.5b-8k": _update("1.5b", 8192),
    "memory-1.5b-8k": _update("1.5b", 8192, EAGER),
    "layers-7b": _update("7b-layers", 16_384),
    **{f"update-{name}": _update("0.5b", 16_384, words) for name, words in VARIANTS.items()},
    "layers-32b": _update("32b-layers", 16_384),
    "update-0.5b-4k": _update("0.5b", 4096),
    "update-1.5b-4k": _update("1.5b", 4096),
}
_THIRD = {
    "sglang": Section("SGLang: start, weights, checksums, memory", "given", "sglang", 300),
    "grpo": Section("a GRPO run of a real model", "given", "grpo", 420),
    "lengths": Section(
        "packed lengths that change from micro-batch to micro-batch", "lengths", "changing", 200
    ),
    "moe": Section("layers of Qwen3-30B-A3B with grouped products", "moe", "measure", 150),
    "hybrids": Section(
        "packed rows of linear layers, sinks and caps", "hybrids", "correctness", 180
    ),
    "publish": Section("publishing, parking and restoring", "publishing", "measure", 120),
    "checksums": Section("checksums on the device", "checksums", "measure", 180),
    "nccl": Section("a broadcast of weights between two processes", "broadcast", "measure", 90),
}
PARTS = {1: _FIRST, 2: _SECOND, 3: _THIRD}
"""What one call runs, in at most eight minutes on an H100."""
SECTIONS = {name: section for part in PARTS.values() for name, section in part.items()}


@dataclass(frozen=True)
class Given:
    """What a person may give the check, for the sections that need it."""

    model: Path | None = None
    data: Path | None = None
    sglang: Path | None = None

    @property
    def words(self) -> list[str]:
        """The three paths as words of a command; an empty one for what is not given."""
        return [str(path or "") for path in (self.model, self.data, self.sglang)]


def command(
    name: str, device: str, small: bool, scratch: Path, given: Given = Given()
) -> list[str]:
    """Returns the command of a section, without the path of its line."""
    size = "small" if small else "full"
    return [
        sys.executable,
        "-m",
        "checks.gpu_check.sections",
        name,
        device,
        size,
        str(scratch),
        *given.words,
    ]


def _run(
    name: str, device: str, size: str, scratch: str, given: list[str], found: Findings
) -> None:
    from checks.gpu_check.setting import (
        Setting,
    )  # imports torch, so only in the computing process

    section = SECTIONS[name]
    module = importlib.import_module(f"checks.gpu_check.{section.module}")
    function: Callable[..., None] = getattr(module, section.function)
    paths = [Path(word) if word else None for word in given]
    function(found, Setting(device, size == "small", Path(scratch), *paths), *section.arguments)


if __name__ == "__main__":
    name, device, size, scratch, *given, path = sys.argv[1:]
    sys.exit(leave(Path(path), partial(_run, name, device, size, scratch, given)))
