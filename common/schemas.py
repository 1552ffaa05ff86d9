"""Every type on the wire.

JSON bodies are pydantic models. The unit of experience is the `Group`: one prompt, n completions, their rewards; it is
stored, handed out, sampled, dropped and counted whole. Groups carry arrays, so they are dataclasses over numpy and
travel as msgpack with raw little-endian arrays (`common.wire`).
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
FinishReason = Literal["stop", "length", "abort"]
RewardStatus = Literal["ok", "unparsable", "timeout", "died"]
"""`ok`: graded. `unparsable`: no answer in the response, graded 0. `timeout`, `died`: not graded, the reward is null."""


class Wire(BaseModel):
    """Base of all JSON bodies: unknown fields and non-finite numbers are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


# ---------------------------------------------------------------- data-server


class Prompt(Wire):
    """One problem of the data set."""

    id: str
    prompt: str
    ground_truth: str


class PromptBatch(Wire):
    """Answer of `GET /prompts`."""

    prompts: list[Prompt]
    total_available: int
    """Problems in the training split."""
    epoch: int
    """Epoch of the first prompt, from 0."""
    position: int
    """Prompts taken from this stream before this batch, over all epochs; `POST /seek` goes back to it."""


# ---------------------------------------------------------------- reward-server

Text = Annotated[str, StringConstraints(max_length=1_000_000)]


class RewardItem(Wire):
    """One answer to grade."""

    prompt: Text = ""
    response: Text
    ground_truth: Text
    finish_reason: FinishReason = "stop"


class BatchRewardRequest(Wire):
    items: list[RewardItem] = Field(min_length=1)


class RewardResult(Wire):
    """Answer of `POST /reward`. An error is not a zero: `reward` is null when the answer could not be graded."""

    reward: float | None
    extracted_answer: str | None
    ground_truth: str
    correct: bool
    status: RewardStatus


class BatchRewardResult(Wire):
    """Answer of `POST /batch_reward`, in the order of the items; means are over the graded ones."""

    rewards: list[float | None]
    mean_reward: float
    accuracy: float
    results: list[RewardResult]


# ---------------------------------------------------------------- rollout agents and weights


class WeightFile(Wire):
    """One file of a weight version."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=128)]
    size: int = Field(ge=0)
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class WeightManifest(Wire):
    """What a weight version consists of. Its version is the optimiser step that made it."""

    version: int = Field(ge=0)
    run_id: str
    """Of the training run: a version number alone does not tell two runs apart."""
    files: list[WeightFile] = Field(min_length=1)


WorkerState = Literal["starting", "ready", "updating", "stale", "failed"]


class WorkerReport(Wire):
    """What an agent tells the trainer about its engine (`POST /workers/{name}` of the trainer)."""

    name: str
    """`rollout-server-1`"""
    url: str
    """Of the engine, as the router knows it."""
    num_nodes: int
    """Rollout nodes of the job group: how many agents the trainer waits for."""
    state: WorkerState
    version: int | None
    """Weight version the engine serves; None before the first."""
    run_id: str | None = None
    detail: str = ""
    """Why, when the state is `stale` or `failed`."""


# ---------------------------------------------------------------- experience


@dataclass(slots=True)
class Completion:
    """One sampled answer. L is its length in tokens, the end-of-sequence token included."""

    token_ids: Int32
    """[L] as the engine sampled them; never re-tokenised."""
    logprobs: Float32
    """[L] log-probabilities in nats under the policy that sampled them, at the sampling temperature."""
    text: str
    finish_reason: FinishReason
    weight_versions: list[tuple[int, int, int]]
    """(version, start, end) spans over the tokens: which weights sampled which tokens."""
    reward: float = 0.0
    correct: bool = False
    status: RewardStatus = "ok"
    extracted_answer: str | None = None

    @property
    def weight_version(self) -> int:
        """The oldest weights that sampled a token of this completion."""
        return min(span[0] for span in self.weight_versions)


@dataclass(slots=True)
class Group:
    """One prompt and its n completions: the unit of experience."""

    id: str
    """Made by the client, unique; adding the same id again changes nothing."""
    prompt_id: str
    prompt: str
    ground_truth: str
    prompt_token_ids: Int32
    """[P]"""
    completions: list[Completion]
    epoch: int = 0
    position: int = 0
    """Of the prompt in the data-server's stream."""
    created_at: float = 0.0
    """Seconds since 1970."""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def weight_version(self) -> int:
        """The oldest weights that sampled a token of this group."""
        return min(completion.weight_version for completion in self.completions)

    @property
    def rewards(self) -> Float32:
        """[n]"""
        return np.array([completion.reward for completion in self.completions], np.float32)


@dataclass(slots=True)
class TakenGroups:
    """Answer of `POST /groups/take`."""

    groups: list[Group]
    evicted: int
    """Groups dropped by this call because they were older than `min_version`."""


@dataclass(slots=True)
class SampledGroups:
    """Answer of `POST /groups/sample`: prioritised reuse."""

    groups: list[Group]
    weights: Float32
    """[len(groups)] importance weights (N·P(i))^-β, divided by the largest of the buffer (Schaul et al. 2016)."""


class TakeRequest(Wire):
    """Body of `POST /groups/take`: fresh groups, each handed out exactly once."""

    count: int = Field(gt=0, le=65536)
    min_version: int = Field(0, ge=0)
    """Groups with an older weight version are evicted and counted."""
    wait_s: float = Field(0.0, ge=0, le=60)
    """How long to wait until `count` groups are there; fewer than `count` means none are handed out."""
    request_id: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    """Of this request: a retry with the same id gets the same groups."""


class SampleRequest(Wire):
    """Body of `POST /groups/sample`."""

    count: int = Field(gt=0, le=65536)
    min_version: int = Field(0, ge=0)
    priority_exponent: float = Field(0.6, ge=0)
    importance_exponent: float = Field(0.4, ge=0, le=1)
    max_times_sampled: int | None = Field(None, gt=0)
    seed: int = Field(0, ge=0)


class GroupIds(Wire):
    """Body of `POST /groups/ack`."""

    ids: list[str] = Field(min_length=1)


class PriorityUpdate(Wire):
    """Body of `POST /groups/priorities`."""

    ids: list[str] = Field(min_length=1)
    priorities: list[Annotated[float, Field(ge=0)]]
