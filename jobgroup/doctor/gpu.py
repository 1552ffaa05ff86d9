"""GPUs as nvidia-smi and torch see them, and a sum over processes that is really computed."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from common.topology import ROLLOUT, TRAINER, Topology
from jobgroup.doctor.machine import cores
from jobgroup.doctor.plan import ROOT, Plan
from jobgroup.doctor.result import Result, fail, gb, ok, warn

COLLECTIVE_S = 90.0
"""For the sum over processes: importing torch on a busy machine is most of it."""
_LATE = f"no sign within {COLLECTIVE_S:.0f} s"
_QUERY_S = 20.0
_WORKER = """
import json, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
rank, world, port, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
seen = {"cuda": torch.version.cuda, "gpus": gpus, "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None}
print(json.dumps(seen), flush=True)
device = "cpu"
if backend == "nccl":
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
start = time.monotonic()
dist.init_process_group(
    backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=float(sys.argv[5]))
)
tensor = torch.full((1 << 20,), rank + 1.0, device=device)
dist.all_reduce(tensor)
print(json.dumps({"sum": tensor.max().item(), "least": tensor.min().item(), "seconds": time.monotonic() - start}), flush=True)
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine."""

    index: str
    name: str
    uuid: str
    total: int
    used: int
    """Bytes."""
    driver: str


def visible(env: Mapping[str, str]) -> tuple[list[Gpu], str]:
    """The GPUs that processes started here may use, and why there are none."""
    if shutil.which("nvidia-smi") is None:
        return [], "there is no nvidia-smi"
    query = "--query-gpu=index,name,uuid,memory.total,memory.used,driver_version"
    try:
        done = _smi(query)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi cannot be run: {error}"
    if done.returncode:
        return [], f"nvidia-smi fails: {(done.stdout + done.stderr).strip() or f'exit status {done.returncode}'}"
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    found = [Gpu(index, name, uuid, _bytes(total), _bytes(used), driver) for index, name, uuid, total, used, driver in rows]
    if (chosen := env.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = [each.strip() for each in chosen.split(",") if each.strip()]
        found = [gpu for name in names for gpu in found if name == gpu.index or gpu.uuid.startswith(name)]
        return found, f"CUDA_VISIBLE_DEVICES is {chosen!r}"
    return found, "nvidia-smi lists none"


def _smi(query: str) -> subprocess.CompletedProcess[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=False)


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) << 20 if mebibytes.isdecimal() else 0  # "[N/A]" on machines that share memory with the GPU


def needs_cuda(plan: Plan) -> list[str]:
    """Settings that cannot do without a GPU."""
    rollout, trainer = plan.job(ROLLOUT), plan.job(TRAINER)
    found = []
    if rollout is not None and rollout.uses_sglang and rollout.config.rollout.device == "cuda":
        found.append("rollout.engine sglang with rollout.device cuda")
    if trainer is not None and trainer.config.trainer.device == "cuda":
        found.append("trainer.device cuda")
    return found


def check_gpus(plan: Plan, gpus: list[Gpu], why: str) -> Iterable[Result]:
    """How many there are against what the tasks ask for, and who uses them already."""
    if plan.assumed is not None:
        yield ok(
            "GPUs", f"of {plan.assumed.memory_gb:g} GB each are assumed (--gpu-memory-gb); those of this machine do not count"
        )
        return
    asked, needing = sum(job.nodes * job.gpus for job in plan.here), needs_cuda(plan)
    if not gpus and needing:
        mend = "a machine with NVIDIA GPUs and their driver; or for a small model the CPU: --env RLHF_ROLLOUT__ENGINE=embedded"
        yield fail("GPUs", f"none ({why}), but {' and '.join(needing)} is set", mend)
    elif not gpus:
        yield ok("GPUs", f"none ({why}); everything computes on the CPU")
    elif len(gpus) < asked:
        yield warn("GPUs", f"{len(gpus)}, the tasks ask for {asked}: some are shared", "fewer nodes: --num-nodes TASK=1")
    else:
        yield ok("GPUs", f"{len(gpus)}, the tasks ask for {asked}")
    for gpu in gpus:
        text = f"{gpu.name}, {gb(gpu.total)}, driver {gpu.driver}"
        busy = _processes(gpu)
        if busy:
            yield warn(
                f"GPU {gpu.index}",
                f"{text}; {gb(gpu.used)} are taken by {busy}",
                "end them, or leave it out with CUDA_VISIBLE_DEVICES",
            )
        elif gpu.used > 2e9:
            yield warn(
                f"GPU {gpu.index}",
                f"{text}; {gb(gpu.used)} are taken",
                "nvidia-smi tells by whom; those of other containers are not shown here",
            )
        else:
            yield ok(f"GPU {gpu.index}", text)


def _processes(gpu: Gpu) -> str:
    done = _smi("--query-compute-apps=gpu_uuid,pid,process_name")
    rows = [[cell.strip() for cell in line.split(",", 2)] for line in done.stdout.splitlines() if line.count(",") >= 2]
    return ", ".join(f"process {pid} ({name})" for uuid, pid, name in rows if uuid == gpu.uuid)


def check_collective(plan: Plan, gpus: list[Gpu]) -> Iterable[Result]:
    """Torch's GPUs, and an all_reduce: over NCCL a process per GPU, without GPUs two processes over gloo on loopback."""
    if find_spec("torch") is None or not any(job.computes for job in plan.here):
        return
    backend, world = ("nccl", len(gpus)) if gpus else ("gloo", 2)
    seen, sums, problem = _collective(backend, world)
    if seen is None and problem == _LATE:  # not even imported
        load = f"{os.getloadavg()[0]:.0f} processes want {cores():g} cores"
        yield warn("torch at work", f"{_LATE} that torch is imported ({load})", "run this again when the machine is less busy")
        return
    if seen is None:
        yield fail("torch at work", problem, "make the environment anew: rm -r .venv && make lint")
        return
    if gpus and seen["gpus"] != len(gpus):
        mend = "a CUDA build of torch (.venv/bin/pip install -c constraints.txt torch), and a driver that is not older"
        yield fail("torch at work", f"it sees {seen['gpus']} GPUs of {len(gpus)} (built for CUDA {seen['cuda']})", mend)
        return
    title = f"all_reduce over {backend} {seen['nccl'] or ''}".strip()
    expected = world * (world + 1) / 2
    if problem:
        yield fail(title, problem, _MEND[backend])
    elif any(each["sum"] != expected or each["least"] != expected for each in sums):
        yield fail(title, f"wrong sums {sums}, {expected} is right", _MEND[backend])
    else:
        yield ok(title, f"{world} processes in {max(each['seconds'] for each in sums):.1f} s, rendezvous included")


