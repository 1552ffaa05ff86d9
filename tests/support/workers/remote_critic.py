"""Run by torchrun: one update of a critic-server's critic; every rank writes the answers it
received."""

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from common.clients.critic import CriticClient
from common.process.loop_thread import LoopThread
from common.settings.config import load
from learning.ranks import Ranks, end
from tests.support.batches.critic import make_batch
from tests.support.batches.groups import known
from trainer.policy.critic import value_function


def main(directory: Path, settings: list[str]) -> None:
    torch.set_num_threads(1)
    config = load(settings, {})
    with Ranks.from_env(join_s=400) as ranks, ExitStack() as stack:
        client, loop = None, None
        if ranks.is_rank_zero:  # as in the trainer, only rank 0 talks to services
            loop = stack.enter_context(LoopThread())
            client = CriticClient("critic-server", f"http://127.0.0.1:{config.critic.port}")
            stack.callback(lambda: loop.call(client.close()))
        function = value_function(config, ranks, client, loop, f"run of rank {ranks.rank}")
        function.restore(None)
        assert not any(values.any() for values in known(function.values(make_batch(5))))
        metrics = function.start_update(make_batch(6), seed=3)()
        assert metrics is not None
        values = np.concatenate(known(function.values(make_batch(5))))
        (directory / f"told{ranks.rank}.json").write_text(
            json.dumps({"metrics": asdict(metrics), "values": [float(value) for value in values]})
        )
        ranks.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    end()
