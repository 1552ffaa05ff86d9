"""SGLang's `/generate`: requests to jobs, sequences to answers."""

import base64
import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ServiceError
from common.settings.sections import MAX_KEPT
from common.wire.codec import MAX_JSON_ITEMS
from common.wire.schemas import MAX_NAMES, AtMost, Columns
from services.engine.jobs import GenerationJob, SamplingParams, Sequence
from services.engine.model import Model

MAX_N = 1024
MAX_PROMPTS = 4096
"""Prompts of one request."""
NOTHING: tuple[Any, ...] = (False, 0, "", [], {})
_REFUSED = dict.fromkeys(
    (
        "stream",
        "token_ids_logprob",
        "top_logprobs_num",
        "return_hidden_states",
        "routed_experts_start_len",
        "sampling_logprobs_mode",
        "return_entropy",
        "custom_logit_processor",
        "image_data",
        "audio_data",
        "video_data",
        "input_embeds",
    ),
    NOTHING,
)
"""SGLang's top-level fields that would change the answer but are not supported, with the values at
which they have no effect."""
_Stop = Annotated[str, Field(max_length=1000)]


class BadRequest(ServiceError):
    """The request is not valid (400, as SGLang answers)."""

    status = 400
    code = "bad_request"


def bad_request(error: ValidationError, prefix: str = "") -> BadRequest:
    """Returns the error for the first problem that pydantic found."""
    first = error.errors()[0]
    # What follows the first part of `loc` names a branch of a union.
    name = prefix + str(first["loc"][0]) if first["loc"] else "body"
    if first["type"] == "extra_forbidden":
        return BadRequest(
            f"unknown field {name}",
            field=name,
            value=first["input"],
            remedy="remove it or check its spelling",
        )
    return BadRequest(
        f"{name}: {first['msg']}",
        field=name,
        value=first["input"],
        remedy="the fields are described at /docs",
    )


def refuse_unsupported(fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises BadRequest when one of the fields named in `neutral` is set to anything but a value
    there.
    """
    for name, values in neutral.items():
        value = fields.get(name)
        if value is not None and value not in values:
            raise BadRequest(
                f"{name} is not supported by the embedded engine",
                field=name,
                value=value,
                remedy="leave it out, or set rollout.engine sglang",
            )


class SharedFields(BaseModel):
    """Sampling parameters with the same name in SGLang's and OpenAI's calls; None means the
    default.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    stop: _Stop | Annotated[list[_Stop], AtMost(256)] | None = None
    stop_token_ids: Annotated[list[int], AtMost(256)] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MAX_N)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class SamplingFields(SharedFields):
    """`sampling_params` of `/generate`."""

    model_config = ConfigDict(extra="forbid")

    min_new_tokens: int | None = Field(None, ge=0)
    max_new_tokens: int | None = Field(None, ge=0)
    """0 only when the log-probabilities of the prompt are requested."""
    sampling_seed: int | None = None

    def sampling(
        self,
        prompt_tokens: int,
        model: Model,
        *,
        logprobs: bool = False,
        mask: bool = False,
        experts: bool = False,
    ) -> SamplingParams:
        """Returns the parameters, checked against the model. The default length is cut to the
        context, as SGLang does.

        Args:
            prompt_tokens: length of the prompt.
            model: the model that answers.
            logprobs: whether the answer shows log-probabilities, and so also the tokens that
                truncation kept, up to a limit.
            mask: whether the answer must show the tokens that truncation kept.
            experts: whether the answer must show the experts that computed its tokens.

        Raises BadRequest.
        """
        limit = 128 if self.max_new_tokens is None else self.max_new_tokens
        room = model.max_context_tokens - prompt_tokens
        if self.max_new_tokens is not None and self.max_new_tokens > room:
            raise BadRequest(
                f"the prompt of {prompt_tokens} tokens leaves room for {room} "
                f"in the context of {model.max_context_tokens}",
                field="max_new_tokens",
                value=self.max_new_tokens,
                remedy="ask for fewer tokens, send a shorter prompt "
                "or start the engine with a larger --max-context-tokens",
            )
        min_new_tokens = self.min_new_tokens or 0
        if min_new_tokens > limit:
            raise BadRequest(
                f"min_new_tokens is above max_new_tokens, {limit}",
                field="min_new_tokens",
                value=min_new_tokens,
                remedy="lower min_new_tokens",
            )
        top_k = max(self.top_k or 0, 0)
        returnable = 0 < top_k <= MAX_KEPT
        if mask and not returnable:
            raise BadRequest(
                "return_sampling_mask needs a limit on the candidates of a token",
                field="top_k",
                value=self.top_k,
                remedy=f"send a top_k from 1 to {MAX_KEPT}",
            )
        if experts and model.no_routed_experts:
            raise BadRequest(
                f"this engine cannot return routed experts: {model.no_routed_experts}",
                field="return_routed_experts",
                value=True,
                remedy="leave it out",
            )

        stop = self.stop or []
        stop_ids: set[int] = set()
        if not self.ignore_eos:
            stop_ids = {*model.eos_ids, *(self.stop_token_ids or [])}
        return SamplingParams(
            max_new_tokens=min(limit, room),
            min_new_tokens=min(min_new_tokens, room),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=min(top_k, model.vocab_size),
            min_p=self.min_p or 0.0,
            stops=(stop,) if isinstance(stop, str) else tuple(filter(None, stop)),
            returns_kept=returnable and (mask or logprobs),
            returns_experts=experts,
            stop_ids=tuple(token for token in sorted(stop_ids) if 0 <= token < model.vocab_size),
            seed=self.sampling_seed,
            skip_special_tokens=self.skip_special_tokens is not False,
        )