_MEND = {
    "gloo": "GLOO_SOCKET_IFNAME=lo (lo0 on macOS) in the environment; and loopback may not be blocked by a firewall",
    "nccl": "NCCL_DEBUG=INFO tells more; often /dev/shm is small, or GPUs are passed through and NCCL_P2P_DISABLE=1 helps",
}


def _collective(backend: str, world: int) -> tuple[dict[str, object] | None, list[dict[str, float]], str]:
    """(what torch sees, the sums of all ranks, what went wrong); leaves no process behind."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    env = {"OMP_NUM_THREADS": "1", **os.environ, **Topology().loopback_env()}
    command = [sys.executable, "-c", _WORKER]
    arguments = [[str(rank), str(world), str(port), backend, str(COLLECTIVE_S / 2)] for rank in range(world)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, *each], env=env, cwd=ROOT, **pipes) for each in arguments]  # type: ignore[call-overload]
    lines, problem, end = [], "", time.monotonic() + COLLECTIVE_S
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
            out, err = process.communicate()
            problem = problem or _LATE
        lines.append([json.loads(line) for line in out.splitlines() if line.startswith("{")])
        if process.returncode and not problem:
            problem = (err.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    seen = next((each[0] for each in lines if each), None)
    return seen, [each[1] for each in lines if len(each) > 1], problem
