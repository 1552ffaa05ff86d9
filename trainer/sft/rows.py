"""Examples as tokens: rows of a prompt and its continuation, with the tokens to learn
marked.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from common.prompts.prompter import Prompter, PromptStyle, answered_text, text_ids
from common.wire.schemas import Float32, Int32, Prompt
from services.data.sft_examples import Example


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One training sequence."""

    prompt_ids: Int32
    completion_ids: Int32
    """[L] from the first answer on, including any messages between answers."""
    learned: Float32
    """[L] 1 for tokens of answers, 0 for others."""


@dataclass
class Encoder:
    """Turns examples into rows, tokenised as in generation.

    A prompt has the same tokens as in training from rewards. An answer ends with a token that ends
    generation; what a chat template adds after it is not learned. The answers of a chat share one
    row. If the template rewrites earlier messages, as that of a thinking model does, an answer gets
    a separate row, since that is what the model would read.

    Args:
        prompter: renders and tokenises prompts.
        vocabulary: size of the model's vocabulary.
        context: maximum length of a row in tokens; None for no limit.
    """

    prompter: Prompter
    vocabulary: int
    context: int | None

    def rows(self, example: Prompt) -> list[TrainingSequence]:
        """Returns the rows of a chat that ends with an answer. Raises ConfigError when it does not
        fit the model.
        """
        rows: list[tuple[list[int], list[int], list[int]]] = []
        for before, answer in self._turns(example):
            if rows:
                prompt, completion, learned = rows[-1]
                known = len(prompt) + len(completion)
                # The template has left earlier messages as they were: one row holds the whole chat.
                if before[:known] == prompt + completion:
                    between = before[known:]
                    completion += between + answer
                    learned += [0] * len(between) + [1] * len(answer)
                    continue
            rows.append((before, list(answer), [1] * len(answer)))
        for prompt, completion, _ in rows:
            self._check(example, prompt + completion)
        return [
            TrainingSequence(_int32(prompt), _int32(completion), np.array(learned, np.float32))
            for prompt, completion, learned in rows
        ]

    def _turns(self, example: Prompt) -> Iterator[tuple[list[int], list[int]]]:
        """Yields the tokens before each answer of a chat, and the tokens of the answer."""
        style = self._style(example)
        is_chat = isinstance(example, Example) and example.is_chat
        for i, message in enumerate(example.chat):
            if message["role"] == "assistant":
                asked = {
                    "prompt": example.chat[i - 1]["content"],
                    "chat": example.chat[:i] if i > 1 or is_chat else [],
                }
                yield self._split(example.model_copy(update=asked), message, style)

    def _style(self, example: Prompt) -> PromptStyle:
        """Returns the style with the example's tools as a variable of the chat template."""
        style = self.prompter.style
        tools = example.tools if isinstance(example, Example) else []
        if not tools:
            return style
        variables = {**style.chat_template_kwargs, "tools": tools}
        style = replace(style, chat_template_kwargs=variables)
        style.check(self.prompter.tokenizer)
        return style

    def _split(
        self, asked: Prompt, answer: Mapping[str, Any], style: PromptStyle
    ) -> tuple[list[int], list[int]]:
        tokenizer = self.prompter.tokenizer
        before, after = answered_text(asked, answer, style, tokenizer)
        prompt, both = text_ids([before, before + after], style, tokenizer)
        own = both[len(prompt) :]
        # Generation never produces a token across the end of the prompt.
        if both[: len(prompt)] != prompt:
            own = tokenizer(after, add_special_tokens=False).input_ids
        stop_ids = set(self.prompter.stop_token_ids)
        ends = [place for place, token in enumerate(own) if token in stop_ids]
        if ends:
            # A template may add further end tokens, such as an eos_token after the last message.
            while len(ends) > 1 and not _text(tokenizer, own[ends[-2] + 1 : ends[-1]]):
                ends.pop()
            return prompt, own[: ends[-1] + 1]
        eos: int | None = tokenizer.eos_token_id
        return prompt, [*own, self.prompter.stop_token_ids[0] if eos is None else eos]

    def _check(self, example: Prompt, tokens: list[int]) -> None:
        if not tokens or max(tokens) >= self.vocabulary:
            raise ConfigError(
                f"{example.id} has the token {max(tokens, default=-1)}, but the model has only "
                f"{self.vocabulary} tokens",
                field="model.name",
                value=self.prompter.tokenizer.name_or_path,
                remedy="use the tokenizer that belongs to the model",
            )
        if self.context is not None and len(tokens) > self.context:
            raise ConfigError(
                f"{example.id} has {len(tokens)} tokens with its answer, and the model's context "
                f"has only {self.context}",
                field="data.source",
                value=example.prompt,
                remedy="shorten it or leave it out (data.map), or use a model with a longer "
                "context",
            )


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Returns the text of tokens, without special tokens and space around it."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text.strip()


def _int32(tokens: Sequence[int]) -> Int32:
    return np.array(tokens, np.int32)


class Batches:
    """An endless stream of examples, each once per epoch, in an order that depends only on the
    seed.
    """

    def __init__(
        self, examples: Sequence[Sequence[TrainingSequence]], size: int, seed: int
    ) -> None:
        self._examples = examples
        self._size = size

        @lru_cache(maxsize=1)
        def order(epoch: int) -> NDArray[np.int64]:
            """Returns the order of the examples in an epoch."""
            return np.random.default_rng([seed, epoch]).permutation(len(examples))

        self._order = order

    def __len__(self) -> int:
        """Returns the number of examples in an epoch."""
        return len(self._examples)

    def indices(self, step: int, last: int) -> list[int]:
        """Returns which examples are in the batch after `step` steps; the stream ends before the
        position `last`.
        """
        found: list[int] = []
        for place in range(step * self._size, min((step + 1) * self._size, last)):
            epoch, within = divmod(place, len(self._examples))
            found.append(int(self._order(epoch)[within]))
        return found

    def rows(self, indices: Sequence[int]) -> list[TrainingSequence]:
        """Returns the rows of the examples at `indices`."""
        return list(chain.from_iterable(self._examples[index] for index in indices))
