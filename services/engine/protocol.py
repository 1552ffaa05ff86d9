"""SGLang's `/generate`: requests to jobs, sequences to answers."""

import base64
import time
import uuid
from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    WithJsonSchema,
)

from common import Json
from common.errors import ServiceError
from common.settings.sections import MAX_KEPT
from common.wire.codec import MAX_JSON_ITEMS
from common.wire.schemas import AtMost
from services.engine.decoder import PromptScores
from services.engine.jobs import GenerationJob, SamplingParams, Sequence
from services.engine.model import Model

MAX_PROMPTS = 4096
"""Prompts of one request."""
MAX_OTHERS = 1024
"""Other tokens that are scored at every place of a prompt."""
_NEUTRAL: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values with which an unsupported field has no effect."""
_UNSUPPORTED = (
    "stream",
    "return_hidden_states",
    "routed_experts_start_len",
    "sampling_logprobs_mode",
    "return_entropy",
    "custom_logit_processor",
    "image_data",
    "audio_data",
    "video_data",
    "input_embeds",
)
"""SGLang's top-level fields that would change the answer and are refused."""


class BadRequest(ServiceError):
    """The request is not valid (400, as SGLang answers)."""

    status = 400
    code = "bad_request"


def bad_request(error: ValidationError) -> BadRequest:
    """Returns the error for the first problem that pydantic found."""
    first = error.errors()[0]
    # What follows the name of a field is the branch of a union or the index in a list.
    depth = 2 if first["loc"][:1] == ("sampling_params",) else 1
    name = ".".join(map(str, first["loc"][:depth])) or "body"
    return BadRequest(
        f"{name}: {first['msg']}",
        field=name,
        value=first["input"],
        remedy="check its spelling and its type; the fields are described at /docs",
    )


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
    top_logprobs_num: int | None = Field(None, ge=0, le=MAX_OTHERS)
    """How many of the likeliest tokens are returned beside every token of a prompt."""
    token_ids_logprob: Annotated[list[NonNegativeInt], AtMost(MAX_OTHERS)] | None = None
    """Tokens whose log-probabilities are returned beside every token of a prompt."""
    sampling_params: Annotated[
        SamplingParams, AtMost(16), WithJsonSchema(SamplingParams.model_json_schema())
    ] = SamplingParams()
    """Apply to every prompt, as do the fields below."""
    return_logprob: bool = False
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    """Return the experts that computed prompt and answer, but the last token, in base64 as int32
    [tokens, layers, experts of a token]."""
    rid: str | None = Field(None, min_length=1, max_length=200)
    lora_path: str | None = None

    @property
    def is_batch(self) -> bool:
        """Whether there are several prompts, or one in a list."""
        lists_ids = bool(self.input_ids) and isinstance(self.input_ids[0], list)
        return lists_ids or isinstance(self.text, list)

    @property
    def scores_prompts(self) -> bool:
        """Whether the log-probabilities of the prompts are requested instead of an answer."""
        return self.logprob_start_len >= 0

    def prompts(self, model: Model) -> list[list[int]]:
        """Returns the token ids of every prompt. Raises BadRequest, also for unsupported fields."""
        for name in _UNSUPPORTED:
            value = (self.model_extra or {}).get(name)
            if value not in _NEUTRAL:
                raise BadRequest(
                    f"{name} is not supported by the embedded engine",
                    field=name,
                    value=value,
                    remedy="leave it out, or set rollout.engine sglang",
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
        if len(prompts) > MAX_PROMPTS:
            raise BadRequest(
                f"there are {len(prompts)} prompts",
                field="input_ids",
                value=len(prompts),
                remedy=f"send at most {MAX_PROMPTS}",
            )
        for prompt in prompts:
            _check_prompt(prompt, model)
        return prompts

    def check_scoring(self, model: Model) -> None:
        """Raises BadRequest when a request for the log-probabilities of prompts asks for more."""
        for token in self.token_ids_logprob or ():
            if token >= model.vocab_size:
                raise BadRequest(
                    "a token id is not in the vocabulary",
                    field="token_ids_logprob",
                    value=token,
                    remedy=f"send whole numbers from 0 to {model.vocab_size - 1}",
                )
        generates = self.sampling_params.max_new_tokens != 0 or self.sampling_params.n != 1
        if generates or not self.return_logprob:
            raise BadRequest(
                "log-probabilities of a prompt need return_logprob, max_new_tokens 0 and n 1",
                field="logprob_start_len",
                value=self.logprob_start_len,
                remedy="request them separately",
            )

    def jobs(self, prompts: list[list[int]], model: Model) -> list[GenerationJob]:
        """Returns a job for each prompt. Raises BadRequest for what the model cannot answer."""
        fields = self.sampling_params
        if fields.max_new_tokens == 0:
            raise BadRequest(
                "max_new_tokens is 0, so the request asks for nothing",
                field="sampling_params.max_new_tokens",
                value=0,
                remedy="ask for at least 1, or, with return_logprob and logprob_start_len, "
                "for the prompt's log-probabilities",
            )
        if self.top_logprobs_num or self.token_ids_logprob:
            raise BadRequest(
                "log-probabilities of other tokens are only available in prompts",
                field="top_logprobs_num" if self.top_logprobs_num else "token_ids_logprob",
                value=self.top_logprobs_num or self.token_ids_logprob,
                remedy="score prompt and answer, with logprob_start_len and max_new_tokens 0",
            )
        can_return_kept = 0 < fields.top_k <= MAX_KEPT
        if self.return_sampling_mask and not can_return_kept:
            raise BadRequest(
                "return_sampling_mask needs a limit on the candidates of a token",
                field="top_k",
                value=fields.top_k,
                remedy=f"send a top_k from 1 to {MAX_KEPT}",
            )
        if self.return_routed_experts and model.no_routed_experts:
            raise BadRequest(
                f"this engine cannot return routed experts: {model.no_routed_experts}",
                field="return_routed_experts",
                value=True,
                remedy="leave it out",
            )

        rid = self.rid or uuid.uuid4().hex
        jobs: list[GenerationJob] = []
        for index, prompt in enumerate(prompts):
            job = GenerationJob(
                f"{rid}_{index}" if self.is_batch else rid,
                prompt,
                _fitted(fields, len(prompt), model),
                n=fields.n,
                returns_logprobs=self.return_logprob,
                # Free with log-probabilities, so they need not be asked for.
                returns_kept=can_return_kept and (self.return_sampling_mask or self.return_logprob),
                returns_experts=self.return_routed_experts,
                adapter=self.lora_path or None,
            )
            jobs.append(job)
        return jobs


def _fitted(params: SamplingParams, prompt_tokens: int, model: Model) -> SamplingParams:
    """Returns the parameters for a prompt of this many tokens. Raises BadRequest when they do not
    fit the context.
    """
    room = model.max_context_tokens - prompt_tokens
    limit = params.max_new_tokens
    # As in SGLang: the default is cut to the context, a length that was asked for is refused.
    if "max_new_tokens" not in params.model_fields_set:
        limit = min(limit, room)
    if limit > room:
        raise BadRequest(
            f"the prompt of {prompt_tokens} tokens leaves room for {room} "
            f"in the context of {model.max_context_tokens}",
            field="max_new_tokens",
            value=limit,
            remedy="ask for fewer tokens, send a shorter prompt "
            "or start the engine with a larger --max-context-tokens",
        )
    if params.min_new_tokens > limit:
        raise BadRequest(
            f"min_new_tokens is above max_new_tokens, {limit}",
            field="min_new_tokens",
            value=params.min_new_tokens,
            remedy="lower min_new_tokens",
        )

    stop_ids: set[int] = set()
    if not params.ignore_eos:
        stop_ids = {*model.eos_ids, *params.stop_token_ids}
    known_ids = [token for token in sorted(stop_ids) if 0 <= token < model.vocab_size]
    return params.model_copy(update={"max_new_tokens": limit, "stop_token_ids": known_ids})


def _check_prompt(prompt: Any, model: Model) -> None:
    """Raises BadRequest when a prompt is too long or not a list of the model's token ids."""
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


def answer(sequence: Sequence, tokenizer: Any) -> Json:
    """Returns SGLang's answer for one sequence, running or finished."""
    job = sequence.job
    spans = sequence.spans()
    meta: Json = {
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
    if job.returns_logprobs:
        meta["output_token_logprobs"] = _triples(sequence.logprobs, sequence.tokens)
        meta["output_token_logprobs_length"] = len(sequence.tokens)
        meta["input_token_logprobs"] = []
    if job.returns_kept:
        meta["output_token_sampling_mask"] = [tokens.tolist() for _, tokens in sequence.kept]
        meta["output_token_sampling_logprobs"] = [logprob for logprob, _ in sequence.kept]
        meta["output_token_sampling_mask_length"] = len(sequence.kept)
    if job.returns_experts and sequence.experts:  # it has been computed
        experts = np.concatenate(sequence.experts).astype("<i4")
        meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
    return {"text": sequence.text(tokenizer), "output_ids": sequence.tokens, "meta_info": meta}


def score_answer(body: GenerateBody, prompt: list[int], scores: PromptScores, version: str) -> Json:
    """Returns SGLang's answer for a prompt's log-probabilities from `logprob_start_len` on; as in
    SGLang, the first is null.
    """
    start = body.logprob_start_len
    meta: Json = {
        "id": uuid.uuid4().hex,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(prompt),
        "completion_tokens": 0,
        "weight_version": version,
        "input_token_logprobs": _triples([None, *scores.logprobs[start:]], prompt[start:]),
        "output_token_logprobs": [],
    }
    if body.top_logprobs_num:
        likeliest = zip(scores.top[start:], scores.top_tokens[start:], strict=True)
        meta["input_top_logprobs"] = [None, *(_triples(*place) for place in likeliest)]
    if body.token_ids_logprob:
        chosen = scores.chosen[start:]
        meta["input_token_ids_logprobs"] = [
            None,
            *(_triples(place, body.token_ids_logprob) for place in chosen),
        ]
    return {"text": "", "output_ids": [], "meta_info": meta}


def _triples(logprobs: Iterable[float | None], tokens: Iterable[int]) -> list[list[Any]]:
    """Returns SGLang's triples: log-probability, token and, never here, its text."""
    return [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
