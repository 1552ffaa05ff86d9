"""`python -m examples.coding_agent.base DIRECTORY [--seed N]`: makes a tiny model that repairs
without reading what is wrong.

Writes the tasks to DIRECTORY/tasks and the model to DIRECTORY/base. The model has learnt from
conversations how to call the tool, which file to edit and how to submit, but the operator that it
puts there is any of the four.
"""

import argparse
import itertools
import logging
import random
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast

from examples.coding_agent.agent import BASH, SUBMITTED, SYSTEM
from examples.coding_agent.tasks import NAMES, OPERATORS, Repair, write_all
from examples.tool_calculator.base import CHAT_TEMPLATE, MARKS
from trainer.cli.tiny_base import Row, make_model, make_tokenizer, save, warm_start

STEPS = 300
BATCH = 32


def conversation(repair: Repair, operator: str) -> list[dict[str, Any]]:
    """Returns the messages of an episode in which the agent puts an operator into the function."""

    def called(command: str) -> dict[str, Any]:
        function = {"name": "bash", "arguments": {"command": command}}
        call = {"type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": repair.instruction},
        called(repair.command(operator)),
        {"role": "tool", "content": ""},
        called(f"echo {SUBMITTED}"),
    ]


def row(
    messages: list[dict[str, Any]], tools: list[Any], tokenizer: PreTrainedTokenizerFast
) -> Row:
    """Returns the tokens of a conversation, as the gateway records them; the model learns what it
    writes itself.
    """

    def text(count: int, begins: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages[:count], tools=tools, tokenize=False, add_generation_prompt=begins
            )
        )

    tokens: list[int] = []
    labels: list[int] = []
    before = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = text(index, begins=True)
        whole = text(index + 1, begins=False)
        answer_text = whole[len(prompt) :].removesuffix("\n")
        context = tokenizer(prompt[len(before) :]).input_ids
        answer = tokenizer(answer_text).input_ids
        tokens += context + answer
        labels += [-100] * len(context) + answer
        before = prompt + answer_text
    return tokens, labels


def build(
    directory: Path,
    seed: int = 0,
    console: Console | None = None,
    steps: int = STEPS,
    batch: int = BATCH,
) -> None:
    """Writes the tasks, and the model unless it exists."""
    console = console or Console(stderr=True)
    write_all(directory / "tasks", seed)
    if (directory / "base" / "config.json").exists():
        return
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    rng = random.Random(seed)

    cases = list(itertools.product(NAMES, OPERATORS, OPERATORS.values()))
    chats = [conversation(Repair(name, verb, "+"), operator) for name, verb, operator in cases]
    corpus = [str(message) for chat in chats for message in chat]
    tokenizer = make_tokenizer(iter(corpus), CHAT_TEMPLATE, MARKS)
    model = make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    rows = [row(chat, [BASH], tokenizer) for chat in chats]

    def batch_of(_: int) -> list[Row]:
        return rng.sample(rows, batch)

    warm_start(model, batch_of, steps, tokenizer.pad_token_id, console)
    save(directory / "base", model, tokenizer, console)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="examples.coding_agent.base", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    build(options.directory, options.seed)
