"""What the server remembers besides operations, as one JSON document each."""

from dataclasses import dataclass, field

from common import Json
from trainer.tinker.interface import LoraSpec


@dataclass
class TinkerSession:
    """A client's process, which owns runs and samplers."""

    id: str
    owner: str
    """Name of the client whose key it has."""
    about: Json
    """What the client says of it."""
    finished: bool = False


@dataclass
class TinkerRun:
    """A LoRA adapter that is trained."""

    id: str
    session: str
    owner: str
    lora: LoraSpec
    used: float
    about: Json | None = None
    snapshot: int = -1
    """Number of the operation after which its state was saved; -1: none was."""
    copies: int = 0
    """How often its weights were saved for samplers since they last changed."""
    failed: bool = False
    """It could not be created. It is kept for its error only, and is no run of the client's."""


@dataclass
class Sampler:
    """A sampling session: the weights that answer its requests never change."""

    id: str
    session: str
    owner: str
    path: str | None
    """A checkpoint; None: the base model."""
    copy: int = 0
    """How many samplers of the session had this path before it."""
    clones: int = 0
    """Copies of its client that were given a number."""


@dataclass
class Checkpoint:
    """Files of a run under a `tinker://` path."""

    path: str
    run: str
    owner: str
    kind: str
    """`weights`, `sampler_weights` or `external_weights`."""
    name: str
    folder: str
    """Below the run's folder. It is new for each checkpoint, also when a name is used again."""
    created: float
    size: int
    checksum: str = ""
    """The checksum of an adapter for engines."""
    expires: float | None = None
    about: dict[str, str] | None = None
    unnamed: bool = False
    """For one sampler; the newest of a run are kept."""
    copies: int = 0
    """Those of the run before it was saved."""

    @property
    def id(self) -> str:
        return self.path


Record = TinkerSession | TinkerRun | Sampler | Checkpoint
"""What is kept under its `id`, which no two records share."""


@dataclass(frozen=True)
class TinkerResult:
    """How an operation ended."""

    ok: bool
    content: bytes
    """Its answer; of one that failed, JSON with the error."""
    is_json: bool
    finished: int = 0
    """Counts the results of the server, for clients that ask what is new."""
    weights: str = ""
    """Path and checksum of the weights that sampled."""


@dataclass(frozen=True)
class TinkerOperation:
    """A request that was accepted. `line` is the run or the sampler whose operations are counted by
    `seq`.
    """

    line: str
    seq: int
    kind: str
    body: bytes = field(repr=False)

    @property
    def request_id(self) -> str:
        return f"{self.line}:op:{self.seq}"
