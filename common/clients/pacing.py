"""Splits a completion into several requests, to enforce a time limit or a thinking budget, which no
engine offers.

An unfinished completion continues in another request, whose prompt includes the tokens so far;
engines have them cached. When the thinking budget is used up, the end of the thought is inserted.
These tokens are not sampled, so their log-probability is 0 and they have no gradient.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_THOUGHT_END = f"\n{THINK_CLOSE}\n\n"
_FIRST_TOKENS = 64
"""With a time limit: tokens of the first request."""
_FEWEST_TOKENS = 16
"""With a time limit: the fewest tokens of a later request."""
_BY_TOKEN = (
    "output_token_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)


class SendRequest(Protocol):
    """Makes one request to an engine and returns SGLang's answers."""

    def __call__(
        self, prompt: list[int], *, n: int, max_tokens: int, min_tokens: int, number: int
    ) -> Awaitable[list[dict[str, Any]]]:
        """`number` is the index of the request, from which its seed is derived."""
        ...


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a completion besides its number of tokens."""

    tokenizer: Any
    timeout_s: float | None = None
    """Seconds from the first request after which a completion is cut."""
    thinking_tokens: int | None = None
    """Tokens after which an open thought is ended."""

    def size(self, done: int, max_tokens: int, passed_s: float) -> int:
        """Returns the tokens of the next request, after `done` tokens and `passed_s` seconds; 0:
        cut the completion.
        """
        left = max_tokens - done
        if self.thinking_tokens is not None and done < self.thinking_tokens:
            left = min(left, self.thinking_tokens - done)
        if self.timeout_s is None:
            return left
        if not done:
            return min(left, _FIRST_TOKENS)
        if passed_s >= self.timeout_s:
            return 0

        tokens_per_s = done / max(passed_s, 1e-9)
        fitting = int(tokens_per_s * (self.timeout_s - passed_s))
        return min(left, max(_FEWEST_TOKENS, fitting))


async def generate_within(
    limits: RequestLimits,
    send: SendRequest,
    prompt: Sequence[int],
    *,
    n: int,
    max_tokens: int,
    min_tokens: int = 0,
    stops: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Returns n answers within the limits, each as if it came from one request. A cut answer ends
    with `length`.

    Args:
        limits: the time limit and the thinking budget.
        send: makes one request.
        prompt: the token ids of the prompt.
        n: number of completions.
        max_tokens: maximum tokens per completion.
        min_tokens: minimum tokens per completion.
        stops: texts that end a completion; searched here only across the border between two
            requests.
    """
    began = time.monotonic()
    size = limits.size(0, max_tokens, 0.0)
    first = await send(
        list(prompt), n=n, max_tokens=size, min_tokens=min(min_tokens, size), number=0
    )

    async def finish(index: int, answer: dict[str, Any]) -> dict[str, Any]:
        piece = _Piece(answer, list(answer["output_ids"]))
        requests = 0

        while piece.is_open and len(piece.tokens) < max_tokens:
            done = len(piece.tokens)
            over_budget = limits.thinking_tokens is not None and done >= limits.thinking_tokens
            if over_budget and not piece.budget_applied:
                piece.end_thought(limits.tokenizer, prompt, max_tokens)
                continue

            size = limits.size(done, max_tokens, time.monotonic() - began)
            if not size:
                break

            requests += 1
            (more,) = await send(
                [*prompt, *piece.tokens],
                n=1,
                max_tokens=size,
                min_tokens=min(max(0, min_tokens - done), size),
                number=index + n * requests,
            )
            piece.append(more)
            piece.cut(limits.tokenizer, stops, done)

        return piece.finished(limits.tokenizer, len(prompt))

    finished = [finish(index, answer) for index, answer in enumerate(first)]
    return list(await asyncio.gather(*finished))


