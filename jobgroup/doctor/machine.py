"""Cores, memory and limits of this machine and its control group, its GPUs, a real all_reduce, and
the code sandbox.
"""

import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import psutil

from common.errors import ConfigError
from common.process.topology import CRITIC, ENVIRONMENT, REWARD, ROLLOUT, TRAINER, Topology
from jobgroup.doctor.plan import ROOT, Gpu, Plan, PlannedTask
from jobgroup.doctor.report import Result, ask, expect, gb

COLLECTIVE_S = 90.0
"""Time limit of the collective, mostly for importing torch on a busy machine."""
_FILES = 1024
"""Descriptors in addition to those of requests in flight: logs, sockets, shards."""
_SHARED = Path("/dev/shm")  # noqa: S108
_REDUCE_FIX = {
    "gloo": "GLOO_SOCKET_IFNAME=lo (lo0 on macOS) in the environment; no firewall on loopback; or rm -r .venv && make lint",
    "nccl": "a CUDA build of torch that the driver supports; NCCL_DEBUG=INFO tells more; often /dev/shm is small, or GPUs are "
    "passed through and NCCL_P2P_DISABLE=1 helps",
}


def available_memory(in_use: bool = False) -> tuple[int, str]:
    """Returns the bytes available to new processes (with `in_use`, in total) and what limits
    them.
    """
    machine = psutil.virtual_memory()
    bounds = [
        (machine.total, "of the machine")
        if in_use
        else (machine.available, "available on the machine")
    ]
    for limit, used in _limits("memory.max", "memory.current"):
        left = max(0, limit - used)
        bounds.append(
            (limit, "of this control group")
            if in_use
            else (left, f"left of {gb(limit)} of this control group")
        )
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
    table, top = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
    place = table.read_text().rpartition("0::")[2].strip().strip("/") if table.is_file() else ""
    for folder in [top / place, *(top / place).parents]:
        if all((folder / name).is_file() for name in files):
            limit, other = " ".join((folder / name).read_text() for name in files).split()
            if limit != "max":
                yield int(limit), int(other)


def check_cores(plan: Plan) -> Iterator[Result]:
    """Checks that there are enough cores and that no process takes all of them."""

    def computing(job: PlannedTask) -> int:
        """Returns the number of processes on all its nodes that each keep a core busy."""
        if job.name == REWARD:
            return job.config.reward.workers
        return (
            job.num_nodes * max(1, job.gpus * (job.name == TRAINER))
            if job.name in (TRAINER, ROLLOUT, CRITIC)
            else 0
        )

    usable, busy = cores(), sum(map(computing, plan.here))
    found = f"{usable:g} for {busy} processes that compute"
    yield expect(
        "cores", usable >= 2, found, "expect it to be slow; or --num-nodes rollout-server=1", "warn"
    )
    for job in plan.here:
        chosen = job.env.get("OMP_NUM_THREADS") or job.gpus or job.uses_sglang or busy < 2
        if not chosen and (
            job.name == ROLLOUT or (job.name == TRAINER and job.config.trainer.num_threads is None)
        ):
            found = f"not set for {job.name}: each process starts a thread for every one of the {usable:g} cores"
            yield Result(
                "OMP_NUM_THREADS",
                "warn",
                found,
                f"--env OMP_NUM_THREADS={max(1, int(usable // busy))}",
            )


def check_memory(plan: Plan) -> Iterator[Result]:
    """Enough memory for the built-in task."""
    size, bound = available_memory()
    yield expect(
        "memory", size >= 3e9, f"{gb(size)} {bound}", "end other programs, or ask for more", "warn"
    )


