"""The processes that train together: every rank computes, rank 0 also calls the services."""

import io
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from common.errors import ConfigError
from common.settings.config import Config
from learning.allocator import configure_allocators, keep_freed_memory
from learning.context import ContextGroup
from learning.device import DeviceKind, choose_device

_T = TypeVar("_T")
_P = TypeVar("_P")
# Torch has no other word for it.
_NO_LIMIT = timedelta(days=365)


@dataclass
class Ranks:
    """This process among all trainer processes. A single process needs no process group.

    `device` follows `choose_device`. `shard_size` ranks share one copy of every model; None: all
    ranks. `context_size` consecutive ranks compute each row together. Raises ConfigError when one
    of them does not divide the number of ranks. `expert_size` consecutive ranks own the experts of
    a layer together; raises ConfigError when they do not divide the ranks of a copy. `offload`
    keeps trained models in CPU memory, for which even a single process with a GPU shards.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    join_s: float = 1800.0
    """Seconds for all ranks to join. Collectives have no limit of their own: how long one waits for
    a rank that works depends on sizes. `learning.liveness` ends ranks that make no progress."""
    device_kind: DeviceKind = "auto"
    shard_size: int | None = None
    offload: bool = False
    context_size: int = 1
    expert_size: int = 1
    device: torch.device = field(init=False)
    _meshes: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups = (
            ("parallel.shard_size", self._copy_size, self.world_size, "ranks"),
            ("parallel.context_size", self.context_size, self.world_size, "ranks"),
            (
                "parallel.expert_size",
                self.expert_size,
                self._copy_size,
                "ranks of a copy of the model",
            ),
        )
        for setting, size, count, members in groups:
            if count % size:
                raise ConfigError(
                    f"the {count} {members} cannot be divided into groups of {size}",
                    field=setting,
                    value=size,
                    remedy=f"use a divisor of {count}",
                )
        self.device = choose_device(self.device_kind, "trainer.device", rank=self.local_rank)
        if self.on_gpu:
            configure_allocators(os.environ)
        else:
            keep_freed_memory(os.environ)

    @classmethod
    def from_env(cls, join_s: float, config: Config | None = None) -> "Ranks":
        """Reads torchrun's variables; without torchrun this is a single process."""
        return cls._of(
            config or Config(),
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            join_s=join_s,
        )

    @classmethod
    def alone(cls, config: Config) -> "Ranks":
        """Returns the only process of a run."""
        return cls._of(config)

    @classmethod
    def _of(cls, config: Config, **place: Any) -> "Ranks":
        return cls(
            device_kind=config.trainer.device,
            shard_size=config.parallel.shard_size,
            offload=config.parallel.offload_optimizer,
            context_size=config.parallel.context_size,
            expert_size=config.parallel.expert_size,
            **place,
        )

    def __enter__(self) -> "Ranks":
        if self.on_gpu:
            torch.cuda.set_device(self.local_rank)
        if self.world_size > 1:
            dist.init_process_group(self._backend, timeout=timedelta(seconds=self.join_s))
            _without_limit(dist.group.WORLD)
        return self

    def __exit__(self, *_: object) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def on_gpu(self) -> bool:
        """Whether this rank computes on a GPU."""
        return str(self.device.type) == "cuda"

    @property
    def gpu_bytes(self) -> int | None:
        """The memory of this rank's GPU in bytes; None on a CPU."""
        if not self.on_gpu:
            return None
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def sharded(self) -> bool:
        """Whether models are sharded over the ranks, so that every forward and backward pass is a
        collective.

        A single process does not shard, which saves copies of all weights and gradients, except on
        a GPU to offload.
        """
        return self.shard_size != 1 and (self.world_size > 1 or (self.offload and self.on_gpu))

    def mesh(self, device_type: str | None = None, *, of_experts: bool = False) -> Any:
        """Returns the device mesh that models are sharded over: [ranks], or [copies, ranks of a
        copy] (HSDP). That of experts has two dimensions for the ranks of a copy, [ranks that share
        an expert, `expert_size`].
        """
        kind = device_type or self.device.type
        if not dist.is_initialized():  # one process, which torchrun did not start
            dist.init_process_group(self._backend, store=dist.HashStore(), rank=0, world_size=1)
        shape = [self._copy_size]
        names = ["shard"]
        if of_experts:
            shape = [self._copy_size // self.expert_size, self.expert_size]
            names = ["shard", "expert"]
        copies = self.world_size // self._copy_size
        if copies > 1:
            shape = [copies, *shape]
            names = ["replicate", *names]

        key = " ".join((kind, *names))
        if key not in self._meshes:
            mesh = init_device_mesh(kind, tuple(shape), mesh_dim_names=tuple(names))
            groups = mesh.get_all_groups()
            if of_experts:  # so that a norm is one sum over the ranks of a copy
                groups.append(mesh["shard", "expert"]._flatten("copy").get_group())
            for group in groups:
                _without_limit(group)
            self._meshes[key] = mesh
        return self._meshes[key]

    @property
    def _copy_size(self) -> int:
        """The ranks that share a copy of every model."""
        return self.shard_size or self.world_size

    @property
    def shares(self) -> int:
        """Into how many shares a batch is split: one for each group of `context_size` ranks."""
        return self.world_size // self.context_size

    @property
    def share(self) -> int:
        """The number of this rank's share of a batch."""
        return self.rank // self.context_size

    def context(self) -> ContextGroup | None:
        """Returns the ranks that compute rows together with this one; None when it computes them
        alone. A collective on the first call.
        """
        if self.context_size == 1:
            return None
        if "context" not in self._meshes:
            shape = (self.shares, self.context_size)
            mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("share", "context"))
            _without_limit(mesh.get_group("context"))
            self._meshes["context"] = mesh
        return ContextGroup(self._meshes["context"].get_group("context"))

    def group(self) -> Any:
        """Returns a new group of all ranks, for a thread that communicates in parallel; None for a
        single process.
        """
        if self.world_size == 1:
            return None
        return dist.new_group(backend="gloo", timeout=_NO_LIMIT)

    @property
    def _backend(self) -> str:
        return "cpu:gloo,cuda:nccl" if self.on_gpu else "gloo"

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the rank that calls the services."""
        return self.rank == 0

    def broadcast(self, value: _T) -> _T:
        """Returns rank 0's value on every rank; the argument of other ranks is ignored. A
        collective.
        """
        if self.world_size == 1:
            return value
        body = _pickled(value) if self.is_rank_zero else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(body)])
        dist.broadcast(size, src=0)
        body = body.resize_(int(size))
        dist.broadcast(body, src=0)
        return value if self.is_rank_zero else cast(_T, _unpickled(body))

    def scatter(self, value: _T, part: Callable[[int], _P]) -> tuple[_T, _P]:
        """Returns rank 0's value, and its `part(share)` for this rank's share of a batch; the
        arguments of other ranks are ignored. One part after the other is in transit. A collective.
        """
        if self.is_rank_zero:
            common = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            for rank in range(1, self.world_size):
                # One message for both: a small one costs the wait for a rank that wakes up.
                _send((common, part(rank // self.context_size)), rank)
            return value, part(0)
        common, own = _receive(0)
        return pickle.loads(common), own  # noqa: S301  # of another rank of this run

    def collect(self, part: _T) -> Iterator[_T]:
        """Yields the parts of all shares on rank 0, and nothing on the others, which send theirs. A
        collective: iterate over it.
        """
        if self.is_rank_zero:
            yield part
            for rank in range(self.context_size, self.world_size, self.context_size):
                yield _receive(rank)
        elif self.rank % self.context_size == 0:
            _send(part, 0)

    def gather(self, text: str) -> list[str]:
        """Returns the text of every rank, on every rank. A collective."""
        if self.world_size == 1:
            return [text]
        texts = [""] * self.world_size
        dist.all_gather_object(texts, text)
        return texts

    def all_equal(self, body: bytes) -> bool:
        """Whether `body` is the same on every rank, and not empty. A collective."""
        first = self.broadcast(body)
        same = torch.tensor(int(bool(body) and body == first))
        if self.world_size > 1:
            dist.all_reduce(same, dist.ReduceOp.MIN)
        return bool(same)

    def sum(self, values: Tensor) -> Tensor:
        """Sums `values` over all ranks in place, and returns them."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def sum_shares(self, values: Tensor) -> Tensor:
        """Sums `values` over the shares of a batch in place, and returns them. Ranks that hold the
        same share have the same values; one of them counts.
        """
        # The ranks of a context group have the same rows and numbers: only the first may count.
        if self.rank % self.context_size:
            values.zero_()
        return self.sum(values)

    def sum_gradients(self, model: nn.Module) -> None:
        """Replaces every gradient by its sum over all ranks, in one message; a rank without rows
        contributes zeros.

        Does nothing for sharded models, whose backward pass already summed them.
        """
        if self.world_size == 1 or self.sharded:
            return
        # One message instead of one for each parameter: most of the time of a small one is latency.
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        sums = flat.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total.view_as(gradient))

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def _send(value: object, rank: int) -> None:
    """Sends an object to a rank, which calls `_receive`. Takes a third of the processor time of
    `dist.send_object_list`, which copies what it pickled three times.
    """
    body = _pickled(value)
    dist.send(torch.tensor([len(body)]), rank)
    dist.send(body, rank)


def _receive(rank: int) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank)
    body = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(body, rank)
    return _unpickled(body)


def _pickled(value: object) -> Tensor:
    file = io.BytesIO()
    pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)
    return torch.from_numpy(np.frombuffer(file.getbuffer(), np.uint8))


def _unpickled(body: Tensor) -> Any:
    return pickle.loads(body.numpy())  # noqa: S301  # of another rank of this run


def _without_limit(group: Any) -> None:
    """Lets the collectives of a group wait for a slow rank; by default torch ends the process after
    10 or 30 minutes.
    """
    if dist.get_backend(group) != "fake":  # which waits for nobody
        _set_pg_timeout(_NO_LIMIT, group)


def end() -> NoReturn:
    """Ends a successful rank at once.

    Otherwise torch's threads sometimes abort the process while the interpreter shuts down
    ("terminate called without an active exception"; 1 of 24 runs on an overloaded CPU), and the
    rank counts as failed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
