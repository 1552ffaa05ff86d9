"""Reply generators for an evaluation: embedded engine, SGLang, or OpenAI-compatible server."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from common.clients.base import Client, Unreachable
from common.clients.engines import GeneratingClient
from common.clients.network import Reply
from common.clients.rollout import GenerationFailed, RolloutClient
from common.errors import ConfigError, ServiceError
from common.prompts.prompter import Prompter, PromptStyle, conversation
from common.prompts.templates import filled
from common.settings.config import Config
from common.wire.schemas import Prompt
from learning.device import choose_device
from services.engine.app import make_app
from services.engine.engine import Engine
from services.engine.model import Model
from trainer.evaluation.generation import (
    SEED_OFFSET,
    Generator,
    Slots,
    TokenGenerator,
    finished,
    longest_answer,
    sampling_of,
    together,
)
from trainer.policy.scorer import load_model, load_tokenizer, quiet
from trainer.rollouts.requests import GeneratedAnswer, sampling_seed

_C = TypeVar("_C", bound=GeneratingClient)
# Time limit for a server's first response.
_FIRST_ANSWER_S = 15.0


class ChatGenerator:
    """Uses OpenAI's `/v1/chat/completions`, or `/v1/completions` when a template replaces the
    chat.
    """

    def __init__(self, client: Client, model_id: str, config: Config, slots: Slots) -> None:
        self._client = client
        self._model_id = model_id
        self._config = config
        self._slots = slots

    async def generate(
        self, prompt: Prompt, index: int, n: int, greedy: bool
    ) -> list[GeneratedAnswer]:
        """See `Generator`. Sends one request per answer, since not every server supports `n`."""
        first = sampling_seed(self._config.seed, SEED_OFFSET + index)
        # Steps of 2³² / golden ratio keep the seeds apart from those of the next problems.
        seeds = [(first + 0x9E3779B1 * number) & 0x7FFFFFFF for number in range(n)]
        return await together([self._one(prompt, seed, greedy) for seed in seeds])

    async def _one(self, prompt: Prompt, seed: int, greedy: bool) -> GeneratedAnswer:
        config = self._config
        style = PromptStyle.of(config)
        is_chat = style.chat is not False
        body = sampling_of(config, greedy)
        body |= {"model": self._model_id, "max_tokens": longest_answer(config)}
        # The names of vLLM and SGLang; OpenAI's own API has no such fields.
        if "min_new_tokens" in body:
            body["min_tokens"] = body.pop("min_new_tokens")
        if config.sampling.stop_token_ids:
            body["stop_token_ids"] = list(config.sampling.stop_token_ids)
        if not greedy:
            body["seed"] = seed

        question = filled(style.template, prompt)
        if is_chat:
            path = "/v1/chat/completions"
            body["messages"] = conversation(prompt, style.system_prompt, question)
            if style.chat_template_kwargs:
                body["chat_template_kwargs"] = dict(style.chat_template_kwargs)
        else:
            path = "/v1/completions"
            body["prompt"] = question + style.prefill

        async with self._slots:
            response = await self._client.request("POST", path, json=body)
        try:
            content = response.json()
            (choice,) = content["choices"]
            text = choice["message"]["content"] if is_chat else style.prefill + choice["text"]
            finish = choice["finish_reason"]
            tokens = (content.get("usage") or {}).get("completion_tokens")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GenerationFailed(
                f"this is not the answer of a {'chat ' * is_chat}completion: {error!r}",
                value=response.text,
            ) from None
        return finished(prompt, text, finish, tokens=tokens)


@asynccontextmanager
async def local_generator(
    config: Config, prompts: Sequence[Prompt], slots: Slots
) -> AsyncIterator[Generator]:
    """Runs the embedded engine on `config.model.name`, a directory or a name on the hub. Raises
    ConfigError when it does not load.
    """
    with tempfile.TemporaryDirectory(prefix="rlhf-math-") as temporary:
        loaded, prompter = await asyncio.to_thread(_load, config, Path(temporary), prompts)
        prompter.stop_token_ids = sorted({*loaded.eos_ids, *config.sampling.stop_token_ids})
        app = make_app(Engine(loaded, seed=config.seed))
        async with (
            app.router.lifespan_context(app),
            RolloutClient(
                "engine",
                "http://in-process",
                transport=httpx.ASGITransport(app),
                deadline_s=config.limits.service_timeout_s,
            ) as client,
        ):
            yield TokenGenerator(client, prompter, config, loaded.max_context_tokens, slots=slots)


def _load(config: Config, temporary: Path, prompts: Sequence[Prompt]) -> tuple[Model, Prompter]:
    """Loads the engine's model with room for the longest problem and its answer, as far as the
    model allows.
    """
    device = choose_device(config.rollout.device, "device")
    prompter = Prompter(load_tokenizer(config.model), PromptStyle.of(config), [])
    longest = max(len(each.token_ids) for each in prompter.tokenised(prompts))
    directory = Path(config.model.name)
    # The engine reads files of a directory: a name on the hub is loaded, and saved as one.
    if not (directory / "config.json").is_file():
        loaded: Any = load_model(config.model)
        directory = temporary
        loaded.save_pretrained(directory)
        prompter.tokenizer.save_pretrained(directory)
    quiet()
    context = longest + longest_answer(config)
    try:
        model = Model(directory, context, device, dtype=config.model.dtype)
    except ConfigError as error:  # has the name of the engine's argument
        raise ConfigError(
            error.message, field="model.name", value=config.model.name, remedy=error.remedy
        ) from None
    return model, prompter


@asynccontextmanager
async def sglang_generator(
    url: str, config: Config, api_key: str | None, slots: Slots
) -> AsyncIterator[Generator]:
    """Connects to SGLang or its router at `url`; `config.model` names its tokenizer."""
    prompter = Prompter(
        load_tokenizer(config.model), PromptStyle.of(config), list(config.sampling.stop_token_ids)
    )
    async with _server(RolloutClient, url, config, api_key) as client:
        await _ask(client, "/get_model_info")  # needs the key, unlike /health
        yield TokenGenerator(client, prompter, config, slots=slots)


@asynccontextmanager
async def openai_generator(
    url: str, config: Config, api_key: str | None, slots: Slots, model_id: str | None
) -> AsyncIterator[Generator]:
    """Connects to an OpenAI-compatible server at `url`, with or without `/v1`; `model_id` None: its
    only model.
    """
    async with _server(GeneratingClient, url, config, api_key) as client:
        listed = await _ask(client, "/v1/models")
        model_id = model_id or _only_model(listed, url)
        yield ChatGenerator(client, model_id, config, slots)


def _server(kind: type[_C], url: str, config: Config, api_key: str | None) -> _C:
    """Returns a client with the server's own key, never the run's token."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    root = url.rstrip("/").removesuffix("/v1")
    return kind("the server", root, deadline_s=config.limits.service_timeout_s, headers=headers)


async def _ask(client: Client, path: str) -> Reply | None:
    """Makes the first call, which detects a wrong address in seconds; None when the server does not
    know `path`.
    """
    try:
        return await client.request("GET", path, deadline_s=_FIRST_ANSWER_S)
    except Unreachable as error:
        raise Unreachable(
            error.message,
            field="model",
            value=client.base_url,
            remedy="check that the server is ready, and that address and port are right",
        ) from None
    except ServiceError as error:
        if error.status in (401, 403):
            raise ConfigError(
                error.message, field="api_key", remedy="give the key of this server (api_key)"
            ) from None
        return None  # another error is an answer, too: the address is right


def _only_model(listed: Reply | None, url: str) -> str:
    try:
        ids = [str(card["id"]) for card in listed.json()["data"]] if listed else []
    except (ValueError, KeyError, TypeError):
        ids = []
    if len(ids) != 1:
        message = "the server does not say which model it has"
        if ids:
            message = f"the server has the models {', '.join(ids)}"
        raise ConfigError(
            message, field="model_id", value=url, remedy="name one of its models (model_id)"
        )
    return ids[0]