@dataclass
class _Piece:
    """One completion so far, in the form of SGLang's answer."""

    answer: dict[str, Any]
    tokens: list[int]
    budget_applied: bool = False
    """Whether the thinking budget has been applied."""
    inserted: dict[int, int] = field(default_factory=dict)
    """Inserted tokens, by position."""

    @property
    def meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = self.answer["meta_info"]
        return meta

    @property
    def is_open(self) -> bool:
        return bool(self.meta["finish_reason"]["type"] == "length")

    def append(self, more: dict[str, Any]) -> None:
        """Appends an answer that continues this one."""
        done = len(self.tokens)
        new = more["meta_info"]
        self.tokens += more["output_ids"]

        spans = _spans(self.meta, done)
        for span in _spans(new, len(more["output_ids"])):
            moved = {"start": span["start"] + done, "end": span["end"] + done}
            spans.append({"version": span["version"], **moved})

        joined = {name: [*self.meta[name], *new[name]] for name in _BY_TOKEN if name in self.meta}
        self.answer["meta_info"] = {**self.meta, **new, **joined, "weight_versions": _merged(spans)}

    def end_thought(self, tokenizer: Any, prompt: Sequence[int], max_tokens: int) -> None:
        """Inserts the end of the thought, if a thought is open."""
        self.budget_applied = True
        text = tokenizer.decode([*prompt, *self.tokens])
        if text.rfind(THINK_OPEN) <= text.rfind(THINK_CLOSE):
            return
        done = len(self.tokens)
        ids = tokenizer(_THOUGHT_END, add_special_tokens=False).input_ids[: max_tokens - done]
        self.inserted |= dict(enumerate(ids, done))

        # Nobody sampled these tokens: each was the only candidate, with a log-probability of 0.
        by_token: dict[str, list[Any]] = {
            "output_token_logprobs": [[0.0, token, None] for token in ids],
            "output_token_sampling_mask": [[token] for token in ids],
            "output_token_sampling_logprobs": [0.0] * len(ids),
        }
        meta = {name: values for name, values in by_token.items() if name in self.meta}
        last = _spans(self.meta, done)[-1]["version"]
        meta["weight_versions"] = [{"version": last, "start": 0, "end": len(ids)}]
        self.append({"output_ids": ids, "meta_info": meta})

    def cut(self, tokenizer: Any, stops: Sequence[str], border: int) -> None:
        """Ends the completion at the first stop text found in the tokens around `border`."""
        width = 1 + max((len(stop.encode()) for stop in stops), default=0)
        for end in range(border + 1, min(len(self.tokens), border + width) + 1):
            text = tokenizer.decode(self.tokens[max(0, end - width) : end])
            matched = next((stop for stop in stops if stop in text), None)
            if matched is None:
                continue

            spans = _spans(self.meta, len(self.tokens))
            kept = [{**span, "end": min(span["end"], end)} for span in spans if span["start"] < end]
            short = {name: self.meta[name][:end] for name in _BY_TOKEN if name in self.meta}
            short["weight_versions"] = kept
            short["finish_reason"] = {"type": "stop", "matched": matched}
            self.tokens = self.tokens[:end]
            self.answer["meta_info"] = self.meta | short
            return

    def finished(self, tokenizer: Any, prompt_tokens: int) -> dict[str, Any]:
        """Returns the complete answer."""
        if len(self.tokens) == len(self.answer["output_ids"]):
            return self.answer  # one request was enough
        meta = self.meta | {"prompt_tokens": prompt_tokens, "completion_tokens": len(self.tokens)}
        if self.is_open:
            meta["finish_reason"] = {"type": "length", "length": len(self.tokens)}

        # Without truncated sampling the engine lists no candidates. An inserted token was the only
        # one at its place; an empty list stands for a token sampled from all.
        pairs = meta.get("output_token_logprobs")
        if self.inserted and pairs is not None and "output_token_sampling_mask" not in meta:
            positions = range(len(self.tokens))
            candidates = [[self.inserted[i]] if i in self.inserted else [] for i in positions]
            meta["output_token_sampling_mask"] = candidates
            meta["output_token_sampling_logprobs"] = [pair[0] for pair in pairs]

        matched = meta["finish_reason"].get("matched")
        ids = self.tokens[:-1] if isinstance(matched, int) else self.tokens
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        if isinstance(matched, str):
            text = text.partition(matched)[0]
        return {**self.answer, "text": text, "output_ids": self.tokens, "meta_info": meta}


def _spans(meta: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
    """Returns a list of its own with the spans (version, start, end) of an answer's tokens."""
    spans = meta.get("weight_versions")
    if spans:
        return list(spans)
    return [{"version": meta["weight_version"], "start": 0, "end": tokens}]


def _merged(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins adjacent spans of the same version."""
    found: list[dict[str, Any]] = []
    for span in spans:
        if found and found[-1]["version"] == span["version"]:
            found[-1] = {**found[-1], "end": span["end"]}
        else:
            found.append(span)
    return found
