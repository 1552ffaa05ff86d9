"""The engine's work: a job is one prompt, its sequences are the requested completions."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from services.engine.sampling import sample_seed, stream_key

ABORTED = "Aborted"
ABORTED_WAITING = "Abort in waiting queue"


@dataclass(frozen=True)
class SamplingParams:
    """Checked sampling parameters. `stop_ids` are the tokens that end a completion, end-of-text included."""

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
        key: seeds its random numbers.
        tokens, logprobs: current when it has left the batch; the lists are replaced, never changed.
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
    versions: list[tuple[str, int]] = field(default_factory=list)
    retractions: int = 0
    cached_tokens: int = 0
    finish: dict[str, Any] | None = None
    version: str = ""

    def note_version(self, version: str, position: int) -> None:
        """Records that tokens from `position` on come from `version`."""
        if not self.versions or self.versions[-1][0] != version:
            self.versions = [span for span in self.versions if span[1] < position] + [(version, position)]

    def spans(self) -> list[dict[str, Any]]:
        """Returns `[{"version", "start", "end"}]` over the tokens so far."""
        size = len(self.tokens)
        begun = [span for span in self.versions if span[1] < size]
        ends = [start for _, start in begun[1:]] + [size]
        return [{"version": v, "start": start, "end": end} for (v, start), end in zip(begun, ends, strict=False)]

    def matched_stop(self, tokenizer: Any) -> str | None:
        """Returns the stop string that the newest tokens completed, if any."""
        params = self.job.sampling
        if not params.stop:
            return None
        # A character has at most four bytes, a token at least one: older tokens cannot be part of a new match.
        reach = 4 * max(len(stop) for stop in params.stop) + 1
        tail = tokenizer.decode(self.tokens[-reach:], skip_special_tokens=params.skip_special_tokens)
        found = [(tail.find(stop), stop) for stop in params.stop if stop in tail]
        return min(found)[1] if found else None

    def text(self, tokenizer: Any) -> str:
        """Returns the text without its stop token and up to its stop string, unless the stop is kept."""
        params, matched = self.job.sampling, (self.finish or {}).get("matched")
        cut = isinstance(matched, int) and not params.keep_stop
        text: str = tokenizer.decode(self.tokens[:-1] if cut else self.tokens, skip_special_tokens=params.skip_special_tokens)
        return text.partition(matched)[0] if isinstance(matched, str) and not params.keep_stop else text


@dataclass(eq=False)
class GenerationJob:
    """One prompt and its n completions.

    Attributes:
        rid: the name by which it can be aborted.
        logprobs: whether the answer shows them.
        prompt_logprobs_from: first prompt token whose log-probability is wanted; None for none.
        adapter: name of the LoRA adapter to use; None: the model itself.
        on_token: called on the engine's thread after each token of a sequence and at its end (for streaming).
        done: resolves when every sequence is finished; fails with ServiceError.
    """

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    n: int = 1
    logprobs: bool = False
    prompt_logprobs_from: int | None = None
    adapter: str | None = None
    on_token: Callable[[Sequence], None] | None = None
    created: float = field(default_factory=time.monotonic)
    prompt_logprobs: list[float] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    done: "Future[list[Sequence]]" = field(default_factory=Future)

    def start(self, default_seed: int, new_id: Callable[[], str]) -> None:
        """Creates the sequences; `default_seed` is for requests without a seed."""
        self.done.set_running_or_notify_cancel()  # from here on only the engine may resolve it
        seed = default_seed if self.sampling.seed is None else self.sampling.seed
        for index in range(self.n):
            name = self.rid if self.n == 1 else new_id()
            self.sequences.append(Sequence(self, name, stream_key(sample_seed(seed, index))))


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

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt are wanted and not yet computed."""
        first = self.sequences[0]
        return first.job.prompt_logprobs_from is not None and not first.tokens
