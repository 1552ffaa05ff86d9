"""Run by torchrun: scores one long row, and its gradient, on ranks that compute it together or own
the experts together.

`long_row.py DIRECTORY MODEL SETTINGS`, where SETTINGS is JSON of settings by name. Rank 0
writes log-probabilities, entropies and the gradient summed over the ranks, and every rank how many
tokens its layers read and how much it exchanged.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from common.settings.config import Config, from_mapping
from common.settings.sections import ModelSection
from learning.ranks import Ranks, end
from learning.sharding import full
from trainer.policy.scorer import Scorer, load_scorer

PROMPT = 96
ANSWERS = (4_001, 7)
VOCABULARY = 300


class Exchanged(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed for mypy here
    """Counts the numbers that all-to-all exchanges carry."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "_c10d_functional::all_to_all_single":
            self.numbers += args[0].numel()
        return func(*args, **(kwargs or {}))


def loaded(model: str, ranks: Ranks) -> Scorer:
    return load_scorer(ModelSection(name=model), ranks, Config())


def scored(scorer: Scorer, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Scores a prompt with a long and a short answer; returns scores and gradients by name."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCABULARY, PROMPT).astype(np.int32)
    answers = [rng.integers(3, VOCABULARY, size).astype(np.int32) for size in ANSWERS]
    rows = scorer.layout.of([prompt, prompt], answers)
    targets = torch.from_numpy(np.concatenate(answers).astype(np.int64))
    weights = torch.from_numpy(rng.normal(size=len(targets)).astype(np.float32))

    scores = scorer(rows, targets, 0.8, entropy_gradient=True)
    (scores.logprobs * weights + scores.entropy).mean().backward()
    ranks.sum_gradients(scorer.model)

    found = {"logprobs": scores.logprobs.detach(), "entropy": scores.entropy.detach()}
    for name, parameter in scorer.model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = full(parameter.grad)
    return found


def main(directory: Path, model: str, config: Config) -> None:
    torch.set_num_threads(1)
    with Ranks.from_env(join_s=400, config=config) as ranks:
        scorer = loaded(model, ranks)
        widths: list[int] = []
        layer = scorer.model.get_decoder().layers[0]
        layer.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))

        with Exchanged() as exchanged:
            found = scored(scorer, ranks)

        report = {"widths": widths, "exchanged": exchanged.numbers}
        (directory / f"{ranks.rank}.json").write_text(json.dumps(report))
        if ranks.is_rank_zero:
            save_file(found, directory / "scored.safetensors")
        ranks.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], from_mapping(json.loads(sys.argv[3])))
    end()
