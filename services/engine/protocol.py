"""SGLang's `/generate`: requests to jobs, sequences to answers."""

import time
import uuid
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ServiceError
from common.schemas import MAX_NAMES, AtMost, Columns, Text
from common.wire import MAX_JSON_ITEMS
from services.engine.jobs import GenerationJob, SamplingParams, Sequence
from services.engine.model import Model

MAX_N = 1024
MAX_PROMPTS = 4096
"""Prompts of one request."""
_Flags = Annotated[list[bool], AtMost(MAX_PROMPTS)]
_Names = Annotated[list[str], AtMost(MAX_PROMPTS)]
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop_regex": ([], ""),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "beam_width": (1,),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "logit_bias": ({},),
    "custom_params": ({},),
    "watermark": (False,),
}
"""SGLang's sampling parameters that this engine lacks, with the values at which they have no effect."""
_REFUSED = (
    "token_ids_logprob",
    "top_logprobs_num",
    "return_hidden_states",
    "return_routed_experts",
    "return_sampling_mask",
    "return_entropy",
    "custom_logit_processor",
    "image_data",
    "audio_data",
    "video_data",
    "input_embeds",
)
"""SGLang's top-level fields that would change the answer and that this engine lacks."""


class BadRequest(ServiceError):
    """The request is not valid (400, as SGLang answers)."""

    status = 400
    code = "bad_request"


def bad_request(error: ValidationError, prefix: str = "") -> BadRequest:
    """Returns the first problem that pydantic found."""
    first = error.errors()[0]
    name = prefix + str(first["loc"][0]) if first["loc"] else "body"  # what follows names a branch of a union
    if first["type"] == "extra_forbidden":
        return BadRequest(f"unknown field {name}", field=name, value=first["input"], remedy="remove it or check its spelling")
    return BadRequest(f"{name}: {first['msg']}", field=name, value=first["input"])


def refuse_unsupported(body: BaseModel, names: tuple[str, ...]) -> None:
    """Raises BadRequest when an extra field of the body is one of `names` and is set."""
    for name in names:
        if value := (body.model_extra or {}).get(name):
            raise BadRequest(f"{name} is not supported by the embedded engine", field=name, value=value)


class SharedFields(BaseModel):
    """Sampling fields that SGLang's and OpenAI's calls have in common; None means the default."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    stop: str | Annotated[list[str], AtMost(64)] | None = None
    stop_token_ids: Annotated[list[int], AtMost(256)] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_N)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class SamplingFields(SharedFields):
    """`sampling_params` of `/generate`; None means the default."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int | None = Field(None, ge=0)
    min_new_tokens: int | None = Field(None, ge=0)
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None

    def sampling(self, prompt_tokens: int, model: Model) -> SamplingParams:
        """Returns the parameters, checked against the model. The default length is cut to the context, as SGLang does.

        Raises BadRequest.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > 64 or any(not 0 < len(text) <= 1000 for text in stop):
            raise BadRequest(
                "a stop string is empty or too long", field="stop", value=stop, remedy="at most 64 of 1 to 1000 characters"
            )
        limit = 128 if self.max_new_tokens is None else self.max_new_tokens
        least = self.min_new_tokens or 0
        if least > limit:
            raise BadRequest(
                "min_new_tokens exceeds max_new_tokens", field="min_new_tokens", value=least, remedy=f"at most {limit}"
            )
        room = model.max_context_tokens - prompt_tokens
        if self.max_new_tokens is not None and self.max_new_tokens > room:
            reason = f"the prompt of {prompt_tokens} tokens leaves {room} of the context of {model.max_context_tokens}"
            remedy = "ask for fewer, send a shorter prompt or start the engine with a larger --max-context-tokens"
            raise BadRequest(reason, field="max_new_tokens", value=self.max_new_tokens, remedy=remedy)
        stop_ids = () if self.ignore_eos else tuple(sorted({*model.eos_ids, *(self.stop_token_ids or [])}))
        top_k = self.top_k or 0
        return SamplingParams(
            max_new_tokens=min(limit, room),
            min_new_tokens=least,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=top_k if 0 < top_k < model.vocab_size else 0,
            min_p=self.min_p or 0.0,
            stop_ids=tuple(token for token in stop_ids if 0 <= token < model.vocab_size),
            stop=tuple(stop),
            seed=self.sampling_seed,
            skip_special_tokens=self.skip_special_tokens is not False,
            keep_stop=bool(self.no_stop_trim),
        )


def _parse_sampling(raw: Any) -> SamplingFields:
    """Parses `sampling_params`. Raises BadRequest that names an unknown or unsupported parameter."""
    if not isinstance(raw, dict) or len(raw) > MAX_NAMES:
        raise BadRequest("sampling_params is no object, or a very large one", field="sampling_params", value=raw)
    left = dict(raw)
    for name, neutral in _NEUTRAL.items():
        if (value := left.pop(name, None)) is not None and value not in neutral:
            raise BadRequest(f"{name} is not supported by the embedded engine", field=f"sampling_params.{name}", value=value)
    try:
        return SamplingFields.model_validate(left)
    except ValidationError as error:
        raise bad_request(error, "sampling_params.") from None


class GenerateBody(BaseModel):
    """`/generate`; unknown keys are ignored, as in SGLang."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        json_schema_extra={
            "examples": [{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "n": 2}, "return_logprob": True}]
        },
    )

    text: Text | Annotated[list[Text], AtMost(MAX_PROMPTS)] | None = None
    input_ids: Annotated[list[Any], AtMost(MAX_JSON_ITEMS)] | None = None
    sampling_params: Columns | Annotated[list[Any], AtMost(MAX_PROMPTS)] | None = None
    return_logprob: bool | _Flags | None = None
    logprob_start_len: int | None = Field(None, ge=-1)
    rid: Annotated[str, Field(min_length=1, max_length=200)] | _Names | None = None
    stream: bool | None = None
    lora_path: str | Annotated[list[str | None], AtMost(MAX_PROMPTS)] | None = None

    @property
    def is_batch(self) -> bool:
        """Whether there are several prompts, or one in a list."""
        return isinstance(self.text, list) or (bool(self.input_ids) and isinstance((self.input_ids or [0])[0], list))

    def jobs(self, model: Model) -> list[GenerationJob]:
        """Returns one job per prompt. Raises BadRequest."""
        refuse_unsupported(self, _REFUSED)
        prompts = self._prompts(model)
        parameters = [_parse_sampling(raw) for raw in self._per_prompt("sampling_params", self.sampling_params or {}, prompts)]
        names = ("rid", "return_logprob", "lora_path")
        rows = zip(prompts, parameters, *(self._per_prompt(name, getattr(self, name), prompts) for name in names), strict=True)
        jobs = []
        for index, (prompt, fields, rid, score, adapter) in enumerate(rows):
            name = uuid.uuid4().hex if rid is None else f"{rid}_{index}" if isinstance(self.rid, str) and self.is_batch else rid
            start = self.logprob_start_len if score and (self.logprob_start_len or 0) >= 0 else None
            if start is not None and start >= len(prompt):
                raise BadRequest("logprob_start_len is beyond the prompt", field="logprob_start_len", value=start)
            params = fields.sampling(len(prompt), model)
            jobs.append(GenerationJob(name, prompt, params, fields.n or 1, bool(score), start, adapter or None))
        return jobs

    def _prompts(self, model: Model) -> list[list[int]]:
        if (self.text is None) == (self.input_ids is None):
            raise BadRequest("give either text or input_ids", field="input_ids", value=self.input_ids)
        found: list[Any]
        if self.text is not None:
            texts = [self.text] if isinstance(self.text, str) else self.text
            found = [encode(model, text) for text in texts]
        else:
            found = list(self.input_ids or []) if self.is_batch else [self.input_ids]
        if not 0 < len(found) <= MAX_PROMPTS:
            reason = "the batch is empty" if not found else f"the batch has {len(found)} prompts"
            raise BadRequest(reason, field="text", value=self.text, remedy=f"send 1 to {MAX_PROMPTS} prompts")
        return [check_prompt(prompt, model) for prompt in found]

    @staticmethod
    def _per_prompt(name: str, value: Any, prompts: list[list[int]]) -> list[Any]:
        if not isinstance(value, list):
            return [value] * len(prompts)
        if len(value) != len(prompts):
            raise BadRequest(f"{name} has {len(value)} entries for {len(prompts)} prompts", field=name, value=value)
        return value


