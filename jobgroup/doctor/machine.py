"""Cores, memory, limits, shared memory, proxies and the sandbox of this machine."""

import os
import resource
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from common.errors import ConfigError
from common.topology import CRITIC, REWARD, ROLLOUT, TRAINER
from jobgroup.doctor.plan import Job, Plan
from jobgroup.doctor.result import Result, fail, gb, ok, warn

_CGROUP = Path("/sys/fs/cgroup")
_FILES = 1024
"""Descriptors beside those of requests in flight: logs, sockets, shards."""
_SHARED = Path("/dev/shm")  # noqa: S108 - a file system, no file
_SHM = 1 << 30
_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def memory(in_use: bool = False) -> tuple[int, str]:
    """Bytes that processes started here can have, and what bounds them: the machine or a limit of its control group.

    Args:
        in_use: count what is in use too, since the processes in question have it already.
    """
    if not Path("/proc/meminfo").is_file():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "of the machine"
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemTotal" if in_use else "MemAvailable"].split()[0]) * 1024
    limits = [(available, "of the machine" if in_use else "available on the machine")]
    for folder, name in _groups("memory"):
        limit = _number(folder / ("memory.max" if not name else "memory.limit_in_bytes"))
        used = _number(folder / ("memory.current" if not name else "memory.usage_in_bytes")) or 0
        if limit is not None and in_use:
            limits.append((limit, "of this control group"))
        elif limit is not None:
            limits.append((max(0, limit - used), f"left of the {gb(limit)} of this control group"))
    return min(limits)


def cores() -> float:
    """Processors that processes started here can use, a quota of the control group included."""
    usable = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    for folder, name in _groups("cpu"):
        if not name and (folder / "cpu.max").is_file():
            quota, _, period = (folder / "cpu.max").read_text().partition(" ")
            usable = min(usable, int(quota) / int(period)) if quota != "max" else usable
        elif name and (limit := _number(folder / "cpu.cfs_quota_us")) is not None:
            usable = min(usable, limit / (_number(folder / "cpu.cfs_period_us") or 100_000))
    return usable


def _groups(controller: str) -> Iterator[tuple[Path, str]]:
    """This process's control group and those above, version 2 ("") or 1 (its controllers)."""
    path = Path("/proc/self/cgroup")
    for line in path.read_text().splitlines() if path.is_file() else []:
        _, names, place = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = _CGROUP / controller if names else _CGROUP
        for folder in [top / place.strip("/"), *(top / place.strip("/")).parents]:
            if folder.is_relative_to(top) and folder.is_dir():
                yield folder, names


def _number(path: Path) -> int | None:
    """A limit; None where there is none ("max", -1, or as large as version 1 says "none")."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() and int(text) < 1 << 60 else None


def computing(job: Job) -> int:
    """Processes of a task that keep a core busy each, on all its nodes."""
    if job.name == TRAINER:
        return job.nodes * max(1, job.gpus)
    return job.nodes if job.name in (ROLLOUT, CRITIC) else job.config.reward.workers if job.name == REWARD else 0


def check_cores(plan: Plan) -> Iterable[Result]:
    """Enough of them, and not all of them for each process."""
    usable, busy = cores(), sum(computing(job) for job in plan.here)
    text = f"{usable:g} for {busy} processes that compute" if busy else f"{usable:g}"
    yield warn("cores", text, "expect it to be slow; or --num-nodes rollout-server=1") if usable < 2 else ok("cores", text)
    for name in (TRAINER, ROLLOUT):
        job = plan.job(name)
        if job is None or job.env.get("OMP_NUM_THREADS") or busy < 2 or job.gpus or job.uses_sglang:
            continue
        if name == ROLLOUT or job.config.trainer.num_threads is None:
            text = f"not set for {name}: each process takes a thread for every one of the {usable:g} cores"
            yield warn("OMP_NUM_THREADS", text, f"--env OMP_NUM_THREADS={max(1, int(usable // busy))}")


def check_memory() -> Iterable[Result]:
    size, bound = memory()
    text = f"{gb(size)} {bound}"
    yield warn("memory", text, "end other programs, or ask for more") if size < 3e9 else ok("memory", text)


def check_files(plan: Plan) -> Iterable[Result]:
    """A trainer has a connection for every group in flight; an engine and a router for every request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES
    for job in plan.here:
        trainer = job.config.trainer
        wanted = max(wanted, _FILES + 4 * trainer.batch_size * (trainer.max_staleness + 1))
    text = f"{soft} open files, {wanted} are wanted"
    if soft >= wanted:
        yield ok("open files", text)
    else:
        yield warn("open files", text, f"ulimit -n {wanted if hard < 0 else min(wanted, hard)}, or LimitNOFILE of the service")


def check_shared_memory(plan: Plan) -> Iterable[Result]:
    """NCCL passes tensors between GPUs of a machine through /dev/shm where they are not linked directly."""
    if not _SHARED.is_dir():
        return
    total = shutil.disk_usage(_SHARED).total
    needed = any(job.gpus > 1 or job.config.rollout.tensor_parallel_size > 1 for job in plan.here)
    if needed and total < _SHM:
        mend = f"mount -o remount,size=8G {_SHARED}; in a pod an emptyDir with medium Memory"
        yield warn(str(_SHARED), f"{gb(total)}; NCCL wants 1 GB between the GPUs of a node", mend)
    else:
        yield ok(str(_SHARED), gb(total))


def check_proxies(plan: Plan, env: Mapping[str, str]) -> Iterable[Result]:
    """The project's clients ignore proxies; the router and SGLang do not, and would ask one for the names of the group."""
    merged = {**env, **(plan.here[0].env if plan.here else {})}
    caught = [name for name in _PROXIES if merged.get(name)]
    spared = [each.strip().lstrip(".*") for each in (merged.get("NO_PROXY") or merged.get("no_proxy") or "").split(",")]
    own = [f"{plan.group}"] if plan.topology is not None and not plan.topology.local_hosts else ["127.0.0.0/8"]
    if not caught:
        yield ok("proxies", "no proxy for http" + (" (HTTPS_PROXY is set, which is well)" if merged.get("HTTPS_PROXY") else ""))
    elif "*" in (merged.get("NO_PROXY") or merged.get("no_proxy") or "").split(",") or all(name in spared for name in own):
        yield ok("proxies", f"{', '.join(caught)} set, NO_PROXY has {', '.join(own)}")
    else:
        mend = f"unset {' '.join(caught)} (HTTPS_PROXY is enough for hub and package index), or add {','.join(own)} to NO_PROXY"
        yield warn("proxies", f"{', '.join(caught)} set: calls between the tasks would be caught", mend)


def check_sandbox(plan: Plan) -> Iterable[Result]:
    """Runs the probes with which the reward-server tries its sandbox."""
    job = plan.job(REWARD)
    if job is None or "code" not in job.config.reward.function_names():
        return
    from services.reward.sandbox.run import Limits, Sandbox

    reward = job.config.reward
    if reward.code_sandbox == "none":
        yield warn("sandbox", "reward.code_sandbox is none: programs run as this user", "only for code that you trust")
        return
    try:
        Sandbox(Limits(reward.code_timeout_s, reward.code_memory_mb, reward.code_output_kb), 1, python=reward.code_python)
    except ConfigError as error:
        yield fail("sandbox", error.message, error.remedy or "see docs/how-to/rewards.md")
    else:
        yield ok("sandbox", "bubblewrap holds programs that try to break out")
