"""Checksums of weights: their speed on the device, and beside SGLang's own function on the same
tensor.
"""

import json
import subprocess
import time
from collections.abc import Callable

import torch
from torch import Tensor

from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting, seconds
from learning.weight_group import digest
from trainer.weights.tensor_hash import gpu_digest

_GPU_GB_S = 10.0
"""GB/s that checksums on a GPU must reach: below that, those of a model of 32B take more than six
seconds a step."""
_ODD = 1_000_003
"""Elements of a tensor that fills no block: its bytes do not divide by eight."""
_LIMIT_S = 150

_SGLANG = """
import json, sys, time
import torch
from sglang.srt.managers.mm_utils import tensor_hash

device, counts, times = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
found = []
for count in counts:
    numbers = torch.arange(count, dtype=torch.int64, device=device)
    tensor = ((numbers * 40_503) & 0x3FFF).to(torch.int16).view(torch.bfloat16)
    spent = []
    for _ in range(times + 1):
        start = time.perf_counter()
        hashed = tensor_hash(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
    found.append([f"{hashed:016x}", min(spent[1:])])
print("hashes", json.dumps(found))
"""


def measure(found: Findings, setting: Setting) -> None:
    """Measures the checksum of 1 GB in bfloat16, and compares it with the host's and SGLang's."""
    counts = [_ODD, 1 << 20] if setting.small else [_ODD, 1 << 29]
    own: Callable[[Tensor], str] = gpu_digest if setting.on_gpu else digest
    tensors = [_tensor(count, setting.device) for count in counts]
    sums = [own(tensor) for tensor in tensors]

    on_host = own(tensors[0].cpu())
    measured = "equal" if on_host == sums[0] else f"{sums[0]} and {on_host}"
    found.claim(
        "the checksum of a tensor on the device and of its copy on the host",
        "equal",
        measured,
        on_host == sums[0],
    )
    changed = tensors[0].clone()
    changed.view(torch.int16)[-1] ^= 1
    other = own(changed)
    text = "one bit changed in the last element changes the checksum"
    found.claim(text, "another", f"{sums[0]} and {other}", other != sums[0])

    large = tensors[-1]
    rate = large.nbytes / seconds(lambda: own(large), setting, 3) / 1e9
    if setting.on_gpu:
        found.at_least(
            f"checksums on the GPU, {large.nbytes / 1e9:.1f} GB", rate, _GPU_GB_S, " GB/s"
        )
    else:
        found.claim(f"checksums on the CPU, {large.nbytes / 1e6:.0f} MB", "", f"{rate:.2f} GB/s")
    found.figures = {"checksums": sums, "gigabytes_per_second": rate}
    _beside_sglang(found, setting, counts, sums=sums)


def _tensor(count: int, device: torch.device) -> Tensor:
    """Returns finite bfloat16 numbers that any process can make again."""
    numbers = torch.arange(count, dtype=torch.int64, device=device)
    return ((numbers * 40_503) & 0x3FFF).to(torch.int16).view(torch.bfloat16)


def _beside_sglang(
    found: Findings, setting: Setting, counts: list[int], *, sums: list[str]
) -> None:
    text = "SGLang's checksums of the same tensors"
    python = setting.sglang_python()
    if python is None:
        found.not_reached(text, "no Python with SGLang: name one with --sglang")
        return
    words = [
        str(python),
        "-c",
        _SGLANG,
        setting.device.type,
        json.dumps(counts),
        "1" if setting.small else "3",
    ]
    start = time.perf_counter()
    process = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S)
    line = next((line for line in process.stdout.splitlines() if line.startswith("hashes ")), "")
    if not line:
        print(process.stdout, process.stderr)
        found.claim(
            text,
            "the same",
            f"SGLang's process ended with status {process.returncode}: see the log",
            False,
        )
        return
    theirs = json.loads(line.removeprefix("hashes "))
    same = [each[0] for each in theirs] == sums
    found.claim(text, ", ".join(sums), ", ".join(each[0] for each in theirs), same)
    size = 2 * counts[-1]
    rate = size / theirs[-1][1] / 1e9
    found.claim(
        "SGLang's checksum by itself",
        "",
        f"{rate:,.2f} GB/s, after {time.perf_counter() - start:.0f} s of its start",
    )
    found.figures["sglang_gigabytes_per_second"] = rate
