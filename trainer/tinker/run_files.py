"""The files of a run: its adapter in PEFT's format, and beside it the state of its optimiser.

    adapter_config.json  adapter_model.safetensors   what engines and PEFT load
    optimizer.safetensors                            AdamW's moments, and gradients not applied yet
    run.json                                         spec and alpha, and the checksums of the others

A folder has its name when all of it is on the disk.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from common.errors import InvalidInput
from common.process.storage import storing
from common.weights.checksums import checksum
from trainer.policy.scorer import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.tinker.interface import LoraSpec
from trainer.weights.tensor_file import write_tensors

_OPTIMIZER = "optimizer.safetensors"
RUN = "run.json"
_FORMAT = 1


@dataclass(frozen=True)
class Saved:
    """A run as it is saved."""

    spec: LoraSpec
    alpha: float
    """The scale times the rank."""
    factors: dict[str, Tensor]
    """By PEFT's names."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """`exp_avg` [N], `exp_avg_sq` [N] and `step` after a step, `gradient` [N] if there is one."""


def write(saved: Saved, config: str, folder: Path) -> None:
    """Writes a run, durably; `config` is the text of PEFT's `adapter_config.json`."""
    with _durably(folder) as directory:
        sums = {ADAPTER_WEIGHTS: _adapter(saved.factors, config, directory)}
        if saved.optimizer:
            sums[_OPTIMIZER] = _tensors(saved.optimizer, directory / _OPTIMIZER)
        content = {"lora": asdict(saved.spec), "alpha": saved.alpha, "checksums": sums}
        (directory / RUN).write_text(json.dumps({"format": _FORMAT, **content}))


def write_adapter(factors: dict[str, Tensor], config: str, folder: Path) -> str:
    """Writes an adapter in PEFT's format, durably; returns the checksum of its weights."""
    with _durably(folder) as directory:
        return _adapter(factors, config, directory)


def read(folder: Path, optimizer: bool) -> Saved:
    """Returns the run in a folder, with the state of its optimiser if that is asked for.

    Raises OSError for a folder without one, and InvalidInput for a file that has changed.
    """
    content = json.loads((folder / RUN).read_text())
    sums: dict[str, str] = content["checksums"]
    tensors: dict[str, dict[str, Tensor]] = {_OPTIMIZER: {}}
    for name, expected in sums.items():
        if name == _OPTIMIZER and not optimizer:
            continue
        # A folder is whole when it has its name, but disks and people change files.
        if not (folder / name).is_file() or checksum(folder / name) != expected:
            raise InvalidInput(
                f"{name} is missing or has changed since it was written",
                field="path",
                value=str(folder),
                remedy="load another checkpoint",
            )
        tensors[name] = load_file(folder / name)
    return Saved(
        spec=LoraSpec(**content["lora"]),
        alpha=content["alpha"],
        factors=tensors[ADAPTER_WEIGHTS],
        optimizer=tensors[_OPTIMIZER],
    )


def _adapter(factors: dict[str, Tensor], config: str, directory: Path) -> str:
    """Writes PEFT's two files; returns the checksum of the weights."""
    (directory / ADAPTER_CONFIG).write_text(config)
    return _tensors(factors, directory / ADAPTER_WEIGHTS)


def _tensors(tensors: dict[str, Tensor], path: Path) -> str:
    """Writes a safetensors file; returns its checksum."""
    with path.open("wb") as stream:
        return write_tensors(tensors, stream)


@contextmanager
def _durably(folder: Path) -> Iterator[Path]:
    """Yields a directory for the files of a folder, which gets its name when they are on the
    disk. Raises StorageFailed, and leaves nothing behind.
    """
    directory = folder.with_name(f"{folder.name}.partial")
    try:
        with storing("the files of a run", folder, "trainer.run_dir"):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            yield directory
            for path in (*directory.iterdir(), directory):
                _sync(path)
            directory.rename(folder)
            _sync(folder.parent)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