def _parse_sampling(raw: Any) -> SamplingFields:
    """Parses `sampling_params`. Raises BadRequest that names an unknown or unsupported
    parameter.
    """
    if not isinstance(raw, dict) or len(raw) > MAX_NAMES:
        raise BadRequest(
            "sampling_params is not an object, or is too large",
            field="sampling_params",
            value=raw,
            remedy=f"send an object of at most {MAX_NAMES} names",
        )
    try:
        return SamplingFields.model_validate(raw)
    except ValidationError as error:
        raise bad_request(error, "sampling_params.") from None


class GenerateBody(BaseModel):
    """`/generate`; unknown keys are ignored, as in SGLang."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        json_schema_extra={
            "examples": [
                {
                    "input_ids": [5, 6],
                    "sampling_params": {"max_new_tokens": 4, "n": 2},
                    "return_logprob": True,
                }
            ]
        },
    )

    input_ids: Annotated[list[Any], AtMost(MAX_JSON_ITEMS)] = []
    text: str | Annotated[list[str], AtMost(MAX_PROMPTS)] | None = None
    """Tokenised like `tokenizer(text)`, with special tokens."""
    logprob_start_len: int = -1
    """Position from which the log-probabilities of the prompt are returned; -1: none."""
    sampling_params: Columns | None = None
    """Apply to every prompt, as do the fields below."""
    return_logprob: bool | None = None
    return_sampling_mask: bool | None = None
    return_routed_experts: bool | None = None
    """Return the experts that computed prompt and answer, but the last token, in base64 as int32
    [tokens, layers, experts of a token]."""
    rid: str | None = Field(None, min_length=1, max_length=200)
    lora_path: str | None = None

    @property
    def is_batch(self) -> bool:
        """Whether there are several prompts, or one in a list."""
        lists_ids = bool(self.input_ids) and isinstance(self.input_ids[0], list)
        return lists_ids or isinstance(self.text, list)

    def _prompts(self, model: Model) -> list[list[int]]:
        refuse_unsupported(self.model_extra or {}, _REFUSED)
        if self.is_batch and len(self.input_ids) > MAX_PROMPTS:
            raise BadRequest(
                f"there are {len(self.input_ids)} prompts",
                field="input_ids",
                value=len(self.input_ids),
                remedy=f"send at most {MAX_PROMPTS}",
            )
        if self.text is not None and self.input_ids:
            raise BadRequest(
                "send a prompt either as text or as input_ids, not as both",
                field="text",
                value=self.text,
                remedy="leave one of them out",
            )

        if self.text is not None:
            texts = self.text if isinstance(self.text, list) else [self.text]
            prompts = [model.tokenizer(text).input_ids for text in texts]
        else:
            prompts = self.input_ids if self.is_batch else [self.input_ids]
        return [check_prompt(prompt, model) for prompt in prompts]

    def to_score(self, model: Model) -> list[list[int]] | None:
        """Returns the prompts whose log-probabilities are requested; None for a request that
        generates.

        Raises BadRequest when both are requested.
        """
        if self.logprob_start_len < 0:
            return None
        fields = _parse_sampling(self.sampling_params or {})
        generates = fields.max_new_tokens != 0 or fields.n not in (None, 1)
        if generates or not self.return_logprob or self.lora_path:
            raise BadRequest(
                "log-probabilities of a prompt need return_logprob, max_new_tokens 0, n 1 "
                "and no lora_path",
                field="logprob_start_len",
                value=self.logprob_start_len,
                remedy="request them separately",
            )
        return self._prompts(model)

    def jobs(self, model: Model) -> list[GenerationJob]:
        prompts = self._prompts(model)
        fields = _parse_sampling(self.sampling_params or {})
        if fields.max_new_tokens == 0:
            raise BadRequest(
                "max_new_tokens is 0, so the request asks for nothing",
                field="sampling_params.max_new_tokens",
                value=0,
                remedy="ask for at least 1, or, with return_logprob and logprob_start_len, "
                "for the prompt's log-probabilities",
            )

        jobs: list[GenerationJob] = []
        for index, prompt in enumerate(prompts):
            rid = self.rid or uuid.uuid4().hex
            sampling = fields.sampling(
                len(prompt),
                model,
                logprobs=bool(self.return_logprob),
                mask=bool(self.return_sampling_mask),
                experts=bool(self.return_routed_experts),
            )
            job = GenerationJob(
                f"{rid}_{index}" if self.is_batch else rid,
                prompt,
                sampling,
                n=fields.n or 1,
                logprobs=bool(self.return_logprob),
                adapter=self.lora_path or None,
            )
            jobs.append(job)
        return jobs


def check_prompt(prompt: Any, model: Model) -> list[int]:
    """Returns the prompt. Raises BadRequest when it is too long or not a list of the model's token
    ids.
    """
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest(
            "a prompt is empty or not a list of token ids",
            field="input_ids",
            value=prompt,
            remedy="send at least one token id",
        )
    if len(prompt) >= model.max_context_tokens:
        raise BadRequest(
            f"the prompt has {len(prompt)} tokens, the context {model.max_context_tokens}",
            field="input_ids",
            value=len(prompt),
            remedy="send a shorter prompt or start the engine with a larger --max-context-tokens",
        )
    for token in prompt:
        # Not isinstance: True is no token id.
        if type(token) is not int or not 0 <= token < model.vocab_size:
            raise BadRequest(
                "a token id is not in the vocabulary",
                field="input_ids",
                value=token,
                remedy=f"send whole numbers from 0 to {model.vocab_size - 1}",
            )
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
    if job.sampling.returns_kept:
        meta["output_token_sampling_mask"] = [tokens.tolist() for _, tokens in sequence.kept]
        meta["output_token_sampling_logprobs"] = [logprob for logprob, _ in sequence.kept]
        meta["output_token_sampling_mask_length"] = len(sequence.kept)
    if job.sampling.returns_experts and sequence.experts:  # it has been computed
        experts = np.concatenate(sequence.experts).astype("<i4")
        meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
    return {"text": sequence.text(tokenizer), "output_ids": sequence.tokens, "meta_info": meta}


def score_answer(
    prompt: list[int], logprobs: list[float], start: int, version: str
) -> dict[str, Any]:
    """Returns SGLang's answer for a prompt's log-probabilities from `start` on; as in SGLang, the
    first is null.
    """
    pairs = list(zip([None, *logprobs[start:]], prompt[start:], strict=True))
    meta = {
        "id": uuid.uuid4().hex,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(prompt),
        "completion_tokens": 0,
        "weight_version": version,
        "input_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
        "output_token_logprobs": [],
    }
    return {"text": "", "output_ids": [], "meta_info": meta}
