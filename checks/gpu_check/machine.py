"""The machine: versions, arithmetic and memory throughput, and a process group for CPU and GPU."""

import platform
from importlib import metadata

import torch
import torch.distributed as dist

from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting, seconds
from common.settings.config import Config

_REACHED = 0.6
"""Minimum share of the data sheet's rate expected of a large matrix product."""


def speed(found: Findings, setting: Setting) -> None:
    """Versions, the rate of a large matrix product, and that of a copy."""
    found.tables["Versions"] = [["what", "version"], *versions(setting)]
    side = 512 if setting.small else 8192
    kind = torch.bfloat16 if setting.on_gpu else torch.float32
    left = torch.randn(side, side, device=setting.device, dtype=kind)
    right = torch.randn_like(left)
    rate = 2 * side**3 / seconds(lambda: left @ right, setting, 3 if setting.small else 10)
    if setting.on_gpu:
        text = "a bfloat16 product of 8192 × 8192"
        sheet = setting.peak()
        if sheet is None:
            found.claim(text, "this GPU's peak is not known", f"{rate / 1e12:.0f} TFLOP/s")
        else:
            least = _REACHED * sheet / 1e12
            found.at_least(f"{text} reaches the data sheet", rate / 1e12, least, " TFLOP/s")
        exact = torch.mm(left, right, out_dtype=torch.float32)
        wanted = left[:64].double() @ right.double()
        error = float((exact[:64].double() - wanted).abs().max() / wanted.abs().max())
        found.at_most(
            "a bfloat16 product with a float32 result is not rounded to bfloat16", error, 1e-4
        )
    else:
        found.claim(f"a float32 product of {side} × {side}", "", f"{rate / 1e12:.3f} TFLOP/s")
    source = torch.empty(
        (1 << 22) if setting.small else (1 << 30), dtype=torch.uint8, device=setting.device
    )
    target = torch.empty_like(source)
    copied = 2 * source.numel() / seconds(lambda: target.copy_(source), setting, 5)
    found.claim("a copy in the device's memory, read and written", "", f"{copied / 1e9:,.0f} GB/s")
    if setting.on_gpu:
        host = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
        taken = source.numel() / seconds(lambda: host.copy_(source, non_blocking=True), setting, 5)
        found.claim("a copy to pinned memory of the host", "", f"{taken / 1e9:,.1f} GB/s")
    found.figures = {"flops": rate, "bytes": copied}


def versions(setting: Setting) -> list[list[str]]:
    """Returns the rows of the table of versions."""
    rows = [["Python", platform.python_version()], ["system", platform.platform()]]
    for name in ("torch", "transformers", "triton", "flash-attn", "peft"):
        try:
            rows.append([name, metadata.version(name)])
        except metadata.PackageNotFoundError:
            rows.append([name, "not installed"])
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(setting.device)
        memory = f"{properties.total_memory / 1e9:.1f} GB"
        capability = f"capability {properties.major}.{properties.minor}"
        rows += [
            ["GPU", f"{properties.name}, {memory}, {capability}"],
            ["CUDA of torch", str(torch.version.cuda)],
            ["cuDNN", str(torch.backends.cudnn.version())],
            ["NCCL", ".".join(map(str, torch.cuda.nccl.version()))],
        ]
    return rows


def process_group(found: Findings, setting: Setting) -> None:
    """One process group that uses gloo for CPU tensors and NCCL for GPU tensors, as FSDP2 and
    checkpoints do.
    """
    with setting.ranks(
        Config.model_validate({"trainer": {"device": setting.device_kind}})
    ) as ranks:
        mesh = ranks.mesh()
        backend = dist.get_backend_config()
        wanted = "cuda:nccl" if setting.on_gpu else "gloo"
        found.claim("the process group's backends", wanted, backend, wanted in backend)
        for device in dict.fromkeys((torch.device("cpu"), setting.device)):
            tensor = torch.arange(1024, dtype=torch.float32, device=device)
            before = tensor.clone()
            dist.all_reduce(tensor)
            gathered = torch.empty_like(tensor)
            dist.all_gather_into_tensor(gathered, tensor)
            setting.synchronize()
            same = torch.equal(tensor, before) and torch.equal(gathered, before)
            found.claim(
                f"sum and gather of tensors on {device.type}",
                "unchanged by one rank",
                "equal" if same else "changed",
                same,
            )
        thread = dist.new_group(backend="gloo")
        body = torch.ones(3)
        dist.all_reduce(body, group=thread)
        found.claim(
            "a second group over gloo, for a thread",
            "3",
            f"{float(body.sum()):g}",
            float(body.sum()) == 3,
        )
        found.claim(
            "the device mesh",
            setting.device_kind,
            str(mesh.device_type),
            mesh.device_type == setting.device_kind,
        )
