"""The update at real shapes: seconds, MFU, memory compared with its estimates, and where the time
goes.
"""

import itertools
import json
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import profile

from benchmarks.update import full_groups, learn, required_flops, tokens_of
from checks.gpu_check.harness import Findings, peak_host_bytes
from checks.gpu_check.sections import TORCH_HEAD
from checks.gpu_check.setting import Setting, activities, cell, costs, finite
from common.errors import ConfigError
from common.models.memory import ModelShape, trainer_memory
from common.settings.config import Config
from learning import attention
from learning.fitting import fitted
from learning.ranks import Ranks
from trainer.policy import logprobs
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference

_REPEATS = 3
_TOP = 20
_LEAST = 0.7
"""The peak must be at least this share of the estimate."""
_GOALS = {("0.5b", 16_384): 0.30, ("7b-layers", 16_384): 0.40, ("32b-layers", 16_384): 0.45}
"""Target MFU on an H100 by shape and tokens of a micro-batch; `benchmarks.roofline` and
`benchmarks.rehearsal --profile` predict more."""


def measure(found: Findings, setting: Setting, shape: str, tokens: int, words: str = "") -> None:
    """Measures updates of full micro-batches of `tokens`, with the extra settings `words`."""
    if setting.small:
        shape = "small"
        tokens = 512
    if "offload_optimizer" in words and not setting.on_gpu:
        found.not_reached("an update with offloading", "needs a GPU")
        return
    without = (
        patch.object(logprobs, "_kernels", lambda _: None) if words == TORCH_HEAD else nullcontext()
    )
    settings = () if words == TORCH_HEAD else words.split()
    config = setting.config(
        setting.model(shape), "--trainer.micro_batch_tokens", str(tokens), *settings
    )
    groups = full_groups(config)
    with without, setting.ranks(config) as ranks:
        policy = Policy(config, ranks)
        reference = Reference(policy)
        flops = required_flops(groups, policy.model)
        first, metrics = learn(policy, reference, groups, config)
        if setting.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = [
            learn(policy, reference, groups, config)[0]
            for _ in range(1 if setting.small else _REPEATS)
        ]
        seconds = statistics.median(times)
        found.figures = {
            "shape": shape,
            "tokens": tokens,
            "settings": words,
            "seconds": seconds,
            "first_seconds": first,
            "tokens_per_second": tokens_of(groups) / seconds,
            "loss": metrics.loss,
            "grad_norm": metrics.grad_norm,
            "sharded": ranks.sharded,
        }
        found.claim(
            "loss and gradient are finite",
            "finite",
            f"{metrics.loss:.4g}, norm {metrics.grad_norm:.4g}",
            finite(metrics),
        )
    _utilisation(found, setting, flops, words)
    _memory(found, setting, config)


def _shape_of(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (Path(config.model.name) / "config.json").read_text(encoding="utf-8")
    )
    return found


def _utilisation(found: Findings, setting: Setting, flops: float, words: str) -> None:
    figures = found.figures
    rate = flops / figures["seconds"]
    peak = setting.peak()
    if peak is None:
        text = "arithmetic of the update"
        found.claim(text, "this GPU's peak is not known", f"{rate / 1e12:.1f} TFLOP/s")
        return
    share = rate / peak
    figures["mfu"] = share
    goal = _GOALS.get((figures["shape"], figures["tokens"]))
    if setting.on_gpu and goal and not words:
        found.at_least("MFU of the update", share, goal)


def _memory(found: Findings, setting: Setting, config: Config) -> None:
    """Measures the peak; judges it by `common/models/memory.py` and the rehearsal where they
    describe what ran.

    Both predict eager passes. A compiled layer keeps other activations, so its peak is shown
    without a verdict.
    """
    figures = found.figures
    config = fitted(config, Ranks.alone(config), config.model.name)
    eager = not setting.on_gpu or config.trainer.compile is False
    estimate = trainer_memory(
        ModelShape.of(_shape_of(config)),
        config,
        ranks=1,
        repeats_heads=setting.on_gpu and not attention.GQA,
    )
    figures["estimate"] = estimate.total - estimate.overhead
    figures["allocated"] = (
        torch.cuda.max_memory_allocated() if setting.on_gpu else peak_host_bytes()
    )
    figures["reserved"] = torch.cuda.max_memory_reserved() if setting.on_gpu else 0
    figures["rehearsed"] = rehearsed_peak(found, config) if eager else None
    if not setting.on_gpu:
        return

    about = f"update of {figures['shape']}, {figures['tokens']:,} tokens"
    allocated = f"{figures['allocated'] / 1e9:.2f} GB"
    if not eager:
        found.claim(f"{about}, compiled: allocated at the peak", "", allocated)
        return

    most = figures["estimate"]
    within = _LEAST * most <= figures["allocated"] <= most
    found.claim(
        f"{about}: allocated at the peak, at least 70 % of the estimate",
        f"≤ {most / 1e9:.2f} GB",
        allocated,
        holds=within,
    )
    found.at_most(
        f"{about}: reserved, within the estimate and its flat part",
        figures["reserved"] / 1e9,
        estimate.total / 1e9,
        " GB",
    )
    if figures["rehearsed"]:
        apart = figures["allocated"] / figures["rehearsed"] - 1
        found.claim(
            f"{about}: allocated beside the rehearsal",
            "within 10 %",
            f"{apart:+.1%}",
            holds=abs(apart) <= 0.1,
        )


def rehearsed_peak(found: Findings, config: Config) -> int | None:
    """Returns the bytes that `benchmarks.rehearsal` counts, or None if it refuses these settings.

    A crash of the rehearsal is a separate failed claim; the measurements remain valid.
    """
    from benchmarks.rehearsal import rehearse

    try:
        return rehearse(config, 1).peak
    except ConfigError:
        return None
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        found.claim(
            "the rehearsal of this update", "runs", f"{type(error).__name__}: {first}", False
        )
        return None


def kernels(found: Findings, setting: Setting) -> None:
    """Lists the twenty most costly kernels of an update (operators on a CPU)."""
    shape, tokens = ("small", 512) if setting.small else ("0.5b", 16_384)
    config = setting.config(setting.model(shape), "--trainer.micro_batch_tokens", str(tokens))
    groups = full_groups(config)
    with setting.ranks(config) as ranks:
        policy = Policy(config, ranks)
        reference = Reference(policy)
        learn(policy, reference, groups, config)
        with profile(activities=activities(setting)) as recorded:
            learn(policy, reference, groups, config)
    events = [
        (time_ms, event)
        for time_ms, event in costs(recorded, setting)
        if time_ms > 0 and (not setting.on_gpu or str(event.device_type).endswith("CUDA"))
    ]
    total = sum(time_ms for time_ms, _ in events)
    rows = [["kernel", "calls", "ms", "share", "sum"]]
    running = itertools.accumulate(time_ms for time_ms, _ in events)
    for (time_ms, event), so_far in itertools.islice(zip(events, running, strict=True), _TOP):
        rows.append(
            [
                cell(event),
                str(event.count),
                f"{time_ms:.2f}",
                f"{time_ms / total:.1%}",
                f"{so_far / total:.1%}",
            ]
        )
    found.tables[
        f"The {_TOP} most costly kernels of an update ({shape}, {tokens:,} tokens a micro-batch)"
    ] = rows
    found.claim("the profile of an update names kernels", "some", str(len(events)), len(events) > 0)
