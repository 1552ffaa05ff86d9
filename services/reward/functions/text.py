"""Reward functions over the text alone: its format, length and repetitions."""

from collections.abc import Sequence
from typing import Any

import regex

from common.errors import ConfigError
from services.reward.functions.base import (
    Completions,
    DetailedRewardFunction,
    RewardFunction,
    Score,
    Scores,
    check_positive,
    text_of,
)

_SEARCH_S = 1.0  # CPU seconds for one pattern in one completion
_THOUGHT = regex.compile(r"<(think(?:ing)?|thoughts?|reason(?:ing)?|reflection|scratchpad)>")
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD = regex.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")


class FormatRewardFunction(DetailedRewardFunction):
    """1.0 for a completion in which every required pattern and no forbidden one is found, else 0.0.

    A dot also matches line ends, and `^` and `$` match at every line: `<think>.*</think>` finds
    multi-line thoughts. A completion has no score if a pattern takes more than one CPU second in
    it.

    A required pattern with `<think>` (or `<thinking>`, `<reasoning>`, …) is not found in a
    completion that has this mark more often than the pattern. In a completion that only has the
    closing mark, the opening one counts as written, since chat templates end prompts with it.

    Args:
        required: regular expressions, searched anywhere in the text.
        forbidden: regular expressions, searched anywhere in the text.

    Raises:
        ConfigError: a pattern is not a regular expression, or there is none at all.
    """

    name = "format"

    def __init__(self, required: Sequence[str] = (), forbidden: Sequence[str] = ()) -> None:
        if not required and not forbidden:
            raise ConfigError(
                "the format reward has no pattern",
                field="required",
                remedy="give at least one pattern",
            )
        self._required = _compiled("required", required)
        self._forbidden = _compiled("forbidden", forbidden)

    def scores(self, completions: Completions, **kwargs: Any) -> Scores:
        """Returns 1.0 or 0.0 for each completion, no value if a pattern takes too long."""
        return [self._score(text_of(completion)) for completion in completions]

    def _score(self, text: str) -> Score:
        for patterns, wanted in ((self._required, True), (self._forbidden, False)):
            for pattern in patterns:
                searched = _with_opened_thought(text, pattern.pattern) if wanted else text
                if searched is None:
                    return Score(0.0)
                try:
                    found = bool(pattern.search(searched, timeout=_SEARCH_S))
                except TimeoutError:
                    return Score(
                        None,
                        "timeout",
                        reason=f"the pattern {pattern.pattern!r:.80} takes more than {_SEARCH_S:g} "
                        "CPU s",
                    )
                if found != wanted:
                    return Score(0.0)
        return Score(1.0)


def _with_opened_thought(text: str, pattern: str) -> str | None:
    """Returns a completion with the marks of thoughts that its prompt has opened; None when it
    opens thoughts more often than the pattern.
    """
    opened = _THOUGHT.findall(pattern)
    for name in set(opened):
        marks = regex.findall(rf"(?<![`\"'])<(/?){name}>", text)  # without quoted ones
        if marks[:1] == ["/"]:
            marks.append("")
            thought = text.partition(f"</{name}>")[0]
            # Templates write a line end too; an empty thought stays empty.
            gap = "\n" if thought.strip() and not thought.startswith("\n") else ""
            text = f"<{name}>{gap}{text}"
        if marks.count("") > opened.count(name):
            return None
    return text


class LengthPenaltyFunction(RewardFunction):
    """0.0 up to `soft_chars` characters, then falling linearly to -1.0 at `hard_chars` and beyond.

    The soft overlong punishment of DAPO (arXiv:2503.14476, eq. 13), in characters. Raises
    ConfigError unless 0 <= `soft_chars` < `hard_chars`.
    """

    name = "length"

    def __init__(self, soft_chars: int = 4000, hard_chars: int = 8000) -> None:
        if not 0 <= soft_chars < hard_chars:
            raise ConfigError(
                "soft_chars is not below hard_chars",
                field="soft_chars",
                value=soft_chars,
                remedy="lower soft_chars",
            )
        self._soft = soft_chars
        self._hard = hard_chars

    def __call__(self, completions: Completions, **kwargs: Any) -> list[float]:
        """Returns a number in [-1, 0] for each completion."""
        span = self._hard - self._soft
        shares = ((len(text_of(each)) - self._soft) / span for each in completions)
        return [-min(1.0, max(0.0, share)) for share in shares]


class RepetitionPenaltyFunction(RewardFunction):
    """Minus the share of word n-grams that are repetitions: 0.0 for a text without repetition, near
    -1.0 for a loop.

    In scripts without spaces (Chinese, Japanese, Thai, …), and in words of more than five n-grams,
    every character is a word. Raises ConfigError when `ngram` is not above 0.
    """

    name = "repetition"

    def __init__(self, ngram: int = 20) -> None:
        check_positive(ngram=ngram)
        self._ngram = ngram

    def __call__(self, completions: Completions, **kwargs: Any) -> list[float]:
        """Returns a number in (-1, 0] for each completion."""
        return [self._penalty(text_of(completion)) for completion in completions]

    def _penalty(self, text: str) -> float:
        words: list[str] = []
        for word in _WORD.findall(text):
            words += word if len(word) > 5 * self._ngram else [word]
        total = len(words) - self._ngram + 1
        # Hashes, because n-grams of a long text would take n times its memory.
        ngrams = {hash(tuple(words[i : i + self._ngram])) for i in range(total)}
        return len(ngrams) / total - 1 if total > 0 else 0.0


def _compiled(argument: str, patterns: Sequence[str]) -> list[regex.Pattern[str]]:
    try:
        if isinstance(patterns, str):
            raise TypeError("a single text and no list")
        return [regex.compile(pattern, regex.DOTALL | regex.MULTILINE) for pattern in patterns]
    except (TypeError, regex.error) as error:
        raise ConfigError(
            f"not a list of regular expressions: {error}",
            field=f"reward.functions.format.{argument}",
            value=getattr(error, "pattern", patterns),
            remedy="correct the pattern",
        ) from None
