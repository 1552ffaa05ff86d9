"""Every type on the wire.

JSON bodies are pydantic models. The unit of experience is the `Group`: one prompt, n completions,
their rewards; it is stored, handed out, sampled, dropped and counted whole. Types that carry arrays
are msgspec structs over numpy, and travel as msgpack with raw little-endian arrays
(`common.wire.codec`).
"""

import sys
from dataclasses import dataclass
from functools import partial
from operator import not_
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from msgspec import Meta, Struct, field
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import PydanticKnownError, core_schema

from common.errors import Refused

_T = TypeVar("_T")
FLOAT32_MAX = float(np.finfo(np.float32).max)
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_BYTE = {"type": "integer", "minimum": 0, "maximum": 255}
_NUMBER = {"type": "number", "minimum": -FLOAT32_MAX, "maximum": FLOAT32_MAX}
Int32 = Annotated[NDArray[np.int32], Meta(extra_json_schema={"items": _TOKEN_ID})]
Float32 = Annotated[NDArray[np.float32], Meta(extra_json_schema={"items": _NUMBER})]
UInt8 = Annotated[NDArray[np.uint8], Meta(extra_json_schema={"items": _BYTE})]
FinishReason = Literal["stop", "length", "abort"]
RewardStatus = Literal[
    "ok", "unparsable", "unevaluated", "timeout", "died", "error", "inapplicable"
]
"""`ok`: graded. `unparsable`: no answer in the response, graded 0. `unevaluated`: an expression
with the right value where the ground truth is a number, graded 0. `timeout`, `died` (a worker),
`error` (a reward function failed), `inapplicable` (no reward function applies): not graded, the
reward is null."""


_FEW = 16
"""Mappings of up to this many items are cheap to validate even when all items are invalid."""


