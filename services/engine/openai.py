"""OpenAI's completions and chat completions, as SGLang serves them, without streaming."""

import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any

from jinja2 import TemplateError
from pydantic import ConfigDict, Field

from common.schemas import MAX_NAMES, AtMost, Columns, Text
from common.wire import MAX_JSON_ITEMS
from services.engine.jobs import GenerationJob, Sequence
from services.engine.model import Model
from services.engine.protocol import (
    MAX_PROMPTS,
    BadRequest,
    SamplingFields,
    SharedFields,
    check_prompt,
    encode,
    refuse_unsupported,
)

_REFUSED = (
    "stream",
    "echo",
    "suffix",
    "tools",
    "response_format",
    "logit_bias",
    "frequency_penalty",
    "presence_penalty",
    "top_logprobs",
    "regex",
    "json_schema",
    "ebnf",
    "lora_path",
)
"""OpenAI's fields that would change the answer and that this engine lacks; other unknown fields are ignored."""


class _OpenAIBody(SharedFields):
    """The fields of both calls."""

    model_config = ConfigDict(extra="allow")

    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    seed: int | None = None
    rid: str | None = Field(None, min_length=1, max_length=200)

    def _job(self, prompt: Any, model: Model, max_tokens: int | None, logprobs: bool) -> GenerationJob:
        refuse_unsupported(self, _REFUSED)
        ids = check_prompt(prompt, model)
        fields = SamplingFields(
            **{name: getattr(self, name) for name in SharedFields.model_fields},
            max_new_tokens=model.max_context_tokens - len(ids) if max_tokens is None else max_tokens,
            min_new_tokens=self.min_tokens,
            sampling_seed=self.seed,
        )
        params = fields.sampling(len(ids), model)
        return GenerationJob(self.rid or uuid.uuid4().hex, ids, params, self.n or 1, logprobs=logprobs)


class CompletionBody(_OpenAIBody):
    """`/v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "2 + 3 =", "max_tokens": 4}]})

    prompt: Text | Annotated[list[Any], AtMost(MAX_JSON_ITEMS)]
    logprobs: int | None = Field(None, ge=0, le=1)

    def jobs(self, model: Model) -> list[GenerationJob]:
        """Returns one job per prompt. Raises BadRequest."""
        several = isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], str | list)
        prompts = self.prompt if several else [self.prompt]
        if len(prompts) > MAX_PROMPTS:
            raise BadRequest(f"there are {len(prompts)} prompts", field="prompt", remedy=f"send at most {MAX_PROMPTS}")
        limit = 16 if self.max_tokens is None else self.max_tokens
        encoded = [encode(model, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return [self._job(prompt, model, limit, self.logprobs is not None) for prompt in encoded]


class ChatBody(_OpenAIBody):
    """`/v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "2 + 3?"}], "max_tokens": 4}]}
    )

    messages: Annotated[list[Columns], Field(min_length=1), AtMost(MAX_NAMES)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None

    def jobs(self, model: Model) -> list[GenerationJob]:
        """Returns the job of the conversation. Raises BadRequest."""
        messages = [_message(message, index) for index, message in enumerate(self.messages)]
        try:
            text = model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (ValueError, TypeError, TemplateError) as error:
            raise BadRequest(
                f"the chat template refuses the messages: {error}", field="messages", value=self.messages
            ) from None
        ids = model.tokenizer(text, add_special_tokens=False).input_ids
        return [self._job(ids, model, self.max_completion_tokens or self.max_tokens, bool(self.logprobs))]


def _message(message: dict[str, Any], index: int) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadRequest("a message needs a role and a text", field=f"messages.{index}", value=message)
    return {"role": role, "content": content}


def completion_answer(jobs: list[GenerationJob], model: Model) -> dict[str, Any]:
    """Returns the answer of `/v1/completions`."""

    def choice(sequence: Sequence) -> dict[str, Any]:
        logprobs = None
        if sequence.job.logprobs:
            tokens = [model.tokenizer.decode([token]) for token in sequence.tokens]
            logprobs = {"tokens": tokens, "token_logprobs": sequence.logprobs, "top_logprobs": [], "text_offset": []}
        return {"text": sequence.text(model.tokenizer), "logprobs": logprobs}

    return _answer("cmpl", "text_completion", jobs, model, choice)


def chat_answer(jobs: list[GenerationJob], model: Model) -> dict[str, Any]:
    """Returns the answer of `/v1/chat/completions`."""

    def choice(sequence: Sequence) -> dict[str, Any]:
        logprobs = None
        if sequence.job.logprobs:
            tokens = [model.tokenizer.decode([token]) for token in sequence.tokens]
            scored = zip(tokens, sequence.logprobs, strict=True)
            content = [{"token": t, "logprob": lp, "bytes": list(t.encode()), "top_logprobs": []} for t, lp in scored]
            logprobs = {"content": content}
        return {"message": {"role": "assistant", "content": sequence.text(model.tokenizer)}, "logprobs": logprobs}

    return _answer("chatcmpl", "chat.completion", jobs, model, choice)


def _answer(
    prefix: str, kind: str, jobs: list[GenerationJob], model: Model, choice: Callable[[Sequence], dict[str, Any]]
) -> dict[str, Any]:
    sequences = [sequence for job in jobs for sequence in job.sequences]
    choices = []
    for index, sequence in enumerate(sequences):
        reason = sequence.finish or {}
        ending = {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}
        choices.append({"index": index, **choice(sequence), **ending})
    prompt = sum(len(job.prompt) for job in jobs)
    completion = sum(len(sequence.tokens) for sequence in sequences)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": str(model.path),
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        "metadata": {"weight_version": jobs[0].sequences[-1].version},
    }