def encode(model: Model, text: str) -> list[int]:
    """Returns the token ids of a prompt. Raises BadRequest for text that cannot be encoded."""
    try:
        ids: list[int] = model.tokenizer(text).input_ids
    except (TypeError, UnicodeEncodeError) as error:
        raise BadRequest(f"the text cannot be tokenized: {error}", field="text", value=text) from None
    return ids


def check_prompt(prompt: Any, model: Model) -> list[int]:
    """Returns the prompt. Raises BadRequest when it is no list of the model's token ids or too long."""
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("a prompt is empty or not a list of token ids", field="input_ids", value=prompt)
    if len(prompt) >= model.max_context_tokens:
        reason = f"the prompt has {len(prompt)} tokens, the context {model.max_context_tokens}"
        remedy = "send a shorter prompt or start the engine with a larger --max-context-tokens"
        raise BadRequest(reason, field="input_ids", value=len(prompt), remedy=remedy)
    wrong = [token for token in prompt if type(token) is not int or not 0 <= token < model.vocab_size]
    if wrong:
        remedy = f"whole numbers from 0 to {model.vocab_size - 1}"
        raise BadRequest("a token id is not in the vocabulary", field="input_ids", value=wrong[0], remedy=remedy)
    return prompt


def answer(sequence: Sequence, tokenizer: Any) -> dict[str, Any]:
    """Returns SGLang's answer for one sequence, running or finished."""
    job = sequence.job
    spans = sequence.spans()
    meta: dict[str, Any] = {
        "id": sequence.id,
        "finish_reason": sequence.finish,
        "prompt_tokens": len(job.prompt),
        "completion_tokens": len(sequence.tokens),
        "cached_tokens": sequence.cached_tokens,
        "weight_version": sequence.version or (spans[-1]["version"] if spans else ""),
        "weight_versions": spans,
        "num_retractions": sequence.retractions,
        "e2e_latency": time.monotonic() - job.created,
    }
    if job.logprobs:
        pairs = zip(sequence.logprobs, sequence.tokens, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        meta["output_token_logprobs_length"] = len(sequence.tokens)
        meta["input_token_logprobs"] = []
        start = job.prompt_logprobs_from
        if start is not None and len(job.prompt_logprobs) == len(job.prompt) - 1:
            scores = [None, *job.prompt_logprobs[start:]]
            meta["input_token_logprobs"] = [[lp, token, None] for lp, token in zip(scores, job.prompt[start:], strict=True)]
    return {"text": sequence.text(tokenizer), "output_ids": sequence.tokens, "meta_info": meta}
