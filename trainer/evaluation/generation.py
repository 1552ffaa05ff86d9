"""Generates the answers of an evaluation."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from common.clients.rollout import GenerationFailed, RolloutClient
from common.errors import ConfigError
from common.prompts.prompter import Prompter, PromptStyle
from common.settings.sections import SamplingSection
from common.wire.schemas import Prompt
from trainer.rollouts.requests import GeneratedAnswer, sampling_seed

_T = TypeVar("_T")
SEED_OFFSET = 1 << 20
"""Separates the seeds of evaluation from those of training."""


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of all requests of an evaluation."""

    style: PromptStyle
    max_new_tokens: int
    temperature: float
    """Temperature of the sampled answers."""
    seed: int
    timeout_s: float
    """Limit of one request, retries included."""
    cuts: Mapping[str, Any] = field(default_factory=dict)
    """Settings that truncate the sampling distribution of sampled answers, by SGLang's names."""
    sampling: SamplingSection = field(default_factory=SamplingSection)
    """What ends an answer."""
    slots: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)
    """A semaphore that limits the requests in flight."""


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

    `context` limits the total tokens of a prompt and its answer; None leaves that to the server.
    """

    def __init__(
        self,
        client: RolloutClient,
        prompter: Prompter,
        settings: GenerationSettings,
        context: int | None,
    ) -> None:
        self._client = client
        self._prompter = prompter
        self._settings = settings
        self._context = context

    async def generate(
        self, prompt: Prompt, index: int, n: int, greedy: bool
    ) -> list[GeneratedAnswer]:
        settings = self._settings
        prompt_ids = self._prompter.token_ids(prompt)
        parameters = settings.sampling.stop_conditions()
        if not greedy:
            parameters = {**parameters, **settings.cuts}
        async with settings.slots:
            answers = await self._client.answers(
                prompt_ids,
                n=n,
                max_new_tokens=min(settings.max_new_tokens, self._room(prompt, len(prompt_ids))),
                temperature=0.0 if greedy else settings.temperature,
                stop_token_ids=self._prompter.stop_token_ids,
                sampling_seed=sampling_seed(settings.seed, SEED_OFFSET + index),
                parameters=parameters,
                deadline_s=settings.timeout_s,
                logprobs=False,
            )
        return [self._parsed(prompt, answer) for answer in answers]

    def _parsed(self, prompt: Prompt, answer: Any) -> GeneratedAnswer:
        """Returns an answer of `/generate`. Raises GenerationFailed when it is incomplete."""
        try:
            text = answer["text"]
            meta = answer["meta_info"]
            finish_reason = meta["finish_reason"]["type"]
            tokens = int(meta["completion_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise GenerationFailed(
                f"this is not an answer of /generate: {error!r}", value=answer
            ) from None
        return finished(
            prompt,
            self._prompter.style.prefill + text,
            finish_reason,
            tokens=tokens,
            token_ids=answer.get("output_ids"),
        )

    def _room(self, prompt: Prompt, length: int) -> int:
        """Returns how many tokens an answer to a prompt of `length` tokens may have."""
        if self._context is None:
            return self._settings.max_new_tokens
        room = self._context - length
        if room < 1:
            raise ConfigError(
                f"the problem {prompt.id} has {length} tokens, and the model's context has only "
                f"{self._context}",
                field="dataset",
                value=prompt.prompt,
                remedy="leave it out, or use a model with a longer context",
            )
        return room


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
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
