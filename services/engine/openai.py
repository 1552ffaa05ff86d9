"""OpenAI's chat completions, as SGLang serves them, without streaming."""

import time
import uuid
from typing import Annotated, Any

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field

from common.wire.schemas import MAX_NAMES, AtMost, Columns
from services.engine.jobs import GenerationJob
from services.engine.model import Model
from services.engine.protocol import (
    MAX_N,
    NOTHING,
    BadRequest,
    SamplingFields,
    check_prompt,
    refuse_unsupported,
)

_REFUSED = {
    **dict.fromkeys(
        ("stream", "tools", "response_format", "logprobs", "top_logprobs", "logit_bias"), NOTHING
    ),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "no_stop_trim"), NOTHING),
    **dict.fromkeys(("regex", "json_schema", "ebnf", "lora_path"), NOTHING),
}
"""Fields that would change the answer but are not supported, with the values at which they have no
effect."""


class ChatBody(BaseModel):
    """`/v1/chat/completions`; other unknown fields are ignored."""

    model_config = ConfigDict(
        strict=True,
        allow_inf_nan=False,
        extra="allow",
        json_schema_extra={
            "examples": [{"messages": [{"role": "user", "content": "2 + 3?"}], "max_tokens": 4}]
        },
    )

    messages: Annotated[list[Columns], Field(min_length=1), AtMost(MAX_NAMES)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    stop: str | Annotated[list[str], AtMost(256)] | None = None
    chat_template_kwargs: Columns | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    seed: int | None = None
    stop_token_ids: Annotated[list[int], AtMost(256)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
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
        names = (
            "stop",
            "stop_token_ids",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "n",
            "ignore_eos",
            "skip_special_tokens",
        )
        limit = self.max_completion_tokens or self.max_tokens or model.max_context_tokens - len(ids)
        given = {name: getattr(self, name) for name in names} | {"min_new_tokens": self.min_tokens}
        fields = SamplingFields(**given, max_new_tokens=limit, sampling_seed=self.seed)
        return GenerationJob(
            self.rid or uuid.uuid4().hex, ids, fields.sampling(len(ids), model), self.n or 1
        )


def _message(message: dict[str, Any], index: int) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        reason, remedy = "a message needs a role and a text", "send texts as role and content"
        raise BadRequest(reason, field=f"messages.{index}", value=message, remedy=remedy)
    return {"role": role, "content": content}


def chat_answer(job: GenerationJob, model: Model) -> dict[str, Any]:
    """Returns the answer of `/v1/chat/completions`."""
    choices = []
    for index, sequence in enumerate(job.sequences):
        reason, text = sequence.finish or {}, sequence.text(model.tokenizer)
        ending = {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                **ending,
            }
        )
    prompt, completion = len(job.prompt), sum(len(sequence.tokens) for sequence in job.sequences)
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
