"""Process groups that send weights from the trainer (`trainer.weights.transfer`) to engines
(`services.engine.distributed`), compatible with SGLang's side.

The trainer is rank 0 and the source of every broadcast; an engine has one rank per GPU. A group is
independent of any other torch.distributed group of its processes and needs no default group.
"""

import hashlib
from collections.abc import Iterator
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
)

from common.wire.schemas import Bucket


def join(
    address: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    name: str,
    backend: str,
    timeout_s: float,
) -> dist.ProcessGroup:
    """Joins the group; returns when every rank has joined.

    Raises RuntimeError after `timeout_s` seconds, or at once when the trainer abandons the group.
    The timeout also applies to every later operation of a gloo group.
    """
    limit = timedelta(seconds=timeout_s)
    store = dist.TCPStore(
        address, port, world_size, is_master=False, timeout=limit, wait_for_workers=False
    )
    # NCCL connects at the first collective, unless it has a device to connect now. SGLang's side
    # does so at the first weights.
    device = group_device(backend) if backend == "nccl" else None
    # `new_group` would take all ranks from a default group, which trainer and engines do not share.
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=name,
        timeout=limit,
        device_id=device,
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def nccl_version() -> str:
    """Returns the version of the NCCL that this process has loaded, such as 2.29.7."""
    return ".".join(map(str, torch.cuda.nccl.version()))


def group_device(backend: str) -> torch.device:
    """Returns the device on which tensors must be to be sent through the group."""
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def size_of(bucket: Bucket) -> int:
    """Returns the size of a bucket in bytes."""
    size = 0
    for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True):
        size += prod(shape) * dtype_of(dtype).itemsize
    return size


def dtype_of(name: str) -> torch.dtype:
    """Converts `float32` to `torch.float32`. Raises ValueError for anything else."""
    found: Any = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return found


def views(flat: Tensor, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Yields views of the tensors in the bytes of a bucket, uint8 [size]."""
    start = 0
    for name, dtype_name, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = dtype_of(dtype_name)
        end = start + prod(shape) * dtype.itemsize
        yield name, flat[start:end].view(dtype).view(shape)
        start = end


def digest(*tensors: Tensor) -> str:
    """Returns the checksum that SGLang's `/weights_checker` reports for a CPU tensor: 16 hex digits
    of its SHA-256.

    Several tensors are treated as concatenated, like tensors that an engine fuses along dimension
    0.
    """
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]
