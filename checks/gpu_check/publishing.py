"""Publishing a version, parking the trainer in host memory and restoring it: GB/s, and every bit
afterwards.
"""

import torch
from torch import Tensor

from benchmarks.update import full_groups, learn
from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting, different
from learning.ranks import Ranks
from learning.sharding import local
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference
from trainer.weights.gpu_lease import GpuLease
from trainer.weights.host_copy import HostCopy
from trainer.weights.versions import write_version

_TIMES = 3


def measure(found: Findings, setting: Setting) -> None:
    """Updates a model once, so that it has an optimiser, and measures what moves it to the host and
    back.
    """
    shape = "small" if setting.small else "0.5b"
    tokens = "512" if setting.small else "4096"
    config = setting.config(
        setting.model(shape), "--trainer.micro_batch_tokens", tokens, "--trainer.compile", "false"
    )
    with setting.ranks(config) as ranks:
        policy = Policy(config, ranks)
        learn(policy, Reference(policy), full_groups(config), config)
        _publish(found, setting, policy)
        _park(found, setting, policy, ranks=ranks)


def _publish(found: Findings, setting: Setting, policy: Policy) -> None:
    """Copies the weights to the host as for a broadcast, and writes them as files."""
    copy = HostCopy()
    first = setting.timed(lambda: copy.fill(policy.weights(), 0))
    times = [setting.timed(lambda: copy.fill(policy.weights(), 1)) for _ in range(_TIMES)]
    slower = f"the first time {_rate(copy.size, first)}"
    speed = f"{copy.size / 1e9:.2f} GB: {_rate(copy.size, min(times))} ({slower})"
    found.claim("the weights copied to the host, in the engines' precision", "", speed)
    sent = {name: tensor.to("cpu", copy=True) for name, tensor in policy.weights()}
    with copy.reading(1) as tensors:
        wrong = different(sent, tensors)
        same = not wrong and len(tensors) == len(sent)
    found.claim(
        f"{len(sent)} tensors in the copy, bit by bit", "0 differ", f"{len(wrong)} differ", same
    )

    directory = setting.scratch / "published"
    directory.mkdir(exist_ok=True)
    took = setting.timed(lambda: write_version(policy.weights(), [], directory, "check", version=1))
    found.claim("a version written to files, with its checksums", "", _rate(copy.size, took))
    found.figures = {"bytes": copy.size, "copy_seconds": times, "file_seconds": took}


def _park(found: Findings, setting: Setting, policy: Policy, *, ranks: Ranks) -> None:
    """Parks weights and optimiser as for an engine on the same GPU, and restores them."""
    before = {name: tensor.to("cpu", copy=True) for name, tensor in _state(policy).items()}
    size = sum(tensor.nbytes for tensor in before.values())
    lease = GpuLease(ranks, lambda: [policy.resident()])
    policy.optimizer.zero_grad()
    held = _allocated(setting)
    parked: list[float] = []
    restored: list[float] = []
    left = 0
    for _ in range(_TIMES):
        parked.append(setting.timed(lease.release))
        left = _allocated(setting)
        restored.append(setting.timed(lease.acquire))
    text = f"parking weights and optimiser, {size / 1e9:.2f} GB"
    found.claim(
        text,
        "",
        f"{_rate(size, min(parked))} (the first time, with its memory, {_rate(size, parked[0])})",
    )
    found.claim("restoring them", "", _rate(size, min(restored)))
    if setting.on_gpu:
        limit = 0.05 * held
        text = "memory of the GPU that parking leaves in use"
        found.claim(
            text,
            f"≤ {limit / 1e9:.2f} GB",
            f"{left / 1e9:.2f} of {held / 1e9:.2f} GB",
            left <= limit,
        )
    after = {name: tensor.cpu() for name, tensor in _state(policy).items()}
    wrong = different(before, after)
    found.claim(
        f"{len(before)} tensors after parking, bit by bit",
        "0 differ",
        f"{len(wrong)} differ",
        not wrong,
    )
    found.figures |= {"parked_bytes": size, "park_seconds": parked, "restore_seconds": restored}


def _state(policy: Policy) -> dict[str, Tensor]:
    tensors = {**dict(policy.model.named_parameters()), **policy.optimizer.state_dict()}
    return {name: local(tensor).detach() for name, tensor in tensors.items()}


def _allocated(setting: Setting) -> int:
    return int(torch.cuda.memory_allocated()) if setting.on_gpu else 0


def _rate(size: int, took: float) -> str:
    return f"{size / took / 1e9:.2f} GB/s"
