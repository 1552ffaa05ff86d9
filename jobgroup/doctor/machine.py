"""Cores, memory, limits and sandbox of this machine and its control group (version 2 or 1)."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from common.topology import CRITIC, REWARD, ROLLOUT, TRAINER
from jobgroup.doctor.plan import Plan, PlannedTask
from jobgroup.doctor.report import Result, expect, gb, ok, warn

_FILES = 1024
"""Descriptors beside those of requests in flight: logs, sockets, shards."""
_SHARED = Path("/dev/shm")  # noqa: S108 - a file system, no file


def available_memory(in_use: bool = False) -> tuple[int, str]:
    """Returns the bytes that new processes can have, or with `in_use` can have in all, and what bounds them."""
    machine = psutil.virtual_memory()
    bounds = [(machine.total, "of the machine") if in_use else (machine.available, "available on the machine")]
    for limit, used in _limits("memory", "memory.max memory.current", "memory.limit_in_bytes memory.usage_in_bytes"):
        left = max(0, limit - used)
        bounds.append((limit, "of this control group") if in_use else (left, f"left of {gb(limit)} of this control group"))
    return min(bounds)


def cores() -> float:
    """Returns the processors that processes started here can use, limited by a quota of the control group."""
    usable = len(os.sched_getaffinity(0)) if psutil.LINUX else os.cpu_count() or 1
    return min([usable, *(quota / period for quota, period in _limits("cpu", "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us"))])


def _limits(controller: str, *files: str) -> Iterator[tuple[int, int]]:
    """Yields the two numbers in these files (of version 2, of version 1) of every control group above this process."""
    table = Path("/proc/self/cgroup")
    for line in table.read_text().splitlines() if table.is_file() else []:
        _, controllers, place = line.split(":", 2)
        top, names = Path("/sys/fs/cgroup", controllers and controller), files[bool(controllers)].split()
        for folder in [top / place.strip("/"), *(top / place.strip("/")).parents]:
            inside = controller in (controllers or controller).split(",") and folder.is_relative_to(top)
            if inside and all((folder / name).is_file() for name in names):
                limit, other = " ".join((folder / name).read_text() for name in names).split()
                if limit.isdecimal() and int(limit) < 1 << 60:  # "max", -1 or a huge number: no limit
                    yield int(limit), int(other)


def _computing(job: PlannedTask) -> int:
    """Returns the number of processes of a task, on all its nodes, that keep a core busy each."""
    if job.name == REWARD:
        return job.config.reward.workers
    return job.nodes * max(1, job.gpus if job.name == TRAINER else 1) if job.name in (TRAINER, ROLLOUT, CRITIC) else 0


def check_cores(plan: Plan) -> Iterator[Result]:
    """Checks for enough cores, and that not every process takes all of them."""
    usable, busy = cores(), sum(_computing(job) for job in plan.here)
    found = f"{usable:g} for {busy} processes that compute"
    yield expect("cores", usable >= 2, found, "expect it to be slow; or --num-nodes rollout-server=1", "warn")
    for job in plan.here:
        chosen = job.env.get("OMP_NUM_THREADS") or job.gpus or job.uses_sglang or busy < 2
        if not chosen and (job.name == ROLLOUT or (job.name == TRAINER and job.config.trainer.num_threads is None)):
            found = f"not set for {job.name}: each process takes a thread for every one of the {usable:g} cores"
            yield warn("OMP_NUM_THREADS", found, f"--env OMP_NUM_THREADS={max(1, int(usable // busy))}")


def check_memory(plan: Plan) -> Iterator[Result]:
    """Enough memory for the built-in task."""
    size, bound = available_memory()
    yield expect("memory", size >= 3e9, f"{gb(size)} {bound}", "end other programs, or ask for more", "warn")


def check_files(plan: Plan) -> Iterator[Result]:
    """Checks the limit: a trainer has a connection for every group in flight, an engine and a router for every request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings = [job.config.trainer for job in plan.here]
    wanted = _FILES + 4 * max((each.batch_size * (each.max_staleness + 1) for each in settings), default=0)
    fix = f"ulimit -n {wanted if hard < 0 else min(wanted, hard)}, or LimitNOFILE of the service"
    yield expect("open files", soft >= wanted, f"{soft} open files, {wanted} are wanted", fix, "warn")


def check_shared_memory(plan: Plan) -> Iterator[Result]:
    """Checks /dev/shm, through which NCCL passes tensors between GPUs that are not linked directly."""
    if _SHARED.is_dir():
        total = shutil.disk_usage(_SHARED).total
        small = total < 1 << 30 and any(max(job.gpus, job.config.rollout.tensor_parallel_size) > 1 for job in plan.here)
        fix = f"NCCL wants 1 GB between the GPUs of a node: mount -o remount,size=8G {_SHARED}; in a pod an emptyDir (Memory)"
        yield expect(str(_SHARED), not small, gb(total), fix, "warn")


def check_sandbox(plan: Plan) -> Iterator[Result]:
    """Runs the probes of the reward-server's sandbox."""
    if (job := plan.job(REWARD)) and "code" in job.config.reward.function_names():
        from services.reward.sandbox.run import Limits, Sandbox

        reward = job.config.reward
        if reward.code_sandbox == "none":
            yield warn("sandbox", "reward.code_sandbox is none: programs run as this user", "only for code that you trust")
        else:
            limits = Limits(reward.code_timeout_s, reward.code_memory_mb)
            Sandbox(limits, 1, python=reward.code_python)
            yield ok("sandbox", "bubblewrap holds programs that try to break out")
