"""Updates whose packed lengths change from micro-batch to micro-batch, as in real runs:
recompilations and fragments.
"""

import json
import statistics
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._dynamo.utils import counters

from benchmarks.update import learn, random_group
from checks.gpu_check.harness import Findings
from checks.gpu_check.setting import Setting
from common.models.memory import ModelShape, trainer_memory
from common.settings.config import Config
from common.wire.schemas import Group
from learning.fitting import fitted
from learning.ranks import Ranks
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference

_LENGTHS = 12
"""Lengths that are tried, each twice."""
_WARM = 2
"""Lengths after which no graph should be compiled any more: the compiler makes a size dynamic at
its second value."""
_SLOWER = 1.2
"""How much longer a new length may take than the same one again: the median after the first
`_WARM`."""


def changing(found: Findings, setting: Setting) -> None:
    """Makes updates of one micro-batch each, every length twice, and counts the graphs that the
    compiler makes.
    """
    shape = "small" if setting.small else "0.5b"
    tokens = 512 if setting.small else 16_384
    words = ["--trainer.micro_batch_tokens", str(tokens), "--optimizer.warmup_steps", "0"]
    compiling: AbstractContextManager[Any] = nullcontext()
    if setting.small:  # a CPU compiles only when told to, and Inductor takes minutes there
        words += ["--trainer.compile", "true"]
        compiling = patch.object(torch, "compile", partial(torch.compile, backend="aot_eager"))
    config = setting.config(setting.model(shape), *words)

    rows = [["update", "tokens", "rows", "s", "s again", "graphs so far"]]
    new: list[float] = []
    again: list[float] = []
    graphs: list[int] = []
    with compiling, setting.ranks(config) as ranks:
        policy = Policy(config, ranks)
        reference = Reference(policy)
        for number in range(4 if setting.small else _LENGTHS):
            groups = _groups(config, number)
            first, _ = learn(policy, reference, groups, config)
            second, _ = learn(policy, reference, groups, config)
            new.append(first)
            again.append(second)
            graphs.append(counters["stats"]["unique_graphs"])
            size = sum(len(group.prompt_token_ids) + _completed(group) for group in groups)
            count = sum(len(group.completions) for group in groups)
            seconds = [f"{first:.2f}", f"{second:.2f}"]
            rows.append([str(number + 1), f"{size:,}", str(count), *seconds, str(graphs[-1])])
    found.tables["Updates of changing lengths"] = rows
    found.figures = {"new": new, "again": again, "graphs": graphs}

    compiles = graphs[-1] > 0
    text = f"graphs compiled for the {len(new) - _WARM} lengths after the first {_WARM}"
    late = graphs[-1] - graphs[_WARM - 1]
    found.claim(text, "0", f"{late} (in all {graphs[-1]})", late == 0 if compiles else None)
    breaks = {
        reason: count
        for kind in ("graph_break", "unimplemented")
        for reason, count in counters[kind].items()
    }
    at_limit = sum(count for reason, count in breaks.items() if "recompile limit" in reason)
    text = "functions that run uncompiled because they were compiled too often"
    found.claim(text, "0", str(at_limit), at_limit == 0)
    if breaks:
        reasons = [[reason.splitlines()[0], str(count)] for reason, count in breaks.items()]
        found.tables["Where graphs break"] = [["reason", "times"], *reasons]
    ratio = statistics.median(new[_WARM:]) / statistics.median(again[_WARM:])
    text = "an update of a new length beside the same update again: median"
    found.claim(text, f"≤ {_SLOWER}", f"{ratio:.2f}", None if setting.small else ratio <= _SLOWER)
    _memory(found, setting, config)


def _groups(config: Config, number: int) -> list[Group]:
    """Returns groups of random lengths that fit into one micro-batch; `number` is the seed."""
    rng = np.random.default_rng(number)
    shape = json.loads((Path(config.model.name) / "config.json").read_text(encoding="utf-8"))
    vocabulary = shape["vocab_size"]
    room = config.trainer.pass_tokens
    samples = config.sampling.group_size
    count = int(rng.integers(1, 5))
    share = room // count
    groups = []
    for index in range(count):
        prompt = int(rng.integers(8, max(9, share // 8)))
        mean = (share - prompt) // samples
        lengths = rng.integers(2, mean, samples)
        ids = rng.integers(10, vocabulary, prompt).tolist()
        groups.append(
            random_group(f"{number}-{index}", ids, lengths.tolist(), rng=rng, vocabulary=vocabulary)
        )
    return groups


def _completed(group: Group) -> int:
    return sum(len(each.token_ids) - 1 for each in group.completions)


def _memory(found: Findings, setting: Setting, config: Config) -> None:
    if not setting.on_gpu:
        found.not_reached(
            "memory that the allocator holds after changing lengths", "a CPU has no such allocator"
        )
        return
    shape = json.loads((Path(config.model.name) / "config.json").read_text(encoding="utf-8"))
    decided = fitted(config, Ranks.alone(config), config.model.name)
    limit = trainer_memory(ModelShape.of(shape), decided, 1).total
    allocated = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.max_memory_reserved()
    found.figures |= {"allocated": allocated, "reserved": reserved}
    lost = reserved / allocated - 1
    text = "reserved after changing lengths, within the estimate and its flat part"
    measured = (
        f"{reserved / 1e9:.2f} GB, "
        f"{lost:.0%} more than allocated at the peak ({allocated / 1e9:.2f} GB)"
    )
    found.claim(text, f"≤ {limit / 1e9:.2f} GB", measured, reserved <= limit)
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    found.claim("allocations that had to give memory back first", "0", str(retries), retries == 0)
