"""Measures the update alone: tokens per second, MFU and peak memory, on models of real shapes.

Each measurement is one GRPO update with random weights and random tokens in the shape of Qwen2.5:
`--tokens` prompt and completion tokens in groups of `--group`, with heavy-tailed completions of
`--completion` tokens on average. Each case
runs in a separate process. FLOPs are those the update needs: 6 per parameter and token (a shared
prompt counts once, the head for completion tokens only), and the attention. MFU is the share of the
peak in the GPU's data sheet (bfloat16, dense); on a CPU, of the measured rate of a large float32
matrix product.

`--trl` adds the step of TRL's GRPOTrainer on exactly the same tokens, without generation, in
`.venv-trl`, which `make bench-trl` creates.
"""

import argparse
import itertools
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.command import command_parser, setting_words
from benchmarks.processes import TRL_PYTHON, calling, require_trl, run
from common.errors import ConfigError
from common.process.cli import fail
from common.settings.config import Config, load
from common.wire.schemas import Completion, Group
from learning.ranks import Ranks
from trainer.algorithms.batch import Batch, TrainingGroup
from trainer.algorithms.compute_advantages import compute_advantages
from trainer.cli.tiny_base import make_tokenizer
from trainer.policy.policy import Policy
from trainer.policy.reference import Reference
from trainer.policy.scorer import load_tokenizer, quiet
from trainer.policy.update_metrics import UpdateMetrics

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 8192,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "vocab_size": 151_936,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "vocab_size": 151_936,
    },
    "7b-layers": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 4,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
    },
    "32b-layers": {
        "hidden_size": 5120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 4,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 8192,
    },
    "30b-a3b-layers": {
        "hidden_size": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "vocab_size": 8192,
    },
    "small-moe": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "vocab_size": 1024,
    },
    "small-hybrid": {
        "model_type": "qwen3_5_text",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "vocab_size": 8192,
    },
    "small-mamba": {
        "model_type": "bamba",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "attn_layer_indices": [3],
        "num_attention_heads": 4,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_chunk_size": 64,
        "vocab_size": 8192,
    },
    "small-sinks": {
        "model_type": "gpt_oss",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "vocab_size": 8192,
    },
    "small-caps": {
        "model_type": "gemma2",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "head_dim": 32,
        "sliding_window": 128,
        "vocab_size": 8192,
    },
    "small-mla": {
        "model_type": "deepseek_v3",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "vocab_size": 8192,
    },
}
"""The shapes of Qwen2.5, and some for CPUs; two heads of keys and values unless given, tied
embeddings.

`-layers` are a few layers of Qwen2.5-7B and 32B and of Qwen3-30B-A3B under a small vocabulary, so
that the layers are what is measured.
"""
GROUPS = 4
"""Groups of a full micro-batch (`full_groups`)."""
_PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}
"""bfloat16 FLOP/s without sparsity, from the makers' data sheets."""


@dataclass(frozen=True)
class Case:
    """One measurement."""

    model: str
    """Directory."""
    tokens: int
    group: int
    prompt: int
    completion: int
    settings: list[str]
    repeats: int
    processor: bool = False
    """Measure processor seconds, which a busy machine does not change."""


@dataclass(frozen=True)
class Result:
    """Measurements of one case."""

    seconds: float
    """Median seconds of an update."""
    tokens: int
    """Prompt and completion tokens of the batch; a prompt counts once per completion."""
    flops: float
    peak: float
    """FLOP/s at 100 % utilisation."""
    memory: int
    """Peak bytes: of the GPU, or of the process on a CPU."""


