"""The engine's work: a job is one prompt, its sequences are the requested completions."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from common.clients.rollout import sample_seed
from common.wire.schemas import Int32
from learning.routing import Experts
from services.engine.sampling import stream_key

ABORTED = "Aborted"
ABORTED_WAITING = "Abort in waiting queue"


@dataclass(frozen=True)
class SamplingParams:
    """Checked sampling parameters.

    Attributes:
        top_k: 0 for all tokens.
        stop_ids: tokens that end a completion, end-of-text included.
        stops: texts that end one.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    seed: int | None = None
    skip_special_tokens: bool = True

    def stop_in(self, last: Callable[[int], str]) -> str | None:
        """Returns the stop text that a completion has reached, or None; `last(n)` is the text of
        its last n tokens.
        """
        if not self.stops:
            return None
        text = last(1 + max(len(stop.encode()) for stop in self.stops))
        return next((stop for stop in self.stops if stop in text), None)


@dataclass(eq=False)
class Sequence:
    """One completion.

    Attributes:
        key: seeds its random numbers.
        tokens, logprobs: current when it has left the batch; the lists are replaced, never changed.
        kept: per token, its log-probability among the tokens that truncation kept, and these
        tokens, if returned.
        experts: [tokens, layers · top_k] of the prompt and of what was generated since, but the
        last token, in parts, if returned; new ones when a retracted sequence is computed again.
        versions: (weight version, first token from it).
        cached_tokens: prompt tokens whose KV was copied from another sequence of the job.
        finish: SGLang's finish_reason; None while it runs.
        version: weight version at its end.
    """

    job: "GenerationJob"
    id: str
    key: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[tuple[float, Int32]] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    retractions: int = 0
    cached_tokens: int = 0
    finish: dict[str, Any] | None = None
    version: str = ""

    def note_version(self, version: str, position: int) -> None:
        """Records that tokens from `position` on come from `version`."""
        if not self.versions or self.versions[-1][0] != version:
            earlier = [span for span in self.versions if span[1] < position]
            self.versions = [*earlier, (version, position)]

    def spans(self) -> list[dict[str, Any]]:
        """Returns `[{"version", "start", "end"}]` over the tokens so far."""
        size = len(self.tokens)
        begun = [span for span in self.versions if span[1] < size]
        ends = [start for _, start in begun[1:]] + [size]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(begun, ends, strict=False)
        ]

    def text(self, tokenizer: Any) -> str:
        """Returns the text without its stop token or stop text."""
        matched = (self.finish or {}).get("matched")
        kept = self.tokens[:-1] if isinstance(matched, int) else self.tokens
        text: str = tokenizer.decode(
            kept, skip_special_tokens=self.job.sampling.skip_special_tokens
        )
        return text.partition(matched)[0] if isinstance(matched, str) else text


@dataclass(eq=False)
class GenerationJob:
    """One prompt and its n completions.

    Attributes:
        rid: its name in the answer.
        returns_logprobs: whether the answer shows them.
        returns_kept: whether it shows the tokens that truncation kept.
        returns_experts: whether it shows the experts that computed its tokens.
        adapter: name of the LoRA adapter to use; None: the model itself.
        done: resolves when every sequence is finished; fails with ServiceError.
    """

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    n: int = 1
    returns_logprobs: bool = False
    returns_kept: bool = False
    returns_experts: bool = False
    adapter: str | None = None
    created: float = field(default_factory=time.monotonic)
    sequences: list[Sequence] = field(default_factory=list)
    done: "Future[list[Sequence]]" = field(default_factory=Future)

    def start(self, default_seed: int, new_id: Callable[[], str]) -> None:
        """Creates the sequences; `default_seed` is for requests without a seed."""
        self.done.set_running_or_notify_cancel()  # from here on only the engine may resolve it
        seed = default_seed if self.sampling.seed is None else self.sampling.seed
        for index in range(self.n):
            name = self.rid if self.n == 1 else new_id()
            key = stream_key(sample_seed(seed, index))
            self.sequences.append(Sequence(self, name, key))


@dataclass(eq=False)
class PrefillGroup:
    """Sequences that wait for one prefill of the same tokens."""

    sequences: list[Sequence]

    @property
    def adapter(self) -> str | None:
        return self.sequences[0].job.adapter

    @property
    def tokens(self) -> list[int]:
        """The prompt, and the tokens that a retracted sequence has generated already."""
        first = self.sequences[0]
        return first.job.prompt + first.tokens
