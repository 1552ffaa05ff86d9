"""The GPUs of this machine, as nvidia-smi lists them, and who uses them."""

import shutil

from common.errors import ConfigError
from common.process.topology import ROLLOUT, TRAINER
from jobgroup.doctor.plan import Gpu, Plan
from jobgroup.doctor.report import Results, ask, expect, gb
from jobgroup.spec import Env


def visible(env: Env) -> tuple[list[Gpu], str]:
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
    if rollout and rollout.uses_sglang and rollout.config.rollout.device != "cpu":
        found.append("rollout.engine sglang without rollout.device cpu")
    elif rollout and rollout.config.rollout.device == "cuda":
        found.append("rollout.device cuda")
    trainer = plan.job(TRAINER)
    if trainer and trainer.config.trainer.device == "cuda":
        found.append("trainer.device cuda")
    return found


def check_gpus(plan: Plan) -> Results:
    """Compares the GPUs with what the tasks ask for, and finds who uses them already."""
    if not plan.gpus:
        needing = needs_cuda(plan)
        outcome = "so everything computes on the CPU"
        if needing:
            outcome = f"but {' and '.join(needing)} is set"
        yield expect(
            "GPUs",
            not needing,
            f"none ({plan.no_gpus}), {outcome}",
            "a machine with NVIDIA GPUs and their driver; "
            "or for a small model the CPU: --env RLHF_ROLLOUT__ENGINE=embedded",
        )
        return

    asked = sum(job.num_nodes * job.gpus for job in plan.here)
    takes_turns = any(job.config.rollout.colocate for job in plan.here)
    enough = takes_turns or len(plan.gpus) >= asked
    found = f"{len(plan.gpus)}, the tasks ask for {asked}"
    yield expect("GPUs", enough, found, "fewer nodes: --num-nodes TASK=1", otherwise="warn")

    processes = _smi("--query-compute-apps=gpu_uuid,pid,process_name")
    for gpu in plan.gpus:
        users = [f"process {pid} ({name})" for uuid, pid, name, *_ in processes if uuid == gpu.uuid]
        free = not users and gpu.used <= 2e9
        found = f"{gpu.name}, {gb(gpu.total)}, driver {gpu.driver}"
        if not free:
            found += f"; {gb(gpu.used)} are taken by {', '.join(users) or 'unknown processes'}"
        yield expect(
            f"GPU {gpu.number}",
            free,
            found,
            "end them, or leave it out with CUDA_VISIBLE_DEVICES; "
            "processes of other containers are not shown here",
            otherwise="warn",
        )
