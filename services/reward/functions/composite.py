"""Combines several reward functions into one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from common.errors import ConfigError
from common.wire.schemas import RewardStatus
from services.reward.functions.base import (
    Completions,
    DetailedRewardFunction,
    RewardFunction,
    Score,
    Scores,
    own_copy,
)

_SEVERITY = ("died", "error", "timeout", "unparsable", "unevaluated", "ok", "inapplicable")
assert set(_SEVERITY) == set(get_args(RewardStatus))


class CompositeRewardFunction(DetailedRewardFunction):
    """The weighted sum of other functions. If one of them has no score, the sum has none: an error
    is not a zero.

    `scores` reports the score of every part by its name, before weights.

    Args:
        functions: the parts, with distinct names.
        weights: weight of each part, in the same order; 1.0 each when None.
        name: name of this function.

    Raises:
        ConfigError: the number of weights is wrong, or two parts have the same name.
    """

    name = "composite"

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        name: str = "composite",
    ) -> None:
        self.weights = weights_of(functions, weights, "weights")
        check_names([function.name for function in functions])
        self.functions = list(functions)
        self.name = name
        self.bounds_itself = all(function.bounds_itself for function in functions)
        self.gives_verdicts = any(function.gives_verdicts for function in functions)

    def scores(self, completions: Completions, **kwargs: Any) -> Scores:
        """Returns the weighted sums with their components. Raises what a part raises."""
        parts: list[dict[str, Score]] = [{} for _ in completions]
        for function in self.functions:
            scores = function.scores(own_copy(completions), **own_copy(kwargs))
            for part, score in zip(parts, scores, strict=True):
                part[function.name] = score
        return [combine(part, self.weights) for part in parts]


def weights_of(
    functions: Sequence[RewardFunction], weights: Sequence[float] | None, field: str
) -> dict[str, float]:
    """Returns the weight of each function by its name, 1 each for None. Raises ConfigError that
    names `field` for another number of weights, and for one that is not finite.
    """
    weights = [1.0] * len(functions) if weights is None else weights
    if not functions or len(weights) != len(functions) or not all(map(math.isfinite, weights)):
        raise ConfigError(
            f"there are {len(functions)} reward functions, but not as many finite weights",
            field=field,
            value=weights,
            remedy="give at least one function, and a finite weight for each",
        )
    return {
        function.name: float(weight) for function, weight in zip(functions, weights, strict=True)
    }


def combine(parts: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """Combines scores: the weighted sum, the worst status, and correct if all verifying parts are.

    A part that does not apply is left out; if no part applies, the whole does not apply.
    """
    applicable = {name: part for name, part in parts.items() if part.status != "inapplicable"}
    components: dict[str, float | None] = dict.fromkeys(parts)
    if not applicable:
        return Score(
            None, "inapplicable", components=components, reason="no reward function applies to it"
        )

    total: float | None = 0.0
    reason = ""
    for name, part in applicable.items():
        components[name] = part.value
        for inner, value in part.components.items():
            components[f"{name}/{inner}"] = value
        if part.value is None:
            reason = reason or (part.reason and f"{name}: {part.reason}")
        if part.value is None or total is None:
            total = None
        else:
            total += weights.get(name, 1.0) * part.value

    verdicts = [part.correct for part in applicable.values() if part.correct is not None]
    answers = [part.answer for part in applicable.values() if part.answer is not None]
    return Score(
        value=total,
        status=min((part.status for part in applicable.values()), key=_SEVERITY.index),
        correct=all(verdicts) if verdicts else None,
        answer=answers[0] if answers else None,
        components=components,
        reason=reason,
    )


def check_names(names: Sequence[str]) -> None:
    """Raises ConfigError when two reward functions have the same name: their components would be
    indistinguishable.
    """
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                "two reward functions have the same name",
                field="name",
                value=name,
                remedy="rename one of them",
            )
