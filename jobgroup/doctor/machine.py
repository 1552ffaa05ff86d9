"""Cores, memory and limits of this machine and its control group, its GPUs, a real all_reduce, and
the code sandbox.
"""

import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil

from common.errors import ConfigError
from common.process.topology import CRITIC, ENVIRONMENT, REWARD, ROLLOUT, TRAINER, Topology
from common.settings.rewards import CodeReward
from jobgroup.doctor.plan import ROOT, Gpu, Plan, PlannedTask
from jobgroup.doctor.report import Result, ask, expect, gb

COLLECTIVE_S = 90.0
"""Time limit of the collective, mostly for importing torch on a busy machine."""
_FILES = 1024
"""Descriptors in addition to those of requests in flight: logs, sockets, shards."""
_SHARED = Path("/dev/shm")  # noqa: S108
_REDUCE_FIX = {
    "gloo": "GLOO_SOCKET_IFNAME=lo (lo0 on macOS) in the environment; "
    "no firewall on loopback; or rm -r .venv && make lint",
    "nccl": "a CUDA build of torch that the driver supports; NCCL_DEBUG=INFO tells more; "
    "often /dev/shm is small, or GPUs are passed through and NCCL_P2P_DISABLE=1 helps",
}


def available_memory(in_use: bool = False) -> tuple[int, str]:
    """Returns the bytes available to new processes (with `in_use`, in total) and what limits
    them.
    """
    machine = psutil.virtual_memory()
    limits = list(_limits("memory.max", "memory.current"))
    if in_use:
        bounds = [(int(machine.total), "of the machine")]
        bounds += [(limit, "of this control group") for limit, _ in limits]
        return min(bounds)
    bounds = [(int(machine.available), "available on the machine")]
    for limit, used in limits:
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


def check_cores(plan: Plan) -> Iterator[Result]:
    """Checks that there are enough cores and that no process takes all of them."""
    usable = cores()
    busy = sum(_busy_processes(job) for job in plan.here)
    found = f"{usable:g} for {busy} processes that compute"
    fix = "expect it to be slow; or --num-nodes rollout-server=1"
    yield expect("cores", usable >= 2, found, fix, otherwise="warn")
    if busy < 2:
        return
    for job in plan.here:
        if _takes_all_cores(job):
            found = (
                f"not set for {job.name}: "
                f"each process starts a thread for every one of the {usable:g} cores"
            )
            fix = f"--env OMP_NUM_THREADS={max(1, int(usable // busy))}"
            yield Result("OMP_NUM_THREADS", "warn", found, fix)


def _busy_processes(job: PlannedTask) -> int:
    """Returns the number of processes on all nodes of a task that each keep a core busy."""
    if job.name == REWARD:
        return job.config.reward.workers
    if job.name == TRAINER:
        return job.num_nodes * max(1, job.gpus)
    return job.num_nodes if job.name in (ROLLOUT, CRITIC) else 0


def _takes_all_cores(job: PlannedTask) -> bool:
    if job.env.get("OMP_NUM_THREADS") or job.gpus or job.uses_sglang:
        return False
    return job.name in (TRAINER, ROLLOUT)


def check_memory(plan: Plan) -> Iterator[Result]:
    """Enough memory for the built-in task."""
    size, bound = available_memory()
    fix = "end other programs, or ask for more"
    yield expect("memory", size >= 3e9, f"{gb(size)} {bound}", fix, otherwise="warn")


