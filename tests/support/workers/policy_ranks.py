"""Run by torchrun: one update of a policy on the shared batch; rank 0 writes the new weights."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.settings.config import load
from common.wire.codec import decode_groups
from learning.ranks import Ranks, end
from tests.support.batches.groups import prepared
from trainer.policy.policy import Policy


def main(directory: Path, settings: list[str]) -> None:
    torch.set_num_threads(1)
    config = load(settings, {})
    groups = decode_groups((directory / "groups.msgpack").read_bytes())
    with Ranks.from_env(join_s=400) as ranks:
        policy = Policy(config, ranks)
        metrics = policy.update(prepared(policy, groups)).metrics
        new = {name: tensor.clone() for name, tensor in policy.weights()}
        if ranks.is_rank_zero:
            save_file(new, directory / "new.safetensors")
            (directory / "metrics.txt").write_text(
                f"{metrics.loss!r} {metrics.grad_norm!r} {metrics.trained_tokens}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    end()
