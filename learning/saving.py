"""Saves a model and its optimiser, after copying them to CPU memory so that training can
continue.
"""

import json
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from common.process import progress
from learning.hub_names import hub_shapes, to_hub
from learning.loading import fill
from learning.optimizer import Optimizer
from learning.ranks import Ranks
from learning.sharding import full, local, named_tensors
from learning.staging import Staging
from learning.untrained_parts import Kept

_MAX_FILE_BYTES = 4 << 30
_STATE = "state"
_CHUNK_BYTES = 1 << 22
Files = dict[str, list[int]]
"""Size and CRC-32 of files, by their names in a directory."""
# A checkpoint of one process, as intended.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


@dataclass(frozen=True)
class Contents:
    """A model directory in memory, without the optimiser."""

    tensors: Mapping[str, Tensor]
    """Tensors by the model's own names, sharded like the model."""
    files: Mapping[str, str]
    """The safetensors file of every tensor, by the tensor's name in the directory."""
    texts: Mapping[str, str]
    """Contents of the other files, by file name."""
    to_files: Callable[[Iterable[tuple[str, Tensor]]], Iterable[tuple[str, Tensor]]] = (
        lambda named: named
    )
    """Converts whole tensors to the form in the directory."""
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """Further tensors, with the names of the directory; on rank 0 only."""

    @classmethod
    def of(cls, model: Any, kept: Kept | None = None) -> "Contents":
        """Returns the contents of the model's directory, with what is `kept` of the files that it
        was loaded from.
        """
        tensors = named_tensors(model)
        keeps = kept is not None and bool(kept.names)
        files = _files(hub_shapes(model, tensors), "language_model" if keeps else "model")
        others = kept.tensors() if kept is not None else {}
        files |= _files(others, "kept")
        return cls(
            tensors=tensors,
            files=files,
            texts=_texts(model, files, kept),
            to_files=lambda named: to_hub(model, named, tensors),
            kept=others,
        )

    def write(self, directory: Path) -> None:
        """Writes the contents of a model that is not sharded, holding one file at a time."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in self.texts.items():
            (directory / name).write_text(text)
        lacking = Counter(self.files.values())
        held: dict[str, dict[str, Tensor]] = {}
        for name, tensor in chain(self.to_files(self.tensors.items()), self.kept.items()):
            file = self.files[name]
            held.setdefault(file, {})[name] = tensor.detach().clone()
            lacking[file] -= 1
            if not lacking[file]:
                save_file(held.pop(file), directory / file, metadata={"format": "pt"})


@dataclass
class Snapshot:
    """This rank's part of a model directory: `write_files` on every rank, then `write_state` on all
    of them together.
    """

    texts: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Tensors of safetensors files, by file name."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the optimiser, for torch.distributed.checkpoint."""
    together: bool = False
    """Whether every rank writes its share of `state`."""

    @classmethod
    @progress.working()
    def take(
        cls, model: Contents, optimizer: Optimizer | None, ranks: Ranks, gathered: bool
    ) -> "Snapshot":
        """Copies model and optimiser to CPU memory. A collective, which gathers sharded tensors one
        after the other.

        A model becomes safetensors files of at most 4 GB in float32; if it is sharded, every rank
        keeps and writes some of them. The optimiser's state stays sharded. If `gathered`, rank 0
        writes everything, as the others do not see its disk.
        """
        # Ranks that see the same disk write some of the files each.
        spread = ranks.sharded and ranks.world_size > 1 and not gathered
        copies = Staging(ranks.device)
        files: dict[str, dict[str, Tensor]] = {}
        file_names = sorted({model.files[name] for name in model.files if name not in model.kept})
        whole_tensors = (
            (name, full(tensor.detach().to(ranks.device))) for name, tensor in model.tensors.items()
        )
        for name, whole in model.to_files(whole_tensors):
            file = model.files[name]
            owner = file_names.index(file) % ranks.world_size if spread else 0
            if owner == ranks.rank:
                files.setdefault(file, {})[name] = copies.to_host(whole)

        for name, tensor in model.kept.items():
            files.setdefault(model.files[name], {})[name] = tensor

        state: dict[str, Tensor] = {}
        optimizer_state = optimizer.state_dict() if optimizer else {}
        for name, tensor in optimizer_state.items():
            if spread:
                state[name] = _as_sharded(copies.to_host(local(tensor)), tensor, ranks)
            else:
                whole = full(tensor.to(ranks.device))  # a collective
                if ranks.is_rank_zero:
                    state[name] = copies.to_host(whole)
        copies.wait()

        return cls(
            texts=dict(model.texts) if ranks.is_rank_zero else {},
            files=files,
            state=state,
            together=spread,
        )

    @progress.working()
    def write_files(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in self.texts.items():
            (directory / name).write_text(text)
        for name, tensors in self.files.items():
            path = directory / name
            # The library makes its files readable only for the owner; this one is to be readable
            # like all others.
            path.touch()
            mode = path.stat().st_mode
            save_file(tensors, path, metadata={"format": "pt"})
            path.chmod(mode)

    @progress.working()
    def write_state(self, directory: Path, group: Any = None) -> None:
        """Writes the optimiser's state; with `together` a collective in `group`."""
        if self.state:
            # Nothing is copied ahead on a CUDA stream, as everything is in CPU memory.
            dcp.save(
                dict(self.state),
                storage_writer=dcp.FileSystemWriter(directory / _STATE, per_thread_copy_ahead=0),
                process_group=group,
                no_dist=not self.together,
            )

    def write(self, directory: Path) -> None:
        self.write_files(directory)
        self.write_state(directory)


def checksums(directory: Path) -> Files:
    """Returns the checksums of all files in `directory`."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    names = sorted(str(path.relative_to(directory)) for path in files)
    return dict(_read_all(directory, names))


def damaged(directory: Path, files: Files) -> str | None:
    """Returns the first of `files` that has changed since it was written, or None."""
    for name, found in _read_all(directory, list(files)):
        if found != list(files[name]):
            return name
    return None


def _read_all(directory: Path, names: list[str]) -> Iterator[tuple[str, list[int]]]:
    """Reads several files at a time; CRC-32 is nearly three times as fast as SHA-256 and detects
    disk errors.
    """

    def read(name: str) -> tuple[str, list[int]]:
        size = 0
        crc = 0
        try:
            with (directory / name).open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    size += len(chunk)
                    crc = zlib.crc32(chunk, crc)
                    progress.moved()
        except OSError:  # missing, or a sector that cannot be read
            return name, [-1, 0]
        return name, [size, crc]

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        yield from threads.map(read, names)


@progress.working()
def load_optimizer(optimizer: Optimizer, directory: Path, ranks: Ranks) -> None:
    """Loads the state that a snapshot of any number of ranks left in `directory`, which at least
    rank 0 sees.

    Raises ConfigError for another kind of optimiser, and other errors for damaged files.
    """
    # Its file of metadata is the last that torch writes, and names everything else.
    metadata = directory / _STATE / ".metadata"
    seen = metadata.read_bytes() if metadata.exists() else b""
    everywhere = ranks.all_equal(seen)
    saved: dict[str, Any] = {}
    if ranks.is_rank_zero and seen:
        saved = dcp.FileSystemReader(directory / _STATE).read_metadata().state_dict_metadata
    names = ranks.broadcast(list(saved))
    tensors = optimizer.empty_state(names)
    if not tensors:  # saved before the first step
        return

    if everywhere:
        together = ranks.sharded and ranks.world_size > 1
        shares = dict(tensors)
        if together:
            for name, tensor in tensors.items():
                shares[name] = _as_sharded(local(tensor).to("cpu", copy=True), tensor, ranks)
        dcp.load(shares, checkpoint_id=directory / _STATE, no_dist=not together)
        for name, tensor in tensors.items():
            local(tensor).copy_(local(shares[name]))
    else:

        def read(name: str, region: tuple[slice, ...]) -> Tensor:
            whole = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype)}
            dcp.load(whole, checkpoint_id=directory / _STATE, no_dist=True)
            return whole[name][region]

        fill(tensors, read if ranks.is_rank_zero else None, ranks, everywhere)
    optimizer.load_state_dict(tensors)


def _as_sharded(share: Tensor, like: Tensor, ranks: Ranks) -> Tensor:
    """Returns this rank's share as a tensor in host memory, sharded like `like`."""
    if not isinstance(like, DTensor):
        return share
    return DTensor.from_local(
        share,
        ranks.mesh("cpu", of_experts="expert" in like.device_mesh.mesh_dim_names),
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _files(tensors: Mapping[str, Tensor], stem: str) -> dict[str, str]:
    """Returns the safetensors file of each tensor, all of them named after `stem`."""
    files: dict[str, str] = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.numel() * tensor.element_size(),
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=_MAX_FILE_BYTES,
    ).tensor_to_filename
    return files


def _texts(model: Any, names: Mapping[str, str], kept: Kept | None) -> dict[str, str]:
    model.config.architectures = [type(model).__name__]
    config = model.config if kept is None else kept.saved_config(model.config)
    texts = {"config.json": config.to_json_string()}
    if kept is not None:
        texts |= kept.texts
    if getattr(model, "generation_config", None) is not None:
        texts["generation_config.json"] = model.generation_config.to_json_string()
    if len(set(names.values())) > 1:
        texts["model.safetensors.index.json"] = json.dumps(
            {"metadata": {}, "weight_map": dict(names)}, indent=2
        )
    return texts
