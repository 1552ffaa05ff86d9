"""The two OpenAI calls that SGLang serves beside `/generate`: completions and chat completions, without streaming."""

import time
import uuid
from typing import Any, ClassVar

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field

from services.engine.jobs import Job, Sequence
from services.engine.model import Model
from services.engine.protocol import MAX_N, BadRequest, SamplingParams, check_prompt, encode
from services.engine.stops import texts


class _Body(BaseModel):
    """What both calls share; fields that change nothing are ignored, those that would change the answer are refused."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    refused: ClassVar[tuple[str, ...]] = (
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

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1, le=MAX_N)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    rid: str | None = Field(None, min_length=1, max_length=200)

    def _job(self, prompt: Any, model: Model, max_tokens: int | None, logprobs: bool) -> Job:
        for name in self.refused:
            if value := (self.model_extra or {}).get(name):
                raise BadRequest(f"{name} is not supported by the embedded engine", field=name, value=value)
        ids = check_prompt(prompt, model)
        params = SamplingParams(
            max_new_tokens=model.max_context_tokens - len(ids) if max_tokens is None else max_tokens,
            min_new_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            sampling_seed=self.seed,
        )
        return Job(self.rid or uuid.uuid4().hex, ids, params.sampling(len(ids), model), self.n or 1, logprobs=logprobs)


class CompletionBody(_Body):
    """`/v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "2 + 3 =", "max_tokens": 4}]})

    prompt: str | list[Any]
    logprobs: int | None = Field(None, ge=0, le=1)

    def jobs(self, model: Model) -> list[Job]:
        """One job per prompt. Raises BadRequest."""
        several = isinstance(self.prompt, list) and bool(self.prompt) and isinstance(self.prompt[0], str | list)
        prompts = self.prompt if several else [self.prompt]
        limit = 16 if self.max_tokens is None else self.max_tokens
        encoded = [encode(model, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return [self._job(prompt, model, limit, self.logprobs is not None) for prompt in encoded]


class ChatBody(_Body):
    """`/v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "2 + 3?"}], "max_tokens": 4}]}
    )

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None

    def jobs(self, model: Model) -> list[Job]:
        """The job of the conversation. Raises BadRequest."""
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


def completion_answer(jobs: list[Job], model: Model) -> dict[str, Any]:
    """The answer of `/v1/completions`."""
    choices: list[dict[str, Any]] = []
    for sequence, text in _finished(jobs, model):
        logprobs = None
        if sequence.job.logprobs:
            tokens = [model.tokenizer.decode([token]) for token in sequence.tokens]
            logprobs = {"tokens": tokens, "token_logprobs": sequence.logprobs, "top_logprobs": [], "text_offset": []}
        choices.append({"index": len(choices), "text": text, "logprobs": logprobs, **_ending(sequence)})
    return _answer("cmpl", "text_completion", jobs, model, choices)


def chat_answer(jobs: list[Job], model: Model) -> dict[str, Any]:
    """The answer of `/v1/chat/completions`."""
    choices: list[dict[str, Any]] = []
    for sequence, text in _finished(jobs, model):
        content = []
        for token, logprob in zip(sequence.tokens, sequence.logprobs, strict=True):
            piece = model.tokenizer.decode([token])
            content.append({"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []})
        logprobs = {"content": content} if sequence.job.logprobs else None
        message = {"role": "assistant", "content": text}
        choices.append({"index": len(choices), "message": message, "logprobs": logprobs, **_ending(sequence)})
    return _answer("chatcmpl", "chat.completion", jobs, model, choices)


def _finished(jobs: list[Job], model: Model) -> list[tuple[Sequence, str]]:
    return [pair for job in jobs for pair in zip(job.sequences, texts(model.tokenizer, job.sequences), strict=True)]


def _ending(sequence: Sequence) -> dict[str, Any]:
    reason = sequence.finish or {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


def _answer(prefix: str, kind: str, jobs: list[Job], model: Model, choices: list[dict[str, Any]]) -> dict[str, Any]:
    prompt = sum(len(job.prompt) for job in jobs)
    completion = sum(len(sequence.tokens) for job in jobs for sequence in job.sequences)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": str(model.path),
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        "metadata": {"weight_version": jobs[0].sequences[-1].version},
    }
