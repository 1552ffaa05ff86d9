"""Run by torchrun: trains several policies on several ranks, one after the other; rank 0 writes the
results of each.

`python sharding_worker.py DIRECTORY CASES`, where CASES is JSON: name -> {"settings": [...],
"updates": N, "resume": DIRECTORY, "save": DIRECTORY, ...}. These directories are relative to
DIRECTORY. "peak": true measures loading alone. "hidden": true shows the directories to rank 0 only.
"groups": [[...], ...] are the groups of each update. "low": true computes in bfloat16, as on a GPU. "whole": BYTES limits the size of gradients of the
whole model. "apart": DIRECTORY is where the other ranks find their files. "messages": true writes the number of collective operations by name. "parked": true
parks everything after an update.
"""

import json
import os
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

import common.models.memory
import trainer.policy.lora
import trainer.policy.policy
import trainer.policy.scorer
from common.settings.config import Config, load
from learning.ranks import Ranks, end
from learning.sharding import local
from tests.support.batches.groups import known, off_policy_groups, prepared, save, with_experts
from trainer.policy import scorer
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference
from trainer.policy.scorer import load_scorer
from trainer.weights.gpu_lease import GpuLease

_WHOLE = common.models.memory.WHOLE_GRADIENTS_BYTES


class Messages(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed for mypy here
    """Counts collective operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def learned(
    policy: Policy,
    updates: int,
    reference: Reference | None = None,
    parked: bool = False,
    groups: Sequence[Sequence[int]] = (),
) -> list[list[float]]:
    """Makes the updates and returns the loss, gradient norm and KL of each. `groups` are the numbers
    of the groups of each update.
    """
    lease = GpuLease(policy.ranks, lambda: [policy.resident(), known(reference).resident()])
    found, reference = [], reference or Reference(policy)
    for numbers in groups or [(0, 3)] * updates:
        batch = [off_policy_groups()[i] for i in numbers]
        if policy.scorer.routers is not None:
            batch = with_experts(batch, policy.scorer.routers)
        metrics = policy.update(prepared(policy, batch, reference=reference)).metrics
        policy.step += 1
        reference.refresh(policy)
        found.append([metrics.loss, metrics.grad_norm, metrics.kl_reference])
        if parked:
            lease.release()
            held = [
                tensor
                for tensor in policy.optimizer.state_dict().values()
                if local(tensor).untyped_storage().nbytes()
            ]
            held += [
                tensor
                for tensor in policy.model.parameters()
                if local(tensor).untyped_storage().nbytes()
            ]
            assert held == [], f"{len(held)} tensors are not parked"
            lease.acquire()
    return found


def run(
    directory: Path, name: str, case: dict[str, Any], config: Config, ranks: Ranks
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    if (
        case.get("hidden") and not ranks.is_rank_zero
    ):  # paths are relative, so this acts like a node with its own disk
        os.chdir("/")
    if "apart" in case and not ranks.is_rank_zero:
        os.chdir(case["apart"])
    if case.get("low"):
        for module in (trainer.policy.scorer, trainer.policy.lora, trainer.policy.policy):
            module.computes_in_bfloat16 = lambda *_: True  # type: ignore[attr-defined]
    common.models.memory.WHOLE_GRADIENTS_BYTES = case.get("whole", _WHOLE)
    if "resume" in case:
        policy, state, saved = Policy.resume(config, ranks, Path(case["resume"]))
        assert state is not None
        assert (policy.step, state.position) == (2, 7)
    else:
        policy, saved = Policy(config, ranks), None
    reference = Reference(policy, saved)
    with Messages() if case.get("messages") else nullcontext() as messages:
        metrics = learned(
            policy,
            case.get("updates", 3),
            reference,
            parked=case.get("parked", False),
            groups=case.get("groups", ()),
        )
    if messages and ranks.is_rank_zero:
        (directory / f"{name}-messages.json").write_text(json.dumps(messages.counts))
    if "save" in case:
        save(policy, Path(case["save"]) / "checkpoints", reference=reference)
    return metrics, {name: tensor.clone() for name, tensor in policy.weights()}


def main(directory: Path, cases: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    # The tests cover dynamo and autograd on sharded layers; the C++ compiler would only add
    # minutes.
    torch.compile = partial(torch.compile, backend="aot_eager")
    with Ranks.from_env(join_s=400) as base:
        for name, case in cases.items():
            os.chdir(directory)
            config = load(case["settings"], {})
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            ranks = Ranks(
                base.rank,
                base.world_size,
                base.local_rank,
                150,
                "auto",
                config.parallel.shard_size,
                context_size=config.parallel.context_size,
                expert_size=config.parallel.expert_size,
            )
            if case.get("peak"):  # bytes that loading added to the process's peak
                with patch.object(
                    scorer, "check_batch_independence", lambda *_, **__: set()
                ):  # a pass, as the updates make
                    kept = load_scorer(config.model, ranks, config)
                after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                (directory / f"{name}-{ranks.rank}.txt").write_text(str((after - before) * 1024))
                del kept
                continue
            metrics, weights = run(directory, name, case, config, ranks)
            save_file(weights, directory / f"{name}-{ranks.rank}.safetensors")
            if ranks.is_rank_zero:
                (directory / f"{name}.json").write_text(json.dumps(metrics))
        base.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    end()
