"""Loopback addresses for the nodes of a local run, unused by other runs on this machine, and their
GPUs.
"""

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import psutil

from common.errors import ConfigError
from common.process.topology import LocalHost, format_hosts
from jobgroup.doctor.gpus import visible
from jobgroup.spec import JobGroup, Task

_LOCK_PORT = 29499
_SHIFTED_NODES = 30


@dataclass(frozen=True)
class Placement:
    """Addresses of every node of a group, reserved until `lock` is closed (by the system if the
    process dies).
    """

    group: str
    hosts: dict[str, LocalHost]
    lock: socket.socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.close()

    def of(self, task: Task) -> list[LocalHost]:
        return [self.hosts[f"{task.name}-{rank}.{self.group}"] for rank in range(task.num_nodes)]

    def text(self) -> str:
        return format_hosts(self.hosts)


def choose_addresses(group: JobGroup) -> Placement:
    """Chooses an address for every node.

    On Linux all of 127.0.0.0/8 is this machine, so a run takes a block 127.B and its nodes use the
    YAML's ports. Elsewhere (macOS) all are on 127.0.0.1 and their ports are shifted. A bound socket
    reserves the block across the machine, without a file. Raises ConfigError when no block is free.
    """
    own_address = psutil.LINUX
    blocks = range(1, 255) if own_address else range(100)
    # At random, so that runs that start at the same moment rarely try the same block.
    for block in random.sample(blocks, len(blocks)):
        place = ("127.0.0.1", _LOCK_PORT - block)
        if own_address:
            place = (f"127.{block}.255.254", _LOCK_PORT)
        with contextlib.suppress(OSError):
            lock = socket.create_server(place)
            return Placement(group.name, _hosts(group, block, own_address), lock)
    raise ConfigError(
        "no block of loopback addresses is free",
        field="YAML",
        value=group.name,
        remedy="end other runs of jobgroup.local",
    )


def _hosts(group: JobGroup, block: int, own_address: bool) -> dict[str, LocalHost]:
    hosts: dict[str, LocalHost] = {}
    for number, task in enumerate(group.tasks, start=1):
        for rank in range(task.num_nodes):
            # Shifts of ten keep neighbouring ports (8000, 8002, 8003) apart.
            shifted = LocalHost("127.0.0.1", (block * _SHIFTED_NODES + len(hosts)) * 10)
            place = LocalHost(f"127.{block}.{number}.{rank + 1}") if own_address else shifted
            hosts[f"{task.name}-{rank}.{group.name}"] = place
    return hosts


def gpus_of_machine() -> list[str]:
    """Returns the GPUs that processes started here may use: `CUDA_VISIBLE_DEVICES` if set, else
    what `nvidia-smi` lists.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [device for device in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if device]
    found, _ = visible(os.environ)
    return [gpu.number for gpu in found]


def share_gpus(tasks: Sequence[Task], gpus: Sequence[str]) -> dict[str, list[list[str]]]:
    """Returns the GPUs of every node, by task and rank, assigned in turn: shared only when there
    are too few.
    """
    shares: dict[str, list[list[str]]] = {}
    in_turn = itertools.cycle(gpus)
    for task in tasks:
        count = min(task.gpus, len(gpus))
        shares[task.name] = [list(itertools.islice(in_turn, count)) for _ in range(task.num_nodes)]
    return shares
