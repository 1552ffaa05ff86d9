"""SGLang's `/generate`: its request as jobs, its answer from finished sequences."""

import time
import uuid
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ServiceError
from services.engine.jobs import Job, Sampling, Sequence
from services.engine.model import Model
from services.engine.stops import texts

MAX_N = 1024
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
"""Sampling parameters of SGLang that this engine has not, and the values at which they do nothing."""
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
"""Top-level fields of SGLang that would change the answer and that this engine has not."""


class BadRequest(ServiceError):
    """The request cannot be served as it is (400, as SGLang answers)."""

    status = 400
    code = "bad_request"


def bad_request(error: ValidationError, prefix: str = "") -> BadRequest:
    """The first problem pydantic found, in SGLang's words for unknown fields."""
    first = error.errors()[0]
    name = prefix + str(first["loc"][0]) if first["loc"] else "body"  # what follows names a branch of a union
    if first["type"] == "extra_forbidden":
        return BadRequest(f"unknown field {name}", field=name, value=first["input"], remedy="remove it or check its spelling")
    return BadRequest(f"{name}: {first['msg']}", field=name, value=first["input"])


class SamplingParams(BaseModel):
    """`sampling_params`; None means the default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    max_new_tokens: int | None = Field(None, ge=0)
    min_new_tokens: int | None = Field(None, ge=0)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=256)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_N)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None

    def sampling(self, prompt_tokens: int, model: Model) -> Sampling:
        """Checked against the model. What does not fit the context is refused; the default is cut to it, as SGLang does."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > 64 or any(not 0 < len(text) <= 1000 for text in stop):
            raise BadRequest(
                "a stop string is empty or too long", field="stop", value=stop, remedy="at most 64 of 1 to 1000 characters"
            )
        limit = 128 if self.max_new_tokens is None else self.max_new_tokens
        least = self.min_new_tokens or 0
        if least > limit:
            raise BadRequest(
                "min_new_tokens is over max_new_tokens", field="min_new_tokens", value=least, remedy=f"at most {limit}"
            )
        room = model.max_context_tokens - prompt_tokens
        if self.max_new_tokens is not None and self.max_new_tokens > room:
            raise BadRequest(
                f"the prompt of {prompt_tokens} tokens leaves {room} of the context of {model.max_context_tokens}",
                field="max_new_tokens",
                value=self.max_new_tokens,
                remedy="ask for fewer, send a shorter prompt or start the engine with a larger --max-context-tokens",
            )
        stop_ids = () if self.ignore_eos else tuple(sorted({*model.eos_ids, *(self.stop_token_ids or [])}))
        top_k = self.top_k or 0
        return Sampling(
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


def parse_sampling(raw: Any) -> SamplingParams:
    """Raises BadRequest that names an unknown or unsupported parameter."""
    if not isinstance(raw, dict):
        raise BadRequest("sampling_params is not an object", field="sampling_params", value=raw)
    left = dict(raw)
    for name, neutral in _NEUTRAL.items():
        if (value := left.pop(name, None)) is not None and value not in neutral:
            raise BadRequest(f"{name} is not supported by the embedded engine", field=f"sampling_params.{name}", value=value)
    try:
        return SamplingParams.model_validate(left)
    except ValidationError as error:
        raise bad_request(error, "sampling_params.") from None


class GenerateBody(BaseModel):
    """`/generate`; keys it does not know are ignored, as SGLang does."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        json_schema_extra={
            "examples": [{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "n": 2}, "return_logprob": True}]
        },
    )

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[Any] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | None = Field(None, ge=-1)
    rid: Annotated[str, Field(min_length=1, max_length=200)] | list[str] | None = None
    stream: bool | None = None
    lora_path: str | list[str | None] | None = None

    @property
    def is_batch(self) -> bool:
        """Whether there are several prompts, or one in a list."""
        return isinstance(self.text, list) or (bool(self.input_ids) and isinstance((self.input_ids or [0])[0], list))

    def jobs(self, model: Model) -> list[Job]:
        """One job per prompt. Raises BadRequest."""
        for name in _REFUSED:
            if value := (self.model_extra or {}).get(name):
                raise BadRequest(f"{name} is not supported by the embedded engine", field=name, value=value)
        prompts = self._prompts(model)
        parameters = [
            parse_sampling(raw) for raw in self._per_prompt(self.sampling_params or {}, len(prompts), "sampling_params")
        ]
        rids = self._per_prompt(self.rid, len(prompts), "rid")
        scored = self._per_prompt(self.return_logprob, len(prompts), "return_logprob")
        adapters = self._per_prompt(self.lora_path, len(prompts), "lora_path")
        jobs = []
        rows = zip(prompts, parameters, rids, scored, adapters, strict=True)
        for index, (prompt, params, rid, score, adapter) in enumerate(rows):
            name = uuid.uuid4().hex if rid is None else f"{rid}_{index}" if isinstance(self.rid, str) and self.is_batch else rid
            start = self.logprob_start_len
            wanted = start if score and start is not None and start >= 0 else None
            if wanted is not None and wanted >= len(prompt):
                raise BadRequest("logprob_start_len is beyond the prompt", field="logprob_start_len", value=wanted)
            sampling = params.sampling(len(prompt), model)
            job = Job(name, prompt, sampling, params.n or 1, bool(score), prompt_logprobs_from=wanted, adapter=adapter or None)
            jobs.append(job)
        return jobs

    def _prompts(self, model: Model) -> list[list[int]]:
        if (self.text is None) == (self.input_ids is None):
            raise BadRequest("give either text or input_ids", field="input_ids", value=self.input_ids)
        found: list[Any]
        if self.text is not None:
            found = [encode(model, text) for text in ([self.text] if isinstance(self.text, str) else self.text)]
        else:
            found = list(self.input_ids or []) if self.is_batch else [self.input_ids]
        if not found:
            raise BadRequest("the batch is empty", field="text", value=self.text, remedy="send at least one prompt")
        return [check_prompt(prompt, model) for prompt in found]

    def _per_prompt(self, value: Any, count: int, name: str) -> list[Any]:
        if not isinstance(value, list):
            return [value] * count
        if len(value) != count:
            raise BadRequest(f"{name} has {len(value)} entries for {count} prompts", field=name, value=value)
        return value


def encode(model: Model, text: str) -> list[int]:
    """Token ids of a prompt. Raises BadRequest for text that cannot be encoded."""
    try:
        ids: list[int] = model.tokenizer(text).input_ids
    except (TypeError, UnicodeEncodeError) as error:
        raise BadRequest(f"the text cannot be tokenized: {error}", field="text", value=text) from None
    return ids


def check_prompt(prompt: Any, model: Model) -> list[int]:
    """The prompt as it is, when the model can read it. Raises BadRequest."""
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("a prompt is empty or not a list of token ids", field="input_ids", value=prompt)
    if len(prompt) >= model.max_context_tokens:
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens, the context {model.max_context_tokens}",
            field="input_ids",
            value=len(prompt),
            remedy="send a shorter prompt or start the engine with a larger --max-context-tokens",
        )
    wrong = next((t for t in prompt if type(t) is not int), 0)
    if type(wrong) is int:
        ids = np.array(prompt, dtype=object) if any(abs(t) >= 2**62 for t in prompt) else np.array(prompt)
        outside = (ids < 0) | (ids >= model.vocab_size)
        if not outside.any():
            return prompt
        wrong = prompt[int(outside.argmax())]
    raise BadRequest(
        "a token id is not in the vocabulary",
        field="input_ids",
        value=wrong,
        remedy=f"whole numbers from 0 to {model.vocab_size - 1}",
    )


def answers(job: Job, model: Model) -> list[dict[str, Any]]:
    """SGLang's answer for each sequence of a finished job."""
    written = texts(model.tokenizer, job.sequences)
    return [answer(sequence, text) for sequence, text in zip(job.sequences, written, strict=True)]


def answer(sequence: Sequence, text: str) -> dict[str, Any]:
    """SGLang's answer for one sequence, also for one that still runs."""
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
    return {"text": text, "output_ids": sequence.tokens, "meta_info": meta}
