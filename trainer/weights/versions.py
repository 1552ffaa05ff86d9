"""Weight versions on disk: complete model directories with a manifest.

A version is named after the optimiser step that made it. It is a complete Hugging Face directory
`v000012/`, or a LoRA adapter in PEFT's format; its manifest (sizes and checksums) is made last. A
file may come with its delta from the previous version (`common.weights.deltas`), for nodes that
have that version. `services.rollout.weights.store` makes the same directories on the nodes.
"""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from torch import Tensor

from common.process import progress
from common.process.storage import storing
from common.weights import recycled_files
from common.weights.checksums import checksum
from common.weights.deltas import write_delta
from common.wire.schemas import WeightDelta, WeightFile, WeightManifest
from learning.staging import on_host
from trainer.policy.scorer import is_adapter
from trainer.weights.tensor_file import write_tensors

Weights = Iterable[tuple[str, Tensor]]
"""(Hugging Face name, tensor), each name once."""


def version_name(version: int) -> str:
    """Returns the name of a version's directory."""
    return f"v{version:06d}"


def write_version(
    weights: Weights,
    static_files: list[Path],
    directory: Path,
    run_id: str,
    version: int,
    *,
    previous: WeightManifest | None = None,
    wrote: Callable[[], None] = progress.moved,
) -> WeightManifest:
    """Writes `directory/v000012/` and returns its manifest; atomic, so a directory of that name is
    complete. Calls `wrote` after every MiB of tensors.

    With `previous`, also writes deltas from that version, whose files are in `directory` too.

    Raises StorageFailed when the disk is full, and then leaves no partial version behind.
    """
    target = directory / version_name(version)
    partial = target.with_suffix(".partial")
    for leftover in (partial, target):
        shutil.rmtree(leftover, ignore_errors=True)
    remedy = "start again: the run continues from its newest checkpoint"
    try:
        with storing(f"weights {version}", target, "trainer.run_dir", remedy):
            partial.mkdir(parents=True)
            for file in static_files:
                try:
                    (partial / file.name).hardlink_to(file)
                except OSError:  # another disk, or one without hard links
                    shutil.copyfile(file, partial / file.name)
            kind: Literal["model", "adapter"] = "adapter" if is_adapter(partial) else "model"
            name = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
            tensors = on_host(weights)
            checksums = {file.name: checksum(file, wrote) for file in partial.iterdir()}
            size = sum(tensor.nbytes for tensor in tensors.values())
            with recycled_files.create(partial / name, size) as stream:
                checksums[name] = write_tensors(tensors, stream, wrote)

            files = []
            for file_name, file_checksum in sorted(checksums.items()):
                file_size = (partial / file_name).stat().st_size
                files.append(WeightFile(name=file_name, size=file_size, xxh3=file_checksum))
            if previous is not None:
                before = directory / version_name(previous.version)
                for weight_file in files:
                    weight_file.delta = _write_delta(before, partial, weight_file, previous)
            partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # it would keep the disk full
        raise
    return WeightManifest(version=version, run_id=run_id, files=files, kind=kind)


def _write_delta(
    before: Path, directory: Path, file: WeightFile, previous: WeightManifest
) -> WeightDelta | None:
    """Writes a file's delta from its namesake in `before`; returns None when no delta is needed or
    possible.
    """
    bases = [
        each.xxh3
        for each in previous.files
        if each.name == file.name and each.size == file.size and each.xxh3 != file.xxh3
    ]
    if not bases or not (before / file.name).is_file():
        return None
    target = directory / f"{file.name}.delta"
    size = write_delta(before / file.name, directory / file.name, target)
    if size is None:
        return None
    return WeightDelta(name=target.name, size=size, xxh3=checksum(target), base=bases[0])
