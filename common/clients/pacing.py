"""Splits a completion into several requests, to enforce a time limit or a thinking budget, which no
engine offers.

An unfinished completion continues in another request, whose prompt includes the tokens so far;
engines have them cached. When the thinking budget is used up, the end of the thought is inserted.
These tokens are not sampled, so their log-probability is 0 and they have no gradient.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_END = f"\n{THINK_CLOSE}\n\n"
_FIRST = 64
_LEAST = 16
"""With a time limit: tokens of the first request, and the fewest tokens of a later one."""
_BY_TOKEN = (
    "output_token_logprobs",
    "output_token_sampling_mask",
    "output_token_sampling_logprobs",
)
Ask = Callable[[list[int], int, int, int, int], Awaitable[list[dict[str, Any]]]]
"""(prompt, completions, maximum tokens, minimum tokens, index of the request) -> SGLang's
answers."""


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a completion besides its number of tokens."""

    tokenizer: Any
    timeout_s: float | None = None
    """Seconds from the first request after which a completion is cut."""
    thinking_tokens: int | None = None
    """Tokens after which an open thought is ended."""

    def size(self, done: int, most: int, passed: float) -> int:
        """Returns the tokens of the next request, after `done` tokens and `passed` seconds; 0: cut
        the completion.
        """
        left = most - done
        if self.thinking_tokens is not None and done < self.thinking_tokens:
            left = min(left, self.thinking_tokens - done)
        if self.timeout_s is None:
            return left
        if not done:
            return min(left, _FIRST)
        fitting = int(done / max(passed, 1e-9) * (self.timeout_s - passed))
        return min(left, max(_LEAST, fitting)) if passed < self.timeout_s else 0


async def paced(
    limits: RequestLimits,
    ask: Ask,
    prompt: Sequence[int],
    n: int,
    most: int,
    least: int = 0,
    stops: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Returns n answers within the limits, each as if it came from one request. A cut answer ends
    with `length`.

    Args:
        limits: the time limit and the thinking budget.
        ask: makes one request.
        prompt: the token ids of the prompt.
        n: number of completions.
        most: maximum tokens per completion.
        least: minimum tokens per completion.
        stops: texts that end a completion; searched here only across the border between two
        requests.
    """
    began = time.monotonic()
    size = limits.size(0, most, 0.0)
    first = await ask(list(prompt), n, size, min(least, size), 0)

    async def finish(index: int, answer: dict[str, Any]) -> dict[str, Any]:
        piece = _Piece(answer, list(answer["output_ids"]))
        requests = 0
        while piece.is_open and len(piece.tokens) < most:
            done = len(piece.tokens)
            if (
                limits.thinking_tokens is not None
                and done >= limits.thinking_tokens
                and not piece.budget_applied
            ):
                piece.end_thought(limits.tokenizer, prompt, most)
                continue
            size = limits.size(done, most, time.monotonic() - began)
            if not size:
                break
            requests += 1
            number = index + n * requests
            (more,) = await ask(
                [*prompt, *piece.tokens], 1, size, min(max(0, least - done), size), number
            )
            piece.append(more)
            piece.cut(limits.tokenizer, stops, done)
        return piece.finished(limits.tokenizer, len(prompt))

    return list(await asyncio.gather(*(finish(*each) for each in enumerate(first))))


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
        spans = [
            {"version": span["version"], "start": span["start"] + done, "end": span["end"] + done}
            for span in _spans(new, len(more["output_ids"]))
        ]
        spans = [*_spans(self.meta, done), *spans]
        joined = {name: [*self.meta[name], *new[name]] for name in _BY_TOKEN if name in self.meta}
        self.answer["meta_info"] = {**self.meta, **new, **joined, "weight_versions": _merged(spans)}

    def end_thought(self, tokenizer: Any, prompt: Sequence[int], most: int) -> None:
        """Inserts the end of the thought, if a thought is open."""
        self.budget_applied = True
        text = tokenizer.decode([*prompt, *self.tokens])
        if text.rfind(THINK_OPEN) <= text.rfind(THINK_CLOSE):
            return
        done = len(self.tokens)
        ids = tokenizer(_END, add_special_tokens=False).input_ids[: most - done]
        self.inserted |= dict(enumerate(ids, done))
        values: list[list[Any]] = [
            [[0.0, token, None] for token in ids],
            [[token] for token in ids],
            [0.0] * len(ids),
        ]
        meta = {name: own for name, own in zip(_BY_TOKEN, values, strict=True) if name in self.meta}
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
            spans = [
                {**span, "end": min(span["end"], end)}
                for span in _spans(self.meta, len(self.tokens))
                if span["start"] < end
            ]
            short = {name: self.meta[name][:end] for name in _BY_TOKEN if name in self.meta}
            short |= {
                "weight_versions": spans,
                "finish_reason": {"type": "stop", "matched": matched},
            }
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
        if self.inserted and _BY_TOKEN[0] in meta and _BY_TOKEN[1] not in meta:
            meta[_BY_TOKEN[1]] = [
                [self.inserted[i]] if i in self.inserted else [] for i in range(len(self.tokens))
            ]
            meta[_BY_TOKEN[2]] = [pair[0] for pair in meta[_BY_TOKEN[0]]]
        matched = meta["finish_reason"].get("matched")
        ids = self.tokens[:-1] if isinstance(matched, int) else self.tokens
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        text = text.partition(matched)[0] if isinstance(matched, str) else text
        return {**self.answer, "text": text, "output_ids": self.tokens, "meta_info": meta}


def _spans(meta: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
    return meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": tokens}
    ]


def _merged(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins adjacent spans of the same version."""
    found: list[dict[str, Any]] = []
    for span in spans:
        if found and found[-1]["version"] == span["version"]:
            found[-1] = {**found[-1], "end": span["end"]}
        else:
            found.append(span)
    return found
