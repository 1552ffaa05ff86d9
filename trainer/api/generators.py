"""Where an evaluation's answers come from: the embedded engine on a local model, SGLang, or an OpenAI-compatible server."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx

from common.clients import Client, Unreachable
from common.errors import ConfigError, ServiceError
from common.rollout_client import GenerationFailed, RolloutClient
from common.schemas import FinishReason, Prompt
from common.sections import ModelSection
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model
from trainer.policy.scorer import load_model, load_tokenizer, quiet
from trainer.rollouts.evaluation import SEED_OFFSET
from trainer.rollouts.prompts import Prompter, conversation, sampling_seed

_T = TypeVar("_T")
_FIRST_ANSWER_S = 15.0
"""How long a server may take to answer at all."""


@dataclass(frozen=True)
class Written:
    """One answer of a model."""

    text: str
    finish_reason: FinishReason
    tokens: int | None
    """Its length, the end-of-sequence token included; None where the server does not say."""


@dataclass(frozen=True)
class Sampling:
    """What every request of an evaluation has in common."""

    system_prompt: str
    max_new_tokens: int
    temperature: float
    """Of the k samples; the first answer to every problem is greedy."""
    seed: int
    timeout_s: float
    """Seconds one request may take, retries included."""
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(64))
    """Requests in flight."""


class Generator(Protocol):
    """Answers problems."""

    async def write(self, prompt: Prompt, index: int, n: int, greedy: bool) -> list[Written]:
        """n answers to the problem at `index` of the data set. Raises ServiceError when they cannot be had."""


class TokenGenerator:
    """SGLang's `/generate`, tokens in and tokens out, exactly as in training.

    Args:
        client: of the engine or of the router in front of it.
        prompter: of the model's tokenizer.
        sampling: of the evaluation.
        context: tokens that a prompt and its answer have together; None where only the server knows. What the prompt
            leaves of it bounds an answer.
    """

    def __init__(self, client: RolloutClient, prompter: Prompter, sampling: Sampling, context: int | None) -> None:
        self._client, self._prompter, self._sampling, self._context = client, prompter, sampling, context

    async def write(self, prompt: Prompt, index: int, n: int, greedy: bool) -> list[Written]:
        """See `Generator`."""
        sampling, ids = self._sampling, self._prompter.token_ids(prompt)
        async with sampling.places:
            answers = await self._client.answers(
                ids,
                n=n,
                max_new_tokens=min(sampling.max_new_tokens, self._room(prompt, len(ids))),
                temperature=0.0 if greedy else sampling.temperature,
                stop_token_ids=self._prompter.stop_token_ids,
                sampling_seed=sampling_seed(sampling.seed, SEED_OFFSET + index),
                deadline_s=sampling.timeout_s,
                logprobs=False,
            )
        return [self._written(prompt, answer) for answer in answers]

    @staticmethod
    def _written(prompt: Prompt, answer: dict[str, Any]) -> Written:
        try:
            text, meta = answer["text"], answer["meta_info"]
            finish, tokens = meta["finish_reason"]["type"], int(meta["completion_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise GenerationFailed(f"this is no answer of /generate: {error!r}", value=answer) from None
        return _finished(prompt, text, finish, tokens)

    def _room(self, prompt: Prompt, length: int) -> int:
        if self._context is None:
            return self._sampling.max_new_tokens
        if (room := self._context - length) < 1:
            raise ConfigError(
                f"the problem {prompt.id} has {length} tokens, and the model's context is {self._context}",
                field="dataset",
                value=prompt.prompt,
                remedy="leave it out, or take a model with a longer context",
            )
        return room


class ChatGenerator:
    """OpenAI's `/v1/chat/completions`."""

    def __init__(self, client: Client, model_id: str, sampling: Sampling) -> None:
        self._client, self._model_id, self._sampling = client, model_id, sampling

    async def write(self, prompt: Prompt, index: int, n: int, greedy: bool) -> list[Written]:
        """See `Generator`. Every answer is a request of its own: not every server takes `n`."""
        first = sampling_seed(self._sampling.seed, SEED_OFFSET + index)
        seeds = [(first + 0x9E3779B1 * number) & 0x7FFFFFFF for number in range(n)]
        return await together([self._one(prompt, seed, greedy) for seed in seeds])

    async def _one(self, prompt: Prompt, seed: int, greedy: bool) -> Written:
        sampling = self._sampling
        body: dict[str, Any] = {
            "model": self._model_id,
            "messages": conversation(prompt, sampling.system_prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if greedy else sampling.temperature,
        }
        if not greedy:
            body["seed"] = seed
        async with sampling.places:
            response = await self._client.request("POST", "/v1/chat/completions", json=body, deadline_s=sampling.timeout_s)
        try:
            content = response.json()
            (choice,) = content["choices"]
            text, finish = choice["message"]["content"], choice["finish_reason"]
            tokens = (content.get("usage") or {}).get("completion_tokens")
        except (ValueError, KeyError, TypeError) as error:
            raise GenerationFailed(f"this is no answer of a chat completion: {error!r}", value=response.text) from None
        return _finished(prompt, text, finish, tokens)


def _finished(prompt: Prompt, text: Any, finish: Any, tokens: int | None) -> Written:
    """Raises GenerationFailed for an answer that was aborted or filtered: it is not an empty one."""
    if finish not in ("stop", "length") or not isinstance(text, str):
        raise GenerationFailed(f"the answer to {prompt.id} ended with {finish}", value=text)
    return Written(text, finish, tokens)


@asynccontextmanager
async def local_generator(model: str, prompts: Sequence[Prompt], sampling: Sampling) -> AsyncIterator[Generator]:
    """The embedded engine on a model directory, or on a model of the hub. Raises ConfigError when it does not load."""
    with tempfile.TemporaryDirectory(prefix="rlhf-math-") as temporary:
        loaded = await asyncio.to_thread(_load, model, Path(temporary), prompts, sampling)
        engine = Engine(loaded, seed=sampling.seed)
        app = make_app(engine)
        prompter = Prompter(loaded.tokenizer, sampling.system_prompt, loaded.eos_ids)
        async with (
            app.router.lifespan_context(app),
            RolloutClient("engine", "http://in-process", transport=httpx.ASGITransport(app)) as client,
        ):
            yield TokenGenerator(client, prompter, sampling, loaded.max_context_tokens)


def _load(model: str, temporary: Path, prompts: Sequence[Prompt], sampling: Sampling) -> Model:
    """The engine's model, with room for the longest problem and its answer, or as much of it as the model has."""
    section = ModelSection(name=model)
    prompter = Prompter(load_tokenizer(section), sampling.system_prompt, [])
    longest = max(len(prompter.token_ids(prompt)) for prompt in prompts)
    directory = Path(model)
    if not (directory / "config.json").is_file():
        loaded: Any = load_model(section)
        loaded.save_pretrained(directory := temporary)
        prompter.tokenizer.save_pretrained(directory)
    quiet()
    return Model(directory, longest + sampling.max_new_tokens)


@asynccontextmanager
async def sglang_generator(url: str, tokenizer: str, api_key: str | None, sampling: Sampling) -> AsyncIterator[Generator]:
    """SGLang, or its router, at `url`; `tokenizer` is a directory or a name on the hub."""
    prompter = Prompter(load_tokenizer(ModelSection(name=tokenizer)), sampling.system_prompt, [])
    async with RolloutClient("the server", _root(url), headers=_bearer(api_key)) as client:
        await _ask(client, "/get_model_info")  # asks for the key, which /health does not
        yield TokenGenerator(client, prompter, sampling, None)


@asynccontextmanager
async def openai_generator(url: str, model_id: str | None, api_key: str | None, sampling: Sampling) -> AsyncIterator[Generator]:
    """An OpenAI-compatible server at `url`, with or without `/v1`; asks it for its one model when `model_id` is None."""
    async with Client("the server", _root(url), headers=_bearer(api_key)) as client:
        listed = await _ask(client, "/v1/models")
        yield ChatGenerator(client, model_id or _only_model(listed, url), sampling)


async def together(work: Sequence[Coroutine[Any, Any, _T]], done: Callable[[], None] = lambda: None) -> list[_T]:
    """Results in order; `done` is called at each. The first failure ends the rest and is raised."""

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


def _bearer(api_key: str | None) -> dict[str, str]:
    """The key of a server that is named by hand: only what was given for it, never the token of a run."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


async def _ask(client: Client, path: str) -> httpx.Response | None:
    """The first call, so that a wrong address shows in seconds. None when the server does not know `path`."""
    try:
        return await client.request("GET", path, deadline_s=_FIRST_ANSWER_S)
    except Unreachable as error:
        raise Unreachable(
            error.message,
            field="model",
            value=client.base_url,
            remedy="look whether the server runs and is ready, and whether address and port are right",
        ) from None
    except ServiceError as error:
        if error.status in (401, 403):
            raise ConfigError(
                error.message, field="api_key", remedy="give the key of this server (--api-key-env on the command line)"
            ) from None
        return None


def _only_model(listed: httpx.Response | None, url: str) -> str:
    try:
        ids = [str(card["id"]) for card in listed.json()["data"]] if listed else []
    except (ValueError, KeyError, TypeError):
        ids = []
    if len(ids) != 1:
        raise ConfigError(
            f"the server has the models {', '.join(ids)}" if ids else "the server does not say which model it has",
            field="model_id",
            value=url,
            remedy="name one (--model-id on the command line)",
        )
    return ids[0]
