"""`python -m examples.tool_calculator.base DIRECTORY [--seed N]`: makes a tiny model that rarely
calls its tool.

Writes the model to DIRECTORY/base and the problems for RL training to DIRECTORY/problems. The model
has learnt to call the tool and read its result, then a habit of answering without it; occasionally
it garbles a number.
"""

import argparse
import json
import logging
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from examples.tool_calculator.calculator import Calculator
from trainer.cli.tiny_base import (
    TURN_END,
    Row,
    answered,
    make_model,
    make_tokenizer,
    save,
    warm_start,
)

TRACES, PROBLEMS, HELD_OUT = 128, 2048, 256
STEPS, LATE, BATCH = 320, 0.8, 32
"""Until step LATE × STEPS nearly all conversations call the tool; after that most guess, which
forms a habit."""
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>{{ message.content }}</tool_response>"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}{% endif %}"
    '{% for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Problem(NamedTuple):
    """Two numbers to multiply."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a} * {self.b} = ?"

    @property
    def answer(self) -> str:
        return str(self.a * self.b)


def problems(seed: int, count: int) -> list[Problem]:
    """Returns different products of two numbers of four digits."""
    rng, found = random.Random(f"calculator {seed}"), dict[Problem, None]()
    while len(found) < count:
        found[Problem(rng.randint(1000, 9999), rng.randint(1000, 9999))] = None
    return list(found)


class Conversations(NamedTuple):
    """The conversations of one problem, by kind."""

    called: Row
    """The tool is offered and called."""
    guessed: Row
    """The tool is offered, but the model guesses the product."""
    alone: Row
    """No tool is offered."""


def conversations(problem: Problem, tokenizer: PreTrainedTokenizerFast) -> Conversations:
    """Returns the tokens of a problem's conversations, as the gateway records them, and which
    tokens are learned.
    """
    tools = [get_json_schema(Calculator().multiply)]
    user, final = {"role": "user", "content": problem.question}, f"#### {problem.answer}{TURN_END}"
    call = {"type": "function", "function": {"name": "multiply", "arguments": problem._asdict()}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "multiply", "content": problem.answer}

    def text(chat: list[dict[str, Any]], offered: list[Any]) -> str:
        return str(
            tokenizer.apply_chat_template(
                chat, tools=offered, tokenize=False, add_generation_prompt=True
            )
        )

    asked, whole = text([user], tools), text([user, called, result], tools)
    end = whole.index(TURN_END, len(asked)) + len(TURN_END)
    ask, write, read, answer, ask_alone = (
        tokenizer(part).input_ids
        for part in (asked, whole[len(asked) : end], whole[end:], final, text([user], []))
    )
    learned = [-100] * len(ask) + write + [-100] * len(read) + answer
    return Conversations(
        (ask + write + read + answer, learned), answered(ask, answer), answered(ask_alone, answer)
    )


def build(
    directory: Path,
    seed: int = 0,
    console: Console | None = None,
    steps: int = STEPS,
    batch: int = BATCH,
) -> None:
    """Writes the model, unless it exists, and the problems."""
    console = console or Console(stderr=True)
    made = problems(seed, TRACES + PROBLEMS + HELD_OUT)
    (directory / "problems").mkdir(parents=True, exist_ok=True)
    for name, part in (("train", made[TRACES:-HELD_OUT]), ("test", made[-HELD_OUT:])):
        lines = [
            json.dumps({"question": each.question, "answer": each.answer}) + "\n" for each in part
        ]
        (directory / "problems" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    if (directory / "base" / "config.json").exists():
        return
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    corpus = (
        '{"name": "multiply", "arguments": {"a": 1, "b": 1}}#### 1 * 1 = ?system\nuser\nassistant\nTools: multiply',
    ) * 9
    tokenizer = make_tokenizer(iter(corpus), CHAT_TEMPLATE, MARKS)
    model = make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    called, guessed, alone = zip(
        *(conversations(problem, tokenizer) for problem in made[:TRACES]), strict=True
    )

    def batch_of(step: int) -> list[Row]:
        guesses = 0 if step < LATE * steps else batch * 2 // 3
        return [
            *rng.sample(called, batch - guesses),
            *rng.sample(guessed, guesses),
            *rng.sample(alone, batch // 8),
        ]

    warm_start(model, batch_of, steps, tokenizer.pad_token_id, console)
    save(directory / "base", model, tokenizer, console)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="examples.tool_calculator.base", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    build(options.directory, options.seed)
