"""The processes that learn together: every rank computes, rank 0 also talks to the services."""

import logging
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import ConfigError

DeviceKind = Literal["auto", "cpu", "cuda"]


@dataclass
class Ranks:
    """This process among all trainer processes. One process needs no process group.

    `device_kind` cpu leaves a GPU alone; cuda raises ConfigError where there is none.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    timeout_s: float = 7200.0
    device_kind: DeviceKind = "auto"

    def __post_init__(self) -> None:
        if self.device_kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "torch finds no GPU",
                field="trainer.device",
                value=self.device_kind,
                remedy="look at nvidia-smi and for a CUDA build of torch, or set it to cpu",
            )

    @classmethod
    def from_env(cls, timeout_s: float, device_kind: DeviceKind = "auto") -> "Ranks":
        """From what torchrun sets; a single process without torchrun."""
        rank, world_size, local_rank = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        return cls(rank, world_size, local_rank, timeout_s, device_kind)

    def __enter__(self) -> "Ranks":
        if self._on_gpu:
            torch.cuda.set_device(self.local_rank)
        if self.world_size > 1:
            backend = "cpu:gloo,cuda:nccl" if self._on_gpu else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=self.timeout_s))
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.local_rank) if self._on_gpu else torch.device("cpu")

    @property
    def _on_gpu(self) -> bool:
        return self.device_kind != "cpu" and torch.cuda.is_available()

    @property
    def sharded(self) -> bool:
        """Whether models are spread over the ranks, so that every forward and backward pass is one of all of them."""
        return False

    @property
    def first(self) -> bool:
        """Is this the rank that talks to the services?"""
        return self.rank == 0

    def broadcast(self, body: bytes) -> bytes:
        """Bytes of rank 0 on every rank (the other ranks' argument does not count)."""
        if self.world_size == 1:
            return body
        size = torch.tensor([len(body)])
        dist.broadcast(size, 0)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        if self.first and body:
            buffer.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        dist.broadcast(buffer, 0)
        shared: bytes = buffer.numpy().tobytes()
        return shared

    def broadcast_model(self, model: nn.Module) -> None:
        """Gives every rank the weights of rank 0."""
        if self.world_size > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def sum_gradients(self, model: nn.Module) -> None:
        """Replaces every gradient by its sum over all ranks, in one message; a rank without rows contributes zeros."""
        if self.world_size == 1:
            return
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def end() -> NoReturn:
    """Ends a rank that has succeeded, at once.

    Without this torch's threads now and then abort the process while the interpreter shuts down ("terminate called without
    an active exception"; 1 of 24 runs on an overloaded CPU), and the rank would count as failed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
