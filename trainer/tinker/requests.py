"""Tinker's requests in JSON. A field that is not among them is refused by its name: it would change
what the request means.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
)

from common.errors import InvalidInput
from common.wire.codec import parse_json
from common.wire.schemas import AtMost, Wire
from trainer.tinker.interface import AdamParams, LoraSpec

Metadata = Annotated[dict[str, Any], AtMost(1000)]
Labels = Annotated[dict[str, str], AtMost(1000)]
_B = TypeVar("_B", bound=BaseModel)
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
_Stop = Annotated[str, Field(min_length=1)]
_Ints = Annotated[list[int], AtMost(1 << 20)]
_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
"""A number that the file of the server can have."""
_Ttl = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]


class TinkerBody(Wire):
    """A request."""

    model_config = ConfigDict(protected_namespaces=())
    type: str = ""

    def stored(self) -> bytes:
        """Returns what is kept of a request: the same for one that the SDK sends again."""
        return self.model_dump_json(exclude_unset=True).encode()


class Page(BaseModel):
    """Which part of a list a client asks for, in a query."""

    limit: NonNegativeInt = 20
    offset: NonNegativeInt = 0


class CreateSession(TinkerBody):
    """Begins a session."""

    tags: Annotated[list[str], AtMost(1000)] = Field([])
    user_metadata: Metadata | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionBody(TinkerBody):
    """A call about a session."""

    session_id: str


class OptimizerConfig(BaseModel):
    """The optimiser of a run."""

    model_config = ConfigDict(extra="allow")
    type: Literal["adamw"] = "adamw"


class CreateModel(TinkerBody):
    """Begins a run."""

    session_id: str
    model_seq_id: NonNegativeInt
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: LoraSpec
    """Without it all of the model would be trained."""
    optimizer_config: OptimizerConfig = OptimizerConfig()


class RunBody(TinkerBody):
    """A call about a run."""

    model_id: str


class Numbered(RunBody):
    """An operation of a run."""

    seq_id: Annotated[_Count, Field(ge=1)]


class Place(Numbered):
    """The run and the number of an operation, whatever else is in it."""

    model_config = ConfigDict(extra="ignore")


class OptimStep(Numbered):
    """Applies gradients."""

    adam_params: AdamParams


class SaveWeights(Numbered):
    """Saves weights for training."""

    path: _Name | None = None
    ttl_seconds: _Ttl | None = None
    overwrite: bool = False
    user_metadata: Labels | None = None


class SaveForSampler(Numbered):
    """Saves weights for sampling."""

    path: _Name | None = None
    sampling_session_seq_id: NonNegativeInt | None = None
    kind: Literal["snapshot"] = "snapshot"
    """`inflight`, which changes under its requests, is not served."""
    ttl_seconds: _Ttl | None = None
    user_metadata: Labels | None = None


class SaveExternal(Numbered):
    """Saves weights for a download."""

    path: _Name
    ttl_seconds: _Ttl | None = None
    age_encryption_recipients: Annotated[list[str], AtMost(0)] | None = None
    """Files are not encrypted: they do not leave the server but to their owner."""


OPERATIONS: dict[str, type[Numbered]] = {
    "optim_step": OptimStep,
    "save_weights": SaveWeights,
    "save_weights_for_sampler": SaveForSampler,
    "save_weights_external": SaveExternal,
}
"""The operations of a run, by their names on the wire."""


class LoadWeights(TinkerBody):
    """Loads weights, into a run or as a new one."""

    model_id: str | None = None
    seq_id: PositiveInt | None = None
    session_id: str | None = None
    model_seq_id: NonNegativeInt | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: None = None
    """It belongs to another account, and there are none."""


class LoadRun(LoadWeights):
    """Loads weights as a new run."""

    session_id: str
    model_seq_id: NonNegativeInt


class CreateSampler(SessionBody):
    """Begins to sample."""

    sampling_session_seq_id: NonNegativeInt
    base_model: str | None = None
    model_path: str | None = None


class JoinSampler(TinkerBody):
    """Asks for the number of a copy of a sampling client."""

    sampling_session_id: str


class Chunk(Wire):
    """Tokens of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    """First, so that an image is refused by its type."""
    tokens: _Ints


class PromptChunks(Wire):
    """A prompt of text."""

    chunks: Annotated[list[Chunk], AtMost(10_000)]


