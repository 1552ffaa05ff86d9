"""What the server of Tinker's API asks of the models: operations on runs, each a LoRA adapter with
its own gradients and optimiser, on one base model.

The operations of a run are deterministic: the same ones in the same order give the same bits,
whatever other runs do in between. One that raises InvalidInput, NotFound or Conflict changes
nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

from numpy.typing import NDArray
from pydantic import ConfigDict, Field

Array = NDArray[Any]
"""int64 or float32."""
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
WITHOUT_STABLE_REINFORCE = (
    "use loss_fn importance_sampling, cispo, ppo or gspo, or start the server with "
    "--tinker.stable_reinforce cispo, which computes cispo in its place"
)
_Amount = Annotated[float, Field(ge=0)]
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
    learning_rate: _Amount = 1e-4
    beta1: _Beta = 0.9
    beta2: _Beta = 0.95
    eps: _Amount = 1e-12
    weight_decay: _Amount = 0.0
    """Decoupled."""
    grad_clip_norm: _Amount = 0.0
    """Largest norm of all gradients of the run together; 0: they are not clipped."""


@dataclass(frozen=True)
class Outputs:
    """The result of a pass."""

    arrays: list[dict[str, Array]]
    """`loss_fn_outputs`: the arrays of each datum, float32 by name."""
    metrics: dict[str, float]
    """By Tinker's names, which end in how a client joins those of several requests, as in
    `loss:sum`."""


class TinkerLearner(Protocol):
    """All runs on one base model. With several ranks rank 0 has it, and the others follow."""

    def create(self, run: str, spec: LoraSpec) -> None:
        """Adds a run, whose adapter has no effect yet. Raises Conflict for one that exists."""

    def forward(
        self, run: str, data: Sequence[Datum], loss: str, config: Mapping[str, float | str]
    ) -> Outputs:
        """Computes a loss without gradients."""

    def forward_backward(
        self, run: str, data: Sequence[Datum], loss: str, config: Mapping[str, float | str]
    ) -> Outputs:
        """Computes a loss and adds its gradient to the run's."""

    def optim_step(self, run: str, adam: AdamParams) -> dict[str, float]:
        """Applies the run's gradients, which are 0 afterwards; returns the metrics."""

    def save(self, run: str, folder: Path) -> None:
        """Writes a run to a folder that does not exist, durably: it has its name when all of it is
        on the disk. The state of the optimiser and the gradients are part of it.
        """

    def load(self, run: str, folder: Path, optimizer: bool) -> None:
        """Sets a run to what `save` wrote; creates it if it is not in memory. Without `optimizer`
        its optimiser begins anew, and gradients are 0.
        """

    def export_adapter(self, run: str, folder: Path) -> str:
        """Writes the adapter as PEFT's files to a folder that does not exist, durably; returns the
        checksum of its weights.
        """

    def unload(self, run: str) -> None:
        """Frees the memory of a run, which is lost unless it is saved; does nothing for one that
        is not in memory.
        """
