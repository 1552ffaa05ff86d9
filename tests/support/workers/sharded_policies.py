"""Run by torchrun: several policies on several ranks, one after the other; rank 0 writes what each came to.

`python sharding_worker.py DIRECTORY CASES`, where CASES is JSON: name -> {"settings": [...], "updates": N, "resume": DIRECTORY,
"save": DIRECTORY, "peak": true for what loading alone needs, "hidden": true where only rank 0 sees these directories}. They are
relative to DIRECTORY. "low": true computes in bfloat16, as on a GPU.
"""

import json
import os
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import trainer.policy.lora
import trainer.policy.policy
import trainer.policy.scorer
from common.config import Config, load
from learning.ranks import Ranks, end
from tests.support.groups import off_policy_groups, prepared, save
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference
from trainer.policy.scorer import load_scorer


def learned(policy: Policy, updates: int, reference: Reference | None = None) -> list[list[float]]:
    """Loss, gradient norm and KL of every update."""
    found, reference = [], reference or Reference(policy)
    for _ in range(updates):
        metrics = policy.update(prepared(policy, [off_policy_groups()[i] for i in (0, 3)], reference=reference)).metrics
        reference.refresh(policy)
        found.append([metrics.loss, metrics.grad_norm, metrics.kl_reference])
    return found


def run(case: dict[str, Any], config: Config, ranks: Ranks) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    if case.get("hidden") and not ranks.first:  # paths are relative, so this is a node with a disk of its own
        os.chdir("/")
    if case.get("low"):
        for module in (trainer.policy.scorer, trainer.policy.lora, trainer.policy.policy):
            module.computes_low = lambda *_: True  # type: ignore[attr-defined]
    if "resume" in case:
        policy, state, saved = Policy.resume(config, ranks, Path(case["resume"]))
        assert state is not None
        assert (policy.step, state.position) == (2, 7)
    else:
        policy, saved = Policy(config, ranks), None
    reference = Reference(policy, saved)
    metrics = learned(policy, case.get("updates", 3), reference)
    if "save" in case:
        save(policy, Path(case["save"]) / "checkpoints", reference=reference)
    return metrics, {name: tensor.clone() for name, tensor in policy.weights()}


def main(directory: Path, cases: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    # What dynamo and autograd make of sharded layers is at stake here, not minutes of C++ compiler.
    torch.compile = partial(torch.compile, backend="aot_eager")
    with Ranks.from_env(timeout_s=400) as base:
        for name, case in cases.items():
            os.chdir(directory)
            config = load(case["settings"], {})
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            ranks = Ranks(base.rank, base.world_size, base.local_rank, 150, "auto", config.trainer.shard_size)
            if case.get("peak"):  # bytes that loading added to the most this process ever had
                kept = load_scorer(config.model, ranks, config.trainer)
                after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                (directory / f"{name}-{ranks.rank}.txt").write_text(str((after - before) * 1024))
                del kept
                continue
            metrics, weights = run(case, config, ranks)
            save_file(weights, directory / f"{name}-{ranks.rank}.safetensors")
            if ranks.first:
                (directory / f"{name}.json").write_text(json.dumps(metrics))
        base.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    end()
