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

TRACES = 128
PROBLEMS = 2048
HELD_OUT = 256
STEPS = 320
BATCH = 32
LATE = 0.8
"""Until step LATE × STEPS nearly all conversations call the tool; after that most guess, which
forms a habit."""
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:"
    "{% for tool in tools %} {{ tool.function.name }}{% endfor %}"
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
    rng = random.Random(f"calculator {seed}")
    different: dict[Problem, None] = {}
    while len(different) < count:
        different[Problem(rng.randint(1000, 9999), rng.randint(1000, 9999))] = None
    return list(different)


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
    user = {"role": "user", "content": problem.question}
    call = {"type": "function", "function": {"name": "multiply", "arguments": problem._asdict()}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "multiply", "content": problem.answer}

    def text(chat: list[dict[str, Any]], offered: list[Any]) -> str:
        return str(
            tokenizer.apply_chat_template(
                chat, tools=offered, tokenize=False, add_generation_prompt=True
            )
        )

    def ids(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text).input_ids
        return tokens

    question_text = text([user], tools)
    whole_text = text([user, called, result], tools)
    call_end = whole_text.index(TURN_END, len(question_text)) + len(TURN_END)
    question = ids(question_text)
    tool_call = ids(whole_text[len(question_text) : call_end])
    tool_result = ids(whole_text[call_end:])
    answer = ids(f"#### {problem.answer}{TURN_END}")

    # The model learns what it writes itself: the call and the answer.
    tokens = question + tool_call + tool_result + answer
    labels = [-100] * len(question) + tool_call + [-100] * len(tool_result) + answer
    return Conversations(
        called=(tokens, labels),
        guessed=answered(question, answer),
        alone=answered(ids(text([user], [])), answer),
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
    _write(directory / "problems" / "train.jsonl", made[TRACES:-HELD_OUT])
    _write(directory / "problems" / "test.jsonl", made[-HELD_OUT:])
    if (directory / "base" / "config.json").exists():
        return
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    text = (
        '{"name": "multiply", "arguments": {"a": 1, "b": 1}}'
        "#### 1 * 1 = ?system\nuser\nassistant\nTools: multiply"
    )
    tokenizer = make_tokenizer(iter([text] * 9), CHAT_TEMPLATE, MARKS)
    model = make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    traces = [conversations(problem, tokenizer) for problem in made[:TRACES]]
    called = [trace.called for trace in traces]
    guessed = [trace.guessed for trace in traces]
    alone = [trace.alone for trace in traces]

    def batch_of(step: int) -> list[Row]:
        guesses = 0 if step < LATE * steps else batch * 2 // 3
        return [
            *rng.sample(called, batch - guesses),
            *rng.sample(guessed, guesses),
            *rng.sample(alone, batch // 8),
        ]

    warm_start(model, batch_of, steps, tokenizer.pad_token_id, console)
    save(directory / "base", model, tokenizer, console)


def _write(path: Path, part: list[Problem]) -> None:
    rows = [{"question": problem.question, "answer": problem.answer} for problem in part]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="examples.tool_calculator.base", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    build(options.directory, options.seed)
