"""What the server of Tinker's API and the models (`learner`) tell each other. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from numpy.typing import NDArray
from pydantic import ConfigDict, Field, NonNegativeFloat

Array = NDArray[Any]
"""int64 or float32."""
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
WITHOUT_STABLE_REINFORCE = (
    "use loss_fn importance_sampling, cispo, ppo or gspo, or start the server with "
    "tinker.stable_reinforce cispo, which computes cispo in its place"
)
_Beta = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class LoraSpec:
    """The adapter of a run, as in Tinker's `LoraConfig`."""

    __pydantic_config__ = _STRICT
    rank: Annotated[int, Field(ge=1, le=1024)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Draws the adapter's first numbers; None means 0. The same seed gives the same bits."""
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class Datum:
    """A sequence of T tokens that a model reads, with what a loss reads for each of them."""

    tokens: Sequence[int]
    """[T]"""
    inputs: Mapping[str, Array] = field(default_factory=dict)
    """Tinker's `loss_fn_inputs`, dense: [T] each, or [T, K] for K targets of each token."""


@dataclass(frozen=True)
class AdamParams:
    """Tinker's `AdamParams` of one step."""

    __pydantic_config__ = _STRICT
    learning_rate: NonNegativeFloat = 1e-4
    beta1: _Beta = 0.9
    beta2: _Beta = 0.95
    eps: NonNegativeFloat = 1e-12
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled."""
    grad_clip_norm: NonNegativeFloat = 0.0
    """Largest norm of all gradients of the run together; 0: they are not clipped."""


@dataclass(frozen=True)
class Outputs:
    """The result of a pass."""

    logprobs: list[Array]
    """Those of the targets of each datum, float32 in their shape."""
    metrics: dict[str, float]
    """By Tinker's names, which end in how a client joins those of several requests, as in
    `loss:sum`."""
