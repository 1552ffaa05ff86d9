"""Generates the answers of an evaluation."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from common import Json
from common.clients.rollout import GenerationFailed, RolloutClient
from common.errors import ConfigError
from common.prompts.prompter import Prompter
from common.settings.config import Config
from common.wire.schemas import Prompt
from trainer.rollouts.requests import GeneratedAnswer, sampling_seed

_T = TypeVar("_T")
Slots = AbstractAsyncContextManager[Any]
SEED_OFFSET = 1 << 20
"""Separates the seeds of evaluation from those of training."""


def sampling_of(config: Config, greedy: bool) -> Json:
    """Returns the temperature, the truncation and the stop conditions, under SGLang's names."""
    ends = config.sampling.stop_conditions()
    if greedy:
        return {"temperature": 0.0, **ends}
    # Where evaluations are greedy (0), samples for pass@k are drawn at training's temperature.
    temperature = config.evaluation.temperature or config.sampling.temperature
    return {"temperature": temperature, **ends, **config.evaluation.truncation()}


def longest_answer(config: Config) -> int:
    """Returns the limit of an answer in tokens."""
    return config.evaluation.max_new_tokens or config.sampling.max_new_tokens


class Generator(Protocol):
    """Generates answers to problems."""

    async def generate(
        self, prompt: Prompt, index: int, n: int, greedy: bool
    ) -> list[GeneratedAnswer]:
        """Returns n answers to the problem at `index` of the data set. Raises ServiceError when one
        is missing.
        """


class TokenGenerator:
    """Generates through SGLang's `/generate`, tokens in and tokens out, exactly as in training.

    Args:
        client: the engine or the router.
        prompter: makes the tokens of prompts.
        config: its sections `sampling` and `evaluation`, and the seed.
        context: limits the total tokens of a prompt and its answer; None leaves that to the server.
        slots: a semaphore that limits the requests in flight.
    """

    def __init__(
        self,
        client: RolloutClient,
        prompter: Prompter,
        config: Config,
        context: int | None = None,
        slots: Slots | None = None,
    ) -> None:
        self._client = client
        self._prompter = prompter
        self._config = config
        self._context = context
        self._slots = slots or nullcontext()

    async def generate(
        self, prompt: Prompt, index: int, n: int, greedy: bool
    ) -> list[GeneratedAnswer]:
        config = self._config
        (tokenised,) = self._prompter.tokenised([prompt])
        parameters = sampling_of(config, greedy)
        async with self._slots:
            answers = await self._client.answers(
                tokenised.token_ids,
                n=n,
                max_new_tokens=self._room(prompt, len(tokenised.token_ids)),
                temperature=parameters.pop("temperature"),
                stop_token_ids=self._prompter.stop_token_ids,
                sampling_seed=sampling_seed(config.seed, SEED_OFFSET + index),
                parameters=parameters,
                logprobs=False,
            )
        return [_parsed(prompt, tokenised.answer_start, answer) for answer in answers]

    def _room(self, prompt: Prompt, length: int) -> int:
        """Returns how many tokens an answer to a prompt of `length` tokens may have."""
        longest = longest_answer(self._config)
        if self._context is None:
            return longest
        room = self._context - length
        if room < 1:
            raise ConfigError(
                f"the problem {prompt.id} has {length} tokens, and the model's context has only "
                f"{self._context}",
                field="dataset",
                value=prompt.prompt,
                remedy="leave it out, or use a model with a longer context",
            )
        return min(longest, room)


def _parsed(prompt: Prompt, start: str, answer: Any) -> GeneratedAnswer:
    """Returns an answer of `/generate`, whose text begins with `start`. Raises GenerationFailed
    when it is incomplete.
    """
    try:
        text = start + answer["text"]
        meta = answer["meta_info"]
        finish_reason = meta["finish_reason"]["type"]
        tokens = int(meta["completion_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise GenerationFailed(
            f"this is not an answer of /generate: {error!r}", value=answer
        ) from None
    return finished(
        prompt,
        text,
        finish_reason,
        tokens=tokens,
        token_ids=answer.get("output_ids"),
    )


def finished(
    prompt: Prompt,
    text: Any,
    finish: Any,
    tokens: int | None,
    token_ids: Sequence[int] | None = None,
) -> GeneratedAnswer:
    """Returns a complete answer. Raises GenerationFailed for an aborted or filtered one: it does
    not count as empty.
    """
    # An answer that reached its limit is complete: it counts as it is.
    if finish not in ("stop", "length") or not isinstance(text, str):
        raise GenerationFailed(f"the answer to {prompt.id} ended with {finish}", value=text)
    return GeneratedAnswer(text, finish, tokens, token_ids)


async def together(
    work: Sequence[Coroutine[Any, Any, _T]], done: Callable[[], None] = lambda: None
) -> list[_T]:
    """Runs coroutines concurrently, with `done` after each; returns the results in order. Raises
    the first failure.
    """

    async def one(coroutine: Coroutine[Any, Any, _T]) -> _T:
        result = await coroutine
        done()
        return result

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(coroutine)) for coroutine in work]
    except BaseExceptionGroup as failed:
        # The group has cancelled the others: callers handle one error, not a group of them.
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
