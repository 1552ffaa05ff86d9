"""GPUs as nvidia-smi lists them, and as torch uses them."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from common.errors import ConfigError
from common.topology import ROLLOUT, TRAINER, Topology
from jobgroup.doctor.plan import ROOT, Gpu, Plan
from jobgroup.doctor.report import Result, ask, expect, fail, gb, ok, warn

COLLECTIVE_S = 90.0
"""Time limit of the collective, mostly for importing torch on a busy machine."""
_REDUCE_FIX = {
    "gloo": "GLOO_SOCKET_IFNAME=lo (lo0 on macOS) in the environment; no firewall on loopback; or rm -r .venv && make lint",
    "nccl": "a CUDA build of torch that the driver supports; NCCL_DEBUG=INFO tells more; often /dev/shm is small, or GPUs are "
    "passed through and NCCL_P2P_DISABLE=1 helps",
}


def visible(env: Mapping[str, str]) -> tuple[list[Gpu], str]:
    """Returns the GPUs that processes started here may use, and the reason if there are none."""
    if shutil.which("nvidia-smi") is None:
        return [], "there is no nvidia-smi"
    try:
        rows = _smi("--query-gpu=index,name,uuid,memory.total,memory.used,driver_version")
    except ConfigError as error:
        return [], error.message
    found = [Gpu(number, name, uuid, _bytes(total), _bytes(used), driver) for number, name, uuid, total, used, driver in rows]
    if (chosen := env.get("CUDA_VISIBLE_DEVICES")) is None:
        return found, "nvidia-smi lists none"
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    mine = [gpu for name in names for gpu in found if name == gpu.number or gpu.uuid.startswith(name)]
    return mine, f"CUDA_VISIBLE_DEVICES is {chosen!r}"


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) << 20 if mebibytes.isdecimal() else 0  # "[N/A]" on machines that share memory with the GPU


def _smi(query: str) -> list[list[str]]:
    text = ask("nvidia-smi", query, "--format=csv,noheader,nounits", fix="look at the driver")
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if "," in line]


def needs_cuda(plan: Plan) -> list[str]:
    """Returns the settings that require a GPU."""
    rollout, trainer = plan.job(ROLLOUT), plan.job(TRAINER)
    sglang = rollout is not None and rollout.uses_sglang and rollout.config.rollout.device == "cuda"
    cuda = trainer is not None and trainer.config.trainer.device == "cuda"
    return ["rollout.engine sglang with rollout.device cuda"] * sglang + ["trainer.device cuda"] * cuda


def check_gpus(plan: Plan) -> Iterator[Result]:
    """Compares the GPUs with what the tasks ask for, and finds who uses them already."""
    asked, needing, count = sum(job.nodes * job.gpus for job in plan.here), needs_cuda(plan), len(plan.gpus)
    if plan.assumed_gb:
        yield ok("GPUs", f"of {plan.assumed_gb:g} GB each are assumed (--gpu-memory-gb); those of this machine do not count")
        return
    if not count and needing:
        fix = "a machine with NVIDIA GPUs and their driver; or for a small model the CPU: --env RLHF_ROLLOUT__ENGINE=embedded"
        yield fail("GPUs", f"none ({plan.no_gpus}), but {' and '.join(needing)} is set", fix)
    elif not count:
        yield ok("GPUs", f"none ({plan.no_gpus}); everything computes on the CPU")
    else:
        found = f"{count}, the tasks ask for {asked}{': some are shared' if count < asked else ''}"
        yield expect("GPUs", count >= asked, found, "fewer nodes: --num-nodes TASK=1", "warn")
    processes = _smi("--query-compute-apps=gpu_uuid,pid,process_name") if count else []
    for gpu in plan.gpus:
        users = ", ".join(f"process {pid} ({', '.join(name)})" for uuid, pid, *name in processes if uuid == gpu.uuid)
        found = f"{gpu.name}, {gb(gpu.total)}, driver {gpu.driver}"
        if users or gpu.used > 2e9:
            fix = "end them, or leave it out with CUDA_VISIBLE_DEVICES; processes of other containers are not shown here"
            yield warn(f"GPU {gpu.number}", f"{found}; {gb(gpu.used)} are taken by {users or 'unknown processes'}", fix)
        else:
            yield ok(f"GPU {gpu.number}", found)


def check_collective(plan: Plan) -> Iterator[Result]:
    """Runs an all_reduce: over NCCL with a process per GPU; without GPUs with two processes over gloo on loopback."""
    if find_spec("torch") and any(job.needs_torch for job in plan.here):
        backend, world = ("nccl", len(plan.gpus)) if plan.gpus else ("gloo", 2)
        env = {"OMP_NUM_THREADS": "1", **os.environ, **Topology().loopback_env(), "PYTHONPATH": str(ROOT)}
        command = (sys.executable, "-m", "jobgroup.doctor.collective", backend, world)
        seconds = ask(*command, fix=_REDUCE_FIX[backend], timeout_s=COLLECTIVE_S, env=env).strip()
        yield ok("all_reduce", f"{world} processes over {backend} in {seconds} s, rendezvous included")
