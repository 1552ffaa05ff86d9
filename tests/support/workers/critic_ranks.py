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
from services.critic.critic import Critic
from tests.support.batches.critic import make_rows, make_sequences


def main(directory: Path, settings: list[str]) -> None:
    torch.set_num_threads(1)
    config = load(settings, {})
    with Ranks.from_env(400, config) as ranks:
        critic = Critic(config, ranks)
        critic.update(make_rows(9, seed=0), seed=0)
        saved = directory / "saved"
        critic.save(saved)
        critic = Critic(
            config, ranks, saved if ranks.is_rank_zero else None
        )  # only rank 0 has the checkpoint
        assert critic.step == 1
        critic.update(make_rows(9, seed=1), seed=1)
        sequences = make_sequences(7)
        values = [
            row if len(row) else np.full(len(sequence.completion_ids), np.nan)
            for sequence, row in zip(sequences, critic.values(sequences), strict=True)
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
