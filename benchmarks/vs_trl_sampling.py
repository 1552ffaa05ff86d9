"""Do both halves of `benchmarks.vs_trl_learning` sample from the policy? Sampling may differ
although their updates agree.

With a correct sampler, the log-probability of the next token plus the entropy of its distribution
is zero on average, whatever the prefix. So is the sum over a completion. Completions are
independent, so the mean over all of them in standard errors is a z-score. The benchmark measures it
on the completions that this trainer trained on right after each checkpoint of a run kept with
`--out`, and on as many that transformers' `generate` draws from the same checkpoints and prompts
with the settings TRL gives it.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.command import command_parser
from benchmarks.vs_trl_learning import padded, recorded, settings
from common.settings.config import Config
from common.wire.schemas import Group
from learning.layout import Padded
from trainer.algorithms.losses import row_sum
from trainer.policy.scorer import Scorer, load_tokenizer, quiet, stop_token_ids


def surplus(model: Any, pairs: list[tuple[list[int], list[int]]]) -> Tensor:
    """Returns the sum of log-probability + entropy [completions] of each (prompt, completion)
    pair.
    """
    rows = Padded.of(
        *([np.array(tokens, np.int32) for tokens in part] for part in zip(*pairs, strict=True))
    )
    lengths = torch.tensor([len(completion) for _, completion in pairs])
    targets = torch.tensor([token for _, completion in pairs for token in completion])
    with torch.inference_mode():
        scores = Scorer(model)(rows, targets, temperature=1.0)
    which = torch.arange(len(pairs)).repeat_interleave(lengths)
    return row_sum((scores.logprobs + scores.entropy).double(), which, len(pairs))


def generated(model: Any, config: Config, groups: list[Group]) -> list[tuple[list[int], list[int]]]:
    """Draws as many completions of the same prompts with `generate`, called as by TRL."""
    tokenizer = load_tokenizer(config.model)
    stops = stop_token_ids(model, tokenizer)
    prompts = [group.prompt_token_ids.tolist() for group in groups for _ in group.completions]
    inputs = padded(tokenizer, prompts)
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=config.sampling.max_new_tokens,
            eos_token_id=stops,
        )
    drawn = output[:, inputs["input_ids"].shape[1] :].tolist()
    ends = [
        next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        for tokens in drawn
    ]
    return [
        (prompt, tokens[:end]) for prompt, tokens, end in zip(prompts, drawn, ends, strict=True)
    ]


def main() -> None:
    parser = command_parser("vs_trl_sampling", __doc__)
    parser.add_argument("runs", type=Path, help="the --out directory of vs_trl_learning")
    parser.add_argument(
        "--seeds", type=int, default=5, help="number of runs, from seed 0 (default 5)"
    )
    parser.add_argument(
        "--steps", type=int, default=40, help="the --steps of the runs (default 40)"
    )
    parser.add_argument(
        "--every", type=int, default=10, help="the --every of the runs (default 10)"
    )
    options = parser.parse_args()
    quiet()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sums: dict[str, list[Tensor]] = {"ours": [], "generate, as TRL calls it": []}
    steps = range(0, options.steps, options.every)
    points = list(itertools.product(range(options.seeds), steps))
    for seed, step in track(points, description="scoring"):
        place = options.runs / f"ours-{seed}"
        config = settings(place, seed, steps=options.steps, every=options.every)
        path = place / "checkpoints" / f"step_{step:06d}" if step else config.model.name
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        start = step * config.trainer.batch_size
        groups = recorded(config)[start : start + config.trainer.batch_size]
        own = []
        for group in groups:
            prompt = group.prompt_token_ids.tolist()
            own += [(prompt, completion.token_ids.tolist()) for completion in group.completions]
        for label, pairs in zip(sums, (own, generated(model, config, groups)), strict=True):
            sums[label].append(surplus(model, pairs))
    for label, parts in sums.items():
        values = torch.cat(parts)
        error = float(values.std()) / math.sqrt(len(values))
        mean = float(values.mean())
        Console().print(
            f"{label}: {mean:+.5f} ± {error:.5f} nats a completion, "
            f"z {mean / error:+.2f} ({len(values)} completions)"
        )


if __name__ == "__main__":
    main()
