"""Reward functions with the names and results of those in `trl.rewards`, for chats."""

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = [
    "accuracy_reward",
    "get_soft_overlong_punishment",
    "reasoning_accuracy_reward",
    "think_format_reward",
]
Chats = list[list[dict[str, str]]]
_F = TypeVar("_F", bound=Callable[..., Any])


def _gives_verdicts(function: _F) -> _F:
    """Declares that 1 is for a right answer and 0 for a wrong one."""
    vars(function)["gives_verdicts"] = True
    return function


@_gives_verdicts
def accuracy_reward(completions: Chats, solution: list[str], **_: Any) -> list[float | None]:
    """Returns 1 for an answer in LaTeX that equals the solution, otherwise 0; None for a solution
    that cannot be read.
    """
    answers = [completion[0]["content"] for completion in completions]
    return [_equal(*pair) for pair in zip(answers, solution, strict=True)]


@_gives_verdicts
def reasoning_accuracy_reward(
    completions: Chats,
    solution: list[str],
    reasoning_delimiters: list[str] | None = None,
    **_: Any,
) -> list[float | None]:
    """Returns what `accuracy_reward` gives for the text after the reasoning; 0 if the reasoning has
    no end.
    """
    rewards: list[float | None] = []
    for completion, truth in zip(completions, solution, strict=True):
        text = completion[0]["content"]
        ends = [end for end in reasoning_delimiters or ["</think>"] if end in text]
        rewards.append(_equal(text.rpartition(ends[0])[2], truth) if ends else 0.0)
    return rewards


def _equal(answer: str, solution: str) -> float | None:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    gold = parse(solution)
    if not gold:
        return None
    latex = LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(units=True),
    )
    found = parse(answer, extraction_config=[latex], extraction_mode="first_match")
    return float(verify(gold, found))


def think_format_reward(completions: Chats, **_: Any) -> list[float]:
    """Returns 1 for an answer that begins with `<think>`, its only one, and has `</think>`."""
    rewards = []
    for completion in completions:
        text = completion[0]["content"]
        is_formatted = text.startswith("<think>") and text.count("<think>") == 1
        rewards.append(float(is_formatted and "</think>" in text))
    return rewards


def get_soft_overlong_punishment(
    max_completion_len: int, soft_punish_cache: int
) -> Callable[..., list[float]]:
    """Returns the punishment of DAPO (arXiv:2503.14476, eq. 13): 0 up to `soft_punish_cache` tokens
    below the limit, from there falling to −1 at the limit.
    """
    free = max_completion_len - soft_punish_cache

    def soft_overlong_punishment_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        over = [max(0, len(token_ids) - free) for token_ids in completion_ids]
        return [-min(1.0, tokens / max(1, soft_punish_cache)) for tokens in over]

    return soft_overlong_punishment_reward
