"""The files of a run: its adapter in PEFT's format, and beside it the state of its optimiser.

    adapter_config.json  adapter_model.safetensors   what engines and PEFT load
    optimizer.safetensors                            AdamW's moments, and gradients not applied yet
    run.json                                         the LoRA spec, and the checksums of the others

A folder has its name when all of it is on the disk.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import Conflict, InvalidInput, NotFound
from common.settings.config import Config
from common.weights.checksums import checksum
from trainer.policy.lora import adapter_config, describe_adapter, placing
from trainer.policy.scorer import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from trainer.tinker.interface import LoraSpec
from trainer.weights.tensor_file import write_tensors

_OPTIMIZER = "optimizer.safetensors"
_RUN = "run.json"
_FORMAT = 1
_T = TypeVar("_T")


@dataclass(frozen=True)
class Saved:
    """A run as it is saved."""

    spec: LoraSpec
    steps: int
    factors: dict[str, Tensor]
    """By their names in the model, in its order."""
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    """`exp_avg` [N], `exp_avg_sq` [N] and `step` after a step, `gradient` [N] if there is one."""


def check_new(folder: Path) -> None:
    """Raises Conflict for a folder that exists."""
    if folder.exists():
        raise Conflict(
            "this folder exists", field="path", value=str(folder), remedy="use another name"
        )


def write(saved: Saved, model: Any, config: Config, folder: Path) -> None:
    """Writes a run, durably."""

    def files(directory: Path) -> None:
        names = [name.removesuffix(".default.weight") for name in saved.factors]
        sums = {ADAPTER_WEIGHTS: _adapter(model, config, saved.spec, saved.factors, directory)}
        if saved.optimizer:
            with (directory / _OPTIMIZER).open("wb") as stream:
                sums[_OPTIMIZER] = write_tensors(saved.optimizer, stream)
        content = {
            "format": _FORMAT,
            "lora": asdict(saved.spec),
            "steps": saved.steps,
            "factors": dict(zip(_hub_names(model, names), saved.factors, strict=True)),
            "checksums": sums,
        }
        (directory / _RUN).write_text(json.dumps(content))

    _durably(folder, files)


def write_adapter(
    model: Any, config: Config, spec: LoraSpec, factors: dict[str, Tensor], *, folder: Path
) -> str:
    """Writes an adapter in PEFT's format, durably; returns the checksum of its weights."""
    return _durably(folder, partial(_adapter, model, config, spec, factors))


def read(folder: Path, optimizer: bool) -> Saved:
    """Returns the run in a folder, with the state of its optimiser if that is asked for.

    Raises NotFound for a folder without one, and InvalidInput for one that has no such state, or a
    file that has changed.
    """
    path = folder / _RUN
    if not path.is_file():
        raise NotFound(
            "there is no saved run", field="path", value=str(folder), remedy="save one there first"
        )
    content = json.loads(path.read_text())
    sums: dict[str, str] = content["checksums"]
    if optimizer and _OPTIMIZER not in sums and content["steps"]:
        raise InvalidInput(
            "the run was saved without the state of its optimiser",
            field="path",
            value=str(folder),
            remedy="load the weights alone, or save the run with save_state",
        )
    wanted = [name for name in sums if name != _OPTIMIZER or optimizer]
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in wanted:
        try:
            whole = checksum(folder / name) == sums[name]
            tensors[name] = load_file(folder / name)
        except (OSError, SafetensorError):
            whole = False
        if not whole:
            raise InvalidInput(
                f"{name} is missing or has changed since it was written",
                field="path",
                value=str(folder),
                remedy="load another checkpoint",
            )
    stored = tensors[ADAPTER_WEIGHTS]
    factors = {own: stored[name] for name, own in content["factors"].items()}
    spec = LoraSpec(**content["lora"])
    return Saved(spec, content["steps"], factors, tensors.get(_OPTIMIZER, {}))


def _adapter(
    model: Any, config: Config, spec: LoraSpec, factors: dict[str, Tensor], directory: Path
) -> str:
    """Writes PEFT's two files; returns the checksum of the weights."""
    names = [name.removesuffix(".default.weight") for name in factors]
    layers: dict[str, list[str]] = {}
    for name in names[::2]:
        layer = name.removesuffix(".lora_A")
        layers.setdefault(layer.rpartition(".")[2], []).append(layer)
    described = describe_adapter(
        config.model.name,
        model,
        {last: layers[last] for last in sorted(layers)},
        rank=spec.rank,
        alpha=config.lora.alpha,
    )
    (directory / ADAPTER_CONFIG).write_text(adapter_config(model, described))
    stored = dict(zip(_hub_names(model, names), factors.values(), strict=True))
    with (directory / ADAPTER_WEIGHTS).open("wb") as stream:
        return write_tensors(stored, stream)


def _hub_names(model: Any, names: list[str]) -> list[str]:
    """Returns the names of factors in PEFT's files."""
    placed = placing(model)
    return [f"{ADAPTER_PREFIX}{placed(name)}.weight" for name in names]


def _durably(folder: Path, files: Callable[[Path], _T]) -> _T:
    """Writes files to a folder, which gets its name when they are on the disk."""
    partial_folder = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial_folder, ignore_errors=True)
    partial_folder.mkdir(parents=True)
    result = files(partial_folder)
    for path in (*partial_folder.iterdir(), partial_folder):
        _sync(path)
    partial_folder.rename(folder)
    _sync(folder.parent)
    return result


def _sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
