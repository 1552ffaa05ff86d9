"""SGLang's `/generate`: requests to jobs, sequences to answers."""

import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any

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
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stop_regex": NOTHING,
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0,)),
    **dict.fromkeys(("no_stop_trim", "watermark"), (False,)),
    **dict.fromkeys(("repetition_penalty", "beam_width", "stream_interval"), (1,)),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), ()),
    **dict.fromkeys(("logit_bias", "custom_params"), ({},)),
    "spaces_between_special_tokens": (True,),
}
"""SGLang's sampling parameters that this engine does not support, with the values at which they
have no effect."""
_REFUSED = {
    **dict.fromkeys(
        ("stream", "token_ids_logprob", "top_logprobs_num", "return_hidden_states"), NOTHING
    ),
    **dict.fromkeys(
        (
            "return_routed_experts",
            "sampling_logprobs_mode",
            "return_entropy",
            "custom_logit_processor",
        ),
        NOTHING,
    ),
    **dict.fromkeys(("image_data", "audio_data", "video_data", "input_embeds"), NOTHING),
}
"""Likewise, SGLang's top-level fields that would change the answer but are not supported."""


_Stop = Annotated[str, Field(max_length=1000)]


class BadRequest(ServiceError):
    """The request is not valid (400, as SGLang answers)."""

    status = 400
    code = "bad_request"


def bad_request(error: ValidationError, prefix: str = "") -> BadRequest:
    """Returns the error for the first problem that pydantic found."""
    first = error.errors()[0]
    name = (
        prefix + str(first["loc"][0]) if first["loc"] else "body"
    )  # what follows names a branch of a union
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


def refuse_unsupported(
    fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str = ""
) -> None:
    """Raises BadRequest when one of the fields named in `neutral` is set to anything but a value
    there.
    """
    for name, values in neutral.items():
        if (value := fields.get(name)) is not None and value not in values:
            reason, remedy = (
                f"{name} is not supported by the embedded engine",
                "leave it out, or set rollout.engine sglang",
            )
            raise BadRequest(reason, field=prefix + name, value=value, remedy=remedy)