def check_files(plan: Plan) -> Iterator[Result]:
    """Checks the limit: a trainer has a connection per group in flight, an engine and a router one
    per request.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    trainers = [job.config.trainer for job in plan.here]
    in_flight = [each.batch_size * (each.max_staleness + 1) for each in trainers]
    wanted = _FILES + 4 * max(in_flight, default=0)
    possible = wanted if hard < 0 else min(wanted, hard)
    found = f"{soft} open files, {wanted} are wanted"
    fix = f"ulimit -n {possible}, or LimitNOFILE of the service"
    yield expect("open files", soft >= wanted, found, fix, otherwise="warn")


def check_shared_memory(plan: Plan) -> Iterator[Result]:
    """Checks /dev/shm, through which NCCL passes tensors between GPUs that are not linked
    directly.
    """
    if not _SHARED.is_dir():
        return
    total = shutil.disk_usage(_SHARED).total
    gpus = [max(job.gpus, job.config.rollout.tensor_parallel_size) for job in plan.here]
    small = total < 1 << 30 and max(gpus, default=0) > 1
    fix = (
        "NCCL wants 1 GB between the GPUs of a node: "
        f"mount -o remount,size=8G {_SHARED}; in a pod an emptyDir (Memory)"
    )
    yield expect(str(_SHARED), not small, gb(total), fix, otherwise="warn")


def check_sandbox(plan: Plan) -> Iterator[Result]:
    """Runs the probes of the sandbox as the reward-server does for code, and the environment-server
    for the tool `python`.
    """
    proven = False
    reward = plan.job(REWARD)
    code = reward.config.reward.function(CodeReward) if reward else None
    if code is not None:
        if code.sandbox == "none":
            risk = "the reward function code has sandbox none: programs run as this user"
            yield Result("sandbox", "warn", risk, "only for code that you trust")
        else:
            _probe(code.timeout_s, code.memory_mb, code.python)
            proven = True
    environment = plan.job(ENVIRONMENT)
    if environment and environment.config.environment.name == "python":
        from services.environment.python_tool import MEMORY_MB, TIMEOUT_S

        _probe(TIMEOUT_S, MEMORY_MB)
        proven = True
    if proven:
        yield Result("sandbox", "ok", "bubblewrap contains programs that try to break out")


def _probe(timeout_s: float, memory_mb: int, python: str = "") -> None:
    """Makes a sandbox, which probes itself. Raises ConfigError when it does not contain them."""
    from services.sandbox.sandbox import Limits, Sandbox

    Sandbox(Limits(timeout_s, memory_mb), 1, python=python)


def visible(env: Mapping[str, str]) -> tuple[list[Gpu], str]:
    """Returns the GPUs that processes started here may use, and the reason if there are none."""
    if shutil.which("nvidia-smi") is None:
        return [], "there is no nvidia-smi"
    try:
        rows = _smi("--query-gpu=index,name,uuid,memory.total,memory.used,driver_version")
    except ConfigError as error:
        return [], error.message
    found = []
    for number, name, uuid, total, used, driver in rows:
        gpu = Gpu(number, name, uuid, total=_bytes(total), used=_bytes(used), driver=driver)
        found.append(gpu)
    variable = env.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return found, "nvidia-smi lists none"

    visible_here = []
    for name in filter(None, map(str.strip, variable.split(","))):
        visible_here += [gpu for gpu in found if name == gpu.number or gpu.uuid.startswith(name)]
    return visible_here, f"CUDA_VISIBLE_DEVICES is {variable!r}"


def _bytes(mebibytes: str) -> int:
    # "[N/A]" on machines that share memory with the GPU.
    return int(mebibytes) << 20 if mebibytes.isdecimal() else 0


def _smi(query: str) -> list[list[str]]:
    text = ask("nvidia-smi", query, "--format=csv,noheader,nounits", fix="look at the driver")
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if "," in line]


def needs_cuda(plan: Plan) -> list[str]:
    """Returns the settings that require a GPU."""
    found = []
    rollout = plan.job(ROLLOUT)
    if rollout is not None:
        device = rollout.config.rollout.device
        if rollout.uses_sglang and device != "cpu":
            found.append("rollout.engine sglang without rollout.device cpu")
        elif not rollout.uses_sglang and device == "cuda":
            found.append("rollout.device cuda")
    trainer = plan.job(TRAINER)
    if trainer is not None and trainer.config.trainer.device == "cuda":
        found.append("trainer.device cuda")
    return found


def check_gpus(plan: Plan) -> Iterator[Result]:
    """Compares the GPUs with what the tasks ask for, and finds who uses them already."""
    if plan.assumed_gb:
        found = (
            f"of {plan.assumed_gb:g} GB each are assumed (--gpu-memory-gb); "
            "those of this machine do not count"
        )
        yield Result("GPUs", "ok", found)
    elif plan.gpus:
        yield _number_of_gpus(plan)
        yield from _gpus_in_use(plan.gpus)
    else:
        needing = needs_cuda(plan)
        outcome = "so everything computes on the CPU"
        if needing:
            outcome = f"but {' and '.join(needing)} is set"
        fix = (
            "a machine with NVIDIA GPUs and their driver; "
            "or for a small model the CPU: --env RLHF_ROLLOUT__ENGINE=embedded"
        )
        yield expect("GPUs", not needing, f"none ({plan.no_gpus}), {outcome}", fix)


def _number_of_gpus(plan: Plan) -> Result:
    asked = sum(job.num_nodes * job.gpus for job in plan.here)
    takes_turns = any(job.config.rollout.colocate for job in plan.here)
    enough = len(plan.gpus) >= asked
    found = f"{len(plan.gpus)}, the tasks ask for {asked}"
    if not enough:
        found += ": some are shared"
        found += ", in turn (rollout.colocate)" if takes_turns else ""
    fix = "fewer nodes: --num-nodes TASK=1"
    return expect("GPUs", takes_turns or enough, found, fix, otherwise="warn")


def _gpus_in_use(gpus: Sequence[Gpu]) -> Iterator[Result]:
    processes = _smi("--query-compute-apps=gpu_uuid,pid,process_name")
    for gpu in gpus:
        users = []
        for uuid, pid, *name in processes:
            if uuid == gpu.uuid:
                users.append(f"process {pid} ({', '.join(name)})")
        taken = bool(users) or gpu.used > 2e9
        found = f"{gpu.name}, {gb(gpu.total)}, driver {gpu.driver}"
        if taken:
            found += f"; {gb(gpu.used)} are taken by {', '.join(users) or 'unknown processes'}"
        fix = (
            "end them, or leave it out with CUDA_VISIBLE_DEVICES; "
            "processes of other containers are not shown here"
        )
        yield expect(f"GPU {gpu.number}", not taken, found, fix, otherwise="warn")


def check_collective(plan: Plan) -> Iterator[Result]:
    """Runs an all_reduce: over NCCL with a process per GPU; without GPUs with two processes over
    gloo on loopback.
    """
    if not (find_spec("torch") and any(job.needs_torch for job in plan.here)):
        return
    backend = "nccl" if plan.gpus else "gloo"
    world = len(plan.gpus) or 2
    env = {"OMP_NUM_THREADS": "1", **os.environ, **Topology().loopback_env()}
    env["PYTHONPATH"] = str(ROOT)
    seconds = ask(
        *(sys.executable, "-m", "jobgroup.doctor.collective", backend, world),
        fix=_REDUCE_FIX[backend],
        timeout_s=COLLECTIVE_S,
        env=env,
    )
    found = f"{world} processes over {backend} in {seconds.strip()} s, rendezvous included"
    yield Result("all_reduce", "ok", found)
