"""Cores and memory of this machine and its control group, and a real all_reduce."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil

from common.process.topology import ROLLOUT, TINKER, TRAINER, Topology
from jobgroup.doctor.plan import ROOT, Plan
from jobgroup.doctor.report import Result, Results, ask, expect, gb

COLLECTIVE_S = 90.0
"""Time limit of the collective, mostly for importing torch on a busy machine."""
_REDUCE_FIX = {
    "gloo": "GLOO_SOCKET_IFNAME=lo (lo0 on macOS) in the environment; "
    "no firewall on loopback; or rm -r .venv && make lint",
    "nccl": "a CUDA build of torch that the driver supports; NCCL_DEBUG=INFO tells more; often "
    "/dev/shm is small (mount -o remount,size=8G /dev/shm; in a pod an emptyDir in memory), or "
    "GPUs are passed through and NCCL_P2P_DISABLE=1 helps",
}


def available_memory() -> tuple[int, str]:
    """Returns the bytes available to new processes, and what limits them."""
    bounds = [(int(psutil.virtual_memory().available), "available on the machine")]
    for limit, used in _limits("memory.max", "memory.current"):
        bounds.append((max(0, limit - used), f"left of {gb(limit)} of this control group"))
    return min(bounds)


def cores() -> float:
    """Returns the processors that processes started here can use, limited by a quota of the control
    group.
    """
    usable = len(os.sched_getaffinity(0)) if psutil.LINUX else os.cpu_count() or 1
    return min([usable, *(quota / period for quota, period in _limits("cpu.max"))])


def _limits(*files: str) -> Iterator[tuple[int, int]]:
    """Yields the two numbers in these files for every limited control group (version 2) above this
    process.
    """
    own = Path("/sys/fs/cgroup")
    table = Path("/proc/self/cgroup")
    if table.is_file():
        own /= table.read_text().rpartition("0::")[2].strip().strip("/")
    for folder in [own, *own.parents]:
        if all((folder / name).is_file() for name in files):
            limit, other = " ".join((folder / name).read_text() for name in files).split()
            if limit != "max":
                yield int(limit), int(other)


def check_cores(plan: Plan) -> Results:
    """Checks that there are enough cores and that no process takes all of them."""
    usable = cores()
    yield expect(
        "cores",
        usable >= 2,
        f"{usable:g}",
        "expect it to be slow; or --num-nodes rollout-server=1",
        otherwise="warn",
    )

    computing = 0
    unlimited = []
    for job in plan.here:
        if job.name in (TRAINER, TINKER, ROLLOUT) and not job.gpus and not job.uses_sglang:
            computing += job.num_nodes
            if not job.env.get("OMP_NUM_THREADS"):
                unlimited.append(job.name)
    if computing > 1 and unlimited:
        yield Result(
            "OMP_NUM_THREADS",
            "warn",
            f"not set for {', '.join(unlimited)}: each process starts a thread for every core",
            f"--env OMP_NUM_THREADS={max(1, int(usable // computing))}",
        )


def check_collective(plan: Plan) -> Results:
    """Runs an all_reduce: over NCCL with a process per GPU; without GPUs with two processes over
    gloo on loopback.
    """
    if not (find_spec("torch") and any(job.needs_torch for job in plan.here)):
        return
    backend = "nccl" if plan.gpus else "gloo"
    world = len(plan.gpus) or 2
    env = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **Topology().loopback_env(),
        "PYTHONPATH": str(ROOT),
    }
    seconds = ask(
        *(sys.executable, "-m", "jobgroup.doctor.collective", backend, world),
        fix=_REDUCE_FIX[backend],
        timeout_s=COLLECTIVE_S,
        env=env,
    )
    yield Result(
        "all_reduce",
        "ok",
        f"{world} processes over {backend} in {seconds.strip()} s, rendezvous included",
    )