class SamplingFields(BaseModel):
    """`sampling_params` of `/generate`; None means the default."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    stop: _Stop | Annotated[list[_Stop], AtMost(256)] | None = None
    stop_token_ids: Annotated[list[int], AtMost(256)] | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    min_new_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1, le=MAX_N)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    max_new_tokens: int | None = Field(None, ge=0)
    """0 only when the log-probabilities of the prompt are requested."""
    sampling_seed: int | None = None

    def sampling(
        self, prompt_tokens: int, model: Model, logprobs: bool = False, mask: bool = False
    ) -> SamplingParams:
        """Returns the parameters, checked against the model. The default length is cut to the
        context, as SGLang does.

        Args:
            prompt_tokens: length of the prompt.
            model: the model that answers.
            logprobs: whether the answer shows log-probabilities, and so also the tokens that
                truncation kept, up to a limit.
            mask: whether the answer must show the tokens that truncation kept.

        Raises BadRequest.
        """
        limit = 128 if self.max_new_tokens is None else self.max_new_tokens
        room = model.max_context_tokens - prompt_tokens
        if self.max_new_tokens is not None and self.max_new_tokens > room:
            reason = f"the prompt of {prompt_tokens} tokens leaves room for {room} in the context of {model.max_context_tokens}"
            remedy = "ask for fewer tokens, send a shorter prompt or start the engine with a larger --max-context-tokens"
            raise BadRequest(
                reason, field="max_new_tokens", value=self.max_new_tokens, remedy=remedy
            )
        least, stop, top_k = self.min_new_tokens or 0, self.stop or [], max(self.top_k or 0, 0)
        if least > limit:
            reason = f"min_new_tokens is above max_new_tokens, {limit}"
            raise BadRequest(
                reason, field="min_new_tokens", value=least, remedy="lower min_new_tokens"
            )
        returnable = 0 < top_k <= MAX_KEPT
        if mask and not returnable:
            reason, remedy = (
                "return_sampling_mask needs a limit on the candidates of a token",
                f"send a top_k from 1 to {MAX_KEPT}",
            )
            raise BadRequest(reason, field="top_k", value=self.top_k, remedy=remedy)
        stop_ids = (
            () if self.ignore_eos else tuple(sorted({*model.eos_ids, *(self.stop_token_ids or [])}))
        )
        return SamplingParams(
            max_new_tokens=min(limit, room),
            min_new_tokens=min(least, room),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=min(top_k, model.vocab_size),
            min_p=self.min_p or 0.0,
            stops=(stop,) if isinstance(stop, str) else tuple(filter(None, stop)),
            returns_kept=returnable and (mask or logprobs),
            stop_ids=tuple(token for token in stop_ids if 0 <= token < model.vocab_size),
            seed=self.sampling_seed,
            skip_special_tokens=self.skip_special_tokens is not False,
        )


def _parse_sampling(raw: Any) -> SamplingFields:
    """Parses `sampling_params`. Raises BadRequest that names an unknown or unsupported
    parameter.
    """
    if not isinstance(raw, dict) or len(raw) > MAX_NAMES:
        reason, remedy = (
            "sampling_params is not an object, or is too large",
            f"send an object of at most {MAX_NAMES} names",
        )
        raise BadRequest(reason, field="sampling_params", value=raw, remedy=remedy)
    refuse_unsupported(raw, _NEUTRAL, "sampling_params.")
    try:
        return SamplingFields.model_validate(
            {name: value for name, value in raw.items() if name not in _NEUTRAL}
        )
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
    sampling_params: Columns | Annotated[list[Any], AtMost(MAX_PROMPTS)] | None = None
    return_logprob: bool | Annotated[list[bool], AtMost(MAX_PROMPTS)] | None = None
    return_sampling_mask: bool | Annotated[list[bool], AtMost(MAX_PROMPTS)] | None = None
    rid: (
        Annotated[str, Field(min_length=1, max_length=200)]
        | Annotated[list[str], AtMost(MAX_PROMPTS)]
        | None
    ) = None
    lora_path: str | Annotated[list[str | None], AtMost(MAX_PROMPTS)] | None = None

    @property
    def is_batch(self) -> bool:
        """Whether there are several prompts, or one in a list."""
        return isinstance(self.text, list) or (
            bool(self.input_ids) and isinstance(self.input_ids[0], list)
        )

    def _prompts(self, model: Model) -> list[list[int]]:
        refuse_unsupported(self.model_extra or {}, _REFUSED)
        if self.is_batch and len(self.input_ids) > MAX_PROMPTS:
            reason, remedy = (
                f"there are {len(self.input_ids)} prompts",
                f"send at most {MAX_PROMPTS}",
            )
            raise BadRequest(reason, field="input_ids", value=len(self.input_ids), remedy=remedy)
        given = self.input_ids if self.is_batch else [self.input_ids]
        if self.text is not None:
            if self.input_ids:
                reason = "send a prompt either as text or as input_ids, not as both"
                raise BadRequest(
                    reason, field="text", value=self.text, remedy="leave one of them out"
                )
            given = [
                model.tokenizer(text).input_ids
                for text in (self.text if isinstance(self.text, list) else [self.text])
            ]
        return [check_prompt(prompt, model) for prompt in given]

    def to_score(self, model: Model) -> list[list[int]] | None:
        """Returns the prompts whose log-probabilities are requested; None for a request that
        generates.

        Raises BadRequest when both are requested.
        """
        if self.logprob_start_len < 0:
            return None
        prompts = self._prompts(model)
        for fields in self._sampling(prompts):
            if (
                fields.max_new_tokens != 0
                or fields.n not in (None, 1)
                or self.return_logprob is not True
                or self.lora_path
            ):
                reason = "log-probabilities of a prompt need return_logprob, max_new_tokens 0, n 1 and no lora_path"
                raise BadRequest(
                    reason,
                    field="logprob_start_len",
                    value=self.logprob_start_len,
                    remedy="request them separately",
                )
        return prompts

    def _sampling(self, prompts: list[list[int]]) -> list[SamplingFields]:
        return [
            _parse_sampling(raw)
            for raw in self._per_prompt("sampling_params", self.sampling_params or {}, prompts)
        ]

    def jobs(self, model: Model) -> list[GenerationJob]:
        prompts = self._prompts(model)
        parameters = self._sampling(prompts)
        if any(fields.max_new_tokens == 0 for fields in parameters):
            remedy = "ask for at least 1, or, with return_logprob and logprob_start_len, for the prompt's log-probabilities"
            raise BadRequest(
                "max_new_tokens is 0, so the request asks for nothing",
                field="sampling_params.max_new_tokens",
                value=0,
                remedy=remedy,
            )
        names = ("rid", "return_logprob", "return_sampling_mask", "lora_path")
        rows = zip(
            prompts,
            parameters,
            *(self._per_prompt(name, getattr(self, name), prompts) for name in names),
            strict=True,
        )
        jobs = []
        for index, (prompt, fields, rid, score, mask, adapter) in enumerate(rows):
            name = (
                uuid.uuid4().hex
                if rid is None
                else f"{rid}_{index}"
                if isinstance(self.rid, str) and self.is_batch
                else rid
            )
            params = fields.sampling(len(prompt), model, bool(score), bool(mask))
            jobs.append(
                GenerationJob(name, prompt, params, fields.n or 1, bool(score), adapter or None)
            )
        return jobs

    @staticmethod
    def _per_prompt(name: str, value: Any, prompts: list[list[int]]) -> list[Any]:
        if not isinstance(value, list):
            return [value] * len(prompts)
        if len(value) != len(prompts):
            reason = f"{name} has {len(value)} entries for {len(prompts)} prompts"
            raise BadRequest(
                reason, field=name, value=value, remedy="send one for all prompts, or one for each"
            )
        return value


def check_prompt(prompt: Any, model: Model) -> list[int]:
    """Returns the prompt. Raises BadRequest when it is too long or not a list of the model's token
    ids.
    """
    if not isinstance(prompt, list) or not prompt:
        reason, remedy = (
            "a prompt is empty or not a list of token ids",
            "send at least one token id",
        )
        raise BadRequest(reason, field="input_ids", value=prompt, remedy=remedy)
    if len(prompt) >= model.max_context_tokens:
        reason = f"the prompt has {len(prompt)} tokens, the context {model.max_context_tokens}"
        remedy = "send a shorter prompt or start the engine with a larger --max-context-tokens"
        raise BadRequest(reason, field="input_ids", value=len(prompt), remedy=remedy)
    wrong = [
        token for token in prompt if type(token) is not int or not 0 <= token < model.vocab_size
    ]
    if wrong:
        remedy = f"send whole numbers from 0 to {model.vocab_size - 1}"
        raise BadRequest(
            "a token id is not in the vocabulary", field="input_ids", value=wrong[0], remedy=remedy
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
