"""Run by torchrun: two updates of a critic; rank 0 writes the new weights, and every rank writes
the values of its rows, NaN for the others."""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from common.settings.config import load
from learning.ranks import Ranks, end
from learning.sharding import full, named_tensors
from tests.support.batches.critic import make_batch
from trainer.policy.critic import Critic, value_function


def main(directory: Path, settings: list[str]) -> None:
    torch.set_num_threads(1)
    config = load(settings, {})
    with Ranks.from_env(400, config) as ranks:
        critic = value_function(config, ranks, None)
        critic.update(make_batch(9), seed=0)
        saved = directory / "saved"
        for folder, snapshot in critic.snapshots(gathered=True).items():
            if ranks.is_rank_zero:
                snapshot.write(saved / folder)
        # Only rank 0 has the checkpoint.
        critic = value_function(config, ranks, saved if ranks.is_rank_zero else None)
        assert isinstance(critic, Critic)
        assert critic.step == 1
        critic.update(make_batch(9, seed=1), seed=1)
        batch = make_batch(7)
        values = [
            found if len(found) else np.full(row.completion_tokens, np.nan)
            for row, found in zip(batch.rows, critic.values(batch), strict=True)
        ]
        np.save(directory / f"values{ranks.rank}.npy", np.concatenate(values))
        new = {
            name: full(p.detach()).clone() for name, p in named_tensors(critic.model.module).items()
        }
        if ranks.is_rank_zero:
            save_file(new, directory / "new.safetensors")
        # as in the trainer: a rank that ends first would close the others' connections
        ranks.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    end()
