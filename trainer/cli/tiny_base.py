"""Tiny base model of the built-in task: a Qwen2 of about 125,000 parameters with its own tokenizer.

It is warm-started on worked and, in the end, mostly bare answers. The result is an "instruct base"
that knows the arithmetic but rarely shows its working; reinforcement learning teaches it to.
"""

import itertools
import logging
import math
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from services.data.tiny import TinyProblem, problems

END = "<|endoftext|>"
START = "<|im_start|>"
TURN_END = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROBLEMS = 8000
STEPS = 800
BATCH = 32
BARE = 0.2
"""Share of bare answers at first: mostly worked ones teach the arithmetic."""
BARE_LATE = 0.8
"""Share of bare answers from step LATE × STEPS on: they teach the habit of answering without
working."""
LATE = 0.8
MUON_LR = 8e-3
ADAM_LR = 4e-3
MAX_GRAD_NORM = 1.0


def make_tokenizer(
    corpus: Iterator[str], chat_template: str = CHAT_TEMPLATE, special_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE of at most 420 tokens with single digits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[END, START, TURN_END, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END,
        chat_template=chat_template,
        model_max_length=512,
    )


def make_model(vocab_size: int, eos: int, pad: int) -> Qwen2ForCausalLM:
    """Returns a model with random weights from torch's current generator."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


Row = tuple[list[int], list[int]]
"""Token ids, and their labels: the token itself, or -100 if it is not learned."""
# Token ids of one problem: prompt, solution, bare answer.
_Example = tuple[list[int], list[int], list[int]]


def _encode(tokenizer: PreTrainedTokenizerFast, problem: TinyProblem) -> _Example:
    chat = [{"role": "user", "content": problem.question}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    worked = problem.solution + TURN_END
    bare = f"#### {problem.answer}{TURN_END}"
    return tokenizer(prompt).input_ids, tokenizer(worked).input_ids, tokenizer(bare).input_ids


def answered(prompt: list[int], target: list[int]) -> Row:
    """Returns the row of a prompt and the target to learn."""
    return prompt + target, [-100] * len(prompt) + target


def _batch(rows: list[Row], pad: int) -> tuple[Tensor, Tensor]:
    """Returns right-padded input ids and labels, [B, T]."""
    ids = [torch.tensor(token_ids) for token_ids, _ in rows]
    labels = [torch.tensor(row_labels) for _, row_labels in rows]
    return (
        pad_sequence(ids, batch_first=True, padding_value=pad),
        pad_sequence(labels, batch_first=True, padding_value=-100),
    )


def warm_start(
    model: Qwen2ForCausalLM,
    batch_of: Callable[[int], list[Row]],
    steps: int,
    pad: int,
    console: Console,
) -> None:
    """Trains on the labels of `batch_of(step)`: Muon for the hidden matrices, AdamW for the rest,
    cosine schedule.
    """
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_hidden_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_hidden_matrix else rest).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MUON_LR, adjust_lr_fn="match_rms_adamw", weight_decay=0.0),
        torch.optim.AdamW(rest, lr=ADAM_LR, weight_decay=0.0),
    ]

    def cosine(step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * step / steps))

    schedules = [torch.optim.lr_scheduler.LambdaLR(each, cosine) for each in optimizers]
    model.train()
    for step in range(steps):
        inputs, labels = _batch(batch_of(step), pad)
        hidden = model.model(inputs, attention_mask=inputs != pad).last_hidden_state
        targets = labels[:, 1:]
        logits = model.lm_head(hidden[:, :-1][targets != -100])  # only where something is learned
        loss = nn.functional.cross_entropy(logits, targets[targets != -100])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            console.print(f"warm start: step {step + 1}/{steps}, loss {loss.item():.3f}")


def save(
    directory: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, console: Console
) -> None:
    """Writes a model atomically; keeps one that another process has written in the meantime."""
    partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    try:
        partial.rename(directory)
    except OSError:  # another process was faster
        if not (directory / "config.json").exists():
            raise
        shutil.rmtree(partial)
    count = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"tiny base model: {count:,} parameters in {directory}")


def build(directory: Path, seed: int = 0, console: Console | None = None) -> None:
    """Builds the base model in `directory` unless it exists; atomic."""
    console = console or Console(stderr=True)
    if (directory / "config.json").exists():
        return
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    texts = list(itertools.islice(problems("train", seed), PROBLEMS))
    corpus = [f"{START}user\n{p.question}{START}assistant\n{p.solution}" for p in texts]
    tokenizer = make_tokenizer(iter(corpus))
    model = make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    examples = [_encode(tokenizer, problem) for problem in texts]

    def batch_of(step: int) -> list[Row]:
        share = BARE if step < LATE * STEPS else BARE_LATE
        rows = []
        for prompt, worked, bare in rng.sample(examples, BATCH):
            target = bare if rng.random() < share else worked
            rows.append(answered(prompt, target))
        return rows

    warm_start(model, batch_of, STEPS, pad=tokenizer.pad_token_id, console=console)
    save(directory, model, tokenizer, console=console)