def make_model(shape: str, directory: Path, device: torch.device | str = "cpu") -> None:
    """Creates a random model of this shape with the built-in tokenizer; large models faster on a
    GPU.
    """
    quiet()
    torch.manual_seed(0)
    tokenizer = make_tokenizer(iter(["How many apples now? 1 2 3", "#### 12"]))
    sizes: dict[str, Any] = {"num_key_value_heads": 2, **SHAPES[shape]}
    kind = sizes.pop("model_type", "qwen3_moe" if "num_experts" in sizes else "qwen2")
    config = AutoConfig.for_model(
        kind,
        **sizes,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def random_group(
    name: str,
    prompt: list[int],
    lengths: list[int],
    rng: np.random.Generator,
    vocabulary: int,
    text: str = "",
) -> Group:
    """Returns a group of random completions; every second one is right."""
    completions = [
        Completion(
            token_ids=rng.integers(10, vocabulary, length).astype(np.int32),
            logprobs=np.full(length, -np.log(vocabulary), np.float32),
            text="",
            finish_reason="stop",
            weight_versions=[(0, 0, length)],
            reward=float(i % 2),
            correct=bool(i % 2),
        )
        for i, length in enumerate(lengths)
    ]
    ids = np.array(prompt, np.int32)
    return Group(
        id=name,
        prompt_id=name,
        prompt=text,
        ground_truth="",
        prompt_token_ids=ids,
        completions=completions,
    )


def full_groups(config: Config, ranks: int = 1) -> list[Group]:
    """Returns groups of random tokens, with a heavy tail of lengths, that exactly fill two
    micro-batches of every rank.
    """
    rng = np.random.default_rng(0)
    size = config.sampling.group_size
    shape = json.loads((Path(config.model.name) / "config.json").read_text(encoding="utf-8"))
    vocabulary = shape["vocab_size"]
    together = config.parallel.context_size
    tokens = together * config.trainer.pass_tokens // GROUPS
    prompt = min(200, tokens // 4)
    shares = rng.lognormal(0.0, 0.8, size)
    # The last token of a completion is not computed.
    lengths = 2 + (shares / shares.sum() * (tokens - prompt - size)).astype(int)
    lengths[-1] += tokens - prompt - (lengths - 1).sum()
    groups = []
    for number in range(2 * ranks // together * GROUPS):
        ids = rng.integers(10, vocabulary, prompt).tolist()
        group = random_group(str(number), ids, lengths.tolist(), rng=rng, vocabulary=vocabulary)
        groups.append(group)
    return groups


def make_groups(case: Case, tokenizer: Any) -> list[Group]:
    """Returns groups that use up the token budget; their prompts are tokenized texts."""
    vocabulary = len(tokenizer)
    rng = np.random.default_rng(0)
    groups: list[Group] = []
    left = case.tokens
    while left > 0:
        tail = rng.lognormal(-0.32, 0.8, case.group) * case.completion  # mean 1
        lengths = np.clip(tail.astype(int), 16, 8 * case.completion)
        left -= int(lengths.sum()) + case.group * case.prompt
        text = tokenizer.decode(rng.integers(10, vocabulary, case.prompt))
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        group = random_group(
            str(len(groups)), prompt, lengths.tolist(), rng=rng, vocabulary=vocabulary, text=text
        )
        groups.append(group)
    return groups


def tokens_of(groups: list[Group]) -> int:
    """Returns the prompt and completion tokens; a prompt counts once per completion."""
    return sum(
        len(group.prompt_token_ids) + len(each.token_ids)
        for group in groups
        for each in group.completions
    )


def required_flops(groups: list[Group], model: Any) -> float:
    """Returns the floating-point operations of the forward and backward passes.

    Of a mixture's experts, those count to which a token is routed.
    """
    config = model.config
    head = config.vocab_size * config.hidden_size
    # The embedding is a lookup.
    body = sum(parameter.numel() for parameter in model.get_decoder().parameters()) - head
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if count:
        experts = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 3)
        body -= experts - experts * config.num_experts_per_tok // count
    computed = 0
    completion_tokens = 0
    pairs = 0
    for group in groups:
        prompt = len(group.prompt_token_ids)
        lengths = [len(completion.token_ids) for completion in group.completions]
        computed += prompt + sum(lengths)
        completion_tokens += sum(lengths)
        pairs += prompt**2 // 2 + sum(length * prompt + length**2 // 2 for length in lengths)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * width * pairs
    return float(6 * (body * computed + head * completion_tokens) + attention)


def measure(case: Case) -> Result:
    """Measures a case."""
    settings = {
        "model.name": case.model,
        "algorithm.advantage": "group_centred",
        "optimizer.warmup_steps": 0,
    }
    config = load([*setting_words(settings), *case.settings], {})
    with Ranks.from_env(600, config) as ranks:
        policy = Policy(config, ranks)
        reference = Reference(policy)
        groups = make_groups(case, load_tokenizer(config.model))
        flops = required_flops(groups, policy.model)
        clock = time.process_time if case.processor else time.perf_counter
        seconds = [
            learn(policy, reference, groups, config, clock)[0] for _ in range(case.repeats + 1)
        ]
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if ranks.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated()
        return Result(
            seconds=statistics.median(seconds[1:]),
            tokens=tokens_of(groups),
            flops=flops,
            peak=peak(ranks.device),
            memory=memory,
        )


def write_result(case: dict[str, Any], path: str) -> None:
    """Measures a case in a process of its own."""
    Path(path).write_text(json.dumps(asdict(measure(Case(**case)))))


def learn(
    policy: Policy,
    reference: Reference,
    groups: list[Group],
    config: Config,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, UpdateMetrics]:
    """Makes an update on these groups; returns its seconds and metrics."""
    batch = Batch.of([TrainingGroup(group) for group in groups], config, policy.step)
    start = clock()
    batch.old_logprobs = policy.logprobs(batch)
    batch.ref_logprobs = reference.logprobs(batch)
    batch.advantages, _ = compute_advantages(batch, config, policy.kl_coef)
    metrics = policy.update(batch).metrics
    policy.step += 1
    if policy.ranks.device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start, metrics


def peak(device: torch.device) -> float:
    """Returns the FLOP/s at 100 % utilisation. Raises ConfigError for a GPU with an unknown data
    sheet.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, rate in _PEAKS.items():
            if part in name:
                return rate
        raise ConfigError(
            "the peak of this GPU is not known",
            value=name,
            remedy="add it to _PEAKS of benchmarks/update.py",
        )
    left = torch.randn(2048, 2048)
    right = torch.randn(2048, 2048)
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        left @ right
        rates.append(2 * 2048**3 / (time.perf_counter() - start))
    return max(rates)


def trl_seconds(case: Case, directory: Path) -> float:
    """Returns the median seconds of TRL's step on the same tokens, which replace generation."""
    from benchmarks.trl_side import Job  # this module imports the graders

    groups = make_groups(case, load_tokenizer(load(["--model.name", case.model], {}).model))
    completions = [
        completion.token_ids.tolist() for group in groups for completion in group.completions
    ]
    steps = case.repeats + 1
    settings = {
        "per_device_train_batch_size": len(completions),
        "gradient_accumulation_steps": 1,
        "num_generations": case.group,
        "max_completion_length": 8 * case.completion,
        "shuffle_dataset": False,
        "learning_rate": 1e-6,
        "beta": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    prompts = [
        {"ids": group.prompt_token_ids.tolist(), "text": group.prompt, "answer": "0"}
        for group in groups
    ] * steps
    job = Job(
        model=case.model,
        output=str(directory),
        seed=0,
        save_every=steps + 1,
        settings=settings,
        learning_rates=[1e-6] * steps,
        prompts=prompts,
        completions=completions * steps,
    )
    run(directory / "output.txt", TRL_PYTHON, "-m", "benchmarks.trl_side", job.write())
    seconds: list[float] = json.loads((directory / "log.json").read_text())["seconds"]
    return statistics.median(seconds[1:])


def main() -> None:
    parser = command_parser("benchmarks.update", __doc__)
    gpu = torch.cuda.is_available()
    parser.add_argument(
        "--shape", nargs="+", choices=SHAPES, default=["0.5b", "1.5b"] if gpu else ["small"]
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[4096, 8192, 16_384, 32_768] if gpu else [4096, 8192],
    )
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt (default 8)")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt (default 200)")
    parser.add_argument(
        "--completion", type=int, default=400, help="mean tokens of a completion (default 400)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="updates that are timed (default 3)")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="WORDS",
        help="extra settings, another row",
    )
    parser.add_argument(
        "--processor",
        action="store_true",
        help="measure processor seconds, which a busy machine does not change",
    )
    parser.add_argument(
        "--trl", action="store_true", help="also measure TRL's step (float32 on a CPU)"
    )
    options = parser.parse_args()
    try:
        compare(options)
    except ConfigError as error:
        fail(error)


def _in_process_of_its_own(case: Case, folder: Path) -> Result:
    result = folder / "result.json"
    command = calling(write_result, asdict(case), str(result))
    run(folder / "output.txt", sys.executable, *command)
    return Result(**json.loads(result.read_text()))


def compare(options: argparse.Namespace) -> None:
    """Measures everything and prints the table."""
    if options.trl:
        require_trl()
    columns = ("s/update", "tokens/s", "TFLOP/s", "MFU", "peak GB", "of TRL's step")
    table = Table("shape", "tokens", "settings", *columns)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for shape in options.shape:
            make_model(shape, folder / shape)
            variants = ["", *options.variant]
            for tokens, variant in itertools.product(options.tokens, variants):
                case = Case(
                    model=str(folder / shape),
                    tokens=tokens,
                    group=options.group,
                    prompt=options.prompt,
                    completion=options.completion,
                    settings=variant.split(),
                    repeats=options.repeats,
                    processor=options.processor,
                )
                found = _in_process_of_its_own(case, folder)
                of_trl = ""
                if options.trl and not variant:
                    trl_s = trl_seconds(case, folder / f"trl-{shape}-{tokens}")
                    of_trl = f"{found.seconds / trl_s:.2f}"
                rate = found.flops / found.seconds
                table.add_row(
                    shape,
                    f"{found.tokens:,}",
                    variant,
                    f"{found.seconds:.3f}",
                    f"{found.tokens / found.seconds:,.0f}",
                    f"{rate / 1e12:.3f}",
                    f"{rate / found.peak:.1%}",
                    f"{found.memory / 1e9:.2f}",
                    of_trl,
                )
    device = f"CPU, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    console = Console()
    console.print(f"{device}, torch {torch.__version__}")
    console.print(table)


if __name__ == "__main__":
    main()
