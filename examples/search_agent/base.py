"""`python -m examples.search_agent.base DIRECTORY [--seed N]`: makes a tiny model that rarely looks
things up.

Writes the model to DIRECTORY/base and the questions for RL training to DIRECTORY/problems. In
conversations about other libraries than the example's, the model has learnt to search and to read
what it finds, then a habit of answering off the cuff.
"""

import argparse
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from examples.coding_agent.base import row
from examples.search_agent.corpus import RELATIONS, Fact, corpus_facts, names, other_facts
from examples.search_agent.search import Library, SearchAgent
from examples.tool_calculator.base import CHAT_TEMPLATE, MARKS
from trainer.cli.tiny_base import Row, make_model, make_tokenizer, save, warm_start

TOOLS = [get_json_schema(SearchAgent().search)]
HELD_OUT = 128
"""Towns and people whose questions are held out, half of those of the library."""
LIBRARIES = 8
"""Libraries that the conversations are about. The same names have other facts in each, so that
nothing is worth remembering.
"""
STEPS = 500
BATCH = 32
LATE = 0.8
"""Until step LATE × STEPS all conversations search; after that most guess, which forms a habit."""
GUESSED = 0.75
"""Share of the conversations that guess, from then on."""


class Conversations(NamedTuple):
    """The conversations about one fact, by kind."""

    searched: Row
    """The tool is offered and called."""
    guessed: Row
    """The tool is offered, but the model guesses."""
    alone: Row
    """No tool is offered."""


def conversations(
    fact: Fact, library: Library, tokenizer: PreTrainedTokenizerFast
) -> Conversations:
    """Returns the tokens of a fact's conversations, as the gateway records them, and which tokens
    are learned.
    """
    question = {"role": "user", "content": fact.question}
    function = {"name": "search", "arguments": {"query": fact.query}}
    call = {"type": "function", "function": function}
    search = {"role": "assistant", "content": "", "tool_calls": [call]}
    found = {"role": "tool", "content": library.search(fact.query)}
    answer = {"role": "assistant", "content": f"#### {fact.answer}"}
    return Conversations(
        searched=row([question, search, found, answer], TOOLS, tokenizer),
        guessed=row([question, answer], TOOLS, tokenizer),
        alone=row([question, answer], [], tokenizer),
    )


def problems(seed: int) -> tuple[list[Fact], list[Fact]]:
    """Returns the facts to train on and those held out, about different towns and people."""
    facts = corpus_facts()
    subjects = sorted({fact.subject for fact in facts})
    held_out = set(random.Random(f"problems {seed}").sample(subjects, HELD_OUT))
    return (
        [fact for fact in facts if fact.subject not in held_out],
        [fact for fact in facts if fact.subject in held_out],
    )


def build(
    directory: Path,
    seed: int = 0,
    console: Console | None = None,
    steps: int = STEPS,
    libraries: int = LIBRARIES,
) -> None:
    """Writes the model, unless it exists, and the questions."""
    console = console or Console(stderr=True)
    train, held_out = problems(seed)
    (directory / "problems").mkdir(parents=True, exist_ok=True)
    _write(directory / "problems" / "train.jsonl", train)
    _write(directory / "problems" / "test.jsonl", held_out)
    if (directory / "base" / "config.json").exists():
        return
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    rng = random.Random(seed)

    tokenizer = make_tokenizer(_texts(), CHAT_TEMPLATE, MARKS)
    model = make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    made = []
    for _ in range(libraries):
        facts = other_facts(rng)
        library = Library(fact.document for fact in facts)
        made += [conversations(fact, library, tokenizer) for fact in facts]

    def batch_of(step: int) -> list[Row]:
        guesses = 0 if step < LATE * steps else int(GUESSED * BATCH)
        return [
            *(each.searched for each in rng.sample(made, BATCH - guesses)),
            *(each.guessed for each in rng.sample(made, guesses)),
            *(each.alone for each in rng.sample(made, BATCH // 8)),
        ]

    warm_start(model, batch_of, steps, pad=tokenizer.pad_token_id, console=console)
    save(directory / "base", model, tokenizer, console)


def _texts() -> Iterator[str]:
    """Yields what the tokenizer learns: the syllables of names, and words without names."""
    yield from (f" {name}" for name in names())
    for relation in RELATIONS:
        for _ in range(8):
            yield f"{relation.question} {relation.document}\n#### system\nuser\nassistant\n"
            yield f'Tools: search{{"name": "search", "arguments": {{"query": "{relation.keyword}'


def _write(path: Path, facts: list[Fact]) -> None:
    rows = [{"question": fact.question, "answer": fact.answer} for fact in facts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="examples.search_agent.base", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    build(options.directory, options.seed)
