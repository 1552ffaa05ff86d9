"""What does routing replay change? `python -m benchmarks.routing [--steps 6] [--experts 64]`.

Trains a random mixture of experts by the real path, in one process: embedded engine, client,
replay-buffer, batches, updates. |Δ log-probability| is that of engine and trainer for the sampled
tokens, before the update on them, as a run records it. The trainer computes in float32. The engine
does too, or rounds weights and states to bfloat16, as engines on GPUs do. Where a router is nearly
tied, the rounding of float32 tips choices too.

`bytes a token` is what a stored group takes for each token that was computed, beside a group
without experts; `CPU-s a step` is the median of the steps after the first, of generation and
update together. `shifted` is a fault planted on
purpose: every token gets the experts of the token before. Needs the tokenizer of the tiny base
model (`make demo` creates it).
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

import services.engine.model
from benchmarks.command import command_parser, figures_table, setting_words
from benchmarks.processes import ROOT
from common.settings.config import load
from common.wire.schemas import Group
from learning.routing import Routers, Routes
from trainer.algorithms.batch import Batch
from trainer.observe.run_dir import read_lines
from trainer.policy.policy import Policy, PolicyUpdate
from trainer.start.in_process import train_in_process

BASE = ROOT / ".cache" / "tiny-base"
"""Whose tokenizer is used."""
_CASES = (
    ("random", torch.float32, "trainer's own"),
    ("random", torch.float32, "replayed"),
    ("random", torch.float32, "shifted"),
    ("nearly tied", torch.float32, "trainer's own"),
    ("nearly tied", torch.float32, "replayed"),
    ("random", torch.bfloat16, "trainer's own"),
    ("random", torch.bfloat16, "replayed"),
)
"""The router of the model, the precision of the engine, and the experts that the trainer uses."""


def write_model(directory: Path, experts: int, *, tied: bool, tokenizer: Path = BASE) -> None:
    """Writes a random Qwen3-MoE of four layers, of which a token uses eight experts each. If
    `tied`, the scores of a token's experts differ in the fourth digit.
    """
    base = AutoConfig.from_pretrained(tokenizer)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=base.vocab_size,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=base.max_position_embeddings,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=base.eos_token_id,
        pad_token_id=base.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    if tied:
        with torch.no_grad():
            for layer in model.model.layers:
                gate = layer.mlp.gate.weight
                gate.copy_(gate.mean(0) * len(gate) ** 0.5 + 1e-3 * gate)
    model.save_pretrained(directory)
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "generation_config")):
            shutil.copy(file, directory)


@contextmanager
def engine_in(dtype: torch.dtype) -> Iterator[None]:
    """Makes the embedded engine compute in this precision, on a CPU too."""
    with patch.object(services.engine.model, "dtype_on", lambda *_: dtype):
        yield


@contextmanager
def shifted_by_one(wanted: bool) -> Iterator[None]:
    """If `wanted`, gives every token the experts of the token before."""
    read = Routers.read

    def shifted(routers: Routers, *arguments: Any) -> Routes:
        routes = read(routers, *arguments)
        moved = np.roll(np.concatenate(routes), 1, axis=0)
        return Routes(moved[: len(routes.prompt)], moved[len(routes.prompt) :])

    with patch.object(Routers, "read", shifted if wanted else read):
        yield


class Watched:
    """What the updates of a run are given, and what they find."""

    def __init__(self) -> None:
        self.differences: list[np.ndarray] = []
        """|Δ log-probability| of the tokens of each completion."""
        self.groups: list[Group] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        update = Policy.update

        def watched(policy: Policy, batch: Batch) -> PolicyUpdate:
            self.groups += batch.fresh
            found = update(policy, batch)
            for row, logprobs in zip(batch.tokens.values(), found.logprobs or [], strict=False):
                if logprobs is not None:
                    self.differences.append(np.abs(logprobs - row.rollout_logprobs))
            return found

        with patch.object(Policy, "update", watched):
            yield


def bytes_of_experts(groups: list[Group]) -> float:
    """Returns the bytes that the experts of groups take for each token that was computed."""
    size = 0
    tokens = 0
    for group in groups:
        size += group.prompt_routed_experts.nbytes
        tokens += len(group.prompt_token_ids)
        for completion in group.completions:
            size += completion.routed_experts.nbytes
            tokens += len(completion.token_ids) - 1
    return size / tokens


def run(model: Path, directory: Path, steps: int, **settings: Any) -> Watched:
    words = {
        "config": ROOT / "jobgroup/configs/tiny-cpu.yaml",
        "model.name": model,
        "trainer.run_dir": directory,
        "state_dir": directory / "state",
        "trainer.max_steps": steps,
        "evaluation.samples": 0,
        "optimizer.learning_rate": 1e-3,
        "algorithm.entropy_coef": 0.01,  # a random model earns no rewards, but has a gradient
        "reward.workers": 1,
        **settings,
    }
    watched = Watched()
    with watched():
        train_in_process(load(setting_words(words), {}), Console(quiet=True))
    return watched


def main() -> None:
    parser = command_parser("benchmarks.routing", __doc__)
    parser.add_argument("--steps", type=int, default=6, help="updates of each run")
    parser.add_argument("--experts", type=int, default=64, help="experts of a layer")
    options = parser.parse_args()

    table = figures_table(
        f"{options.experts} experts, 8 for a token, 4 layers; {options.steps} steps",
        ("router", "engine", "experts", "mean |Δ|", "max |Δ|", "bytes a token", "CPU-s a step"),
        text_columns=3,
    )
    with tempfile.TemporaryDirectory(prefix="rlhf-math-") as scratch:
        for number, (router, dtype, experts) in enumerate(_CASES):
            model = Path(scratch) / router
            if not model.exists():
                write_model(model, options.experts, tied=router == "nearly tied")
            directory = Path(scratch) / str(number)
            replays = {"trainer.routing_replay": experts != "trainer's own"}
            with engine_in(dtype), shifted_by_one(experts == "shifted"):
                watched = run(model, directory, options.steps, **replays)
            records = read_lines(directory / "metrics.jsonl")[1:]
            differences = np.concatenate(watched.differences)
            table.add_row(
                router,
                str(dtype).removeprefix("torch."),
                experts,
                f"{differences.mean():.2g}",
                f"{differences.max():.2g}",
                f"{bytes_of_experts(watched.groups):.0f}",
                f"{statistics.median(record['cpu_seconds'] for record in records):.2f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
