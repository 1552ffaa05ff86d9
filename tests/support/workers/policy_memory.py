"""Run by torchrun with DIRECTORY and MODEL: one update, after which each rank writes the bytes it
holds."""

import json
import sys
from pathlib import Path

import torch

from common.settings.config import load
from learning.ranks import Ranks, end
from learning.sharding import local
from tests.support.batches.groups import off_policy_groups, prepared
from trainer.policy.policy import Policy


def held(policy: Policy) -> dict[str, int]:
    """Returns this rank's bytes of weights, gradients and optimiser tensors (without step
    counts)."""
    parameters = list(policy.model.parameters())
    moments = [
        tensor
        for name, tensor in policy.optimizer.state_dict().items()
        if not name.endswith(".step")
    ]
    return {
        "weights": sum(local(parameter).nbytes for parameter in parameters),
        "gradients": sum(
            local(parameter.grad).nbytes for parameter in parameters if parameter.grad is not None
        ),
        "optimizer": sum(local(tensor).nbytes for tensor in moments),
    }


def main(directory: Path, model: str) -> None:
    torch.set_num_threads(1)
    config = load(["--model.name", model], {})
    with Ranks.from_env(join_s=400) as ranks:
        policy = Policy(config, ranks)
        policy.update(prepared(policy, off_policy_groups()))
        (directory / f"{ranks.rank}.json").write_text(json.dumps(held(policy)))
        ranks.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    end()