@dataclass(frozen=True)
class AtMost:
    """Bounds a list or mapping before its items are validated, and stops at the first invalid item.

    pydantic validates the items first and collects every error, which takes seconds and gigabytes
    for a million of them.
    """

    limit: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema: Any = handler(source)
        if schema["type"] == "list":
            return core_schema.no_info_before_validator_function(
                self._bounded, schema | {"fail_fast": True}
            )
        return core_schema.no_info_wrap_validator_function(self._one_by_one, schema)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found = handler(schema)
        return found | {"maxItems" if found.get("type") == "array" else "maxProperties": self.limit}

    def _bounded(self, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > self.limit:
            found = {
                "field_type": type(value).__name__,
                "max_length": self.limit,
                "actual_length": len(value),
            }
            raise PydanticKnownError("too_long", found)
        return value

    def _one_by_one(self, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        # pydantic collects an error for every wrong item of a mapping, however many: in parts of
        # one item the first error ends it, as `fail_fast` does for lists.
        if not isinstance(self._bounded(value), dict) or len(value) <= _FEW:
            return handler(value)
        return {
            name: item for pair in value.items() for name, item in handler(dict([pair])).items()
        }


MAX_LISTED = 65_536
"""Maximum items of a list on the wire that has no other limit."""
MAX_NAMES = 1024
"""Maximum names of a mapping on the wire that has no other limit."""
Columns = Annotated[dict[str, Any], AtMost(MAX_NAMES)]
Listed = Annotated[list[_T], AtMost(MAX_LISTED)]
Text = Annotated[str, StringConstraints(max_length=1_000_000)]
RequestId = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class Wire(BaseModel):
    """Base of all JSON bodies; refuses unknown fields and non-finite numbers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, data: Any) -> Any:
        """Keeps only one unknown field: for a million, pydantic would collect a million errors."""
        if isinstance(data, dict) and len(data) > len(cls.model_fields) + 1:
            unknown = next(name for name in data if name not in cls.model_fields)
            return {name: data[name] for name in (*cls.model_fields, unknown) if name in data}
        return data


class Prompt(Wire):
    """One problem of the data set."""

    id: str
    prompt: str
    ground_truth: str
    task: str = Field("", exclude_if=not_)
    """Selects the reward functions when a data set mixes tasks; empty: the default ones. Left out
    of JSON when empty."""
    columns: Columns = Field({}, exclude_if=not_)
    """Further columns of the row, for reward functions that read them (`test_cases`, …). Left out
    of JSON when empty."""
    chat: Listed[Annotated[dict[str, str], AtMost(MAX_NAMES)]] = Field([], exclude_if=not_)
    """The conversation to continue, if the problem is one and no text. It ends with `prompt`; its
    own system message replaces `sampling.system_prompt`. Left out of JSON when empty."""


class PromptBatch(Wire):
    """Answer of `GET /prompts`."""

    prompts: Listed[Prompt]
    total_available: int
    """Problems in the training split."""
    epoch: int
    """Epoch of the first prompt, from 0."""
    position: int
    """Prompts taken from this stream before this batch, over all epochs; `POST /seek` returns to
    it."""


class PassRateReport(Wire):
    """Body of `POST /pass_rates`: how often prompts of the training split were solved."""

    prompt_ids: Annotated[
        list[Annotated[str, StringConstraints(max_length=512)]],
        Field(min_length=1),
        AtMost(MAX_LISTED),
    ]
    pass_rates: Listed[Annotated[float, Field(ge=0, le=1)]]
    """Share of correct completions of each prompt, in the order of `prompt_ids`."""
    request_id: RequestId
    """A report sent again with the same id counts only once."""

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        if len(self.prompt_ids) != len(self.pass_rates):
            raise Refused(
                f"there are {len(self.prompt_ids)} prompt_ids and {len(self.pass_rates)} "
                "pass_rates",
                "send one for each prompt",
            )
        return self

    def pairs(self) -> list[tuple[str, float]]:
        return list(zip(self.prompt_ids, self.pass_rates, strict=True))


class RewardItem(Wire):
    """One answer to grade."""

    prompt: Text = ""
    response: Text
    ground_truth: Text
    finish_reason: FinishReason = "stop"
    task: Text = ""
    """As in `Prompt`."""
    columns: Columns = {}
    """As in `Prompt`."""


MAX_BATCH_ITEMS = 4096
"""Maximum answers per `POST /batch_reward`."""


class BatchRewardRequest(Wire):
    """Body of `POST /batch_reward`."""

    items: Annotated[list[RewardItem], Field(min_length=1), AtMost(MAX_BATCH_ITEMS)]


class RewardResult(Wire):
    """Response of `POST /reward`; `reward` is null when the answer could not be graded."""

    reward: float | None
    extracted_answer: str | None
    ground_truth: str
    correct: bool
    status: RewardStatus
    components: Annotated[dict[str, float | None], AtMost(MAX_NAMES)] = {}
    """Score of every reward function by its name, before weights; null where it failed."""
    verified: bool = True
    """Whether `correct` is a verdict, of a function that gives verdicts; otherwise it is false."""
    reason: str = ""
    """Why there is no reward: the error in the reward function, with its file and line."""


class BatchRewardResult(Wire):
    """Response of `POST /batch_reward`, in the order of the items; means are over graded items, 0
    without any.
    """

    rewards: Annotated[list[RewardResult], AtMost(MAX_BATCH_ITEMS)]
    mean_reward: float
    accuracy: float


class GroundTruthProblem(Wire):
    """A ground truth that no answer can match."""

    index: int
    """Position of the item in the request."""
    reason: str


class GroundTruthProblems(Wire):
    """Response of `POST /check_ground_truths`."""

    problems: Annotated[list[GroundTruthProblem], AtMost(MAX_BATCH_ITEMS)]
    repaired: NonNegativeInt = 0
    """The number of ground truths that are read otherwise than written: `['31']` as 31."""


_Checksum = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class SentFile(Wire):
    """A file that rollout nodes may fetch."""

    name: Annotated[
        str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=128)
    ]
    size: NonNegativeInt
    xxh3: _Checksum
    """`common.weights.checksums.checksum` of its bytes."""


class WeightDelta(SentFile):
    """The difference of a file from an earlier version's file (`common.weights.deltas`)."""

    base: _Checksum
    """Checksum of the earlier file, which has the same size."""


class WeightFile(SentFile):
    """One file of a weight version."""

    delta: WeightDelta | None = Field(None, exclude_if=not_)
    """Reconstructs this file from an earlier one, if that saves much."""


class WeightManifest(Wire):
    """The files of a weight version; its number is the optimiser step that made it."""

    version: NonNegativeInt
    run_id: str
    """The training run: a version number alone does not tell two runs apart."""
    kind: Literal["model", "adapter"] = "model"
    """A complete model directory, or a LoRA adapter in PEFT's format."""
    files: Listed[WeightFile] = []
    """Empty: the trainer writes them on request (`GET /weights/latest?files=true`)."""
    progress: NonNegativeInt = 0
    """A number that grows as long as the trainer writes the files of this version; 0 when they are
    there."""
    directory: str = ""
    """Directory of the files on the trainer's disk, for rollout nodes that mount it too. Empty:
    nodes must download."""
    broadcast: "Broadcast | None" = None
    """Set when the tensors are broadcast instead of downloaded."""
    asleep: bool = False
    """The trainer computes on the GPUs that it shares with the engines (`rollout.colocate`): they
    release their memory."""


def adapter_name(run_id: str, version: int) -> str:
    """Returns the engines' name of the LoRA adapter of a weight version; it never names other
    weights.
    """
    return f"{run_id}-v{version:06d}"


MAX_TENSORS = 1_000_000
Shapes = Annotated[list[Annotated[list[int], AtMost(64)]], AtMost(MAX_TENSORS)]


class Bucket(Wire):
    """Tensors in one message: their bytes concatenated, all of one dtype, so that each is
    aligned.
    """

    names: Annotated[list[str], Field(min_length=1), AtMost(MAX_TENSORS)]
    """Hugging Face names."""
    dtypes: Annotated[list[str], AtMost(MAX_TENSORS)]
    """torch's names: `float32`."""
    shapes: Shapes


class Broadcast(Wire):
    """A torch.distributed group of the trainer (rank 0, the source) and all ranks of the engines,
    and what it sends.
    """

    group: str
    master_address: str
    master_port: int
    world_size: int
    backend: Literal["gloo", "nccl"]
    ranks: Annotated[dict[str, int], AtMost(MAX_LISTED)]
    """Rank of the first GPU of each worker's engine; the ranks of its other GPUs follow."""
    incarnations: Annotated[dict[str, str], AtMost(MAX_LISTED)]
    """`WorkerReport.incarnation` of each worker; an engine restarted since then is not a member."""
    buckets: Annotated[list[Bucket], AtMost(MAX_TENSORS)]


class WeightChecksums(Wire):
    """Checksums of an engine's weights (`POST /weights/{version}/verify` of the trainer)."""

    worker: str
    ranks: Annotated[
        list[Annotated[dict[str, str], AtMost(MAX_TENSORS)]],
        Field(min_length=1),
        AtMost(MAX_LISTED),
    ]
    """For every GPU, the checksum of each tensor, by its name in the engine."""


class WeightVerdict(Wire):
    """Confirms that the engine's weights match the reference; otherwise the response is 409."""

    compared: str
    """How many of the trainer's own tensors the engine's were compared with."""


MAX_DETAIL_CHARS = 4000
_Name = Annotated[str, StringConstraints(max_length=500)]
_Words = Annotated[str, StringConstraints(max_length=5000)]
WorkerState = Literal["starting", "ready", "updating", "asleep", "stale", "failed"]


class WorkerReport(Wire):
    """State of a rollout node's engine (`POST /workers/{name}` of the trainer)."""

    name: _Name
    """`rollout-server-1`"""
    url: _Words
    """URL of the engine, as the router knows it."""
    num_nodes: int
    """Rollout nodes of the job group."""
    state: WorkerState
    version: int | None
    """Weight version the engine serves; None before the first."""
    run_id: _Name | None = None
    detail: _Words = ""
    """The reason, when the state is `stale` or `failed`; what the node is doing, while it
    updates."""
    progress: NonNegativeInt = 0
    """A number that grows as long as the node gets nearer to its next version."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Processes of the engine, each with its own GPU if the engine uses GPUs."""
    nodes_per_engine: int = Field(1, ge=1)
    """Nodes that form its engine; only the first of them reports."""
    gpus: NonNegativeInt = 0
    """GPUs of the engine."""
    incarnation: _Name = ""
    """Changes when the engine must join a new group, because it was restarted or a broadcast to it
    failed."""
    libraries: "EngineLibraries | None" = None
    """Libraries of its engine; None where no weights are sent over NCCL."""


class ReportNoted(Wire):
    """The answer to a report."""

    status: str = "noted"
    may_serve: bool = True
    """Whether the engine may get requests: it serves the newest weights, or the trainer waits until
    it does."""


class EngineLibraries(Wire):
    """Versions of the libraries with which an engine receives weights from GPU to GPU."""

    torch: _Name
    nccl: _Name


class EngineWeights(Wire):
    """Weights that every node of an engine larger than one node must have on its disk."""

    manifest: WeightManifest
    path: _Words = ""
    """Where the engine reads them, the same on every node; empty while the first node fetches
    them."""

    @property
    def key(self) -> str:
        """Identifies these weights at this path."""
        return f"{self.manifest.run_id}-v{self.manifest.version} {self.path}"


class EngineStart(Wire):
    """One start of an engine larger than one node: a process on each node."""

    id: _Name
    dist_init_addr: _Name
    """`host:port` on the first node, where the processes find each other."""
    model_path: _Words
    weight_version: _Name
    weights: EngineWeights | None = None
    """What `model_path` names; None for the base model."""
    go: bool = False
    """Whether the processes may start, because all nodes are prepared."""


class EngineOrder(Wire):
    """What the first node of an engine wants of the others (`GET /engine` of its agent)."""

    revision: _Name
    """Changes with every other field."""
    start: EngineStart | None = None
    """The start that should run; None: no process."""
    weights: EngineWeights | None = None
    """The weights to have on disk, besides those of the start."""


class EngineNodeReport(Wire):
    """State of a further node of an engine (`POST /engine/nodes` of the first node's agent)."""

    name: _Name
    prepared: _Name = ""
    """The last start that this node has the weights for, with no earlier process left."""
    cannot_start: _Name = ""
    """The last start whose weights this node cannot get; `detail` says why."""
    start: _Name = ""
    """The start of the process that runs or ran here."""
    ended: _Words = ""
    """Why that process has ended; empty while it runs."""
    holds: _Words = ""
    """The `key` of the ordered weights that can be read here."""
    detail: _Words = ""
    progress: NonNegativeInt = 0
    """A number that grows as long as the node gets nearer to what is wanted of it."""


MAX_COMPLETIONS = 1024
"""Maximum completions of one group."""
_Count = Annotated[int, Meta(ge=0, lt=2**53)]
_Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_Chars = Annotated[str, Meta(max_length=1_000_000)]
_Key = Annotated[str, Meta(max_length=512)]
_Many = Annotated[list[_T], Meta(max_length=MAX_LISTED)]
_Named = Annotated[dict[_Key, _T], Meta(max_length=MAX_NAMES)]
_Spans = Annotated[
    list[tuple[_Count, _Count, _Count]],
    Meta(
        min_length=1,
        max_length=MAX_LISTED,
        description="[version, start, end], one after the other, over all tokens",
    ),
]


_no_tokens = partial[Int32](np.zeros, 0, np.int32)
_no_bytes = partial[UInt8](np.zeros, 0, np.uint8)


class Turn(Struct, forbid_unknown_fields=True):
    """Tokens of a sequence that the model sampled without interruption."""

    start: _Count
    end: _Count
    """Index of the first token after the turn."""
    reward: _Finite | None = None
    """The part of the episode's reward that the environment gave for this turn; None when it gave
    none."""


class Completion(Struct, forbid_unknown_fields=True, kw_only=True):
    """One sampled answer. L is its length in tokens, the end-of-sequence token included."""

    token_ids: Int32
    """[L] token ids as the engine sampled them; never re-tokenised."""
    logprobs: Float32
    """[L] log-probabilities in nats under the policy that sampled them, at the sampling
    temperature."""
    text: _Chars = ""
    finish_reason: FinishReason
    weight_versions: _Spans
    """(version, start, end) spans over the tokens: which weights sampled which tokens."""
    reward: Annotated[float, Meta(ge=-FLOAT32_MAX, le=FLOAT32_MAX)] = 0.0
    correct: bool = False
    verified: bool = True
    """As in `RewardResult`."""
    status: RewardStatus = "ok"
    extracted_answer: _Chars | None = None
    components: _Named[_Finite | None] = {}
    """As in `RewardResult`."""
    teacher_logprobs: Float32 | None = None
    """[L] log-probabilities in nats under the teacher, at temperature 1; null without one."""
    kept_tokens: Int32 = field(default_factory=_no_tokens)
    """With truncated sampling (top-p, top-k, min-p): for every token, the tokens it was sampled
    from, concatenated. The log-probabilities are relative to these."""
    kept_counts: Int32 = field(default_factory=_no_tokens)
    """[L] lengths of the lists in `kept_tokens`, 0 for a token sampled from all; empty when all
    tokens were."""
    routed_experts: UInt8 = field(default_factory=_no_bytes)
    """With routing replay: [L - 1, layers, top_k] the numbers of the experts that computed each
    token but the last; else empty. A number takes one byte, or two (little-endian) in a group with
    numbers above 255. Layers without experts count, with any numbers."""
    mask: Int32 | None = None
    """[L] 1 for a token to train on, 0 for a token of a tool or the environment; None: train on
    all."""
    prompt_ids: Int32 | None = None
    """[P] its own prompt; None: the group's prompt."""
    turns: _Many[Turn] = []
    """The turns of an episode; empty for a single-turn completion."""
    episode: Annotated[int, Meta(ge=0, lt=MAX_COMPLETIONS)] | None = None
    """Index of its episode in the group, which may have several sequences; None: the completion is
    an episode by itself."""

    @property
    def weight_version(self) -> int:
        """The oldest weight version that sampled a token of this completion."""
        return min(span[0] for span in self.weight_versions)

    def trained(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns the entries of `values` [L] that belong to trained tokens."""
        return values if self.mask is None else values[self.mask == 1]

    def trained_between(self, start: int, end: int) -> int:
        """Returns how many of the tokens from `start` to `end` are trained."""
        return end - start if self.mask is None else int(self.mask[start:end].sum())

    def spread(self, values: Float32) -> Float32:
        """Expands one value per trained token to [L], with 0 for the other tokens."""
        if self.mask is None:
            return values
        spread = np.zeros(len(self.mask), np.float32)
        spread[self.mask == 1] = values
        return spread


class Group(Struct, forbid_unknown_fields=True, kw_only=True):
    """One prompt and its n completions: the unit of experience."""

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    """Made by the client; adding the same id again changes nothing."""
    prompt_id: _Key = ""
    prompt: _Chars = ""
    ground_truth: _Chars = ""
    prompt_token_ids: Int32
    """[P] token ids."""
    completions: Annotated[list[Completion], Meta(min_length=1, max_length=MAX_COMPLETIONS)]
    epoch: _Count = 0
    position: _Count = 0
    """Position of the prompt in the data-server's stream."""
    created_at: _Finite = 0.0
    """Seconds since 1970."""
    min_new_tokens: _Count = 0
    """Number of tokens at the start of each completion that were sampled without the `barred`
    tokens."""
    barred: Int32 = field(default_factory=_no_tokens)
    prompt_routed_experts: UInt8 = field(default_factory=_no_bytes)
    """[P, layers, top_k] `Completion.routed_experts` of the prompt, as the engine computed it for
    the first completion."""
    metadata: Annotated[dict[str, Any], Meta(max_length=MAX_NAMES)] = {}
    lost_episodes: _Many[_Chars] = []
    """Why each episode that the group lacks was lost; empty when it has all."""

    @property
    def weight_version(self) -> int:
        """The oldest weight version that sampled a token of this group."""
        return min(completion.weight_version for completion in self.completions)

    @property
    def answers(self) -> list[Completion]:
        """One completion of each episode; completions of one episode share reward and verdict."""
        first: dict[int, Completion] = {}
        for i, completion in enumerate(self.completions):
            first.setdefault(
                -1 - i if completion.episode is None else completion.episode, completion
            )
        return list(first.values())

    @property
    def rewards(self) -> Float32:
        return np.array([completion.reward for completion in self.completions], np.float32)

    @property
    def zero_variance(self) -> bool:
        """Whether all completions have the same reward, so that the group has no gradient."""
        return bool((self.rewards == self.rewards[0]).all())


class Groups(Struct):
    """Body of `POST /groups`."""

    groups: Annotated[list[Group], Meta(max_length=MAX_LISTED, extra_json_schema={"minItems": 1})]


class TakenGroups(Struct):
    """Answer of `POST /groups/take`."""

    groups: _Many[Group]
    ids: _Many[_Key] = []
    """The groups' ids, also when `ids_only` leaves the groups themselves out."""
    evicted: _Count = 0
    """Groups dropped by this call because they were older than `min_version`."""


class SampledGroups(Struct):
    """Answer of `POST /groups/sample`: prioritised reuse."""

    groups: _Many[Group]
    weights: Float32
    """[len(groups)] importance weights (N·P(i))^-β, divided by their mean over draws
    (`services.replay.sampling`)."""


EpisodeStatus = Literal["ok", "timeout", "died", "error"]
"""`ok`: the episode ended or reached a limit. `timeout`: its time ran out. `died`: the environment,
its runner or the engine was lost. `error`: the environment failed. Only `ok` has a reward."""
StopReason = Literal[
    "done", "length", "turns", "sampled_tokens", "tool_calls", "context", "deadline", ""
]
"""`done`: it ended by itself. `length`: an answer was cut at `max_new_tokens`. The other values
name the limit reached."""


class EpisodeSequence(Struct, forbid_unknown_fields=True):
    """Tokens of an episode to train on, from one path through its calls. L is their number."""

    prompt_ids: Int32
    """[P] tokens before the first trained token."""
    token_ids: Int32
    """[L] token ids as the engine sampled them, with the tokens added between two answers."""
    mask: Int32
    """[L] 1 for a sampled token to train on, else 0."""
    logprobs: Float32
    """[L] as in `Completion`; 0 where the mask is 0."""
    weight_versions: _Spans
    """As in `Completion`. Added tokens count to the version before them."""
    turns: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_LISTED)]
    finish_reason: FinishReason
    text: _Chars = ""
    """The text of all tokens."""


class Episode(Struct, forbid_unknown_fields=True):
    """One run of an environment."""

    id: Annotated[str, Meta(min_length=1, max_length=160)]
    """The request's, `-` and its number there; `.1` and `.2` follow when it was tried again."""
    status: EpisodeStatus
    stop_reason: StopReason
    reward: _Finite | None
    """Includes the rewards of the turns. Null when the environment gives none and the answer is
    still to be graded, or when the status is not `ok`."""
    answer: _Chars
    """Text of the last answer, without its thoughts."""
    sequences: _Many[EpisodeSequence]
    components: _Named[_Finite | None] = {}
    metrics: _Named[_Finite] = {}
    """`turns`, `tool_calls`, `tool_errors`, `sampled_tokens`, `seconds`, `tool_seconds`,
    `refused_calls`."""
    detail: _Chars = ""
    """The reason for the status."""
    refusal: _Chars = ""
    """Why the first call that was refused was refused; empty when none was."""


class Episodes(Struct):
    """Answer of `POST /episodes`."""

    episodes: _Many[Episode]


class EpisodeTask(Wire):
    """The task of an episode."""

    env: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    """As in `environment.name`."""
    prompt: Text = ""
    messages: Listed[Columns] = []
    """The initial conversation. Empty: `prompt` as a user message."""
    ground_truth: Text = ""
    columns: Columns = {}
    """Further columns of the row, for the environment."""
    seed: int = Field(0, ge=0, lt=2**53)
    """Sampling seed, for engines that honour one."""


class EpisodeSampling(Wire):
    """Sampling parameters of every answer; those that a program requests have no effect."""

    max_new_tokens: int = Field(gt=0, lt=2**31)
    temperature: NonNegativeFloat = 1.0


class EpisodePolicy(Wire):
    """The policy that answers."""

    adapter: str = ""
    """Name of a LoRA adapter that the engines have loaded; empty: their own weights."""
    version: NonNegativeInt = 0
    """Weight version of the adapter."""


class EpisodeLimits(Wire):
    """Limits of an episode. Reaching a limit is a stop reason, not a failure."""

    turns: PositiveInt = 8
    """Maximum answers of the model."""
    sampled_tokens: PositiveInt = 16_384
    """Maximum sampled tokens over all answers."""
    context: int = Field(32_768, gt=1)
    """Maximum tokens of one sequence."""
    tool_calls: PositiveInt = 64
    deadline_s: PositiveFloat = 600.0
    """Seconds for the whole episode, without those in which it waits for the model; one that takes
    longer has no reward."""
    tool_timeout_s: PositiveFloat | None = None
    """Seconds for one tool call, after which the model is told an error; None: only the
    deadline."""


class EpisodeRequest(Wire):
    """Body of `POST /episodes`: n episodes of one task."""

    request_id: Annotated[
        str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")
    ]
    """A request sent again with the same id gets the same episodes."""
    n: int = Field(1, gt=0, le=MAX_COMPLETIONS)
    task: EpisodeTask
    sampling: EpisodeSampling
    policy: EpisodePolicy = EpisodePolicy()
    limits: EpisodeLimits = EpisodeLimits()


class TakeRequest(Wire):
    """Body of `POST /groups/take`: fresh groups, each handed out exactly once."""

    count: int = Field(gt=0, le=65536)
    min_version: int = Field(0, ge=0, lt=2**53)
    """Groups with an older weight version are evicted and counted."""
    wait_s: float = Field(0.0, ge=0, le=60)
    """Seconds to wait for `count` groups; with fewer, none are handed out."""
    request_id: RequestId
    """A retry with the same id gets the same answer, so a new request makes a new id. Once the
    groups were acknowledged, or the answer was empty, it gets no groups."""
    ids_only: bool = False
    """Answer with the ids of the groups, for a client that has the groups itself."""
    run_id: _Name = ""
    """The run that takes the groups; its request ids begin with this id. Leases of all other
    requests end, because only one run trains."""


class SampleRequest(Wire):
    """Body of `POST /groups/sample`."""

    count: int = Field(gt=0, le=65536)
    min_version: int = Field(0, ge=0, lt=2**53)
    priority_exponent: NonNegativeFloat = 0.6
    importance_exponent: float = Field(0.4, ge=0, le=1)
    max_times_sampled: int | None = Field(None, gt=0)
    request_id: RequestId | None = None
    """A retry with the same id gets the same groups, and they count as sampled once."""
    step: int | None = Field(None, ge=0, lt=2**53)
    """Optimiser steps done so far: a trainer that resumes from an earlier step undoes this draw.
    Needs a request id."""
    seed: NonNegativeInt = 0


Ids = Annotated[list[str], Field(min_length=1), AtMost(MAX_LISTED)]


class GroupIds(Wire):
    """Body of `POST /groups/ack`."""

    ids: Ids


class PriorityUpdate(Wire):
    """Body of `POST /groups/priorities`."""

    ids: Ids
    priorities: Listed[NonNegativeFloat]
    request_id: RequestId | None = None
    """A copy with the same id changes nothing."""
