"""Chooses the device of a process, by one rule for the trainer, the critic, the embedded engine and
reward models.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from common.errors import ConfigError
from common.process.topology import INSTALL_CUDA_BUILD, assigned_gpus, cuda_of_driver, hidden_gpus

DeviceKind = Literal["auto", "cpu", "cuda"]


def choose_device(
    kind: DeviceKind,
    field: str,
    *,
    value: Any = None,
    on_cpu: str = "set it to cpu to compute on the CPU",
    rank: int = 0,
) -> torch.device:
    """Returns the device: the CPU for `cpu`, else GPU `rank`; `auto` is the CPU when no GPU exists
    or is assigned.

    Raises ConfigError when a GPU is requested or assigned but none is usable, so that no run with
    GPUs silently computes on the CPU. `field` and `value` (`kind` when None) name the setting;
    `on_cpu` says how to do without a GPU.
    """
    if kind == "cpu":
        return torch.device("cpu")
    assigned = assigned_gpus()
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if 0 < count <= rank:
            promised = f", and {assigned}" if assigned else ""
            raise ConfigError(
                f"torch finds {count} GPUs for {rank + 1} or more processes of this node{promised}",
                field=field,
                value=value or kind,
                remedy="run one process per GPU: "
                "compare CUDA_VISIBLE_DEVICES, nvidia-smi and --nproc-per-node",
            )
        return torch.device("cuda", rank)
    # A run that was given GPUs must not silently compute on the CPU.
    if kind == "cuda" or assigned:
        reason, remedy = _why_none()
        found = f"torch finds no GPU, but {assigned}" if assigned else "torch finds no GPU"
        raise ConfigError(
            f"{found}: {reason}", field=field, value=value or kind, remedy=f"{remedy}; or {on_cpu}"
        )
    return torch.device("cpu")


@contextmanager
def reproducible_numbers(wanted: bool) -> Iterator[None]:
    """If `wanted`, torch computes the same numbers inside the block in every process with the same
    inputs, devices and threads.
    """
    if not wanted:
        yield
        return
    # Read when CUDA starts; without it cuBLAS may sum in another order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # It is for finding reads of memory that nobody wrote, and costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def dtype_on(device: torch.device, name: str) -> torch.dtype:
    """Returns the precision named by `model.dtype` for a GPU; a CPU computes in float32."""
    return torch.float32 if device.type == "cpu" else getattr(torch, name)


def _why_none() -> tuple[str, str]:
    """Returns why torch finds no GPU, and the remedy."""
    version = torch.version.cuda
    if version is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build", INSTALL_CUDA_BUILD
    if hidden_gpus():
        found = os.environ["CUDA_VISIBLE_DEVICES"]
        return (
            f"CUDA_VISIBLE_DEVICES is {found!r}, which hides every GPU",
            "unset it, or name GPUs in it: 0,1",
        )
    driver = cuda_of_driver()
    if driver is None:
        remedy = (
            "install NVIDIA's driver; "
            "start a container with GPUs (--gpus all, or nvidia.com/gpu in its limits)"
        )
        return "there is no NVIDIA driver (libcuda.so.1)", remedy
    if version is not None and driver and driver // 1000 < int(version.partition(".")[0]):
        supported = f"{driver // 1000}.{driver % 1000 // 10}"
        remedy = (
            "update the driver (CUDA 13 needs the 580 series), "
            "or install a build of torch for the driver's CUDA version"
        )
        return (
            f"the driver supports CUDA {supported}, but torch {torch.__version__} needs {version}",
            remedy,
        )
    return (
        "the driver is installed, but gives this process no GPU",
        "check nvidia-smi, CUDA_VISIBLE_DEVICES and the kernel's log",
    )