def check_files(plan: Plan) -> Iterator[Result]:
    """Checks the limit: a trainer has a connection per group in flight, an engine and a router one
    per request.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings = [job.config.trainer for job in plan.here]
    wanted = _FILES + 4 * max(
        (each.batch_size * (each.max_staleness + 1) for each in settings), default=0
    )
    fix = f"ulimit -n {wanted if hard < 0 else min(wanted, hard)}, or LimitNOFILE of the service"
    yield expect(
        "open files", soft >= wanted, f"{soft} open files, {wanted} are wanted", fix, "warn"
    )


def check_shared_memory(plan: Plan) -> Iterator[Result]:
    """Checks /dev/shm, through which NCCL passes tensors between GPUs that are not linked
    directly.
    """
    if _SHARED.is_dir():
        total = shutil.disk_usage(_SHARED).total
        small = total < 1 << 30 and any(
            max(job.gpus, job.config.rollout.tensor_parallel_size) > 1 for job in plan.here
        )
        fix = f"NCCL wants 1 GB between the GPUs of a node: mount -o remount,size=8G {_SHARED}; in a pod an emptyDir (Memory)"
        yield expect(str(_SHARED), not small, gb(total), fix, "warn")


def check_sandbox(plan: Plan) -> Iterator[Result]:
    """Runs the probes of the sandbox as the reward-server does for code, and the environment-server
    for the tool `python`.
    """
    wanted = list[tuple[float, int, str]]()
    if (job := plan.job(REWARD)) and "code" in job.config.reward.function_names():
        reward = job.config.reward
        if reward.code_sandbox == "none":
            risk = "reward.code_sandbox is none: programs run as this user"
            yield Result("sandbox", "warn", risk, "only for code that you trust")
        else:
            wanted.append((reward.code_timeout_s, reward.code_memory_mb, reward.code_python))
    if (job := plan.job(ENVIRONMENT)) and job.config.environment.name == "python":
        from services.environment.python_tool import MEMORY_MB, TIMEOUT_S

        wanted.append((TIMEOUT_S, MEMORY_MB, ""))
    if wanted:
        from services.sandbox.sandbox import Limits, Sandbox

        for timeout_s, memory_mb, python in wanted:
            Sandbox(Limits(timeout_s, memory_mb), 1, python=python)
        yield Result("sandbox", "ok", "bubblewrap contains programs that try to break out")


def visible(env: Mapping[str, str]) -> tuple[list[Gpu], str]:
    """Returns the GPUs that processes started here may use, and the reason if there are none."""
    if shutil.which("nvidia-smi") is None:
        return [], "there is no nvidia-smi"
    try:
        rows = _smi("--query-gpu=index,name,uuid,memory.total,memory.used,driver_version")
    except ConfigError as error:
        return [], error.message
    found = [
        Gpu(number, name, uuid, _bytes(total), _bytes(used), driver)
        for number, name, uuid, total, used, driver in rows
    ]
    if (chosen := env.get("CUDA_VISIBLE_DEVICES")) is None:
        return found, "nvidia-smi lists none"
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    mine = [
        gpu for name in names for gpu in found if name == gpu.number or gpu.uuid.startswith(name)
    ]
    return mine, f"CUDA_VISIBLE_DEVICES is {chosen!r}"


def _bytes(mebibytes: str) -> int:
    return (
        int(mebibytes) << 20 if mebibytes.isdecimal() else 0
    )  # "[N/A]" on machines that share memory with the GPU


def _smi(query: str) -> list[list[str]]:
    text = ask("nvidia-smi", query, "--format=csv,noheader,nounits", fix="look at the driver")
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if "," in line]


def needs_cuda(plan: Plan) -> list[str]:
    """Returns the settings that require a GPU."""
    rollout, trainer = plan.job(ROLLOUT), plan.job(TRAINER)
    sglang = rollout is not None and rollout.uses_sglang and rollout.config.rollout.device != "cpu"
    engine = (
        rollout is not None and not rollout.uses_sglang and rollout.config.rollout.device == "cuda"
    )
    cuda = trainer is not None and trainer.config.trainer.device == "cuda"
    found = {
        "rollout.engine sglang without rollout.device cpu": sglang,
        "rollout.device cuda": engine,
    }
    return [
        setting for setting, needed in (found | {"trainer.device cuda": cuda}).items() if needed
    ]


def check_gpus(plan: Plan) -> Iterator[Result]:
    """Compares the GPUs with what the tasks ask for, and finds who uses them already."""
    asked, needing, count = (
        sum(job.num_nodes * job.gpus for job in plan.here),
        needs_cuda(plan),
        len(plan.gpus),
    )
    if plan.assumed_gb:
        found = f"of {plan.assumed_gb:g} GB each are assumed (--gpu-memory-gb); those of this machine do not count"
        yield Result("GPUs", "ok", found)
        return
    if count:
        turns = any(job.config.rollout.colocate for job in plan.here)
        shared = ": some are shared" + (", in turn (rollout.colocate)" if turns else "")
        found = f"{count}, the tasks ask for {asked}{shared if count < asked else ''}"
        yield expect(
            "GPUs", turns or count >= asked, found, "fewer nodes: --num-nodes TASK=1", "warn"
        )
    else:
        outcome = (
            f"but {' and '.join(needing)} is set"
            if needing
            else "so everything computes on the CPU"
        )
        fix = "a machine with NVIDIA GPUs and their driver; or for a small model the CPU: --env RLHF_ROLLOUT__ENGINE=embedded"
        yield expect("GPUs", not needing, f"none ({plan.no_gpus}), {outcome}", fix)
    processes = _smi("--query-compute-apps=gpu_uuid,pid,process_name") if count else []
    for gpu in plan.gpus:
        users = ", ".join(
            f"process {pid} ({', '.join(name)})"
            for uuid, pid, *name in processes
            if uuid == gpu.uuid
        )
        taken = (
            f"; {gb(gpu.used)} are taken by {users or 'unknown processes'}"
            if users or gpu.used > 2e9
            else ""
        )
        fix = "end them, or leave it out with CUDA_VISIBLE_DEVICES; processes of other containers are not shown here"
        yield expect(
            f"GPU {gpu.number}",
            not taken,
            f"{gpu.name}, {gb(gpu.total)}, driver {gpu.driver}{taken}",
            fix,
            "warn",
        )


def check_collective(plan: Plan) -> Iterator[Result]:
    """Runs an all_reduce: over NCCL with a process per GPU; without GPUs with two processes over
    gloo on loopback.
    """
    if find_spec("torch") and any(job.needs_torch for job in plan.here):
        backend, world = ("nccl", len(plan.gpus)) if plan.gpus else ("gloo", 2)
        env = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            **Topology().loopback_env(),
            "PYTHONPATH": str(ROOT),
        }
        command = (sys.executable, "-m", "jobgroup.doctor.collective", backend, world)
        seconds = ask(*command, fix=_REDUCE_FIX[backend], timeout_s=COLLECTIVE_S, env=env).strip()
        yield Result(
            "all_reduce",
            "ok",
            f"{world} processes over {backend} in {seconds} s, rendezvous included",
        )
