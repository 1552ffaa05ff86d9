"""Run by torchrun: one step of learning from groups that only rank 0 has; every rank writes what it
had and found.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from common.settings.config import load
from common.wire.codec import decode_groups
from common.wire.schemas import Group
from learning.ranks import Ranks, end
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.policy.critic import CriticMetrics, value_function
from trainer.policy.learn import distributed_batch, learn
from trainer.policy.policy import Policy, PolicyUpdate
from trainer.policy.reference import Reference


def numbers(update: PolicyUpdate, critic: CriticMetrics | None) -> dict[str, float]:
    """Returns the metrics of an update."""
    of_critic = asdict(critic) if critic else {}
    return asdict(update.metrics) | {f"critic {name}": of_critic[name] for name in of_critic}


def scored_rows(batch: Batch, update: PolicyUpdate) -> int:
    """Returns for how many rows there are log-probabilities to record."""
    return sum(row is not None for row in batch.old_logprobs or update.logprobs or [])


def weighted(groups: list[Group]) -> list[TrainingGroup]:
    """Returns groups of a batch, the last of which is reused."""
    fresh = [TrainingGroup(group) for group in groups[:-1]]
    return [*fresh, TrainingGroup(groups[-1], weight=0.5, reused=True)]


def main(directory: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    config = load(words, {})
    with Ranks.from_env(400, config) as ranks:
        policy = Policy(config, ranks)
        policy.step = 1
        critic = value_function(config, ranks, None)
        groups: list[TrainingGroup] = []
        if ranks.is_rank_zero:
            body = (directory / "groups.msgpack").read_bytes()
            groups = weighted(decode_groups(body))
        batch = distributed_batch(groups, policy)
        tokens = list(batch.tokens)
        update, metrics = learn(policy, Reference(policy), critic, batch)
        told = {
            "own": batch.own,
            "tokens": tokens,
            "update": numbers(update, metrics),
            "advantages": sum(len(row) > 0 for row in batch.advantages or []),
            "scored": scored_rows(batch, update),
        }
        (directory / f"told{ranks.rank}.json").write_text(json.dumps(told))
        ranks.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    end()