class SampleParams(Wire):
    """How to sample."""

    max_tokens: PositiveInt | None = None
    seed: int | None = None
    stop: (
        _Stop | Annotated[list[_Stop], AtMost(1000)] | Annotated[list[int], AtMost(1000)] | None
    ) = None
    """None: at the model's end of text; an empty list: at nothing; others: at these and the end."""
    temperature: NonNegativeFloat = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TokenTensor(Wire):
    """Tokens to score at the places of a prompt after the first, [T - 1, K]; -1 stands for none. A
    sparse one lists tokens with their places (CSR).
    """

    data: Annotated[list[Annotated[int, Field(ge=-1)]], AtMost(1 << 20)]
    dtype: Literal["int64"]
    shape: tuple[PositiveInt, PositiveInt]
    sparse_crow_indices: _Ints | None = None
    sparse_col_indices: _Ints = Field([])

    @property
    def tokens(self) -> list[int]:
        """All tokens, once each."""
        return sorted({*self.data} - {-1})

    def answer(self, scores: Sequence[Sequence[Any] | None]) -> dict[str, Any]:
        """Returns the log-probabilities in the same layout, as a `Tensor` of protobuf, given those
        of `tokens` at every place of the prompt. Raises InvalidInput for another shape.
        """
        rows, width = self.shape
        ends = self.sparse_crow_indices
        bounds = range(0, rows * width + 1, width) if ends is None else ends
        values: list[float] = []
        for place, (start, end) in zip(scores[1:], pairwise(bounds), strict=False):
            known = {token: logprob for logprob, token, *_ in place or ()}
            values += [known.get(token, 0.0) for token in self.data[start:end]]
        columns = [0] * len(values) if ends is None else self.sparse_col_indices
        if not (
            rows == len(scores) - 1 == len(bounds) - 1
            and len(values) == len(self.data) == len(columns) == bounds[-1]
            and all(0 <= column < width for column in columns)
        ):
            raise InvalidInput(
                "its shape must fit the prompt and the number of its values",
                field="target_prompt_logprobs.shape",
                value=self.shape,
                remedy=f"send {len(scores) - 1} rows: one for each token after the first",
            )
        content: dict[str, Any] = {"dense": np.array(values, "<f4").tobytes()}
        if ends is not None:
            content["sparse"] = {
                "values": content.pop("dense"),
                "row_ends": np.array(ends, "<i8").tobytes(),
                "columns": np.array(self.sparse_col_indices, "<i8").tobytes(),
            }
        return {"dtype": 1, "shape": self.shape, **content}


class Sample(TinkerBody):
    """Samples completions of a prompt."""

    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    prompt: PromptChunks
    sampling_params: SampleParams
    sampling_session_id: str
    seq_id: _Count
    base_model: None = None
    model_path: None = None
    """The sampling session has them."""
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: PositiveInt | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    target_prompt_logprobs: TokenTensor | None = None
    prompt_alt_tokens_k: Annotated[int, Field(le=0)] = 0
    record_stability_info: bool | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]


class Retrieve(TinkerBody):
    """Asks for a result."""

    request_id: str
    allow_metadata_only: bool = False


class Target(BaseModel):
    """The requests of one client of a sampler."""

    sampling_session_id: str
    cloned_sampler_id: Annotated[int, Field(ge=0, lt=1 << 32)] = 0


class RetrieveMany(TinkerBody):
    """Asks what is finished."""

    target: Target
    prev_cursor: _Count = 0
    timeout: NonNegativeFloat | None = None
    retrieved_request_ids: Annotated[list[str], AtMost(100_000)] = Field([])


class TinkerPath(TinkerBody):
    """A call about saved weights."""

    tinker_path: str


class Ttl(TinkerBody):
    """Changes when weights expire."""

    ttl_seconds: _Ttl | None = None


_INSTEAD = {
    "optimizer_params": "adam_params: AdamW is the optimiser",
    "optimizer_config.type": "adamw",
    "kind": "snapshot: take a new sampling client after an update",
    "prompt_alt_tokens_k": "num_samples, of the prompt up to the position",
    "age_encryption_recipients": "files over a server with TLS_CERT and TLS_KEY, or encrypt them "
    "after the download",
    "prompt.chunks.type": "chunks of tokens (EncodedTextChunk): the model reads text only",
    "weights_access_token": "the key of the client that saved the weights",
    "model_path": "create_sampling_session",
    "base_model": "create_sampling_session",
    "lora_config": "LoRA: rlhf train and rlhf sft train all of a model",
    "sampling_session_id": "create_sampling_session",
}
"""What serves in the place of what is refused, by field."""


def stored(content: dict[str, Any]) -> bytes:
    """Returns what is kept of an operation, which is checked when it is applied: the same for one
    that the SDK sends again, which then counts its `sampling_session_seq_id` up.
    """
    counted = "sampling_session_seq_id"
    return json.dumps({name: content[name] for name in content if name != counted}).encode()


def parse(kind: type[_B], content: bytes) -> _B:
    """Returns a request in JSON. Raises InvalidInput as `validated` does, or for other text."""
    return validated(kind, parse_json(content))


def validated(kind: type[_B], content: object) -> _B:
    """Returns a request. Raises InvalidInput, which says what serves instead of what does not."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        # Where in a list it is says nothing about what serves instead.
        served = _INSTEAD.get(".".join(part for part in path if not part.isdecimal()))
        remedy = "send a value that fits"
        if first["type"] in ("missing", "extra_forbidden"):
            remedy = "send what the SDK `tinker` 0.38 sends"
        raise InvalidInput(
            f"this server does not support this: {first['msg']}" if served else first["msg"],
            field=".".join(path[:2]) or "body",
            value=first.get("input"),
            remedy=f"use {served}" if served else remedy,
        ) from None
