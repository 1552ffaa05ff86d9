"""OpenAI's chat completions, as SGLang serves them, without streaming."""

import time
import uuid
from typing import Annotated, Any

from jinja2 import TemplateError
from pydantic import ConfigDict, Field

from common.wire.schemas import MAX_NAMES, AtMost, Columns
from services.engine.jobs import GenerationJob
from services.engine.model import Model
from services.engine.protocol import (
    NOTHING,
    BadRequest,
    SamplingFields,
    SharedFields,
    check_prompt,
    refuse_unsupported,
)

_REFUSED = dict.fromkeys(
    (
        "stream",
        "tools",
        "response_format",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "frequency_penalty",
        "presence_penalty",
        "no_stop_trim",
        "regex",
        "json_schema",
        "ebnf",
        "lora_path",
    ),
    NOTHING,
)
"""Fields that would change the answer but are not supported, with the values at which they have no
effect."""


class ChatBody(SharedFields):
    """`/v1/chat/completions`; other unknown fields are ignored."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [{"messages": [{"role": "user", "content": "2 + 3?"}], "max_tokens": 4}]
        },
    )

    messages: Annotated[list[Columns], Field(min_length=1), AtMost(MAX_NAMES)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    chat_template_kwargs: Columns | None = None
    seed: int | None = None
    rid: str | None = Field(None, min_length=1, max_length=200)

    def job(self, model: Model) -> GenerationJob:
        refuse_unsupported(self.model_extra or {}, _REFUSED)
        messages = [_message(message, index) for index, message in enumerate(self.messages)]
        try:
            text = model.tokenizer.apply_chat_template(
                messages,
                **self.chat_template_kwargs or {},
                tokenize=False,
                add_generation_prompt=True,
            )
            ids = check_prompt(model.tokenizer(text, add_special_tokens=False).input_ids, model)
        except (ValueError, TypeError, TemplateError) as error:
            reason = f"the chat template rejects the messages: {error}"
            remedy = "send messages and chat_template_kwargs that the model's template takes"
            raise BadRequest(reason, field="messages", value=self.messages, remedy=remedy) from None
        room = model.max_context_tokens - len(ids)
        fields = SamplingFields(
            **self.model_dump(include=set(SharedFields.model_fields)),
            min_new_tokens=self.min_tokens,
            max_new_tokens=self.max_completion_tokens or self.max_tokens or room,
            sampling_seed=self.seed,
        )
        return GenerationJob(
            self.rid or uuid.uuid4().hex, ids, fields.sampling(len(ids), model), n=self.n or 1
        )


def _message(message: dict[str, Any], index: int) -> dict[str, str]:
    role = message.get("role")
    content = message.get("content")
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        reason = "a message needs a role and a text"
        remedy = "send texts as role and content"
        raise BadRequest(reason, field=f"messages.{index}", value=message, remedy=remedy)
    return {"role": role, "content": content}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def chat_answer(job: GenerationJob, model: Model) -> dict[str, Any]:
    """Returns the answer of `/v1/chat/completions`."""
    choices: list[dict[str, Any]] = []
    for index, sequence in enumerate(job.sequences):
        reason = sequence.finish or {}
        text = sequence.text(model.tokenizer)
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": reason.get("type"),
                "matched_stop": reason.get("matched"),
            }
        )
    prompt = len(job.prompt)
    completion = sum(len(sequence.tokens) for sequence in job.sequences)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": str(model.path),
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
        "metadata": {"weight_version": job.sequences[-1].version},
    }
