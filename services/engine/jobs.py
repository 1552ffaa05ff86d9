"""The engine's work: a job is one prompt, its sequences are the requested completions."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from common import Json
from common.clients.rollout import sample_seed
from common.wire.schemas import AtMost, Int32
from learning.routing import Experts
from services.engine.sampling import stream_keys

MAX_N = 1024
"""Most completions of a prompt."""
ABORTED = "Aborted"
ABORTED_WAITING = "Abort in waiting queue"


_Stop = Annotated[str, Field(max_length=1000)]


class SamplingParams(BaseModel):
    """`sampling_params` of `/generate`, by SGLang's names."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", frozen=True)

    n: int = Field(1, ge=1, le=MAX_N)
    max_new_tokens: int = Field(128, ge=0)
    """0 only when the log-probabilities of the prompt are requested."""
    min_new_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    """-1 or 0: all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    sampling_seed: int | None = None
    stop: _Stop | Annotated[list[_Stop], AtMost(256)] = []
    """Texts that end a completion."""
    stop_token_ids: Annotated[list[int], AtMost(256)] = []
    """Tokens that end a completion; in a job, the model's end-of-text too."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def stop_in(self, last: Callable[[int], str]) -> str | None:
        """Returns the stop text that a completion has reached, or None; `last(n)` is the text of
        its last n tokens.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        longest = max((len(stop.encode()) for stop in stops), default=0)
        if not longest:
            return None
        text = last(1 + longest)
        return next((stop for stop in stops if stop and stop in text), None)


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
    finish: Json | None = None
    version: str = ""

    @property
    def so_far(self) -> list[int]:
        """The prompt, and the tokens that a retracted sequence has generated already."""
        return self.job.prompt + self.tokens

    def note_version(self, version: str, position: int) -> None:
        """Records that tokens from `position` on come from `version`."""
        if not self.versions or self.versions[-1][0] != version:
            earlier = [span for span in self.versions if span[1] < position]
            self.versions = [*earlier, (version, position)]

    def spans(self) -> list[Json]:
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
        # An array: transformers looks at every element of a list, which takes longer than decoding.
        text: str = tokenizer.decode(
            np.array(kept, np.int64), skip_special_tokens=self.job.sampling.skip_special_tokens
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

    def start(self, default_seed: int) -> None:
        """Creates the sequences; `default_seed` is for requests without a seed."""
        self.done.set_running_or_notify_cancel()  # from here on only the engine may resolve it
        seed = default_seed if self.sampling.sampling_seed is None else self.sampling.sampling_seed
        keys = stream_keys([sample_seed(seed, index) for index in range(self.n)])
        for index, key in enumerate(keys):
            name = self.rid if self.n == 1 else f"{self.rid}-{index}"
            self.sequences.append(Sequence(self, name, key))
