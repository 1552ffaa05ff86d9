"""What the engine works on: a job is one prompt, its sequences are the completions asked for."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from services.engine.sampling import sample_seed, stream_key

ABORTED = "Aborted"
ABORTED_WAITING = "Abort in waiting queue"


@dataclass(frozen=True)
class Sampling:
    """How to sample; checked by the caller. `stop_ids` are the tokens that end a completion, end-of-text included."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    skip_special_tokens: bool = True
    keep_stop: bool = False


@dataclass(eq=False)
class Sequence:
    """One completion.

    Attributes:
        key: of its random numbers.
        tokens, logprobs: complete once it is out of the batch; the lists are replaced, never changed.
        versions: (weight version, first token from it).
        cached_tokens: prompt tokens whose KV was copied from another sequence of the job.
        finish: SGLang's finish_reason; None while it runs.
        version: of the weights when it finished.
    """

    job: "Job"
    id: str
    key: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    retractions: int = 0
    cached_tokens: int = 0
    finish: dict[str, Any] | None = None
    version: str = ""

    def note_version(self, version: str, position: int) -> None:
        """Tokens from `position` on come from `version`."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions = [span for span in self.versions if span[1] < position] + [(version, position)]

    def spans(self) -> list[dict[str, Any]]:
        """`[{"version", "start", "end"}]` over the tokens so far."""
        size = len(self.tokens)
        begun = [span for span in self.versions if span[1] < size]
        ends = [start for _, start in begun[1:]] + [size]
        return [{"version": v, "start": start, "end": end} for (v, start), end in zip(begun, ends, strict=False)]


@dataclass(eq=False)
class Job:
    """One prompt and n completions of it.

    Attributes:
        rid: the name by which it can be aborted.
        logprobs: whether the answer shows them.
        prompt_logprobs_from: log-probabilities of the prompt from this token on, None for none.
        adapter: name of the LoRA adapter that it is answered with; None: the model as it is.
        on_token: called on the engine's thread after each token of a sequence and when it is finished (for streaming).
        done: resolves when every sequence is finished; fails with ServiceError.
    """

    rid: str
    prompt: list[int]
    sampling: Sampling
    n: int = 1
    logprobs: bool = False
    prompt_logprobs_from: int | None = None
    adapter: str | None = None
    on_token: Callable[[Sequence], None] | None = None
    created: float = field(default_factory=time.monotonic)
    prompt_logprobs: list[float] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    done: "Future[list[Sequence]]" = field(default_factory=Future)

    def start(self, default_seed: int, names: Callable[[], str]) -> None:
        """Makes the sequences; `default_seed` counts when the request has none."""
        self.done.set_running_or_notify_cancel()  # from here on only the engine settles it
        seed = default_seed if self.sampling.seed is None else self.sampling.seed
        for index in range(self.n):
            name = self.rid if self.n == 1 else names()
            self.sequences.append(Sequence(self, name, stream_key(sample_seed(seed, index))))


@dataclass(eq=False)
class Ticket:
    """Sequences that wait for one prefill of the same tokens."""

    sequences: list[Sequence]

    @property
    def adapter(self) -> str | None:
        return self.sequences[0].job.adapter

    @property
    def tokens(self) -> list[int]:
        """The prompt, and what a retracted sequence has generated already."""
        first = self.sequences[0]
        return first.job.prompt + first.tokens
